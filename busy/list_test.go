package busy_test

import (
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"spillway/busy"
	"spillway/worker"
)

func TestRoutable(t *testing.T) {
	l := busy.New(busy.DefaultConfig(), books{})
	want := func(what string, state busy.State, routable bool) {
		t.Helper()
		st := l.Workers(t0)[0]
		if st.State != state || st.Routable != routable || (len(l.Snapshot().Routable) == 1) != routable {
			t.Errorf("%s: %s routable=%v, want %s %v", what, st.State, st.Routable, state, routable)
		}
	}
	l.Register(&worker.Worker{ID: w7, Name: "w"}, t0)
	want("new", busy.StateUnknown, true)
	l.SetHealthy(w7, true, t0)
	want("probed", busy.StateFree, true)
	l.SetHealthy(w7, false, t0)
	want("probe failed", busy.StateUnhealthy, false)
	l.SetHealthy(w7, true, t0)
	l.Inhibit(w7, at(5), t0)
	want("inhibited", busy.StateInhibited, false)
	l.Inhibit(w7, at(2), t0) // an earlier end changes nothing
	l.Tick(at(4.999))
	want("inhibited", busy.StateInhibited, false)
	l.Tick(at(5))
	want("its end", busy.StateFree, true)
	l.Inhibit(w7, at(10), at(5))
	l.SetHealthy(w7, true, at(6))
	want("a good probe ends it", busy.StateFree, true)
	l.SetCircuit(w7, true, at(6))
	l.SetHealthy(w7, true, at(6))
	want("a good probe closes no circuit", busy.StateInhibited, false)
	l.SetCircuit(w7, false, at(6))
	l.SetDraining(w7, true, at(6))
	want("draining", busy.StateDraining, false)
	l.SetDraining(w7, false, at(6))
	want("stays", busy.StateFree, true)
}

// Calls about workers that are not registered do nothing and keep nothing.
func TestUnknownWorker(t *testing.T) {
	l := busy.New(config(t, "0.5,0,-"), books{})
	before := l.Snapshot()
	l.Observe(ranks(t, "r0{U=1 T=1}")[0].sample(w7, true, t0), t0)
	l.Scraped(w7, []busy.Sample{ranks(t, "r0{U=1 T=1}")[0].sample(w7, true, t0)}, true, t0)
	l.Refresh(w7, t0)
	l.SetHealthy(w7, false, t0)
	l.Inhibit(w7, at(5), t0)
	l.Mark(w7, nil, 0, t0)
	l.Unregister(w7, t0)
	if _, ok := l.Slot(w7); ok || l.Snapshot() != before || len(l.Workers(t0)) != 0 {
		t.Error("an unknown worker left traces")
	}
	if next, ok := l.Tick(t0); ok {
		t.Errorf("Tick = %v, want nothing due", next)
	}
}

func TestSnapshotChangesOnlyWithContent(t *testing.T) {
	b := books{}
	l := busy.New(config(t, "-,10,-"), b)
	l.Register(&worker.Worker{ID: w7}, t0)
	last := l.Snapshot()
	changed := func(what string, want bool) {
		t.Helper()
		if got := l.Snapshot() != last; got != want {
			t.Errorf("%s: new snapshot = %v, want %v", what, got, want)
		}
		last = l.Snapshot()
	}
	l.Register(&worker.Worker{ID: w7}, t0)
	changed("the same worker", false)
	b[worker.Rank{Worker: w7}] = [2]uint64{0, 10}
	l.Refresh(w7, t0)
	changed("P=10", false)
	b[worker.Rank{Worker: w7}] = [2]uint64{0, 11}
	l.Refresh(w7, t0)
	changed("P=11", true)
	l.SetThresholds(limits(t, "-,5,-"), t0)
	changed("another threshold, same verdict", false)
	l.SetThresholds(limits(t, "-,20,-"), t0)
	changed("another threshold, other verdict", true)
	l.SetThresholds(limits(t, "-,-,-"), t0)
	changed("no threshold", true)
	if st := l.Workers(t0)[0]; st.ToBusy != 1 || st.ToFree != 1 {
		t.Errorf("transitions %d %d, want 1 1", st.ToBusy, st.ToFree)
	}
}

func TestSlots(t *testing.T) {
	l := busy.New(busy.DefaultConfig(), books{})
	for _, id := range []worker.ID{30, 10, 20} {
		l.Register(&worker.Worker{ID: id}, t0)
	}
	l.Unregister(30, t0)
	l.Register(&worker.Worker{ID: 5}, t0)
	l.SetHealthy(10, false, t0)
	s := l.Snapshot()
	got := fmt.Sprint(s.Registered, s.RegisteredSlots, s.Routable, s.RoutableSlots, s.Free, s.FreeSlots, s.SlotCount)
	if want := "[5 10 20] [0 1 2] [5 20] [0 2] [5 20] [0 2] 3"; got != want {
		t.Errorf("snapshot %s, want %s", got, want)
	}
	if slot, ok := l.Slot(20); slot != 2 || !ok {
		t.Errorf("Slot(20) = %d %v, want 2 true", slot, ok)
	}
}

func TestTickTellsWhen(t *testing.T) {
	cfg := config(t, "0.85,-,-")
	cfg.StalePolicy = busy.StaleFree
	l := newLone(t, cfg)
	tick := func(now, want float64) {
		t.Helper()
		next, ok := l.Tick(at(now))
		if ok != (want > 0) || ok && next.Sub(at(want)).Abs() > time.Nanosecond {
			t.Errorf("Tick(%gs) = %v %v, want %gs", now, next.Sub(t0), ok, want)
		}
	}
	tick(0, 0)
	l.Inhibit(w7, at(9), t0)
	tick(0, 9)
	l.Mark(w7, nil, 0, at(1))
	tick(1, 9)
	l.now = at(2)
	l.page("U=1 T=100", at(2))
	tick(3, 7) // the mark ended at 2s; the sample is stale after 7s
	tick(8, 9)
	tick(9, 0)
}

func TestHostilePage(t *testing.T) {
	l := busy.New(config(t, "0.85,-,-"), books{})
	l.Register(&worker.Worker{ID: w7}, t0)
	page := make([]busy.Sample, 3*worker.MaxReportedRanks)
	for i := range page {
		page[i] = busy.Sample{Rank: worker.Rank{Worker: w7, DP: uint32(len(page) - i)}, TakenAt: t0, KVUsedBlocks: new(uint64(1))}
	}
	page[0].Rank.DP = worker.AnyDP
	l.Scraped(w7, page, false, t0)
	st := l.Workers(t0)[0]
	if got, want := len(st.Ranks), worker.MaxReportedRanks; got != want {
		t.Errorf("%d ranks, want %d", got, want)
	}
	if got, want := st.Dropped, uint64(2*worker.MaxReportedRanks); got != want {
		t.Errorf("%d dropped, want %d", got, want)
	}
	// Another declaration on top of a full worker stays within the bound too.
	l.Register(&worker.Worker{ID: w7, DPStart: 1 << 20, DPSize: worker.MaxDPSize}, t0)
	if got, want := len(l.Workers(t0)[0].Ranks), worker.MaxDPSize; got != want {
		t.Errorf("declared anew: %d ranks, want %d", got, want)
	}
}

// Values that are no numbers of a load are as good as no sample.
func TestForeignValues(t *testing.T) {
	for _, ratio := range []float64{math.NaN(), math.Inf(1), math.Inf(-1), -0.5} {
		l := busy.New(config(t, "0.0,-,-"), books{})
		l.Register(&worker.Worker{ID: w7}, t0)
		l.Scraped(w7, []busy.Sample{{Rank: worker.Rank{Worker: w7, DP: 5}, TakenAt: t0, KVUsageRatio: &ratio}}, false, t0)
		if r := l.Workers(t0)[0].Ranks[0]; isBusy(l, w7) || r.Sampled {
			t.Errorf("ratio %v: busy = %v sampled = %v, want neither", ratio, isBusy(l, w7), r.Sampled)
		}
	}
	newLone(t, config(t, "1.0,-,-")).page("ratio=1.5", t0).want("a ratio above 1 compares", true)
}

func TestBlockSize(t *testing.T) {
	l := busy.New(busy.DefaultConfig(), books{})
	want := func(what string, size uint32) {
		t.Helper()
		if got := l.BlockSize(w7); got != size {
			t.Errorf("%s: BlockSize = %d, want %d", what, got, size)
		}
	}
	want("unknown worker", 16)
	l.Register(&worker.Worker{ID: w7}, t0)
	want("nothing told", 16)
	told := func(v uint64) {
		l.Observe(busy.Sample{Rank: worker.Rank{Worker: w7}, TakenAt: t0, BlockSize: &v}, t0)
	}
	told(0)
	want("told 0", 16)
	told(1 << 40)
	want("told nonsense", 16)
	told(64)
	want("told 64", 64)
	l.Register(&worker.Worker{ID: w7, BlockSize: 32}, t0)
	want("configured", 32)
}

func TestStatus(t *testing.T) {
	b := books{{Worker: w7}: {90, 5}}
	l := busy.New(config(t, "0.85,3,0.5"), b)
	l.Register(&worker.Worker{ID: w7, Name: "w", MaxNumBatchedTokens: 100}, t0)
	s := ranks(t, "r3{U=12 T=100}")[0].sample(w7, false, t0)
	s.Running, s.Waiting = new(uint64(4)), new(uint64(2))
	l.Scraped(w7, []busy.Sample{s}, false, t0)
	l.Mark(w7, nil, 0, at(0.24))
	st := l.Workers(at(0.24))[0]
	r := st.Ranks[0]
	if st.Name != "w" || st.State != busy.StateBusy || !st.Busy || !st.Marked || st.ToBusy != 1 {
		t.Errorf("worker status %+v", st)
	}
	if got, want := fmt.Sprint(r.Checks.Names()), "[decode_blocks prefill_tokens backpressure]"; got != want {
		t.Errorf("checks %s, want %s", got, want)
	}
	if r.DP != 0 || r.Age != 240*time.Millisecond || r.Stale || *r.Running != 4 || *r.Waiting != 2 ||
		!r.Signals[busy.Scrape].Known || r.Signals[busy.Event].Known {
		t.Errorf("rank status %+v", r)
	}
	if r.Report.PromisedRatio() != 0.9 || r.Report.ReportedRatio() != 0.12 || r.Report.PrefillRatio() != 0.05 {
		t.Errorf("report %+v", r.Report)
	}
}

func TestSources(t *testing.T) {
	l := busy.New(config(t, "0.85,-,-"), books{{Worker: w7}: {0, 7}})
	l.Register(&worker.Worker{ID: w7}, t0)
	l.Scraped(w7, []busy.Sample{{TakenAt: t0, KVUsedBlocks: new(uint64(90)), KVTotalBlocks: new(uint64(100)), PrefillTokens: new(uint64(9))}}, false, t0)
	l.Observe(busy.Sample{Rank: worker.Rank{Worker: w7}, Source: busy.Event, TakenAt: t0, KVUsedBlocks: new(uint64(10)),
		DecodeBlocks: new(uint64(99)), PrefillTokens: new(uint64(8))}, t0)
	got := l.Workers(t0)[0].Ranks[0].Report
	want := busy.Report{DecodeBlocks: 0, PrefillTokens: 9, UsedBlocks: 10, UsedKnown: true, TotalBlocks: 100}
	if got != want {
		t.Errorf("report %+v, want %+v: U by event, T by page, A of the books, the greatest P", got, want)
	}
	// A page is a page whatever its samples claim, and the event plane is asked first.
	l.Observe(busy.Sample{Rank: worker.Rank{Worker: w7}, Source: busy.Event, TakenAt: t0, Running: new(uint64(1))}, t0)
	l.Scraped(w7, []busy.Sample{{Source: busy.Event, TakenAt: t0, Running: new(uint64(2)), Waiting: new(uint64(3))}}, false, t0)
	if r := l.Workers(t0)[0].Ranks[0]; *r.Running != 1 || *r.Waiting != 3 {
		t.Errorf("running %d waiting %d, want 1 by event and 3 by page", *r.Running, *r.Waiting)
	}
}

func TestValidate(t *testing.T) {
	if err := busy.DefaultConfig().Validate(); err != nil {
		t.Errorf("DefaultConfig: %v", err)
	}
	for _, tt := range []struct {
		change func(*busy.Config)
		want   string // "" for none
	}{
		{func(c *busy.Config) { c.ActiveDecodeBlocksThreshold = new(1.1) }, "active-decode-blocks-threshold: 1.1 "},
		{func(c *busy.Config) { c.ActiveDecodeBlocksThreshold = new(-0.1) }, "active-decode-blocks-threshold: -0.1 "},
		{func(c *busy.Config) { c.ActiveDecodeBlocksThreshold = new(math.NaN()) }, "active-decode-blocks-threshold: NaN "},
		{func(c *busy.Config) { c.ActiveDecodeBlocksThreshold = new(1.0) }, ""},
		{func(c *busy.Config) { c.ActivePrefillTokensThreshold = new(uint64(1 << 63)) }, "active-prefill-tokens-threshold: 9223372036854775808 "},
		{func(c *busy.Config) { c.ActivePrefillTokensThreshold = new(uint64(1<<63 - 1)) }, ""},
		{func(c *busy.Config) { c.ActivePrefillTokensThresholdFrac = new(math.Inf(1)) }, "active-prefill-tokens-threshold-frac: +Inf "},
		{func(c *busy.Config) { c.ActivePrefillTokensThresholdFrac = new(-1.0) }, "active-prefill-tokens-threshold-frac: -1 "},
		{func(c *busy.Config) { c.ActivePrefillTokensThresholdFrac = new(64.0) }, ""},
		{func(c *busy.Config) { c.SignalStaleAfter = 0 }, "signal-stale-after: 0s "},
		{func(c *busy.Config) { c.StalePolicy = "maybe" }, `stale-policy: "maybe" `},
		{func(c *busy.Config) { c.BackpressureHold = 11 * time.Second }, "backpressure-hold: 11s "},
		{func(c *busy.Config) { c.BackpressureHold = -1 }, "backpressure-hold: -1ns "},
		{func(c *busy.Config) { c.BusyReleaseRatio = 0.4 }, "busy-release-ratio: 0.4 "},
		{func(c *busy.Config) { c.BusyReleaseRatio = math.NaN() }, "busy-release-ratio: NaN "},
	} {
		cfg := busy.DefaultConfig()
		tt.change(&cfg)
		err := cfg.Validate()
		if (err == nil) != (tt.want == "") || err != nil && !strings.HasPrefix(err.Error(), tt.want) {
			t.Errorf("Validate = %v, want %q...", err, tt.want)
		}
	}
	err := busy.Thresholds{DecodeFrac: new(2.0), PrefillFrac: new(-1.0)}.Validate()
	for _, name := range []string{"active_decode_blocks_threshold: 2", "active_prefill_tokens_threshold_frac: -1"} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("Validate = %v, want it to name %q", err, name)
		}
	}
}

// The caller's variables are its own.
func TestThresholdsAreCopied(t *testing.T) {
	frac := 0.5
	l := newLone(t, busy.DefaultConfig())
	l.SetThresholds(busy.Thresholds{DecodeFrac: &frac}, t0)
	frac = 0.1
	*l.Thresholds().DecodeFrac = 0.2
	if got := *l.Thresholds().DecodeFrac; got != 0.5 {
		t.Errorf("threshold %v, want 0.5", got)
	}
}

// lockedBooks are books with a lock of their own, as the tracker has.
type lockedBooks struct {
	mu sync.Mutex
	p  uint64
}

func (b *lockedBooks) PrefillFalls(worker.Rank, uint64) (time.Time, bool) { return time.Time{}, false }

func (b *lockedBooks) Promised(worker.Rank, time.Time) (uint64, uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return 0, b.p
}

// TestConcurrentUse is for the race detector; at the end the verdicts must fit the loads.
func TestConcurrentUse(t *testing.T) {
	b := &lockedBooks{}
	l := busy.New(config(t, "0.85,100,-"), b)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 500 {
				id, now := worker.ID(i%5), at(float64(i)/100)
				switch (i + g) % 9 {
				case 0:
					l.Register(&worker.Worker{ID: id, DPSize: 2}, now)
				case 1:
					l.Scraped(id, []busy.Sample{{TakenAt: now, KVUsedBlocks: new(uint64(i))}}, i%7 == 0, now)
				case 2:
					b.mu.Lock()
					b.p = uint64(i % 200)
					b.mu.Unlock()
					l.Refresh(id, now)
				case 3:
					l.Mark(id, nil, 0, now)
				case 4:
					l.Tick(now)
				case 5:
					l.FreeRanks(id, nil)
					l.Workers(now)
				case 6:
					l.SetThresholds(busy.Thresholds{PrefillTokens: new(uint64(i))}, now)
				case 7:
					l.Unregister(id, now)
				default:
					s := l.Snapshot()
					if len(s.Free) > len(s.Routable) || len(s.Routable) > len(s.Registered) {
						t.Errorf("torn snapshot %+v", s)
					}
				}
			}
		})
	}
	wg.Wait()
	b.p = 100
	for id := range worker.ID(5) {
		l.Register(&worker.Worker{ID: id, DPSize: 2}, at(60))
	}
	l.SetThresholds(busy.Thresholds{PrefillTokens: new(uint64(99))}, at(60))
	if got := len(l.Snapshot().Busy); got != 5 {
		t.Errorf("%d busy, want 5", got)
	}
	l.SetThresholds(busy.Thresholds{PrefillTokens: new(uint64(100))}, at(60))
	l.Tick(at(60))
	if got := len(l.Snapshot().Free); got != 5 {
		t.Errorf("%d free, want 5", got)
	}
}
