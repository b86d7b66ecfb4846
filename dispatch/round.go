package dispatch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"spillway/dispatch/budget"
)

// poll reads one input of a group again and again.
func (d *Dispatcher) poll(ctx context.Context, g *group, i int) {
	in, state := &g.inputs[i], g.states[i]
	t := time.NewTicker(in.every)
	defer t.Stop()
	first := true
	for {
		r, err := in.reader.read(ctx)
		now := time.Now()
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			r = budget.Reading{D: nan, MaxSys: nan}
		}
		if !g.budget.Read(i, r, now) && err == nil {
			err = fmt.Errorf("no number, or too old: d %v, capacity %v, of %v ago", r.D, r.MaxSys, now.Sub(r.Time).Round(time.Millisecond))
		}
		was := state.available.Swap(err == nil)
		switch {
		case err != nil && (was || first || now.Sub(state.logged) >= time.Minute):
			d.log.Warn("a gate cannot be read, and is closed", "group", g.name, "source", in.name, "err", err)
			state.logged = now
		case err == nil && !was:
			d.log.Info("a gate can be read", "group", g.name, "source", in.name, "d", r.D, "max_sys", r.MaxSys)
		}
		first = false
		d.nudge()
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

// rounds looks at all groups when there may be something to send, until ctx ends, and writes what
// became of messages, until keeping does.
func (d *Dispatcher) rounds(ctx, keeping context.Context) {
	t := time.NewTicker(time.Duration(d.transport.PollMS) * time.Millisecond)
	defer t.Stop()
	last := sync.OnceFunc(func() { close(d.last) })
	defer last()
	x := exchange{d: d, giving: map[*workers]int64{}}
	for keeping.Err() == nil {
		x.take()
		if ctx.Err() != nil {
			last()
		} else {
			for _, g := range d.groups {
				timed, cancel := context.WithTimeout(ctx, persistMost)
				err := d.round(timed, g, &x)
				cancel()
				if err != nil && ctx.Err() == nil {
					d.metrics.redisErrors.Add(1)
					d.log.Warn("a round has failed", "group", g.name, "err", err)
				}
			}
		}
		x.run(keeping)
		select {
		case <-keeping.Done():
		case <-d.wake:
		case <-t.C:
		}
	}
}

// head is a message that could be sent now.
type head struct {
	m      *message
	queue  *Queue
	weight int64
	grant  *grant
	unfit  bool // it exceeds all capacity, and is to be rejected
}

// round sends what one group may send now.
func (d *Dispatcher) round(ctx context.Context, g *group, x *exchange) error {
	now := time.Now()
	dec := g.budget.Decide(now)
	d.tell(g, dec)
	open := dec.State == budget.Open
	if !open {
		g.patience.Pause(now)
	}
	if !open || dec.Allowed == 0 && g.budget.Unit() == budget.Requests {
		for _, q := range g.queues {
			if q.depth.Load().pending > 0 {
				q.decisions[gateClosed].Add(1)
			}
		}
		return nil
	}
	var all [][]head
	for _, q := range g.queues {
		free := x.free(q.workers)
		if free <= 0 || now.Before(q.shut) {
			continue
		}
		if g.budget.Unit() == budget.Requests { // a full queue is not read for the one that may go
			free = min(free, dec.Allowed)
		}
		heads, err := d.heads(ctx, q, free, now)
		if err != nil {
			return err
		}
		if len(heads) > 0 {
			all = append(all, heads)
		}
	}
	chosen := d.choose(g, dec, d.merge.order(all, d.rng), x, now)
	if len(chosen) == 0 {
		return nil
	}
	if d.cfg.DryRun {
		d.log.Info("dry run: these would be sent", "group", g.name, "requests", len(chosen), "first", chosen[0].m.id, "allowed", dec.Allowed)
		return nil
	}
	for _, q := range g.queues {
		q.ahead = slices.DeleteFunc(q.ahead, func(h head) bool { return h.grant.chosen })
	}
	if h := chosen[0]; h.unfit {
		d.nudge()
		return d.reject(ctx, h.queue, h.m, failed(codeInvalid, "the request is larger than the capacity"), &deadLetter{reason: deadOversize})
	}
	chosen, err := d.admitted(ctx, chosen, x, now)
	if err != nil {
		return err
	}
	return d.launch(ctx, g, chosen, x)
}

const (
	leastPeek = 16 // members that are read of a queue at once
	maxPeek   = 2000
	// aheadFor is how long messages that were seen are taken without another look at their queue. A
	// new one with an earlier deadline may have to wait for so long.
	aheadFor = 100 * time.Millisecond
)

// heads is the first n messages of a queue that may be sent, as far as they are known.
func (d *Dispatcher) heads(ctx context.Context, q *Queue, n int64, now time.Time) ([]head, error) {
	if int64(len(q.ahead)) < n || now.Sub(q.seen) > aheadFor {
		all, err := d.peek(ctx, q, max(2*n, leastPeek), now)
		if err != nil {
			return nil, err
		}
		q.ahead, q.seen = all, now
	}
	return q.ahead[:min(int64(len(q.ahead)), n)], nil
}

// peek reads the first messages of a queue that may be sent. What never can be is settled.
func (d *Dispatcher) peek(ctx context.Context, q *Queue, n int64, now time.Time) ([]head, error) {
	maps.DeleteFunc(q.holds, func(_ string, until time.Time) bool { return !now.Before(until) })
	found, err := d.store.peek(ctx, q, min(n+int64(len(q.holds)), maxPeek))
	if err != nil {
		return nil, err
	}
	q.ahead = q.ahead[:0]
	all := q.ahead
	for _, z := range found {
		raw, _ := z.Member.(string)
		m, bad := parse(raw, z.Score)
		if _, held := q.holds[m.gid]; held {
			continue
		}
		m.labels = merged(m.labels, q.Labels)
		d.step(Peeked, m)
		if gone, err := d.hopeless(ctx, q, m, bad, now); err != nil {
			return nil, err
		} else if gone {
			continue
		}
		weight, bad := d.weigh(q, m)
		if bad != nil { // it cannot be made into a request
			if err := d.reject(ctx, q, m, failed(codeInvalid, bad.Error()), nil); err != nil {
				return nil, err
			}
			continue
		}
		all = append(all, head{m: m, queue: q, weight: weight, grant: &grant{}})
	}
	return all, nil
}

func merged(a, b map[string]string) map[string]string {
	if len(b) == 0 {
		return a
	}
	all := maps.Clone(b)
	for k, v := range a {
		if _, ok := all[k]; !ok {
			all[k] = v
		}
	}
	return all
}

// hopeless settles a message that must not be sent: malformed, invalid or expired.
func (d *Dispatcher) hopeless(ctx context.Context, q *Queue, m *message, bad error, now time.Time) (bool, error) {
	switch {
	case bad != nil:
		r := failed(codeInvalid, bad.Error())
		return true, d.reject(ctx, q, m, r, &deadLetter{reason: deadMalformed, err: bad.Error()})
	case m.expired(now):
		q.outcomes[outcomeDeadline].Add(1)
		return true, d.reject(ctx, q, m, failed(codeDeadline, "deadline exceeded"), nil)
	}
	if err := m.invalid(); err != nil {
		return true, d.reject(ctx, q, m, failed(codeInvalid, err.Error()), nil)
	}
	return false, nil
}

// reject settles a message that is still in its queue.
func (d *Dispatcher) reject(ctx context.Context, q *Queue, m *message, r result, dead *deadLetter) error {
	if d.cfg.DryRun {
		d.log.Info("dry run: this would be rejected", "id", m.id, "code", r.ErrorCode, "why", r.ErrorMessage)
		return nil
	}
	e := settlement{queue: q, m: m, list: d.listOf(q, m), dead: dead}
	if m.id != "" {
		e.result = r.of(m, q, m.retries, "", d.cfg.ResultExtras, time.Now())
	}
	err := d.store.settle(ctx, e)
	if errors.Is(err, errFenced) {
		return nil // another dispatcher was quicker
	}
	if err == nil {
		if dead != nil {
			q.letter(dead.reason)
		} else if r.ErrorCode == codeInvalid {
			q.outcomes[outcomeFailed].Add(1)
		}
		d.step(Settled, m)
	}
	return err
}

// listOf is where the result of a message goes.
func (d *Dispatcher) listOf(q *Queue, m *message) string {
	if d.cfg.ResultPrecedence == "config" {
		return cmp.Or(q.ResultQueue, m.results, d.transport.ResultQueue)
	}
	return cmp.Or(m.results, q.ResultQueue, d.transport.ResultQueue)
}

// choose takes the longest prefix that fits, of those whose pools have a free worker.
func (d *Dispatcher) choose(g *group, dec budget.Decision, all []head, x *exchange, now time.Time) []head {
	taken := map[*workers]int64{}
	of := map[*Queue]int{}
	left := dec.Allowed
	var chosen []head
	for _, h := range all {
		w := h.queue.workers
		if taken[w] >= x.free(w) || d.transport.BatchSize > 0 && of[h.queue] >= d.transport.BatchSize {
			continue
		}
		if h.weight > left {
			if len(chosen) > 0 || g.patience.Wait(h.queue.Name+h.m.gid, now) < g.inputs[0].patience {
				return chosen
			}
			if g.inputs[0].reject && h.weight > dec.Most {
				h.queue.oversize.Add(1)
				g.patience.Reset()
				h.unfit, h.grant.chosen = true, !d.cfg.DryRun
				return []head{h}
			}
			if dec.InFlight == 0 {
				h.queue.oversize.Add(1)
				g.patience.Reset()
				h.grant.chosen = !d.cfg.DryRun
				return []head{h}
			}
			return chosen
		}
		left -= h.weight
		taken[w]++
		of[h.queue]++
		h.grant.chosen = !d.cfg.DryRun
		chosen = append(chosen, h)
	}
	if len(chosen) > 0 {
		g.patience.Reset()
	}
	return chosen
}

// admitted asks for cancellations, and the queues' gates. Where no gate is asked, claiming looks for
// cancellations.
func (d *Dispatcher) admitted(ctx context.Context, chosen []head, x *exchange, now time.Time) ([]head, error) {
	if !d.store.cluster && !slices.ContainsFunc(chosen, func(h head) bool { return h.queue.gate.admit != nil }) {
		return chosen, nil
	}
	x.run(ctx) // nobody is to wait for what follows
	var asked []*message
	for _, h := range chosen {
		asked = append(asked, h.m)
	}
	cancelled, err := d.store.cancelled(ctx, asked)
	if err != nil {
		return nil, err
	}
	var going []head
	for _, h := range chosen {
		q := h.queue
		if cancelled[h.m] {
			if err := d.reject(ctx, q, h.m, failed(codeCancelled, "cancelled"), nil); err != nil {
				return nil, err
			}
			continue
		}
		if q.gate.admit == nil {
			going = append(going, h)
			continue
		}
		if now.Before(q.shut) {
			continue
		}
		said, err := q.gate.admit.apply(ctx, h.m, h.grant)
		q.failing.Store(err != nil)
		switch {
		case err != nil: // as good as closed, for all of the queue
			q.decisions[gateError].Add(1)
			d.log.Warn("a gate has failed", "queue", q.Name, "err", err)
			h.grant.release(ctx)
			q.shut = now.Add(d.cfg.RefuseHold)
			continue
		case said == proceed:
			going = append(going, h)
			continue
		case said == drop:
			q.decisions[gateDropped].Add(1)
			h.grant.release(ctx)
			if err := d.reject(ctx, q, h.m, h.grant.dropped, nil); err != nil {
				return nil, err
			}
			continue
		default:
			q.decisions[gateQuota].Add(1)
		}
		h.grant.release(ctx)
		d.hold(q, h.m, now)
		d.nudge() // others may go in its place
	}
	return going, nil
}

// maxHolds bounds how many messages of a queue are passed over.
const maxHolds = 1000

// hold passes a message over for a while. Only the round's goroutine calls it.
func (d *Dispatcher) hold(q *Queue, m *message, now time.Time) {
	if len(q.holds) < maxHolds {
		q.holds[m.gid] = now.Add(min(d.cfg.RefuseHold, max(0, m.deadline.Sub(now))))
	}
}

// launch claims messages and begins to work on them.
func (d *Dispatcher) launch(ctx context.Context, g *group, chosen []head, x *exchange) error {
	byQueue := map[*Queue][]head{}
	for _, h := range chosen {
		byQueue[h.queue] = append(byQueue[h.queue], h)
	}
	var claims []claim
	for q, heads := range byQueue {
		var all []*message
		for _, h := range heads {
			all = append(all, h.m)
		}
		claims = append(claims, d.store.claim(q, all, d.cfg.LeaseTTL))
	}
	x.run(ctx, claims...)
	var all error
	for _, c := range claims {
		q := c.leases[0].queue
		grants := map[*message]head{}
		for _, h := range byQueue[q] {
			grants[h.m] = h
		}
		claimed, cancelled, err := c.got()
		if err != nil {
			all = errors.Join(all, err) // what was claimed all the same comes back when its lease ends
		}
		for _, m := range cancelled {
			all = errors.Join(all, d.reject(ctx, q, m, failed(codeCancelled, "cancelled"), nil))
		}
		for _, l := range claimed {
			h := grants[l.m]
			l.grant = h.grant
			delete(grants, l.m)
			d.step(Claimed, l.m)
			if l.delivery > 1 {
				q.redelivered.Add(1)
			}
			q.workers.free.Add(-1)
			g.budget.Sent(l.token, h.weight, time.Now())
			working, cancel := context.WithCancelCause(d.requests)
			d.mu.Lock()
			d.held[l] = cancel
			d.mu.Unlock()
			d.working.Go(func() { d.work(working, l, h.grant) })
		}
		for _, h := range grants {
			h.grant.release(ctx)
		}
	}
	return all
}

// done forgets a lease, whatever became of it.
func (d *Dispatcher) done(l *lease, g *grant) {
	g.release(context.WithoutCancel(d.requests))
	l.queue.group.budget.Ended(l.token)
	d.mu.Lock()
	d.held[l](nil)
	delete(d.held, l)
	d.mu.Unlock()
	if !l.freed {
		l.queue.workers.free.Add(1)
		d.nudge()
	}
}

// decide is what the budget allows, or that a gate cannot be asked.
func (g *group) decide(now time.Time) budget.Decision {
	dec := g.budget.Decide(now)
	for _, q := range g.queues {
		if q.failing.Load() {
			dec.State = max(dec.State, budget.Failed)
		}
	}
	return dec
}

// tell logs what opens and closes a gate.
func (d *Dispatcher) tell(g *group, dec budget.Decision) {
	if closed := dec.State != budget.Open; closed != g.closed {
		g.closed = closed
		d.log.Info("gate", g.tells(dec)...)
	}
}

// tells is a decision for the log.
func (g *group) tells(dec budget.Decision) []any {
	number := func(key string, v float64) slog.Attr {
		if known(v) == nil {
			return slog.String(key, "unknown")
		}
		return slog.Float64(key, v)
	}
	return []any{
		"group", g.name, "state", dec.State.String(), number("d", dec.D), "b", dec.B, number("max_sys", dec.MaxSys), "n", dec.N,
		"ledger", dec.Ledger, "in_flight", dec.InFlight, "allowed", dec.Allowed,
	}
}
