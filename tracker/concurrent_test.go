package tracker_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"spillway/tracker"
	"spillway/worker"
)

// TestConcurrentPrompts grows and cuts one tree from many goroutines, on several ranks, while
// others read. When all is freed nothing is left.
func TestConcurrentPrompts(t *testing.T) {
	tr := tracker.New(tracker.DefaultConfig())
	tr.Register(&worker.Worker{ID: 1, DPSize: 4}, start)
	var writers, readers sync.WaitGroup
	stop := make(chan struct{})
	for range 2 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				for _, p := range tr.Project(prompts[1], start, nil) {
					if p.AdditionalBlocks > 4 || p.DecodeBlocks > 200 {
						t.Errorf("Project = %+v, which no state has", p)
					}
				}
			}
		})
	}
	for g := range 8 {
		writers.Go(func() {
			rng := rand.New(rand.NewPCG(5, uint64(g)))
			for i := range 500 {
				id, r := fmt.Sprint(g, ".", i), rank(1, rng.Uint32N(4))
				err := tr.Reserve(tracker.Reservation{ID: id, Rank: r, Hashes: prompts[rng.IntN(len(prompts))], PrefillTokens: 3}, tracker.NoLimit, start)
				if err != nil {
					t.Error(err)
				}
				tr.Grow(id, 1, new(rng.Float64()), start)
				tr.PrefillDone(id, start)
				if _, ok := tr.Free(id, start); !ok {
					t.Errorf("Free(%s) = false", id)
				}
			}
		})
	}
	writers.Wait()
	close(stop)
	readers.Wait()
	for r, load := range tr.Loads(start) {
		if load != (tracker.Load{}) {
			t.Errorf("load of %v = %+v, want none", r, load)
		}
	}
	if n := tr.StoredBlocks(); n != 0 {
		t.Errorf("blocks stored = %d, want none", n)
	}
}

// TestProjectWhileRanksMove reads more ranks than one portion while some go and come back at other
// places: those that stay are told exactly once, and no rank twice.
func TestProjectWhileRanksMove(t *testing.T) {
	tr := tracker.New(tracker.DefaultConfig())
	const stay = 1000
	for i := range worker.ID(stay) {
		tr.Register(&worker.Worker{ID: i, DPSize: 1}, start)
	}
	tr.Unregister(0) // a free place at the start
	tr.Unregister(1)
	var movers sync.WaitGroup
	stop := make(chan struct{})
	for id := range worker.ID(2) {
		movers.Go(func() {
			for n := uint32(1); ; n = n%3 + 1 {
				select {
				case <-stop:
					return
				default:
				}
				tr.Register(&worker.Worker{ID: id, DPSize: n}, start)
				tr.Unregister(id)
			}
		})
	}
	for range 50 {
		told := map[worker.Rank]int{}
		for _, p := range tr.Project(nil, start, nil) {
			if told[p.Rank]++; told[p.Rank] > 1 {
				t.Fatalf("rank %v is told twice", p.Rank)
			}
		}
		for i := worker.ID(2); i < stay; i++ {
			if told[rank(i, 0)] != 1 {
				t.Fatalf("worker %d, which stays, is not told", i)
			}
		}
	}
	close(stop)
	movers.Wait()
}
