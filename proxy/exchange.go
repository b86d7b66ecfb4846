package proxy

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"github.com/labstack/echo/v4"

	"spillway/httperr"
	"spillway/router"
	"spillway/upstream"
)

// exchange is one inference request from its head to the last byte of its answer. It belongs to
// the goroutine of its handler; only its slot is seen by others.
type exchange struct {
	s      *Server
	ep     *endpoint
	req    *http.Request
	w      *echo.Response
	client *clientConn     // of req; nil where that is not known
	ctx    context.Context // ends when the client leaves or the server stops
	id     string
	start  time.Time

	body       []byte // as the client sent it, once it is whole
	bytesIn    int    // of the body, whole or not
	memory     bodyMemory
	upload     upload
	forward    []byte // as the worker gets it
	scan       scanned
	hopeless   bool // scan has skimmed the body, as the request is refused in any case
	askedModel string
	addUsage   bool // usage is asked for where the client did not
	model      *model
	target     router.Target
	query      router.Query
	estimate   uint64  // prompt tokens before correction
	expected   uint32  // output tokens, as the client says; 0 if it does not
	remaining  float64 // part of them
	tokenized  uint64  // prompt tokens that the tokenizer has told, 0 if it has not or roughly
	prefix     *prefix // of mode kv; nil before a rank is asked for, and once the answer has begun

	slot     slot
	sel      router.Selection
	peer     *peer
	permit   permit  // to use peer
	verdict  verdict // on peer, of the present attempt
	attempts int
	sentAt   time.Time     // of the present attempt
	waiting  bool          // counted in dynamo_queued_requests
	tenant   string        // as the client says
	mayWait  bool          // for a worker, if all are busy
	queued   time.Duration // spent so
	sent     chan struct{} // of its waiter, until departed
	armed    time.Time     // when the write deadline was last set
	wait     wait
	gone     bool // the client could not be written to
	out      outcome

	counts   *modelMetrics // of model, or of the unknown one; nil on no inference route
	step     step
	stepAt   time.Time // when step began
	failedAt time.Time // when the attempt before the present one failed; zero if there was none, or that has been counted
	routed   bool      // a rank has been asked for
	counted  uint64    // tokens in the metrics
	last     *lastSeen // of the present rank, from the first token on

	resp  upstream.Response // of the present attempt
	attrs [24]slog.Attr     // room for the access record
}

// outcome is what the access record tells.
type outcome struct {
	status     int
	failure    *httperr.Error // nil: success
	firstToken time.Time
	lastToken  time.Time
	tokens     uint64 // generated
	usage      usage
	written    int64
}

// infer serves one inference route.
func (s *Server) infer(ep *endpoint) echo.HandlerFunc {
	return func(c echo.Context) error {
		x := s.newExchange(ep, c)
		defer x.client.served()
		x.handle()
		*x = exchange{} // after a panic it is left to the garbage collector
		exchanges.Put(x)
		return nil
	}
}

// handle serves the request. It panics with http.ErrAbortHandler where the answer cannot be whole.
func (x *exchange) handle() {
	s := x.s
	x.open()
	if !s.knows(x.req.Header) {
		x.fail(unauthorized())
		x.account()
		return
	}
	if !s.admitting() {
		x.fail(notReady())
		x.account()
		return
	}
	defer s.leave()
	defer x.end()
	if err := x.serve(); err != nil {
		began := x.w.Committed
		x.fail(err)
		if began { // nothing has told the client so: what it has must not end like a whole answer
			panic(http.ErrAbortHandler)
		}
	}
}

// exchanges are those that have ended, to be used again: they are a third of what a request would
// leave to the garbage collector.
var exchanges = sync.Pool{New: func() any { return new(exchange) }}

// newExchange begins an exchange. Its ID is told in any case.
func (s *Server) newExchange(ep *endpoint, c echo.Context) *exchange {
	x := exchanges.Get().(*exchange)
	x.s, x.ep, x.req, x.w, x.start = s, ep, c.Request(), c.Response(), time.Now()
	x.ctx = x.req.Context()
	if x.client = clientOf(x.ctx); x.client != nil {
		x.ctx = x.client.requests
	}
	x.memory = bodyMemory{budget: &s.bodies}
	x.id = requestID(x.req.Header)
	id := []string{x.id}
	x.w.Header()["X-Request-Id"] = id
	if ep.dialect == anthropic {
		x.w.Header()["Request-Id"] = id
	}
	return x
}

// notReady is the refusal of a server that is about to stop.
func notReady() *httperr.Error {
	return &httperr.Error{
		Status: 503, Cause: httperr.Unavailable, Reason: httperr.Draining, Message: httperr.NotReadyMessage,
	}
}

// stopped tells whether it was the drain's end that cancelled the request, not its client.
func (x *exchange) stopped() bool {
	return stage(x.s.stage.Load()) == stopping && errors.Is(context.Cause(x.ctx), errStopping)
}

// end closes the books of the request, whatever happened to it, a panic included.
func (x *exchange) end() {
	x.release()
	x.settle()
	x.forget()
	x.memory.release()
	if p := recover(); p != nil {
		if p == http.ErrAbortHandler { //nolint:errorlint // net/http compares by identity too
			x.account()
			panic(p)
		}
		x.s.log.Error("panic in a request", "request_id", x.id, "panic", p, "stack", string(debug.Stack()))
		began := x.w.Committed
		x.fail(&httperr.Error{Status: 500, Cause: httperr.Internal, Message: "Internal server error"})
		if began { // what the client has must not pass for the whole answer
			x.account()
			panic(http.ErrAbortHandler)
		}
	}
	x.account()
}

// account writes down what became of the request, once. The client has its answer before the record
// is written: net/http would keep the last bytes until the handler has returned.
func (x *exchange) account() {
	now := time.Now()
	x.close(now)
	x.s.yield()
	if x.w.Committed {
		_ = x.flush() // it is too late to tell of a client that has left
	}
	x.s.access.record(x, now)
}

// serve gets the request an answer.
func (x *exchange) serve() error {
	hints, err := x.prepare()
	if err != nil {
		return err
	}
	return x.admit(hints)
}

// prepare takes the steps of a request up to admission in their documented order: it decides
// which error a bad one gets.
func (x *exchange) prepare() (h hints, err error) {
	if err := x.checkHead(); err != nil {
		return h, err
	}
	if err := x.readBody(); err != nil {
		return h, err
	}
	if x.counts != nil {
		x.enter(preprocess, time.Now())
	}
	h = readHints(x.req.Header, x.s.cfg.DisableRoutingHints)
	if x.hopeless = x.s.shedding(x.start) && x.skimmed(h); !x.hopeless {
		var bad *httperr.Error
		if x.scan, bad = scan(x.body); bad != nil {
			return h, bad
		}
	}
	model, known := x.s.modelOf(&x.scan)
	if !known {
		return h, httperr.Invalid("model is required")
	}
	x.askedModel = model
	var unknown error
	if x.target, unknown = x.s.router.Resolve(x.askedModel, h.tenant); unknown == nil {
		x.known(x.s.models.of(x.target.Model)) // what is wrong with the request is counted for its model
	}
	if bad := x.scan.check(x.ep); bad != nil {
		return h, bad
	}
	if x.s.cfg.StrictValidation && x.ep.dialect == openAI {
		if bad := strict(x.ep, x.body); bad != nil {
			return h, bad
		}
	}
	if unknown != nil {
		return h, unknown
	}
	if x.target.Partition == nil {
		return h, router.ErrNoWorkers
	}
	if x.hopeless { // nobody will see the body
		return h, nil
	}
	x.tenant = h.tenant
	x.addUsage = x.s.cfg.ForceIncludeUsage && x.ep.dialect == openAI && x.scan.stream == yes && !x.scan.includeUsage
	x.forward, err = x.edited()
	return h, err
}

// modelOf is the model that a request asks for; known is false if it does not say so, and there is
// none to be taken for granted. A model that is no string is for scanned.check.
func (s *Server) modelOf(body *scanned) (model string, known bool) {
	switch models := s.router.Catalog().Models(); {
	case body.modelKind == str:
		return body.model.string(), true
	case body.modelKind.given():
		return "", true
	case len(models) == 1:
		return models[0], true
	}
	return "", false
}

// sheddingFor is how long after a refusal the next one is expected.
const sheddingFor = time.Second

// shedding tells whether a request that came at a time is likely to be refused for load. With a
// queue it would wait instead.
func (s *Server) shedding(at time.Time) bool {
	return !s.queues && !s.cfg.StrictValidation && at.UnixNano()-s.shedAt.Load() < int64(sheddingFor)
}

// skimmed skims the body and tells whether that is enough: it holds no mistake that skim sees, and
// there is no room for the request wherever it might go. The text of a long prompt costs more to
// look at than all the rest of a refusal.
func (x *exchange) skimmed(h hints) bool {
	switch {
	case len(x.body) < smallPart: // scan is as quick
		return false
	case h.worker != "" || h.dp != nil:
		return false
	case x.counts == nil: // of no inference route: it is not admitted, but served
		return false
	}
	var bad *httperr.Error
	if x.scan, bad = skim(x.body); bad != nil {
		return false
	}
	model, known := x.s.modelOf(&x.scan)
	if !known {
		return false
	}
	target, err := x.s.router.Resolve(model, h.tenant)
	return err == nil && target.Partition != nil && target.Only == nil && target.Partition.Full(x.start)
}

// told is what a client would be told of err.
func (x *exchange) told(err error) *httperr.Error {
	e := httperr.From(err, x.askedModel, x.s.overload)
	switch {
	case e.Cause == httperr.Cancelled && x.stopped():
		return notReady()
	case e.Reason == httperr.QueueTimeout:
		e.Status = x.s.queueTimeout
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
	if e.Reason == httperr.Overloaded {
		x.s.shedAt.Store(x.start.UnixNano())
	}
	switch {
	case e.Reason == "":
	case x.counts != nil:
		x.counts.refused(x, e)
		if e.Reason.Rejected() && x.s.autoRetry {
			now := time.Now()
			r := x.roomOf(e.Reason)
			r.shed(now)
			if e.RetryAfter == 0 {
				e.RetryAfter = r.wait(now)
			}
		}
	}
	if x.attempts > 0 {
		x.workerHeaders(x.w.Header())
	}
	x.s.answer(x.w, e, x.ep.dialect)
}

// roomOf counts the room in what refused the request: the worker it was pinned to, or the model.
func (x *exchange) roomOf(reason httperr.Reason) *rates {
	if reason != httperr.OverloadedPinned || x.query.Worker == nil {
		return &x.model.freed
	}
	if p, ok := x.s.peers.Load(*x.query.Worker); ok {
		return &p.(*peer).freed
	}
	return new(rates) // it has not served us yet
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
