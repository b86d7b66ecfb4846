package dispatch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

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

// watch looks at all groups when there may be something to send, until keeping ends; workers do so too when
// they have ended their work on something. After ctx nothing is begun.
func (d *Dispatcher) watch(ctx, keeping context.Context) {
	t := time.NewTicker(time.Duration(d.transport.PollMS) * time.Millisecond)
	defer t.Stop()
	for keeping.Err() == nil {
		d.look(ctx)
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

// rounds claims what groups may send now. The first of them is another one each time, for the sake of those
// that share a pool of workers. Groups with gates that have to be asked have their turn later; of them that
// is claimed for which the gates were asked.
func (d *Dispatcher) rounds(ctx context.Context, x *exchange) {
	d.turns++
	for i := range d.groups {
		g := d.groups[(d.turns+i)%len(d.groups)]
		if g.asks != nil {
			d.admit(ctx, g, x)
			continue
		}
		chosen, err := d.choose(ctx, g, x)
		if err != nil {
			d.complain(ctx, g, err)
			continue
		}
		x.claim(chosen, false, time.Now())
	}
	if len(x.claims) > 0 {
		d.mu.Lock()
		d.claiming++
		d.mu.Unlock()
	}
}

// complain tells that a group could not be looked at.
func (d *Dispatcher) complain(ctx context.Context, g *group, err error) {
	if ctx.Err() == nil {
		d.metrics.redisErrors.Add(1)
		d.log.Warn("a round has failed", "group", g.name, "err", err)
	}
}

// choose is what one group may send now. It no longer counts as known.
func (d *Dispatcher) choose(ctx context.Context, g *group, x *exchange) ([]head, error) {
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
		return nil, nil
	}
	var all [][]head
	g.hungry = false
	for _, q := range g.queues {
		free := x.tally(q.workers).left
		g.hungry = g.hungry || free <= 0
		if free <= 0 || now.Before(q.shut) {
			continue
		}
		if g.budget.Unit() == budget.Requests { // a full queue is not read for the one that may go
			free = min(free, dec.Allowed)
		}
		heads, err := d.heads(ctx, q, free, now)
		if err != nil {
			return nil, err
		}
		if len(heads) > 0 {
			all = append(all, heads)
		}
	}
	if len(all) == 0 {
		return nil, nil
	}
	chosen := d.fitting(g, dec, d.merge.order(all, d.rng), x, now)
	if len(chosen) == 0 {
		return nil, nil
	}
	if d.cfg.DryRun {
		d.log.Info("dry run: these would be sent", "group", g.name, "requests", len(chosen), "first", chosen[0].m.id, "allowed", dec.Allowed)
		return nil, nil
	}
	for _, q := range g.queues {
		q.ahead = slices.DeleteFunc(q.ahead, func(h head) bool { return h.grant.chosen })
	}
	if h := chosen[0]; h.unfit {
		d.nudge()
		return nil, d.reject(ctx, h.queue, h.m, failed(codeInvalid, "the request is larger than the capacity"), &deadLetter{reason: deadOversize})
	}
	for _, h := range chosen {
		x.tally(h.queue.workers).left--
	}
	return chosen, nil
}

const (
	leastPeek = 16  // members that are read of a queue at once
	quickPeek = 256 // where all that were read last are gone before aheadFor is over
	maxPeek   = 2000
	// aheadFor is how long messages that were seen are taken without another look at their queue. A
	// new one with an earlier deadline may have to wait for so long.
	aheadFor = 100 * time.Millisecond
)

// reach is how many messages are looked at where n may go: more and more, while they last less than aheadFor.
func (q *Queue) reach(n int64) int64 {
	q.reached = min(max(2*q.reached, leastPeek), quickPeek)
	return min(max(q.reached, 2*n)+int64(len(q.holds)), maxPeek)
}

// heads is the first n messages of a queue that may be sent, as far as they are known. What never can be is
// settled.
func (d *Dispatcher) heads(ctx context.Context, q *Queue, n int64, now time.Time) ([]head, error) {
	known := int64(len(q.ahead) + len(q.rest))
	if old := now.Sub(q.seen) > aheadFor; old || known < n {
		if old {
			q.reached = 0
		}
		maps.DeleteFunc(q.holds, func(_ string, until time.Time) bool { return !now.Before(until) })
		timed, cancel := context.WithTimeout(ctx, persistMost)
		found, err := d.store.peek(timed, q, q.reach(n))
		cancel()
		if err != nil {
			return nil, err
		}
		q.known, q.ahead = append(q.known[:0], q.ahead...), q.ahead[:0]
		q.rest, q.seen = found, now
	}
	for int64(len(q.ahead)) < n && len(q.rest) > 0 {
		z := q.rest[0]
		q.rest = q.rest[1:]
		h, ok, err := d.head(ctx, q, z, now)
		if err != nil {
			return nil, err
		}
		if ok {
			q.ahead = append(q.ahead, h)
		}
	}
	return q.ahead[:min(int64(len(q.ahead)), n)], nil
}

// head makes a head of what was found in a queue, if it may be sent. One that was known before is the same again.
func (d *Dispatcher) head(ctx context.Context, q *Queue, z redis.Z, now time.Time) (head, bool, error) {
	raw, _ := z.Member.(string)
	for len(q.known) > 0 && (q.known[0].m.score < z.Score || q.known[0].m.score == z.Score && string(q.known[0].m.raw) < raw) {
		q.known = q.known[1:]
	}
	if len(q.known) > 0 && q.known[0].m.score == z.Score && string(q.known[0].m.raw) == raw {
		h := q.known[0]
		q.known = q.known[1:]
		gone, err := d.hopeless(ctx, q, h.m, nil, now) // by now
		return h, !gone, err
	}
	m, bad := parse(raw, z.Score)
	if _, held := q.holds[m.gid]; held {
		return head{}, false, nil
	}
	m.labels = merged(m.labels, q.Labels)
	d.step(Peeked, m)
	if gone, err := d.hopeless(ctx, q, m, bad, now); err != nil || gone {
		return head{}, false, err
	}
	weight, bad := d.weigh(q, m)
	if bad != nil { // it cannot be made into a request
		return head{}, false, d.reject(ctx, q, m, failed(codeInvalid, bad.Error()), nil)
	}
	return head{m: m, queue: q, weight: weight, grant: &grant{}}, true, nil
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
		e.result = r.append(nil, m, q, m.retries, "", d.cfg.ResultExtras, time.Now())
	}
	timed, cancel := context.WithTimeout(ctx, persistMost)
	defer cancel()
	err := d.store.settle(timed, e)
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

// fitting takes the longest prefix that fits, of those whose pools have a free worker.
func (d *Dispatcher) fitting(g *group, dec budget.Decision, all []head, x *exchange, now time.Time) []head {
	taken := map[*workers]int64{}
	of := map[*Queue]int{}
	left := dec.Allowed
	var chosen []head
	for _, h := range all {
		w := h.queue.workers
		if taken[w] >= x.tally(w).left || d.transport.BatchSize > 0 && of[h.queue] >= d.transport.BatchSize {
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

// maxHolds bounds how many messages of a queue are passed over.
const maxHolds = 1000

// hold passes a message over for a while. Only who has the turn calls it.
func (d *Dispatcher) hold(q *Queue, m *message, now time.Time) {
	if len(q.holds) < maxHolds {
		q.holds[m.gid] = now.Add(min(d.cfg.RefuseHold, max(0, m.deadline.Sub(now))))
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
