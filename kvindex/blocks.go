package kvindex

import (
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
)

// blocks is a table from the hash of a block to those who hold it. It is cut into shards by hash.
// Writers lock a shard for one change. Readers take no lock: a shard has a version that is odd
// while a writer is at it, and a reader that finds it odd, or another one after looking than
// before, looks again.
type blocks struct {
	shards    []shard
	shardBits int
	traced    bool // cells remember what they were made from
}

type shard struct {
	mu      sync.Mutex // guards changes of all that follows; no other lock is taken under it
	version atomic.Uint64
	table   atomic.Pointer[table] // nil while there is nothing
	live    int                   // blocks in the table; at most four fifths of its cells
	rows    rows
	scratch []uint32
	_       [64]byte // the next shard's writers are not our business
}

// table is open addressing with linear probing. A cell is in use if it has holders.
type table struct {
	cells   []cell
	origins []origin // by cell; nil if not traced
}

type cell struct{ key, holders atomic.Uint64 }

// origin is what a sequence hash was made from. For a first block, parent is of no meaning and
// local is the sequence hash itself.
type origin struct{ parent, local uint64 }

func newBlocks(shardBits int, traced bool) *blocks {
	return &blocks{shards: make([]shard, 1<<shardBits), shardBits: shardBits, traced: traced}
}

// shard returns the shard of a key, and the hash that tells its cell within it.
func (b *blocks) shard(key uint64) (s *shard, h uint64) {
	h = mix(key)
	return &b.shards[h>>(64-b.shardBits)], h << b.shardBits
}

// patience is how often a reader looks for a moment without writers before it waits for one.
const patience = 64

// read returns the holders of a block. If they are in a row it is copied to row, which grows as
// needed and is returned.
func (b *blocks) read(key uint64, row []uint64) (holders, []uint64) {
	s, h := b.shard(key)
	for range patience {
		v := s.version.Load()
		if v&1 != 0 {
			continue
		}
		var found holders
		if t := s.table.Load(); t != nil {
			found = holders(t.find(key, h))
		}
		if found != 0 && found.inline() == 0 {
			words := s.rows.words(found.size(), found.row())
			row = slices.Grow(row[:0], len(words))[:len(words)]
			for i := range words {
				row[i] = words[i].Load()
			}
		}
		if s.version.Load() == v {
			return found, row
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var found holders
	if t := s.table.Load(); t != nil {
		found = holders(t.find(key, h))
	}
	if found != 0 && found.inline() == 0 {
		row = row[:0]
		for i, words := 0, s.rows.words(found.size(), found.row()); i < len(words); i++ {
			row = append(row, words[i].Load())
		}
	}
	return found, row
}

// covers tells whether a block's holders are a row of bits that has all of set. If a writer comes
// between, it is false; read will tell more.
func (b *blocks) covers(key uint64, set []uint64) bool {
	s, h := b.shard(key)
	v := s.version.Load()
	t := s.table.Load()
	if v&1 != 0 || t == nil {
		return false
	}
	found := holders(t.find(key, h))
	if found == 0 || found.inline() > 0 || !found.dense() {
		return false
	}
	words := s.rows.words(found.size(), found.row())
	if len(words) < len(set) {
		return false
	}
	var missing uint64
	for i, w := range set {
		missing |= w &^ words[i].Load()
	}
	return missing == 0 && s.version.Load() == v
}

// find returns the holders of key, 0 if there is no such cell. A reader may call it at any time,
// but can believe the result only if the version has stayed.
func (t *table) find(key, h uint64) uint64 {
	for i := home(h, len(t.cells)); ; {
		held := t.cells[i].holders.Load()
		if held == 0 || t.cells[i].key.Load() == key {
			return held
		}
		if i++; i == len(t.cells) {
			i = 0
		}
	}
}

// touch looks at where a block is or would be.
func (b *blocks) touch(key uint64) uint64 {
	s, h := b.shard(key)
	t := s.table.Load()
	if t == nil {
		return 0
	}
	i := home(h, len(t.cells))
	return t.cells[i].holders.Load()
}

// cell returns the cell of key, or the empty one where it would be.
func (t *table) cell(key, h uint64) int {
	i := home(h, len(t.cells))
	for t.cells[i].holders.Load() != 0 && t.cells[i].key.Load() != key {
		if i++; i == len(t.cells) {
			i = 0
		}
	}
	return i
}

// add records that seat, one of the first known ones, holds a block. It does nothing if that is
// recorded already.
func (b *blocks) add(key uint64, seat uint32, known int, from origin) {
	s, h := b.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.table.Load()
	if t == nil {
		t = b.resizeLocked(s)
	}
	i := t.cell(key, h)
	held := holders(t.cells[i].holders.Load())
	if held == 0 {
		if (s.live+1)*5 > len(t.cells)*4 {
			t = b.resizeLocked(s)
			i = t.cell(key, h)
		}
		s.version.Add(1)
		s.live++
		if t.origins != nil {
			t.origins[i] = from
		}
		t.cells[i].key.Store(key)
		t.cells[i].holders.Store(uint64(oneHolder(seat)))
		s.version.Add(1)
		return
	}
	s.version.Add(1)
	t.cells[i].holders.Store(uint64(s.withLocked(held, seat, known)))
	s.version.Add(1)
}

// remove records that seat does not hold a block any more. It does nothing if it did not.
func (b *blocks) remove(key uint64, seat uint32, known int) {
	s, h := b.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.table.Load()
	if t == nil {
		return
	}
	i := t.cell(key, h)
	held := holders(t.cells[i].holders.Load())
	if held == 0 {
		return
	}
	s.version.Add(1)
	defer s.version.Add(1)
	left := s.withoutLocked(held, seat, known)
	if left != 0 {
		t.cells[i].holders.Store(uint64(left))
		return
	}
	b.emptyLocked(t, i)
	s.live--
	switch {
	case s.live == 0:
		s.table.Store(nil)
		s.scratch = nil
	case len(t.cells) > minCells && s.live*5 < len(t.cells):
		s.table.Store(b.resized(s))
	}
}

// emptyLocked empties a cell, and moves those up that would not be found behind an empty one.
func (b *blocks) emptyLocked(t *table, gap int) {
	n := len(t.cells)
	for i := gap; ; {
		if i++; i == n {
			i = 0
		}
		held := t.cells[i].holders.Load()
		if held == 0 {
			break
		}
		key := t.cells[i].key.Load()
		from := home(mix(key)<<b.shardBits, n)
		if distance(from, i, n) < distance(gap, i, n) {
			continue // its home lies behind the gap
		}
		t.cells[gap].key.Store(key)
		t.cells[gap].holders.Store(held)
		if t.origins != nil {
			t.origins[gap] = t.origins[i]
		}
		gap = i
	}
	t.cells[gap].holders.Store(0)
}

// distance is how many steps lead from one of n cells to another.
func distance(from, to, n int) int {
	if to < from {
		return to - from + n
	}
	return to - from
}

const minCells = 8

// resizeLocked makes the table anew, with room for more.
func (b *blocks) resizeLocked(s *shard) *table {
	t := b.resized(s)
	s.version.Add(1)
	s.table.Store(t)
	s.version.Add(1)
	return t
}

// resized is a copy of the shard's table that is filled to 55 in 100.
func (b *blocks) resized(s *shard) *table {
	t := &table{cells: make([]cell, max(minCells, s.live*20/11+1))}
	if b.traced {
		t.origins = make([]origin, len(t.cells))
	}
	was := s.table.Load()
	if was == nil {
		return t
	}
	for i := range was.cells {
		held := was.cells[i].holders.Load()
		if held == 0 {
			continue
		}
		key := was.cells[i].key.Load()
		at := t.cell(key, mix(key)<<b.shardBits)
		t.cells[at].key.Store(key)
		t.cells[at].holders.Store(held)
		if b.traced {
			t.origins[at] = was.origins[i]
		}
	}
	return t
}

// origin returns what a block was made from, or false if it is not there.
func (b *blocks) origin(key uint64) (origin, bool) {
	s, h := b.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.table.Load()
	if t == nil {
		return origin{}, false
	}
	i := t.cell(key, h)
	if t.cells[i].holders.Load() == 0 {
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
func (b *blocks) empty(key uint64) bool {
	s, _ := b.shard(key)
	return s.table.Load() == nil
}
