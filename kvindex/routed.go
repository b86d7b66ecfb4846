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
//
// Who sends a prompt again, or one that goes on from it, moves the deadline of its last block alone: a block
// stays as long as one that follows it does. So a prompt that is known costs next to nothing.
type Routed struct {
	ix  *Index
	cfg RoutedConfig

	mu     sync.Mutex // guards what follows; locks of the index are taken after it
	limits map[worker.Rank]int
	byRank map[worker.Rank]*routes
	nodes  []node
	free   []int32  // nodes that are not in use
	held   int      // nodes in use
	known  []bool   // scratch
	gone   []uint64 // scratch
}

// routes are the nodes of one rank.
type routes struct {
	rank   worker.Rank
	bySeq  map[uint64]int32
	due    map[int64][]passing // by bucket, in the order of recording; some have a later deadline by now
	order  []int64             // the buckets of due, the earliest first
	listed int                 // all of due
}

// node is a block that a rank is taken to hold.
type node struct {
	seq    uint64
	at     int64 // its bucket, 0 where only later blocks of a prompt keep it
	before int32 // the node of the block before, or -1
	after  int32 // nodes that follow it
	told   bool  // the index had it already, from events
}

// passing is a node whose time is over in some bucket, if it still has that deadline.
type passing struct {
	node int32
	seq  uint64
}

// NewRouted returns a Routed that has recorded nothing and writes into ix.
func NewRouted(ix *Index, cfg RoutedConfig) *Routed {
	return &Routed{ix: ix, cfg: cfg, byRank: map[worker.Rank]*routes{}}
}

// Entries is how many blocks are remembered for a time.
func (r *Routed) Entries() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.held
}

// Limit tells how many blocks ranks have room for: beyond that, what was recorded first goes first, from the
// end of its prompt. Ranks that are not named have no such limit. limits is Routed's from now on.
func (r *Routed) Limit(limits map[worker.Rank]int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.limits = limits
}

// Record remembers that a prompt, given by the block and sequence hashes of its complete blocks,
// has been sent to rank at now. Blocks that are remembered already get the new deadline. It
// returns ErrHashes, or what became of the store; unless it was Stored or DuplicateStore nothing
// is remembered that was not. Call Expire from time to time.
func (r *Routed) Record(rank worker.Rank, local, seqs []uint64, now time.Time) (Status, error) {
	if len(local) != len(seqs) {
		return InvalidBlock, ErrHashes
	}
	if r.cfg.TTL <= 0 || len(seqs) == 0 || len(seqs) > r.cfg.MaxEntries {
		return Stored, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	mine := r.byRank[rank]
	if mine != nil {
		r.expireLocked(mine, now)
	}
	n, last := r.roomLocked(rank, seqs)
	status := DuplicateStore
	mine = r.byRank[rank]
	if n < len(seqs) {
		var parent Parent
		if n > 0 {
			parent = After(seqs[n-1])
		}
		r.known = r.ix.known(rank, seqs[n:], r.known[:0])
		if status = r.ix.Store(rank, worker.Device, parent, seqs[n:], local[n:]); status != Stored && status != DuplicateStore {
			return status, nil
		}
		if mine == nil {
			mine = &routes{rank: rank, bySeq: make(map[uint64]int32, len(seqs)), due: map[int64][]passing{}}
			r.byRank[rank] = mine
		}
		for i, seq := range seqs[n:] {
			last = r.addLocked(mine, seq, last, r.known[i])
		}
	}
	at := (now.Add(r.cfg.TTL).UnixNano() + int64(bucket) - 1) / int64(bucket)
	if r.nodes[last].at < at {
		r.nodes[last].at = at
		r.listLocked(mine, at, passing{last, seqs[len(seqs)-1]})
	}
	if limit, ok := r.limits[rank]; ok {
		for over := len(mine.bySeq) - limit; over > 0 && len(mine.order) > 0; over = len(mine.bySeq) - limit {
			r.dropFirstLocked(mine, r.held-over)
		}
	}
	return status, nil
}

// roomLocked makes room for a prompt, and tells how many of its leading blocks are remembered, with the
// node of the last of them.
func (r *Routed) roomLocked(rank worker.Rank, seqs []uint64) (n int, last int32) {
	n, last = r.byRank[rank].prefix(seqs)
	if n > 0 {
		if r.known = r.ix.known(rank, seqs[n-1:n], r.known[:0]); !r.known[0] { // the index was emptied meanwhile
			r.removeLocked(r.byRank[rank])
			n, last = 0, -1
		}
	}
	if r.held+len(seqs)-n > r.cfg.MaxEntries {
		r.pruneLocked(len(seqs) - n)
		if n, last = r.byRank[rank].prefix(seqs); r.held+len(seqs)-n > r.cfg.MaxEntries { // what it had was the oldest
			r.pruneLocked(len(seqs))
			n, last = r.byRank[rank].prefix(seqs)
		}
	}
	return n, last
}

// prefix is how many leading blocks of a prompt are remembered, and the node of the last of them, or -1. A
// prompt that begins like another one has been sent often before, or goes on from one: so it looks from
// the end.
func (m *routes) prefix(seqs []uint64) (n int, last int32) {
	if m != nil {
		for n := len(seqs); n > 0; n-- {
			if node, ok := m.bySeq[seqs[n-1]]; ok {
				return n, node
			}
		}
	}
	return 0, -1
}

func (r *Routed) addLocked(of *routes, seq uint64, before int32, told bool) int32 {
	var i int32
	if n := len(r.free); n > 0 {
		i, r.free = r.free[n-1], r.free[:n-1]
	} else {
		i = int32(len(r.nodes))
		r.nodes = append(r.nodes, node{})
	}
	r.nodes[i] = node{seq: seq, before: before, told: told}
	if before >= 0 {
		r.nodes[before].after++
	}
	of.bySeq[seq] = i
	r.held++
	return i
}

// Expire removes the blocks whose time is over.
func (r *Routed) Expire(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, one := range r.byRank {
		r.expireLocked(one, now)
	}
}

// Remove forgets the deadlines of a rank that is being removed from the index.
func (r *Routed) Remove(rank worker.Rank) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.removeLocked(r.byRank[rank])
}

// RemoveWorker is Remove for all ranks of a worker.
func (r *Routed) RemoveWorker(id worker.ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for rank, one := range r.byRank {
		if rank.Worker == id {
			r.removeLocked(one)
		}
	}
}

func (r *Routed) removeLocked(one *routes) {
	if one == nil {
		return
	}
	delete(r.byRank, one.rank)
	for _, i := range one.bySeq {
		r.dropLocked(i)
	}
}

// dropLocked takes back a node.
func (r *Routed) dropLocked(i int32) {
	r.nodes[i] = node{}
	r.free = append(r.free, i)
	r.held--
}

// Reset forgets all deadlines. The index is to be emptied after it: what is recorded from now on expires.
func (r *Routed) Reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.byRank)
	r.nodes, r.free, r.held = nil, nil, 0
}

func (r *Routed) listLocked(of *routes, at int64, p passing) {
	if _, ok := of.due[at]; !ok {
		i, _ := slices.BinarySearch(of.order, at)
		of.order = slices.Insert(of.order, i, at) // nearly always at the end
	}
	of.due[at] = append(of.due[at], p)
	of.listed++
	if of.listed > 4*len(of.bySeq)+1024 {
		r.tidyLocked(of)
	}
}

func (r *Routed) expireLocked(of *routes, now time.Time) {
	for len(of.order) > 0 && of.order[0] <= now.UnixNano()/int64(bucket) {
		r.dropFirstLocked(of, -1)
	}
}

// pruneLocked makes room for n more, the earliest deadlines first.
func (r *Routed) pruneLocked(n int) {
	target := min(int(float64(r.cfg.MaxEntries)*r.cfg.PruneTo), r.cfg.MaxEntries-n)
	for r.held > target {
		var first *routes
		for _, one := range r.byRank {
			if len(one.order) > 0 && (first == nil || one.order[0] < first.order[0]) {
				first = one
			}
		}
		if first == nil {
			return
		}
		r.dropFirstLocked(first, target)
	}
}

// dropFirstLocked removes what the first bucket of a rank lists, until no more than target are held in all.
func (r *Routed) dropFirstLocked(of *routes, target int) {
	at := of.order[0]
	r.gone = r.gone[:0]
	left := of.due[at]
	for ; len(left) > 0 && r.held > target; left = left[1:] {
		p := left[0]
		if !r.hasLocked(of, p, at) {
			of.listed--
			continue
		}
		n := p.node
		for r.nodes[n].at = 0; n >= 0 && r.held > target; {
			one := r.nodes[n]
			if one.after > 0 || one.at > at {
				n = -1
				break
			}
			if !one.told {
				r.gone = append(r.gone, one.seq)
			}
			delete(of.bySeq, one.seq)
			r.dropLocked(n)
			if n = one.before; n >= 0 {
				r.nodes[n].after--
			}
		}
		if n >= 0 && r.nodes[n].after == 0 && r.nodes[n].at <= at { // enough: the rest of the prompt stays
			r.nodes[n].at = at
			left[0] = passing{n, r.nodes[n].seq}
			break
		}
		of.listed--
	}
	r.ix.Remove(of.rank, worker.Device, r.gone)
	if len(left) > 0 {
		of.due[at] = left
		return
	}
	delete(of.due, at)
	of.order = of.order[1:]
	if len(of.bySeq) == 0 {
		delete(r.byRank, of.rank)
	}
}

// hasLocked tells whether what is listed in a bucket still has that deadline.
func (r *Routed) hasLocked(of *routes, p passing, at int64) bool {
	n, ok := of.bySeq[p.seq]
	return ok && n == p.node && r.nodes[n].at == at
}

// tidyLocked takes from the lists what has another deadline by now, or none.
func (r *Routed) tidyLocked(of *routes) {
	of.listed = 0
	of.order = slices.DeleteFunc(of.order, func(at int64) bool {
		kept := slices.DeleteFunc(of.due[at], func(p passing) bool { return !r.hasLocked(of, p, at) })
		if len(kept) == 0 {
			delete(of.due, at)
			return true
		}
		of.due[at] = kept
		of.listed += len(kept)
		return false
	})
}

// known appends for each engine hash whether it means a block on rank's device.
func (x *Index) known(rank worker.Rank, engine []uint64, dst []bool) []bool {
	s := x.seats.find(rank)
	if s == nil {
		return append(dst, make([]bool, len(engine))...)
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, e := range engine {
		_, _, ok := s.aliases.block(e)
		dst = append(dst, ok)
	}
	return dst
}
