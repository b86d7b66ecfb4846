package router_test

import (
	"errors"
	"testing"
	"time"

	"spillway/busy"
	"spillway/router"
	"spillway/worker"
)

// TestStatus is the rows of the status decisions that the router makes. All is decided at a
// decode threshold of 0.85 unless off.
func TestStatus(t *testing.T) {
	full := func(ids ...worker.ID) func(*rig) {
		return func(f *rig) {
			for _, id := range ids {
				f.used(id, 90, 0)
			}
		}
	}
	inhibited := func(f *rig, id worker.ID) { f.p.Busy.Inhibit(id, start.Add(time.Second), start) }
	w1, w2, unknown := worker.ID(1), worker.ID(2), worker.ID(9)
	one, two := []worker.ID{1}, []worker.ID{1, 2}
	for _, tt := range []struct {
		name    string
		workers []worker.ID
		off     bool
		given   func(*rig)
		q       router.Query
		want    error
		to      worker.ID
	}{
		{name: "64 none registered", want: router.ErrNoWorkers},
		{name: "64 none registered, pinned", q: router.Query{Worker: &w1}, want: router.ErrNoWorkers},
		{name: "65 inhibited", workers: one, given: func(f *rig) { inhibited(f, 1) }, want: router.ErrUnroutable},
		{name: "65 unhealthy", workers: one, given: func(f *rig) { f.p.Busy.SetHealthy(1, false, start) }, want: router.ErrUnroutable},
		{name: "66 all busy", workers: two, given: full(1, 2), want: router.ErrOverloaded},
		{name: "67 one free", workers: two, given: full(1), to: 2},
		{name: "68 busy and inhibited", workers: two, given: func(f *rig) { full(1)(f); inhibited(f, 2) }, want: router.ErrOverloaded},
		{name: "68 busy and inhibited is no overload of the other", workers: two, given: func(f *rig) { full(1)(f); inhibited(f, 1); inhibited(f, 2) }, want: router.ErrUnroutable},
		{name: "70 pinned to a busy one", workers: two, given: full(2), q: router.Query{Worker: &w2}, want: router.ErrPinBusy},
		{name: "71 pinned to an unknown one", workers: one, q: router.Query{Worker: &unknown}, want: router.ErrPinUnknown},
		{name: "71 before not routable", workers: one, given: func(f *rig) { inhibited(f, 1) }, q: router.Query{Worker: &unknown}, want: router.ErrPinUnknown},
		{name: "pinned and not routable", workers: two, given: func(f *rig) { inhibited(f, 1) }, q: router.Query{Worker: &w1}, want: router.ErrUnroutable},
		{name: "pinned, busy and not routable", workers: two, given: func(f *rig) { full(1)(f); inhibited(f, 1) }, q: router.Query{Worker: &w1}, want: router.ErrUnroutable},
		{name: "pinned to a free one", workers: two, given: full(2), q: router.Query{Worker: &w1}, to: 1},
		{name: "76 marked after a refusal", workers: two, given: func(f *rig) { f.p.Busy.Mark(1, nil, 0, start) }, q: router.Query{Exclude: one}, to: 2},
		{name: "77 nobody else", workers: one, given: func(f *rig) { f.p.Busy.Mark(1, nil, 0, start) }, q: router.Query{Exclude: one}, want: router.ErrUnroutable},
		{name: "marks alone are overload", workers: two, given: func(f *rig) { f.p.Busy.Mark(1, nil, 0, start); f.p.Busy.Mark(2, nil, 0, start) }, want: router.ErrOverloaded},
		{name: "79 no thresholds, one marked", workers: two, off: true, given: func(f *rig) { full(1, 2)(f); f.p.Busy.Mark(1, nil, 0, start) }, to: 2},
		{name: "79 all marked", workers: one, off: true, given: func(f *rig) { f.p.Busy.Mark(1, nil, 0, start) }, to: 1},
		{name: "79 pinned to the marked one", workers: two, off: true, given: func(f *rig) { f.p.Busy.Mark(1, nil, 0, start) }, q: router.Query{Worker: &w1}, to: 1},
		{name: "79 pinned to its rank", workers: two, off: true, given: func(f *rig) { f.p.Busy.Mark(1, nil, 0, start) }, q: router.Query{Worker: &w1, DP: new(uint32(0))}, to: 1},
		{name: "79 the unmarked one has failed", workers: two, off: true, given: func(f *rig) { f.p.Busy.Mark(1, nil, 0, start) }, q: router.Query{Exclude: []worker.ID{2}}, to: 1},
		{name: "excluded leaves the busy one", workers: two, given: full(1), q: router.Query{Exclude: []worker.ID{2}}, want: router.ErrOverloaded},
		{name: "all excluded", workers: two, q: router.Query{Exclude: two}, want: router.ErrUnroutable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := limits(new(0.85), nil)
			if tt.off {
				cfg = busy.DefaultConfig()
			}
			f := newRig(t, router.RoundRobin, cfg, record(t, 5, 1))
			for _, id := range tt.workers {
				f.register(record(t, id, 1))
			}
			f.r.Unregister(5, start)
			if tt.given != nil {
				tt.given(f)
			}
			for range 3 { // not by luck of the draw
				sel, id, err := f.ask(tt.q)
				if !errors.Is(err, tt.want) {
					t.Fatalf("Select(%+v) = %v, want %v", tt.q, err, tt.want)
				}
				if err == nil && sel.Worker.ID != tt.to {
					t.Errorf("Select(%+v) chose %v, want %v", tt.q, sel.Worker.ID, tt.to)
				}
				f.p.Free(id, start)
			}
			for rank, load := range f.p.Tracker.Loads(start) {
				if load.Requests != 0 {
					t.Errorf("load of %+v = %+v, want none", rank, load)
				}
			}
		})
	}
}

// TestUnknownModel is row 63.
func TestUnknownModel(t *testing.T) {
	f := newRig(t, router.RoundRobin, busy.DefaultConfig())
	if _, err := f.r.Resolve("X", ""); !errors.Is(err, router.ErrUnknownModel) {
		t.Errorf("63: Resolve(X) = %v, want ErrUnknownModel", err)
	}
	target, err := f.r.Resolve("M", "")
	if err != nil || target.Partition != nil {
		t.Errorf("64: Resolve(M) = %+v, %v, want no partition and no error", target, err)
	}
}

// TestBusyIsNeverChosen is row 67 for every mode, a thousand times.
func TestBusyIsNeverChosen(t *testing.T) {
	for _, mode := range allModes {
		t.Run(string(mode), func(t *testing.T) {
			f := newRig(t, mode, limits(new(0.85), nil), record(t, 1, 1), record(t, 2, 1))
			f.used(1, 90, 0)
			q := router.Query{PromptTokens: 10}
			if mode == router.Direct {
				q.Worker = new(worker.ID(2))
			}
			for i := range 1000 {
				sel, _, err := f.ask(q)
				if err != nil || sel.Worker.ID != 2 {
					t.Fatalf("67: Select %d = %v, %v, want worker 2", i, sel.Rank, err)
				}
			}
		})
	}
}

func TestDirect(t *testing.T) {
	f := newRig(t, router.Direct, limits(new(0.85), nil), record(t, 1, 2), record(t, 2, 2))
	for _, tt := range []struct {
		name string
		q    router.Query
		want error
	}{
		{"no pin", router.Query{}, router.ErrPinMissing},
		{"a rank does not name a worker", router.Query{DP: new(uint32(1))}, router.ErrPinMissing},
		{"worker", router.Query{Worker: new(worker.ID(2))}, nil},
		{"worker and rank", router.Query{Worker: new(worker.ID(2)), DP: new(uint32(1))}, nil},
		{"unknown worker", router.Query{Worker: new(worker.ID(3))}, router.ErrPinUnknown},
	} {
		if sel, _, err := f.ask(tt.q); !errors.Is(err, tt.want) || err == nil && sel.Worker.ID != 2 {
			t.Errorf("%s: Select = %v, %v, want %v", tt.name, sel.Rank, err, tt.want)
		}
	}
}

// TestRelease shows each end of a refusal: room comes back by a freed request, by a sample, by a
// new threshold.
func TestRelease(t *testing.T) {
	for _, tt := range []struct {
		name string
		act  func(f *rig, id string)
	}{
		{"free", func(f *rig, id string) { f.p.Free(id, start) }},
		{"first token", func(f *rig, id string) { f.p.PrefillDone(id, start) }},
		{"threshold", func(f *rig, _ string) {
			_, old, now, ok := f.r.SetThresholds("M", func(t busy.Thresholds) busy.Thresholds { t.PrefillTokens = new(uint64(1000)); return t }, start)
			if !ok || *old.PrefillTokens != 100 || *now.PrefillTokens != 1000 {
				t.Errorf("SetThresholds = %+v, %+v, %v", old, now, ok)
			}
		}},
		{"threshold off", func(f *rig, _ string) {
			f.r.SetThresholds("M", func(busy.Thresholds) busy.Thresholds { return busy.Thresholds{} }, start)
		}},
		{"another worker", func(f *rig, _ string) { f.register(record(f.t, 2, 1)) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newRig(t, router.RoundRobin, limits(nil, new(uint64(100))), record(t, 1, 1))
			_, id, err := f.ask(router.Query{PromptTokens: 101})
			if err != nil {
				t.Fatalf("Select = %v", err)
			}
			if _, _, err := f.ask(router.Query{}); !errors.Is(err, router.ErrOverloaded) {
				t.Fatalf("Select = %v, want ErrOverloaded", err)
			}
			tt.act(f, id)
			if _, _, err := f.ask(router.Query{}); err != nil {
				t.Errorf("Select afterwards = %v, want nil", err)
			}
		})
	}
}
