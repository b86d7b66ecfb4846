package kvindex

// aliases are one rank's names for the blocks on its device: which engine hash means which
// sequence hash, and back. A block may have several names.
type aliases struct {
	cells    []alias // in no order, without holes
	places   []place // where the blocks of cells are
	byEngine positions
	bySeq    positions         // the newest alias of each block
	older    map[uint64]uint64 // engine hash -> that of the next older alias of the same block; nil until needed
}

type alias struct{ engine, seq uint64 }

// find returns the slot of byEngine and the cell of an engine hash, or false.
func (a *aliases) find(engine uint64) (slot, pos int, ok bool) {
	slot = a.byEngine.find(mix(engine), func(pos int) bool { return a.cells[pos].engine == engine })
	if slot < 0 {
		return 0, 0, false
	}
	return slot, a.byEngine.at(slot), true
}

// block returns the block that an engine hash means.
func (a *aliases) block(engine uint64) (seq uint64, at place, ok bool) {
	_, pos, ok := a.find(engine)
	if !ok {
		return 0, 0, false
	}
	return a.cells[pos].seq, a.places[pos], true
}

// means tells whether a cell means a block.
func (a *aliases) means(pos int, seq uint64, at place) bool {
	return a.cells[pos].seq == seq && a.places[pos].shard() == at.shard()
}

func (a *aliases) findSeq(seq uint64, at place) int {
	return a.bySeq.find(mix(seq), func(pos int) bool { return a.means(pos, seq, at) })
}

// newest returns the newest engine hash of a block.
func (a *aliases) newest(seq uint64, at place) (engine uint64, ok bool) {
	slot := a.findSeq(seq, at)
	if slot < 0 {
		return 0, false
	}
	return a.cells[a.bySeq.at(slot)].engine, true
}

// touch looks at where an alias is or would be.
func (a *aliases) touch(engine, seq uint64) uint64 {
	return uint64(a.byEngine.touch(mix(engine)) + a.bySeq.touch(mix(seq)))
}

// add adds an engine hash that is not there, and tells whether it is the block's first.
func (a *aliases) add(engine, seq uint64, at place) (first bool) {
	a.makeRoom()
	pos := len(a.cells)
	a.cells, a.places = append(a.cells, alias{engine, seq}), append(a.places, at)
	a.byEngine.add(mix(engine), pos)
	slot := a.findSeq(seq, at)
	if slot < 0 {
		a.bySeq.add(mix(seq), pos)
		return true
	}
	if a.older == nil {
		a.older = map[uint64]uint64{}
	}
	a.older[engine] = a.cells[a.bySeq.at(slot)].engine
	a.bySeq.set(slot, pos)
	return false
}

// remove removes the alias that find has found, and tells whether it was the block's last.
func (a *aliases) remove(slot, pos int) (last bool) {
	gone := a.cells[pos]
	at := a.findSeq(gone.seq, a.places[pos])
	next, hasOlder := a.older[gone.engine]
	switch newest := a.cells[a.bySeq.at(at)].engine; {
	case newest == gone.engine && !hasOlder:
		a.bySeq.remove(at)
		last = true
	case newest == gone.engine:
		_, nextPos, _ := a.find(next)
		a.bySeq.set(at, nextPos)
		delete(a.older, gone.engine)
	default:
		newer := newest
		for a.older[newer] != gone.engine {
			newer = a.older[newer]
		}
		if hasOlder {
			a.older[newer] = next
			delete(a.older, gone.engine)
		} else {
			delete(a.older, newer)
		}
	}
	a.byEngine.remove(slot)
	a.fill(pos)
	return last
}

// fill moves the last cell to where one has gone.
func (a *aliases) fill(pos int) {
	end := len(a.cells) - 1
	if pos != end {
		c := a.cells[end]
		isEnd := func(pos int) bool { return pos == end }
		a.byEngine.set(a.byEngine.find(mix(c.engine), isEnd), pos)
		if slot := a.bySeq.find(mix(c.seq), isEnd); slot >= 0 {
			a.bySeq.set(slot, pos)
		}
		a.cells[pos], a.places[pos] = c, a.places[end]
	}
	a.cells, a.places = trimmed(a.cells[:end]), trimmed(a.places[:end])
	if len(a.cells) == 0 {
		*a = aliases{}
	}
}

// makeRoom makes both tables ready for one more.
func (a *aliases) makeRoom() {
	if !a.byEngine.room(len(a.cells), len(a.cells)) {
		a.byEngine.resize(len(a.cells), len(a.cells))
		for pos := range a.cells {
			a.byEngine.add(mix(a.cells[pos].engine), pos)
		}
	}
	if !a.bySeq.room(len(a.cells), len(a.cells)) {
		hidden := make(map[uint64]bool, len(a.older)) // aliases that are not the newest
		for _, e := range a.older {
			hidden[e] = true
		}
		a.bySeq.resize(len(a.cells), len(a.cells))
		for pos, c := range a.cells {
			if len(hidden) == 0 || !hidden[c.engine] {
				a.bySeq.add(mix(c.seq), pos)
			}
		}
	}
}

// trimmed gives back memory of a slice that has become far smaller than it was.
func trimmed[T any](s []T) []T {
	if cap(s) <= 64 || len(s)*4 > cap(s) {
		return s
	}
	return append(make([]T, 0, len(s)*3/2), s...)
}
