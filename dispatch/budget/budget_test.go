package budget_test

import (
	"math"
	"math/big"
	"testing"

	"pgregory.net/rapid"

	"spillway/dispatch/budget"
)

var nan = math.NaN()

// TestExamples has the worked examples of the specification, by their numbers.
func TestExamples(t *testing.T) {
	of := func(f float64) float64 { return 1 - f } // in float64, as a metrics store computes it
	strict := budget.Rule{Baseline: 0.05, Rounding: budget.Floor}
	tokens, bytes := budget.Rule{Baseline: 0.1, Unit: budget.Tokens}, budget.Rule{Baseline: 0.1, Unit: budget.Bytes}
	reserve := func(b float64) budget.Rule { return budget.Rule{Baseline: b} }
	const kib = 1024
	for _, tt := range []struct {
		row      int
		rule     budget.Rule
		d, sys   float64
		sent     int64
		overload bool
		state    budget.State
		n        float64
		allowed  int64
	}{
		{1, reserve(0.1), of(0.3), 50, 0, false, budget.Open, 30, 30},
		{2, reserve(0), of(0), 50, 0, false, budget.Open, 50, 50},
		{3, reserve(0.05), of(0), 100, 0, false, budget.Open, 95, 95},
		{4, reserve(0.05), of(0.95), 100, 0, false, budget.Baseline, 0, 0},
		{5, reserve(0.1), of(0.9), 100, 0, false, budget.Baseline, 0, 0},
		{6, reserve(0.05), of(0.9), 100, 0, false, budget.Open, 5, 5},
		{7, reserve(0.1), of(0.8), 50, 0, false, budget.Open, 5, 5},
		{8, reserve(0.05), of(0.15), 5, 0, false, budget.Open, 4, 4},
		{9, reserve(0.5), of(0.4), 10, 0, false, budget.Open, 1, 1},
		{10, reserve(0.05), of(0.94), 100, 0, false, budget.Open, 1, 1},
		{11, reserve(0.05), of(0.949), 100, 0, false, budget.Open, 0.1, 1},
		{12, strict, of(0.949), 100, 0, false, budget.Open, 0.1, 0},
		{13, reserve(0.05), of(0.949), 100, 1, false, budget.Open, 0.1, 0},
		{14, reserve(0.05), 0.05, 100, 0, false, budget.Baseline, 0, 0},
		{15, reserve(0.05), 0.0500001, 100, 0, false, budget.Open, 1e-5, 1},
		{16, reserve(0.05), of(1.2), 100, 0, false, budget.Baseline, 0, 0},
		{17, reserve(0.05), of(-0.1), 100, 0, false, budget.Open, 95, 95},
		{18, reserve(0.2), 1.5, 10, 0, false, budget.Open, 8, 8},
		{19, reserve(1), 1, 100, 0, false, budget.Baseline, 0, 0},
		{20, reserve(0), 0.5, 1, 0, false, budget.Open, 0.5, 1},
		{21, reserve(0.1), of(0.7), 96, 0, false, budget.Open, 19.2, 19},
		{22, reserve(0.05), nan, 100, 0, false, budget.Unreadable, 0, 0},
		{23, reserve(0.05), math.Inf(-1), 100, 0, false, budget.Unreadable, 0, 0},
		{24, reserve(0.05), nan, nan, 0, false, budget.Unreadable, 0, 0}, // missing is NaN here
		{25, reserve(0.05), 0.7, 0, 0, false, budget.NoCapacity, 0, 0},
		{26, reserve(0.1), of(0.3), 50, 30, false, budget.Open, 30, 0},
		{27, reserve(0.05), of(0.9), 100, 3, false, budget.Open, 5, 2},
		{28, reserve(0.1), of(0.3), 50, 0, true, budget.Overload, 30, 0},
		{29, tokens, of(0.2), 1e6, 0, false, budget.Open, 700000, 700000},
		{30, bytes, of(0.3), 1024 * kib, 0, false, budget.Open, 629145.6, 629145},
		{35, budget.Rule{Baseline: 0.1, Share: 0.5}, of(0.3), 50, 0, false, budget.Open, 15, 15},
		{36, reserve(0.05), of(0.85), 500, 0, false, budget.Open, 50, 50},

		{101, reserve(0.05), 0.7, math.Inf(1), 0, false, budget.Unreadable, 0, 0},
		{102, reserve(0.05), 0.7, -3, 0, false, budget.NoCapacity, 0, 0},
		{103, reserve(0.05), nan, 100, 0, true, budget.Overload, 0, 0},
		{104, reserve(0.05), 0.7, 0, 0, true, budget.Overload, 0, 0},
		{105, reserve(0.05), 0, 100, 0, true, budget.Overload, 0, 0},
		{106, tokens, of(0.899999), 100, 0, false, budget.Open, 0.0001, 0}, // no minimum in tokens
		{107, budget.Rule{Baseline: 0.05, Rounding: budget.Ceil}, of(0.9), 100, 0, false, budget.Open, 5, 5},
		{108, budget.Rule{Baseline: 0.05, Rounding: budget.Ceil}, of(0.949), 100, 1, false, budget.Open, 0.1, 0},
		{109, reserve(0), 1, math.MaxFloat64, 0, false, budget.Open, math.MaxFloat64, 1 << 62},
		{110, reserve(0.05), of(-1), 100, 0, false, budget.Open, 95, 95}, // the guide's idle pod
		{111, reserve(0.05), -1, 100, 0, false, budget.Baseline, 0, 0},   // and 200 running on it
		{112, reserve(0.05), -0.1, 100, 0, false, budget.Baseline, 0, 0}, // and 110
	} {
		state, n, allowed := tt.rule.Evaluate(tt.d, tt.sys, tt.sent, tt.overload)
		if state != tt.state || allowed != tt.allowed || math.Abs(n-tt.n) > 1e-6*max(1, tt.n) {
			t.Errorf("row %d: Evaluate(%v, %v, %d, %v) of %+v = %v, %v, %d, want %v, %v, %d",
				tt.row, tt.d, tt.sys, tt.sent, tt.overload, tt.rule, state, n, allowed, tt.state, tt.n, tt.allowed)
		}
	}
}

// TestPrefixExamples has the rows about weights.
func TestPrefixExamples(t *testing.T) {
	const kib, most = 1024, 629145
	for _, tt := range []struct {
		row     int
		allowed int64
		weights []int64
		want    int
	}{
		{29, 700000, []int64{300000, 300000, 200000}, 2},
		{30, most, []int64{600 * kib, 100 * kib}, 1},
		{31, most, []int64{600 * kib, 100 * kib, 5 * kib}, 1}, // the small one is not pulled forward
		{32, most, []int64{most, 1}, 1},
		{33, most, []int64{700 * kib}, 0},
		{34, most, []int64{2048 * kib}, 0},
		{101, 3, []int64{1, 1, 1, 1}, 3},
		{102, 0, []int64{1}, 0},
		{103, 5, nil, 0},
		{104, 5, []int64{0, 5, 0, 1}, 3},
	} {
		if got := budget.Fits(tt.weights, tt.allowed); got != tt.want {
			t.Errorf("row %d: Fits(%v, %d) = %d, want %d", tt.row, tt.weights, tt.allowed, got, tt.want)
		}
	}
}

// exact is Evaluate's rule in rational arithmetic, for hundredths.
func exact(f, b int, sys int64, sent int64, rounding budget.Rounding) (budget.State, int64) {
	d := min(max(100-f, 0), 100)
	if d <= b {
		return budget.Baseline, 0
	}
	n := new(big.Rat).Mul(big.NewRat(int64(d-b), 100), new(big.Rat).SetInt64(sys))
	whole, rest := new(big.Int).QuoRem(n.Num(), n.Denom(), new(big.Int))
	allowed := whole.Int64()
	switch {
	case rounding == budget.Ceil && rest.Sign() > 0:
		allowed++
	case rounding == budget.FloorMin1 && allowed == 0 && sent == 0:
		allowed = 1
	}
	return budget.Open, max(0, allowed-sent)
}

// TestExactArithmetic compares with rational numbers: for all hundredths, with sizes that cross each
// power of ten.
func TestExactArithmetic(t *testing.T) {
	for _, sys := range []int64{1, 2, 3, 7, 10, 50, 96, 100, 999, 1000, 12345, 1e6, 999_999_937, 1e9} {
		for f := 0; f <= 130; f++ {
			for b := 0; b <= 100; b++ {
				wantState, want := exact(f, b, sys, 0, budget.Floor)
				r := budget.Rule{Baseline: float64(b) / 100, Rounding: budget.Floor}
				state, _, got := r.Evaluate(1-float64(f)/100, float64(sys), 0, false)
				if state != wantState || got != want {
					t.Fatalf("F %d/100, B %d/100, max_SYS %d: %v %d, want %v %d", f, b, sys, state, got, wantState, want)
				}
			}
		}
	}
}

func TestExactArithmeticAtRandom(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f, b := rapid.IntRange(0, 130).Draw(t, "F"), rapid.IntRange(0, 100).Draw(t, "B")
		sys, sent := rapid.Int64Range(1, 1e9).Draw(t, "max_SYS"), rapid.Int64Range(0, 100).Draw(t, "sent")
		rounding := budget.Rounding(rapid.IntRange(0, 2).Draw(t, "rounding"))
		wantState, want := exact(f, b, sys, sent, rounding)
		r := budget.Rule{Baseline: float64(b) / 100, Rounding: rounding}
		state, _, got := r.Evaluate(1-float64(f)/100, float64(sys), sent, false)
		if state != wantState || got != want {
			t.Fatalf("Evaluate = %v %d, want %v %d", state, got, wantState, want)
		}
	})
}

// FuzzEvaluate looks for numbers that open a gate which should be closed, or break its bounds.
func FuzzEvaluate(f *testing.F) {
	f.Add(0.7, 0.1, 50.0, int64(3), false, byte(0))
	f.Add(math.NaN(), 0.05, 1e300, int64(0), false, byte(4))
	f.Fuzz(func(t *testing.T, d, b, sys float64, sent int64, overload bool, kind byte) {
		if !(b >= 0 && b <= 1) || sent < 0 {
			t.Skip()
		}
		r := budget.Rule{Baseline: b, Rounding: budget.Rounding(kind % 3), Unit: budget.Unit(kind / 3 % 3)}
		state, n, allowed := r.Evaluate(d, sys, sent, overload)
		switch {
		case allowed < 0 || n < 0 || math.IsNaN(n):
			t.Errorf("n %v, allowed %d", n, allowed)
		case allowed > 0 && (state != budget.Open || overload || !(d > b) || !(sys > 0) || math.IsInf(d, 0) || math.IsInf(sys, 0)):
			t.Errorf("%v, and %d may go", state, allowed)
		case float64(allowed) > n+1+slack(n):
			t.Errorf("n is %v, and %d may go", n, allowed)
		}
	})
}

func slack(n float64) float64 { return max(1e-9, n*1e-12) }

func TestNames(t *testing.T) {
	for _, name := range []string{"requests", "tokens", "bytes"} {
		if u, err := budget.ParseUnit(name); err != nil || u.String() != name {
			t.Errorf("ParseUnit(%s) = %v, %v", name, u, err)
		}
	}
	for i, name := range []string{"floor_min1", "floor", "ceil"} {
		if r, err := budget.ParseRounding(name); err != nil || int(r) != i {
			t.Errorf("ParseRounding(%s) = %v, %v", name, r, err)
		}
	}
	if _, err := budget.ParseUnit("request"); err == nil {
		t.Error("ParseUnit(request) is no error")
	}
	if _, err := budget.ParseRounding(""); err == nil {
		t.Error(`ParseRounding("") is no error`)
	}
	want := []string{"open", "baseline", "unreadable", "no_capacity", "overload", "error"}
	for i, s := range budget.States {
		if s.String() != want[i] {
			t.Errorf("state %d is %s, want %s", i, s, want[i])
		}
	}
}
