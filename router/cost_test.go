package router_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"spillway/busy"
	"spillway/kvindex"
	"spillway/router"
	"spillway/tracker"
	"spillway/worker"
)

// Numbers of rows are those of the specification's worked examples.

// newScheduled is a rig in KV mode.
func newScheduled(t testing.TB, change func(*router.CostConfig), workers ...worker.Worker) *rig {
	t.Helper()
	cfg := router.DefaultConfig()
	cfg.Mode = router.KV
	if change != nil {
		change(&cfg.Cost)
	}
	return newConfigured(t, cfg, busy.DefaultConfig(), workers...)
}

// holds books load on a rank without a decision: so many requests with these tokens and blocks in all.
func (f *rig) holds(r worker.Rank, prefill, blocks uint64, requests int) {
	f.t.Helper()
	for i := range requests {
		f.next++
		v := tracker.Reservation{ID: fmt.Sprint("held", f.next), Rank: r}
		if i == 0 {
			v.PrefillTokens, v.DecodeBlocks = prefill, blocks
		}
		if err := f.p.Reserve(v, start); err != nil {
			f.t.Fatalf("Reserve(%+v) = %v", v, err)
		}
	}
}

// has is the overlap of one rank.
func has(r worker.Rank, device, host, disk int) kvindex.Match {
	return kvindex.Match{Rank: r, Device: device, Host: host, Disk: disk}
}

// terms are those of a query, by rank.
func (f *rig) terms(q router.Query) map[worker.Rank]router.Terms {
	f.t.Helper()
	var list []router.Terms
	q.NoBooking, q.Explain = true, &list
	if _, err := f.p.Select(q, start); err != nil {
		f.t.Fatalf("Select(%+v) = %v", q, err)
	}
	all := map[worker.Rank]router.Terms{}
	for i, t := range list {
		all[t.Rank] = t
		if i > 0 && !(list[i-1].Rank.Worker < t.Rank.Worker || list[i-1].Rank.Worker == t.Rank.Worker && list[i-1].Rank.DP < t.Rank.DP) {
			f.t.Fatalf("terms of %+v come after those of %+v", t.Rank, list[i-1].Rank)
		}
	}
	return all
}

func near(a, b float64) bool { return math.Abs(a-b) <= 1e-6*max(1, math.Abs(b)) }

func TestEffectiveTokens(t *testing.T) {
	for _, tt := range []struct {
		row              int
		dev, host, disk  int
		block            uint32
		isl              uint64
		whost, wdisk     float64
		credit           *float64
		overlap          float64
		cached, expected uint64
	}{
		{1, 4, 2, 2, 16, 512, .75, .25, nil, 6, 96, 416},
		{2, 8, 0, 0, 64, 512, .75, .25, nil, 8, 512, 0},
		{3, 0, 3, 0, 16, 64, .75, .25, nil, 2.25, 36, 28},
		{4, 2, 3, 9, 16, 200, .5, .25, nil, 5.75, 92, 108},
		{5, 6, 0, 0, 16, 64, .75, .25, nil, 6, 96, 0},
		{6, 1, 1, 1, 16, 33, .75, .25, nil, 2, 32, 1},
		{7, 0, 1, 0, 2, 10, .75, .25, nil, .75, 2, 8},
		{8, 0, 0, 1, 2, 10, .75, .25, nil, .25, 1, 9},
		{9, 4, 2, 2, 16, 512, .75, .25, new(0.0), 6, 96, 416},
	} {
		t.Run(fmt.Sprint(tt.row), func(t *testing.T) {
			f := newScheduled(t, func(c *router.CostConfig) {
				c.HostCacheHitWeight, c.DiskCacheHitWeight = tt.whost, tt.wdisk
			}, record(t, 1, 1))
			m := has(rank(1, 0), tt.dev, tt.host, tt.disk)
			sel, id, err := f.ask(router.Query{
				PromptTokens: tt.isl, BlockSize: tt.block, Overlaps: &kvindex.Matches{Ranks: []kvindex.Match{m}},
				Override: &router.Override{OverlapScoreCredit: tt.credit},
			})
			if err != nil || sel.OverlapBlocks != tt.overlap || sel.CachedTokens != tt.cached || sel.EffectivePrefillTokens != tt.expected {
				t.Errorf("Select = %+v, %v, want overlap %v, cached %d, effective %d", sel, err, tt.overlap, tt.cached, tt.expected)
			}
			if got := f.p.Tracker.Load(rank(1, 0), start).PrefillTokens; got != tt.expected {
				t.Errorf("prefill booked = %d, want %d", got, tt.expected)
			}
			f.p.Free(id, start)
			f.checkEmpty()
		})
	}
}

func rank(id worker.ID, dp uint32) worker.Rank { return worker.Rank{Worker: id, DP: dp} }

func TestCost(t *testing.T) {
	off := false
	for _, tt := range []struct {
		row             int
		block           uint32
		isl, prefill    uint64
		dev, host, disk int
		held            uint64 // DB
		requests        int
		other           uint64 // backlog of another rank
		shared          []router.Span
		change          func(*router.CostConfig)
		override        router.Override
		raw, credit     float64
		want            float64
	}{
		{row: 10, block: 16, isl: 64, held: 4, raw: 4, want: 8},
		{row: 11, block: 1, isl: 10, dev: 2, held: 10, raw: 10, credit: 2, want: 18},
		{row: 12, block: 1, isl: 10, dev: 5, held: 5, raw: 10, credit: 5, want: 10},
		{row: 13, block: 1, isl: 10, dev: 8, held: 9, raw: 10, credit: 8, want: 11},
		{row: 14, block: 16, isl: 50, prefill: 7, held: 3, raw: 3.5625, want: 6.5625},
		{row: 15, block: 16, isl: 64, prefill: 16, dev: 6, held: 5, change: scale(2), raw: 7, credit: 6, want: 7},
		{row: 16, block: 16, isl: 64, prefill: 16, dev: 6, held: 5, change: scale(2), override: router.Override{TrackPrefillTokens: &off}, credit: 6, want: 5},
		{row: 17, block: 16, isl: 64, raw: 4, want: 4},
		{row: 18, block: 16, isl: 64, override: router.Override{TrackPrefillTokens: &off}},
		{row: 19, block: 16, isl: 512, dev: 4, host: 2, disk: 2, held: 8, raw: 32, credit: 6, want: 34},
		{row: 20, block: 16, isl: 512, prefill: 4096, dev: 30, held: 42, raw: 288, credit: 30, want: 300},
		{row: 21, block: 16, isl: 512, prefill: 4096, dev: 30, held: 42, override: router.Override{OverlapScoreCredit: new(0.0)}, raw: 288, want: 330},
		{row: 22, block: 16, isl: 512, prefill: 4096, dev: 30, held: 42, change: scale(0), raw: 288, credit: 30, want: 42},
		{row: 23, block: 16, isl: 64, dev: 2, held: 3, change: scale(2), raw: 4, credit: 2, want: 7},
		{row: 24, block: 16, isl: 64, change: scale(2), raw: 4, want: 8},
		{row: 25, block: 16, isl: 128, dev: 4, held: 5, raw: 8, credit: 4, want: 9},
		{row: 26, block: 16, isl: 128, raw: 8, want: 8},
		{row: 27, block: 16, isl: 128, dev: 4, held: 5, override: router.Override{OverlapScoreCredit: new(1.5)}, raw: 8, credit: 6, want: 7},
		{row: 271, block: 16, isl: 64, dev: 4, held: 5, override: router.Override{OverlapScoreCredit: new(1.5)}, raw: 4, credit: 6, want: 5}, // none below 0
		{row: 28, block: 16, isl: 64, prefill: 48, dev: 4, raw: 7, credit: 4, want: 3},
		{row: 29, block: 16, isl: 64, prefill: 48, dev: 4, change: decay(1), raw: 7, credit: 2.285714, want: 4.714286},
		{row: 30, block: 16, isl: 256, prefill: 512, dev: 16, change: decay(1), raw: 48, credit: 5.333333, want: 42.666667},
		{row: 31, block: 16, isl: 256, prefill: 512, dev: 16, other: 256, change: decay(2), raw: 48, credit: 5.333333, want: 42.666667},
		{row: 32, block: 1, isl: 4, dev: 2, shared: []router.Span{{From: 0, To: 4}}, override: router.Override{SharedCacheMultiplier: new(.5)}, raw: 4, credit: 3, want: 1},
		{row: 33, block: 1, isl: 4, shared: []router.Span{{From: 0, To: 4}}, override: router.Override{SharedCacheMultiplier: new(.5)}, raw: 4, credit: 2, want: 2},
		{row: 34, block: 16, isl: 16, held: 100, requests: 4, change: requests(32), override: router.Override{TrackPrefillTokens: &off}, want: 228},
		{row: 35, block: 16, isl: 64, dev: 3, held: 10, change: decodeOnly(1, 0), credit: 3, want: 7},
		{row: 36, block: 16, isl: 64, dev: 3, held: 10, change: decodeOnly(0, 0), want: 10},
		{row: 37, block: 16, isl: 64, dev: 3, held: 2, requests: 3, change: decodeOnly(1, 2), credit: 3, want: 6},
		{row: 38, block: 16, isl: 64, dev: 3, held: 10, change: func(c *router.CostConfig) { c.TrackPrefillTokens = false }, credit: 3, want: 10},
		{row: 39, block: 16, isl: 64, dev: 4, held: 1, raw: 4, credit: 4, want: 1},
	} {
		t.Run(fmt.Sprint(tt.row), func(t *testing.T) {
			f := newScheduled(t, tt.change, record(t, 1, 1), record(t, 2, 1))
			if tt.requests == 0 && tt.prefill+tt.held > 0 {
				tt.requests = 1
			}
			f.holds(rank(1, 0), tt.prefill, tt.held, tt.requests)
			f.holds(rank(2, 0), tt.other, 0, 1)
			q := router.Query{PromptTokens: tt.isl, BlockSize: tt.block, Shared: tt.shared, Override: &tt.override}
			if tt.dev+tt.host+tt.disk > 0 {
				q.Overlaps = &kvindex.Matches{Ranks: []kvindex.Match{has(rank(1, 0), tt.dev, tt.host, tt.disk)}}
			}
			got := f.terms(q)[rank(1, 0)]
			if !near(got.RawBlocks, tt.raw) || !near(got.CreditBlocks, tt.credit) || !near(got.Cost, tt.want) {
				t.Errorf("terms = %+v, want raw %v, credit %v, cost %v", got, tt.raw, tt.credit, tt.want)
			}
		})
	}
}

func scale(s float64) func(*router.CostConfig) {
	return func(c *router.CostConfig) { c.PrefillLoadScale = s }
}

func decay(d float64) func(*router.CostConfig) {
	return func(c *router.CostConfig) { c.OverlapScoreCreditDecay = d }
}

func requests(r float64) func(*router.CostConfig) {
	return func(c *router.CostConfig) { c.DecodeActiveRequestWeight = r }
}

func decodeOnly(credit, request float64) func(*router.CostConfig) {
	return func(c *router.CostConfig) {
		c.DecodeOnly, c.TrackPrefillTokens = true, false
		c.OverlapScoreCredit, c.DecodeActiveRequestWeight = credit, request
	}
}

func TestTaints(t *testing.T) {
	tainted := record(t, 1, 1)
	tainted.Taints = []string{"b", "a"}
	for _, tt := range []struct {
		name       string
		held       [2]uint64 // blocks of the tainted one, and of the other
		q          router.Query
		first      float64
		second     float64
		wins       worker.ID
		wantErr    error
		candidates int
	}{
		{"row 40 against 41", [2]uint64{100, 90}, router.Query{Preferred: []router.Preference{{Taint: "a", Weight: .85}}}, 50.605033, 91, 1, nil, 2},
		{"row 42", [2]uint64{90, 100}, router.Query{Preferred: []router.Preference{{Taint: "a", Weight: -.25}}}, 116.254083, 101, 2, nil, 2},
		{"row 43", [2]uint64{}, router.Query{Taints: []string{"c"}}, 0, 0, 0, router.ErrUnroutable, 0},
		{"weights add up", [2]uint64{9, 9}, router.Query{Preferred: []router.Preference{{Taint: "a", Weight: .5}, {Taint: "b", Weight: .35}}}, 10 * 0.501040, 10, 1, nil, 2},
		{"those of others do not count", [2]uint64{9, 8}, router.Query{Preferred: []router.Preference{{Taint: "c", Weight: 1}}}, 10, 9, 2, nil, 2},
		{"required by all that it has", [2]uint64{90, 0}, router.Query{Taints: []string{"a", "b"}}, 91, 0, 1, nil, 1},
		{"required and one is missing", [2]uint64{}, router.Query{Taints: []string{"a", "c"}}, 0, 0, 0, router.ErrUnroutable, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newScheduled(t, nil, tainted, record(t, 2, 1))
			f.holds(rank(1, 0), 0, tt.held[0], 1)
			f.holds(rank(2, 0), 0, tt.held[1], 1)
			var terms []router.Terms
			tt.q.PromptTokens, tt.q.NoBooking, tt.q.Explain = 16, true, &terms
			sel, err := f.p.Select(tt.q, start)
			if err != tt.wantErr || len(terms) != tt.candidates {
				t.Fatalf("Select = %v with %d candidates, want %v with %d", err, len(terms), tt.wantErr, tt.candidates)
			}
			if err != nil {
				return
			}
			if sel.Rank.Worker != tt.wins || math.Abs(terms[0].Cost-tt.first) > 1e-5 {
				t.Errorf("chosen is %v with costs %v, want %v with %v first", sel.Rank.Worker, terms, tt.wins, tt.first)
			}
			if len(terms) > 1 && math.Abs(terms[1].Cost-tt.second) > 1e-5 {
				t.Errorf("the other costs %v, want %v", terms[1].Cost, tt.second)
			}
		})
	}
}

// TestShortLife is rows 52 to 60.
func TestShortLife(t *testing.T) {
	const isl = 64
	h := []uint64{1, 2, 3, 4}
	begin := func(t *testing.T, track *bool) (f *rig, a, b worker.Rank) {
		f = newScheduled(t, nil, record(t, 1, 1), record(t, 2, 1))
		sel, err := f.p.Select(router.Query{Reservation: "r1", PromptTokens: isl, SequenceHashes: h, Override: &router.Override{TrackPrefillTokens: track}}, start)
		if err != nil {
			t.Fatal(err)
		}
		return f, sel.Rank, rank(3-sel.Rank.Worker, 0)
	}
	costs := func(f *rig, q router.Query, a, b worker.Rank, wantA, wantB float64) {
		t.Helper()
		if got := f.terms(q); got[a].Cost != wantA || got[b].Cost != wantB {
			t.Errorf("costs of %+v = %v and %v, want %v and %v", q, got[a].Cost, got[b].Cost, wantA, wantB)
		}
	}
	load := func(f *rig, r worker.Rank, want tracker.Load) {
		t.Helper()
		if got := f.p.Tracker.Load(r, start); got != want {
			t.Errorf("load of %+v = %+v, want %+v", r, got, want)
		}
	}
	take := func(f *rig, q router.Query, want worker.Rank) router.Selection {
		t.Helper()
		sel, err := f.p.Select(q, start)
		if err != nil || sel.Rank != want {
			t.Errorf("Select(%+v) = %+v, %v, want %+v", q, sel.Rank, err, want)
		}
		return sel
	}
	same := func(id string) router.Query {
		return router.Query{Reservation: id, PromptTokens: isl, SequenceHashes: h}
	}

	f, a, b := begin(t, nil)
	load(f, a, tracker.Load{PrefillTokens: 64, DecodeBlocks: 4, Requests: 1}) // 52
	costs(f, same(""), a, b, 12, 8)                                           // 53
	take(f, same("r2"), b)
	load(f, b, tracker.Load{PrefillTokens: 64, DecodeBlocks: 4, Requests: 1})
	f.p.PrefillDone("r1", start) // 54
	load(f, a, tracker.Load{DecodeBlocks: 4, Requests: 1})
	costs(f, same(""), a, b, 8, 12) // 55
	take(f, same("r3"), a)
	load(f, a, tracker.Load{PrefillTokens: 64, DecodeBlocks: 4, Requests: 2})
	r4 := router.Query{PromptTokens: 16, SequenceHashes: []uint64{9}}
	costs(f, r4, a, b, 10, 10) // 56
	f.p.Free("r1", start)      // 60
	load(f, a, tracker.Load{PrefillTokens: 64, DecodeBlocks: 4, Requests: 1})

	f, a, b = begin(t, nil) // 57, from 53 on
	take(f, same("r2"), b)
	f.p.PrefillDone("r1", start)
	take(f, same("r3"), a)
	g := newScheduled(t, requests(1), record(t, 1, 1), record(t, 2, 1))
	g.holds(rank(1, 0), 64, 4, 2)
	g.holds(rank(2, 0), 64, 4, 1)
	costs(g, r4, rank(1, 0), rank(2, 0), 12, 11)

	f, a, b = begin(t, new(false)) // 58
	load(f, a, tracker.Load{DecodeBlocks: 4, Requests: 1})
	q := same("")
	q.Override = &router.Override{TrackPrefillTokens: new(false)}
	costs(f, q, a, b, 4, 4)

	f, a, b = begin(t, nil) // 59
	take(f, same("r2"), b)
	f.p.PrefillDone("r1", start)
	q = same("r3")
	q.Overlaps = &kvindex.Matches{Ranks: []kvindex.Match{has(a, 4, 0, 0)}}
	costs(f, q, a, b, 4, 12)
	if sel := take(f, q, a); sel.EffectivePrefillTokens != 0 {
		t.Errorf("effective prefill tokens = %d, want 0", sel.EffectivePrefillTokens)
	}
	load(f, a, tracker.Load{DecodeBlocks: 4, Requests: 2})
	for _, id := range []string{"r1", "r2", "r3"} {
		f.p.Free(id, start)
	}
	f.checkEmpty()
}

func TestSharedBeyond(t *testing.T) {
	for _, tt := range []struct {
		row    int
		spans  []router.Span
		device int
		want   int
	}{
		{86, []router.Span{{From: 0, To: 4}}, 2, 2},
		{86, []router.Span{{From: 0, To: 4}}, 0, 4},
		{87, []router.Span{{From: 0, To: 2}, {From: 5, To: 8}}, 1, 4},
		{87, []router.Span{{From: 0, To: 2}, {From: 5, To: 8}}, 6, 2},
		{87, []router.Span{{From: 0, To: 2}, {From: 5, To: 8}}, 8, 0},
	} {
		if got := router.Beyond(tt.spans, tt.device); got != tt.want {
			t.Errorf("row %d: Beyond(%v, %d) = %d, want %d", tt.row, tt.spans, tt.device, got, tt.want)
		}
	}
}

func TestCreditBlocks(t *testing.T) {
	cfg := router.DefaultCostConfig()
	w := cfg.Weights(&router.Override{OverlapScoreCredit: new(.5)})
	if got := w.CreditBlocks(kvindex.Match{Device: 2, Host: 1}, 0); got != 1.75 {
		t.Errorf("row 88: CreditBlocks = %v, want 1.75", got)
	}
	cfg.HostCacheHitWeight, cfg.DiskCacheHitWeight = .25, .1
	w = cfg.Weights(&router.Override{OverlapScoreCredit: new(.5), SharedCacheMultiplier: new(.5)})
	if got := w.CreditBlocks(kvindex.Match{Device: 2, Host: 1, Disk: 2}, router.Beyond([]router.Span{{From: 0, To: 4}}, 2)); !near(got, 2.45) {
		t.Errorf("row 89: CreditBlocks = %v, want 2.45", got)
	}
}

func TestCostConfigValidate(t *testing.T) {
	for _, tt := range []struct {
		key    string
		change func(c *router.CostConfig, x float64)
		good   []float64
		bad    []float64
	}{
		{"router-kv-overlap-score-credit", func(c *router.CostConfig, x float64) { c.OverlapScoreCredit = x }, []float64{0, 2}, []float64{-.1, math.Inf(1), math.NaN()}},
		{"router-kv-overlap-score-credit-decay", func(c *router.CostConfig, x float64) { c.OverlapScoreCreditDecay = x }, []float64{0, 9}, []float64{-1, math.NaN()}},
		{"router-prefill-load-scale", func(c *router.CostConfig, x float64) { c.PrefillLoadScale = x }, []float64{0, 9}, []float64{-1, math.NaN()}},
		{"router-kv-overlap-score-weight", func(c *router.CostConfig, x float64) { c.OverlapScoreWeight = &x }, []float64{0, 9}, []float64{-1, math.NaN()}},
		{"router-decode-active-request-weight", func(c *router.CostConfig, x float64) { c.DecodeActiveRequestWeight = x }, []float64{0, 64}, []float64{-1, math.Inf(1), math.NaN()}},
		{"router-host-cache-hit-weight", func(c *router.CostConfig, x float64) { c.HostCacheHitWeight = x }, []float64{0, 1}, []float64{-.1, 1.1, math.NaN()}},
		{"router-disk-cache-hit-weight", func(c *router.CostConfig, x float64) { c.DiskCacheHitWeight = x }, []float64{0, 1}, []float64{-.1, 1.1, math.NaN()}},
		{"router-temperature", func(c *router.CostConfig, x float64) { c.Temperature = x }, []float64{0, 5}, []float64{-.1, math.NaN()}},
		{"router-active-request-expiry-secs", func(c *router.CostConfig, x float64) { c.ActiveRequestExpirySecs = uint64(x) }, []float64{1, 86400}, []float64{0, 1e18}},
	} {
		for _, x := range append(tt.good, tt.bad...) {
			cfg := router.DefaultConfig()
			tt.change(&cfg.Cost, x)
			err := cfg.Validate()
			bad := len(tt.bad) > 0 && err != nil && strings.HasPrefix(err.Error(), tt.key+": ")
			if want := !contains(tt.good, x); bad != want {
				t.Errorf("Validate with %s %v = %v, want an error: %v", tt.key, x, err, want)
			}
		}
	}
}

func contains(all []float64, x float64) bool {
	for _, a := range all {
		if a == x {
			return true
		}
	}
	return false
}

func TestOverride(t *testing.T) {
	base := router.DefaultCostConfig()
	base.OverlapScoreCredit, base.PrefillLoadScale = 2, 3
	for _, tt := range []struct {
		name          string
		o             *router.Override
		credit, scale float64
		temperature   float64
		track, reuse  bool
		bad           string // what the error begins with
	}{
		{"none", nil, 2, 3, 0, true, true, ""},
		{"empty", &router.Override{}, 2, 3, 0, true, true, ""},
		{"all", &router.Override{OverlapScoreCredit: new(.5), PrefillLoadScale: new(4.0), Temperature: new(.7), TrackPrefillTokens: new(false), AssumeKVReuse: new(false)}, .5, 4, .7, false, false, ""},
		{"the old weight is the scale", &router.Override{OverlapScoreWeight: new(5.0), PrefillLoadScale: new(4.0)}, 2, 5, 0, true, true, ""},
		{"and without it no credit", &router.Override{OverlapScoreWeight: new(0.0), OverlapScoreCredit: new(1.0)}, 0, 0, 0, true, true, ""},
		{"credit below 0", &router.Override{OverlapScoreCredit: new(-1.0)}, -1, 3, 0, true, true, "overlap_score_credit: "},
		{"scale", &router.Override{PrefillLoadScale: new(math.NaN())}, 2, math.NaN(), 0, true, true, "prefill_load_scale: "},
		{"weight", &router.Override{OverlapScoreWeight: new(-1.0)}, 2, -1, 0, true, true, "overlap_score_weight: "},
		{"temperature", &router.Override{Temperature: new(-1.0)}, 2, 3, -1, true, true, "router_temperature: "},
		{"multiplier", &router.Override{SharedCacheMultiplier: new(1.1)}, 2, 3, 0, true, true, "shared_cache_multiplier: "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := base.Weights(tt.o)
			same := func(a, b float64) bool { return a == b || math.IsNaN(a) && math.IsNaN(b) }
			if w.Credit != tt.credit || !same(w.Scale, tt.scale) || w.Temperature != tt.temperature || w.TrackPrefill != tt.track || w.AssumeReuse != tt.reuse {
				t.Errorf("Weights = %+v, want %+v", w, tt)
			}
			if tt.o == nil {
				return
			}
			if err := tt.o.Validate(); (err != nil) != (tt.bad != "") || err != nil && !strings.HasPrefix(err.Error(), tt.bad) {
				t.Errorf("Validate = %v, want %q", err, tt.bad)
			}
		})
	}
	cfg := router.DefaultConfig()
	cfg.Cost.LoadAware = true
	if r := cfg.Resolved(); r.Mode != router.KV || r.Cost.OverlapScoreCredit != 0 || r.Cost.UseKVEvents || r.Cost.AssumeKVReuse || !r.Cost.TrackActiveBlocks {
		t.Errorf("Resolved load-aware = %+v", r)
	}
}
