package proxy

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"runtime/debug"
	"strings"
	"time"

	"github.com/labstack/echo/v4"

	"spillway/httperr"
	"spillway/router"
)

// exchange is one inference request from its head to the last byte of its answer. It belongs to
// the goroutine of its handler; only its slot is seen by others.
type exchange struct {
	s     *Server
	ep    *endpoint
	req   *http.Request
	w     *echo.Response
	id    string
	start time.Time

	body       []byte // as the client sent it
	pooled     *[]byte
	forward    []byte // as the worker gets it
	scan       scanned
	askedModel string
	addUsage   bool // usage is asked for where the client did not
	model      *model
	target     router.Target
	query      router.Query
	estimate   uint64 // prompt tokens before correction

	slot     slot
	sel      router.Selection
	peer     *peer
	attempts int
	sentAt   time.Time // of the present attempt
	waiting  bool      // counted in dynamo_queued_requests
	armed    time.Time // when the write deadline was last set
	out      outcome
}

// outcome is what the access record tells.
type outcome struct {
	status     int
	failure    *httperr.Error // nil: success
	firstToken time.Time
	tokens     uint64 // generated
	usage      usage
	written    int64
}

// infer serves one inference route.
func (s *Server) infer(ep *endpoint) echo.HandlerFunc {
	return func(c echo.Context) error {
		x := &exchange{s: s, ep: ep, req: c.Request(), w: c.Response(), start: time.Now()}
		x.id = requestID(x.req.Header)
		x.w.Header()["X-Request-Id"] = []string{x.id}
		if !s.knows(x.req.Header) {
			x.fail(unauthorized())
			s.access.record(x)
			return nil
		}
		if !s.admitting() {
			x.fail(notReady())
			s.access.record(x)
			return nil
		}
		defer s.leave()
		defer x.end()
		if err := x.serve(); err != nil {
			x.fail(err)
		}
		return nil
	}
}

// notReady is the refusal of a server that is about to stop.
func notReady() *httperr.Error {
	return &httperr.Error{
		Status: 503, Cause: httperr.Unavailable, Reason: httperr.Draining, Message: httperr.NotReadyMessage,
	}
}

// stopped tells whether it was the drain's end that cancelled the request, not its client.
func (x *exchange) stopped() bool { return errors.Is(context.Cause(x.req.Context()), errStopping) }

// end closes the books of the request, whatever happened to it, a panic included.
func (x *exchange) end() {
	x.release()
	x.received()
	bodies.put(x.pooled)
	if p := recover(); p != nil {
		if p == http.ErrAbortHandler { //nolint:errorlint // net/http compares by identity too
			x.s.access.record(x)
			panic(p)
		}
		x.s.log.Error("panic in a request", "request_id", x.id, "panic", p, "stack", string(debug.Stack()))
		began := x.w.Committed
		x.fail(&httperr.Error{Status: 500, Cause: httperr.Internal, Message: "Internal server error"})
		if began { // what the client has must not pass for the whole answer
			x.s.access.record(x)
			panic(http.ErrAbortHandler)
		}
	}
	x.s.access.record(x)
}

// serve takes the steps of a request in their documented order: it decides which error a bad
// one gets.
func (x *exchange) serve() error {
	if err := x.checkHead(); err != nil {
		return err
	}
	if err := x.readBody(); err != nil {
		return err
	}
	scan, bad := scan(x.body)
	if bad != nil {
		return bad
	}
	x.scan = scan
	catalog := x.s.router.Catalog()
	switch {
	case x.scan.modelKind == str:
		x.askedModel = x.scan.model.string()
	case !x.scan.modelKind.given() && len(catalog.Models()) == 1:
		x.askedModel = catalog.Models()[0]
	case !x.scan.modelKind.given():
		return httperr.Invalid("model is required")
	}
	if bad := x.scan.check(x.ep); bad != nil {
		return bad
	}
	if x.s.cfg.StrictValidation {
		if bad := strict(x.ep, x.body); bad != nil {
			return bad
		}
	}
	hints := readHints(x.req.Header, x.s.cfg.DisableRoutingHints)
	var err error
	if x.target, err = x.s.router.Resolve(x.askedModel, hints.tenant); err != nil {
		return err
	}
	x.model = x.s.models.of(x.target.Model)
	if x.target.Partition == nil {
		return router.ErrNoWorkers
	}
	x.addUsage = x.s.cfg.ForceIncludeUsage && x.scan.stream == yes && !x.scan.includeUsage
	if x.forward, err = x.edited(); err != nil {
		return err
	}
	return x.admit(hints)
}

// admit opens the metrics of the request and gets it an answer from a worker.
func (x *exchange) admit(h hints) error {
	x.model.metrics.queued.Inc()
	x.waiting = true
	x.estimate = x.scan.promptTokens()
	x.query = router.Query{
		PromptTokens: x.estimate, NoDecode: !x.ep.decodes, Only: x.target.Only, DP: h.dp,
	}
	if !x.scan.exactTokens() {
		x.query.PromptTokens = x.model.correct(x.estimate)
	}
	if h.worker != nil {
		id, err := x.s.pinned(*h.worker)
		if err != nil {
			return err
		}
		x.query.Worker = &id
	}
	var firstFailure error
	for attempt := 0; ; attempt++ {
		err := x.reserve()
		if attempt == 0 && (err == nil || errors.Is(err, router.ErrOverloaded) || errors.Is(err, router.ErrPinBusy)) {
			x.model.metrics.issued[x.ep.index].Inc() // it has reached admission
		}
		if err != nil {
			if firstFailure != nil { // nowhere left to retry: the first failure is the answer
				err = firstFailure
			}
			return err
		}
		err = x.try(attempt)
		x.release()
		var f *failure
		if !errors.As(err, &f) {
			return err
		}
		if firstFailure == nil {
			firstFailure = f
		}
		if !f.retry || h.worker != nil || attempt >= x.retries(f) || x.req.Context().Err() != nil {
			return firstFailure
		}
		x.query.Exclude = append(x.query.Exclude, x.sel.Worker.ID)
	}
}

// retries is how many further attempts a failure allows. Where nothing was processed there is
// always one.
func (x *exchange) retries(f *failure) int {
	if f.unsent {
		return max(x.s.cfg.MigrationLimit, 1)
	}
	return x.s.cfg.MigrationLimit
}

// reserve picks a rank and books the request on it.
func (x *exchange) reserve() error {
	now := time.Now()
	x.query.Reservation = reservationID()
	sel, err := x.target.Partition.Select(x.query, now)
	if err != nil {
		return err
	}
	x.sel = sel
	x.slot = slot{id: x.query.Reservation, part: x.target.Partition, prefill: true}
	// Freed by release on every path from here on.
	x.s.slots.add(&x.slot)
	if x.peer, err = x.s.peer(sel.Worker); err != nil {
		return err
	}
	x.attempts++
	x.sentAt = now
	x.s.slots.expect(&x.slot, x.releaseAt(now))
	return nil
}

// releaseAt is when the prefill is taken to be done although the worker has not shown it: a
// unary answer shows nothing before its end, and some streams show no token for long.
func (x *exchange) releaseAt(now time.Time) time.Time {
	predicted := x.peer.rate.predict(x.query.PromptTokens)
	switch {
	case !x.ep.decodes:
		return time.Time{}
	case x.scan.stream == yes:
		return now.Add(max(10*predicted, time.Minute))
	case x.s.cfg.UnaryPrefill == "hold":
		return time.Time{}
	}
	return now.Add(predicted)
}

// release gives back what the request holds. It may be called more than once.
func (x *exchange) release() {
	if x.s.slots.remove(&x.slot) {
		now := time.Now()
		x.slot.part.Free(x.slot.id, now)
		x.s.freed.free(now)
	}
}

// prefillDone notes that the worker has computed the prompt.
func (x *exchange) prefillDone(now time.Time) {
	if x.s.slots.prefillDone(&x.slot) {
		x.slot.part.PrefillDone(x.slot.id, now)
	}
}

// received notes that the wait for the worker's first byte is over.
func (x *exchange) received() {
	if x.waiting {
		x.waiting = false
		x.model.metrics.queued.Dec()
	}
}

// told is what a client would be told of err.
func (x *exchange) told(err error) *httperr.Error {
	e := httperr.From(err, x.askedModel, x.s.overload)
	if e.Cause == httperr.Cancelled && x.stopped() {
		return notReady()
	}
	return e
}

// fail answers with an error, unless an answer is under way.
func (x *exchange) fail(err error) {
	e := x.told(err)
	x.out.failure, x.out.status = e, e.Status
	if x.w.Committed {
		return
	}
	if e.Reason == httperr.NoHealthyWorkers && e.RetryAfter == 0 {
		e.RetryAfter = x.target.Partition.Recovery(time.Now())
	}
	switch {
	case e.Reason == "":
	case x.model == nil: // refused before the model was known
		x.s.metrics.rejections.WithLabelValues(unknownModel, string(e.Reason)).Inc()
	default:
		x.model.metrics.rejections[e.Reason].Inc()
		if e.Reason.Rejected() {
			x.model.metrics.rejected[x.ep.index].Inc()
			x.s.freed.shed(time.Now())
		}
	}
	if x.attempts > 0 {
		x.workerHeaders(x.w.Header())
	}
	x.s.answer(x.w, e)
}

// checkHead judges what can be judged before the body is read.
func (x *exchange) checkHead() error {
	h := x.req.Header
	if !jsonContent(first(h, "Content-Type")) {
		return httperr.New(http.StatusUnsupportedMediaType, "Content-Type must be application/json")
	}
	if enc := first(h, "Content-Encoding"); enc != "" && !strings.EqualFold(enc, "identity") {
		return httperr.New(http.StatusUnsupportedMediaType, "Content-Encoding must be identity")
	}
	if bad := x.checkMetadata(); bad != nil {
		return bad
	}
	return nil
}

// reservationID is random, never the client's: a client that repeats its request ID must not
// meet its own booking.
func reservationID() string {
	var b [32]byte
	const hex = "0123456789abcdef"
	for i := 0; i < len(b); i += 16 {
		v := rand.Uint64()
		for j := range 16 {
			b[i+j] = hex[v&15]
			v >>= 4
		}
	}
	return string(b[:])
}
