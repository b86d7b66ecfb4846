package kvindex_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"spillway/kvindex"
	"spillway/worker"
)

// TestCrowds has many ranks hold parts of the same few prompts, so that blocks have from one to
// all of them as holders, and the ranks become more as time goes by.
func TestCrowds(t *testing.T) {
	prompts := [][]uint64{chain(100, 12), append(chain(100, 5), chain(300, 6)...), append(chain(100, 2), chain(400, 9)...)}
	for _, ranks := range []int{5, 12, 40, 100, 700} {
		t.Run(fmt.Sprint("ranks=", ranks), func(t *testing.T) {
			r := rand.New(rand.NewPCG(uint64(ranks), 3))
			ix, slow := kvindex.New(kvindex.DefaultConfig()), newModel(1<<30)
			var m kvindex.Matches
			steps := 4000 + 6*ranks
			for step := range steps {
				rank := worker.Rank{Worker: worker.ID(r.IntN(1 + ranks*step/steps))}
				p := prompts[r.IntN(len(prompts))]
				n := 1 + r.IntN(len(p))
				switch phase := step * 6 / steps % 2; { // the crowd grows, and shrinks
				case r.IntN(40) == 0:
					ix.RemoveRank(rank)
					delete(slow.ranks, rank)
				case r.IntN(5) > 3*phase:
					ix.Store(rank, worker.Device, kvindex.Parent{}, p[:n], p[:n])
					slow.store(rank, worker.Device, kvindex.Parent{}, p[:n], p[:n])
				default:
					ix.Remove(rank, worker.Device, p[n-1:])
					slow.remove(rank, worker.Device, p[n-1:])
				}
				if step%(1+ranks/8) > 0 {
					continue
				}
				for _, p := range prompts {
					ix.Query(p, &m)
					m.Sort()
					if want := slow.query(p, true); !slices.Equal(m.Ranks, want) {
						t.Fatalf("step %d: %v: got %v, want %v", step, p, m.Ranks, want)
					}
				}
			}
		})
	}
}

// TestManyNames gives blocks so many engine hashes that all tables grow, and takes them away again.
func TestManyNames(t *testing.T) {
	for seed := range uint64(3) {
		r := rand.New(rand.NewPCG(seed, 4))
		ix, slow := kvindex.New(kvindex.DefaultConfig()), newModel(1<<30)
		names := chain(1, 500)
		for _, remove := range []bool{false, true} {
			r.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
			for i, e := range names {
				local, host := []uint64{e % 3}, []uint64{1000 + e}
				if remove {
					ix.Remove(rankA, worker.Device, names[i:i+1])
					slow.remove(rankA, worker.Device, names[i:i+1])
				} else { // each name is followed by a block of its own, which tells the newest
					ix.Store(rankA, worker.Device, kvindex.Parent{}, names[i:i+1], local)
					slow.store(rankA, worker.Device, kvindex.Parent{}, names[i:i+1], local)
					ix.Store(rankA, worker.HostPinned, kvindex.After(e), host, host)
					slow.store(rankA, worker.HostPinned, kvindex.After(e), host, host)
				}
				var m kvindex.Matches
				for _, next := range names[max(0, i-3):min(len(names), i+3)] {
					prompt := []uint64{e % 3, 1000 + next}
					ix.Query(prompt, &m)
					if want := slow.query(prompt, true); !slices.Equal(m.Ranks, want) {
						t.Fatalf("name %d of %v: got %v, want %v", i, prompt, m.Ranks, want)
					}
				}
			}
		}
	}
}
