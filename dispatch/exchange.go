package dispatch

import (
	"context"
	"errors"
)

// write is a call that a worker waits for, which ends its work on a lease.
type write struct {
	*call
	lease *lease
	done  chan error
}

// write has the round's goroutine make a call, together with others and with the next claims.
func (d *Dispatcher) write(l *lease, c *call) error {
	w := &write{c, l, make(chan error, 1)}
	d.mu.Lock()
	d.writes = append(d.writes, w)
	d.mu.Unlock()
	d.nudge()
	return <-w.done
}

// exchange is what the round's goroutine, which alone uses it, tells Redis at once: what became of
// messages, and then claims of others. So one round trip ends the work on some and begins that on the
// next, and all that was finished during the one before shares one write to Redis's disk. Claims come
// after the writes, so workers that wait for theirs count as free, and yet there are never more leases
// than workers. Those that hold what a gate has given do not: it is given back after the write, and who
// comes before that would be refused.
type exchange struct {
	d      *Dispatcher
	takes  []*write
	giving map[*workers]int64 // how many of them are of a pool
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
	for _, w := range d.writes[:n] {
		x.takes = append(x.takes, w)
		if !w.lease.grant.holds() {
			x.giving[w.lease.queue.workers]++
		}
	}
	if d.writes = append([]*write(nil), d.writes[n:]...); len(d.writes) > 0 {
		d.nudge()
	}
}

// free is how many workers of a pool may be given something in this exchange. Those that wait for a
// write count, unless some before them were counted whose writes then failed.
func (x *exchange) free(w *workers) int64 {
	n := w.free.Load()
	if n >= 0 {
		n += x.giving[w]
	}
	return n
}

// run does the exchange, and tells those who wait.
func (x *exchange) run(ctx context.Context, claims ...claim) {
	if len(x.takes)+len(claims) == 0 {
		return
	}
	var all []*call
	for _, w := range x.takes {
		all = append(all, w.call)
	}
	for _, c := range claims {
		all = append(all, c.call)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), persistMost)
	defer cancel()
	x.d.store.together(ctx, all)
	for _, w := range x.takes {
		err := w.owned()
		// If it has failed its worker has to wait for another exchange.
		if (err == nil || errors.Is(err, errFenced)) && !w.lease.grant.holds() {
			w.lease.freed = true
			w.lease.queue.workers.free.Add(1)
		}
		w.done <- err
	}
	x.takes = x.takes[:0]
	clear(x.giving)
}
