package tracker

import (
	"math"
	"math/bits"
)

// wide is a sum that does not overflow: callers may book any uint64, as often as memory lasts, and
// what they give back must restore the exact value.
type wide struct{ hi, lo uint64 }

func product(a, b uint64) wide {
	hi, lo := bits.Mul64(a, b)
	return wide{hi, lo}
}

func (w wide) plus(v wide) wide {
	lo, carry := bits.Add64(w.lo, v.lo, 0)
	return wide{w.hi + v.hi + carry, lo}
}

// minus is w - v; v is not the larger one.
func (w wide) minus(v wide) wide {
	lo, borrow := bits.Sub64(w.lo, v.lo, 0)
	return wide{w.hi - v.hi - borrow, lo}
}

func (w wide) less(v wide) bool {
	return w.hi < v.hi || w.hi == v.hi && w.lo < v.lo
}

// over is w / d, rounded down.
func (w wide) over(d uint64) wide {
	hi, rest := w.hi/d, w.hi%d
	lo, _ := bits.Div64(rest, w.lo, d)
	return wide{hi, lo}
}

// capped is w as far as a uint64 goes.
func (w wide) capped() uint64 {
	if w.hi > 0 {
		return math.MaxUint64
	}
	return w.lo
}

// short is max(w - v, 0) as far as a uint64 goes.
func (w wide) short(v wide) uint64 {
	if w.less(v) {
		return 0
	}
	return w.minus(v).capped()
}

// saturated is a + b as far as a uint64 goes.
func saturated(a, b uint64) uint64 {
	sum, carry := bits.Add64(a, b, 0)
	if carry > 0 {
		return math.MaxUint64
	}
	return sum
}
