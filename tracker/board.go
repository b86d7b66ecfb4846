package tracker

import (
	"cmp"
	"slices"
	"time"

	"spillway/worker"
)

// Board is the loads of all ranks side by side, for one who decides over them again and again: a
// Read of it copies an array and looks at no rank, and what few ranks have is told of those alone.
// The zero value is ready. It is not safe for concurrent use, and belongs to one tracker.
type Board struct {
	Ranks []worker.Rank // all that are known, by worker, then DP; read-only
	Loads []Load        // of each
	Held  []uint32      // how many leading blocks of the prompt the reservations of each hold

	held  []int32 // where Held is not 0
	moves uint64  // of the tracker, when Ranks was made
}

// Read brings b up to date, and Held to the prompt with these sequence hashes. It tells whether
// Ranks is another one than before. It holds the tracker for about a nanosecond for each rank, and
// longer only when ranks have come or gone, and while prefills are modelled to fall.
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
		b.Loads, b.Held = make([]Load, len(b.Ranks)), make([]uint32, len(b.Ranks))
	}
	copy(b.Loads, t.seating.loads)
	if t.falling > 0 {
		for seat, r := range t.seating.books {
			if r.falls {
				b.Loads[seat].PrefillTokens = r.prefills.tokens(now)
			}
		}
	}
	var room [16]step
	for _, s := range t.prompts.match(hashes, room[:0]) { // the deeper ones come last
		for i := range s.holders {
			seat := t.seating.bySlot[s.holders[i].slot]
			if b.Held[seat] == 0 {
				b.held = append(b.held, seat)
			}
			b.Held[seat] = uint32(s.depth)
		}
	}
	return moved
}

// seating is the ranks in the order of a Board. It is made when a Board is read after ranks have
// come or gone; until then, and where none is read, it is not kept up.
type seating struct {
	valid  bool
	ranks  []worker.Rank // never changed, since boards have it
	books  []*rankBook
	loads  []Load  // as they are without time
	bySlot []int32 // the seat
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
	s.ranks, s.loads = make([]worker.Rank, len(s.books)), make([]Load, len(s.books))
	for seat, r := range s.books {
		r.seat = int32(seat)
		s.bySlot[r.slot] = r.seat
		s.ranks[seat], s.loads[seat] = r.Rank, r.standing()
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
	if t.seating.valid {
		t.seating.loads[r.seat] = r.standing()
	}
}

// standing is the load as if no time passed.
func (r *rankBook) standing() Load {
	return Load{PrefillTokens: r.prefills.sum.capped(), DecodeBlocks: r.decodeBlocks(), Requests: r.requests}
}
