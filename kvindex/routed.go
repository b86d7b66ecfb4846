package kvindex

import (
	"errors"
	"slices"
	"sync"
	"time"

	"spillway/worker"
)

// RoutedConfig is how routing decisions are remembered where engines publish no events.
type RoutedConfig struct {
	TTL        time.Duration // how long a prompt's blocks are taken to stay; 0 is not at all
	MaxEntries int           // blocks that may be remembered; beyond, the oldest go
	PruneTo    float64       // down to this part of MaxEntries, above 0 and at most 1
}

// DefaultRoutedConfig returns the defaults.
func DefaultRoutedConfig() RoutedConfig {
	return RoutedConfig{TTL: 120 * time.Second, MaxEntries: 1 << 20, PruneTo: 0.8}
}

// bucket is what deadlines are rounded up to.
const bucket = 100 * time.Millisecond

// ErrHashes is what Record fails with for lists of different lengths.
var ErrHashes = errors.New("block hashes and sequence hashes must be equally many")

// Routed writes into an index what routing decisions make likely: that a rank holds the blocks of
// a prompt that was sent to it, for some time. It is safe for concurrent use. The index may hold
// blocks from events too, which never expire.
type Routed struct {
	ix  *Index
	cfg RoutedConfig

	mu        sync.Mutex // guards what follows; locks of the index are taken after it
	deadlines map[worker.Rank]map[uint64]int64
	due       map[int64][]routed // by bucket, in the order of recording; some have a later deadline by now
	order     []int64            // the buckets of due, the earliest first
	held      int                // all of deadlines
	listed    int                // all of due
}

// routed is blocks of one prompt on one rank, by sequence hash.
type routed struct {
	rank worker.Rank
	seqs []uint64
}

// NewRouted returns a Routed that has recorded nothing and writes into ix.
func NewRouted(ix *Index, cfg RoutedConfig) *Routed {
	return &Routed{ix: ix, cfg: cfg, deadlines: map[worker.Rank]map[uint64]int64{}, due: map[int64][]routed{}}
}

// Entries is how many blocks are remembered for a time.
func (r *Routed) Entries() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.held
}

// Record remembers that a prompt, given by the block and sequence hashes of its complete blocks,
// has been sent to rank at now. Blocks that are remembered already get the new deadline. It
// returns ErrHashes, or what became of the store; unless it was Stored or DuplicateStore nothing
// is remembered. Call Expire from time to time.
func (r *Routed) Record(rank worker.Rank, local, seqs []uint64, now time.Time) (Status, error) {
	if len(local) != len(seqs) {
		return InvalidBlock, ErrHashes
	}
	if r.cfg.TTL <= 0 || len(seqs) == 0 || len(seqs) > r.cfg.MaxEntries {
		return Stored, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.expireLocked(now)
	if r.held+len(seqs) > r.cfg.MaxEntries {
		r.pruneLocked(len(seqs))
	}
	mine := r.deadlines[rank]
	known := r.ix.known(rank, seqs)
	status := r.ix.Store(rank, worker.Device, Parent{}, seqs, local)
	if status != Stored && status != DuplicateStore {
		return status, nil
	}
	if mine == nil {
		mine = make(map[uint64]int64, len(seqs))
		r.deadlines[rank] = mine
	}
	at := (now.Add(r.cfg.TTL).UnixNano() + int64(bucket) - 1) / int64(bucket)
	moved := make([]uint64, 0, len(seqs))
	r.held -= len(mine)
	for i, seq := range seqs {
		was, timed := mine[seq]
		if fromEvent := known[i] && !timed; !fromEvent && was < at {
			mine[seq] = at
			moved = append(moved, seq)
		}
	}
	r.held += len(mine)
	if len(moved) > 0 {
		r.listLocked(at, routed{rank, moved})
	}
	if len(mine) == 0 {
		delete(r.deadlines, rank)
	}
	return status, nil
}

// Expire removes the blocks whose time is over.
func (r *Routed) Expire(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.expireLocked(now)
}

// Remove forgets the deadlines of a rank that is being removed from the index.
func (r *Routed) Remove(rank worker.Rank) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.held -= len(r.deadlines[rank])
	delete(r.deadlines, rank)
	r.tidyLocked()
}

// RemoveWorker is Remove for all ranks of a worker.
func (r *Routed) RemoveWorker(id worker.ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for rank, mine := range r.deadlines {
		if rank.Worker == id {
			r.held -= len(mine)
			delete(r.deadlines, rank)
		}
	}
	r.tidyLocked()
}

// Reset forgets all deadlines. The index is to be emptied after it: what is recorded from now on expires.
func (r *Routed) Reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.deadlines)
	clear(r.due)
	r.order, r.held, r.listed = nil, 0, 0
}

func (r *Routed) listLocked(at int64, x routed) {
	if _, ok := r.due[at]; !ok {
		i, _ := slices.BinarySearch(r.order, at)
		r.order = slices.Insert(r.order, i, at) // nearly always at the end
	}
	r.due[at] = append(r.due[at], x)
	r.listed += len(x.seqs)
	if r.listed > 4*r.held+1024 {
		r.tidyLocked()
	}
}

func (r *Routed) expireLocked(now time.Time) {
	for len(r.order) > 0 && r.order[0] <= now.UnixNano()/int64(bucket) {
		r.dropFirstLocked(0)
	}
}

// pruneLocked makes room for n more, the earliest deadlines first.
func (r *Routed) pruneLocked(n int) {
	target := min(int(float64(r.cfg.MaxEntries)*r.cfg.PruneTo), r.cfg.MaxEntries-n)
	for len(r.order) > 0 && r.held > target {
		r.dropFirstLocked(target)
	}
}

// dropFirstLocked removes what the first bucket lists, until no more than target are left.
func (r *Routed) dropFirstLocked(target int) {
	at := r.order[0]
	for i, x := range r.due[at] {
		if r.held <= target && target > 0 {
			r.due[at] = r.due[at][i:]
			return
		}
		mine := r.deadlines[x.rank]
		gone := x.seqs[:0]
		for _, seq := range x.seqs {
			if mine[seq] == at {
				delete(mine, seq)
				gone = append(gone, seq)
			}
			r.listed--
		}
		r.held -= len(gone)
		if len(mine) == 0 {
			delete(r.deadlines, x.rank)
		}
		r.ix.Remove(x.rank, worker.Device, gone)
	}
	delete(r.due, at)
	if r.order = r.order[1:]; len(r.order) == 0 {
		r.order = nil
	}
}

// tidyLocked takes from the lists what has another deadline by now, or none.
func (r *Routed) tidyLocked() {
	r.listed = 0
	r.order = slices.DeleteFunc(r.order, func(at int64) bool {
		kept := r.due[at][:0]
		for _, x := range r.due[at] {
			mine := r.deadlines[x.rank]
			x.seqs = slices.DeleteFunc(x.seqs, func(seq uint64) bool { return mine[seq] != at })
			if len(x.seqs) > 0 {
				kept = append(kept, x)
				r.listed += len(x.seqs)
			}
		}
		if clear(r.due[at][len(kept):]); len(kept) == 0 {
			delete(r.due, at)
			return true
		}
		r.due[at] = kept
		return false
	})
}

// known tells for each engine hash whether it means a block on rank's device.
func (x *Index) known(rank worker.Rank, engine []uint64) []bool {
	all := make([]bool, len(engine))
	if s := x.seats.find(rank); s != nil {
		s.mu.RLock()
		defer s.mu.RUnlock()
		for i, e := range engine {
			_, _, all[i] = s.aliases.block(e)
		}
	}
	return all
}
