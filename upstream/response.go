package upstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"strings"
	"time"
)

// maxInterim is how many 1xx answers may come before the real one.
const maxInterim = 16

// Response is an answer whose body is still to be read. It belongs to one goroutine.
type Response struct {
	Status int // 200 to 999; 1xx are skipped
	// ContentLength is the declared length in bytes, or -1 if there is none. The answer to a
	// HEAD and a 304 have no body whatever it says.
	ContentLength int64

	conn     *conn           // nil after Close
	ctx      context.Context // kept to tell a client that left from a worker that failed
	stop     func() bool     // undoes the closing of the connection when ctx ends; nil if ctx never does
	sending  chan error      // result of the goroutine that sends the rest of the request; nil if there is none
	reused   bool
	lost     bool // the connection was gone before a byte came
	received bool // a byte has come
	keep     bool // the connection is fit for another exchange after this body
	deadline bool // a read deadline was set
	head     head
	in       input
	body     body
	pending  []byte // body bytes taken by next, not yet read; part of in.buf
	err      error  // once pending is read; io.EOF after a clean end
}

// Header returns the value of the first header line of that name, in any case, or "".
func (r *Response) Header(name string) string {
	for i := range r.head.fields {
		if f := &r.head.fields[i]; len(f.name) == len(name) && strings.EqualFold(f.name, name) {
			return f.value
		}
	}
	return ""
}

// Headers yields all header lines as they came: in order, hop-by-hop ones and repeated names
// included, names not canonicalised. The strings remain valid after Close.
func (r *Response) Headers() iter.Seq2[string, string] {
	return func(yield func(name, value string) bool) {
		for _, f := range r.head.fields {
			if !yield(f.name, f.value) {
				return
			}
		}
	}
}

// Reused reports whether the exchange ran on a connection that had served another.
func (r *Response) Reused() bool { return r.reused }

// Complete reports whether the whole body has been received, though perhaps not yet read.
func (r *Response) Complete() bool { return r.err == io.EOF }

// Sent reports whether the whole request was written before its answer came. If not, its body may
// still be in use until Close.
func (r *Response) Sent() bool { return r.sending == nil }

// SetReadDeadline sets the time after which Read and Next fail with os.ErrDeadlineExceeded;
// zero is never. After such a failure another deadline lets reading go on where it was.
func (r *Response) SetReadDeadline(t time.Time) error {
	if r.conn == nil {
		return ErrClosed
	}
	if errors.Is(r.err, os.ErrDeadlineExceeded) {
		r.err = nil // nothing was lost: a read that times out has taken no bytes
	}
	r.deadline = r.deadline || !t.IsZero()
	if err := r.conn.nc.SetReadDeadline(t); err != nil {
		return fmt.Errorf("upstream: set read deadline: %w", err)
	}
	return nil
}

// Next returns all body bytes that one read from the connection brought, or what is left of
// them: a part of the connection's buffer, to be changed at will, valid until the next call
// of any method but the accessors. It never returns nothing without an error. Errors are
// those of Read.
func (r *Response) Next() ([]byte, error) {
	if len(r.pending) == 0 {
		r.advance()
	}
	data := r.pending
	r.pending = nil
	if len(data) > 0 {
		return data, nil
	}
	return nil, r.err
}

// Read reads body bytes, without chunk framing. io.EOF comes only after a clean end;
// otherwise ErrTruncated, ErrFraming, the context's error or os.ErrDeadlineExceeded.
func (r *Response) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if len(r.pending) == 0 {
		if r.err == nil && r.in.r == r.in.w && len(p) >= readBytes && (r.body.framing != byChunks || r.body.part == chunkData && r.body.left >= readBytes) {
			return r.readInto(p)
		}
		r.advance()
	}
	n := copy(p, r.pending)
	r.pending = r.pending[n:]
	if n > 0 {
		return n, nil
	}
	return 0, r.err
}

// readInto reads a body, or of one in chunks what is left of a large chunk, past the buffer.
func (r *Response) readInto(p []byte) (int, error) {
	n, err := r.conn.readTo(p[:min(int64(len(p)), r.body.left)])
	if n > 0 {
		if r.body.left -= int64(n); r.body.left == 0 && r.body.framing == byLength {
			r.err = io.EOF
		}
		return n, nil
	}
	r.err = r.bodyError(err)
	return 0, r.err
}

// Each hands all body bytes to f as they come, as Next would, until f returns false; Each then
// returns nil, and else what Next would. For a stream it costs half the reads, as none is made
// that finds nothing. f may wait, and may use the accessors; the methods that read or close it must
// not. A worker's end that comes together with its last bytes is noticed half a second later.
func (r *Response) Each(f func(data []byte) bool) error {
	if r.conn == nil || r.conn.readin == nil || r.body.framing == untilClose { // whose end comes with its last bytes
		for {
			data, err := r.Next()
			if err != nil || !f(data) {
				return err
			}
		}
	}
	wanted := true
	// hand gives f what was received and tells whether more is to be read.
	hand := func() bool {
		if len(r.pending) == 0 && r.err == nil {
			r.take()
		}
		data := r.pending
		r.pending = nil
		wanted = len(data) == 0 || f(data)
		return wanted && r.err == nil
	}
	if hand() {
		if err := r.conn.each(&r.in, hand); err != nil {
			r.err = r.bodyError(err)
		}
	}
	if !wanted {
		return nil
	}
	return r.err
}

// advance fills pending or sets err.
func (r *Response) advance() {
	for r.err == nil {
		if r.take(); len(r.pending) > 0 || r.err != nil {
			return
		}
		if err := r.conn.fill(&r.in); err != nil {
			r.err = r.bodyError(err)
		}
	}
}

// take moves what was received of the body to pending, and sets err where that shows its end.
func (r *Response) take() {
	var err error
	if r.pending, err = r.body.next(&r.in); err == nil {
		return
	}
	if r.err = err; err != io.EOF {
		r.err = fmt.Errorf("upstream: reading the body: %w", err)
	}
}

// bodyError says what a failed read inside the body means.
func (r *Response) bodyError(err error) error {
	switch {
	case r.ctx.Err() != nil:
		return ended(r.ctx)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("upstream: waiting for the body: %w", err)
	case err == io.EOF && r.body.framing == untilClose:
		return io.EOF
	case err == io.EOF:
		return fmt.Errorf("upstream: %w", ErrTruncated)
	default:
		return fmt.Errorf("upstream: %w: %w", ErrTruncated, err)
	}
}

// Close ends the exchange. The connection is kept for another one if the answer was read to
// its clean end; otherwise it is closed, which makes a worker abort what it is generating.
// It may be called more than once and returns nil.
func (r *Response) Close() error {
	if r.conn != nil {
		r.end(r.err == io.EOF && len(r.pending) == 0 && r.keep && r.in.r == r.in.w)
		r.err = ErrClosed
	}
	return nil
}

// exchange sends req and reads the response head. After an error the exchange has ended, and
// lost says whether the connection was merely found dead.
func (r *Response) exchange(req *Request) error {
	if own, ok := r.ctx.(interface {
		AfterFunc(f func()) (stop func() bool)
	}); ok { // which context.AfterFunc would not use
		r.stop = own.AfterFunc(r.conn.abort)
	} else if r.ctx.Done() != nil {
		r.stop = context.AfterFunc(r.ctx, r.conn.abort)
	}
	if err := r.ask(req); err != nil {
		r.end(false)
		return err
	}
	return nil
}

func (r *Response) ask(req *Request) error {
	if !req.HeadDeadline.IsZero() {
		if err := r.SetReadDeadline(req.HeadDeadline); err != nil {
			return r.headError(err)
		}
	}
	out := headBuffers.Get().(*headBuffer)
	out.b = req.appendTo(out.b, r.conn.client)
	var err error
	if r.reused && r.conn.turn != nil {
		r.conn.onSent = req.Sent
		r.sending, err = r.conn.ask(out, req.Body, &r.in)
		r.conn.onSent = nil
		r.received = r.in.w > 0
	} else {
		r.sending, err = r.conn.send(out, req.Body)
		if req.Sent != nil {
			req.Sent()
		}
	}
	switch {
	case err == errStale:
		return err
	case err != nil:
		return r.headError(err)
	}
	if err := r.receive(req.Method); err != nil {
		return err
	}
	if !req.HeadDeadline.IsZero() {
		if err := r.SetReadDeadline(time.Time{}); err != nil {
			return r.headError(err)
		}
	}
	return nil
}

// receive reads the head of the answer to method and prepares for the body.
func (r *Response) receive(method string) error {
	if err := r.readHead(); err != nil {
		return err
	}
	r.Status, r.ContentLength = r.head.status, r.head.length
	r.body, r.keep = r.head.body(method)
	if r.head.chunked {
		r.ContentLength = -1
	}
	if r.body.framing == noBody {
		r.err = io.EOF
	}
	return nil
}

// readHead reads heads up to the first that is not a 1xx.
func (r *Response) readHead() error {
	for range maxInterim + 1 {
		text, err := r.headText()
		if err != nil {
			return err
		}
		if err := r.head.parse(text); err != nil {
			return fmt.Errorf("upstream: %w", err)
		}
		if r.head.status == 101 {
			return fmt.Errorf("upstream: %w: protocol switch that nobody asked for", ErrHeader)
		}
		if r.head.status >= 200 {
			return nil
		}
	}
	return fmt.Errorf("upstream: %w: more than %d interim answers", ErrHeader, maxInterim)
}

// headText takes the next head out of the input.
func (r *Response) headText() (string, error) {
	limit := r.conn.client.cfg.MaxHeaderBytes
	for seen := 0; ; {
		unread := r.in.buf[r.in.r:r.in.w]
		if i := bytes.Index(unread[seen:], headEnd); i >= 0 && seen+i+len(headEnd) <= limit {
			n := seen + i + len(headEnd)
			r.in.r += n
			return string(unread[:n]), nil
		} else if i >= 0 || len(unread) >= limit {
			return "", fmt.Errorf("upstream: %w: larger than %d bytes", ErrHeader, limit)
		}
		// A peer that speaks another protocol may never send an empty line.
		if n := min(len(unread), len("HTTP/1.")); string(unread[:n]) != "HTTP/1."[:n] {
			return "", fmt.Errorf("upstream: %w: begins with %.32q", ErrHeader, unread)
		}
		seen = max(0, len(unread)-len(headEnd)+1)
		if err := r.conn.fill(&r.in); err != nil {
			return "", r.headError(err)
		}
		r.received = true
	}
}

// headError says what a failure to write or read before the head means.
func (r *Response) headError(err error) error {
	switch {
	case r.ctx.Err() != nil:
		return ended(r.ctx)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("upstream: waiting for the response head: %w", err)
	default:
		r.lost = !r.received
		if err == io.EOF { // an end that nobody may take for a good one
			return fmt.Errorf("upstream: %w: closed by the worker", ErrReset)
		}
		return fmt.Errorf("upstream: %w: %w", ErrReset, err)
	}
}

// end gives the connection back if keep, or closes it. Nothing of the exchange runs on.
func (r *Response) end(keep bool) {
	cn := r.conn
	r.conn, r.pending = nil, nil
	r.in.release()
	if r.stop != nil && !r.stop() {
		keep = false // ctx has ended: the connection is being closed
	}
	if r.sending != nil {
		keep = cn.join(r.sending, keep)
	}
	if keep && r.deadline {
		keep = cn.nc.SetReadDeadline(time.Time{}) == nil
	}
	if keep {
		cn.client.put(cn)
	} else {
		_ = cn.sock.Close() // at once, whatever TLS would still like to say
	}
}
