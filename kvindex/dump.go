package kvindex

import "spillway/worker"

// Run is consecutive blocks of one rank in one tier, as a store would announce them. Its slices
// are valid until the function that got it returns.
type Run struct {
	Rank          worker.Rank
	Tier          worker.Tier
	Parent        Parent
	Engine, Local []uint64
}

// maxRun bounds a run, so that a reader of the dump need not bear any length.
const maxRun = 1024

// Dump calls fn with stores that make an equal index: all of the devices first, parents before
// their children, then the lower tiers. It stops if fn returns false. Blocks behind a hole of
// their rank's are left out, since nobody could place them. Writers go on meanwhile, and the runs
// may show some of what they do; what was there before and stays is in them. fn may be slow: no
// lock is held while it runs. Memory for one rank's blocks is needed at a time.
func (x *Index) Dump(fn func(Run) bool) {
	sources := x.seats.all()
	for _, s := range sources {
		if !x.dumpDevice(s, fn) {
			return
		}
	}
	for _, s := range sources {
		for t := worker.HostPinned; t < worker.Tiers; t++ {
			if !s.dumpLower(t, fn) {
				return
			}
		}
	}
}

// dumped is one block of the rank that is being dumped.
type dumped struct {
	origin
	names          []uint64 // engine hashes, the newest last
	child, sibling int      // positions + 1 of blocks that follow this one; 0 is none
}

func (x *Index) dumpDevice(s *source, fn func(Run) bool) bool {
	blocks, firsts := x.arrange(s.names())
	run := Run{Rank: s.rank, Tier: worker.Device}
	flush := func() bool {
		ok := len(run.Engine) == 0 || fn(run)
		run.Engine, run.Local = run.Engine[:0], run.Local[:0]
		return ok
	}
	type step struct {
		block  int
		parent Parent
	}
	var todo []step
	for _, f := range firsts {
		todo = append(todo, step{f, Parent{}})
	}
	for len(todo) > 0 {
		next := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		b := &blocks[next.block]
		if n := len(run.Engine); n == 0 || !next.parent.Set || next.parent.Hash != run.Engine[n-1] || n >= maxRun {
			if !flush() {
				return false
			}
			run.Parent = next.parent
		}
		for i, e := range b.names { // further names are runs of their own
			if i > 0 {
				if !flush() {
					return false
				}
				run.Parent = next.parent
			}
			run.Engine, run.Local = append(run.Engine, e), append(run.Local, b.local)
		}
		self := After(b.names[len(b.names)-1])
		for c := b.child; c > 0; c = blocks[c-1].sibling {
			todo = append(todo, step{c - 1, self})
		}
	}
	return flush()
}

// names copies what the rank holds on its device: aliases, those of one block from the oldest to
// the newest.
func (s *source) names() (cells []alias, places []place, older map[uint64]uint64) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	cells, places = append(cells, s.aliases.cells...), append(places, s.aliases.places...)
	if len(s.aliases.older) > 0 {
		older = make(map[uint64]uint64, len(s.aliases.older))
		for k, v := range s.aliases.older {
			older[k] = v
		}
	}
	return cells, places, older
}

// arrange makes a forest of aliases.
func (x *Index) arrange(cells []alias, places []place, older map[uint64]uint64) (blocks []dumped, firsts []int) {
	at := make(map[uint64]int, len(cells)) // by sequence hash
	hidden := make(map[uint64]bool, len(older))
	for _, e := range older {
		hidden[e] = true
	}
	for pos, c := range cells {
		if hidden[c.engine] {
			continue
		}
		from, ok := x.device.origin(c.seq, places[pos])
		if !ok {
			continue // removed meanwhile
		}
		names := []uint64{c.engine}
		for e, ok := older[c.engine]; ok; e, ok = older[e] {
			names = append(names, e)
		}
		for i, j := 0, len(names)-1; i < j; i, j = i+1, j-1 {
			names[i], names[j] = names[j], names[i]
		}
		at[c.seq] = len(blocks)
		blocks = append(blocks, dumped{origin: from, names: names})
	}
	for seq, i := range at {
		b := &blocks[i]
		if b.local == seq {
			firsts = append(firsts, i)
		} else if up, ok := at[b.parent]; ok {
			b.sibling = blocks[up].child
			blocks[up].child = i + 1
		}
	}
	return blocks, firsts
}

// dumpLower dumps a lower tier, in the order of storing as far as it has been kept.
func (s *source) dumpLower(tier worker.Tier, fn func(Run) bool) bool {
	s.mu.RLock()
	var cells []edge
	if e := s.lower[tier]; e != nil {
		cells = append(cells, e.cells...)
	}
	s.mu.RUnlock()
	run := Run{Rank: s.rank, Tier: tier}
	for _, c := range cells {
		if c.from == After(0) {
			continue // it would be taken for a first block where 0 is unknown
		}
		n := len(run.Engine)
		follows := n > 0 && c.from == After(run.Engine[n-1]) && n < maxRun
		if follows && c.engine != run.Parent.Hash { // a ring would look as if it repeated itself
			run.Engine, run.Local = append(run.Engine, c.engine), append(run.Local, c.local)
			continue
		}
		if n > 0 && !fn(run) {
			return false
		}
		run.Parent = c.from
		run.Engine, run.Local = append(run.Engine[:0], c.engine), append(run.Local[:0], c.local)
	}
	return len(run.Engine) == 0 || fn(run)
}
