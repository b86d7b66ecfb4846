package proxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"net/http"
	"net/textproto"
	"os"
	"strconv"
	"strings"
	"time"

	"spillway/httperr"
	"spillway/upstream"
	"spillway/worker"
)

const maxUnary = 1 << 20 // bytes of a unary answer that are held back until it is whole

// try sends the request to the selected worker and relays its answer. A *failure means that the
// client has seen nothing yet.
func (x *exchange) try(attempt int) error {
	head := headPool.Get().(*[]byte)
	*head = x.appendHead((*head)[:0], attempt)
	resp := &x.resp
	req := upstream.Request{
		Method: http.MethodPost, Path: x.ep.path, Head: *head, Body: x.forward, HeadDeadline: x.headDeadline(),
	}
	if x.sent != nil {
		req.Sent = x.departed
	}
	x.s.yield()
	err := x.peer.client.DoInto(x.ctx, &req, resp)
	putHead(head) // not at the end: an answer may take minutes
	if err != nil {
		return x.lost(err, x.scan.stream == yes)
	}
	defer resp.Close()
	x.begun()
	x.peer.answered(resp.Status)
	switch {
	case resp.Status >= 200 && resp.Status < 300:
	case resp.Status < 400:
		x.verdict = failed
		return x.badGateway(byStatus, fmt.Errorf("worker answered %d", resp.Status))
	case resp.Status == 429, resp.Status == 529, resp.Status >= 500, resp.Status == 499:
		return x.refused(resp)
	}
	if strings.HasPrefix(resp.Header("Content-Type"), "text/event-stream") && resp.Status < 300 {
		return x.stream(resp)
	}
	return x.unary(resp)
}

// lost makes of a transport error what the client gets, and takes the worker out for a while
// unless it was the client that left or ran out of time. retry is whether a limit that the worker
// passed is a reason to try another one.
func (x *exchange) lost(err error, retry bool) error {
	if ctxErr := x.ctx.Err(); ctxErr != nil {
		return ctxErr
	}
	if now := time.Now(); x.expired(now) || errors.Is(err, os.ErrDeadlineExceeded) {
		return x.late(now, retry, err)
	}
	if errors.Is(err, upstream.ErrRequest) { // our own mistake
		return &httperr.Error{Status: 500, Cause: httperr.Internal, Message: "Internal server error", Detail: err}
	}
	x.inhibit()
	f := x.badGateway(reasonOf(err), err)
	f.unsent = errors.Is(err, upstream.ErrDial)
	return f
}

func reasonOf(err error) retryReason {
	switch {
	case errors.Is(err, upstream.ErrDial):
		return byConnect
	case errors.Is(err, upstream.ErrHeader), errors.Is(err, upstream.ErrFraming), errors.Is(err, errEventTooLarge):
		return byProtocol
	}
	return byReset
}

func (x *exchange) badGateway(reason retryReason, err error) *failure {
	return &failure{retry: true, reason: reason, answer: &httperr.Error{
		Status: http.StatusBadGateway, Cause: httperr.Internal,
		Message: "The worker could not be reached or broke the connection", Detail: fmt.Errorf("worker %s: %w", x.sel.Worker.Name, err),
	}}
}

// What is read of a worker's error is bounded in bytes, and in time.
const (
	maxErrorBody  = 64 << 10
	errorBodyTime = 5 * time.Second
)

// refused deals with a status by which a worker declines or fails.
func (x *exchange) refused(resp *upstream.Response) error {
	var body []byte
	for until := time.Now().Add(errorBodyTime); len(body) < maxErrorBody; {
		part, err := x.next(resp, until)
		if err != nil {
			break // the status says enough
		}
		body = append(body, part[:min(len(part), maxErrorBody-len(body))]...)
	}
	if err := x.ctx.Err(); err != nil {
		return err
	}
	after, given := retryAfterOf(resp)
	answer := x.declined(resp.Status, after, ofLoad(resp.Status, given, body), body)
	var f *failure
	if x.s.cfg.ExposeUpstreamError && resp.Complete() && errors.As(answer, &f) && !f.retry {
		x.copyHeaders(resp)
		return x.whole(resp.Status, body)
	}
	return answer
}

// declined says what becomes of a worker's own error, whether it came as a status or as the
// first event of a stream. after is its Retry-After, 0 if there is none; load is that the worker has
// too much to do.
func (x *exchange) declined(status int, after time.Duration, load bool, body []byte) error {
	detail := fmt.Errorf("worker %s answered %d: %.200q", x.sel.Worker.Name, status, body)
	switch {
	case status == 499:
		return &httperr.Error{Status: 499, Cause: httperr.Cancelled, Message: "Client closed request", Detail: detail}
	case load:
		return x.capacity(after, detail)
	}
	if blames(status) {
		x.verdict = failed
	}
	if status == 503 {
		return &failure{retry: true, reason: byStatus, answer: &httperr.Error{
			Status: 503, Cause: httperr.Unavailable, Message: "Service temporarily unavailable: the worker is not available", Detail: detail,
		}}
	}
	retry := status == 502 || status == 504 || status == 500 && x.s.cfg.RetryOn500
	f := &failure{retry: retry, reason: byStatus, answer: &httperr.Error{
		Status: status, Cause: httperr.Internal, Message: "The worker failed to process the request", Detail: detail,
	}}
	if status == 504 {
		f.answer.Cause = httperr.ResponseTimeout
	}
	return f
}

// capacity is a refusal by a worker that has too much to do: it is passed over for a while, and
// that is no fault.
func (x *exchange) capacity(after time.Duration, detail error) *failure {
	var dp *uint32
	if x.sel.MultiRank {
		dp = &x.sel.Rank.DP
	}
	x.slot.part.Busy.Mark(x.sel.Worker.ID, dp, after, time.Now())
	return &failure{retry: true, reason: byCapacity, answer: &httperr.Error{
		Status: x.s.overload, Cause: httperr.Overload, Reason: httperr.WorkerOverloaded,
		Message: httperr.BusyMessage, Detail: detail, RetryAfter: min(after, time.Minute),
	}}
}

// retryAfterOf reads Retry-After; given is that there is one, whatever it says.
func retryAfterOf(resp *upstream.Response) (after time.Duration, given bool) {
	v := resp.Header("Retry-After")
	if n, err := strconv.ParseUint(v, 10, 31); err == nil {
		return time.Duration(n) * time.Second, true
	}
	if at, err := http.ParseTime(v); err == nil {
		return max(time.Until(at), 0), true
	}
	return 0, v != ""
}

// ofLoad tells a worker's refusal because of load from its other errors. retryAfter is whether it
// says when to come back.
func ofLoad(status int, retryAfter bool, body []byte) bool {
	return status == 429 || status == 529 || status == 503 && (retryAfter || tellsOfLoad(body))
}

// blames tells whether an error that is not of load speaks against the worker: requests, and what
// it cannot do for anybody, do not.
func blames(status int) bool {
	return status >= 500 && status != http.StatusNotImplemented || status < 400
}

// tellsOfLoad tells a 503 that means "too much to do" from one that means "out of order".
func tellsOfLoad(body []byte) bool {
	b := bytes.ToLower(body)
	return bytes.Contains(b, []byte("overload")) || bytes.Contains(b, []byte("queue")) ||
		bytes.Contains(b, []byte("too many"))
}

// copyHeaders takes over the worker's end-to-end headers and adds Spillway's.
func (x *exchange) copyHeaders(resp *upstream.Response) {
	h := x.w.Header()
	named := resp.Header("Connection")
	values := make([]string, 0, 8) // of all lines, one by one
	for name, value := range resp.Headers() {
		name = textproto.CanonicalMIMEHeaderKey(name)
		if keptBack[name] || named != "" && listed([]string{named}, name) {
			continue
		}
		if more := h[name]; more != nil {
			h[name] = append(more, value)
			continue
		}
		n := len(values)
		values = append(values, value)
		h[name] = values[n : n+1 : n+1]
	}
	x.workerHeaders(h)
}

func (x *exchange) workerHeaders(h http.Header) {
	if x.s.cfg.HideWorkerHeaders || x.peer == nil {
		return
	}
	h["X-Spillway-Worker"] = x.peer.name
	if x.sel.MultiRank {
		h["X-Spillway-Dp-Rank"] = []string{strconv.FormatUint(uint64(x.sel.Rank.DP), 10)}
	}
	if x.attempts > 1 {
		h["X-Spillway-Attempts"] = []string{strconv.Itoa(x.attempts)}
	}
}

// unary relays an answer that is not a stream. Up to 1 MiB it is held back until it is whole, so
// that a worker that dies in the middle can be replaced.
func (x *exchange) unary(resp *upstream.Response) error {
	x.received(time.Now())
	var body []byte
	for {
		part, err := x.next(resp, time.Time{})
		switch {
		case errors.Is(err, io.EOF):
			x.copyHeaders(resp)
			return x.whole(resp.Status, body)
		case err != nil:
			return x.lost(err, true)
		case body == nil && resp.Complete() && int64(len(part)) == resp.ContentLength:
			x.copyHeaders(resp)
			return x.whole(resp.Status, part) // it came in one read: nothing to collect
		}
		if body == nil {
			x.prefillDone(time.Now())
		}
		body = append(body, part...)
		if len(body) > maxUnary {
			x.copyHeaders(resp)
			return x.large(resp, body)
		}
	}
}

// whole answers with a body that is complete.
func (x *exchange) whole(status int, body []byte) error {
	x.out.status = status
	if status < 300 {
		x.verdict = succeeded
		x.learn(usageOf(body))
	} else {
		x.out.failure = httperr.New(status, "")
	}
	x.release() // the worker has nothing left to do, however long the client takes to read
	x.w.Header()["Content-Length"] = []string{strconv.Itoa(len(body))}
	x.armWrite()
	x.w.WriteHeader(status)
	n, err := x.w.Write(body)
	x.out.written += int64(n)
	if err != nil {
		x.left()
	}
	return nil
}

// left notes that the client could not be written to.
func (x *exchange) left() {
	x.gone = true
	x.out.failure = x.told(context.Canceled)
}

// large relays the rest of a unary answer that is too long to hold back.
func (x *exchange) large(resp *upstream.Response, part []byte) error {
	x.out.status = resp.Status
	if resp.ContentLength >= 0 {
		x.w.Header()["Content-Length"] = []string{strconv.FormatInt(resp.ContentLength, 10)}
	}
	x.w.WriteHeader(resp.Status)
	for {
		x.armWrite()
		n, err := x.w.Write(part)
		x.out.written += int64(n)
		if err != nil {
			x.left()
			return nil
		}
		x.listened()
		part, err = x.next(resp, time.Time{})
		switch {
		case errors.Is(err, io.EOF):
			x.verdict = succeeded
			return nil
		case err != nil:
			x.out.failure = x.told(x.lost(err, false))
			panic(http.ErrAbortHandler) // the only way to tell the client that the answer is not whole
		}
	}
}

// usageOf finds the usage object of a unary answer. Engines put it last, so it is looked for
// from the end.
func usageOf(body []byte) (u usage) {
	i := bytes.LastIndex(body, []byte(`"usage"`))
	if i < 0 {
		return u
	}
	c := cursor{b: body, i: i + len(`"usage"`)}
	if !c.take(':') || c.peek() != byte(object) || u.read(&c) != nil {
		return usage{}
	}
	return u
}

// learn takes in what the worker counted.
func (x *exchange) learn(u usage) {
	if !u.known {
		return
	}
	x.out.usage = u
	x.out.tokens = max(x.out.tokens, u.completion)
	if !x.scan.exactTokens() {
		x.model.learn(x.estimate, u.prompt)
	}
	if x.tokenized > 0 && u.prompt > 0 && x.s.tokenizer.Counted != nil {
		x.s.tokenizer.Counted(x.target.Partition.Key, x.tokenized, u.prompt)
	}
	if !x.out.firstToken.IsZero() && u.prompt > u.cached {
		x.peer.rate.observe(u.prompt-u.cached, x.out.firstToken.Sub(x.sentAt))
	}
}

// armWrite gives a client of HTTP/2, which may be slow without its connection being so, its time
// for the next write. Within a second of the last time there is no need to do it again. For
// HTTP/1.1 the connection does it by itself.
func (x *exchange) armWrite() {
	if x.req.ProtoMajor < 2 {
		return
	}
	now := time.Now()
	if now.Sub(x.armed) < time.Second {
		return
	}
	x.armed = now
	// Not supported by recorders in tests; a connection that is gone fails at the write.
	_ = http.NewResponseController(x.w.Writer).SetWriteDeadline(now.Add(x.s.cfg.ClientWriteTimeout))
}

// flush sends what was written at once.
func (x *exchange) flush() error {
	switch f := x.w.Writer.(type) { // the server's own writer, without echo's wrapper
	case interface{ FlushError() error }:
		return f.FlushError()
	case http.Flusher:
		f.Flush()
	}
	return nil
}

// pinned resolves a pin to a worker: a number is an ID, anything else a name.
func (s *Server) pinned(hint string) (worker.ID, error) {
	if n, err := strconv.ParseUint(strings.TrimSpace(hint), 10, 64); err == nil {
		return worker.ID(n), nil
	}
	for _, w := range s.router.Catalog().Workers() {
		if w.Name == hint {
			return w.ID, nil
		}
	}
	return 0, httperr.Invalid("the pinned worker does not serve the model")
}

// allEnded tells whether every choice that was seen has ended.
func allEnded(seen, ended *[4]uint64) bool {
	n := 0
	for i := range seen {
		n += bits.OnesCount64(seen[i])
		if seen[i]&^ended[i] != 0 {
			return false
		}
	}
	return n > 0
}
