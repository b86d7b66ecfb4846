package dispatch

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"spillway/upstream"
)

// gateEvery is how often a worker asks its pool's gate again.
const gateEvery = 50 * time.Millisecond

// worker works on one lease after another, in a goroutine of its own. It does not belong to a pool.
type worker struct {
	ctx    context.Context // of the work in hand; cancel ends it, and then another lease gets a new one
	cancel context.CancelCauseFunc
	told   chan *lease // what it waits for; see submit
	write  write       // the last one
	idle   bool        // it does an exchange, and has no lease
	post   post
}

// ending is what becomes of a lease: what Redis is told, and what came of that.
type ending struct {
	step       Step        // that is reached by it; "" if somebody else has the message, and there is nothing to tell
	call       *call       // or
	settlement *settlement // a result, which can be told together with others
	dead       string      // reason of a dead letter
	err        error
}

func (e *ending) size() int {
	if e.settlement != nil {
		return 256 + len(e.settlement.result)
	}
	return e.call.size()
}

// works works on the leases that w is given.
func (d *Dispatcher) works(ctx context.Context, w *worker) {
	for l := <-w.told; l != nil; {
		e := d.work(w, l)
		l = d.finish(ctx, w, l, e)
		w.post.trim()
	}
	if w.cancel != nil {
		w.cancel(nil)
	}
}

// work brings one leased message to its end: a result, a further attempt later, or back.
func (d *Dispatcher) work(w *worker, l *lease) ending {
	ctx := w.ctx
	if e, ok := d.throughGate(w, l); !ok {
		return e
	}
	switch now := time.Now(); {
	case errors.Is(context.Cause(ctx), errClientCancelled):
		return d.settle(w, l, failed(codeCancelled, "cancelled"), "", nil)
	case ctx.Err() != nil, d.isLeaving(), l.queue.group.budget.Latched(now):
		return d.giveBack(ctx, l)
	case l.m.expired(now):
		l.queue.outcomes[outcomeDeadline].Add(1)
		return d.settle(w, l, failed(codeDeadline, "deadline exceeded"), "", nil)
	}
	return d.attempt(w, l)
}

func (d *Dispatcher) isLeaving() bool {
	select {
	case <-d.leaving:
		return true
	default:
		return false
	}
}

// throughGate waits for the gate of the pool. It reports false if the message is to be given back or settled.
func (d *Dispatcher) throughGate(w *worker, l *lease) (ending, bool) {
	gate := l.queue.workers.admit
	if gate == nil {
		return ending{}, true
	}
	ctx, g := w.ctx, l.grant
	until := time.Now().Add(d.cfg.PoolWaitMax)
	waited := false
	for {
		said, err := gate.apply(ctx, l.m, g)
		now := time.Now()
		switch {
		case err == nil && said == proceed:
			if waited { // it may have been cancelled meanwhile
				if found, err := d.store.cancelled(ctx, []*message{l.m}); err == nil && found[l.m] {
					return d.settle(w, l, failed(codeCancelled, "cancelled"), "", nil), false
				}
			}
			return ending{}, true
		case err == nil && said == drop:
			l.queue.decisions[gateDropped].Add(1)
			return d.settle(w, l, g.dropped, "", nil), false
		case err == nil && said == wait && ctx.Err() == nil && !d.isLeaving() && now.Before(until) && !l.m.expired(now):
		default:
			if err != nil {
				l.queue.decisions[gateError].Add(1)
				d.log.Warn("a gate has failed", "pool", l.queue.workers.ID, "err", err)
			} else {
				l.queue.decisions[gateQuota].Add(1)
			}
			l.pause = true
			return d.giveBack(ctx, l), false
		}
		waited = true
		timer := time.NewTimer(gateEvery)
		select {
		case <-timer.C:
		case <-ctx.Done():
		case <-d.leaving:
		}
		timer.Stop()
	}
}

// reply is what came of one attempt.
type reply struct {
	status  int
	after   string // Retry-After
	dropped string // why a gateway of llm-d has refused the request
	body    []byte
	err     error
	written bool // something of the request was sent
	late    bool // err came of the attempt's time being over
	taken   time.Duration
}

// attempt sends the request once and tells what comes of it.
func (d *Dispatcher) attempt(w *worker, l *lease) ending {
	m, q := l.m, l.queue
	if err := d.compose(&w.post, m, q, l.grant); err != nil {
		q.outcomes[outcomeFailed].Add(1)
		return d.settle(w, l, failed(codeInvalid, err.Error()), "", nil)
	}
	now := time.Now()
	limit := now.Add(d.cfg.RequestTimeout)
	if m.deadline.Before(limit) {
		limit = m.deadline
	}
	if m.retries == 0 {
		q.first.Add(1)
	} else {
		q.retried.Add(1)
	}
	q.sent(m, now)
	d.step(Sending, m)
	r := q.gateway.send(w.ctx, &w.post, now, limit, d.cfg.MaxResponseBytes)
	d.ended(l)
	d.step(Answered, m)
	q.took.Observe(r.taken.Seconds())
	return d.judge(w, l, r, now, now.Add(r.taken))
}

// ended has the budget forget a lease.
func (d *Dispatcher) ended(l *lease) {
	if !l.ended {
		l.queue.group.budget.Ended(l.token)
		l.ended = true
	}
}

var errTooLong = errors.New("the answer is longer than max-response-bytes")

// judge decides what a reply means for its message.
func (d *Dispatcher) judge(w *worker, l *lease, r reply, sentAt, now time.Time) ending {
	ctx := w.ctx
	q, b := l.queue, l.queue.group.budget
	if r.err != nil && ctx.Err() != nil { // it was us who ended it
		switch context.Cause(ctx) {
		case errFenced: // somebody else has it
			q.fenced.Add(1)
			return ending{}
		case errClientCancelled:
			return d.settle(w, l, failed(codeCancelled, "cancelled"), "", nil)
		}
		return d.giveBack(ctx, l)
	}
	if errors.Is(r.err, errTooLong) || errors.Is(r.err, upstream.ErrRequest) {
		q.outcomes[outcomeFailed].Add(1)
		return d.settle(w, l, failed(codeInvalid, r.err.Error()), "", nil)
	}
	hint := retryAfter(r.after, now)
	if r.status == 0 {
		if !r.written && !r.late && b.Unreachable(now) {
			d.log.Warn("the gateway cannot be reached", "queue", q.Name, "err", r.err)
			q.trips.add("unreachable")
		}
		return d.again(w, l, r.written || r.late, 0, r, 0, now)
	}
	said := judge(r.status, r.dropped, d.cfg.OverloadExempt)
	success := said == final && r.status/100 == 2 && r.err == nil
	b.Answered(success)
	l.grant.said, l.grant.success, l.grant.sentAt = said, success, sentAt
	switch {
	case said == refused:
		q.outcomes[outcomeShed].Add(1)
		if b.Shed(sentAt, hint, now) {
			q.trips.add(statusLabel(r.status))
			d.log.Warn("refused for overload: the gate is closed", "queue", q.Name, "status", r.status, "reason", r.dropped)
		}
		return d.again(w, l, false, l.m.sheds+1, r, hint, now)
	case said == overtaken:
		return d.again(w, l, false, 0, r, hint, now)
	case said == again || r.err != nil: // an answer that breaks off is none
		if r.status < 500 {
			hint = 0
		}
		return d.again(w, l, true, 0, r, hint, now)
	}
	if r.status/100 == 2 {
		q.outcomes[outcomeSuccess].Add(1)
	} else {
		q.outcomes[outcomeFailed].Add(1)
	}
	a := answered(r.status, r.body)
	q.used(a.usage)
	return d.settle(w, l, a, r.dropped, nil)
}

// again has a message sent once more, later; or settles it if there is no later.
func (d *Dispatcher) again(w *worker, l *lease, counted bool, sheds int, r reply, hint time.Duration, now time.Time) ending {
	m := l.m
	attempts := m.attempts
	k := max(1, min(sheds, shedBackoff))
	if counted {
		attempts++
		k = attempts
	}
	last := failed(codeAttempts, "no attempt was successful")
	whole := r.status != 0 && r.err == nil
	if whole {
		last = answered(r.status, r.body)
	}
	if counted && d.cfg.MaxAttempts > 0 && attempts >= d.cfg.MaxAttempts {
		l.queue.outcomes[outcomeFailed].Add(1)
		dead := &deadLetter{reason: deadAttempts, deliveries: l.delivery, attempts: attempts, status: r.status}
		if r.err != nil {
			dead.err = r.err.Error()
		}
		return d.settle(w, l, last, "", dead)
	}
	rng := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	delay, ok := backoff(k, m.deadline.Sub(now), hint, rng)
	if !ok {
		l.queue.outcomes[outcomeDeadline].Add(1)
		if !whole {
			last = failed(codeDeadline, "deadline exceeded")
		}
		return d.settle(w, l, last, "", nil)
	}
	next, err := m.rewritten(l.queue, attempts, sheds)
	if err != nil { // it was parsed before
		next = m.raw
	}
	return ending{step: Delayed, call: d.store.delay(l, delay, next)}
}

// settle publishes the result of a leased message.
func (d *Dispatcher) settle(w *worker, l *lease, r result, dropped string, dead *deadLetter) ending {
	sent := l.m.retries
	if r.StatusCode != 0 || dead != nil {
		sent++
	}
	w.post.result = r.append(w.post.result[:0], l.m, l.queue, sent, dropped, d.cfg.ResultExtras, time.Now())
	e := settlement{queue: l.queue, m: l.m, token: l.token, list: d.listOf(l.queue, l.m), result: w.post.result, dead: dead}
	if dead == nil {
		return ending{step: Settled, settlement: &e}
	}
	if d.store.cluster {
		return ending{step: Settled, settlement: &e, dead: dead.reason}
	}
	return ending{step: Settled, call: d.store.settling(e), dead: dead.reason}
}

// giveBack puts a message back as it was.
func (d *Dispatcher) giveBack(ctx context.Context, l *lease) ending {
	if errors.Is(context.Cause(ctx), errFenced) {
		l.queue.fenced.Add(1)
		return ending{}
	}
	if l.pause { // not to be seen by the next round at once
		if left := time.Until(l.m.deadline); left > 0 {
			return ending{step: Released, call: d.store.delay(l, min(d.cfg.RefuseHold, left), l.m.raw)}
		}
	}
	return ending{step: Released, call: d.store.release(l)}
}

const (
	persistLeast = 100 * time.Millisecond
	persistMost  = 5 * time.Second
	lastWords    = 10 * time.Second // that finish takes at most once the process is to end
)

// finish writes what became of a message, and tries again while Redis is away: until the lease is lost or
// ResultHoldMax is over. Then the message is worked on once more, rather than lost. It returns the worker's
// next lease, nil if there is none any more.
func (d *Dispatcher) finish(ctx context.Context, w *worker, l *lease, e ending) *lease {
	if e.step == "" {
		d.done(l)
		return d.next(ctx, w)
	}
	l.ending.Store(true)
	w.write = write{ending: e, lease: l, worker: w}
	begun := time.Now()
	for pause := persistLeast; ; pause = min(2*pause, persistMost) {
		if d.store.cluster && e.settlement != nil {
			timed, cancel := context.WithTimeout(context.WithoutCancel(d.requests), persistMost)
			w.write.err = d.store.settle(timed, *e.settlement)
			cancel()
		} else if next, ok := d.submit(ctx, w); next != nil || !ok {
			return next
		}
		err := w.write.err
		if err == nil || errors.Is(err, errFenced) {
			d.wrote(l, &w.write.ending)
			break
		}
		if time.Since(begun) > d.cfg.ResultHoldMax || d.isLeaving() && d.requests.Err() != nil && time.Since(begun) > lastWords {
			d.log.Error("what became of a message could not be stored: it will be sent again", "queue", l.queue.Name, "id", l.m.id, "err", err)
			break
		}
		d.metrics.redisErrors.Add(1)
		time.Sleep(pause)
	}
	d.done(l)
	return d.next(ctx, w)
}

// wrote tells that Redis knows what became of a lease, or that somebody else has its message.
func (d *Dispatcher) wrote(l *lease, e *ending) {
	d.ended(l)
	if e.err != nil {
		l.queue.fenced.Add(1)
		d.log.Warn("somebody else has the message by now", "queue", l.queue.Name, "id", l.m.id)
		return
	}
	d.step(e.step, l.m)
	if e.dead != "" {
		l.queue.letter(e.dead)
	}
}

// done forgets a lease, whatever became of it, and gives back what gates have given.
func (d *Dispatcher) done(l *lease) {
	l.grant.release(context.WithoutCancel(d.requests))
	d.ended(l)
	d.mu.Lock()
	d.forgetLocked(l)
	d.idleLocked()
	d.mu.Unlock()
}

// end cancels the work on a lease with a reason. Its worker may be at another one as soon as d.mu is let go.
func (d *Dispatcher) end(l *lease, why error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if cancel := d.held[l]; cancel != nil {
		cancel(why)
	}
}
