package tracker

import (
	"cmp"
	"math"
	"slices"
	"time"

	"spillway/worker"
)

// Board is the loads of all ranks side by side, for one who decides over them again and again: a
// Read of it copies an array and looks at no rank, and what few ranks have is told of those alone.
// The zero value is ready. It is not safe for concurrent use, and belongs to one tracker.
type Board struct {
	Ranks []worker.Rank // all that are known, by worker, then DP; read-only
	Loads []Figures     // of each
	Held  []uint32      // how many leading blocks of the prompt the reservations of each hold

	held  []int32 // where Held is not 0
	steps []step  // scratch
	moves uint64  // of the tracker, when Ranks was made
}

// Figures are a Load in the form in which costs are computed. What is beyond 2^53 is rounded.
type Figures struct{ PrefillTokens, DecodeBlocks, Requests float64 }

// Tokens are PrefillTokens as far as a uint64 goes.
func (f *Figures) Tokens() uint64 { return count(f.PrefillTokens) }

// Blocks are DecodeBlocks as far as a uint64 goes.
func (f *Figures) Blocks() uint64 { return count(f.DecodeBlocks) }

func count(x float64) uint64 {
	if x >= 1<<64 {
		return math.MaxUint64
	}
	return uint64(x)
}

// Read brings b up to date, and Held to the prompt with these sequence hashes. It tells whether
// Ranks is another one than before. It looks only at ranks whose load has changed since b was read
// last, if no other Board has been meanwhile, and at those that hold blocks of the prompt; at all
// only when ranks have come or gone, and while prefills are modelled to fall.
func (t *Tracker) Read(hashes []uint64, now time.Time, b *Board) (moved bool) {
	for _, seat := range b.held {
		b.Held[seat] = 0
	}
	b.held = b.held[:0]
	t.lock()
	defer t.mu.Unlock()
	t.seatLocked()
	if moved = b.moves != t.moves; moved {
		b.moves, b.Ranks = t.moves, t.seating.ranks
		b.Loads, b.Held = make([]Figures, len(b.Ranks)), make([]uint32, len(b.Ranks))
	}
	s := &t.seating
	if moved || s.reader != b || t.falling > 0 {
		for seat, r := range s.books {
			b.Loads[seat] = r.load(now).figures()
		}
	} else {
		for _, seat := range s.changed {
			b.Loads[seat] = s.books[seat].load(now).figures()
		}
	}
	for _, seat := range s.changed {
		s.books[seat].changed = false
	}
	s.reader, s.changed = b, s.changed[:0]
	b.holdLocked(t, hashes)
	return moved
}

// holdLocked fills in Held. Who holds a step holds those before it, so each list of holders but the
// deepest is the next one and some more, in the same order. Only those are looked at: where the
// two lists differ next is found by bisection.
func (b *Board) holdLocked(t *Tracker, hashes []uint64) {
	b.steps = t.prompts.match(hashes, b.steps[:0])
	var deeper []holder
	for k := len(b.steps) - 1; k >= 0; k-- {
		all := b.steps[k].holders
		more := 0 // of all[:i], not among the deeper ones
		for i := 0; more < len(all)-len(deeper); i++ {
			for end := more + len(deeper); i < end; {
				if mid := int(uint(i+end) / 2); all[mid].slot == deeper[mid-more].slot {
					i = mid + 1
				} else {
					end = mid
				}
			}
			seat := t.seating.bySlot[all[i].slot]
			b.Held[seat] = uint32(b.steps[k].depth)
			b.held = append(b.held, seat)
			more++
		}
		deeper = all
	}
	clear(b.steps) // they would keep nodes in memory
}

func (l Load) figures() Figures {
	return Figures{float64(l.PrefillTokens), float64(l.DecodeBlocks), float64(l.Requests)}
}

// seating is the ranks in the order of a Board. It is made when a Board is read after ranks have
// come or gone; until then, and where none is read, it is not kept up.
type seating struct {
	valid   bool
	ranks   []worker.Rank // never changed, since boards have it
	books   []*rankBook
	bySlot  []int32 // the seat
	changed []int32 // seats of those whose load has, since reader was brought up to date
	reader  *Board  // the last one, or nil
}

func (t *Tracker) seatLocked() {
	if t.seating.valid {
		return
	}
	s := seating{valid: true, bySlot: make([]int32, len(t.slots))}
	for _, r := range t.slots {
		if r != nil {
			s.books = append(s.books, r)
		}
	}
	slices.SortFunc(s.books, func(a, b *rankBook) int {
		return cmp.Or(cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.DP, b.DP))
	})
	s.ranks = make([]worker.Rank, len(s.books))
	for seat, r := range s.books {
		r.seat, r.changed = int32(seat), false
		s.bySlot[r.slot] = r.seat
		s.ranks[seat] = r.Rank
	}
	t.seating = s
}

// settleLocked notes what has become of the load of r. Every change of one ends with it.
func (t *Tracker) settleLocked(r *rankBook) {
	if falls := r.prefills.timed > 0; falls != r.falls {
		if r.falls = falls; falls {
			t.falling++
		} else {
			t.falling--
		}
	}
	if t.seating.valid && !r.changed {
		r.changed = true
		t.seating.changed = append(t.seating.changed, r.seat)
	}
}
