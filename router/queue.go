package router

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"spillway/worker"
)

// ErrQueueTimeout means that no worker had room for a request before its deadline, or that by the
// rate at which others are let go none will have.
var ErrQueueTimeout = errors.New("no worker has room before the request's deadline")

// QueueFullError means that as many requests of the model wait as may.
type QueueFullError struct {
	Current, Limit int // requests, over all tenants of the model
}

func (e *QueueFullError) Error() string {
	return fmt.Sprintf("the queue of the model is full: %d of %d requests wait", e.Current, e.Limit)
}

// Order is what decides when a waiting request goes. Tenants take turns, by deficit round robin
// over the tokens of their prompts. Of one tenant's requests those go first whose strict priority
// is higher, then those whose priority is, then those whose objective is due earlier, then those
// that came first.
type Order struct {
	Tenant         string // who takes turns with others; "" is one too
	StrictPriority uint32
	Priority       int32
	PriorityJump   float64   // KV mode: seconds that it goes ahead in fcfs, weight in wspt; below 0 counts as 0
	Class          string    // KV mode: what the client asks for, a policy class or family; "" is nothing
	Objective      time.Time // when its first token should be there; zero is none, and comes last
	Deadline       time.Time // when waiting ends in vain; zero is never
}

// Ticket is a request that may wait. It is the partition's from Wait until an Admission holds it,
// Leave has taken it out, or Wait has failed; meanwhile nobody else may touch it.
type Ticket struct {
	Query Query
	Order Order
	Owner any // the caller's own, left alone

	cost  uint64 // prompt tokens, from 1 to maxCost
	since time.Time
	seq   uint64
	class *class // nil unless it waits, as is lane
	lane  *lane
	index int // in the lane
}

// maxCost keeps sums of tokens within what can be counted.
const maxCost = 1 << 40

// Admission ends the waiting of a request.
type Admission struct {
	Ticket    *Ticket
	Selection Selection // booked under Ticket.Query.Reservation, unless Err is set
	Err       error     // nil, ErrQueueTimeout, or an error of Select other than that it has to wait
	Waited    time.Duration
}

// places are those in which requests of one model may wait; the partitions of its tenants share them.
type places struct {
	taken atomic.Int64
	limit int
}

// take takes a place, or tells how many are taken.
func (p *places) take() error {
	for {
		n := p.taken.Load()
		if n >= int64(p.limit) {
			return &QueueFullError{Current: int(n), Limit: p.limit}
		}
		if p.taken.CompareAndSwap(n, n+1) {
			return nil
		}
	}
}

// Wait has a request placed, or wait until it can be because every worker that it may go to is
// busy. It returns those whose waiting is over, which can be t itself, and which the caller must
// wake: bookings have been made for them. It does not let t overtake one that waits and could go.
// If t cannot wait, the error is one of Select, a *QueueFullError or ErrQueueTimeout, and nothing
// is booked for it.
func (p *Partition) Wait(t *Ticket, now time.Time) ([]Admission, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	admitted := p.admitLocked(now)
	err := error(ErrOverloaded)
	g := p.queue.find(keyOf(&t.Query))
	if g == nil { // nobody who waits may go where t may, and could be overtaken
		var sel Selection
		if sel, err = p.selectLocked(&t.Query, now); err == nil {
			return append(admitted, Admission{Ticket: t, Selection: sel}), nil
		}
	}
	if !waits(err) || p.places.limit == 0 {
		return admitted, err
	}
	p.queue.seq++
	t.cost, t.since, t.seq = min(max(t.Query.PromptTokens, 1), maxCost), now, p.queue.seq
	if d := t.Order.Deadline; !d.IsZero() && (!now.Before(d) || g != nil && now.Add(p.queue.delay(g, t, now)).After(d)) {
		return admitted, ErrQueueTimeout
	}
	if err := p.places.take(); err != nil {
		return admitted, err
	}
	p.queue.push(t)
	p.waiting.Store(int64(p.queue.n))
	return admitted, nil
}

// waits tells whether a request that Select refused with err may wait.
func waits(err error) bool { return errors.Is(err, ErrOverloaded) || errors.Is(err, ErrPinBusy) }

// Admit lets those go that wait and can be placed now, each booked already, and ends the waiting of
// those for whom there is no worker any more or whose deadline has passed. The caller must wake all
// of them. It is called after whatever may have made room: a Free, a PrefillDone, an expiry, a
// report, a threshold, a change of workers.
func (p *Partition) Admit(now time.Time) []Admission {
	if p.Waiting() == 0 {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.admitLocked(now)
}

// Leave takes t out of the queue. It reports false if t does not wait: then an Admission holds it,
// and the booking in that is the caller's to free.
func (p *Partition) Leave(t *Ticket) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.lane == nil {
		return false
	}
	p.dropLocked(t)
	return true
}

// Waiting is how many requests wait. It takes no lock.
func (p *Partition) Waiting() int { return int(p.waiting.Load()) }

// WaitingTokens is the sum of their prompt tokens, of which each has one at least.
func (p *Partition) WaitingTokens() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.queue.tokens
}

// admitLocked is Admit. It looks at one request of each set of workers that requests wait for, not
// at each that waits.
func (p *Partition) admitLocked(now time.Time) (admitted []Admission) {
	if p.queue.n == 0 {
		return nil
	}
	if p.Busy.Due(now) {
		p.Busy.Tick(now)
	}
	end := func(t *Ticket, sel Selection, err error) {
		admitted = append(admitted, Admission{t, sel, err, now.Sub(t.since)})
	}
	for _, t := range p.queue.late(now) {
		p.dropLocked(t)
		end(t, Selection{}, ErrQueueTimeout)
	}
	for _, g := range p.queue.groups {
		g.shut = false
	}
	for p.queue.n > 0 {
		for i := len(p.queue.groups) - 1; i >= 0; i-- { // from the end: one that empties is taken out
			g := p.queue.groups[i]
			err := p.outlookLocked(&g.query)
			g.open = err == nil && !g.shut
			if err == nil || waits(err) {
				continue
			}
			for _, t := range p.queue.of(g) {
				p.dropLocked(t)
				end(t, Selection{}, err)
			}
		}
		t := p.queue.next()
		if t == nil {
			break
		}
		sel, err := p.selectLocked(&t.Query, now)
		switch {
		case waits(err): // a report came in since we looked
			t.lane.group.shut = true
			continue
		case err == nil:
			t.lane.group.pace.admit(t.cost, now)
			p.queue.charge(t)
		}
		p.dropLocked(t)
		end(t, sel, err)
	}
	return admitted
}

// dropLocked takes t out of the queue and gives its place back.
func (p *Partition) dropLocked(t *Ticket) {
	p.queue.remove(t)
	p.places.taken.Add(-1)
	p.waiting.Store(int64(p.queue.n))
}

// outlookLocked is what selectLocked would say to q as far as the present snapshot tells: nil if
// there is a worker for it. It books nothing.
func (p *Partition) outlookLocked(q *Query) error {
	snap := p.Busy.Snapshot()
	if len(snap.Registered) == 0 {
		return ErrNoWorkers
	}
	for _, slot := range p.suitableLocked(snap.FreeSlots, q, q.Exclude) {
		if q.DP == nil {
			return nil
		}
		p.rooms = p.Busy.FreeRanks(p.slots[slot].id, p.rooms[:0])
		if len(pinnedRoom(p.rooms, *q.DP, false)) > 0 {
			return nil
		}
	}
	return p.refusalLocked(q, snap)
}

// groupKey is the set of workers and ranks that a request may go to. Sets are told apart by where
// they are kept, so two keys may stand for the same workers after the catalog has changed: their
// requests then have a lane each, which costs them nothing.
type groupKey struct {
	only     **worker.Worker
	narrowed bool
	exclude  *worker.ID
	worker   worker.ID // if onWorker
	dp       uint32    // if onRank
	onWorker bool
	onRank   bool
}

func keyOf(q *Query) groupKey {
	k := groupKey{narrowed: q.Only != nil, onWorker: q.Worker != nil, onRank: q.DP != nil}
	if len(q.Only) > 0 {
		k.only = &q.Only[0]
	}
	if len(q.Exclude) > 0 {
		k.exclude = &q.Exclude[0]
	}
	if k.onWorker {
		k.worker = *q.Worker
	}
	if k.onRank {
		k.dp = *q.DP
	}
	return k
}
