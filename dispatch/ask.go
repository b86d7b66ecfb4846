package dispatch

import (
	"context"
	"slices"
	"time"

	"spillway/dispatch/budget"
)

// question is heads about which gates are asked, beside the exchanges: a gate that hangs must not hold up what
// has nothing to do with it. Each head has a worker reserved.
type question struct {
	heads []head
	going []head
	held  []head   // to be passed over for a while
	shut  []*Queue // whose gates have failed
}

// ask has gates asked about what groups may send now.
func (d *Dispatcher) ask(ctx context.Context, x *exchange) {
	defer func() { x.tallies = x.tallies[:0] }() // these workers are reserved in another way
	for _, g := range d.groups {
		if g.asks == nil || g.asking {
			continue
		}
		x.tallies = x.tallies[:0]
		chosen, err := d.choose(ctx, g, x)
		if err != nil {
			d.complain(ctx, g, err)
		}
		d.want(g, len(chosen) > 0)
		if len(chosen) == 0 {
			continue
		}
		for _, h := range chosen {
			h.queue.workers.free.Add(-1)
		}
		g.asking = true
		g.asks <- question{heads: chosen}
	}
}

// want has pools keep their next free workers, once, for a group that finds none free where others take them
// before they are.
func (d *Dispatcher) want(g *group, served bool) {
	for _, q := range g.queues {
		w := q.workers
		if w.wanted && !served { // then others may have them
			d.nudge()
		}
		w.wanted = !w.wanted && !served && g.hungry && len(q.ahead)+len(q.rest)+int(q.depth.Load().pending) > 0
	}
}

// asks answers the questions of one group, until keeping ends.
func (d *Dispatcher) asks(ctx, keeping context.Context, g *group) {
	for {
		select {
		case <-keeping.Done():
			return
		case q := <-g.asks:
			timed, cancel := context.WithTimeout(ctx, persistMost)
			d.answer(timed, &q)
			cancel()
			g.asked <- q
			d.nudge()
		}
	}
}

// answer asks for cancellations, and the queues' gates.
func (d *Dispatcher) answer(ctx context.Context, a *question) {
	var all []*message
	for _, h := range a.heads {
		all = append(all, h.m)
	}
	cancelled, err := d.store.cancelled(ctx, all)
	if err != nil {
		d.complain(ctx, a.heads[0].queue.group, err)
		d.letGo(a.heads)
		return
	}
	for _, h := range a.heads {
		going := h.queue.gate.admit == nil
		var err error
		if cancelled[h.m] {
			going, err = false, d.reject(ctx, h.queue, h.m, failed(codeCancelled, "cancelled"), nil)
		} else if !going {
			going, err = d.apply(ctx, h, a)
		}
		if going {
			a.going = append(a.going, h)
			continue
		}
		if err != nil {
			d.complain(ctx, h.queue.group, err)
		}
		d.letGo([]head{h})
	}
}

// apply asks the gate of a queue about one message. It tells whether that may go, and what has kept it from
// being settled if it may never.
func (d *Dispatcher) apply(ctx context.Context, h head, a *question) (going bool, err error) {
	q := h.queue
	if slices.Contains(a.shut, q) {
		return false, nil
	}
	said, err := q.gate.admit.apply(ctx, h.m, h.grant)
	q.failing.Store(err != nil)
	switch {
	case err != nil: // as good as closed, for all of the queue
		q.decisions[gateError].Add(1)
		d.log.Warn("a gate has failed", "queue", q.Name, "err", err)
		a.shut = append(a.shut, q)
	case said == proceed:
		return true, nil
	case said == drop:
		q.decisions[gateDropped].Add(1)
		return false, d.reject(ctx, q, h.m, h.grant.dropped, nil)
	default:
		q.decisions[gateQuota].Add(1)
		a.held = append(a.held, h)
	}
	return false, nil
}

// letGo gives back what gates have given to messages that are not claimed, and their workers.
func (d *Dispatcher) letGo(all []head) {
	for _, h := range all {
		h.grant.release(context.WithoutCancel(d.requests))
		h.queue.workers.free.Add(1)
	}
}

// admit claims the messages that a group's gates have let through, if that is known by now.
func (d *Dispatcher) admit(ctx context.Context, g *group, x *exchange) {
	var a question
	select {
	case a = <-g.asked:
		g.asking = false
	default:
		return
	}
	now := time.Now()
	for _, q := range a.shut {
		q.shut = now.Add(d.cfg.RefuseHold)
	}
	for _, h := range a.held {
		d.hold(h.queue, h.m, now)
	}
	if len(a.held) > 0 {
		d.nudge() // others may go in their place
	}
	dec := g.budget.Decide(now)
	n, left := 0, dec.Allowed
	for n < len(a.going) && dec.State == budget.Open && (a.going[n].weight <= left || dec.InFlight == 0 && n == 0) {
		left -= a.going[n].weight
		n++
	}
	x.claim(a.going[:n], true, now)
	if late := a.going[n:]; len(late) > 0 {
		d.working.Go(func() { d.letGo(late); d.nudge() })
	}
}
