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
// There is one exchange at a time. It is done by who has the turn: the worker that was the first to have
// something to write, or the goroutine of rounds. Others wait, and have theirs done together in the next.
type exchange struct {
	d       *Dispatcher
	takes   []*write
	claims  []claim
	looks   []*look
	calls   []*call
	settles []settling
	room    map[*workers]int64 // that may be given something in this exchange
	begun   []*lease
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
	n, size := 0, 0
	for n < len(d.writes) && n < maxWrites && size < maxWriteBytes {
		size += d.writes[n].size()
		n++
	}
	x.takes = append(x.takes, d.writes[:n]...)
	d.writes = slices.Delete(d.writes, 0, n)
	clear(x.room)
}

// free is how many workers of a pool may be given something in this exchange. Those that wait for a
// write count, unless some before them were counted whose writes then failed.
func (x *exchange) free(w *workers) int64 {
	n, ok := x.room[w]
	if ok {
		return n
	}
	if n = w.free.Load(); n >= 0 && !w.wanted {
		for _, t := range x.takes {
			if t.lease.queue.workers == w && !t.lease.grant.holds() {
				n++
			}
		}
	}
	x.room[w] = n
	return n
}

// run does the exchange.
func (x *exchange) run(ctx context.Context) {
	d := x.d
	x.compose()
	if len(x.calls)+len(x.looks) > 0 {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), persistMost)
		d.store.together(ctx, x.calls, x.looks)
		cancel()
	}
	for _, s := range x.settles {
		s.tell()
	}
	freed := false
	for _, t := range x.takes {
		if t.settlement == nil {
			t.err = t.call.owned()
		}
		// If it has failed its worker has to wait for another exchange.
		if t.told = t.err != nil && !errors.Is(t.err, errFenced) || t.lease.grant.holds(); !t.told {
			d.wrote(t.lease, &t.ending)
			freed = true
		}
	}
	if !freed {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range x.takes {
		if !t.told {
			d.forgetLocked(t.lease)
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
}

// claim claims heads of a group in the exchange; reserved tells that they have their workers.
func (x *exchange) claim(heads []head, reserved bool) {
	for len(heads) > 0 {
		q := heads[0].queue
		var leases []*lease
		var rest []head
		for _, h := range heads {
			if h.queue != q {
				rest = append(rest, h)
				continue
			}
			leases = append(leases, &lease{m: h.m, queue: q, weight: h.weight, grant: h.grant, reserved: reserved})
		}
		x.claims = append(x.claims, x.d.store.claim(leases, x.d.cfg.LeaseTTL))
		heads = rest
	}
}

// begin takes in what the claims were given, and what is left in the queues.
func (d *Dispatcher) begin(ctx context.Context, x *exchange) {
	now := time.Now()
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
			l.queue.group.budget.Sent(l.token, l.weight, now)
		}
		x.begun = append(x.begun, claimed...)
		for _, l := range cancelled {
			if err := d.reject(ctx, l.queue, l.m, failed(codeCancelled, "cancelled"), nil); err != nil {
				d.complain(ctx, l.queue.group, err)
			}
		}
		var back []head
		for _, l := range append(lost, cancelled...) {
			if l.reserved {
				back = append(back, head{m: l.m, queue: l.queue, grant: l.grant})
			}
		}
		if len(back) > 0 { // a gate may take long
			d.working.Go(func() { d.letGo(back); d.nudge() })
		}
	}
	clear(x.claims)
	x.claims = x.claims[:0]
	for _, l := range x.looks {
		if found, err := l.cmd.Result(); err == nil {
			l.queue.saw(found, now)
		}
	}
	x.looks = x.looks[:0]
}

// forgetLocked has a lease no longer be in hand, and its worker be free. d.mu must be held.
func (d *Dispatcher) forgetLocked(l *lease) {
	delete(d.held, l)
	l.queue.workers.free.Add(1)
	if d.idle != nil && len(d.held) == 0 {
		close(d.idle)
		d.idle = nil
	}
}

// nudge has all groups be looked at.
func (d *Dispatcher) nudge() {
	d.mu.Lock()
	leading := d.leading
	d.more = d.more || leading
	d.mu.Unlock()
	if leading {
		return
	}
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// turn looks at all groups, or has it done by who does just that.
func (d *Dispatcher) turn(ctx context.Context) {
	d.mu.Lock()
	leading := d.leading
	d.leading, d.more = true, d.more || leading
	d.mu.Unlock()
	if !leading {
		d.lead(ctx, nil)
	}
}

// submit has a worker's write be made. It returns the worker's next lease once that is done; nil and true if
// what came of it is the worker's business, and nil and false if there are no more leases.
func (d *Dispatcher) submit(ctx context.Context, w *worker) (*lease, bool) {
	d.mu.Lock()
	leading := d.leading
	d.leading, d.writes = true, append(d.writes, &w.write)
	d.mu.Unlock()
	if !leading {
		d.lead(ctx, w)
	}
	l, ok := <-w.told
	return l, ok
}

// next waits for another lease. It is nil if there is none any more.
func (d *Dispatcher) next(ctx context.Context, w *worker) *lease {
	d.mu.Lock()
	leading := d.leading
	switch {
	case d.over:
		d.mu.Unlock()
		return nil
	case leading:
		d.more, d.parked = true, append(d.parked, w)
	default:
		d.leading = true
	}
	d.mu.Unlock()
	if !leading {
		w.idle = true
		d.lead(ctx, w)
	}
	return <-w.told
}

// lead has the turn: it does exchanges until nobody waits for one. w is the worker who does it, or nil;
// what w is told is there when lead returns, unless there is no lease for it.
func (d *Dispatcher) lead(ctx context.Context, w *worker) {
	x := d.exchange
	for {
		// Workers whose answers are there come along. Without them there would be one write in this
		// exchange and all others in the next, and nothing to do during either.
		runtime.Gosched()
		x.take()
		if ctx.Err() != nil {
			d.closeLast()
		} else {
			d.rounds(ctx, x)
		}
		x.run(ctx)
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
// waits for an exchange any more, and last, it ends the turn: only then w, who has had it, gets a lease.
func (d *Dispatcher) hand(ctx context.Context, x *exchange, w *worker, last bool) (over bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	over = last && len(d.writes) == 0 && !d.more
	for _, t := range x.takes {
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
		d.leading = false
		if w != nil && w.idle {
			w.idle = false
			d.parked = append(d.parked, w)
		}
	} else if last {
		d.more = false
	}
	for _, l := range x.begun {
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
		d.held[l] = to.cancel
		to.told <- l
	}
	clear(x.begun)
	x.begun = x.begun[:0]
	if d.over && over { // nobody will have a lease
		for _, p := range d.parked {
			close(p.told)
		}
		d.parked = nil
	}
	return over
}
