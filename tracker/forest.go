package tracker

import (
	"slices"
)

// forest holds the prompts of all live reservations as one prefix tree over sequence hashes, with
// paths that do not branch in one node. A node knows which ranks hold its blocks, so a prefix that
// many ranks share is stored once, counted once on each, and found for all of them in one walk.
// Two lists share blocks as far as they are equal from the start; hashes are compared one by one,
// so lists that are not properly chained are only counted apart.
type forest struct {
	root  node
	spare []*node // emptied ones, for the next prompts
}

// Bounds of what is kept for reuse: most prompts begin and end in a node of their own, which would
// be garbage otherwise.
const (
	maxSpareNodes = 16
	maxSpareRun   = 1024 // blocks
)

// node is a run of blocks that whoever holds one of them holds together.
type node struct {
	run     []uint64 // sequence hashes, at least one except in the root
	parent  *node    // nil for the root
	kids    children
	holders []holder  // by slot, at least one except in the root; a child's are among its parent's
	single  [1]holder // room for holders while there is one
}

// holder is a rank that holds a run.
type holder struct {
	slot uint32
	refs uint32 // its reservations whose prompt goes through the run, at least 1
	less uint32 // what a block weighs less than whole, in units of its weight
}

// whole is the weight of a block, in the units in which weights are added up: they are exact for
// fractions of nine digits, and sums of integers come back to exactly zero.
const whole = 1_000_000_000

// add enters a prompt of at least one block for a rank. It returns the node of the last block and
// how many blocks the rank had not held before.
func (f *forest) add(hashes []uint64, slot uint32) (last *node, fresh uint64) {
	n := &f.root
	for rest := hashes; len(rest) > 0; {
		next := n.kids.find(rest[0])
		if next == nil {
			leaf := f.leaf(rest, n)
			leaf.hold(slot)
			n.kids.put(leaf)
			return leaf, fresh + uint64(len(rest))
		}
		k := common(next.run, rest)
		if k < len(next.run) {
			next = next.split(k)
		}
		if next.hold(slot) {
			fresh += uint64(k)
		}
		n, rest = next, rest[k:]
	}
	return n, fresh
}

// leaf is a node without holders, with a copy of run.
func (f *forest) leaf(run []uint64, parent *node) *node {
	var n *node
	if last := len(f.spare) - 1; last >= 0 {
		n, f.spare = f.spare[last], f.spare[:last]
	} else {
		n = &node{}
	}
	n.run, n.parent = append(n.run[:0], run...), parent
	n.holders = n.single[:0]
	return n
}

// recycle keeps a node to which nothing leads any more.
func (f *forest) recycle(n *node) {
	if len(f.spare) < maxSpareNodes && cap(n.run) <= maxSpareRun {
		*n = node{run: n.run[:0]}
		f.spare = append(f.spare, n)
	}
}

// remove takes back one add of a rank that ended at last. It returns how many blocks the rank no
// longer holds, and what they weighed less than whole.
func (f *forest) remove(last *node, slot uint32) (gone, less uint64) {
	for n := last; n.parent != nil; {
		parent := n.parent
		i, _ := n.search(slot)
		if h := &n.holders[i]; h.refs > 1 {
			h.refs--
		} else {
			gone += uint64(len(n.run))
			less += uint64(len(n.run)) * uint64(h.less)
			n.holders = slices.Delete(n.holders, i, i+1)
			if len(n.holders) == 0 {
				parent.kids.drop(n)
				f.recycle(n)
			}
		}
		n = parent
	}
	return gone, less
}

// decay sets the weight of the blocks at the end of a prompt that only this reservation of the
// rank holds. It returns what they weighed less than whole before, and weigh less now.
func (f *forest) decay(last *node, slot, less uint32) (before, after uint64) {
	for n := last; n.parent != nil; n = n.parent {
		i, _ := n.search(slot)
		h := &n.holders[i]
		if h.refs > 1 {
			break
		}
		before += uint64(len(n.run)) * uint64(h.less)
		after += uint64(len(n.run)) * uint64(less)
		h.less = less
	}
	return before, after
}

// path is the prompt that ends at last.
func (n *node) path() []uint64 {
	size := 0
	for m := n; m != nil; m = m.parent {
		size += len(m.run)
	}
	hashes := make([]uint64, size)
	for m := n; m != nil; m = m.parent {
		size -= len(m.run)
		copy(hashes[size:], m.run)
	}
	return hashes
}

// step is a node that a query runs into: its holders have at least the first depth blocks.
type step struct {
	*node
	depth uint64
}

// match appends the nodes along a query, without those whose holders all hold the next one too.
func (f *forest) match(query []uint64, steps []step) []step {
	n, depth := &f.root, 0
	for depth < len(query) {
		if n = n.kids.find(query[depth]); n == nil {
			break
		}
		k := common(n.run, query[depth:])
		depth += k
		if last := len(steps) - 1; last >= 0 && len(steps[last].holders) == len(n.holders) {
			steps = steps[:last] // a subset of the same size is the same set
		}
		steps = append(steps, step{n, uint64(depth)})
		if k < len(n.run) {
			break
		}
	}
	return steps
}

// hold counts one more prompt of a rank through n. It tells whether it is the rank's first.
func (n *node) hold(slot uint32) bool {
	i, ok := n.search(slot)
	if ok {
		n.holders[i].refs++
		return false
	}
	n.holders = slices.Insert(n.holders, i, holder{slot: slot, refs: 1})
	return true
}

// search is the place of a rank among the holders.
func (n *node) search(slot uint32) (int, bool) {
	low, high := 0, len(n.holders)
	for low < high {
		mid := int(uint(low+high) / 2)
		if n.holders[mid].slot < slot {
			low = mid + 1
		} else {
			high = mid
		}
	}
	return low, low < len(n.holders) && n.holders[low].slot == slot
}

// split cuts the run before block k and returns a new node with the first part. n keeps the rest:
// prompts that end at n end where they did.
func (n *node) split(k int) *node {
	front := &node{run: slices.Clone(n.run[:k]), parent: n.parent}
	if len(n.holders) == 1 {
		front.single[0] = n.holders[0]
		front.holders = front.single[:]
	} else {
		front.holders = slices.Clone(n.holders)
	}
	n.parent.kids.put(front) // in the place of n: both begin with the same hash
	n.run, n.parent = slices.Clone(n.run[k:]), front
	front.kids.put(n)
	return front
}

// common is the length of the prefix that both have.
func common(a, b []uint64) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

// children are the nodes that continue a run, by their first hash. Most runs have one or none.
type children struct {
	only *node // if there is no map
	many shrinking[uint64, *node]
}

func (c *children) find(hash uint64) *node {
	if c.many.m != nil {
		return c.many.m[hash]
	}
	if c.only != nil && c.only.run[0] == hash {
		return c.only
	}
	return nil
}

// put adds n, in the place of the one that begins with the same hash if there is one.
func (c *children) put(n *node) {
	switch {
	case c.many.m != nil:
		c.many.put(n.run[0], n)
	case c.only == nil || c.only.run[0] == n.run[0]:
		c.only = n
	default:
		c.many.put(c.only.run[0], c.only)
		c.many.put(n.run[0], n)
		c.only = nil
	}
}

func (c *children) drop(n *node) {
	if c.many.m == nil {
		c.only = nil
		return
	}
	c.many.drop(n.run[0])
	if len(c.many.m) == 0 {
		c.many = shrinking[uint64, *node]{}
	}
}

// shrinking is a map that gives back memory after most of it has gone, which Go's maps do not.
type shrinking[K comparable, V any] struct {
	m    map[K]V
	peak int // most entries since m was made
}

const worthShrinking = 1024 // entries

func (s *shrinking[K, V]) put(k K, v V) {
	if s.m == nil {
		s.m = map[K]V{}
	}
	s.m[k] = v
	s.peak = max(s.peak, len(s.m))
}

func (s *shrinking[K, V]) drop(k K) {
	delete(s.m, k)
	if s.peak < worthShrinking || len(s.m) > s.peak/8 {
		return
	}
	smaller := make(map[K]V, len(s.m))
	for k, v := range s.m {
		smaller[k] = v
	}
	s.m, s.peak = smaller, len(smaller)
}
