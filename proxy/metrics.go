package proxy

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/httperr"
)

// metrics are the counters of the front end. They are plain numbers that a scrape reads (Collect):
// what a request adds costs an atomic addition each, two names of one thing cannot differ, and a
// page never shows more rejected than issued or more ended than started.
type metrics struct {
	families *families
	server   *Server // set once
	routerID string  // a random identity of this process

	unknown      *modelMetrics // of requests refused before their model was known
	stages       [numSteps]stageMetrics
	disconnected atomic.Uint64
	leaks        atomic.Uint64

	scheduling, routing           *histogram
	hashing, chaining, matching   *histogram // in mode kv
	hitRate                       *histogram // of parts of a prompt, in millionths
	unrecorded                    atomic.Uint64
	routerStarted, routerRequests atomic.Uint64
}

// stageMetrics are those of one stage of requests.
type stageMetrics struct {
	requests atomic.Int64
	duration *histogram
}

// unknownModel is the model label where the model is not known: never what a client wrote.
const unknownModel = "unknown_model"

// newMetrics registers the metrics of s.
func newMetrics(reg prometheus.Registerer, s *Server) *metrics {
	f := newFamilies(metricsPrefix(s.cfg.MetricsPrefix), s.cfg.Histograms, s.cfg.CompatMetrics)
	m := &metrics{
		families: f, server: s, routerID: strconv.FormatUint(max(rand.Uint64(), 1), 10),
		scheduling: newHistogram(f.schedulingShape), routing: newHistogram(f.routed),
		hashing: newHistogram(f.hashShape), chaining: newHistogram(f.chainShape), matching: newHistogram(f.matchShape),
		hitRate: newHistogram(f.hitShape),
	}
	m.unknown = m.newModel(unknownModel)
	for i := range m.stages {
		m.stages[i].duration = newHistogram(f.stageShape)
	}
	reg.MustRegister(m)
	return m
}

// metricsPrefix makes a prefix of what an operator wrote: what no name may hold becomes _.
func metricsPrefix(s string) string {
	b := []byte(s)
	for i, ch := range b {
		letter := ch >= 'a' && ch <= 'z' || ch >= 'A' && ch <= 'Z' || ch == '_' || ch == ':'
		if !letter && (i == 0 || ch < '0' || ch > '9') {
			b[i] = '_'
		}
	}
	return string(b)
}

// modelMetrics are the numbers of one model.
type modelMetrics struct {
	name             string
	issued, rejected [numEndpoints]atomic.Uint64 // by index in endpoints
	started          [numEndpoints][len(requestTypes)]atomic.Uint64
	ended            [numEndpoints][len(requestTypes)][len(outcomes)]atomic.Uint64
	cancelled        [numEndpoints][len(requestTypes)]atomic.Uint64
	active, queued   atomic.Int64
	rejections       []atomic.Uint64 // by index in httperr.Reasons
	laneMetrics
	retries      [len(retryReasons)]atomic.Uint64
	outputTokens atomic.Uint64
	tokensFrom   [numTokenSources]atomic.Uint64
	sessions     [len(sessionEffects)]atomic.Uint64 // by router.SessionEffect

	duration, ttft, itl, input, cached, output, embedding *histogram
	queueWait                                             [len(queueOutcomes)]*histogram
	migrations                                            [len(migrationOutcomes)]*histogram
}

// outcomes are what may become of a request: error_type, "" for a success.
var outcomes = [...]httperr.Cause{
	"", httperr.Validation, httperr.NotFound, httperr.Overload, httperr.Unavailable, httperr.Cancelled,
	httperr.ResponseTimeout, httperr.Internal, httperr.NotImplemented,
}

// outcomeOf is the index of what failed, 0 for nil.
func outcomeOf(e *httperr.Error) int {
	if e == nil {
		return 0
	}
	if i := slices.Index(outcomes[:], e.Cause); i > 0 {
		return i
	}
	return slices.Index(outcomes[:], httperr.Internal)
}

// What becomes of an attempt on a further worker, by index in migrationOutcomes.
const (
	migrated = iota
	migrationFailed
	migrationCancelled
)

var migrationOutcomes = [...]string{"success", "failure", "cancelled"}

// newModel makes the numbers of a model, all 0.
func (m *metrics) newModel(name string) *modelMetrics {
	f := m.families
	mm := &modelMetrics{
		name: name, rejections: make([]atomic.Uint64, len(httperr.Reasons)),
		duration: newHistogram(f.durationShape), ttft: newHistogram(f.ttftShape), itl: newHistogram(f.itlShape),
		input: newHistogram(f.inputShape), cached: newHistogram(f.cachedShape), output: newHistogram(f.outputShape),
		embedding: newHistogram(f.embedShape),
	}
	for i := range mm.sheds {
		mm.sheds[i] = make([][shedCodes]atomic.Uint64, len(httperr.Reasons))
	}
	for i := range mm.migrations {
		mm.migrations[i] = newHistogram(f.migrationShape)
	}
	for i := range mm.queueWait {
		mm.queueWait[i] = newHistogram(f.queueShape)
	}
	return mm
}

// refused counts a refusal of x.
func (mm *modelMetrics) refused(x *exchange, e *httperr.Error) {
	if i := slices.Index(httperr.Reasons, e.Reason); i >= 0 {
		mm.rejections[i].Add(1)
		mm.shedBy(laneOf(x.req.Header), i, e.Status, x.s.shedCodes[:])
	}
	if e.Reason.Rejected() {
		mm.rejected[x.ep.index].Add(1)
	}
}

// step is a stage of a request before the first byte from a worker.
type step uint8

const (
	noStep     step = iota
	preprocess      // the body is read and is judged
	route           // a rank is chosen
	dispatch        // it is sent, and the worker has not begun to answer
	numSteps
)

// stageLabels are the labels stage and phase of a step.
var stageLabels = [numSteps][2]string{preprocess: {"preprocess", ""}, route: {"route", "aggregated"}, dispatch: {"dispatch", "aggregated"}}

// enter ends the step that the request is in and begins the next one, or none.
func (x *exchange) enter(next step, now time.Time) {
	m := x.s.metrics
	if x.step != noStep {
		st := &m.stages[x.step]
		st.requests.Add(-1)
		st.duration.observe(int64(now.Sub(x.stepAt)), 1)
	}
	if next != noStep {
		m.stages[next].requests.Add(1)
	}
	x.step, x.stepAt = next, now
}

// open begins to count the request, for a model that is not known yet.
func (x *exchange) open() {
	x.counts = x.s.metrics.unknown
	x.counts.active.Add(1)
}

// known goes on to count the request for its model.
func (x *exchange) known(m *model) {
	x.model = m
	if x.counts == nil {
		return // of no inference route
	}
	x.counts.active.Add(-1)
	x.counts = m.metrics
	x.counts.active.Add(1)
	x.counts.started[x.ep.index][x.scan.requestType()].Add(1)
	x.counts.lanes[laneOf(x.req.Header)].Add(1)
}

// received notes that the worker has begun to answer with what the client waits for.
func (x *exchange) received(now time.Time) {
	if x.waiting {
		x.waiting = false
		x.counts.queued.Add(-1)
	}
	if x.step != noStep {
		x.enter(noStep, now)
	}
	x.migration(migrated, now)
}

// settle ends what of the request has not ended otherwise.
func (x *exchange) settle() {
	if x.waiting {
		x.waiting = false
		x.counts.queued.Add(-1)
	}
	if x.step != noStep {
		x.enter(noStep, time.Now())
	}
	switch e := x.out.failure; {
	case x.failedAt.IsZero():
	case e == nil:
		x.migration(migrated, time.Now())
	case e.Cause == httperr.Cancelled:
		x.migration(migrationCancelled, time.Now())
	default:
		x.migration(migrationFailed, time.Now())
	}
}

// decided notes how long it took to choose a rank, with the outcome err, since from. It returns what
// time it is.
func (x *exchange) decided(err error, from time.Time) (now time.Time) {
	now = time.Now()
	x.s.metrics.scheduling.observe(int64(now.Sub(from)), 1)
	if errors.Is(err, errTried) {
		return now // there will be another round
	}
	if x.step == route {
		x.s.metrics.routing.observe(int64(now.Sub(x.stepAt)-x.queued), 1) // to wait for a worker is no overhead
	}
	next := dispatch
	if err != nil {
		next = noStep
	}
	x.enter(next, now)
	return now
}

// retried notes that there is a further attempt, since the last one has failed at a time.
func (x *exchange) retried(reason retryReason, at time.Time) {
	x.counts.retries[reason].Add(1)
	x.failedAt = at
}

// migration notes what became of an attempt on a further worker, if the present one is such.
func (x *exchange) migration(outcome int, now time.Time) {
	if !x.failedAt.IsZero() {
		x.counts.migrations[outcome].observe(int64(now.Sub(x.failedAt)), 1)
		x.failedAt = time.Time{}
	}
}

// generated counts tokens that came together.
func (x *exchange) generated(n uint64, now time.Time) {
	x.counted += n
	x.counts.outputTokens.Add(n)
	switch {
	case x.out.firstToken.IsZero():
		x.out.firstToken = now
		x.counts.ttft.observe(int64(now.Sub(x.start)), 1)
		x.last = x.peer.lastOf(x.sel.Rank.DP)
		x.last.ttft.Store(int64(now.Sub(x.sentAt)))
	case n > 0:
		gap := int64(now.Sub(x.out.lastToken)) / int64(min(n, 1<<32))
		x.counts.itl.observe(gap, n)
		x.last.itl.Store(gap)
	default:
		return // nothing was generated: the next token's time counts from the last one
	}
	x.out.lastToken = now
}

// close ends the count of the request, once.
func (x *exchange) close(now time.Time) {
	mm, kind, out := x.counts, x.scan.requestType(), outcomeOf(x.out.failure)
	if x.model == nil { // refused before
		mm.started[x.ep.index][kind].Add(1)
	} else {
		mm.lanes[laneOf(x.req.Header)].Add(-1)
	}
	if x.routed {
		x.s.metrics.routerRequests.Add(1)
	}
	if x.out.failure != nil && x.out.failure.Cause == httperr.Cancelled {
		if x.gone || x.ctx.Err() != nil {
			x.s.metrics.disconnected.Add(1)
		}
		mm.cancelled[x.ep.index][kind].Add(1)
	}
	if x.out.failure == nil || !x.out.firstToken.IsZero() {
		x.closeTokens(mm, out == 0, now)
	}
	mm.duration.observe(int64(now.Sub(x.start)), 1)
	mm.ended[x.ep.index][kind][out].Add(1)
	mm.active.Add(-1)
}

// closeTokens counts what an answer has told of its tokens.
func (x *exchange) closeTokens(mm *modelMetrics, success bool, now time.Time) {
	prompt, u := x.query.PromptTokens, x.out.usage
	if u.known && u.prompt > 0 {
		prompt = u.prompt
	}
	mm.input.observe(bounded(prompt), 1)
	if x.peer != nil {
		x.peer.lastOf(x.sel.Rank.DP).input.Store(bounded(prompt))
	}
	if u.cachedKnown {
		mm.cached.observe(bounded(u.cached), 1)
	}
	if x.out.tokens > 0 && x.ep.decodes {
		mm.output.observe(bounded(x.out.tokens), 1)
		if x.out.tokens > x.counted { // the estimate was too low; what was too much is not taken back
			mm.outputTokens.Add(x.out.tokens - x.counted)
		}
	}
	if success && !x.ep.decodes {
		mm.embedding.observe(int64(now.Sub(x.start)), 1)
	}
}

// bounded keeps what a worker says within what can be summed up.
func bounded(tokens uint64) int64 { return int64(min(tokens, 1<<40)) }
