package router

import (
	"cmp"
	"slices"

	"spillway/worker"
)

// pickLocked returns the index in fit, which is not empty, of the slot to try.
func (p *Partition) pickLocked(fit []int32) int {
	switch p.mode {
	case Random:
		return p.rng.IntN(len(fit))
	case PowerOfTwo:
		i := p.rng.IntN(len(fit))
		if len(fit) == 1 {
			return i
		}
		j := (i + 1 + p.rng.IntN(len(fit)-1)) % len(fit) // another one; which comes first is random
		if p.requests(fit[j]) < p.requests(fit[i]) {
			return j
		}
		return i
	case LeastLoaded:
		best, least, ties := 0, int64(0), 0
		for i, s := range fit {
			switch n := p.requests(s); {
			case ties == 0 || n < least:
				best, least, ties = i, n, 1
			case n == least:
				if ties++; p.rng.IntN(ties) == 0 {
					best = i
				}
			}
		}
		return best
	}
	// Round-robin goes by ID, not by a count: the set of free workers changes between requests.
	i, found := slices.BinarySearchFunc(fit, p.last, func(s int32, last worker.ID) int {
		return cmp.Compare(p.slots[s].id, last)
	})
	if found {
		i++
	}
	return i % len(fit)
}

func (p *Partition) requests(slot int32) int64 { return p.slots[slot].book.Requests() }
