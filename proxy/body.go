package proxy

import (
	"errors"
	"io"
	"net/http"
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
		x.w.Header()["Connection"] = []string{"close"} // the body is not worth reading
		return x.tooLarge()
	}
	rc := http.NewResponseController(x.w.Writer)
	x.pooled = bodies.get(x.req.ContentLength)
	b := (*x.pooled)[:0]
	src := http.MaxBytesReader(x.w.Writer, x.req.Body, limit)
	for extend := 0; ; {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		if len(b) >= extend { // bytes that trickle in do not extend the time
			extend = len(b) + bodyPart
			if err := rc.SetReadDeadline(time.Now().Add(x.s.cfg.ClientReadTimeout)); err != nil && !errors.Is(err, http.ErrNotSupported) {
				return &httperr.Error{Status: 400, Cause: httperr.Validation, Message: "The request body could not be read", Detail: err}
			}
		}
		n, err := src.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		if err == nil {
			continue
		}
		*x.pooled, x.body = b, b
		var large *http.MaxBytesError
		switch {
		case errors.Is(err, io.EOF):
			// The deadline would be taken for a lost client later.
			if err := rc.SetReadDeadline(time.Time{}); err != nil && !errors.Is(err, http.ErrNotSupported) {
				return &httperr.Error{Status: 400, Cause: httperr.Validation, Message: "The request body could not be read", Detail: err}
			}
			return nil
		case errors.As(err, &large):
			return x.tooLarge()
		case x.stopped():
			return x.req.Context().Err()
		}
		// net/http has ended the context, but the client may only have stopped sending.
		x.w.Header()["Connection"] = []string{"close"}
		return &httperr.Error{Status: 400, Cause: httperr.Validation, Message: "The request body could not be read", Detail: err}
	}
}

func (x *exchange) tooLarge() *httperr.Error {
	return httperr.New(http.StatusRequestEntityTooLarge,
		"Request body exceeds the limit of "+strconv.Itoa(x.s.cfg.BodyLimitMB)+" MiB (body-limit-mb)")
}

// bufferPool reuses request bodies; large ones are left to the garbage collector.
type bufferPool struct{ pool sync.Pool }

var bodies bufferPool

const (
	smallBody = 4 << 10
	keepBody  = 256 << 10
)

func (p *bufferPool) get(size int64) *[]byte {
	need := smallBody
	if size > 0 && size <= keepBody {
		need = max(need, int(size)+1) // one more, so that the end is met without growing
	} else if size > keepBody {
		need = keepBody // the rest as it arrives: a declared length is only a claim
	}
	if b, ok := p.pool.Get().(*[]byte); ok && cap(*b) >= need {
		return b
	}
	b := make([]byte, 0, need)
	return &b
}

func (p *bufferPool) put(b *[]byte) {
	if b != nil && cap(*b) <= keepBody {
		p.pool.Put(b)
	}
}
