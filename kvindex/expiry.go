package kvindex

import (
	"slices"
	"time"

	"spillway/worker"
)

// Expire removes the blocks whose time is over.
func (r *Routed) Expire(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, one := range r.byRank {
		r.expireLocked(one, now)
	}
}

// removeLocked forgets all blocks of a rank, if it has any.
func (r *Routed) removeLocked(rank worker.Rank) {
	of := r.byRank[rank]
	if of == nil {
		return
	}
	delete(r.byRank, rank)
	for slot, v := range of.entries.slots {
		if v <= deleted {
			continue
		}
		for i := int32(of.entries.at(slot)); i >= 0; {
			next := r.nodes[i].next
			r.dropLocked(i)
			i = next
		}
	}
	r.takeLocked(rank)
	if r.held == 0 {
		r.nodes, r.free = nil, nil
	}
}

// dropLocked takes back a node, and notes that its block is to go.
func (r *Routed) dropLocked(i int32) {
	r.gone, r.gonePlaces = append(r.gone, r.nodes[i].seq), append(r.gonePlaces, r.nodes[i].place)
	r.nodes[i] = node{}
	r.free = append(r.free, i)
	r.held--
}

// takeLocked takes from the index what was dropped, but for blocks that events have told of.
func (r *Routed) takeLocked(rank worker.Rank) {
	r.ix.forget(len(r.gone))
	if s := r.ix.locked(rank, false); s != nil {
		left, places := r.gone, r.gonePlaces
		if len(s.aliases.cells) > 0 {
			left, places = left[:0], places[:0]
			for i, seq := range r.gone {
				if at := r.gonePlaces[i]; s.aliases.findSeq(seq, at) < 0 {
					left, places = append(left, seq), append(places, at)
				}
			}
		}
		for i, seq := range left {
			r.touched += r.ix.device.touch(seq, places[i])
		}
		r.ix.device.removeRun(left, places, s.seat, r.ix.seats.known())
		s.mu.Unlock()
	}
	if cap(r.gone) > maxGone {
		r.gone, r.gonePlaces = nil, nil
	}
	r.gone, r.gonePlaces = r.gone[:0], r.gonePlaces[:0]
}

// maxGone is how many blocks that are being removed there is memory kept for.
const maxGone = 1 << 14

func (r *Routed) listLocked(of *routes, at int64, p passing) {
	if _, ok := of.due[at]; !ok {
		i, _ := slices.BinarySearch(of.order, at)
		of.order = slices.Insert(of.order, i, at) // nearly always at the end
	}
	of.due[at] = append(of.due[at], p)
	of.listed++
	if of.listed > 4*of.held+1024 {
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
	left := of.due[at]
	for ; len(left) > 0 && r.held > target; left = left[1:] {
		if n := left[0].node; r.hasLocked(left[0], at) {
			for r.looseLocked(n, at) && r.held > target {
				n = r.cutLocked(of, n)
			}
			if r.looseLocked(n, at) { // enough: the rest of the prompt stays
				r.nodes[n].at = at
				left[0] = passing{n, r.nodes[n].number}
				break
			}
		}
		of.listed--
	}
	r.takeLocked(of.rank)
	switch {
	case of.held == 0: // what is still listed is of nodes that are gone, and there may be none at all soon
		of.order = nil
		delete(r.byRank, of.rank)
	case len(left) > 0:
		of.due[at] = left
	default:
		delete(of.due, at)
		of.order = of.order[1:]
	}
}

// looseLocked tells whether nothing keeps a node in a bucket's time: no block follows it, and its own time is over.
func (r *Routed) looseLocked(i int32, at int64) bool {
	return i >= 0 && r.nodes[i].after == 0 && r.nodes[i].at <= at
}

// cutLocked drops the last node of a prompt, and returns that of the block before it, or -1.
func (r *Routed) cutLocked(of *routes, i int32) int32 {
	one := r.nodes[i]
	leads := false // the one before to this one
	if one.before >= 0 {
		up := &r.nodes[one.before]
		up.after--
		if leads = up.next == i; leads {
			up.next = -1
		}
	}
	if !leads {
		of.entries.remove(of.entries.find(mix(one.seq), func(pos int) bool { return pos == int(i) }))
	}
	r.dropLocked(i)
	of.held--
	return one.before
}

// hasLocked tells whether what is listed in a bucket still has that deadline.
func (r *Routed) hasLocked(p passing, at int64) bool {
	return r.nodes[p.node].number == p.number && r.nodes[p.node].at == at
}

// tidyLocked takes from the lists what has another deadline by now, or none.
func (r *Routed) tidyLocked(of *routes) {
	of.listed = 0
	of.order = slices.DeleteFunc(of.order, func(at int64) bool {
		kept := slices.DeleteFunc(of.due[at], func(p passing) bool { return !r.hasLocked(p, at) })
		if len(kept) == 0 {
			delete(of.due, at)
			return true
		}
		of.due[at] = kept
		of.listed += len(kept)
		return false
	})
}
