package busy_test

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"spillway/busy"
	"spillway/worker"
)

var t0 = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func at(seconds float64) time.Time { return t0.Add(time.Duration(seconds * float64(time.Second))) }

// books are the Loads of tests.
type books map[worker.Rank][2]uint64

func (b books) Promised(r worker.Rank, _ time.Time) (uint64, uint64) { return b[r][0], b[r][1] }

func (b books) PrefillFalls(worker.Rank, uint64) (time.Time, bool) { return time.Time{}, false }

// limits reads a threshold triple as the tables of the rule write it: "0.85,10000,-".
func limits(t testing.TB, triple string) busy.Thresholds {
	t.Helper()
	f := strings.Split(triple, ",")
	var th busy.Thresholds
	float := func(s string) *float64 {
		v, err := strconv.ParseFloat(s, 64)
		if err != nil {
			t.Fatal(err)
		}
		return &v
	}
	if f[0] != "-" {
		th.DecodeFrac = float(f[0])
	}
	if f[1] != "-" {
		v, err := strconv.ParseUint(f[1], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		th.PrefillTokens = &v
	}
	if f[2] != "-" {
		th.PrefillFrac = float(f[2])
	}
	return th
}

// described is a rank in the notation of the tables: r0{A=90 U=10 T=100}.
type described struct {
	dp     uint32
	counts map[string]uint64
	ratio  *float64
}

var rankNotation = regexp.MustCompile(`r(\d+)\{([^}]*)\}`)

func ranks(t testing.TB, text string) []described {
	t.Helper()
	var all []described
	for _, m := range rankNotation.FindAllStringSubmatch(text, -1) {
		dp, err := strconv.ParseUint(m[1], 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		d := described{dp: uint32(dp), counts: map[string]uint64{}}
		for _, pair := range strings.Fields(m[2]) {
			name, value, _ := strings.Cut(pair, "=")
			if name == "ratio" {
				v, err := strconv.ParseFloat(value, 64)
				if err != nil {
					t.Fatal(err)
				}
				d.ratio = &v
				continue
			}
			v, err := strconv.ParseUint(value, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			d.counts[name] = v
		}
		all = append(all, d)
	}
	return all
}

func (d described) count(name string) *uint64 {
	if v, ok := d.counts[name]; ok {
		return &v
	}
	return nil
}

// sample is what the engine says of the rank; with books it does not know A and P.
func (d described) sample(id worker.ID, withPromises bool, taken time.Time) busy.Sample {
	s := busy.Sample{
		Rank: worker.Rank{Worker: id, DP: d.dp}, TakenAt: taken,
		KVUsedBlocks: d.count("U"), KVTotalBlocks: d.count("T"), KVUsageRatio: d.ratio,
		MaxNumBatchedTokens: d.count("M"),
	}
	if withPromises {
		s.Source = busy.Event
		s.DecodeBlocks, s.PrefillTokens = d.count("A"), d.count("P")
	}
	return s
}

func (d described) report() busy.Report {
	r := busy.Report{
		DecodeBlocks: float64(d.counts["A"]), PrefillTokens: float64(d.counts["P"]),
		UsedBlocks: d.counts["U"], UsedKnown: d.count("U") != nil,
		TotalBlocks: d.counts["T"], MaxBatchedTokens: d.counts["M"],
	}
	if d.ratio != nil {
		r.UsageRatio = *d.ratio
	}
	return r
}

func config(t testing.TB, triple string) busy.Config {
	t.Helper()
	cfg := busy.DefaultConfig()
	th := limits(t, triple)
	cfg.ActiveDecodeBlocksThreshold = th.DecodeFrac
	cfg.ActivePrefillTokensThreshold = th.PrefillTokens
	cfg.ActivePrefillTokensThresholdFrac = th.PrefillFrac
	return cfg
}

func isBusy(l *busy.List, id worker.ID) bool {
	for _, b := range l.Snapshot().Busy {
		if b == id {
			return true
		}
	}
	return false
}

// TestSingleRank goes through table 8.1 of the rule three times: the pure function, a list fed
// by a page and by books, and a list fed by events alone.
func TestSingleRank(t *testing.T) {
	for _, tt := range []struct {
		row        int
		thresholds string
		rank       string
		want       bool
	}{
		{1, "-,-,-", "A=999 U=999 T=1000 P=1000000000", false},
		{2, "0.85,-,-", "A=87 T=100", true},
		{3, "0.85,-,-", "A=85 T=100", false},
		{4, "0.85,-,-", "A=86 T=100", true},
		{5, "-,10000,-", "P=12000", true},
		{6, "-,10000,-", "P=10000", false},
		{7, "-,10000,-", "P=10001", true},
		{8, "0.85,10000,-", "A=10 T=100 P=12000", true},
		{9, "0.85,10000,-", "A=90 T=100 P=0", true},
		{10, "0.85,10000,-", "A=85 T=100 P=10000", false},
		{11, "0.85,-,-", "T=100", false},
		{12, "0.85,-,-", "A=90", false},
		{13, "0.85,-,-", "A=90 T=0", false},
		{14, "0.85,10000,-", "A=90 T=0 P=12000", true},
		{15, "0.85,-,-", "A=10 U=90 T=100", true},
		{16, "0.85,-,-", "A=90 U=10 T=100", true},
		{17, "0.85,-,-", "U=90 T=100", true},
		{18, "0.85,-,-", "ratio=0.86", true},
		{19, "0.85,-,-", "ratio=0.85", false},
		{20, "0.0,-,-", "A=0 T=100", false},
		{21, "0.0,-,-", "A=1 T=100", true},
		{22, "1.0,-,-", "A=100 T=100", false},
		{23, "1.0,-,-", "A=101 T=100", true},
		{24, "-,0,-", "P=0", false},
		{25, "-,0,-", "P=1", true},
		{26, "0.29,-,-", "A=29 T=100", false},
		{27, "0.57,-,-", "U=57 T=100", false},
		{28, "0.58,-,-", "U=58 T=100", false},
		{29, "-,-,0.9", "P=7373 M=8192", true},
		{30, "-,-,0.9", "P=7372 M=8192", false},
		{31, "-,-,2.0", "P=2500 M=1000", true},
		{32, "-,-,0.9", "P=1000000", false},
		{33, "-,-,0.9", "P=1000000 M=0", false},
		{34, "-,20000,0.5", "P=5000 M=8192", true},
		{35, "0.6,-,-", "P=5000 M=1000", false},
		{36, "-,9223372036854775807,-", "A=99 U=99 T=100 P=0", false},
	} {
		t.Run(fmt.Sprintf("row %d", tt.row), func(t *testing.T) {
			d := ranks(t, "r0{"+tt.rank+"}")[0]
			th := limits(t, tt.thresholds)
			if got := th.Check(d.report()).Busy(); got != tt.want {
				t.Errorf("(%s).Check(%s) = %v, want %v", tt.thresholds, tt.rank, got, tt.want)
			}
			b := books{{Worker: 7}: {d.counts["A"], d.counts["P"]}}
			booked := busy.New(config(t, tt.thresholds), b)
			booked.Register(&worker.Worker{ID: 7}, t0)
			booked.Scraped(7, []busy.Sample{d.sample(7, false, t0)}, false, t0)
			if got := isBusy(booked, 7); got != tt.want {
				t.Errorf("(%s) with books, %s: busy = %v, want %v", tt.thresholds, tt.rank, got, tt.want)
			}
			events := busy.New(config(t, tt.thresholds), nil)
			events.Register(&worker.Worker{ID: 7}, t0)
			events.Observe(d.sample(7, true, t0), t0)
			if got := isBusy(events, 7); got != tt.want {
				t.Errorf("(%s) by events, %s: busy = %v, want %v", tt.thresholds, tt.rank, got, tt.want)
			}
		})
	}
}

// TestSeveralRanks goes through table 8.2.
func TestSeveralRanks(t *testing.T) {
	const both = "0.85,10000,-"
	for _, tt := range []struct {
		row        string
		thresholds string
		worker     worker.Worker
		ranks      string // A and P go to the books, the rest is on the page
		anyP       uint64 // prefill tokens booked for the worker as a whole
		mark       bool
		want       bool
	}{
		{"37", both, worker.Worker{DPSize: 2}, "r0{A=90 T=100} r1{A=10 T=100}", 0, false, false},
		{"38", both, worker.Worker{DPSize: 2}, "r0{A=90 T=100} r1{A=86 T=100}", 0, false, true},
		{"39", both, worker.Worker{DPSize: 2}, "r0{A=90 T=100 P=0} r1{A=0 P=12000}", 0, false, true},
		{"40", both, worker.Worker{DPSize: 2}, "r0{A=90 T=100}", 0, false, false},
		{"41", both, worker.Worker{}, "r0{A=90 T=100}", 0, false, true},
		{"42", both, worker.Worker{}, "r0{A=90 T=100} r3{A=90 T=100}", 0, false, true},
		{"42, engine values", both, worker.Worker{}, "r0{U=90 T=100} r3{U=90 T=100}", 0, false, true},
		{"44", both, worker.Worker{DPSize: 2}, "r0{A=90 T=100} r1{A=90}", 0, false, false},
		{"45", both, worker.Worker{DPSize: 2}, "", 0, false, false},
		{"46", both, worker.Worker{}, "", 0, false, false},
		{"47", "0.85,-,-", worker.Worker{DPSize: 2}, "", 0, true, true},
		{"47, undeclared", "0.85,-,-", worker.Worker{}, "", 0, true, true},
		{"47a", "-,-,-", worker.Worker{DPSize: 2}, "", 0, true, false},
		{"47c", "-,10000,-", worker.Worker{DPSize: 2, RankRouting: worker.RankByEngine}, "", 30000, false, true},
		{"47c, just not", "-,10000,-", worker.Worker{DPSize: 2, RankRouting: worker.RankByEngine}, "", 20000, false, false},
		{"47d", "-,10000,-", worker.Worker{DPSize: 2}, "r0{P=30000}", 0, false, false},
	} {
		t.Run("row "+tt.row, func(t *testing.T) {
			b := books{{Worker: 7, DP: worker.AnyDP}: {0, tt.anyP}}
			var page []busy.Sample
			for _, d := range ranks(t, tt.ranks) {
				b[worker.Rank{Worker: 7, DP: d.dp}] = [2]uint64{d.counts["A"], d.counts["P"]}
				page = append(page, d.sample(7, false, t0))
			}
			l := busy.New(config(t, tt.thresholds), b)
			tt.worker.ID = 7
			l.Register(&tt.worker, t0)
			if len(page) > 0 {
				l.Scraped(7, page, false, t0)
			}
			l.Refresh(7, t0)
			if tt.mark {
				l.Mark(7, nil, 0, t0)
			}
			if got := isBusy(l, 7); got != tt.want {
				t.Errorf("(%s) %s: busy = %v, want %v", tt.thresholds, tt.ranks, got, tt.want)
			}
			if got := len(l.Snapshot().Free) == 1; got == tt.want {
				t.Errorf("(%s) %s: free = %v, want %v", tt.thresholds, tt.ranks, got, !tt.want)
			}
		})
	}
}

// TestRankOfFormerConfig is row 43.
func TestRankOfFormerConfig(t *testing.T) {
	l := busy.New(config(t, "0.85,10000,-"), books{})
	l.Register(&worker.Worker{ID: 7, DPSize: 1}, t0)
	page := func(text string, now time.Time) {
		var p []busy.Sample
		for _, d := range ranks(t, text) {
			p = append(p, d.sample(7, false, now))
		}
		l.Scraped(7, p, false, now)
	}
	page("r0{U=1 T=100}", at(0))
	l.Register(&worker.Worker{ID: 7, DPStart: 4, DPSize: 2}, at(0.5))
	for i, want := range []bool{false, false, true} {
		now := at(float64(i + 1))
		page("r4{U=90 T=100} r5{U=90 T=100}", now)
		if got := isBusy(l, 7); got != want {
			t.Errorf("row 43, page %d without r0: busy = %v, want %v", i+1, got, want)
		}
	}
	page("r0{U=1 T=100} r4{U=90 T=100} r5{U=90 T=100}", at(5))
	if isBusy(l, 7) {
		t.Error("row 43, r0 is back: busy, want free")
	}
}

// TestLabelOfSingleRank is row 47b, and what follows for the numbers that others see.
func TestLabelOfSingleRank(t *testing.T) {
	b := books{{Worker: 7}: {5, 0}}
	l := busy.New(config(t, "0.85,-,-"), b)
	l.Register(&worker.Worker{ID: 7}, t0)
	page := func(text string) {
		var p []busy.Sample
		for _, d := range ranks(t, text) {
			p = append(p, d.sample(7, false, t0))
		}
		l.Scraped(7, p, false, t0)
	}
	check := func(what string, busyWant bool, dps ...uint32) {
		t.Helper()
		if got := isBusy(l, 7); got != busyWant {
			t.Errorf("%s: busy = %v, want %v", what, got, busyWant)
		}
		var got []uint32
		for _, r := range l.Workers(t0)[0].Ranks {
			got = append(got, r.DP)
		}
		if fmt.Sprint(got) != fmt.Sprint(dps) {
			t.Errorf("%s: ranks %v, want %v", what, got, dps)
		}
	}
	page("r3{U=90 T=100}")
	check("row 47b: only engine=3", true, 0)
	page("r5{U=90 T=100}")
	check("the label changes", true, 0)
	b[worker.Rank{Worker: 7}] = [2]uint64{90, 0}
	page("r5{U=10 T=100}")
	check("the books of rank 0 count", true, 0)
	b[worker.Rank{Worker: 7}] = [2]uint64{5, 0}
	page("r3{U=90 T=100} r4{U=10 T=100}")
	check("two labels beside the old one", false, 3, 4, 5)
	page("r3{U=90 T=100} r4{U=90 T=100}")
	page("r3{U=90 T=100} r4{U=90 T=100}")
	check("the old one is gone", true, 3, 4)
}
