package kvindex

import (
	"sync"

	"spillway/kvhash"
	"spillway/worker"
)

// source is one rank and what it has announced.
type source struct {
	rank worker.Rank // set once, then read-only
	seat uint32      // its number in sets of holders; set once, then read-only

	mu      sync.RWMutex // guards what follows; taken before any lock of seating or blocks
	gone    bool         // removed: whoever has found it must look again
	aliases aliases
	lower   [worker.Tiers]*edges // by tier, or nil if it holds nothing there; none for the device
	seen    seen
	touched uint64 // of no meaning; without it what is looked at ahead would be optimised away
}

// knowsLocked tells whether an engine hash means something to this rank in any tier.
func (s *source) knowsLocked(engine uint64) bool {
	if _, _, ok := s.aliases.find(engine); ok {
		return true
	}
	for _, e := range s.lower {
		if e == nil {
			continue
		}
		if _, _, ok := e.find(engine); ok {
			return true
		}
	}
	return false
}

// ahead is how many blocks a writer takes at a time: it looks at all places in memory that their
// changes will need before it makes the first, so that it waits for memory once and not for each.
const ahead = 16

// storeLocked adds blocks to the device. It returns by how many entries there are more; moved
// tells that some engine hash now means another block.
func (s *source) storeLocked(x *Index, parent Parent, engine, local []uint64) (added int, moved bool, status Status) {
	var up uint64
	var at place
	if parent.Set {
		var ok bool
		if up, at, ok = s.aliases.block(parent.Hash); !ok {
			return 0, false, ParentUnknown
		}
	}
	known := x.seats.known()
	for len(engine) > 0 {
		n := min(ahead, len(engine))
		var seqs [ahead]uint64
		var places [ahead]place
		seq := up
		for i, l := range local[:n] {
			if parent.Set {
				seq = kvhash.Next(seq, l)
				at = x.device.next(at, seq)
			} else {
				seq, parent.Set = l, true
				at = x.device.first(seq)
			}
			seqs[i], places[i] = seq, at
			s.touched += s.aliases.touch(engine[i], seq) + x.device.touch(seq, at)
		}
		for i, e := range engine[:n] {
			from := origin{up, local[i]}
			up = seqs[i]
			if slot, pos, ok := s.aliases.find(e); ok {
				if s.aliases.means(pos, up, places[i]) {
					continue
				}
				s.removeLocked(x, slot, pos)
				added--
				moved = true
			}
			added++
			if s.aliases.add(e, up, places[i]) {
				x.device.add(up, places[i], s.seat, known, from)
			}
		}
		engine, local = engine[n:], local[n:]
	}
	return added, moved, Stored
}

// removeDeviceLocked removes blocks from the device, and returns how many were there.
func (s *source) removeDeviceLocked(x *Index, engine []uint64) (removed int) {
	for len(engine) > 0 {
		n := min(ahead, len(engine))
		for _, e := range engine[:n] {
			s.touched += s.aliases.touch(e, 0)
		}
		for _, e := range engine[:n] {
			if seq, at, ok := s.aliases.block(e); ok {
				s.touched += s.aliases.touch(e, seq) + x.device.touch(seq, at)
			}
		}
		for _, e := range engine[:n] {
			if slot, pos, ok := s.aliases.find(e); ok {
				s.removeLocked(x, slot, pos)
				removed++
			}
		}
		engine = engine[n:]
	}
	return removed
}

// removeLocked removes the alias that find has found.
func (s *source) removeLocked(x *Index, slot, pos int) {
	seq, at := s.aliases.cells[pos].seq, s.aliases.places[pos]
	if s.aliases.remove(slot, pos) {
		x.device.remove(seq, at, s.seat, x.seats.known())
	}
}

// storeLowerLocked adds blocks to a lower tier. The first one that something else stands in the
// place of ends it.
func (s *source) storeLowerLocked(x *Index, tier worker.Tier, from Parent, engine, local []uint64) (added int) {
	e := s.lower[tier]
	if e == nil {
		e = &edges{}
	}
	for i, hash := range engine {
		_, pos, known := e.find(hash)
		if known && (e.cells[pos].from != from || e.cells[pos].local != local[i]) {
			break
		}
		if !known {
			if _, taken := e.next(from, local[i]); taken {
				break
			}
			e.add(edge{from, local[i], hash})
			added++
			if !from.Set {
				x.roots[tier].add(local[i], x.roots[tier].first(local[i]), s.seat, x.seats.known(), origin{})
			}
		}
		from = After(hash)
	}
	if added > 0 && s.lower[tier] == nil {
		s.lower[tier] = e
		x.seats.markLower(s.seat, tier, true)
	}
	return added
}

// removeLowerLocked removes blocks from a lower tier, and returns how many were there.
func (s *source) removeLowerLocked(x *Index, tier worker.Tier, engine []uint64) (removed int) {
	e := s.lower[tier]
	if e == nil {
		return 0
	}
	for _, hash := range engine {
		slot, pos, ok := e.find(hash)
		if !ok {
			continue
		}
		removed++
		if c := e.cells[pos]; !c.from.Set {
			x.roots[tier].remove(c.local, x.roots[tier].first(c.local), s.seat, x.seats.known())
		}
		e.remove(slot, pos)
	}
	if len(e.cells) == 0 {
		s.lower[tier] = nil
		x.seats.markLower(s.seat, tier, false)
	}
	return removed
}

// clearLocked forgets everything, and returns how many entries that were.
func (s *source) clearLocked(x *Index) (entries int) {
	known := x.seats.known()
	for tier, e := range s.lower {
		if e == nil {
			continue
		}
		x.seats.markLower(s.seat, worker.Tier(tier), false) // first, so that queries do not wait for us
		entries += len(e.cells)
		for _, c := range e.cells {
			if !c.from.Set {
				x.roots[tier].remove(c.local, x.roots[tier].first(c.local), s.seat, known)
			}
		}
		s.lower[tier] = nil
	}
	entries += len(s.aliases.cells)
	for i, c := range s.aliases.cells {
		x.device.remove(c.seq, s.aliases.places[i], s.seat, known) // once for each alias, which does no harm
	}
	s.aliases = aliases{}
	s.seen = seen{}
	return entries
}

// seen finds repetitions in short lists of hashes without allocating.
type seen struct {
	slots []uint64
	round []uint32 // the list that a slot was last used for
	now   uint32
}

// maxSeen is the length of a list beyond which the memory for it is not kept.
const maxSeen = 256

// repeats tells whether a hash occurs twice in engine, or is parent.
func (s *seen) repeats(parent Parent, engine []uint64) bool {
	if len(engine) <= 8 {
		for i, e := range engine {
			if parent.Set && parent.Hash == e {
				return true
			}
			for _, o := range engine[:i] {
				if o == e {
					return true
				}
			}
		}
		return false
	}
	if len(engine) > maxSeen {
		defer func() { *s = seen{} }()
	}
	if n := 2*len(engine) + 2; n > len(s.slots) {
		s.slots, s.round, s.now = make([]uint64, n), make([]uint32, n), 0
	}
	if s.now++; s.now == 0 { // it has gone around
		clear(s.round)
		s.now = 1
	}
	if parent.Set {
		s.add(parent.Hash)
	}
	for _, e := range engine {
		if !s.add(e) {
			return true
		}
	}
	return false
}

func (s *seen) add(hash uint64) bool {
	for i := home(mix(hash), len(s.slots)); ; {
		if s.round[i] != s.now {
			s.slots[i], s.round[i] = hash, s.now
			return true
		}
		if s.slots[i] == hash {
			return false
		}
		if i++; i == len(s.slots) {
			i = 0
		}
	}
}
