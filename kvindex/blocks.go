package kvindex

import (
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
)

// blocks is a table from the sequence hash of a block to those who hold it. It is cut into shards
// by stretches, so that a query finds many blocks in a row in one shard, and there mostly side by
// side: what a search costs is the memory it has to wait for. Writers lock a shard for one change.
// Readers take no lock: a shard has a version that is odd while a writer is at it, and a reader
// that finds it odd, or another one after looking than before, looks again.
type blocks struct {
	shards    []shard
	shardBits int
}

type shard struct {
	mu      sync.Mutex // guards changes of all that follows; no other lock is taken under it
	version atomic.Uint64
	table   atomic.Pointer[table] // nil while there is nothing
	room    room
	rows    rows
	scratch []uint32
	_       [64]byte // the next shard's writers are not our business
}

// stretch is how many consecutive blocks of a prompt are in one shard, that of the first of them.
// A stretch begins at each multiple of it. Prompts that part within a stretch stay together until
// its end, so it should not be long either.
const (
	stretchBits = 4
	stretch     = 1 << stretchBits
)

// place is the shard of a block, and how many blocks of its stretch come before it. A block has
// only one, since a sequence hash tells all blocks before it; should two blocks have the same
// hash in spite of that, they are the same one if they are in the same shard.
type place uint16

func newBlocks(shardBits int) *blocks {
	return &blocks{shards: make([]shard, 1<<shardBits), shardBits: shardBits}
}

// first returns the place of a block that begins a stretch, as the first of a prompt does.
func (b *blocks) first(key uint64) place { return place(mix(key) >> (64 - b.shardBits) << stretchBits) }

// next returns the place of the block that follows one at p.
func (b *blocks) next(p place, key uint64) place {
	if p%stretch == stretch-1 {
		return b.first(key)
	}
	return p + 1
}

func (p place) shard() int { return int(p >> stretchBits) }

// shard returns the shard of a place.
func (b *blocks) shard(p place) *shard { return &b.shards[p.shard()] }

// patience is how often a reader looks for a moment without writers before it waits for one.
const patience = 64

// read returns the holders of a block and the cell they are in, which is probably the one after
// near. If they are in a row it is copied to row, which grows as needed and is returned.
func (s *shard) read(key uint64, near int, row []uint64) (holders, int, []uint64) {
	for range patience {
		v := s.version.Load()
		if v&1 != 0 {
			continue
		}
		var held holders
		at := near
		if t := s.table.Load(); t != nil {
			if at = t.after(near, key); at >= 0 {
				held = holders(t.cells[at].holders.Load())
			}
		}
		row = s.rows.copied(row, held)
		if s.version.Load() == v {
			return held, at, row
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.table.Load()
	if t == nil {
		return 0, near, row
	}
	at := t.after(near, key)
	if at < 0 {
		return 0, at, row
	}
	held := holders(t.cells[at].holders.Load())
	return held, at, s.rows.copied(row, held)
}

// touch looks at where the search for a block begins.
func (b *blocks) touch(key uint64, p place) uint64 {
	t := b.shard(p).table.Load()
	if t == nil {
		return 0
	}
	return uint64(t.touch(key))
}

// add records that seat, one of the first known ones, holds a block. It does nothing if that is
// recorded already.
func (b *blocks) add(key uint64, p place, seat uint32, known int, from origin) {
	s := b.shard(p)
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.roomyLocked(1)
	near := -1
	if p%stretch > 0 {
		near = t.find(from.parent)
	}
	s.version.Add(1)
	s.putLocked(t, key, near, seat, known, from)
	s.version.Add(1)
}

// addRun is add for consecutive blocks of a stretch, all of this shard: those of a prompt, given by all its
// sequence and block hashes, from one up to another. It returns how many it has recorded. Readers wait once
// for all.
func (s *shard) addRun(seqs, local []uint64, from, end int, seat uint32, known int) (added int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.roomyLocked(end - from)
	near, up := -1, origin{}
	if from > 0 {
		up.parent = seqs[from-1]
	}
	if from%stretch > 0 {
		near = t.find(up.parent)
	}
	s.version.Add(1)
	for i := from; i < end; i++ {
		up.local = local[i]
		var more bool
		if near, more = s.putLocked(t, seqs[i], near, seat, known, up); more {
			added++
		}
		up.parent = seqs[i]
	}
	s.version.Add(1)
	return added
}

// putLocked does add in a table that has room, while the version is odd. near is the cell of the block
// before, or -1. It returns that of the block, and whether anything has changed.
func (s *shard) putLocked(t *table, key uint64, near int, seat uint32, known int, from origin) (cell int, more bool) {
	if i := t.after(near, key); i >= 0 {
		held := holders(t.cells[i].holders.Load())
		with := s.withLocked(held, seat, known)
		if with == held {
			return i, false
		}
		t.cells[i].holders.Store(uint64(with))
		return i, true
	}
	i := s.room.take(t, near)
	t.origins[i] = from
	t.cells[i].key.Store(key)
	t.cells[i].holders.Store(uint64(oneHolder(seat)))
	s.room.list(t, key, i)
	return i, true
}

// remove records that seat does not hold a block any more. It does nothing if it did not.
func (b *blocks) remove(key uint64, p place, seat uint32, known int) {
	b.shard(p).remove([]uint64{key}, seat, known)
}

// removeRun is remove for many blocks; those of one shard should follow each other.
func (b *blocks) removeRun(keys []uint64, places []place, seat uint32, known int) {
	for i := 0; i < len(keys); {
		end := i + 1
		for end < len(keys) && places[end].shard() == places[i].shard() && end-i < stretch {
			end++
		}
		b.shard(places[i]).remove(keys[i:end], seat, known)
		i = end
	}
}

func (s *shard) remove(keys []uint64, seat uint32, known int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.table.Load()
	if t == nil {
		return
	}
	s.version.Add(1)
	for _, key := range keys {
		slot, i := t.search(key)
		if i < 0 {
			continue
		}
		left := s.withoutLocked(holders(t.cells[i].holders.Load()), seat, known)
		t.cells[i].holders.Store(uint64(left))
		if left == 0 {
			s.room.unlist(t, slot)
			s.room.give(t, i)
		}
	}
	s.version.Add(1)
	switch n := s.room.live; {
	case n == 0:
		s.swapLocked(nil, room{})
		s.scratch = nil
	case n*5 < len(t.cells) && len(t.cells) > minCells:
		s.swapLocked(resized(t, n, n))
	}
}

// has tells whether seat holds a block.
func (b *blocks) has(key uint64, p place, seat uint32) bool {
	s := b.shard(p)
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.table.Load()
	if t == nil {
		return false
	}
	i := t.find(key)
	if i < 0 {
		return false
	}
	s.scratch = s.rows.seats(s.scratch[:0], holders(t.cells[i].holders.Load()))
	return slices.Contains(s.scratch, seat)
}

// roomyLocked returns the shard's table, which has room for n more blocks.
func (s *shard) roomyLocked(n int) *table {
	t := s.table.Load()
	if t != nil && s.room.left(t, n) {
		return t
	}
	return s.swapLocked(resized(t, s.room.live, s.room.live+n-1))
}

// swapLocked puts a table in the place of the shard's, and returns it.
func (s *shard) swapLocked(t *table, r room) *table {
	s.version.Add(1)
	s.table.Store(t)
	s.room = r
	s.version.Add(1)
	return t
}

// origin returns what a block was made from, or false if it is not there.
func (b *blocks) origin(key uint64, p place) (origin, bool) {
	s := b.shard(p)
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.table.Load()
	if t == nil {
		return origin{}, false
	}
	i := t.find(key)
	if i < 0 {
		return origin{}, false
	}
	return t.origins[i], true
}

// withLocked returns held and seat.
func (s *shard) withLocked(held holders, seat uint32, known int) holders {
	if held.inline() == 0 && held.dense() && int(seat)>>6 < 1<<held.size() {
		w := &s.rows.words(held.size(), held.row())[seat/64]
		if was := w.Load(); was&(1<<(seat%64)) == 0 {
			w.Store(was | 1<<(seat%64))
			held += 1 << 8
		}
		return held
	}
	s.scratch = s.rows.seats(s.scratch[:0], held)
	at, there := slices.BinarySearch(s.scratch, seat)
	if there {
		return held
	}
	s.scratch = slices.Insert(s.scratch, at, seat)
	return s.replaceLocked(held, known)
}

// withoutLocked returns held without seat, 0 if nobody is left.
func (s *shard) withoutLocked(held holders, seat uint32, known int) holders {
	if held == oneHolder(seat) {
		return 0
	}
	if held.inline() == 0 && held.dense() {
		if int(seat)>>6 >= 1<<held.size() {
			return held
		}
		w := &s.rows.words(held.size(), held.row())[seat/64]
		was := w.Load()
		if was&(1<<(seat%64)) == 0 {
			return held
		}
		w.Store(was &^ (1 << (seat % 64)))
		held -= 1 << 8
		if n := held.count(); n > inWord && held.size() <= bits.Len(uint(n-1)/2)+4 {
			return held
		}
		s.scratch = s.rows.seats(s.scratch[:0], held) // too few for such a row
		return s.replaceLocked(held, known)
	}
	s.scratch = s.rows.seats(s.scratch[:0], held)
	at, there := slices.BinarySearch(s.scratch, seat)
	if !there {
		return held
	}
	s.scratch = slices.Delete(s.scratch, at, at+1)
	return s.replaceLocked(held, known)
}

// replaceLocked makes holders of s.scratch, in place of held.
func (s *shard) replaceLocked(held holders, known int) holders {
	if held.inline() == 0 {
		s.rows.give(held.size(), held.row())
	}
	return s.rows.store(s.scratch, known)
}

// empty tells whether the shard that a key would be in holds nothing.
func (b *blocks) empty(key uint64) bool { return b.shard(b.first(key)).table.Load() == nil }
