package kvindex

import "math/bits"

// edges are the blocks of one rank in one lower tier: which block follows which. An edge whose
// beginning is unknown is legal, and waits until a walk arrives there.
type edges struct {
	cells    []edge // in no order, without holes
	byEngine positions
	byStart  positions
}

type edge struct {
	from   Parent
	local  uint64
	engine uint64
}

// startHash is the hash of where an edge begins.
func startHash(from Parent, local uint64) uint64 {
	h := mix(local)
	if from.Set {
		h += bits.RotateLeft64(mix(from.Hash), 21) | 1
	}
	return mix(h)
}

// find returns the slot of byEngine and the cell of an engine hash, or false.
func (e *edges) find(engine uint64) (slot, pos int, ok bool) {
	slot = e.byEngine.find(mix(engine), func(pos int) bool { return e.cells[pos].engine == engine })
	if slot < 0 {
		return 0, 0, false
	}
	return slot, e.byEngine.at(slot), true
}

// next returns the engine hash of the block with that local hash that follows from.
func (e *edges) next(from Parent, local uint64) (engine uint64, ok bool) {
	slot := e.byStart.find(startHash(from, local), func(pos int) bool {
		return e.cells[pos].local == local && e.cells[pos].from == from
	})
	if slot < 0 {
		return 0, false
	}
	return e.cells[e.byStart.at(slot)].engine, true
}

// add adds an edge of which neither start nor engine hash is there.
func (e *edges) add(c edge) {
	if !e.byEngine.room(len(e.cells), len(e.cells)) {
		e.byEngine.resize(len(e.cells), len(e.cells))
		for pos := range e.cells {
			e.byEngine.add(mix(e.cells[pos].engine), pos)
		}
	}
	if !e.byStart.room(len(e.cells), len(e.cells)) {
		e.byStart.resize(len(e.cells), len(e.cells))
		for pos, c := range e.cells {
			e.byStart.add(startHash(c.from, c.local), pos)
		}
	}
	e.byEngine.add(mix(c.engine), len(e.cells))
	e.byStart.add(startHash(c.from, c.local), len(e.cells))
	e.cells = append(e.cells, c)
}

// remove removes the edge that find has found.
func (e *edges) remove(slot, pos int) {
	isAt := func(want int) func(int) bool { return func(pos int) bool { return pos == want } }
	gone := e.cells[pos]
	e.byEngine.remove(slot)
	e.byStart.remove(e.byStart.find(startHash(gone.from, gone.local), isAt(pos)))
	if end := len(e.cells) - 1; pos != end {
		c := e.cells[end]
		e.byEngine.set(e.byEngine.find(mix(c.engine), isAt(end)), pos)
		e.byStart.set(e.byStart.find(startHash(c.from, c.local), isAt(end)), pos)
		e.cells[pos] = c
	}
	e.cells = trimmed(e.cells[:len(e.cells)-1])
	if len(e.cells) == 0 {
		*e = edges{}
	}
}
