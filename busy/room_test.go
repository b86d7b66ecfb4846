package busy_test

import (
	"math"
	"testing"

	"pgregory.net/rapid"

	"spillway/busy"
	"spillway/worker"
)

// misfires are ratios at which multiplying instead of dividing calls an equal value over.
var misfires = []struct {
	used, total uint64
	threshold   float64
}{
	{29, 50, 0.58}, {29, 100, 0.29}, {57, 100, 0.57}, {58, 100, 0.58}, {29, 200, 0.145}, {57, 200, 0.285},
	{58, 200, 0.29}, {113, 200, 0.565}, {114, 200, 0.57}, {115, 200, 0.575}, {116, 200, 0.58},
}

func TestDivisionNotMultiplication(t *testing.T) {
	for _, m := range misfires {
		if !(float64(m.used) > m.threshold*float64(m.total)) {
			t.Errorf("%d/%d@%v: multiplication does not misfire", m.used, m.total, m.threshold)
		}
		th := busy.Thresholds{DecodeFrac: &m.threshold, PrefillFrac: &m.threshold}
		for _, r := range []busy.Report{
			{DecodeBlocks: float64(m.used), TotalBlocks: m.total},
			{UsedBlocks: m.used, UsedKnown: true, TotalBlocks: m.total},
			{PrefillTokens: float64(m.used), MaxBatchedTokens: m.total},
		} {
			if got := th.Check(r); got.Busy() {
				t.Errorf("%d/%d@%v: Check(%+v) = %v, want free", m.used, m.total, m.threshold, r, got.Names())
			}
		}
		decode, prefill := th.Limits(m.total, m.total, 1)
		if decode != m.used || prefill != m.used {
			t.Errorf("Limits(%d) at %v = %d, %d, want %d", m.total, m.threshold, decode, prefill, m.used)
		}
	}
}

// Every exact ratio of the totals that the rule names is at its limit, and not over it.
func TestLimitsAtExactRatios(t *testing.T) {
	for _, total := range []uint64{10, 16, 20, 50, 64, 100, 128, 200, 1000} {
		for thousandths := range uint64(1001) {
			if total*thousandths%1000 != 0 {
				continue
			}
			used := total * thousandths / 1000
			th := busy.Thresholds{DecodeFrac: new(float64(thousandths) / 1000)}
			if decode, _ := th.Limits(total, 0, 1); decode != used {
				t.Errorf("Limits(%d) at %d/1000 = %d, want %d", total, thousandths, decode, used)
			}
		}
	}
}

// agrees checks that a load is within the limits exactly if Check finds it so.
func agrees(t interface {
	Errorf(string, ...any)
	Helper()
}, th busy.Thresholds, total, budget uint64, n int, a, p uint64) {
	t.Helper()
	decode, prefill := th.Limits(total, budget, n)
	got := th.Check(busy.Report{
		DecodeBlocks: float64(a) / float64(n), PrefillTokens: float64(p) / float64(n),
		TotalBlocks: total, MaxBatchedTokens: budget,
	})
	if over := a > decode; over != got.Has(busy.CheckDecodeBlocks) {
		t.Errorf("T=%d n=%d: A=%d over its limit %d is %v, but Check says %v", total, n, a, decode, over, got.Names())
	}
	if over := p > prefill; over != got.Has(busy.CheckPrefillTokens|busy.CheckPrefillFrac) {
		t.Errorf("M=%d n=%d: P=%d over its limit %d is %v, but Check says %v", budget, n, p, prefill, over, got.Names())
	}
}

func TestLimitsAgreeWithCheck(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		count := rapid.OneOf(rapid.Uint64Range(0, 300), rapid.Uint64Range(0, 1<<20), rapid.Uint64())
		total, budget := count.Draw(t, "T"), count.Draw(t, "M")
		n := rapid.IntRange(1, 8).Draw(t, "n")
		fraction := func(name string, most float64) *float64 {
			switch rapid.IntRange(0, 3).Draw(t, name+" kind") {
			case 0:
				return nil
			case 1: // a ratio of small integers, where equality happens
				d := rapid.Uint64Range(1, 1000).Draw(t, name+" below")
				return new(float64(rapid.Uint64Range(0, d).Draw(t, name+" above")) / float64(d))
			case 2:
				return new(rapid.SampledFrom(misfires).Draw(t, name).threshold)
			}
			return new(rapid.Float64Range(0, most).Draw(t, name))
		}
		th := busy.Thresholds{DecodeFrac: fraction("dthr", 1), PrefillFrac: fraction("pfrac", 1e6)}
		if rapid.Bool().Draw(t, "pthr set") {
			th.PrefillTokens = new(rapid.OneOf(rapid.Uint64Range(0, 1<<20), rapid.Uint64Range(0, math.MaxInt64)).Draw(t, "pthr"))
		}
		decode, prefill := th.Limits(total, budget, n)
		for _, d := range []uint64{0, 1, 2} { // around the limits, where it matters
			agrees(t, th, total, budget, n, decode+d, prefill+d) // wraps to 0 at Unlimited
			agrees(t, th, total, budget, n, decode-d, prefill-d)
		}
		agrees(t, th, total, budget, n, count.Draw(t, "A"), count.Draw(t, "P"))
	})
}

func TestFreeRanks(t *testing.T) {
	const off = busy.Unlimited
	for _, tt := range []struct {
		name       string
		thresholds string
		worker     worker.Worker
		page       string
		any        [2]uint64
		want       []busy.Room
	}{
		{"nothing set", "-,-,-", worker.Worker{DPSize: 2}, "", [2]uint64{}, []busy.Room{{0, off, off}, {1, off, off}}},
		{"nothing set, the engine picks", "-,-,-", worker.Worker{DPSize: 2, RankRouting: worker.RankByEngine}, "", [2]uint64{},
			[]busy.Room{{worker.AnyDP, off, off}}},
		{"undeclared", "0.29,10,-", worker.Worker{}, "r3{T=100}", [2]uint64{}, []busy.Room{{0, 29, 10}}},
		{"T unknown", "0.29,10,-", worker.Worker{}, "", [2]uint64{}, []busy.Room{{0, off, 10}}},
		{"the configured T wins", "0.5,-,-", worker.Worker{KVTotalBlocks: 10}, "r0{T=100}", [2]uint64{}, []busy.Room{{0, 5, off}}},
		{"the lower of two prefill limits", "-,5000,0.5", worker.Worker{MaxNumBatchedTokens: 8192}, "", [2]uint64{}, []busy.Room{{0, off, 4096}}},
		{"busy ranks are left out", "0.5,-,-", worker.Worker{DPSize: 3}, "r0{U=51 T=100} r1{U=50 T=100}", [2]uint64{},
			[]busy.Room{{1, 50, off}, {2, off, off}}},
		{"a shared load", "0.29,10,-", worker.Worker{DPSize: 2, RankRouting: worker.RankByEngine}, "r0{T=100} r1{T=100}", [2]uint64{58, 20},
			[]busy.Room{{worker.AnyDP, 58, 20}}},
		{"a shared load over the limit", "0.29,10,-", worker.Worker{DPSize: 2, RankRouting: worker.RankByEngine}, "r0{T=100} r1{T=100}", [2]uint64{59, 20}, nil},
		{"a shared load beside a busy rank", "0.5,-,-", worker.Worker{DPSize: 2, RankRouting: worker.RankByEngine}, "r0{U=90 T=1000} r1{U=90 T=100}", [2]uint64{},
			[]busy.Room{{worker.AnyDP, 1000, off}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := busy.New(config(t, tt.thresholds), books{{Worker: w7, DP: worker.AnyDP}: tt.any})
			tt.worker.ID = w7
			l.Register(&tt.worker, t0)
			var page []busy.Sample
			for _, d := range ranks(t, tt.page) {
				page = append(page, d.sample(w7, false, t0))
			}
			l.Scraped(w7, page, false, t0)
			got := l.FreeRanks(w7, nil)
			if len(got) != len(tt.want) {
				t.Fatalf("FreeRanks = %v, want %v", got, tt.want)
			}
			for i := range got {
				if got[i] != tt.want[i] {
					t.Errorf("FreeRanks = %v, want %v", got, tt.want)
				}
			}
			l.SetHealthy(w7, false, t0)
			if got := l.FreeRanks(w7, nil); len(got) != 0 {
				t.Errorf("FreeRanks of an unhealthy worker = %v, want none", got)
			}
		})
	}
	if got := busy.New(busy.DefaultConfig(), nil).FreeRanks(w7, nil); len(got) != 0 {
		t.Errorf("FreeRanks of an unknown worker = %v, want none", got)
	}
}
