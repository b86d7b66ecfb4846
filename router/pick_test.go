package router_test

import (
	"errors"
	"math"
	"slices"
	"testing"

	"spillway/busy"
	"spillway/router"
	"spillway/worker"
)

// chosen selects n times, each request freed at once unless keep, and returns how often each
// worker was chosen, and in which order.
func (f *rig) chosen(n int, q router.Query, keep bool) (count map[worker.ID]int, order []worker.ID) {
	f.t.Helper()
	count = map[worker.ID]int{}
	for range n {
		sel, id, err := f.ask(q)
		if err != nil {
			f.t.Fatalf("Select(%+v) = %v", q, err)
		}
		if !keep {
			f.p.Free(id, start)
		}
		count[sel.Worker.ID]++
		order = append(order, sel.Worker.ID)
	}
	return count, order
}

func TestRoundRobin(t *testing.T) {
	f := newRig(t, router.RoundRobin, limits(new(0.85), nil), record(t, 30, 1), record(t, 10, 1), record(t, 20, 1), record(t, 40, 1))
	steps := []struct {
		name string
		act  func()
		q    router.Query
		want []worker.ID
	}{
		{"by ID", func() {}, router.Query{}, []worker.ID{10, 20, 30, 40, 10}},
		{"the next one has become busy", func() { f.used(20, 90, 0) }, router.Query{}, []worker.ID{30, 40, 10, 30}},
		{"it is free again", func() { f.used(20, 10, 0) }, router.Query{}, []worker.ID{40, 10, 20, 30}},
		{"the last one is gone", func() { f.r.Unregister(30, start) }, router.Query{}, []worker.ID{40, 10, 20, 40}},
		{"a new one before the next", func() { f.register(record(t, 5, 1)) }, router.Query{}, []worker.ID{5, 10, 20}},
		{"a pin does not count", func() { f.chosen(3, router.Query{Worker: new(worker.ID(5))}, false) }, router.Query{}, []worker.ID{40, 5}},
		{"excluded", func() {}, router.Query{Exclude: []worker.ID{10}}, []worker.ID{20, 40, 5, 20}},
		{"narrowed", func() {}, router.Query{Only: ids(record(t, 5, 1), record(t, 40, 1))}, []worker.ID{40, 5, 40}},
	}
	for _, s := range steps {
		s.act()
		if _, got := f.chosen(len(s.want), s.q, false); !slices.Equal(got, s.want) {
			t.Errorf("%s: chosen %v, want %v", s.name, got, s.want)
		}
	}
}

// TestRoundRobinStaysFair takes one worker after the other out for a while: all have been out
// equally long in the end, and get equal shares.
func TestRoundRobinStaysFair(t *testing.T) {
	f := newRig(t, router.RoundRobin, limits(new(0.85), nil), record(t, 1, 1), record(t, 2, 1), record(t, 3, 1), record(t, 4, 1))
	total := map[worker.ID]int{}
	for round := range 40 {
		out := worker.ID(round%4 + 1)
		f.used(out, 90, 0)
		count, _ := f.chosen(30, router.Query{}, false)
		f.used(out, 10, 0)
		if count[out] != 0 {
			t.Fatalf("round %d: busy worker %v was chosen %d times", round, out, count[out])
		}
		for id, n := range count {
			total[id] += n
		}
	}
	for id := worker.ID(1); id <= 4; id++ {
		if got := total[id]; got < 290 || got > 310 {
			t.Errorf("worker %v was chosen %d times of 1200, want 300", id, got)
		}
	}
}

func TestRandom(t *testing.T) {
	f := newRig(t, router.Random, busy.DefaultConfig(), record(t, 1, 1), record(t, 2, 1), record(t, 3, 1))
	count, _ := f.chosen(6000, router.Query{}, false)
	checkEven(t, count, []worker.ID{1, 2, 3}, 2000)
}

// checkEven fails the test unless each worker was chosen about as often as wanted: within four
// standard deviations of a fair draw.
func checkEven(t *testing.T, count map[worker.ID]int, of []worker.ID, want float64) {
	t.Helper()
	for _, id := range of {
		if off := math.Abs(float64(count[id]) - want); off > 4*math.Sqrt(want) {
			t.Errorf("worker %v was chosen %d times, want about %.0f", id, count[id], want)
		}
	}
}

// TestPowerOfTwo: of n workers with 0, 1, 2, ... requests each, the k-th least loaded wins
// against the n-1-k above it. The shares with replacement, or of a pair that can be one worker
// twice, would differ.
func TestPowerOfTwo(t *testing.T) {
	const n, draws = 4, 12000
	f := newRig(t, router.PowerOfTwo, busy.DefaultConfig())
	for i := range n {
		f.register(record(t, worker.ID(i+1), 1))
		if i > 0 {
			f.chosen(i, router.Query{Worker: new(worker.ID(i + 1))}, true)
		}
	}
	count, _ := f.chosen(draws, router.Query{}, false)
	for i := range n {
		id := worker.ID(i + 1)
		checkEven(t, count, []worker.ID{id}, draws*float64(n-1-i)/(n*(n-1)/2))
	}
	idle := newRig(t, router.PowerOfTwo, busy.DefaultConfig(), record(t, 1, 1), record(t, 2, 1), record(t, 3, 1))
	count, _ = idle.chosen(6000, router.Query{}, false)
	checkEven(t, count, []worker.ID{1, 2, 3}, 2000)
	alone := newRig(t, router.PowerOfTwo, busy.DefaultConfig(), record(t, 1, 1))
	alone.chosen(10, router.Query{}, true)
}

func TestLeastLoaded(t *testing.T) {
	f := newRig(t, router.LeastLoaded, busy.DefaultConfig(), record(t, 1, 1), record(t, 2, 2), record(t, 3, 1))
	f.chosen(5, router.Query{Worker: new(worker.ID(1))}, true)
	f.chosen(2, router.Query{Worker: new(worker.ID(2))}, true) // two ranks: what counts is the worker's total
	count, _ := f.chosen(8, router.Query{}, true)
	if count[1] != 0 || count[2] != 3 || count[3] != 5 {
		t.Errorf("chosen %v, want 3 of worker 2 and 5 of worker 3, so that all have 5", count)
	}
	idle := newRig(t, router.LeastLoaded, busy.DefaultConfig(), record(t, 1, 1), record(t, 2, 1), record(t, 3, 1))
	count, _ = idle.chosen(6000, router.Query{}, false)
	checkEven(t, count, []worker.ID{1, 2, 3}, 2000)
}

// TestRanks: within a worker the rank with the fewest requests is taken, busy ones never.
func TestRanks(t *testing.T) {
	w := record(t, 1, 4)
	w.DPStart = 8
	f := newRig(t, router.RoundRobin, limits(new(0.85), nil), w)
	f.used(1, 90, 9)
	taken := map[uint32]int{}
	for range 300 {
		sel, _, err := f.ask(router.Query{PromptTokens: 10})
		if err != nil || !sel.MultiRank {
			t.Fatalf("Select = %+v, %v, want a rank that is named", sel, err)
		}
		taken[sel.Rank.DP]++
	}
	if taken[8] != 100 || taken[10] != 100 || taken[11] != 100 || len(taken) != 3 {
		t.Errorf("ranks taken = %v, want 100 each of 8, 10, 11", taken)
	}
	f.used(1, 90, 8, 9, 10, 11)
	if _, _, err := f.ask(router.Query{}); !errors.Is(err, router.ErrOverloaded) {
		t.Errorf("Select with all ranks busy = %v, want ErrOverloaded", err)
	}
}

// TestIdleRanksAreDrawnEvenly: the first of equals is not the first in number.
func TestIdleRanksAreDrawnEvenly(t *testing.T) {
	f := newRig(t, router.RoundRobin, busy.DefaultConfig(), record(t, 1, 3))
	count := map[worker.ID]int{}
	for range 3000 {
		sel, id, err := f.ask(router.Query{})
		if err != nil {
			t.Fatal(err)
		}
		count[worker.ID(sel.Rank.DP)]++
		f.p.Free(id, start)
	}
	checkEven(t, count, []worker.ID{0, 1, 2}, 1000)
}

// TestRankKinds: which rank is booked, and whether the worker is told of it.
func TestRankKinds(t *testing.T) {
	byEngine := record(t, 1, 2)
	byEngine.RankRouting = worker.RankByEngine
	for _, tt := range []struct {
		name   string
		w      worker.Worker
		seen   []uint32 // ranks on its metrics page
		busy   []uint32 // those of them that are over the threshold
		ranks  []uint32 // that may be chosen
		named  bool
		booked uint32 // of the last selection, if there is one rank only
	}{
		{name: "undeclared, silent", w: record(t, 1, 0), ranks: []uint32{0}},
		{name: "undeclared, labels itself 3", w: record(t, 1, 0), seen: []uint32{3}, ranks: []uint32{0}},
		{name: "undeclared, two labels", w: record(t, 1, 0), seen: []uint32{4, 7}, ranks: []uint32{4, 7}, named: true},
		{name: "one declared", w: record(t, 1, 1), seen: []uint32{0}, ranks: []uint32{0}},
		{name: "one declared, another seen", w: record(t, 1, 1), seen: []uint32{3}, ranks: []uint32{0}, named: true},
		{name: "two declared, a third seen", w: record(t, 1, 2), seen: []uint32{0, 1, 5}, ranks: []uint32{0, 1}, named: true},
		{name: "43 only the undeclared one is free", w: record(t, 1, 2), seen: []uint32{0, 1, 5}, busy: []uint32{0, 1}, ranks: []uint32{5}, named: true, booked: 5},
		{name: "the engine picks", w: byEngine, seen: []uint32{0, 1}, ranks: []uint32{worker.AnyDP}, booked: worker.AnyDP},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newRig(t, router.RoundRobin, limits(new(0.85), nil), tt.w)
			if tt.seen != nil {
				f.used(1, 10, tt.seen...)
			}
			for _, dp := range tt.busy {
				blocks := uint64(90)
				f.p.Busy.Observe(busy.Sample{Rank: worker.Rank{Worker: 1, DP: dp}, TakenAt: start, KVUsedBlocks: &blocks}, start)
			}
			for range 20 {
				sel, _, err := f.ask(router.Query{PromptTokens: 1})
				if err != nil || !slices.Contains(tt.ranks, sel.Rank.DP) || sel.MultiRank != tt.named {
					t.Fatalf("Select = rank %d, named %v, %v, want one of %v, named %v", sel.Rank.DP, sel.MultiRank, err, tt.ranks, tt.named)
				}
			}
			var requests uint64
			for _, dp := range tt.ranks {
				requests += f.p.Tracker.Load(worker.Rank{Worker: 1, DP: dp}, start).Requests
			}
			if requests != 20 {
				t.Errorf("requests on %v = %d of 20; all: %v", tt.ranks, requests, f.p.Tracker.Loads(start))
			}
		})
	}
}

// TestUndeclaredRankStaysNamed: that only one rank has room does not make it the only rank.
func TestUndeclaredRankStaysNamed(t *testing.T) {
	f := newRig(t, router.RoundRobin, limits(nil, new(uint64(100))), record(t, 1, 0))
	f.used(1, 10, 0, 1)
	for i := range 2 {
		if sel, _, err := f.ask(router.Query{PromptTokens: 101}); err != nil || !sel.MultiRank {
			t.Errorf("Select %d = named %v, %v, want a named rank", i, sel.MultiRank, err)
		}
	}
	if _, _, err := f.ask(router.Query{}); !errors.Is(err, router.ErrOverloaded) {
		t.Errorf("Select = %v, want ErrOverloaded", err)
	}
}

// TestEngineRouted is row 47c: what the engine spreads is compared as spread.
func TestEngineRouted(t *testing.T) {
	w := record(t, 1, 2)
	w.RankRouting = worker.RankByEngine
	f := newRig(t, router.RoundRobin, limits(nil, new(uint64(10000))), w)
	admitted := 0
	for range 200 {
		if _, _, err := f.ask(router.Query{PromptTokens: 200}); err == nil {
			admitted++
		}
	}
	if admitted != 101 { // 20,000 tokens are 10,000 on each rank, not over it
		t.Errorf("47c: admitted %d, want 101", admitted)
	}
}

func TestPins(t *testing.T) {
	byEngine := record(t, 3, 4)
	byEngine.RankRouting = worker.RankByEngine
	two, four, none := record(t, 1, 2), record(t, 2, 4), record(t, 4, 0)
	four.DPStart = 1 // ranks 1 to 4
	type place struct {
		id worker.ID
		dp uint32
	}
	for _, tt := range []struct {
		name string
		off  bool // no thresholds
		act  func(f *rig)
		q    router.Query
		want error
		to   []place
	}{
		{name: "worker", q: router.Query{Worker: new(worker.ID(1))}, to: []place{{1, 0}, {1, 1}}},
		{name: "worker and rank", q: router.Query{Worker: new(worker.ID(1)), DP: new(uint32(1))}, to: []place{{1, 1}}},
		{name: "a rank that the worker does not have", q: router.Query{Worker: new(worker.ID(1)), DP: new(uint32(2))}, want: router.ErrPinUnknown},
		{name: "a rank that few have", q: router.Query{DP: new(uint32(4))}, to: []place{{2, 4}}},
		{name: "a rank that some have", q: router.Query{DP: new(uint32(1))}, to: []place{{1, 1}, {2, 1}, {3, 1}}},
		{name: "a rank that nobody has", q: router.Query{DP: new(uint32(5))}, want: router.ErrPinUnknown},
		{name: "the unset rank", q: router.Query{DP: new(uint32(worker.AnyDP))}, want: router.ErrPinUnknown},
		{name: "rank 0 of an undeclared worker", q: router.Query{Worker: new(worker.ID(4)), DP: new(uint32(0))}, to: []place{{4, 0}}},
		{name: "rank 1 of an undeclared worker", q: router.Query{Worker: new(worker.ID(4)), DP: new(uint32(1))}, want: router.ErrPinUnknown},
		{name: "a rank of an engine that picks itself", q: router.Query{Worker: new(worker.ID(3)), DP: new(uint32(2))}, to: []place{{3, 2}}},
		{name: "outside the narrowed set", q: router.Query{Worker: new(worker.ID(1)), Only: ids(four)}, want: router.ErrPinUnknown},
		{name: "a rank outside the narrowed set", q: router.Query{DP: new(uint32(4)), Only: ids(two)}, want: router.ErrPinUnknown},
		{name: "inside the narrowed set", q: router.Query{DP: new(uint32(1)), Only: ids(two, none)}, to: []place{{1, 1}}},
		{name: "a rank, its worker excluded", q: router.Query{DP: new(uint32(4)), Exclude: []worker.ID{2}}, want: router.ErrUnroutable},
		{name: "a worker that has failed", q: router.Query{Worker: new(worker.ID(1)), Exclude: []worker.ID{1}}, want: router.ErrUnroutable},
		{name: "a busy rank", act: func(f *rig) { f.used(1, 90, 0) }, q: router.Query{Worker: new(worker.ID(1)), DP: new(uint32(0))}, want: router.ErrPinBusy},
		{name: "beside a busy rank", act: func(f *rig) { f.used(1, 90, 0) }, q: router.Query{Worker: new(worker.ID(1)), DP: new(uint32(1))}, to: []place{{1, 1}}},
		{name: "a rank that is busy on one worker", act: func(f *rig) { f.used(1, 90, 0) }, q: router.Query{DP: new(uint32(0)), Only: ids(two, none)}, to: []place{{4, 0}}},
		{name: "a busy rank, nobody else", act: func(f *rig) { f.used(2, 90, 4) }, q: router.Query{DP: new(uint32(4))}, want: router.ErrPinBusy},
		{name: "a marked rank", act: func(f *rig) { f.p.Busy.Mark(1, new(uint32(0)), 0, start) }, q: router.Query{Worker: new(worker.ID(1)), DP: new(uint32(0))}, want: router.ErrPinBusy},
		{name: "a marked rank without thresholds", off: true, act: func(f *rig) { f.p.Busy.Mark(1, new(uint32(0)), 0, start) },
			q: router.Query{Worker: new(worker.ID(1)), DP: new(uint32(0))}, to: []place{{1, 0}}},
		{name: "marked on one worker without thresholds", off: true, act: func(f *rig) { f.p.Busy.Mark(1, new(uint32(1)), 0, start) },
			q: router.Query{DP: new(uint32(1)), Only: ids(two, four)}, to: []place{{2, 1}}},
		{name: "narrowed to a marked worker without thresholds", off: true, act: func(f *rig) { f.p.Busy.Mark(1, nil, 0, start) },
			q: router.Query{Only: ids(two)}, to: []place{{1, 0}, {1, 1}}},
		{name: "narrowed to a busy worker", act: func(f *rig) { f.used(1, 90, 0, 1) }, q: router.Query{Only: ids(two)}, want: router.ErrOverloaded},
		{name: "narrowed to nobody", q: router.Query{Only: ids()}, want: router.ErrUnroutable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := limits(new(0.85), nil)
			if tt.off {
				cfg = busy.DefaultConfig()
			}
			f := newRig(t, router.RoundRobin, cfg, two, four, byEngine, none)
			if tt.act != nil {
				tt.act(f)
			}
			seen := map[place]bool{}
			for range 100 {
				sel, id, err := f.ask(tt.q)
				if !errors.Is(err, tt.want) {
					t.Fatalf("Select(%+v) = %v, want %v", tt.q, err, tt.want)
				}
				if err == nil {
					seen[place{sel.Worker.ID, sel.Rank.DP}] = true
					if sel.MultiRank != (sel.Worker.DPSize > 1) {
						t.Errorf("Select(%+v) names rank: %v, for %d ranks", tt.q, sel.MultiRank, sel.Worker.DPSize)
					}
				}
				f.p.Free(id, start)
			}
			for _, p := range tt.to {
				if !seen[p] {
					t.Errorf("%+v was never chosen; chosen: %v", p, seen)
				}
				delete(seen, p)
			}
			if len(seen) > 0 {
				t.Errorf("also chosen: %v", seen)
			}
		})
	}
}

// TestDuplicate: an ID that is booked is our own bug, and changes nothing.
func TestDuplicate(t *testing.T) {
	f := newRig(t, router.RoundRobin, busy.DefaultConfig(), record(t, 1, 1))
	q := router.Query{Reservation: "x", PromptTokens: 5}
	if _, err := f.p.Select(q, start); err != nil {
		t.Fatal(err)
	}
	if _, err := f.p.Select(q, start); !errors.Is(err, errDuplicate) {
		t.Errorf("Select twice = %v, want ErrDuplicate", err)
	}
	f.p.Free("x", start)
	f.checkEmpty()
}
