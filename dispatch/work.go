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

// work brings one leased message to its end: a result, a further attempt later, or back.
func (d *Dispatcher) work(ctx context.Context, l *lease, g *grant) {
	defer d.done(l, g)
	if !d.throughGate(ctx, l, g) {
		return
	}
	now := time.Now()
	switch {
	case errors.Is(context.Cause(ctx), errClientCancelled):
		d.settle(l, failed(codeCancelled, "cancelled"), "", nil)
	case ctx.Err() != nil, d.isLeaving(), l.queue.group.budget.Latched(now):
		d.giveBack(ctx, l)
	case l.m.expired(now):
		l.queue.outcomes[outcomeDeadline].Add(1)
		d.settle(l, failed(codeDeadline, "deadline exceeded"), "", nil)
	default:
		d.attempt(ctx, l, g)
	}
}

func (d *Dispatcher) isLeaving() bool {
	select {
	case <-d.leaving:
		return true
	default:
		return false
	}
}

// throughGate waits for the gate of the pool. It reports false if the message was given back or settled.
func (d *Dispatcher) throughGate(ctx context.Context, l *lease, g *grant) bool {
	gate := l.queue.workers.admit
	if gate == nil {
		return true
	}
	until := time.Now().Add(d.cfg.PoolWaitMax)
	waited := false
	for {
		said, err := gate.apply(ctx, l.m, g)
		now := time.Now()
		switch {
		case err == nil && said == proceed:
			if waited { // it may have been cancelled meanwhile
				if found, err := d.store.cancelled(ctx, []*message{l.m}); err == nil && found[l.m] {
					d.settle(l, failed(codeCancelled, "cancelled"), "", nil)
					return false
				}
			}
			return true
		case err == nil && said == drop:
			l.queue.decisions[gateDropped].Add(1)
			d.settle(l, g.dropped, "", nil)
			return false
		case err == nil && said == wait && ctx.Err() == nil && !d.isLeaving() && now.Before(until) && !l.m.expired(now):
		default:
			if err != nil {
				l.queue.decisions[gateError].Add(1)
				d.log.Warn("a gate has failed", "pool", l.queue.workers.ID, "err", err)
			} else {
				l.queue.decisions[gateQuota].Add(1)
			}
			l.pause = true
			d.giveBack(ctx, l)
			return false
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

// attempt sends the request once and deals with what comes of it.
func (d *Dispatcher) attempt(ctx context.Context, l *lease, g *grant) {
	m, q := l.m, l.queue
	p := posts.Get().(*post)
	defer p.release()
	if err := d.compose(p, m, q, g); err != nil {
		q.outcomes[outcomeFailed].Add(1)
		d.settle(l, failed(codeInvalid, err.Error()), "", nil)
		return
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
	d.metrics.sent(q, m, now)
	d.step(Sending, m)
	r := q.gateway.send(ctx, p, limit, d.cfg.MaxResponseBytes)
	q.group.budget.Ended(l.token)
	d.step(Answered, m)
	now = time.Now()
	d.metrics.latency(q, r.taken)
	d.judge(ctx, l, r, now.Add(-r.taken), now)
}

var errTooLong = errors.New("the answer is longer than max-response-bytes")

// judge decides what a reply means for its message.
func (d *Dispatcher) judge(ctx context.Context, l *lease, r reply, sentAt, now time.Time) {
	q, b := l.queue, l.queue.group.budget
	if r.err != nil && ctx.Err() != nil { // it was us who ended it
		switch context.Cause(ctx) {
		case errFenced: // somebody else has it
			q.fenced.Add(1)
		case errClientCancelled:
			d.settle(l, failed(codeCancelled, "cancelled"), "", nil)
		default:
			d.giveBack(ctx, l)
		}
		return
	}
	if errors.Is(r.err, errTooLong) || errors.Is(r.err, upstream.ErrRequest) {
		q.outcomes[outcomeFailed].Add(1)
		d.settle(l, failed(codeInvalid, r.err.Error()), "", nil)
		return
	}
	hint := retryAfter(r.after, now)
	if r.status == 0 {
		if !r.written && !r.late && b.Unreachable(now) {
			d.log.Warn("the gateway cannot be reached", "queue", q.Name, "err", r.err)
			q.trips.add("unreachable")
		}
		d.again(l, r.written || r.late, 0, r, 0, now)
		return
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
		d.again(l, false, l.m.sheds+1, r, hint, now)
	case said == overtaken:
		d.again(l, false, 0, r, hint, now)
	case said == again || r.err != nil: // an answer that breaks off is none
		if r.status < 500 {
			hint = 0
		}
		d.again(l, true, 0, r, hint, now)
	default:
		if r.status/100 == 2 {
			q.outcomes[outcomeSuccess].Add(1)
		} else {
			q.outcomes[outcomeFailed].Add(1)
		}
		a := answered(r.status, r.body)
		d.metrics.usage(q, a.usage)
		d.settle(l, a, r.dropped, nil)
	}
}

// again has a message sent once more, later; or settles it if there is no later.
func (d *Dispatcher) again(l *lease, counted bool, sheds int, r reply, hint time.Duration, now time.Time) {
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
		d.settle(l, last, "", dead)
		return
	}
	rng := rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))
	delay, ok := backoff(k, m.deadline.Sub(now), hint, rng)
	if !ok {
		l.queue.outcomes[outcomeDeadline].Add(1)
		if !whole {
			last = failed(codeDeadline, "deadline exceeded")
		}
		d.settle(l, last, "", nil)
		return
	}
	next, err := m.rewritten(l.queue, attempts, sheds)
	if err != nil { // it was parsed before
		next = m.raw
	}
	d.persist(l, Delayed, func(context.Context) error { return d.write(l, d.store.delay(l, delay, next)) })
}

// settle publishes the result of a leased message.
func (d *Dispatcher) settle(l *lease, r result, dropped string, dead *deadLetter) {
	sent := l.m.retries
	if r.StatusCode != 0 || dead != nil {
		sent++
	}
	body := r.of(l.m, l.queue, sent, dropped, d.cfg.ResultExtras, time.Now())
	e := settlement{queue: l.queue, m: l.m, token: l.token, list: d.listOf(l.queue, l.m), result: body, dead: dead}
	d.persist(l, Settled, func(ctx context.Context) error {
		if d.store.cluster {
			return d.store.settle(ctx, e)
		}
		return d.write(l, d.store.settling(e))
	})
	if dead != nil {
		l.queue.letter(dead.reason)
	}
}

// giveBack puts a message back as it was.
func (d *Dispatcher) giveBack(ctx context.Context, l *lease) {
	if errors.Is(context.Cause(ctx), errFenced) {
		l.queue.fenced.Add(1)
		return
	}
	if l.pause { // not to be seen by the next round at once
		if left := time.Until(l.m.deadline); left > 0 {
			d.persist(l, Released, func(context.Context) error {
				return d.write(l, d.store.delay(l, min(d.cfg.RefuseHold, left), l.m.raw))
			})
			return
		}
	}
	d.persist(l, Released, func(context.Context) error { return d.write(l, d.store.release(l)) })
}

const (
	persistLeast = 100 * time.Millisecond
	persistMost  = 5 * time.Second
	lastWords    = 10 * time.Second // that persist takes at most once the process is to end
)

// persist writes what became of a message, and tries again while Redis is away: until the lease is
// lost or ResultHoldMax is over. Then the message is worked on once more, rather than lost.
func (d *Dispatcher) persist(l *lease, s Step, write func(context.Context) error) {
	l.ending.Store(true)
	begun := time.Now()
	pause := persistLeast
	for {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(d.requests), persistMost)
		err := write(ctx)
		cancel()
		switch {
		case err == nil:
			d.step(s, l.m)
			return
		case errors.Is(err, errFenced):
			l.queue.fenced.Add(1)
			d.log.Warn("somebody else has the message by now", "queue", l.queue.Name, "id", l.m.id)
			return
		case time.Since(begun) > d.cfg.ResultHoldMax, d.isLeaving() && d.requests.Err() != nil && time.Since(begun) > lastWords:
			d.log.Error("what became of a message could not be stored: it will be sent again", "queue", l.queue.Name, "id", l.m.id, "err", err)
			return
		}
		d.metrics.redisErrors.Add(1)
		time.Sleep(pause)
		pause = min(2*pause, persistMost)
	}
}
