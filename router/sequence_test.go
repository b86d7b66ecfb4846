package router_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"spillway/busy"
	"spillway/router"
	"spillway/worker"
)

// TestBurst is rows 60 and 61 of the worked examples: requests of 200 tokens whose first tokens
// never come, one after another and all at once. A rank is over 10,000 tokens with 51 of them.
func TestBurst(t *testing.T) {
	for _, tt := range []struct {
		name              string
		mode              router.Mode
		workers           []uint32 // the ranks that each declares
		requests, perRank int
	}{
		{"60 one worker", router.RoundRobin, []uint32{0}, 100, 51},
		{"61 two workers", router.LeastLoaded, []uint32{0, 0}, 200, 51},
		{"61 by turns", router.RoundRobin, []uint32{0, 0}, 200, 51},
		{"61 at random", router.Random, []uint32{0, 0}, 200, 51},
		{"61 power of two", router.PowerOfTwo, []uint32{0, 0}, 200, 51},
		{"two workers of two and three ranks", router.LeastLoaded, []uint32{2, 3}, 400, 51},
	} {
		for _, at := range []string{"one by one", "at once"} {
			t.Run(tt.name+" "+at, func(t *testing.T) {
				f := newRig(t, tt.mode, limits(nil, new(uint64(10000))))
				ranks := 0
				for i, size := range tt.workers {
					f.register(record(t, worker.ID(i+1), size))
					ranks += int(max(size, 1))
				}
				goroutines := 1
				if at == "at once" {
					goroutines = 100
				}
				admitted := burst(t, f.p, tt.requests, goroutines)
				if want := ranks * tt.perRank; admitted != want {
					t.Errorf("admitted %d of %d requests, want %d", admitted, tt.requests, want)
				}
				for rank, load := range f.p.Tracker.Loads(start) {
					if load.Requests != uint64(tt.perRank) || load.PrefillTokens != 200*uint64(tt.perRank) {
						t.Errorf("load of %+v = %+v, want %d requests", rank, load, tt.perRank)
					}
				}
			})
		}
	}
}

// burst sends requests from so many goroutines and returns how many were admitted.
func burst(t *testing.T, p *router.Partition, requests, goroutines int) int {
	var admitted, next atomic.Int64
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for i := next.Add(1); i <= int64(requests); i = next.Add(1) {
				_, err := p.Select(router.Query{Reservation: fmt.Sprint(i), PromptTokens: 200}, start)
				switch {
				case err == nil:
					admitted.Add(1)
				case !errors.Is(err, router.ErrOverloaded):
					t.Errorf("Select(%d) = %v, want ErrOverloaded", i, err)
				}
			}
		})
	}
	wg.Wait()
	return int(admitted.Load())
}

// TestBurstWhileOthersFree lets requests come and go at once. No rank may ever be promised more
// than the limit allows, and nothing may be left.
func TestBurstWhileOthersFree(t *testing.T) {
	f := newRig(t, router.PowerOfTwo, limits(nil, new(uint64(1000))), record(t, 1, 0), record(t, 2, 2))
	var wg sync.WaitGroup
	for g := range 100 {
		wg.Go(func() {
			for i := range 30 {
				id := fmt.Sprint(g, "-", i)
				sel, err := f.p.Select(router.Query{Reservation: id, PromptTokens: 200}, start)
				if err != nil {
					if !errors.Is(err, router.ErrOverloaded) {
						t.Errorf("Select = %v, want ErrOverloaded", err)
					}
					continue
				}
				if load := f.p.Tracker.Load(sel.Rank, start); load.PrefillTokens > 1200 {
					t.Errorf("load of %+v = %+v, want at most 1200 prefill tokens", sel.Rank, load)
				}
				f.p.PrefillDone(id, start)
				f.p.Grow(id, 3, nil, start)
				f.p.Free(id, start)
				f.p.Free(id, start)
			}
		})
	}
	wg.Wait()
	f.checkEmpty()
}

// TestLongPrompt is row 62: the request itself is not counted, what it leaves behind is.
func TestLongPrompt(t *testing.T) {
	f := newRig(t, router.RoundRobin, limits(nil, new(uint64(10000))), record(t, 1, 0))
	_, id, err := f.ask(router.Query{PromptTokens: 60000})
	if err != nil {
		t.Fatalf("62: Select(60000 tokens) on an idle worker = %v, want nil", err)
	}
	if got := f.p.Busy.Snapshot().Busy; len(got) != 1 { // before Select returns, for whoever reads the list next
		t.Errorf("62: busy after Select = %v, want the worker", got)
	}
	if _, _, err := f.ask(router.Query{PromptTokens: 1}); !errors.Is(err, router.ErrOverloaded) {
		t.Errorf("62: the next Select = %v, want ErrOverloaded", err)
	}
	f.p.PrefillDone(id, start)
	if _, _, err := f.ask(router.Query{PromptTokens: 1}); err != nil {
		t.Errorf("62: Select after the first token = %v, want nil", err)
	}
}

// TestGrowthMakesBusy fills the cache by output alone, at the block size of the engine.
func TestGrowthMakesBusy(t *testing.T) {
	w := record(t, 1, 1)
	w.KVTotalBlocks, w.BlockSize = 100, 32
	f := newRig(t, router.RoundRobin, limits(new(0.85), nil), w)
	sel, id, err := f.ask(router.Query{PromptTokens: 32*80 + 31})
	if err != nil || sel.BlockSize != 32 {
		t.Fatalf("Select = block size %d, %v, want 32", sel.BlockSize, err)
	}
	for i, tt := range []struct {
		blocks uint64
		busy   bool
	}{{5, false}, {1, true}} { // 85 of 100 is not over 0.85
		f.p.Grow(id, tt.blocks, nil, start)
		if got := len(f.p.Busy.Snapshot().Busy) == 1; got != tt.busy {
			t.Errorf("step %d: busy with %+v = %v, want %v", i, f.p.Tracker.Load(sel.Rank, start), got, tt.busy)
		}
	}
	if _, _, err := f.ask(router.Query{NoDecode: true}); !errors.Is(err, router.ErrOverloaded) {
		t.Errorf("Select = %v, want ErrOverloaded", err)
	}
	f.p.Free(id, start)
	f.checkEmpty()
}

// TestNoDecode: embeddings hold no KV blocks.
func TestNoDecode(t *testing.T) {
	f := newRig(t, router.RoundRobin, busy.DefaultConfig(), record(t, 1, 1))
	sel, _, err := f.ask(router.Query{PromptTokens: 1600, NoDecode: true})
	if err != nil {
		t.Fatalf("Select = %v", err)
	}
	if load := f.p.Tracker.Load(sel.Rank, start); load.DecodeBlocks != 0 || load.PrefillTokens != 1600 {
		t.Errorf("load = %+v, want 1600 prefill tokens and no blocks", load)
	}
}
