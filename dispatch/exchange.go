package dispatch

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"time"
)

// write is a call that ends the work on a lease, and its worker, who waits for it.
type write struct {
	ending
	lease  *lease
	worker *worker
	told   bool // what came of it is the worker's business
}

// exchange is what Redis is told at once: what became of messages, then claims of others, then a look
// at what is left. So one round trip ends the work on some and begins that on the next, and all that
// was finished during the one before shares one write to Redis's disk. Claims come after the writes, so
// workers that wait for theirs count as free, and yet there are never more leases than workers. Those
// that hold what a gate has given do not: it is given back after the write, and who comes before that
// would be refused.
//
// It is done by a worker that has something to write, or by the goroutine of watch. Who composes it, or takes
// in what came of it, has the turn. A second exchange may begin while one is on its way: when at least as many
// workers wait as are still at work, for then there would soon be nothing else to do.
type exchange struct {
	d       *Dispatcher
	takes   []*write
	claims  []claim
	calls   []*call
	settles []settling
	tallies []tally
	begun   []*lease
}

// tally is how many workers of a pool may be given something in an exchange.
type tally struct {
	workers  *workers
	giving   int64 // of them those that wait for a write of this exchange
	most     int64
	left     int64
	reserved int64 // of those that are free, so that no other exchange has them too
}

const (
	maxWrites     = 512     // of one exchange
	maxWriteBytes = 4 << 20 // of one exchange, but for the last
)

// take takes the writes that wait, as far as they fit.
func (x *exchange) take() {
	d := x.d
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.workingLocked() > 0 {
		// Workers whose answers are there come along. Without them there would be one write in this
		// exchange and all others in the next, and nothing to do during either.
		d.mu.Unlock()
		runtime.Gosched()
		d.mu.Lock()
	}
	n, size := 0, 0
	for n < len(d.writes) && n < maxWrites && size < maxWriteBytes {
		size += d.writes[n].size()
		n++
	}
	x.takes = append(x.takes, d.writes[:n]...)
	d.writes = slices.Delete(d.writes, 0, n)
	d.away += n
	x.tallies = x.tallies[:0]
}

// workingLocked is how many leases are being worked on.
func (d *Dispatcher) workingLocked() int { return len(d.held) - len(d.writes) - d.away }

// tally is that of a pool. Workers that wait for a write count, unless some before them were counted whose writes
// then failed.
func (x *exchange) tally(w *workers) *tally {
	at := slices.IndexFunc(x.tallies, func(t tally) bool { return t.workers == w })
	if at < 0 {
		t := tally{workers: w, most: w.free.Load()}
		if t.most >= 0 && !w.wanted {
			for _, o := range x.takes {
				if o.lease.queue.workers == w && !o.lease.grant.holds() {
					t.giving++
				}
			}
		}
		t.most += t.giving
		t.left = t.most
		at = len(x.tallies)
		x.tallies = append(x.tallies, t)
	}
	return &x.tallies[at]
}

// run does the exchange.
func (x *exchange) run(ctx context.Context) {
	if len(x.calls) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), persistMost)
	x.d.store.together(ctx, x.calls)
	cancel()
	for _, s := range x.settles {
		s.tell()
	}
	for _, t := range x.takes {
		if t.settlement == nil {
			t.err = t.call.owned()
		}
		// If it has failed its worker has to wait for another exchange.
		if t.told = t.err != nil && !errors.Is(t.err, errFenced) || t.lease.grant.holds(); !t.told {
			x.d.wrote(t.lease, &t.ending)
		}
	}
}

// compose makes the calls of the exchange: one for all results of a queue.
func (x *exchange) compose() {
	x.calls, x.settles = x.calls[:0], x.settles[:0]
	for _, t := range x.takes {
		if t.settlement == nil {
			x.calls = append(x.calls, t.call)
			continue
		}
		at := slices.IndexFunc(x.settles, func(s settling) bool { return s.queue == t.lease.queue })
		if at < 0 {
			at = len(x.settles)
			x.settles = append(x.settles, settling{queue: t.lease.queue})
		}
		x.settles[at].add(t)
	}
	for i := range x.settles {
		x.calls = append(x.calls, x.settles[i].call())
	}
	for _, c := range x.claims {
		x.calls = append(x.calls, c.call)
	}
	for i := range x.tallies {
		t := &x.tallies[i]
		t.reserved = max(0, t.most-t.left-t.giving)
		t.workers.free.Add(-t.reserved)
	}
}

// claim claims heads of a group in the exchange; reserved tells that they have their workers.
func (x *exchange) claim(heads []head, reserved bool, now time.Time) {
	for len(heads) > 0 {
		q := heads[0].queue
		var leases []*lease
		var rest []head
		for _, h := range heads {
			if h.queue != q {
				rest = append(rest, h)
				continue
			}
			l := &lease{m: h.m, queue: q, token: newToken(), grant: h.grant, reserved: reserved}
			q.group.budget.Sent(l.token, h.weight, now) // from now on nobody else may spend it
			leases = append(leases, l)
		}
		x.claims = append(x.claims, x.d.store.claim(leases, x.d.cfg.LeaseTTL))
		heads = rest
	}
}

// begin takes in what the claims were given.
func (d *Dispatcher) begin(ctx context.Context, x *exchange) {
	for _, t := range x.tallies {
		t.workers.free.Add(t.reserved)
	}
	x.tallies = x.tallies[:0]
	for _, c := range x.claims {
		claimed, cancelled, lost, err := c.got()
		if err != nil { // what was claimed all the same comes back when its lease ends
			d.complain(ctx, c.leases[0].queue.group, err)
		}
		for _, l := range claimed {
			d.step(Claimed, l.m)
			if l.delivery > 1 {
				l.queue.redelivered.Add(1)
			}
			if !l.reserved {
				l.queue.workers.free.Add(-1)
			}
		}
		x.begun = append(x.begun, claimed...)
		for _, l := range cancelled {
			if err := d.reject(ctx, l.queue, l.m, failed(codeCancelled, "cancelled"), nil); err != nil {
				d.complain(ctx, l.queue.group, err)
			}
		}
		var back []head
		for _, l := range append(lost, cancelled...) {
			d.ended(l)
			if l.reserved {
				back = append(back, head{m: l.m, queue: l.queue, grant: l.grant})
			}
		}
		if len(back) > 0 { // a gate may take long
			d.working.Go(func() { d.letGo(back); d.nudge() })
		}
	}
}

// forgetLocked has a lease no longer be in hand, and its worker be free. d.mu must be held.
func (d *Dispatcher) forgetLocked(l *lease) {
	delete(d.held, l)
	l.queue.workers.free.Add(1)
}

// idleLocked tells who waits for that that no lease is held.
func (d *Dispatcher) idleLocked() {
	if d.idle != nil && len(d.held) == 0 {
		close(d.idle)
		d.idle = nil
	}
}

// nudge has all groups be looked at.
func (d *Dispatcher) nudge() {
	d.mu.Lock()
	led := d.leaders > 0
	d.more = d.more || led
	d.mu.Unlock()
	if led {
		return
	}
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// look looks at all groups, or has it done by who does an exchange.
func (d *Dispatcher) look(ctx context.Context) {
	d.mu.Lock()
	led := d.leaders > 0
	if led {
		d.more = true
	} else {
		d.leaders++
	}
	d.mu.Unlock()
	if !led {
		d.lead(ctx, nil)
	}
}

// submit has a worker's write be made. It returns the worker's next lease once that is done; nil and true if
// what came of it is the worker's business, and nil and false if there are no more leases.
func (d *Dispatcher) submit(ctx context.Context, w *worker) (*lease, bool) {
	d.mu.Lock()
	d.writes = append(d.writes, &w.write)
	lead := d.leaders == 0 || d.leaders < len(d.exchanges) && len(d.writes) >= d.workingLocked()
	if lead {
		d.leaders++
	}
	d.mu.Unlock()
	if lead {
		d.lead(ctx, w)
	}
	l, ok := <-w.told
	return l, ok
}

// next waits for another lease. It is nil if there is none any more.
func (d *Dispatcher) next(ctx context.Context, w *worker) *lease {
	d.mu.Lock()
	led := d.leaders > 0
	switch {
	case d.over:
		d.mu.Unlock()
		return nil
	case led:
		d.more, d.parked = true, append(d.parked, w)
	default:
		d.leaders++
	}
	d.mu.Unlock()
	if !led {
		w.idle = true
		d.lead(ctx, w)
	}
	return <-w.told
}

// lead does exchanges until nobody waits for one. w is the worker who does it, or nil; what w is told is there
// when lead returns, unless there is no lease for it.
func (d *Dispatcher) lead(ctx context.Context, w *worker) {
	d.turn.Lock()
	defer d.turn.Unlock()
	at := slices.IndexFunc(d.exchanges, func(x *exchange) bool { return x != nil })
	x := d.exchanges[at]
	d.exchanges[at] = nil
	defer func() { d.exchanges[at] = x }()
	for {
		x.take()
		if ctx.Err() == nil {
			d.rounds(ctx, x)
		}
		x.compose()
		d.turn.Unlock()
		x.run(ctx)
		d.turn.Lock()
		d.begin(ctx, x)
		if d.gated && ctx.Err() == nil {
			d.hand(ctx, x, w, false)
			d.ask(ctx, x)
		}
		if d.hand(ctx, x, w, true) {
			return
		}
	}
}

// hand tells workers what has come of their writes, and gives leases to those that have none. If nobody
// waits for an exchange any more, and last, it is the end of them: only then w, who has done them, gets a lease.
func (d *Dispatcher) hand(ctx context.Context, x *exchange, w *worker, last bool) (over bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	over = last && len(d.writes) == 0 && !d.more
	d.away -= len(x.takes)
	for _, t := range x.takes {
		if !t.told {
			d.forgetLocked(t.lease)
		}
		switch {
		case t.told:
			t.worker.told <- nil // who may make another write of it at once
		case t.worker == w:
			w.idle = true
		default:
			d.parked = append(d.parked, t.worker)
		}
	}
	clear(x.takes)
	x.takes = x.takes[:0]
	if over {
		d.leaders--
		if w != nil && w.idle {
			w.idle = false
			d.parked = append(d.parked, w)
		}
	} else if last {
		d.more = false
	}
	for _, l := range x.begun {
		d.held[l] = d.giveLocked(ctx, l)
	}
	clear(x.begun)
	x.begun = x.begun[:0]
	if len(x.claims) > 0 {
		d.claiming--
		clear(x.claims)
		x.claims = x.claims[:0]
	}
	if ctx.Err() != nil && d.claiming == 0 {
		d.closeLast()
	}
	d.idleLocked()
	if d.over && over { // nobody will have a lease
		for _, p := range d.parked {
			close(p.told)
		}
		d.parked = nil
	}
	return over
}

// giveLocked gives a lease to the worker that was at work last, or to a new one. It returns what ends the work.
func (d *Dispatcher) giveLocked(ctx context.Context, l *lease) context.CancelCauseFunc {
	var to *worker
	if n := len(d.parked); n > 0 {
		to, d.parked = d.parked[n-1], d.parked[:n-1]
	} else {
		to = &worker{told: make(chan *lease, 1)}
		d.working.Go(func() { d.works(ctx, to) })
	}
	if to.ctx == nil || to.ctx.Err() != nil {
		to.ctx, to.cancel = context.WithCancelCause(d.requests)
	}
	cancel := to.cancel // once it is told it may be elsewhere
	to.told <- l
	return cancel
}
