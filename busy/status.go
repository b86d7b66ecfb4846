package busy

import (
	"time"

	"spillway/worker"
)

// State is one word for how a worker stands.
type State string

// The states, first that applies.
const (
	StateDraining  State = "draining"  // about to leave
	StateUnhealthy State = "unhealthy" // the last probe verdict was bad
	StateInhibited State = "inhibited" // a request failed hard a moment ago, or the circuit is open
	StateBusy      State = "busy"
	StateUnknown   State = "unknown" // routable, but neither probed nor sampled yet
	StateFree      State = "free"
)

// WorkerStatus is what operators see of one worker.
type WorkerStatus struct {
	ID             worker.ID
	Name           string
	Slot           int
	State          State
	Busy, Routable bool
	Marked         bool          // every rank is marked
	Inhibited      time.Duration // for how much longer it is; 0 if it is not
	CircuitOpen    bool
	Ranks          []RankStatus
	ToBusy, ToFree uint64 // transitions since it was registered
	Dropped        uint64 // samples for which there was no room
}

// RankStatus is what operators see of one rank.
type RankStatus struct {
	DP     uint32
	Report Report // the values that were compared
	Checks Checks // why it is busy; empty if it is free
	Marked bool

	Running, Waiting *uint64 // requests in the engine, nil if unknown

	Signals [numSources]Signal // by Source
	Age     time.Duration      // of the newest sample; meaningless unless Sampled
	Sampled bool               // a sample is held
	Stale   bool               // the newest one is too old
}

// Signal is the condition of one source.
type Signal struct {
	Known bool          // a sample is held
	Age   time.Duration // of it
	Stale bool
}

// Workers describes all workers by ID. The lock is taken for one worker at a time, so that
// decisions do not wait for it; workers may differ by what happened in between.
func (l *List) Workers(now time.Time) []WorkerStatus {
	ids := l.Snapshot().Registered
	all := make([]WorkerStatus, 0, len(ids))
	for _, id := range ids {
		if st, ok := l.status(id, now); ok {
			all = append(all, st)
		}
	}
	return all
}

func (l *List) status(id worker.ID, now time.Time) (WorkerStatus, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.workers[id]
	if e == nil {
		return WorkerStatus{}, false
	}
	st := WorkerStatus{
		ID: id, Name: e.w.Name, Slot: e.slot, State: e.state(), Busy: e.busy, Routable: e.routable,
		Marked: e.allMarked, Inhibited: e.inhibitedFor(now), CircuitOpen: e.circuitOpen, ToBusy: e.toBusy, ToFree: e.toFree, Dropped: e.dropped,
		Ranks: make([]RankStatus, 0, len(e.ranks)),
	}
	promised := l.promisedLocked(e, now)
	for _, r := range e.ranks {
		rs := RankStatus{
			DP: e.number(r), Report: l.reportLocked(e, r, promised, now), Checks: r.checks,
			Marked: e.marked(r), Sampled: r.observed(), Stale: l.stale(r, now),
		}
		if rs.Sampled {
			rs.Age = now.Sub(r.newest())
		}
		if v, ok := r.first(running); ok {
			rs.Running = &v
		}
		if v, ok := r.first(waiting); ok {
			rs.Waiting = &v
		}
		for s := range r.records {
			if rec := &r.records[s]; rec.held() {
				rs.Signals[s] = Signal{true, now.Sub(rec.takenAt), rec.stale(now, l.cfg.SignalStaleAfter)}
			}
		}
		st.Ranks = append(st.Ranks, rs)
	}
	return st, true
}

// inhibitedFor is how much of an inhibition is left.
func (e *entry) inhibitedFor(now time.Time) time.Duration {
	if e.inhibitedUntil.IsZero() {
		return 0
	}
	return max(e.inhibitedUntil.Sub(now), 0)
}

func (e *entry) state() State {
	switch {
	case e.draining:
		return StateDraining
	case e.probed && !e.healthy:
		return StateUnhealthy
	case !e.inhibitedUntil.IsZero() || e.circuitOpen:
		return StateInhibited
	case e.busy:
		return StateBusy
	case !e.probed && !e.sampled:
		return StateUnknown
	}
	return StateFree
}

// Recovery is how long until the first of the inhibited workers may be tried again, or 0 if
// none is inhibited. Like Workers it may be called at any time.
func (l *List) Recovery(now time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	var least time.Duration
	for _, e := range l.order {
		if left := e.inhibitedFor(now); left > 0 && (least == 0 || left < least) {
			least = left
		}
	}
	return least
}
