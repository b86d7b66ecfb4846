package proxy

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"time"

	"spillway/httperr"
	"spillway/kvindex"
	"spillway/router"
)

// place has a rank picked and booked for the request. If all are busy, or full to its class, it waits
// for one, unless it has been tried on a worker before or is of a batch. It returns what time it then
// is.
func (x *exchange) place(now time.Time) (router.Selection, time.Time, error) {
	part := x.target.Partition
	if !x.s.queues {
		sel, err := part.Select(x.query, now)
		return sel, now, err
	}
	if part.Waiting() == 0 && !part.Profile().Queues() || !x.mayWait {
		x.s.letGo(part, now) // ours must not take what others wait for
		sel, err := part.Select(x.query, now)
		if !x.mayWait || !overloadedBy(err) {
			return sel, now, err
		}
	}
	return x.await(part, now)
}

// await waits in the queue of the partition, in the goroutine of the request.
func (x *exchange) await(part *router.Partition, now time.Time) (router.Selection, time.Time, error) {
	w := &waiter{ready: make(chan router.Admission, 1), sent: make(chan struct{})}
	order := x.order()
	ticket := &router.Ticket{Query: x.query, Order: order, Owner: w}
	if k := x.prefix; k != nil && x.query.Overlaps != nil {
		ticket.Overlaps = func() *kvindex.Matches { return k.match(x.query.PromptTokens) } // nobody looks at them while it waits
	}
	admitted, err := part.Wait(ticket, now)
	x.s.wake(admitted)
	if err != nil {
		return router.Selection{}, now, err
	}
	x.sent = w.sent
	select {
	case a := <-w.ready: // it need not wait
		if w.follow(); a.Err != nil {
			x.departed()
		}
		return a.Selection, now, a.Err
	default:
	}
	x.counts.waitingBytes.Add(int64(len(x.body)))
	defer x.counts.waitingBytes.Add(-int64(len(x.body)))
	a, err := x.awaitTurn(part, ticket, w.ready, order.Deadline.Sub(now))
	if err != nil {
		a.Err = err
	}
	if w.follow(); a.Err != nil {
		x.departed()
	}
	until := time.Now()
	x.counts.queueWait[queueOutcome(a.Err)].observe(int64(until.Sub(now)), 1)
	x.queued += until.Sub(now)
	return a.Selection, until, a.Err
}

// awaitTurn waits until the ticket is let go or the wait has to end otherwise, then with an error.
func (x *exchange) awaitTurn(part *router.Partition, ticket *router.Ticket, ready <-chan router.Admission, limit time.Duration) (router.Admission, error) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	var why error
	select {
	case a := <-ready:
		return a, nil
	case <-timer.C:
		why = router.ErrQueueTimeout
	case <-x.ctx.Done():
		why = x.ctx.Err()
	case <-x.s.waitOver:
		why = notReady()
	}
	if part.Leave(ticket) {
		return router.Admission{}, why
	}
	a := <-ready // who let us go is about to say so
	if a.Err == nil && x.ctx.Err() != nil {
		now := time.Now()
		part.Free(ticket.Query.Reservation, now) // nobody has been told of the booking yet
		x.s.letGo(part, now)
		return router.Admission{}, x.ctx.Err()
	}
	return a, nil
}

// waiter is the Owner of a ticket.
type waiter struct {
	ready chan router.Admission // has room for one, so that who lets it go has not to wait for it

	// Requests that are let go for one worker reach it in their order: it serves them so, and a long
	// prompt that overtook short ones would hold them up by seconds. The scheduler would run them
	// in any order.
	sent  chan struct{}   // closed when the request is on its way, or will never be
	ahead <-chan struct{} // sent of the one let go before it, or nil; set before ready is filled
}

// maxBehind bounds how long a request waits for the one before it to be on its way.
const maxBehind = 50 * time.Millisecond

// follow waits until the request before it is on its way.
func (w *waiter) follow() {
	if w.ahead == nil {
		return
	}
	select {
	case <-w.ahead:
		return
	default:
	}
	timer := time.NewTimer(maxBehind)
	defer timer.Stop()
	select {
	case <-w.ahead:
	case <-timer.C:
	}
}

// departed tells those behind the request that it is on its way, or will never be.
func (x *exchange) departed() {
	if x.sent != nil {
		close(x.sent)
		x.sent = nil
	}
}

// wake tells requests that they have been let go.
func (s *Server) wake(admitted []router.Admission) {
	for i := range admitted {
		a := &admitted[i]
		w := a.Ticket.Owner.(*waiter)
		if a.Err == nil {
			if p, ok := s.peers.Load(a.Selection.Worker.ID); ok {
				if before := p.(*peer).sent.Swap(&w.sent); before != nil {
					w.ahead = *before
				}
			}
		}
		w.ready <- *a
	}
}

// letGo wakes those who wait for what has become free. It is called when that may be so: after a
// request has given something back or thresholds have changed, and for all that others write into
// core state (reports, health, workers, other replicas' bookings) every releaseEvery.
func (s *Server) letGo(part *router.Partition, now time.Time) {
	if part.Waiting() > 0 {
		s.wake(part.Admit(now))
	}
}

// letAllGo is letGo for each partition of a model, or of all if it is "".
func (s *Server) letAllGo(model string, now time.Time) {
	if s.queues {
		s.router.Partitions(model, func(p *router.Partition) { s.letGo(p, now) })
	}
}

// order is when the turn of the request comes, and how long it waits for that: counted from its
// admission, so that waiting a second time does not take longer.
func (x *exchange) order() router.Order {
	o := router.Order{Tenant: x.tenant, Deadline: earlier(x.stepAt.Add(x.s.cfg.QueueTimeout), x.wait.deadline)}
	if x.s.cfg.DisableRoutingHints {
		return o
	}
	h := x.req.Header
	if v, ok := either(h, "X-Llm-D-Inference-Fairness-Id", "X-Gateway-Inference-Fairness-Id"); ok && v != "" {
		o.Tenant = v
	}
	o.Class = strings.TrimSpace(first(h, "X-Dynamo-Meta-Policy-Class")) // one that is unknown is as good as none
	if n, err := strconv.ParseUint(strings.TrimSpace(first(h, "X-Dynamo-Request-Strict-Priority")), 10, 32); err == nil {
		o.StrictPriority = uint32(n)
	}
	if n, err := strconv.ParseInt(strings.TrimSpace(first(h, "X-Dynamo-Request-Priority")), 10, 32); err == nil {
		o.Priority = int32(n)
	} else if x.scan.nvext == object {
		o.Priority = agentHints(x.body).Priority
	}
	if v, ok := either(h, "X-Llm-D-Slo-Ttft-Ms", "X-Slo-Ttft-Ms"); ok {
		if d := milliseconds(v); d > 0 {
			o.Objective = x.start.Add(d)
			o.Deadline = earlier(o.Deadline, o.Objective)
		}
	}
	return o
}

// agentHint is what an agent says of its request, each field 0 if it is not what it should be.
type agentHint struct {
	Priority int32  `json:"priority"`
	Output   uint32 `json:"osl"` // tokens that it expects
}

// agentHints is nvext.agent_hints of a request body.
func agentHints(body []byte) (hint agentHint) {
	c := cursor{b: body}
	_ = c.object(func(key text) error { // it was read before without an error
		c.space()
		from := c.i
		if err := c.skip(1); err != nil || !key.is("nvext") {
			return err
		}
		var ext struct {
			Hints agentHint `json:"agent_hints"`
		}
		_ = json.Unmarshal(body[from:c.i], &ext) // it goes on after a field of the wrong type
		hint = ext.Hints
		return nil
	})
	return hint
}

// batched tells whether the dispatcher sent the request: those have a queue of their own.
func batched(h http.Header) bool { return first(h, "X-Spillway-Lane") == "batch" }

// What becomes of a wait, by index in queueOutcomes.
const (
	queueAdmitted = iota
	queueRefused
	queueLeft
)

var queueOutcomes = [...]string{"admitted", "refused", "left"}

func queueOutcome(err error) int {
	switch {
	case err == nil:
		return queueAdmitted
	case httperr.From(err, "", 0).Cause == httperr.Cancelled:
		return queueLeft
	}
	return queueRefused
}
