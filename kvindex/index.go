package kvindex

import (
	"sync"
	"sync/atomic"

	"spillway/kvhash"
	"spillway/worker"
)

// Index holds the blocks of one partition. It is safe for concurrent use. Stores and removes of
// different ranks run side by side; those of one rank must come in the order of its events, so
// one goroutine at a time may write for a rank. A query that runs beside writers may miss what
// they are adding or moving, but reports no block that nobody announced, and none beyond a hole.
type Index struct {
	budget  *budget
	own     atomic.Int64 // entries of this index; part of budget.used
	mu      sync.RWMutex
	sources map[worker.Rank]*source
	nodes   map[uint64]*node // by sequence hash
}

// budget is the room that the indexes of one Partitions share.
type budget struct {
	limit int64
	used  atomic.Int64
}

type node struct {
	parent  uint64 // sequence hash; of no meaning for a first block
	local   uint64
	first   bool
	members map[*source]int
}

type edge struct {
	prev  Parent
	local uint64
}

type source struct {
	rank    worker.Rank
	aliases map[uint64]uint64 // engine hash -> sequence hash
	newest  map[uint64][]uint64
	edges   [worker.Tiers]map[edge]uint64
	reverse [worker.Tiers]map[uint64]edge
}

type scratch struct{}

// New returns an empty index with room for cfg.MaxEntries of its own.
func New(cfg Config) *Index { return newIndex(&budget{limit: int64(cfg.MaxEntries)}) }

func newIndex(b *budget) *Index {
	return &Index{budget: b, sources: map[worker.Rank]*source{}, nodes: map[uint64]*node{}}
}

// Entries is how many (block, rank, tier) entries the index holds.
func (x *Index) Entries() int { return int(x.own.Load()) }

// Ranks is how many ranks hold something, or have been seen to.
func (x *Index) Ranks() int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return len(x.sources)
}

// Store records that rank has put consecutive blocks into a tier: engine are its own names for
// them, local their block hashes, parent the block before the first. A parent 0 that the rank
// does not know is the root. On the device the parent must be known to the rank; in lower tiers it
// need not be. Unless the status is Stored nothing has changed.
func (x *Index) Store(rank worker.Rank, tier worker.Tier, parent Parent, engine, local []uint64) Status {
	if len(engine) != len(local) {
		return InvalidBlock
	}
	if len(engine) == 0 {
		return Stored
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	s := x.sources[rank]
	if parent.Set && parent.Hash == 0 && (s == nil || !s.knows(0)) {
		parent = Parent{}
	}
	seen := map[uint64]bool{parent.Hash: parent.Set}
	for _, e := range engine {
		if seen[e] {
			return InvalidBlock
		}
		seen[e] = true
	}
	var seq uint64
	if tier == worker.Device && parent.Set {
		ok := false
		if s != nil {
			seq, ok = s.aliases[parent.Hash]
		}
		if !ok {
			return ParentUnknown
		}
	}
	if x.budget.used.Load()+int64(len(engine)) > x.budget.limit {
		return Full
	}
	if s == nil {
		s = &source{rank: rank, aliases: map[uint64]uint64{}, newest: map[uint64][]uint64{}}
		for t := range s.edges {
			s.edges[t], s.reverse[t] = map[edge]uint64{}, map[uint64]edge{}
		}
		x.sources[rank] = s
	}
	if tier == worker.Device {
		return x.storeDevice(s, parent, seq, engine, local)
	}
	status := DuplicateStore
	for i, e := range engine {
		at := edge{parent, local[i]}
		if was, ok := s.reverse[tier][e]; ok && was != at {
			return status
		}
		if was, ok := s.edges[tier][at]; ok && was != e {
			return status
		} else if !ok {
			s.edges[tier][at], s.reverse[tier][e] = e, at
			x.count(1)
			status = Stored
		}
		parent = After(e)
	}
	return status
}

func (x *Index) count(n int64) {
	x.own.Add(n)
	x.budget.used.Add(n)
}

func (s *source) knows(engine uint64) bool {
	_, ok := s.aliases[engine]
	for t := range s.reverse {
		if _, lower := s.reverse[t][engine]; lower {
			ok = true
		}
	}
	return ok
}

func (x *Index) storeDevice(s *source, parent Parent, seq uint64, engine, local []uint64) Status {
	status := DuplicateStore
	first := !parent.Set
	for i, e := range engine {
		up := seq
		if first {
			seq = local[i]
		} else {
			seq = kvhash.Next(seq, local[i])
		}
		if was, ok := s.aliases[e]; !ok || was != seq {
			if ok {
				x.dropAlias(s, e)
			}
			n := x.nodes[seq]
			if n == nil {
				n = &node{parent: up, local: local[i], first: first, members: map[*source]int{}}
				x.nodes[seq] = n
			}
			n.members[s]++
			s.aliases[e] = seq
			s.newest[seq] = append(s.newest[seq], e)
			x.count(1)
			status = Stored
		}
		first = false
	}
	return status
}

func (x *Index) dropAlias(s *source, e uint64) {
	seq := s.aliases[e]
	delete(s.aliases, e)
	all := s.newest[seq]
	kept := make([]uint64, 0, len(all))
	for _, o := range all {
		if o != e {
			kept = append(kept, o)
		}
	}
	if s.newest[seq] = kept; len(kept) == 0 {
		delete(s.newest, seq)
	}
	n := x.nodes[seq]
	if n.members[s]--; n.members[s] == 0 {
		if delete(n.members, s); len(n.members) == 0 {
			delete(x.nodes, seq)
		}
	}
	x.count(-1)
}

// Remove records that rank has dropped blocks from a tier. Blocks that followed them stay, but
// count for nothing until the hole is filled. It returns how many were known and how many not.
func (x *Index) Remove(rank worker.Rank, tier worker.Tier, engine []uint64) (removed, unknown int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := x.sources[rank]
	if s == nil {
		return 0, len(engine)
	}
	for _, e := range engine {
		if tier == worker.Device {
			if _, ok := s.aliases[e]; ok {
				x.dropAlias(s, e)
				removed++
			}
			continue
		}
		if at, ok := s.reverse[tier][e]; ok {
			delete(s.reverse[tier], e)
			delete(s.edges[tier], at)
			x.count(-1)
			removed++
		}
	}
	return removed, len(engine) - removed
}

// Clear forgets all blocks of rank, in every tier.
func (x *Index) Clear(rank worker.Rank) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if s := x.sources[rank]; s != nil {
		x.clear(s)
	}
}

func (x *Index) clear(s *source) {
	for e := range s.aliases {
		x.dropAlias(s, e)
	}
	for t := range s.edges {
		x.count(-int64(len(s.edges[t])))
		clear(s.edges[t])
		clear(s.reverse[t])
	}
}

// RemoveRank forgets a rank and its blocks. An unknown one is no error.
func (x *Index) RemoveRank(rank worker.Rank) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if s := x.sources[rank]; s != nil {
		x.clear(s)
		delete(x.sources, rank)
	}
}

// RemoveWorker forgets all ranks of a worker, those included that were never registered but
// came up in its events. An unknown worker is no error.
func (x *Index) RemoveWorker(id worker.ID) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for r, s := range x.sources {
		if r.Worker == id {
			x.clear(s)
			delete(x.sources, r)
		}
	}
}

// Reset forgets everything.
func (x *Index) Reset() {
	x.mu.Lock()
	defer x.mu.Unlock()
	for r, s := range x.sources {
		x.clear(s)
		delete(x.sources, r)
	}
}

// Query finds how much of a prompt, given by the hashes of its blocks, each rank holds, in all
// tiers, and leaves it in m.
func (x *Index) Query(local []uint64, m *Matches) { x.query(local, m, true) }

// QueryDevice is Query for the device alone: Host and Disk are 0 in all matches.
func (x *Index) QueryDevice(local []uint64, m *Matches) { x.query(local, m, false) }

func (x *Index) query(local []uint64, m *Matches, lower bool) {
	m.Ranks = m.Ranks[:0]
	x.mu.RLock()
	defer x.mu.RUnlock()
	seqs := kvhash.AppendSequences(nil, local)
	for _, s := range x.sources {
		match := Match{Rank: s.rank}
		for match.Device < len(local) && x.nodes[seqs[match.Device]] != nil && x.nodes[seqs[match.Device]].members[s] > 0 {
			match.Device++
		}
		if lower {
			pos, last := match.Device, Parent{}
			if pos > 0 {
				all := s.newest[seqs[pos-1]]
				last = After(all[len(all)-1])
			}
			var hits [worker.Tiers]int
			for t := worker.HostPinned; t <= worker.External; t++ {
				for pos < len(local) {
					e, ok := s.edges[t][edge{last, local[pos]}]
					if !ok {
						break
					}
					last = After(e)
					hits[t]++
					pos++
				}
			}
			match.Host, match.Disk = hits[worker.HostPinned], hits[worker.Disk]+hits[worker.External]
		}
		if match.Device+match.Host+match.Disk > 0 {
			m.Ranks = append(m.Ranks, match)
		}
	}
}

// Run is consecutive blocks of one rank in one tier, as a store would announce them. Its slices
// are valid until the function that got it returns.
type Run struct {
	Rank          worker.Rank
	Tier          worker.Tier
	Parent        Parent
	Engine, Local []uint64
}

// Dump calls fn with stores that make an equal index: all of the devices first, parents before
// their children, then the lower tiers. It stops if fn returns false. Blocks behind a hole of
// their rank's are left out, since nobody could place them. Writers go on meanwhile, and the runs
// may show some of what they do; what was there before and stays is in them. fn may be slow: no
// lock is held while it runs.
func (x *Index) Dump(fn func(Run) bool) {
	x.mu.RLock()
	var runs []Run
	for _, s := range x.sources {
		children := map[Parent][]uint64{} // by sequence hash of the parent
		for seq := range s.newest {
			n := x.nodes[seq]
			up := Parent{n.parent, !n.first}
			children[up] = append(children[up], seq)
		}
		var walk func(at Parent, parent Parent)
		walk = func(at, parent Parent) {
			for _, seq := range children[at] {
				var newest uint64
				for _, e := range s.newest[seq] {
					runs = append(runs, Run{s.rank, worker.Device, parent, []uint64{e}, []uint64{x.nodes[seq].local}})
					newest = e
				}
				walk(After(seq), After(newest))
			}
		}
		walk(Parent{}, Parent{})
	}
	for _, s := range x.sources {
		for t := range s.edges {
			for at, e := range s.edges[t] {
				runs = append(runs, Run{s.rank, worker.Tier(t), at.prev, []uint64{e}, []uint64{at.local}})
			}
		}
	}
	x.mu.RUnlock()
	for _, r := range runs {
		if !fn(r) {
			return
		}
	}
}
