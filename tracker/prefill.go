package tracker

import (
	"math"
	"math/bits"
	"time"
)

// prefills are the open prefills of one rank, oldest first. The rank is taken to work on the oldest
// since anchor, and by whatever time is left over on the next ones.
type prefills struct {
	bookings
	anchor   time.Time
	sum      wide // tokens booked
	expected wide // nanoseconds, of those that have a time
	timed    int  // those that have one
	untimed  int  // those that have none
}

func (p *prefills) push(b *booking, now time.Time) {
	if p.front == nil {
		p.anchor = now
	}
	p.bookings.push(b, inPrefills)
	p.sum = p.sum.plus(wide{lo: b.prefillTokens})
	if b.timed {
		p.timed++
		p.expected = p.expected.plus(wide{lo: uint64(b.prefillTime)})
	} else {
		p.untimed++
	}
}

// remove takes b out. If it was the front the next one begins now; else the time that b will not
// need counts as worked off.
func (p *prefills) remove(b *booking, now time.Time) {
	switch {
	case p.front == b:
		p.anchor = now
	case b.timed:
		if p.anchor = p.anchor.Add(b.prefillTime); p.anchor.After(now) {
			p.anchor = now
		}
	}
	p.bookings.remove(b, inPrefills)
	p.sum = p.sum.minus(wide{lo: b.prefillTokens})
	if b.timed {
		p.timed--
		p.expected = p.expected.minus(wide{lo: uint64(b.prefillTime)})
	} else {
		p.untimed--
	}
}

// tokens are those that are still to be computed at now. Progress is made at the pace that is
// expected of the front. It goes on into the next prefills only if all of them have a time.
func (p *prefills) tokens(now time.Time) uint64 {
	if p.timed == 0 || !p.front.timed {
		return p.sum.capped()
	}
	f := p.front
	done := f.prefillTokens
	if f.prefillTime > 0 {
		done = proportion(f.prefillTokens, max(now.Sub(p.anchor), 0), f.prefillTime)
	}
	if p.untimed > 0 {
		done = min(done, f.prefillTokens)
	}
	return p.sum.short(wide{lo: done})
}

// remaining is the time that the open prefills still need; false if one of them has no time.
func (p *prefills) remaining(now time.Time) (time.Duration, bool) {
	if p.untimed > 0 {
		return 0, false
	}
	if p.front == nil {
		return 0, true
	}
	left := p.expected.short(wide{lo: uint64(max(now.Sub(p.anchor), 0))})
	return time.Duration(min(left, math.MaxInt64)), true
}

// fallsTo is when tokens, now more than limit, will be no more than it, unless the books change;
// false is never.
func (p *prefills) fallsTo(limit uint64) (time.Time, bool) {
	f := p.front
	if !(wide{lo: limit}).less(p.sum) || p.timed == 0 || !f.timed {
		return time.Time{}, false
	}
	excess := p.sum.short(wide{lo: limit})
	if p.untimed > 0 && excess > f.prefillTokens || p.sum.hi > 0 {
		return time.Time{}, false
	}
	// The smallest t with floor(tokens x t / time) >= excess.
	hi, lo := bits.Mul64(excess, uint64(f.prefillTime))
	if hi >= f.prefillTokens {
		return time.Time{}, false
	}
	t, rest := bits.Div64(hi, lo, f.prefillTokens)
	if rest > 0 {
		t++
	}
	if t > maxExpected || f.prefillTime == 0 && excess > f.prefillTokens {
		return time.Time{}, false
	}
	return p.anchor.Add(time.Duration(t)), true
}

// proportion is floor(tokens x elapsed / total), as far as a uint64 goes.
func proportion(tokens uint64, elapsed, total time.Duration) uint64 {
	hi, lo := bits.Mul64(tokens, uint64(elapsed))
	if hi >= uint64(total) {
		return math.MaxUint64
	}
	q, _ := bits.Div64(hi, lo, uint64(total))
	return q
}

// maxExpected bounds times of the future, in nanoseconds: an hour is as good as never.
const maxExpected = uint64(time.Hour)
