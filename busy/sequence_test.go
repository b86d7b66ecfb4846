package busy_test

import (
	"fmt"
	"testing"
	"time"

	"spillway/busy"
	"spillway/worker"
)

const w7 = worker.ID(7)

// lone is a list of one undeclared worker, driven step by step.
type lone struct {
	*busy.List
	t     *testing.T
	books books
	now   time.Time
}

func newLone(t *testing.T, cfg busy.Config) *lone {
	b := books{}
	l := &lone{busy.New(cfg, b), t, b, t0}
	l.Register(&worker.Worker{ID: w7}, t0)
	return l
}

func (l *lone) at(seconds float64) *lone { l.now = at(seconds); l.Tick(l.now); return l }

func (l *lone) promise(a, p uint64) *lone {
	l.books[worker.Rank{Worker: w7}] = [2]uint64{a, p}
	l.Refresh(w7, l.now)
	return l
}

// page is a scrape sent at taken and stored now.
func (l *lone) page(text string, taken time.Time) *lone {
	l.Scraped(w7, []busy.Sample{ranks(l.t, "r0{"+text+"}")[0].sample(w7, false, taken)}, false, l.now)
	return l
}

func (l *lone) want(what string, busyWant bool) *lone {
	l.t.Helper()
	if got := isBusy(l.List, w7); got != busyWant {
		l.t.Errorf("%s: busy = %v, want %v", what, got, busyWant)
	}
	return l
}

// set merges limits as a POST does.
func (l *lone) set(triple string) *lone {
	l.SetThresholds(l.Thresholds().Merge(limits(l.t, triple)), l.now)
	return l
}

func TestRow48EngineValueStays(t *testing.T) {
	newLone(t, config(t, "0.6,-,-")).page("U=90 T=100", t0).want("U=90", true).
		promise(10, 0).want("A=10", true).page("U=10 T=100", t0).want("U=10", false)
}

func TestRow49PromiseAlone(t *testing.T) {
	newLone(t, config(t, "0.6,-,-")).page("T=100", t0).promise(90, 0).want("A=90", true).
		promise(10, 0).want("A=10", false)
}

func TestRows50To52ThresholdChange(t *testing.T) {
	newLone(t, config(t, "0.85,-,-")).page("T=100", t0).promise(80, 0).want("row 50 before", false).
		set("0.7,-,-").want("row 50", true).set("0.9,-,-").want("row 51", false)
	l := newLone(t, config(t, "0.7,-,-")).page("T=100", t0).promise(80, 0).want("row 52 before", true)
	th := l.Thresholds()
	th.DecodeFrac = nil
	l.SetThresholds(th, t0)
	l.want("row 52", false)
	if got := l.Thresholds(); got.Any() {
		t.Errorf("row 52: thresholds %+v, want none", got)
	}
	if l.Snapshot().ThresholdsSet {
		t.Error("row 52: snapshot says that thresholds are set")
	}
}

func TestRow53Merge(t *testing.T) {
	l := newLone(t, config(t, "0.85,10000,-")).set("-,5,-")
	if got, want := l.Thresholds(), limits(t, "0.85,5,-"); !got.Equal(want) {
		t.Errorf("row 53: %v %v, want 0.85 and 5", *got.DecodeFrac, *got.PrefillTokens)
	}
}

func TestRow54Reregistered(t *testing.T) {
	l := newLone(t, config(t, "0.85,-,-")).page("U=90 T=100", t0).want("before", true)
	l.Register(&worker.Worker{ID: w7, Name: "again"}, t0)
	l.want("a new record keeps the state", true)
	l.Unregister(w7, t0)
	l.want("row 54 removed", false)
	if got := len(l.Snapshot().Registered); got != 0 {
		t.Errorf("row 54: %d registered, want 0", got)
	}
	l.Register(&worker.Worker{ID: w7}, t0)
	l.want("row 54", false).page("T=100", t0).want("row 54, only T is told", false)
}

func TestRow55FieldsAreMerged(t *testing.T) {
	l := &lone{List: busy.New(config(t, "0.85,-,-"), nil), t: t, now: t0}
	l.Register(&worker.Worker{ID: w7}, t0)
	l.Observe(ranks(t, "r0{A=90 T=100}")[0].sample(w7, true, t0), t0)
	l.want("A=90", true)
	l.Observe(ranks(t, "r0{P=3}")[0].sample(w7, true, t0), t0)
	l.want("row 55", true)
	if got := l.Workers(t0)[0].Ranks[0].Report; got.DecodeBlocks != 90 || got.PrefillTokens != 3 {
		t.Errorf("row 55: A=%v P=%v, want 90 and 3", got.DecodeBlocks, got.PrefillTokens)
	}
}

func TestRows56And57Marks(t *testing.T) {
	l := newLone(t, config(t, "0.85,-,-")).page("U=10 T=100", t0).at(10)
	l.Mark(w7, nil, 0, l.now)
	l.want("marked", true).at(12).page("U=10", at(9.9)).want("row 56", true).
		page("U=10", at(10)).want("taken with the mark", true)
	l = newLone(t, config(t, "0.85,-,-")).page("U=10 T=100", t0).at(10)
	l.Mark(w7, nil, 0, l.now)
	l.at(11.2).page("U=10", at(11.1)).want("row 57", false)
}

func TestMarkLifetime(t *testing.T) {
	for _, tt := range []struct {
		name       string
		hold       time.Duration
		retryAfter time.Duration
		sample     string  // "" for none
		taken      float64 // seconds after the mark
		busyUntil  float64 // last moment at which it is seen busy
		freeAt     float64 // 0: never looked at
	}{
		{"no sample: ten seconds", time.Second, 0, "", 0, 9.999, 10},
		{"an early good sample counts at the end of the hold", time.Second, 0, "U=10", 0.5, 0.999, 1},
		{"the worker asks for longer", time.Second, 3 * time.Second, "U=10", 0.5, 2.999, 3},
		{"the worker asks for less than the hold", 2 * time.Second, time.Second, "U=10", 0.5, 1.999, 2},
		{"the worker asks for too much", time.Second, time.Minute, "U=10", 0.5, 9.999, 10},
		{"a bad sample relieves nothing", time.Second, 0, "U=90", 0.5, 11, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := config(t, "0.85,-,-")
			cfg.BackpressureHold = tt.hold
			l := newLone(t, cfg).page("U=10 T=100", t0)
			l.Mark(w7, nil, tt.retryAfter, t0)
			if tt.sample != "" {
				l.at(tt.taken+0.1).page(tt.sample, at(tt.taken))
			}
			l.at(tt.busyUntil).want(fmt.Sprintf("%gs", tt.busyUntil), true)
			if tt.freeAt > 0 {
				l.at(tt.freeAt).want(fmt.Sprintf("%gs", tt.freeAt), false)
			}
		})
	}
}

// A mark that a bad sample did not relieve ends after ten seconds all the same, and is not
// relieved by the books alone.
func TestMarkNeedsSample(t *testing.T) {
	l := newLone(t, config(t, "0.85,-,-")).page("T=100", t0).promise(90, 0)
	l.Mark(w7, nil, 0, t0)
	l.at(2).page("U=0", at(2)).promise(0, 0).at(9).want("no good sample yet", true).
		at(10).want("ten seconds", false)
}

func TestRankMark(t *testing.T) {
	l := busy.New(config(t, "0.85,-,-"), books{})
	l.Register(&worker.Worker{ID: w7, DPSize: 2}, t0)
	l.Mark(w7, new(uint32(1)), 0, t0)
	if got := l.FreeRanks(w7, nil); len(got) != 1 || got[0].DP != 0 || isBusy(l, w7) {
		t.Errorf("rank 1 marked: FreeRanks = %v busy = %v, want rank 0 and false", got, isBusy(l, w7))
	}
	l.Mark(w7, new(uint32(0)), 0, t0)
	if got := l.FreeRanks(w7, nil); len(got) != 0 || !isBusy(l, w7) {
		t.Errorf("both marked: FreeRanks = %v busy = %v, want none and true", got, isBusy(l, w7))
	}
	l.Mark(w7, new(uint32(9)), 0, t0) // a rank that is gone
	one := busy.Sample{Rank: worker.Rank{Worker: w7, DP: 1}, Source: busy.Event, TakenAt: at(1), KVUsedBlocks: new(uint64(0))}
	l.Observe(one, at(2))
	if got := l.FreeRanks(w7, nil); len(got) != 1 || got[0].DP != 1 {
		t.Errorf("a sample of rank 1: FreeRanks = %v, want rank 1", got)
	}
}

// Marks belong to one worker: news of another changes nothing.
func TestMarkOfAnotherWorker(t *testing.T) {
	l := newLone(t, config(t, "0.85,-,-"))
	l.Register(&worker.Worker{ID: 8}, t0)
	l.Mark(w7, nil, 0, t0)
	l.Observe(ranks(t, "r0{U=1 T=100}")[0].sample(8, true, at(2)), at(2))
	l.want("another worker's sample", true)
}

// Without thresholds a mark is a preference.
func TestMarksWithoutThresholds(t *testing.T) {
	l := busy.New(busy.DefaultConfig(), books{})
	l.Register(&worker.Worker{ID: 1}, t0)
	l.Register(&worker.Worker{ID: 2, DPSize: 2}, t0)
	free := func(what, want string) {
		t.Helper()
		s := l.Snapshot()
		if got := fmt.Sprint(s.Free, s.Busy, s.Marked); got != want {
			t.Errorf("%s: free, busy, marked = %s, want %s", what, got, want)
		}
	}
	free("none", "[1 2] [] []")
	l.Mark(1, nil, 0, t0)
	free("one", "[2] [] [1]")
	l.Mark(2, new(uint32(1)), 0, t0)
	free("and a rank of the other", "[2] [] [1]")
	if got := l.FreeRanks(2, nil); len(got) != 1 || got[0].DP != 0 {
		t.Errorf("FreeRanks = %v, want the unmarked rank 0", got)
	}
	l.SetHealthy(2, false, t0)
	free("the other is gone", "[1] [] [1]")
	l.SetHealthy(2, true, t0)
	l.Mark(2, nil, 0, t0)
	free("both", "[1 2] [] [1 2]")
	if got := l.FreeRanks(2, nil); len(got) != 2 {
		t.Errorf("FreeRanks = %v, want both", got)
	}
	if got := l.Workers(t0)[0].State; got != busy.StateUnknown {
		t.Errorf("state of a marked worker = %s, want %s", got, busy.StateUnknown)
	}
}

func TestRows58And59Stale(t *testing.T) {
	for _, tt := range []struct {
		row    int
		sample string
		policy string
		want   bool
	}{
		{58, "U=90 T=100", busy.StaleHold, true},
		{58, "U=90 T=100", busy.StaleFree, false},
		{58, "U=90 T=100", busy.StaleBusy, true},
		{59, "U=10 T=100", busy.StaleHold, false},
		{59, "U=10 T=100", busy.StaleFree, false},
		{59, "U=10 T=100", busy.StaleBusy, true},
	} {
		t.Run(fmt.Sprintf("row %d %s", tt.row, tt.policy), func(t *testing.T) {
			cfg := config(t, "0.85,-,-")
			cfg.StalePolicy = tt.policy
			fresh := tt.sample == "U=90 T=100"
			l := newLone(t, cfg).page(tt.sample, t0).want("fresh", fresh).
				at(5).want("5s is not yet stale", fresh).at(6).want("6s", tt.want)
			if r := l.Workers(l.now)[0].Ranks[0]; !r.Stale || r.Age != 6*time.Second {
				t.Errorf("stale = %v age = %v, want true and 6s", r.Stale, r.Age)
			}
			l.page("U=1", at(6)).want("a fresh sample", false)
		})
	}
}

// What was stale from the start proves nothing, and a stale page takes nothing from the books.
func TestStaleDetails(t *testing.T) {
	cfg := config(t, "0.85,-,-")
	cfg.StalePolicy = busy.StaleBusy
	newLone(t, cfg).at(20).page("U=1 T=100", t0).want("never fresh", false)
	newLone(t, cfg).at(20).want("never sampled", false)
	cfg.StalePolicy = busy.StaleFree
	newLone(t, cfg).page("U=1 T=100", t0).at(6).promise(90, 0).want("A=90 of the T last told", true)
}

func TestRestart(t *testing.T) {
	l := newLone(t, config(t, "0.85,10000,-")).page("U=90 T=100", t0).want("before", true)
	l.Scraped(w7, []busy.Sample{ranks(t, "r0{T=100}")[0].sample(w7, false, t0)}, true, t0)
	l.want("engine values are gone", false).promise(90, 0)
	l.Scraped(w7, nil, true, t0)
	l.want("T as well", false).promise(0, 10001).want("the books stay", true)
}

func TestHysteresis(t *testing.T) {
	cfg := config(t, "0.8,1000,-")
	cfg.BusyReleaseRatio = 0.5
	l := newLone(t, cfg).page("T=100", t0)
	l.promise(50, 0).want("below", false).promise(81, 0).want("over", true).
		promise(41, 0).want("above half of it", true).promise(40, 0).want("not above half", false).
		promise(41, 0).want("released", false)
	l.promise(81, 1001).want("two checks", true).promise(41, 0).want("decode still", true).
		set("0.8,-,-").want("a threshold change resets", false)
	l.promise(0, 1001).promise(0, 501).want("prefill above half", true).promise(81, 501).
		promise(0, 500).want("prefill not above half", false)
	// The engine's value is held on its own account, not on that of the books.
	l.page("U=81", t0).promise(0, 0).page("U=41", t0).want("reported above half", true).
		promise(60, 0).page("U=40", t0).want("promised was never over", false)
}

// TestRows60To62 books by the limits of the rooms, as Reserve does.
func TestRows60To62(t *testing.T) {
	for _, tt := range []struct {
		row          int
		workers      int
		requests     int
		tokens       uint64
		admittedWant int
	}{
		{60, 1, 100, 200, 51},
		{61, 2, 200, 200, 102},
		{62, 1, 2, 60000, 1},
	} {
		b := books{}
		l := busy.New(config(t, "-,10000,-"), b)
		for i := range tt.workers {
			l.Register(&worker.Worker{ID: worker.ID(i + 1)}, t0)
		}
		admitted := 0
		for range tt.requests {
			for _, id := range l.Snapshot().Free {
				rank := worker.Rank{Worker: id}
				rooms := l.FreeRanks(id, nil)
				if len(rooms) != 1 || b[rank][1] > rooms[0].MaxPrefillTokens {
					t.Fatalf("row %d: worker %d is free at P=%d but has rooms %v", tt.row, id, b[rank][1], rooms)
				}
				b[rank] = [2]uint64{0, b[rank][1] + tt.tokens}
				l.Refresh(id, t0)
				admitted++
				break
			}
		}
		if admitted != tt.admittedWant {
			t.Errorf("row %d: admitted %d of %d, want %d", tt.row, admitted, tt.requests, tt.admittedWant)
		}
		if tt.row == 62 {
			b[worker.Rank{Worker: 1}] = [2]uint64{}
			l.Refresh(1, t0)
			if isBusy(l, 1) {
				t.Error("row 62: busy after the first token")
			}
		}
	}
}

// TestSignalRow25 is the last row of the signals' tables: worker and router report apart.
func TestSignalRow25(t *testing.T) {
	l := busy.New(config(t, "0.85,-,-"), nil)
	l.Register(&worker.Worker{ID: w7, KVTotalBlocks: 1000}, t0)
	l.Observe(ranks(t, "r0{U=870}")[0].sample(w7, true, t0), t0)
	l.Observe(ranks(t, "r0{A=20}")[0].sample(w7, true, t0), t0)
	if got := l.Workers(t0)[0].Ranks[0].Report; !isBusy(l, w7) || got.UsedBlocks != 870 || got.DecodeBlocks != 20 {
		t.Errorf("busy = %v U=%d A=%v, want true, 870, 20", isBusy(l, w7), got.UsedBlocks, got.DecodeBlocks)
	}
}
