package router_test

import (
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"spillway/busy"
	"spillway/router"
	"spillway/worker"
)

func TestConfigValidate(t *testing.T) {
	if err := router.DefaultConfig().Validate(); err != nil {
		t.Errorf("DefaultConfig().Validate() = %v", err)
	}
	cfg := router.DefaultConfig()
	for _, mode := range allModes {
		if cfg.Mode = mode; cfg.Validate() != nil {
			t.Errorf("Validate(%s) = %v", mode, cfg.Validate())
		}
	}
	for _, mode := range []router.Mode{"", "KV", "Random"} {
		cfg.Mode = mode
		err := cfg.Validate()
		if want := `router-mode: "` + string(mode) + `"`; err == nil || len(err.Error()) < len(want) || err.Error()[:len(want)] != want {
			t.Errorf("Validate(%q) = %v, want it to begin with %s", mode, err, want)
		}
	}
}

// TestTenants: a tenant with workers of its own has a partition of its own; all others share
// that of the default tenant.
func TestTenants(t *testing.T) {
	acme := record(t, 2, 1)
	acme.Tenant = "acme"
	f := newRig(t, router.RoundRobin, limits(nil, new(uint64(100))), record(t, 1, 1), acme)
	for _, tt := range []struct {
		tenant, lands string
		worker        worker.ID
	}{{"acme", "acme", 2}, {"", "default", 1}, {"default", "default", 1}, {"nobody", "default", 1}} {
		target, err := f.r.Resolve("M", tt.tenant)
		if err != nil || target.Partition == nil || target.Partition.Key.Tenant != tt.lands {
			t.Fatalf("Resolve(M, %q) = %+v, %v, want the partition of %s", tt.tenant, target, err, tt.lands)
		}
		if got := target.Partition.Busy.Snapshot().Registered; !slices.Equal(got, []worker.ID{tt.worker}) {
			t.Errorf("workers for tenant %q = %v, want %v", tt.tenant, got, tt.worker)
		}
	}
	// Load and thresholds: the first is apart, the second one for the model.
	own, _ := f.r.Resolve("M", "acme")
	if _, err := own.Partition.Select(router.Query{Reservation: "a", PromptTokens: 101}, start); err != nil {
		t.Fatal(err)
	}
	if _, err := own.Partition.Select(router.Query{Reservation: "b"}, start); !errors.Is(err, router.ErrOverloaded) {
		t.Errorf("Select for acme = %v, want ErrOverloaded", err)
	}
	if _, _, err := f.ask(router.Query{PromptTokens: 101}); err != nil {
		t.Errorf("Select for the default tenant = %v, want nil", err)
	}
	if _, _, err := f.ask(router.Query{Worker: new(worker.ID(2))}); !errors.Is(err, router.ErrPinUnknown) {
		t.Errorf("Select pinned to another tenant's worker = %v, want ErrPinUnknown", err)
	}
	f.r.SetThresholds("M", func(busy.Thresholds) busy.Thresholds { return busy.Thresholds{} }, start)
	for _, name := range []string{"b", "c"} {
		if _, err := own.Partition.Select(router.Query{Reservation: name}, start); err != nil {
			t.Errorf("Select for acme without thresholds = %v, want nil", err)
		}
	}
	f.r.Unregister(2, start)
	if target, _ := f.r.Resolve("M", "acme"); target.Partition != f.p {
		t.Error("Resolve(M, acme) after its worker has left is not the default tenant's partition")
	}
}

// TestNarrowed: an adapter leads to the workers that have it, an alias to whatever it stands for.
func TestNarrowed(t *testing.T) {
	plain, tuned := record(t, 1, 1), record(t, 2, 1)
	tuned.Models = []string{"M", "M-tuned"}
	catalog, err := worker.NewCatalog(nil, map[string]string{"gpt": "M", "best": "M-tuned"})
	if err != nil {
		t.Fatal(err)
	}
	r := router.New(router.DefaultConfig(), limits(new(0.85), nil), catalog, rand.New(rand.NewPCG(1, 2)))
	for _, w := range []worker.Worker{plain, tuned} {
		if _, err := r.Register(&w, start); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name, served string
		workers      []worker.ID // nil: all
	}{{"M", "M", nil}, {"gpt", "M", nil}, {"M-tuned", "M-tuned", []worker.ID{2}}, {"best", "M-tuned", []worker.ID{2}}} {
		target, err := r.Resolve(tt.name, "")
		if err != nil || target.Model != "M" || target.Served != tt.served || len(target.Only) != len(tt.workers) {
			t.Errorf("Resolve(%s) = %+v, %v, want model M served as %s by %v", tt.name, target, err, tt.served, tt.workers)
			continue
		}
		for i := range 4 {
			sel, err := target.Partition.Select(router.Query{Reservation: tt.name + string(rune('0'+i)), Only: target.Only}, start)
			if err != nil || tt.workers != nil && !slices.Contains(tt.workers, sel.Worker.ID) {
				t.Errorf("Select for %s = %v, %v, want one of %v", tt.name, sel.Rank, err, tt.workers)
			}
		}
	}
	// Thresholds are the model's, by whichever name.
	if model, _, _, ok := r.SetThresholds("best", func(busy.Thresholds) busy.Thresholds { return busy.Thresholds{DecodeFrac: new(0.1)} }, start); !ok || model != "M" {
		t.Errorf("SetThresholds(best) = %s, %v, want M", model, ok)
	}
	if model, th, ok := r.Thresholds("gpt"); !ok || model != "M" || *th.DecodeFrac != 0.1 {
		t.Errorf("Thresholds(gpt) = %s, %+v, %v, want M at 0.1", model, th, ok)
	}
	if _, _, ok := r.Thresholds("X"); ok {
		t.Error("Thresholds(X) is known, want unknown")
	}
	r.Unregister(2, start)
	if target, err := r.Resolve("best", ""); err != nil || target.Partition != nil {
		t.Errorf("Resolve(best) without its worker = %+v, %v, want known without a partition", target, err)
	}
	if target, err := r.Resolve("gpt", ""); err != nil || target.Partition == nil {
		t.Errorf("Resolve(gpt) = %+v, %v, want M's partition", target, err)
	}
}

// TestRegisterAgain: a record that changes keeps the load of what it still describes; a worker
// that leaves or changes its model leaves nothing.
func TestRegisterAgain(t *testing.T) {
	f := newRig(t, router.RoundRobin, limits(nil, new(uint64(100))), record(t, 1, 2), record(t, 2, 1))
	pin := router.Query{PromptTokens: 50, Worker: new(worker.ID(1)), DP: new(uint32(0))}
	_, id0, err0 := f.ask(pin)
	pin.DP = new(uint32(1))
	_, id1, err1 := f.ask(pin)
	if err := errors.Join(err0, err1); err != nil {
		t.Fatal(err)
	}
	requests := func(p *router.Partition, dp uint32) uint64 {
		return p.Tracker.Load(worker.Rank{Worker: 1, DP: dp}, start).Requests
	}
	f.register(record(t, 1, 2))
	if requests(f.p, 0) != 1 || requests(f.p, 1) != 1 {
		t.Errorf("loads after the same record = %v, want 1 request on either rank", f.p.Tracker.Loads(start))
	}
	f.register(record(t, 1, 1))
	if requests(f.p, 0) != 1 || requests(f.p, 1) != 0 {
		t.Errorf("loads after rank 1 is gone = %v, want 1 request on rank 0", f.p.Tracker.Loads(start))
	}
	f.p.Free(id1, start)
	moved := record(t, 1, 1)
	moved.Models = []string{"N"}
	n := f.register(moved)
	if n == f.p || requests(n, 0) != 0 || requests(f.p, 0) != 0 {
		t.Errorf("loads after the model changed = %v and %v, want none", n.Tracker.Loads(start), f.p.Tracker.Loads(start))
	}
	if _, _, err := f.ask(router.Query{Worker: new(worker.ID(1))}); !errors.Is(err, router.ErrPinUnknown) {
		t.Errorf("Select of the worker that moved = %v, want ErrPinUnknown", err)
	}
	f.p.Free(id0, start) // a request that outlives the booking
	f.r.Unregister(1, start)
	f.r.Unregister(1, start)
	if _, err := n.Select(router.Query{Reservation: "late"}, start); !errors.Is(err, router.ErrNoWorkers) {
		t.Errorf("Select in a partition that is gone = %v, want ErrNoWorkers", err)
	}
	if _, err := f.r.Resolve("N", ""); !errors.Is(err, router.ErrUnknownModel) {
		t.Errorf("Resolve(N) = %v, want ErrUnknownModel", err)
	}
	f.r.Unregister(2, start)
	if target, err := f.r.Resolve("M", ""); err != nil || target.Partition != nil {
		t.Errorf("Resolve(M) without workers = %+v, %v, want known without a partition", target, err)
	}
	f.checkEmpty()
}

// TestRegisterFails: an ambiguous name changes nothing.
func TestRegisterFails(t *testing.T) {
	f := newRig(t, router.RoundRobin, busy.DefaultConfig(), record(t, 1, 1))
	bad := record(t, 2, 1)
	bad.Models = []string{"N", "M"}
	if _, err := f.r.Register(&bad, start); err == nil {
		t.Error("Register of a worker that calls N what is M = nil, want an error")
	}
	if got := f.r.Catalog().Workers(); len(got) != 1 {
		t.Errorf("workers = %d, want 1", len(got))
	}
}

// TestThresholdsOutliveWorkers: what was set at run time holds for workers that come later.
func TestThresholdsOutliveWorkers(t *testing.T) {
	f := newRig(t, router.RoundRobin, busy.DefaultConfig(), record(t, 1, 1))
	if f.r.ThresholdsSet() {
		t.Error("ThresholdsSet() = true, want false")
	}
	f.r.SetThresholds("M", func(t busy.Thresholds) busy.Thresholds { t.PrefillTokens = new(uint64(7)); return t }, start)
	f.r.Unregister(1, start)
	p := f.register(record(t, 3, 1))
	if th := p.Busy.Thresholds(); th.PrefillTokens == nil || *th.PrefillTokens != 7 || !f.r.ThresholdsSet() {
		t.Errorf("thresholds of the new partition = %+v, want 7 prefill tokens", th)
	}
}

func TestHeld(t *testing.T) {
	f := newRig(t, router.RoundRobin, busy.DefaultConfig(), record(t, 1, 1))
	_, id, _ := f.ask(router.Query{})
	rank := worker.Rank{Worker: 1}
	later := start.Add(time.Minute)
	for _, tt := range []struct {
		name  string
		act   func()
		rank  worker.Rank
		since time.Time
		want  bool
	}{
		{"no worker", func() {}, worker.Rank{Worker: 9}, later, false},
		{"young", func() {}, rank, start, false},
		{"old", func() {}, rank, later, true},
		{"other rank", func() {}, worker.Rank{Worker: 1, DP: 1}, later, false},
		{"progress", func() { f.p.Grow(id, 0, nil, later) }, rank, later, false},
		{"freed", func() { f.p.Free(id, later) }, rank, later.Add(time.Hour), false},
	} {
		tt.act()
		if got := f.r.Held(tt.rank, tt.since); got != tt.want {
			t.Errorf("%s: Held = %v, want %v", tt.name, got, tt.want)
		}
	}
}

// TestRaces lets workers come, go, move, and be judged while requests are decided. It is of use
// under the race detector; what it asserts is that the books end at zero.
func TestRaces(t *testing.T) {
	f := newRig(t, router.LeastLoaded, limits(new(0.85), new(uint64(2000))), record(t, 1, 0), record(t, 2, 2), record(t, 3, 1))
	var writers, readers sync.WaitGroup
	done := make(chan struct{})
	for g := range 3 {
		writers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 1))
			for {
				select {
				case <-done:
					return
				default:
				}
				w := record(t, worker.ID(1+rng.IntN(4)), uint32(rng.IntN(3)))
				switch rng.IntN(5) {
				case 0:
					f.r.Unregister(w.ID, start)
				case 1:
					w.Models = []string{"N"}
					fallthrough
				case 2:
					if _, err := f.r.Register(&w, start); err != nil {
						t.Error(err)
					}
				case 3:
					f.r.Partitions("", func(p *router.Partition) {
						p.Busy.Inhibit(w.ID, start.Add(time.Second), start)
						p.Busy.SetHealthy(w.ID, true, start)
						p.Busy.Mark(w.ID, nil, 0, start)
					})
				case 4:
					f.r.SetThresholds("M", func(t busy.Thresholds) busy.Thresholds { t.PrefillTokens = new(uint64(rng.IntN(4000))); return t }, start)
				}
			}
		})
	}
	for g := range 8 {
		readers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 2))
			for i := range 400 {
				target, err := f.r.Resolve([]string{"M", "N"}[rng.IntN(2)], "")
				if err != nil || target.Partition == nil {
					continue
				}
				p, id := target.Partition, string(rune('a'+g))+string(rune(i+1000))
				if _, err := p.Select(router.Query{Reservation: id, PromptTokens: 100}, start); errors.Is(err, errDuplicate) {
					t.Error(err)
				}
				p.PrefillDone(id, start)
				p.Grow(id, 1, nil, start)
				p.Free(id, start)
			}
		})
	}
	readers.Wait()
	close(done)
	writers.Wait()
	f.r.Partitions("", func(p *router.Partition) {
		for rank, load := range p.Tracker.Loads(start) {
			if load.Requests != 0 || load.DecodeBlocks != 0 || load.PrefillTokens != 0 {
				t.Errorf("load of %+v = %+v, want none", rank, load)
			}
		}
	})
}
