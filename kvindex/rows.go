package kvindex

import (
	"math/bits"
	"slices"
	"sync/atomic"
)

// holders says which ranks hold one block, in a word. Ranks are small numbers, their seats.
//
//	bits 0-1    how many, if 1 to 3; their seats, in order, are at bits 2, 22 and 42
//	            0 if the seats are in a row of the shard's memory (or, all 0, if nobody holds it):
//	bit 2       1
//	bit 3       1 if the row is a set of bits, else it lists seats, two a word, in order
//	bits 4-7    the row has 2 to that many words
//	bits 8-31   how many seats
//	bits 32-63  number of the row, among those of its size
type holders uint64

const (
	seatBits = 20
	maxSeats = 1 << seatBits
	seatMask = maxSeats - 1
	inWord   = 3  // seats that a word has room for
	rowSizes = 15 // rows have 1 to 1<<14 words, which are bits for maxSeats
)

func oneHolder(seat uint32) holders { return holders(1 | uint64(seat)<<2) }

func manyHolders(dense bool, size int, count int, row uint32) holders {
	h := holders(1<<2 | uint64(size)<<4 | uint64(count)<<8 | uint64(row)<<32)
	if dense {
		h |= 1 << 3
	}
	return h
}

func (h holders) inline() int       { return int(h & 3) } // 0 if there is a row
func (h holders) dense() bool       { return h&(1<<3) != 0 }
func (h holders) size() int         { return int(h>>4) & 15 }
func (h holders) count() int        { return int(h>>8) & (1<<24 - 1) } // of those in a row
func (h holders) row() uint32       { return uint32(h >> 32) }
func (h holders) seat(i int) uint32 { return uint32(h>>(2+seatBits*i)) & seatMask } // of those in the word

// layout decides how count of so many known seats are kept in a row: as a list while that is far
// shorter, else as bits, which are quicker to intersect.
func layout(count, seats int) (dense bool, size int) {
	list, set := bits.Len(uint(count-1)/2), bits.Len(uint(seats-1)/64)
	if set <= list+2 {
		return true, set
	}
	return false, list
}

// rows is memory for sets of more than three holders, in one shard. Only the shard's writer
// changes it; readers look at it between two readings of the shard's version.
type rows struct {
	sizes [rowSizes]rowsOfSize
}

type rowsOfSize struct {
	words atomic.Pointer[[]atomic.Uint64]
	next  uint32   // rows from here on were never used
	free  []uint32 // rows that were, and are not
}

// words returns a row, or nil if a reader was late and there is no such row any more.
func (r *rows) words(size int, row uint32) []atomic.Uint64 {
	all := r.sizes[size].words.Load()
	from, to := uint64(row)<<size, (uint64(row)+1)<<size
	if all == nil || to > uint64(len(*all)) {
		return nil
	}
	return (*all)[from:to]
}

// copied returns the row of h in dst, which grows as needed. If h has none, dst stays.
func (r *rows) copied(dst []uint64, h holders) []uint64 {
	if h == 0 || h.inline() > 0 {
		return dst
	}
	words := r.words(h.size(), h.row())
	dst = slices.Grow(dst[:0], len(words))[:len(words)]
	for i := range words {
		dst[i] = words[i].Load()
	}
	return dst
}

// take returns a row that nobody uses. What is in it is left from before.
func (r *rows) take(size int) uint32 {
	s := &r.sizes[size]
	if n := len(s.free); n > 0 {
		row := s.free[n-1]
		s.free = s.free[:n-1]
		return row
	}
	row := s.next
	s.next++
	was := s.words.Load()
	if was == nil || uint64(s.next)<<size > uint64(len(*was)) {
		grown := make([]atomic.Uint64, (uint64(s.next)+uint64(s.next)/2+3)<<size)
		if was != nil {
			for i := range *was {
				grown[i].Store((*was)[i].Load())
			}
		}
		s.words.Store(&grown)
	}
	return row
}

func (r *rows) give(size int, row uint32) {
	s := &r.sizes[size]
	if s.free = append(s.free, row); len(s.free) == int(s.next) {
		s.words.Store(nil)
		s.next, s.free = 0, nil
	}
}

// seats writes the seats of h to dst, in order.
func (r *rows) seats(dst []uint32, h holders) []uint32 {
	for i := range h.inline() {
		dst = append(dst, h.seat(i))
	}
	if h == 0 || h.inline() > 0 {
		return dst
	}
	words := r.words(h.size(), h.row())
	if h.dense() {
		for i := range words {
			for w := words[i].Load(); w != 0; w &= w - 1 {
				dst = append(dst, uint32(i*64+bits.TrailingZeros64(w)))
			}
		}
		return dst
	}
	for i := range h.count() {
		dst = append(dst, uint32(words[i/2].Load()>>(32*(i%2))))
	}
	return dst
}

// store makes holders of seats, which are in order. About known seats there are in all.
func (r *rows) store(seats []uint32, known int) holders {
	if len(seats) <= inWord {
		h := holders(len(seats))
		for i, s := range seats {
			h |= holders(s) << (2 + seatBits*i)
		}
		return h
	}
	last := int(seats[len(seats)-1]) // may have come after the caller asked how many there are
	dense, size := layout(len(seats), max(known, last+1))
	row := r.take(size)
	words := r.words(size, row)
	for i := range words {
		words[i].Store(0)
	}
	for i, s := range seats {
		at, bit := i/2, uint64(s)<<(32*(i%2))
		if dense {
			at, bit = int(s/64), 1<<(s%64)
		}
		words[at].Store(words[at].Load() | bit)
	}
	return manyHolders(dense, size, len(seats), row)
}
