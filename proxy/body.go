package proxy

import (
	"errors"
	"io"
	"net/http"
	"runtime"
	"strconv"
	"sync"
	"time"

	"spillway/httperr"
)

// bodyPart is how many bytes of a body, if there are more to come, must arrive within
// ClientReadTimeout.
const bodyPart = 16 << 10

// readBody reads the whole body: retries need it, and net/http notices that a client has left
// only after it.
func (x *exchange) readBody() error {
	limit := int64(x.s.cfg.BodyLimitMB) << 20
	if x.req.ContentLength > limit {
		return x.unread(x.tooLarge())
	}
	x.upload.conn = *http.NewResponseController(x.w.Writer)
	x.s.uploads.add(&x.upload)
	defer x.s.uploads.remove(&x.upload)
	b := x.memory.begin(x.req.ContentLength)
	src := x.req.Body
	if x.req.ContentLength < 0 { // otherwise net/http sees to it that there are no more
		src = http.MaxBytesReader(x.w.Writer, src, limit)
	}
	for due := 0; ; {
		if len(b) == cap(b) {
			if b != nil {
				runtime.Gosched() // a client that never lets us wait is not to be served alone
				b = x.memory.grow()
			}
			if b == nil {
				return x.unread(x.noMemory())
			}
		}
		if x.bytesIn >= due { // bytes that trickle in do not extend the time
			now := x.start
			if due > 0 {
				now = time.Now()
			}
			due = x.bytesIn + bodyPart
			if err := x.allow(now.Add(x.s.cfg.ClientReadTimeout)); err != nil {
				return err
			}
		}
		n, err := src.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		x.bytesIn += n
		switch {
		case err == nil:
		case errors.Is(err, io.EOF):
			if x.body = x.memory.whole(len(b)); x.body == nil {
				return x.unread(x.noMemory())
			}
			x.client.serving()
			_ = src.Close()             // net/http would look for a rest before it answers
			return x.allow(time.Time{}) // the deadline would be taken for a lost client later
		default:
			return x.broken(err)
		}
	}
}

// allow gives the client until then to send, or for ever if that is zero.
func (x *exchange) allow(then time.Time) error {
	if err := x.upload.conn.SetReadDeadline(then); err != nil && !errors.Is(err, http.ErrNotSupported) {
		return unreadable(err)
	}
	if x.stopped() { // or the deadline that was to wake us is lost
		return x.ctx.Err()
	}
	return nil
}

// broken is what became of a body that ended in err.
func (x *exchange) broken(err error) error {
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return x.tooLarge()
	case x.stopped():
		return x.ctx.Err()
	}
	// net/http has ended the context, but the client may only have stopped sending.
	return x.unread(unreadable(err))
}

// unread is e for a request whose body is not worth reading: the connection ends with it.
func (x *exchange) unread(e *httperr.Error) *httperr.Error {
	x.w.Header()["Connection"] = []string{"close"}
	return e
}

func unreadable(err error) *httperr.Error {
	return &httperr.Error{Status: 400, Cause: httperr.Validation, Message: "The request body could not be read", Detail: err}
}

func (x *exchange) tooLarge() *httperr.Error {
	return httperr.New(http.StatusRequestEntityTooLarge,
		"Request body exceeds the limit of "+strconv.Itoa(x.s.cfg.BodyLimitMB)+" MiB (body-limit-mb)")
}

// noMemory is the refusal of a body that the budget has no room for.
func (x *exchange) noMemory() *httperr.Error {
	return &httperr.Error{
		Status: http.StatusServiceUnavailable, Cause: httperr.Unavailable, Reason: httperr.BodyMemory,
		Message: "Service temporarily unavailable: The requests in flight leave no memory for this body (body-memory-mb), please retry later",
	}
}

// headPool reuses buffers for the heads of requests to workers.
var headPool = sync.Pool{New: func() any { b := make([]byte, 0, smallPart); return &b }}

// keptHead is the most that such a buffer may have grown to, in bytes.
const keptHead = 256 << 10

func putHead(b *[]byte) {
	if cap(*b) <= keptHead {
		headPool.Put(b)
	}
}
