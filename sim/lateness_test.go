package sim_test

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"spillway/sim"
)

// A quantile is never below the exact one, and at most an eighth (or 1 µs) above it.
func TestLatenessQuantiles(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		delays := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) time.Duration {
			return time.Duration(rapid.Uint64Range(0, 1<<rapid.IntRange(1, 45).Draw(t, "bits")).Draw(t, "ns"))
		}), 1, 100).Draw(t, "delays")
		var l, half sim.Lateness
		for i, d := range delays {
			if i%2 == 0 {
				l.Add(d)
			} else {
				half.Add(d)
			}
		}
		l.Merge(&half)
		slices.Sort(delays)
		for _, q := range []float64{0, 0.5, 0.99, 1} {
			want := delays[min(int(q*float64(len(delays))), len(delays)-1)]
			got := l.Quantile(q)
			if got < want || got > max(want+want/8, want+time.Microsecond) {
				t.Errorf("quantile(%v) of %v = %v, want about %v", q, delays, got, want)
			}
		}
	})
}

func TestLatenessOfNothing(t *testing.T) {
	var l sim.Lateness
	if got := l.Quantile(0.99); got != 0 {
		t.Errorf("quantile of nothing = %v, want 0", got)
	}
	l.Add(-time.Second) // clocks may disagree by a little
	if got := l.Quantile(0.99); got != 0 {
		t.Errorf("quantile of -1s = %v, want 0", got)
	}
}
