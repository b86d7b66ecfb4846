package proxy

import (
	"math"
	"sync/atomic"
)

// mean is an exponentially weighted mean of positive numbers: half of it is from the last 20.
// The zero value is unknown. It is safe for concurrent use.
type mean struct {
	bits atomic.Uint64 // of a float64; 0 before any measurement
}

// weight20 is what one number counts for, so that 20 of them make half of the mean.
var weight20 = 1 - math.Exp2(-1.0/20)

func (m *mean) observe(v float64) {
	for {
		old := m.bits.Load()
		next := v
		if old != 0 {
			next = math.Float64frombits(old)
			next += weight20 * (v - next)
		}
		if m.bits.CompareAndSwap(old, math.Float64bits(next)) {
			return
		}
	}
}

// or is the mean, or unknown before any measurement.
func (m *mean) or(unknown float64) float64 {
	if b := m.bits.Load(); b != 0 {
		return math.Float64frombits(b)
	}
	return unknown
}
