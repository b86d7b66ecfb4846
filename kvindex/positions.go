package kvindex

import (
	"hash/maphash"
	"math/bits"
)

// multiplier is odd, and another one in each process, as in Go's maps: engines choose their hashes
// and clients their prompts, and nobody shall find many that meet in one place of a table.
var multiplier = maphash.String(maphash.MakeSeed(), "kvindex") | 1

// mix spreads a hash that somebody else chose over 64 bits, the upper ones best.
func mix(h uint64) uint64 {
	h *= multiplier
	return (h ^ h>>32) * 0x9e3779b97f4a7c15
}

// home maps a spread hash to one of n slots. It never falls as h rises.
func home(h uint64, n int) int {
	hi, _ := bits.Mul64(h, uint64(n))
	return int(hi)
}

// positions finds entries of a slice by hash: a table of four-byte slots, with linear probing, so
// that an index costs 5 to 8 bytes an entry. Bits that a position does not need hold some of the
// hash, which keeps a search from looking at entries that are not meant.
type positions struct {
	slots   []uint32 // 0 is empty, 1 deleted, else position + 2, and above posBits bits of the hash
	posBits int
	live    int // slots that hold a position
	used    int // the same and the deleted ones; at most four fifths of slots
}

const deleted = 1

// find returns the slot of the position that is meant by hash h and same, or -1.
func (p *positions) find(h uint64, same func(pos int) bool) int {
	if p.live == 0 {
		return -1
	}
	mask := uint32(1)<<p.posBits - 1
	tag := uint32(h) &^ mask
	for i := home(h, len(p.slots)); ; {
		v := p.slots[i]
		if v == 0 {
			return -1
		}
		if v != deleted && v&^mask == tag && same(int(v&mask)-2) {
			return i
		}
		if i++; i == len(p.slots) {
			i = 0
		}
	}
}

// touch looks at where the search for a hash begins.
func (p *positions) touch(h uint64) uint32 {
	if len(p.slots) == 0 {
		return 0
	}
	return p.slots[home(h, len(p.slots))]
}

// at returns the position in a slot.
func (p *positions) at(slot int) int { return int(p.slots[slot]&(1<<p.posBits-1)) - 2 }

// set puts another position of the same hash into a slot.
func (p *positions) set(slot, pos int) {
	mask := uint32(1)<<p.posBits - 1
	p.slots[slot] = p.slots[slot]&^mask | uint32(pos+2)
}

// add adds a position that is not there. There must be room.
func (p *positions) add(h uint64, pos int) {
	i := home(h, len(p.slots))
	for p.slots[i] > deleted {
		if i++; i == len(p.slots) {
			i = 0
		}
	}
	if p.slots[i] == 0 {
		p.used++
	}
	p.live++
	mask := uint32(1)<<p.posBits - 1
	p.slots[i] = uint32(h)&^mask | uint32(pos+2)
}

// remove empties a slot, and the deleted ones before it if no search has to go on behind them.
func (p *positions) remove(slot int) {
	p.live--
	next := slot + 1
	if next == len(p.slots) {
		next = 0
	}
	if p.slots[next] != 0 {
		p.slots[slot] = deleted
		return
	}
	for {
		p.slots[slot] = 0
		p.used--
		if slot--; slot < 0 {
			slot = len(p.slots) - 1
		}
		if p.slots[slot] != deleted {
			return
		}
	}
}

// room tells whether a further position, up to most, can be added, and the table is not far larger than
// for n of them. If not, resize it and add all again.
func (p *positions) room(n, most int) bool {
	size := len(p.slots)
	return (p.used+1)*5 <= size*4 && most+2 < 1<<p.posBits && (n*8 >= size || size <= 16)
}

// resize empties the table, and makes it of a size for n positions up to most, and some more.
func (p *positions) resize(n, most int) {
	size := max(16, 2*(n+1))
	*p = positions{slots: make([]uint32, size), posBits: bits.Len(uint(max(size, 2*(most+1))))}
}
