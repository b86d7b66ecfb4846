package router

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestDraw is rows 46 to 50 of the specification's examples.
func TestDraw(t *testing.T) {
	for _, tt := range []struct {
		row   string
		costs []float64
		temp  float64
		want  []float64
		u     map[float64]int
	}{
		{"45", []float64{5, 5, 5}, .7, []float64{1. / 3, 1. / 3, 1. / 3}, map[float64]int{0: 0, .34: 1, .99: 2}},
		{"46", []float64{18, 10, 11}, 1, []float64{0.163475, 0.444370, 0.392155}, map[float64]int{.16: 0, .5: 1, .61: 2}},
		{"47", []float64{18, 10, 11}, .7, []float64{0.115432, 0.481669, 0.402899}, nil},
		{"48", []float64{18, 10, 11}, .1, []float64{0.000035, 0.777272, 0.222692}, nil},
		{"49", []float64{0, 100}, .5, []float64{0.880797, 0.119203}, nil},
		{"49", []float64{0, 1}, .5, []float64{0.880797, 0.119203}, nil},
		{"50", []float64{-math.MaxFloat64, math.MaxFloat64}, 1, []float64{0.731059, 0.268941}, map[float64]int{.6: 0}},
		{"one without room", []float64{18, math.NaN(), 10, 11}, 1, []float64{0.163475, 0, 0.444370, 0.392155}, map[float64]int{.16: 0, .5: 2, .61: 3}},
		{"the first and the last without room", []float64{math.NaN(), 18, 10, 11, math.NaN()}, 1, []float64{0, 0.163475, 0.444370, 0.392155, 0}, map[float64]int{0: 1, .999999999: 3}},
		{"next to no temperature", []float64{2, 1, 2}, 1e-320, []float64{0, 1, 0}, nil},
		{"far too high", []float64{2, math.Inf(1)}, 1, []float64{1, 0}, nil},
		{"all too high", []float64{math.Inf(1), math.Inf(1)}, 1, []float64{.5, .5}, nil},
	} {
		t.Run(fmt.Sprintf("%s/T=%v", tt.row, tt.temp), func(t *testing.T) {
			shares := make([]float64, len(tt.costs))
			got := make([]float64, len(tt.costs))
			const n = 2_000_000
			for i := range n {
				got[draw(tt.costs, shares, tt.temp, float64(i)/n)] += 1. / n
			}
			for i := range got {
				if math.Abs(got[i]-tt.want[i]) > 2e-6 {
					t.Errorf("shares = %v, want %v", got, tt.want)
					break
				}
			}
			for u, want := range tt.u {
				if got := draw(tt.costs, shares, tt.temp, u); got != want {
					t.Errorf("draw(u=%v) = %d, want %d", u, got, want)
				}
			}
		})
	}
	if got := draw([]float64{math.NaN()}, make([]float64, 1), 1, .5); got != -1 {
		t.Errorf("draw from nobody = %d, want -1", got)
	}
}

// TestDrawAgrees compares draw with the formula as it is written.
func TestDrawAgrees(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		costs := rapid.SliceOfN(rapid.Float64Range(0, 1000), 1, 20).Draw(t, "costs")
		temp, u := rapid.Float64Range(.05, 10).Draw(t, "T"), rapid.Float64Range(0, .999999).Draw(t, "u")
		lo, hi := slices.Min(costs), slices.Max(costs)
		if lo == hi {
			return
		}
		total := 0.0
		for _, c := range costs {
			total += math.Exp(-(c - lo) / ((hi - lo) * temp))
		}
		want, sum, margin := len(costs)-1, 0.0, 1.0
		for i, c := range costs {
			sum += math.Exp(-(c-lo)/((hi-lo)*temp)) / total
			margin = min(margin, math.Abs(sum-u))
			if sum >= u {
				want = i
				break
			}
		}
		if got := draw(costs, make([]float64, len(costs)), temp, u); got != want && margin > 1e-12 {
			t.Fatalf("draw(%v, T=%v, u=%v) = %d, want %d", costs, temp, u, got, want)
		}
	})
}

// TestLowest is rows 44 and 45.
func TestLowest(t *testing.T) {
	if m := lowest([]float64{18, 10, 11}); m.first != 1 || m.ties != 1 {
		t.Errorf("lowest(18, 10, 11) = %+v, want 1 of 1", m)
	}
	if m := lowest([]float64{math.NaN(), math.Inf(1), math.Inf(1)}); m.first != 1 || m.ties != 2 {
		t.Errorf("lowest(NaN, Inf, Inf) = %+v, want 1 of 2", m)
	}
	if m := lowest([]float64{math.NaN()}); m.first != -1 {
		t.Errorf("lowest(NaN) = %+v, want -1", m)
	}
	rng, counts := rand.New(rand.NewPCG(1, 1)), [3]int{}
	for range 30000 {
		costs := []float64{5, 5, 7, 5}
		m := lowest(costs)
		switch nth(costs, m.cost, rng.IntN(m.ties)) {
		case 0:
			counts[0]++
		case 1:
			counts[1]++
		case 3:
			counts[2]++
		default:
			t.Fatal("the dearest was chosen")
		}
	}
	for _, n := range counts {
		if n < 9600 || n > 10400 {
			t.Errorf("choices among three equals = %v, want a third each", counts)
		}
	}
}
