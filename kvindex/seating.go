package kvindex

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"spillway/worker"
)

// seating gives each rank that has been heard of a small number, its seat, and takes it back when
// the rank is removed.
type seating struct {
	mu     sync.RWMutex // guards byRank, free and all changes of plan
	byRank map[worker.Rank]*source
	free   []uint32
	limit  int

	plan   atomic.Pointer[plan]
	used   atomic.Int64  // seats that were ever taken
	reused atomic.Uint64 // how often a seat has got another rank
}

// plan tells readers who has a seat. Its elements may change, its lengths do not.
type plan struct {
	sources []atomic.Pointer[source] // nil if nobody has the seat
	ranks   []rankCell               // the same without going to the source
	lower   []atomic.Uint32          // a bit for each tier in which the rank holds something, the device left out
}

type rankCell struct {
	worker atomic.Uint64
	dp     atomic.Uint32
}

func newSeating(limit int) *seating {
	s := &seating{byRank: map[worker.Rank]*source{}, limit: min(limit, maxSeats)}
	s.plan.Store(&plan{})
	return s
}

// known is how many seats there are, taken or not.
func (s *seating) known() int { return int(s.used.Load()) }

func (s *seating) find(rank worker.Rank) *source {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.byRank[rank]
}

// seat returns the source of a rank, which gets a seat if it has none. nil means there is none
// left.
func (s *seating) seat(rank worker.Rank) *source {
	s.mu.Lock()
	defer s.mu.Unlock()
	if was := s.byRank[rank]; was != nil {
		return was
	}
	src := &source{rank: rank}
	switch n := len(s.free); {
	case n > 0:
		src.seat = s.free[n-1]
		s.free = s.free[:n-1]
		s.reused.Add(1) // before anything can be found under the seat again
	case len(s.byRank) >= s.limit:
		return nil
	default:
		src.seat = uint32(s.used.Load())
		if int(src.seat) == len(s.plan.Load().sources) {
			s.growLocked()
		}
		s.used.Add(1)
	}
	p := s.plan.Load()
	p.ranks[src.seat].worker.Store(uint64(rank.Worker))
	p.ranks[src.seat].dp.Store(rank.DP)
	p.lower[src.seat].Store(0)
	p.sources[src.seat].Store(src)
	s.byRank[rank] = src
	return src
}

func (s *seating) growLocked() {
	was := s.plan.Load()
	n := max(64, 2*len(was.sources))
	p := &plan{sources: make([]atomic.Pointer[source], n), ranks: make([]rankCell, n), lower: make([]atomic.Uint32, n)}
	for i := range was.sources {
		p.sources[i].Store(was.sources[i].Load())
		p.ranks[i].worker.Store(was.ranks[i].worker.Load())
		p.ranks[i].dp.Store(was.ranks[i].dp.Load())
		p.lower[i].Store(was.lower[i].Load())
	}
	s.plan.Store(p)
}

// leave takes the seat of a source, which holds nothing any more.
func (s *seating) leave(src *source) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.byRank, src.rank)
	s.plan.Load().sources[src.seat].Store(nil)
	s.free = append(s.free, src.seat)
	if len(s.byRank) == 0 {
		s.byRank = map[worker.Rank]*source{} // give back its memory
	}
}

// markLower notes whether a source holds something in a lower tier.
func (s *seating) markLower(seat uint32, tier worker.Tier, holds bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	bits := &s.plan.Load().lower[seat]
	if holds {
		bits.Or(1 << tier)
	} else {
		bits.And(^uint32(1 << tier))
	}
}

// all returns all sources, by seat.
func (s *seating) all() []*source {
	s.mu.RLock()
	all := slices.Collect(maps.Values(s.byRank))
	s.mu.RUnlock()
	slices.SortFunc(all, func(a, b *source) int { return int(a.seat) - int(b.seat) })
	return all
}
