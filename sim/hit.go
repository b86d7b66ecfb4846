package sim

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// errEnded ends an answer before its time, but so that HTTP finds nothing amiss.
var errEnded = errors.New("sim: a fault ends the answer")

// ambiguous is how long a connection stays open after an answer with two lengths, to see
// whether the client uses it again.
const ambiguous = 2 * time.Second

// handler is one of the worker's, without its faults.
type handler func(http.ResponseWriter, *http.Request) error

// faulty serves h, as far as faults let it.
func (w *worker) faulty(c class, h handler) http.HandlerFunc {
	return func(rw http.ResponseWriter, r *http.Request) {
		f, err := w.faultOf(c, r)
		switch {
		case err != nil:
		case f == nil:
			err = h(rw, r)
		default:
			err = (&hit{ResponseWriter: rw, request: r, fault: f}).serve(h)
		}
		if err != nil {
			writeError(rw, err)
		}
	}
}

// faultOf is the fault that r asks for, else one set on the worker, else nil.
func (w *worker) faultOf(c class, r *http.Request) (*fault, error) {
	v := r.Header.Get("X-Sim-Fault")
	if v == "" {
		return w.faults.take(c, time.Now()), nil
	}
	f, err := headerFault(v)
	if err == nil && f.kind.stage == ofHealth && c != probe {
		return nil, badRequest("X-Sim-Fault: %s is a fault of /health.", f.kind.name)
	}
	return f, err
}

// hit is a request that a fault hits. For the faults of an answer's body it is also the writer
// of the answer: one that is no stream goes through Write, a stream asks strike.
type hit struct {
	http.ResponseWriter
	request *http.Request
	fault   *fault
	status  int // given to WriteHeader, which waits for the body
}

// serve does what the fault says, around next or in its stead. The request's body is read
// first, in any case: only then does net/http notice that a client leaves.
func (h *hit) serve(next handler) error {
	body, err := io.ReadAll(http.MaxBytesReader(h.ResponseWriter, h.request.Body, maxBody))
	if err != nil {
		return err
	}
	h.request.Body = io.NopCloser(bytes.NewReader(body))
	switch f := h.fault; f.kind.name {
	case freeze:
		if err := f.wait(h.request.Context()); err != nil {
			return err
		}
		return next(h.ResponseWriter, h.request)
	case reset:
		return h.reset()
	case closeEarly:
		return errCut
	case garbage:
		return h.raw("\x16\x03\x01\x00\xa5 this is not HTTP \x00\xff\r\n\r\n")
	case tokenizerOff:
		return &apiError{http.StatusNotFound, "NotFoundError", "Not Found"}
	case tokenizerFail:
		return &apiError{or(f.spec.Code, http.StatusInternalServerError), "InternalServerError", "The tokenizer has failed."}
	case tokenizerSlow:
		if err := f.delay(h.request.Context()); err != nil {
			return err
		}
		return next(h.ResponseWriter, h.request)
	case healthFail:
		h.ResponseWriter.WriteHeader(http.StatusServiceUnavailable) // vLLM's has no body
		return nil
	case bothLengths:
		return h.raggedHead(next, "Content-Length: 7\r\n")
	case oversizedHead:
		return h.raggedHead(next, "X-Filler: "+strings.Repeat("x", or(f.spec.Bytes, oversizedHeadBytes))+"\r\n")
	}
	if h.fault.kind.stage == ofHead {
		if s := h.fault.spec.RetryAfter; s != nil {
			h.ResponseWriter.Header().Set("Retry-After", strconv.Itoa(*s))
		}
		return refusal(h.fault.kind.name)
	}
	if err := next(h, h.request); !errors.Is(err, errEnded) {
		return err
	}
	return nil
}

// refusal is the answer of a fault that is named after its status.
func refusal(name string) error {
	switch name {
	case "429":
		return &apiError{http.StatusTooManyRequests, "RateLimitError", "Too many requests."}
	case "502":
		return &apiError{http.StatusBadGateway, "BadGatewayError", "The engine did not answer."}
	case "503":
		return &apiError{http.StatusServiceUnavailable, "ServiceUnavailableError", "The engine is not available."}
	case overloaded:
		return &apiError{http.StatusServiceUnavailable, "ServiceUnavailableError", "The engine is overloaded: its queue is full."}
	}
	return &apiError{http.StatusInternalServerError, "InternalServerError", "The engine has failed."}
}

// raggedHead serves next with lines in the answer's head that net/http would not write.
func (h *hit) raggedHead(next handler, lines string) error {
	a := &rawAnswer{conn: h.conn(), header: http.Header{}, lines: lines}
	if err := next(a, h.request); errors.Is(err, errCut) {
		return err
	} else if err != nil {
		writeError(a, err)
	}
	a.end()
	if h.fault.kind.name == bothLengths && a.err == nil {
		reused, cancel := context.WithTimeout(h.request.Context(), ambiguous)
		defer cancel()
		<-reused.Done()
	}
	return errCut
}

// strike does amid an answer what the fault says. After nil the answer goes on, errEnded ends
// it and errCut breaks it off. What came before must have been flushed.
func (h *hit) strike() error {
	switch h.fault.kind.name {
	case resetStream:
		return h.reset()
	case freezeStream, silence:
		return h.fault.wait(h.request.Context())
	case eof:
		return errEnded
	case garbageFraming:
		return h.raw("this is no length of a chunk\r\n")
	case garbageEvent:
		return h.send([]byte("data: {\"choices\":[{\"delta\":\x00\xff]}\n\n"))
	case oversizedEvent:
		if err := h.send([]byte(`data: {"choices":[],"filler":"`)); err != nil {
			return err
		}
		if err := h.fill('x'); err != nil {
			return err
		}
		return h.send([]byte("\"}\n\n"))
	case errorEvent:
		if err := h.send(fmt.Appendf(nil, "data: %s\n\ndata: [DONE]\n\n", h.errorBody())); err != nil {
			return err
		}
		return errEnded
	}
	return errCut // closeStream
}

// send writes and flushes p amid an answer.
func (h *hit) send(p []byte) error {
	if _, err := h.ResponseWriter.Write(p); err != nil {
		return fmt.Errorf("%w: %w", errCut, err)
	}
	return h.flush()
}

func (h *hit) flush() error {
	if err := http.NewResponseController(h.ResponseWriter).Flush(); err != nil {
		return fmt.Errorf("%w: %w", errCut, err)
	}
	return nil
}

// fill sends the fault's number of bytes.
func (h *hit) fill(with byte) error {
	piece := bytes.Repeat([]byte{with}, 64<<10)
	for left := or(h.fault.spec.Bytes, oversizedEventBytes); left > 0; left -= len(piece) {
		if err := h.send(piece[:min(left, len(piece))]); err != nil {
			return err
		}
	}
	return nil
}

func (h *hit) errorBody() []byte {
	code := or(h.fault.spec.Code, http.StatusInternalServerError)
	type body struct {
		Message string `json:"message"`
		Type    string `json:"type"`
		Code    int    `json:"code"`
	}
	// Strings and a number: there is nothing that could fail.
	data, _ := json.Marshal(map[string]body{"error": {"The engine has failed.", "InternalServerError", code}})
	return data
}

// WriteHeader keeps the status until the body is known.
func (h *hit) WriteHeader(status int) { h.status = status }

// Write answers with p, all of a body that is no stream, as the fault lets it.
func (h *hit) Write(p []byte) (int, error) {
	rest := p[len(p)/2:]
	first := p[:len(p)/2]
	switch h.fault.kind.name {
	case eof, garbageEvent: // a whole answer of half a JSON value
		rest = nil
	case errorEvent:
		first, rest = h.errorBody(), nil
	case silence:
		first, rest = nil, p
	case garbageFraming: // must be chunked
	case oversizedEvent: // a body with much white space before it
		first, rest = nil, p
	default:
		h.Header().Set("Content-Length", strconv.Itoa(len(p)))
	}
	h.ResponseWriter.WriteHeader(max(h.status, http.StatusOK))
	if err := h.send(first); err != nil {
		return 0, err
	}
	if rest == nil {
		return 0, errEnded
	}
	var err error
	if h.fault.kind.name == oversizedEvent {
		err = h.fill(' ')
	} else {
		err = h.strike()
	}
	if err == nil {
		err = h.send(rest)
	}
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

// connKey is where a request's context has its connection.
type connKey struct{}

// conn is the request's connection. Only while net/http has nothing to write to it, and has
// flushed what it had, may others.
func (h *hit) conn() net.Conn {
	conn, _ := h.request.Context().Value(connKey{}).(net.Conn) // Serve has put it there
	return conn
}

// raw writes s past net/http, and breaks off.
func (h *hit) raw(s string) error {
	_, err := io.WriteString(h.conn(), s)
	return errors.Join(errCut, err)
}

// reset makes of the close that follows one that the client sees as a reset.
func (h *hit) reset() error {
	if tcp, ok := h.conn().(*net.TCPConn); ok {
		return errors.Join(errCut, tcp.SetLinger(0))
	}
	return errCut
}
