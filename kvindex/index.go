package kvindex

import (
	"sync"
	"sync/atomic"

	"spillway/worker"
)

// Index holds the blocks of one partition. It is safe for concurrent use. Stores and removes of
// different ranks run side by side; those of one rank must come in the order of its events, so
// one goroutine at a time should write for a rank. A query that runs beside writers may miss what
// they are adding or moving, but reports no block that nobody announced, and none beyond a hole.
type Index struct {
	budget *budget
	held   atomic.Int64 // entries of this index; part of budget.used
	seats  *seating

	// arrivals is held while a rank gets a seat, and for reading by a query that has met too many
	// arrivals to wait for a moment without. It comes before all other locks.
	arrivals sync.RWMutex

	routed atomic.Pointer[Routed] // nil until somebody records decisions

	device *blocks               // by sequence hash
	roots  [worker.Tiers]*blocks // first blocks in lower tiers, by block hash; none for the device
}

// budget is the room that the indexes of one Partitions share.
type budget struct {
	limit int64
	used  atomic.Int64
}

// take reserves room for n entries, or none if there is not enough.
func (b *budget) take(n int) bool {
	if b.used.Add(int64(n)) > b.limit {
		b.used.Add(-int64(n))
		return false
	}
	return true
}

// Shards of the tables, as powers of two. Many writers seldom meet in 256.
const (
	deviceShards = 8
	rootShards   = 4
)

// New returns an empty index with room of its own.
func New(cfg Config) *Index { return newIndex(cfg, &budget{limit: int64(cfg.MaxEntries)}) }

func newIndex(cfg Config, b *budget) *Index {
	x := &Index{budget: b, seats: newSeating(cfg.MaxRanks), device: newBlocks(deviceShards)}
	for t := worker.HostPinned; t < worker.Tiers; t++ {
		x.roots[t] = newBlocks(rootShards)
	}
	return x
}

// Entries is how many (block, rank, tier) entries the index holds.
func (x *Index) Entries() int { return int(x.held.Load()) }

// Ranks is how many ranks have been heard of and not been removed.
func (x *Index) Ranks() int {
	x.seats.mu.RLock()
	defer x.seats.mu.RUnlock()
	return len(x.seats.byRank)
}

// locked returns the source of a rank with its lock held. It is nil if the rank is unknown and
// create is false, or no seat is left.
func (x *Index) locked(rank worker.Rank, create bool) *source {
	for {
		s := x.seats.find(rank)
		if s == nil && create {
			x.arrivals.Lock()
			s = x.seats.seat(rank)
			x.arrivals.Unlock()
		}
		if s == nil {
			return nil
		}
		s.mu.Lock()
		if !s.gone {
			return s
		}
		s.mu.Unlock() // it was removed meanwhile
	}
}

// Store records that rank has put consecutive blocks into a tier: engine are its own names for
// them, local their block hashes, parent the block before the first. A parent 0 that the rank
// does not know is the root. On the device the rank must hold the parent; in lower tiers it need
// not. A store of no blocks does nothing. Unless the status is Stored nothing has changed.
func (x *Index) Store(rank worker.Rank, tier worker.Tier, parent Parent, engine, local []uint64) Status {
	if len(engine) == 0 && len(local) == 0 {
		return Stored
	}
	if len(engine) != len(local) || tier >= worker.Tiers {
		return InvalidBlock
	}
	if !x.budget.take(len(engine)) {
		return Full
	}
	s := x.locked(rank, true)
	if s == nil {
		x.budget.used.Add(-int64(len(engine)))
		return Full
	}
	defer s.mu.Unlock()
	added, status := x.storeLocked(s, tier, parent, engine, local)
	x.held.Add(int64(added))
	x.budget.used.Add(int64(added - len(engine)))
	return status
}

func (x *Index) storeLocked(s *source, tier worker.Tier, parent Parent, engine, local []uint64) (added int, _ Status) {
	if parent.Set && parent.Hash == 0 && !s.knowsLocked(0) {
		parent = Parent{}
	}
	if s.seen.repeats(parent, engine) {
		return 0, InvalidBlock
	}
	var changed bool
	if tier == worker.Device {
		var status Status
		if added, changed, status = s.storeLocked(x, parent, engine, local); status != Stored {
			return 0, status
		}
	} else {
		added = s.storeLowerLocked(x, tier, parent, engine, local)
	}
	if added == 0 && !changed {
		return 0, DuplicateStore
	}
	return added, Stored
}

// Remove records that rank has dropped blocks from a tier. Blocks that followed them stay, but
// count for nothing until the hole is filled. It returns how many were known and how many not.
func (x *Index) Remove(rank worker.Rank, tier worker.Tier, engine []uint64) (removed, unknown int) {
	s := x.locked(rank, false)
	if s == nil {
		return 0, len(engine)
	}
	defer s.mu.Unlock()
	if tier == worker.Device {
		removed = s.removeDeviceLocked(x, engine)
	} else if tier < worker.Tiers {
		removed = s.removeLowerLocked(x, tier, engine)
	}
	x.forget(removed)
	return removed, len(engine) - removed
}

func (x *Index) forget(entries int) {
	x.held.Add(-int64(entries))
	x.budget.used.Add(-int64(entries))
}

// Clear forgets all blocks of rank, in every tier.
func (x *Index) Clear(rank worker.Rank) {
	defer x.unrouted(rank)()
	if s := x.locked(rank, false); s != nil {
		defer s.mu.Unlock()
		x.forget(s.clearLocked(x))
	}
}

// unrouted forgets what decisions have told of a rank, and lets none tell more before the returned
// function is called.
func (x *Index) unrouted(rank worker.Rank) (done func()) {
	r := x.routed.Load()
	if r == nil {
		return func() {}
	}
	r.mu.Lock()
	r.removeLocked(rank)
	return r.mu.Unlock
}

// RemoveRank forgets a rank and its blocks. An unknown one is no error. A later store makes the
// rank known again, so its events must have ended.
func (x *Index) RemoveRank(rank worker.Rank) {
	defer x.unrouted(rank)()
	if s := x.locked(rank, false); s != nil {
		defer s.mu.Unlock()
		x.forget(s.clearLocked(x))
		s.gone = true
		x.seats.leave(s)
	}
}

// RemoveWorker forgets all ranks of a worker, those included that were never registered but
// came up in its events. An unknown worker is no error.
func (x *Index) RemoveWorker(id worker.ID) {
	for _, s := range x.seats.all() {
		if s.rank.Worker == id {
			x.RemoveRank(s.rank)
		}
	}
}

// Reset forgets everything.
func (x *Index) Reset() {
	for _, s := range x.seats.all() {
		x.RemoveRank(s.rank)
	}
}
