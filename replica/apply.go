package replica

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"spillway/tracker"
	"spillway/wire"
	"spillway/worker"
)

// Books are what events about one partition are written into.
type Books struct {
	Tracker   *tracker.Tracker
	BlockSize uint32          // tokens per block; events with another size are not for these books. 0 lets all pass
	Changed   func(worker.ID) // is told of a worker whose load has changed, once per batch; or nil
}

// Applier writes what peers have booked into this process's books. Events never make a partition,
// a worker or a rank: what they name that is not known here is passed over and counted.
type Applier struct {
	find     func(model, tenant string) (Books, bool)
	outcomes map[wire.ReplicaKind]map[result]prometheus.Counter
	changed  map[change]func(worker.ID) // by the batch under work; empty between two
}

// change is a worker of some books.
type change struct {
	tracker *tracker.Tracker
	worker  worker.ID
}

// result is what has become of an event.
type result string

const (
	changed            result = "changed"
	unchanged          result = "unchanged"   // the books were so already
	noPartition        result = "partition"   // unknown
	otherBlocks        result = "block_size"  // of another size
	noRank             result = "rank"        // unknown
	noReservation      result = "reservation" // unknown: freed, expired, or never heard of
	outcomesMetric            = "spillway_replica_outcomes_total"
	outcomesMetricHelp        = "What became of the reservation events of other replicas, see the result."
)

// NewApplier returns an Applier for the books that find returns. It is for one goroutine at a time.
func NewApplier(find func(model, tenant string) (Books, bool), reg prometheus.Registerer) *Applier {
	a := &Applier{find: find, outcomes: map[wire.ReplicaKind]map[result]prometheus.Counter{}, changed: map[change]func(worker.ID){}}
	outcomes := promauto.With(reg).NewCounterVec(prometheus.CounterOpts{Name: outcomesMetric, Help: outcomesMetricHelp}, []string{"kind", "result"})
	for _, k := range wire.ReplicaKinds {
		a.outcomes[k] = map[result]prometheus.Counter{}
		own := noReservation
		if k == wire.ReplicaAdd {
			own = noRank
		}
		for _, r := range []result{changed, unchanged, noPartition, otherBlocks, own} {
			a.outcomes[k][r] = outcomes.WithLabelValues(k.String(), string(r))
		}
	}
	return a
}

// Apply books, completes and frees, in this order of events, each at the time now: prefill falls
// and expiry begins when an event is heard. A reservation lives on one rank, the last that was
// named for it. Which process made it does not matter afterwards.
func (a *Applier) Apply(batch []wire.ReplicaEvent, now time.Time) {
	for i := range batch {
		e := &batch[i]
		a.outcomes[e.Kind][a.apply(e, now)].Inc()
	}
	for c, tell := range a.changed {
		tell(c.worker)
	}
	clear(a.changed)
}

func (a *Applier) apply(e *wire.ReplicaEvent, now time.Time) result {
	books, ok := a.find(e.Model, e.Tenant)
	switch {
	case !ok:
		return noPartition
	case books.BlockSize != 0 && books.BlockSize != e.BlockSize:
		return otherBlocks
	}
	switch e.Kind {
	case wire.ReplicaAdd:
		return a.add(books, e, now)
	case wire.ReplicaPrefillDone: // the rank that we have it on counts, not that of the event
		rank, effect := books.Tracker.PrefillDone(e.Reservation, now)
		switch effect {
		case tracker.Unknown:
			return noReservation
		case tracker.Unchanged:
			return unchanged
		}
		a.note(books, rank)
	case wire.ReplicaFree:
		rank, ok := books.Tracker.Free(e.Reservation, now)
		if !ok {
			return noReservation
		}
		a.note(books, rank)
	}
	return changed
}

func (a *Applier) add(books Books, e *wire.ReplicaEvent, now time.Time) result {
	r := tracker.Reservation{ID: e.Reservation, Rank: e.Rank, Hashes: e.Promise.Hashes, Expires: true}
	if e.Promise.TrackPrefill {
		r.PrefillTokens, r.PrefillTime = e.Promise.PrefillTokens, e.Promise.PrefillDuration
	}
	left, moved, err := books.Tracker.Adopt(r, now)
	switch {
	case errors.Is(err, tracker.ErrDuplicate):
		return unchanged
	case err != nil: // ErrUnknownRank
		return noRank
	case moved:
		a.note(books, left)
	}
	a.note(books, e.Rank)
	return changed
}

func (a *Applier) note(books Books, r worker.Rank) {
	if books.Changed != nil {
		a.changed[change{books.Tracker, r.Worker}] = books.Changed
	}
}
