package kvindex

import (
	"math/bits"
	"sync/atomic"
)

// table is the blocks of one shard: cells, and slots that tell by hash which cell a block is in.
// Blocks that follow each other are in cells that do, as far as there is room. Readers may look at
// any time, but can believe what they see only if the shard's version has stayed; writers hold the
// shard's lock.
type table struct {
	cells   []cell
	origins []origin // by cell; for writers
	slots   []uint32 // like those of positions: 0 is empty, 1 deleted, else cell + 2, with bits of the hash above posBits
	posBits int
}

// cell is in use if it has holders.
type cell struct{ key, holders atomic.Uint64 }

// origin is what a sequence hash was made from. For a first block, parent is of no meaning and
// local is the sequence hash itself.
type origin struct{ parent, local uint64 }

// room is what the writers of a table know of it.
type room struct {
	live  int // blocks in the table
	fresh int // cells from here on were never used
	free  int // one of the cells before that have been given back, as cell + 1; 0 is none. Their origins link them
	used  int // slots that are not empty; at most four fifths
}

const (
	minCells = 8
	minSlots = 16
	perLine  = 4 // cells in a line of the processor's cache
)

// spread is the hash that tells the slot of a key. Its upper bits are not those that tell shards.
func spread(key uint64) uint64 { return mix(key) << deviceShards }

// find returns the cell of a block, or -1.
func (t *table) find(key uint64) int {
	_, i := t.search(key)
	return i
}

// search returns the slot and the cell of a block, or -1 for both.
func (t *table) search(key uint64) (slot, cell int) {
	h := spread(key)
	mask := uint32(1)<<t.posBits - 1
	tag := uint32(h) &^ mask
	for i := home(h, len(t.slots)); ; {
		v := atomic.LoadUint32(&t.slots[i])
		if v == 0 {
			return -1, -1
		}
		if v&^mask == tag && v != deleted {
			if at := int(v&mask) - 2; t.holds(at, key) {
				return i, at
			}
		}
		if i++; i == len(t.slots) {
			i = 0
		}
	}
}

// holds tells whether a block is in a cell, of which there need not be that many.
func (t *table) holds(at int, key uint64) bool {
	return uint(at) < uint(len(t.cells)) && t.cells[at].key.Load() == key && t.cells[at].holders.Load() != 0
}

// after is find for a block that is probably in the cell after near.
func (t *table) after(near int, key uint64) int {
	if near >= 0 && t.holds(near+1, key) {
		return near + 1
	}
	return t.find(key)
}

// touch looks at where the search for a block begins.
func (t *table) touch(key uint64) uint32 {
	return atomic.LoadUint32(&t.slots[home(spread(key), len(t.slots))])
}

// left tells whether there is room for n more blocks.
func (r *room) left(t *table, n int) bool {
	return r.live+n <= len(t.cells) && (r.used+n)*5 <= len(t.slots)*4
}

// take returns a cell that is not in use: the one after near, if near is not -1 and it can be had;
// else one where more have room to follow, so as it seems.
func (r *room) take(t *table, near int) int {
	r.live++
	if i := near + 1; near >= 0 && i < r.fresh && t.cells[i].holders.Load() == 0 {
		r.unlink(t, i)
		return i
	}
	if r.fresh < len(t.cells) {
		for near+1 != r.fresh && r.fresh%perLine != 0 && r.fresh < len(t.cells)-1 {
			r.link(t, r.fresh) // for those who follow what is before
			r.fresh++
		}
		r.fresh++
		return r.fresh - 1
	}
	i := r.free - 1
	for n := 1; n < stretch && i > 0 && t.cells[i-1].holders.Load() == 0; n++ {
		i--
	}
	r.unlink(t, i)
	return i
}

// give takes back a cell that has no holders any more.
func (r *room) give(t *table, i int) {
	r.live--
	r.link(t, i)
}

// link puts a cell at the front of the free ones, of which each knows the one before and the next.
func (r *room) link(t *table, i int) {
	t.origins[i] = origin{0, uint64(r.free)}
	if r.free > 0 {
		t.origins[r.free-1].parent = uint64(i + 1)
	}
	r.free = i + 1
}

func (r *room) unlink(t *table, i int) {
	before, next := t.origins[i].parent, t.origins[i].local
	if before > 0 {
		t.origins[before-1].local = next
	} else {
		r.free = int(next)
	}
	if next > 0 {
		t.origins[next-1].parent = before
	}
}

// list makes a cell known under a key. There must be room.
func (r *room) list(t *table, key uint64, cell int) {
	h := spread(key)
	i := home(h, len(t.slots))
	for atomic.LoadUint32(&t.slots[i]) > deleted {
		if i++; i == len(t.slots) {
			i = 0
		}
	}
	if t.slots[i] == 0 {
		r.used++
	}
	atomic.StoreUint32(&t.slots[i], uint32(h)&^(1<<t.posBits-1)|uint32(cell+2))
}

// unlist empties a slot, and the deleted ones before it if no search has to go on behind them.
func (r *room) unlist(t *table, slot int) {
	next := slot + 1
	if next == len(t.slots) {
		next = 0
	}
	if t.slots[next] != 0 {
		atomic.StoreUint32(&t.slots[slot], deleted)
		return
	}
	for {
		atomic.StoreUint32(&t.slots[slot], 0)
		r.used--
		if slot--; slot < 0 {
			slot = len(t.slots) - 1
		}
		if t.slots[slot] != deleted {
			return
		}
	}
}

// resized is a copy of a table, or of none, with live blocks in the same order, that is three quarters
// full when so many are wanted.
func resized(was *table, live, wanted int) (*table, room) {
	n := max(minCells, wanted*4/3+1)
	t := &table{
		cells: make([]cell, n), origins: make([]origin, n), slots: make([]uint32, max(minSlots, n*8/5)),
		posBits: bits.Len(uint(n + 1)),
	}
	r := room{live: live}
	if was == nil {
		return t, r
	}
	for i := range was.cells {
		held := was.cells[i].holders.Load()
		if held == 0 {
			continue
		}
		key := was.cells[i].key.Load()
		t.cells[r.fresh].key.Store(key)
		t.cells[r.fresh].holders.Store(held)
		t.origins[r.fresh] = was.origins[i]
		r.list(t, key, r.fresh)
		r.fresh++
	}
	return t, r
}
