package wire

import "slices"

// repeats finds numbers that come twice in a list. Its zero value is ready; it is a set of places
// in the list by open addressing, which keeps its memory.
type repeats struct {
	slots []int32 // place in the list + 1, or 0
}

const (
	few         = 8   // numbers that are compared with each other faster than by a set
	longestHunt = 256 // slots that are looked into for one number, unless somebody has chosen them to collide
)

// in tells whether a number comes twice in list, or parent is in it, if there is one.
func (r *repeats) in(list []uint64, parent uint64, hasParent bool) bool {
	if hasParent && slices.Contains(list, parent) {
		return true
	}
	if len(list) <= few {
		for i, h := range list {
			if slices.Contains(list[:i], h) {
				return true
			}
		}
		return false
	}
	r.empty(128)
	for i := range list {
		if 2*i >= len(r.slots) { // so that memory goes by how many differ, not by how long the list is
			r.empty(4 * len(r.slots))
			for k := range i {
				if _, hunted := r.add(list, k); hunted > longestHunt {
					return anyRepeats(list)
				}
			}
		}
		again, hunted := r.add(list, i)
		if again {
			return true
		}
		if hunted > longestHunt {
			return anyRepeats(list)
		}
	}
	return false
}

// anyRepeats tells whether a number comes twice in list, which it copies.
func anyRepeats(list []uint64) bool {
	sorted := slices.Clone(list)
	slices.Sort(sorted)
	return len(slices.Compact(sorted)) < len(list)
}

// empty makes the set one of size slots, a power of 2, all free.
func (r *repeats) empty(size int) {
	if cap(r.slots) < size {
		r.slots = make([]int32, size)
		return
	}
	r.slots = r.slots[:size]
	clear(r.slots)
}

// add puts the number at place i in, and tells whether an equal one is there already, and into how
// many slots it has looked.
func (r *repeats) add(list []uint64, i int) (again bool, hunted int) {
	mask := uint64(len(r.slots) - 1)
	for at := (list[i] * 0x9e3779b97f4a7c15) >> 32; hunted <= longestHunt; at++ {
		hunted++
		slot := &r.slots[at&mask]
		if *slot == 0 {
			*slot = int32(i + 1)
			return false, hunted
		}
		if list[*slot-1] == list[i] {
			return true, hunted
		}
	}
	return false, hunted
}
