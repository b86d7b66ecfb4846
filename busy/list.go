// Package busy decides which workers are busy: it keeps the thresholds of a model, the last
// load reports of every rank, and the rule that makes a worker busy out of them. It does no
// I/O, starts no goroutine and never reads the clock: callers pass now.
package busy

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"spillway/worker"
)

// Loads is what a List asks of the books: the KV blocks and the prefill tokens that a rank has
// been promised, and when those tokens will have gone down to a number by time alone. It is
// called with the List's lock held, so it must not block, nor call the List.
type Loads interface {
	Promised(r worker.Rank, now time.Time) (decodeBlocks, prefillTokens uint64)
	PrefillFalls(r worker.Rank, tokens uint64) (at time.Time, ok bool)
}

// List is the busy list of one partition: its thresholds, the last reports by worker, rank and
// source, backpressure marks, who is routable, and the verdict on each worker. A verdict is
// made anew by the call that changes what it rests on, before that call returns. List is safe
// for concurrent use, and Snapshot takes no lock.
type List struct {
	cfg   Config // read-only
	loads Loads  // or nil: then only samples tell what was promised

	mu         sync.Mutex // guards the fields below; may be held while Loads takes its own lock
	thresholds Thresholds
	generation uint64 // counts the changes of thresholds, from 1
	workers    map[worker.ID]*entry
	order      []*entry     // by ID
	slots      []bool       // taken or not
	due        atomic.Int64 // Unix nanoseconds before which nothing falls due by itself

	snapshot atomic.Pointer[Snapshot]
}

// New returns a list without workers. loads may be nil where nothing is booked in this
// process; then what samples say was promised counts instead.
func New(cfg Config, loads Loads) *List {
	l := &List{
		cfg: cfg, loads: loads, thresholds: cfg.Thresholds().clone(),
		generation: 1, workers: map[worker.ID]*entry{},
	}
	l.due.Store(math.MaxInt64)
	l.publishLocked()
	return l
}

// Register makes w known. A new worker starts without reports or marks, free and routable; for
// one that is known by its ID, declared ranks, capacities and block size are taken over from w
// and all state is kept. w must not be changed afterwards.
func (l *List) Register(w *worker.Worker, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.workers[w.ID]
	added := e == nil
	if added {
		e = &entry{id: w.ID, slot: l.takeSlotLocked()}
		l.workers[w.ID] = e
		i, _ := slices.BinarySearchFunc(l.order, w.ID, byID)
		l.order = slices.Insert(l.order, i, e)
	}
	e.declare(w)
	switch changed := l.evaluateLocked(e, now); {
	case added:
		l.publishLocked()
	case changed:
		l.amendLocked(e)
	}
}

// Unregister forgets the worker and all that is known of it.
func (l *List) Unregister(id worker.ID, _ time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.workers[id]
	if e == nil {
		return
	}
	delete(l.workers, id)
	i, _ := slices.BinarySearchFunc(l.order, id, byID)
	l.order = slices.Delete(l.order, i, i+1)
	l.slots[e.slot] = false
	l.publishLocked()
}

// Observe takes in one sample. It is dropped if its worker is not registered, if it has no
// usable value, or if it names one rank more than a worker may have.
func (l *List) Observe(s Sample, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.workers[s.Rank.Worker]
	if e == nil {
		return
	}
	e.observe(&s, now, l.cfg.SignalStaleAfter)
	if l.evaluateLocked(e, now) {
		l.amendLocked(e)
	}
}

// Scraped takes in a whole metrics page of a worker, read successfully: all samples are of
// that worker and of source Scrape, whatever they say. A rank that is in none of three pages in
// a row is dropped, unless events still tell of it. With restarted, what the engine said before
// is dropped first.
//
// A worker that declares no ranks and shows one label is a single-rank worker: its rank is 0
// for everyone else, whatever the label.
func (l *List) Scraped(id worker.ID, page []Sample, restarted bool, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.workers[id]
	if e == nil {
		return
	}
	if restarted {
		e.restarted()
	}
	e.relabel(page)
	for i := range page {
		s := page[i]
		s.Source = Scrape
		if r := e.observe(&s, now, l.cfg.SignalStaleAfter); r != nil {
			r.seen = true
		}
	}
	e.countMissing(now, l.cfg.SignalStaleAfter)
	e.prune()
	if l.evaluateLocked(e, now) {
		l.amendLocked(e)
	}
}

// Refresh re-evaluates a worker after its promised load has changed.
func (l *List) Refresh(id worker.ID, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.workers[id]; e != nil && l.evaluateLocked(e, now) {
		l.amendLocked(e)
	}
}

// SetHealthy records the verdict of the health probes. A worker that was never probed counts
// as healthy. A good verdict also ends an inhibition.
func (l *List) SetHealthy(id worker.ID, healthy bool, now time.Time) {
	l.change(id, now, func(e *entry) {
		e.probed, e.healthy = true, healthy
		if healthy {
			e.inhibitedUntil = time.Time{}
		}
	})
}

// Inhibit takes the worker out of the routable ones until the given time, after a hard
// failure. Of two such times the later one counts.
func (l *List) Inhibit(id worker.ID, until time.Time, now time.Time) {
	l.change(id, now, func(e *entry) {
		if until.After(e.inhibitedUntil) {
			e.inhibitedUntil = until
		}
	})
}

// SetDraining takes a worker that is about to leave out of the routable ones, or puts it back.
func (l *List) SetDraining(id worker.ID, draining bool, now time.Time) {
	l.change(id, now, func(e *entry) { e.draining = draining })
}

// SetCircuit takes a worker out of the routable ones while its circuit is open. Unlike an
// inhibition it ends by the next call only.
func (l *List) SetCircuit(id worker.ID, open bool, now time.Time) {
	l.change(id, now, func(e *entry) { e.circuitOpen = open })
}

// Mark makes a worker busy that refused a request for capacity, or one rank of it if the
// request was pinned to that rank; dp is nil otherwise. retryAfter is what the worker asked
// for, 0 if nothing. The mark lasts until a sample taken after it tells of room, at least
// backpressure-hold or retryAfter, whichever is longer, and at most 10 s.
func (l *List) Mark(id worker.ID, dp *uint32, retryAfter time.Duration, now time.Time) {
	l.change(id, now, func(e *entry) {
		hold := max(l.cfg.BackpressureHold, retryAfter)
		if dp == nil || *dp == worker.AnyDP || e.single() || e.engineRouted() {
			e.mark.set(now, hold)
		} else if r := e.find(*dp); r != nil {
			r.mark.set(now, hold)
		}
	})
}

// change applies f, which must not call the List, to a worker if it is known.
func (l *List) change(id worker.ID, now time.Time, f func(*entry)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.workers[id]
	if e == nil {
		return
	}
	f(e)
	if l.evaluateLocked(e, now) {
		l.amendLocked(e)
	}
}

// SetThresholds puts t in force for all workers, which are judged by it before the call
// returns, and without regard to hysteresis. t must be valid.
func (l *List) SetThresholds(t Thresholds, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	changed := t.Any() != l.thresholds.Any()
	l.thresholds = t.clone()
	l.generation++
	for _, e := range l.order {
		for _, r := range e.ranks {
			r.held = 0
		}
		if l.evaluateLocked(e, now) {
			changed = true
		}
	}
	if changed {
		l.publishLocked()
	}
}

// Thresholds are the limits in force.
func (l *List) Thresholds() Thresholds {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.thresholds.clone()
}

// Due tells whether something has fallen due by itself, so that a Tick would have work. It takes
// no lock.
func (l *List) Due(now time.Time) bool { return now.UnixNano() >= l.due.Load() }

// Tick lets end what ends by itself: marks, inhibitions, prefill load that is modelled to fall,
// and the freshness of samples where a policy depends on it. It returns the earliest time at which
// something more may fall due, or false if nothing will. Later calls can bring that time forward,
// so a caller who is not told of them should come back within a fraction of backpressure-hold all
// the same; a Tick with nothing due looks at no worker.
func (l *List) Tick(now time.Time) (next time.Time, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.Due(now) {
		l.due.Store(math.MaxInt64)
		changed := false
		for _, e := range l.order {
			if !e.due.IsZero() && !now.Before(e.due) {
				changed = l.evaluateLocked(e, now) || changed
			}
			l.dueLocked(e.due)
		}
		if changed {
			l.publishLocked()
		}
	}
	due := l.due.Load()
	return time.Unix(0, due), due != math.MaxInt64
}

// BlockSize is the number of tokens in a KV block of the worker: as configured, else as
// scraped, else 16.
func (l *List) BlockSize(id worker.ID) uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.workers[id]
	if e == nil {
		return defaultBlockSize
	}
	return e.blockSize()
}

// Slot is the worker's place in dense arrays, or false if the worker is unknown. It is its own
// from Register to Unregister, and less than the SlotCount of the snapshots in between.
func (l *List) Slot(id worker.ID) (int, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.workers[id]; e != nil {
		return e.slot, true
	}
	return 0, false
}

// takeSlotLocked returns the lowest slot that is not taken.
func (l *List) takeSlotLocked() int {
	i := slices.Index(l.slots, false)
	if i < 0 {
		i = len(l.slots)
		l.slots = append(l.slots, false)
	}
	l.slots[i] = true
	return i
}

func byID(e *entry, id worker.ID) int {
	switch {
	case e.id < id:
		return -1
	case e.id > id:
		return 1
	}
	return 0
}
