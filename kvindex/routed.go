package kvindex

import (
	"errors"
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
// blocks from events too, which never expire; it counts them apart.
//
// Who sends a prompt again, or one that goes on from it, moves the deadline of its last block alone: a block
// stays as long as one that follows it does. So a prompt that is known costs next to nothing. One that is
// new costs an entry here and one in the index for each block, and is written a stretch at a time; engines'
// names for blocks, which are half of what events cost, there are none.
type Routed struct {
	ix *Index

	mu     sync.Mutex // guards what follows; locks of the index are taken after it
	cfg    RoutedConfig
	limits map[worker.Rank]int
	byRank map[worker.Rank]*routes
	nodes  []node
	free   []int32 // nodes that are not in use
	held   int     // nodes in use
	made   uint32  // nodes ever

	gone       []uint64 // scratch: blocks that are being removed
	gonePlaces []place
	touched    uint64 // of no meaning, like a source's
}

// routes are the nodes of one rank. All blocks before one that it has are there too.
type routes struct {
	rank    worker.Rank
	held    int
	entries positions           // of nodes that no other one leads to, by sequence hash
	due     map[int64][]passing // by bucket, in the order of recording; some have a later deadline by now
	order   []int64             // the buckets of due, the earliest first
	listed  int                 // all of due
}

// node is a block that a rank is taken to hold. It is among the entries if it begins a stretch, or if the
// block before has led to another one when it came: one in sixteen of a new prompt.
type node struct {
	seq    uint64
	at     int64  // its bucket, 0 where no prompt has ended with it; one that is over where later blocks keep it
	number uint32 // as which it was made
	before int32  // the node of the block before, or -1
	next   int32  // a node of the same stretch that follows it, or -1
	after  int32  // nodes that follow it
	place  place
}

// passing is a node whose time is over in some bucket, if it still has that deadline.
type passing struct {
	node   int32
	number uint32
}

// Routed returns what routing decisions are written by, the same one each time, with that cfg from now on.
func (x *Index) Routed(cfg RoutedConfig) *Routed {
	r := &Routed{ix: x, byRank: map[worker.Rank]*routes{}}
	if !x.routed.CompareAndSwap(nil, r) {
		r = x.routed.Load()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cfg = cfg
	return r
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
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cfg.TTL <= 0 || len(seqs) == 0 || len(seqs) > r.cfg.MaxEntries {
		return Stored, nil
	}
	if mine := r.byRank[rank]; mine != nil {
		r.expireLocked(mine, now)
	}
	n, last := r.roomLocked(rank, seqs)
	status := DuplicateStore
	if n < len(seqs) {
		if status, last = r.storeLocked(rank, local, seqs, n, last); status == Full {
			return status, nil
		}
	}
	mine := r.byRank[rank]
	at := (now.Add(r.cfg.TTL).UnixNano() + int64(bucket) - 1) / int64(bucket)
	if r.nodes[last].at < at {
		r.nodes[last].at = at
		r.listLocked(mine, at, passing{last, r.nodes[last].number})
	}
	if limit, ok := r.limits[rank]; ok {
		for over := mine.held - limit; over > 0 && len(mine.order) > 0; over = mine.held - limit {
			r.dropFirstLocked(mine, r.held-over)
		}
	}
	return status, nil
}

// storeLocked remembers the blocks of a prompt from the given one on. last is the node of the block before
// it, then of the prompt's last.
func (r *Routed) storeLocked(rank worker.Rank, local, seqs []uint64, from int, last int32) (Status, int32) {
	if !r.ix.budget.take(len(seqs) - from) {
		return Full, last
	}
	s := r.ix.locked(rank, true)
	if s == nil {
		r.ix.budget.used.Add(int64(from - len(seqs)))
		return Full, last
	}
	defer s.mu.Unlock()
	mine := r.byRank[rank]
	if mine == nil {
		mine = &routes{rank: rank, due: map[int64][]passing{}}
		r.byRank[rank] = mine
	}
	held, known, status := r.held, r.ix.seats.known(), DuplicateStore
	for from < len(seqs) {
		begin := from / stretch * stretch
		end := min(begin+stretch, len(seqs))
		at := r.ix.device.first(seqs[begin]) + place(from-begin)
		for _, seq := range seqs[from:end] {
			r.touched += r.ix.device.touch(seq, at)
		}
		if r.ix.device.shard(at).addRun(seqs, local, from, end, s.seat, known) > 0 {
			status = Stored
		}
		for ; from < end; from++ {
			last = r.addLocked(mine, seqs[from], at, last)
			at++
		}
	}
	r.ix.held.Add(int64(r.held - held))
	return status, last
}

// roomLocked makes room for a prompt, and tells how many of its leading blocks are remembered, with the
// node of the last of them.
func (r *Routed) roomLocked(rank worker.Rank, seqs []uint64) (n int, last int32) {
	n, last = r.prefixLocked(rank, seqs)
	if n > 0 && !r.ix.has(rank, seqs[n-1], r.nodes[last].place) { // events have taken it
		r.removeLocked(rank)
		n, last = 0, -1
	}
	if r.held+len(seqs)-n > r.cfg.MaxEntries {
		r.pruneLocked(len(seqs) - n)
		if n, last = r.prefixLocked(rank, seqs); r.held+len(seqs)-n > r.cfg.MaxEntries { // what it had was the oldest
			r.pruneLocked(len(seqs))
			n, last = r.prefixLocked(rank, seqs)
		}
	}
	return n, last
}

// prefixLocked is how many leading blocks of a prompt are remembered, and the node of the last of them, or
// -1. It finds the last stretch of which something is there. Most prompts are known to the end, or not at
// all.
func (r *Routed) prefixLocked(rank worker.Rank, seqs []uint64) (n int, last int32) {
	m := r.byRank[rank]
	if m == nil {
		return 0, -1
	}
	last = -1
	for known, unknown, at := 0, (len(seqs)-1)/stretch+1, (len(seqs)-1)/stretch; known < unknown; at = (known + unknown) / 2 {
		if i := r.entryLocked(m, seqs[at*stretch]); i < 0 {
			unknown = at
			if at > 0 && known == 0 && unknown > 1 { // is anything there at all?
				if i = r.entryLocked(m, seqs[0]); i < 0 {
					return 0, -1
				}
				known, n, last = 1, 1, i
			}
		} else {
			known, n, last = at+1, at*stretch+1, i
		}
	}
	for ; n > 0 && n < len(seqs) && n%stretch != 0; n++ {
		next := r.followingLocked(m, last, seqs[n])
		if next < 0 {
			break
		}
		last = next
	}
	return n, last
}

// entryLocked returns the node of a block that is among the entries, or -1.
func (r *Routed) entryLocked(m *routes, seq uint64) int32 {
	slot := m.entries.find(mix(seq), func(pos int) bool { return r.nodes[pos].seq == seq })
	if slot < 0 {
		return -1
	}
	return int32(m.entries.at(slot))
}

// followingLocked returns the node of a block that follows another one in its stretch, or -1.
func (r *Routed) followingLocked(m *routes, i int32, seq uint64) int32 {
	if next := r.nodes[i].next; next >= 0 && r.nodes[next].seq == seq {
		return next
	}
	return r.entryLocked(m, seq)
}

// addLocked returns the node of a block, which it makes.
func (r *Routed) addLocked(of *routes, seq uint64, at place, before int32) int32 {
	var i int32
	if n := len(r.free); n > 0 {
		i, r.free = r.free[n-1], r.free[:n-1]
	} else {
		i = int32(len(r.nodes))
		r.nodes = append(r.nodes, node{})
	}
	r.made++
	r.nodes[i] = node{seq: seq, number: r.made, before: before, next: -1, place: at}
	r.held++
	of.held++
	if before >= 0 {
		up := &r.nodes[before]
		up.after++
		if at%stretch != 0 && up.next < 0 {
			up.next = i
			return i
		}
	}
	if !of.entries.room(of.entries.live, int(i)) {
		r.resizeLocked(of, int(i))
	}
	of.entries.add(mix(seq), int(i))
	return i
}

// resizeLocked makes the entries of a rank ready for one more node, i.
func (r *Routed) resizeLocked(of *routes, i int) {
	was := of.entries
	of.entries.resize(was.live, max(i, len(r.nodes)))
	for slot, v := range was.slots {
		if v > deleted {
			pos := was.at(slot)
			of.entries.add(mix(r.nodes[pos].seq), pos)
		}
	}
}

// has tells whether a rank holds a block on its device.
func (x *Index) has(rank worker.Rank, seq uint64, at place) bool {
	s := x.seats.find(rank)
	return s != nil && x.device.has(seq, at, s.seat)
}
