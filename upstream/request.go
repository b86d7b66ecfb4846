package upstream

import (
	"bytes"
	"fmt"
	"strconv"
	"sync"
	"time"
)

// Request is one request to the worker.
type Request struct {
	Method string // such as POST
	Path   string // as it goes on the wire: escaped, with the raw query, beginning with a slash
	// Head holds further header lines, each ended by CRLF, as AppendHeader makes them. Host
	// and Content-Length are added by Do; these and Transfer-Encoding must not be in it.
	Head []byte
	Body []byte // the whole body; never modified, and only TLS makes copies
	// HeadDeadline is when to give up waiting for the response head, or for the connection
	// (which then is ErrDial); zero is never. It is off again once the head has come.
	HeadDeadline time.Time
	// Once has a request of which something was written never be written again: where the connection
	// that was reused turns out to be dead only then, that is ErrReset, and for the caller to judge.
	Once bool
	// Sent, if not nil, is called when the worker's socket has taken what it takes at once, before
	// an answer is waited for: on the caller's goroutine, again if the request is sent again. It
	// must not block.
	Sent func()
}

// AppendHeader appends one header line to dst. Bytes that would end the line are replaced by
// spaces; that name is a token is the caller's to know.
func AppendHeader(dst []byte, name, value string) []byte {
	dst = append(dst, name...)
	dst = append(dst, ": "...)
	n := len(dst)
	dst = append(dst, value...)
	for i, c := range dst[n:] {
		if c == '\r' || c == '\n' || c == 0 {
			dst[n+i] = ' '
		}
	}
	return append(dst, '\r', '\n')
}

// check refuses what would break out of the request line or the head.
func (q *Request) check() error {
	if !token(q.Method) {
		return fmt.Errorf("upstream: %w: method %q", ErrRequest, q.Method)
	}
	if q.Path == "" || q.Path[0] != '/' {
		return fmt.Errorf("upstream: %w: path %q does not begin with a slash", ErrRequest, q.Path)
	}
	for i := range len(q.Path) {
		if c := q.Path[i]; c <= ' ' || c >= 0x7f {
			return fmt.Errorf("upstream: %w: path %q is not escaped", ErrRequest, q.Path)
		}
	}
	if len(q.Head) > 0 && (!bytes.HasSuffix(q.Head, crlf) || bytes.HasPrefix(q.Head, crlf) || bytes.Contains(q.Head, headEnd)) {
		return fmt.Errorf("upstream: %w: header lines are not each ended by one CRLF", ErrRequest)
	}
	return nil
}

// appendTo appends the head as it goes on the wire.
func (q *Request) appendTo(b []byte, c *Client) []byte {
	b = append(b, q.Method...)
	b = append(b, ' ')
	b = append(b, c.base...)
	b = append(b, q.Path...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = append(b, c.host...)
	b = append(b, '\r', '\n')
	if len(q.Body) > 0 || q.Method == "POST" || q.Method == "PUT" || q.Method == "PATCH" {
		b = append(b, "Content-Length: "...)
		b = strconv.AppendInt(b, int64(len(q.Body)), 10)
		b = append(b, '\r', '\n')
	}
	b = append(b, q.Head...)
	return append(b, '\r', '\n')
}

// maxPooledHead keeps one huge request head from staying in the pool.
const maxPooledHead = 64 << 10

// headBuffer is a request head on its way out.
type headBuffer struct{ b []byte }

var headBuffers = sync.Pool{New: func() any { return &headBuffer{make([]byte, 0, 4<<10)} }}

func (h *headBuffer) release() {
	if cap(h.b) <= maxPooledHead {
		h.b = h.b[:0]
		headBuffers.Put(h)
	}
}
