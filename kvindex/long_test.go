package kvindex_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"spillway/kvhash"
	"spillway/kvindex"
	"spillway/worker"
)

// tree is prompts of up to 90 blocks, of which each but the first begins like another one, and
// parts from it anywhere.
func tree(r *rand.Rand, prompts int) [][]uint64 {
	var all [][]uint64
	for i := range prompts {
		var p []uint64
		if i > 0 {
			p = all[r.IntN(i)]
			p = slices.Clone(p[:r.IntN(len(p))])
		}
		for len(p) < 90 && (len(p) == 0 || r.IntN(40) > 0) {
			p = append(p, scramble(uint64(i*1000+len(p))))
		}
		all = append(all, p)
	}
	return all
}

// TestLongPrompts has ranks store long prompts in pieces, and drop some blocks of them, from the
// end or anywhere.
func TestLongPrompts(t *testing.T) {
	for seed := range uint64(6) {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 5))
			ranks := []int{2, 6, 30}[seed%3]
			prompts := tree(r, 8)
			ix, slow := kvindex.New(kvindex.DefaultConfig()), newModel(1<<30)
			var m kvindex.Matches
			steps := 3000
			if testing.Short() {
				steps /= 10
			}
			for step := range steps {
				rank := worker.Rank{Worker: worker.ID(r.IntN(ranks))}
				p := prompts[r.IntN(len(prompts))]
				engine := kvhash.AppendSequences(nil, p) // the same for all, as with vLLM
				from := r.IntN(len(p))
				to := from + 1 + r.IntN(len(p)-from)
				switch r.IntN(4) {
				case 0, 1:
					for from < to { // in pieces
						n := min(to-from, 1+r.IntN(20))
						var parent kvindex.Parent
						if from > 0 {
							parent = kvindex.After(engine[from-1])
						}
						e, l := engine[from:from+n], p[from:from+n]
						if got, want := ix.Store(rank, worker.Device, parent, e, l), slow.store(rank, worker.Device, parent, e, l); got != want {
							t.Fatalf("step %d: store of %d blocks from %d: got %s, want %s", step, n, from, got, want)
						}
						from += n
					}
				case 2:
					gone := slices.Clone(engine[from:])
					if r.IntN(2) == 0 {
						slices.Reverse(gone)
					}
					ix.Remove(rank, worker.Device, gone)
					slow.remove(rank, worker.Device, gone)
				case 3:
					ix.Remove(rank, worker.Device, engine[from:from+1])
					slow.remove(rank, worker.Device, engine[from:from+1])
				}
				for _, p := range prompts[step%2*4:][:4] {
					ix.Query(p, &m)
					m.Sort()
					if want := slow.query(p, true); !slices.Equal(m.Ranks, want) {
						t.Fatalf("step %d: %x: got %v, want %v", step, p, m.Ranks, want)
					}
					ix.QueryChained(p, kvhash.AppendSequences(nil, p), &m)
					m.Sort()
					if want := slow.query(p, true); !slices.Equal(m.Ranks, want) {
						t.Fatalf("step %d: chained %x: got %v, want %v", step, p, m.Ranks, want)
					}
				}
				if got, want := ix.Entries(), slow.entries(); got != want {
					t.Fatalf("step %d: %d entries, want %d", step, got, want)
				}
			}
		})
	}
}

// TestTornReads has two ranks hold a block in turns, never both at a time, beside some that hold it
// all the while. All are in a long row, of bits or a list. Reading it takes as long as a few of
// these changes; whoever sees both, or one of the others not, has seen no one moment.
func TestTornReads(t *testing.T) {
	const ranks = 40_000 // which makes rows of bits long
	rank := func(i int) worker.Rank { return worker.Rank{Worker: worker.ID(i)} }
	low, high := rank(0), rank(ranks-1)
	ix := kvindex.New(kvindex.DefaultConfig())
	for i := range ranks {
		ix.Store(rank(i), worker.Device, kvindex.Parent{}, []uint64{9}, []uint64{9})
	}
	for kind, steady := range map[string]int{"bits": 300, "list": 100} {
		t.Run(kind, func(t *testing.T) {
			prompt := []uint64{uint64(10 * steady), 2}
			for i := range steady {
				ix.Store(rank(i+1), worker.Device, kvindex.Parent{}, prompt, prompt)
			}
			var parent kvindex.Parent
			for _, r := range []worker.Rank{low, high} {
				ix.Store(r, worker.Device, parent, prompt[:1], prompt[:1])
			}
			parent = kvindex.After(prompt[0])
			var stop atomic.Bool
			var wg sync.WaitGroup
			wg.Go(func() {
				for !stop.Load() {
					for _, r := range []worker.Rank{low, high} {
						ix.Store(r, worker.Device, parent, prompt[1:], prompt[1:])
						ix.Remove(r, worker.Device, prompt[1:])
					}
				}
			})
			queries := 100_000
			if testing.Short() {
				queries /= 10
			}
			var m kvindex.Matches
			for n := range queries {
				ix.QueryDevice(prompt, &m)
				all, shared := 0, 0
				for _, x := range m.Ranks {
					if x.Rank == low || x.Rank == high {
						shared += x.Device
					} else {
						all += x.Device
					}
				}
				if len(m.Ranks) != steady+2 || all != 2*steady || shared > 3 {
					t.Errorf("query %d: %d ranks hold %d blocks and two hold %d, want %d with %d and at most 3", n, len(m.Ranks)-2, all, shared, steady, 2*steady)
					break
				}
			}
			stop.Store(true)
			wg.Wait()
		})
	}
}

// TestCollidingHashes has pairs of blocks of which one begins a prompt, and is made to have the
// hash of the other, which does not. As they lie in different shards, but for chance, they are two.
func TestCollidingHashes(t *testing.T) {
	const pairs = 64
	right := 0
	for i := range uint64(pairs) {
		ix, slow := kvindex.New(kvindex.DefaultConfig()), newModel(1<<30)
		p := []uint64{scramble(2 * i), scramble(2*i + 1)}
		q := []uint64{kvhash.Next(p[0], p[1])}
		same := true
		check := func() {
			var m kvindex.Matches
			for _, prompt := range [][]uint64{p, q} {
				ix.Query(prompt, &m)
				same = same && slices.Equal(m.Ranks, slow.query(prompt, true))
			}
		}
		store := func(engine, local []uint64) {
			ix.Store(rankA, worker.Device, kvindex.Parent{}, engine, local)
			slow.store(rankA, worker.Device, kvindex.Parent{}, engine, local)
			check()
		}
		remove := func(engine uint64) {
			ix.Remove(rankA, worker.Device, []uint64{engine})
			slow.remove(rankA, worker.Device, []uint64{engine})
			check()
		}
		store([]uint64{1, 2}, p)
		store([]uint64{3}, q)
		remove(2)
		store([]uint64{1, 2}, p)
		remove(3)
		if same {
			right++
		}
	}
	if right < pairs-8 {
		t.Errorf("%d of %d pairs are kept apart", right, pairs)
	}
}

// TestCraftedHashes stores blocks whose hashes are all at one place of a table that spreads them
// by a known multiplication, as a table of ours once did. It would take minutes there.
func TestCraftedHashes(t *testing.T) {
	const inverse = 0xf1de83e19937733d // of 0x9e3779b97f4a7c15
	if k := uint64(inverse); k*0x9e3779b97f4a7c15 != 1 {
		t.Fatal("that is not the inverse")
	}
	crafted := make([]uint64, 200_000)
	for i := range crafted {
		h := uint64(i+1) * inverse
		crafted[i] = h ^ h>>32
	}
	ix := kvindex.New(kvindex.DefaultConfig())
	began := time.Now()
	for from := 0; from < len(crafted); from += 1000 {
		some := crafted[from : from+1000]
		for i := range some { // first blocks, so that their hashes are those of the prompt
			ix.Store(rankA, worker.Device, kvindex.Parent{}, some[i:i+1], some[i:i+1])
		}
		if took := time.Since(began); took > time.Minute {
			t.Fatalf("%d stores took %s", from+1000, took)
		}
	}
	if ix.Entries() != len(crafted) {
		t.Errorf("%d entries, want %d", ix.Entries(), len(crafted))
	}
}

// TestGrowth has many prompts grow by a block in turns, as they do while engines decode. Each must
// find room beside its last block, more often than not while the table is not full.
func TestGrowth(t *testing.T) {
	ix := kvindex.New(kvindex.DefaultConfig())
	prompts := make([][]uint64, 5000)
	for n := range 60 {
		for i := range prompts {
			prompts[i] = append(prompts[i], scramble(uint64(i*1000+n)))
			var parent kvindex.Parent
			if n > 0 {
				parent = kvindex.After(prompts[i][n-1])
			}
			ix.Store(rankA, worker.Device, parent, prompts[i][n:], prompts[i][n:])
		}
	}
	got := ix.Neighbours()
	t.Logf("%.3f of blocks are beside the one before them", got)
	if got < 0.4 {
		t.Error("that is too few")
	}
}

// TestNeighbours fills an index with prompts, and has engines drop and store blocks for a while.
// Blocks that follow each other must mostly be in cells that do: queries are quick by that.
func TestNeighbours(t *testing.T) {
	for _, batch := range []int{64, 4, 1} {
		ix := kvindex.New(kvindex.DefaultConfig())
		const entries, workers = 100_000, 10
		e := newEngines(conversations(1000), workers, entries/workers, batch)
		filled := 0.0
		for churned := 0; churned < 3*entries; {
			for _, ev := range e.next() {
				apply(ix, ev)
				if filled > 0 {
					churned += len(ev.engine)
				}
			}
			if filled == 0 && ix.Entries() > entries*9/10 {
				filled = ix.Neighbours()
			}
		}
		after := ix.Neighbours()
		t.Logf("batch=%d: %.3f of blocks are beside the one before them when the index is full, %.3f later", batch, filled, after)
		if filled < 0.9 || after < 0.8 {
			t.Errorf("batch=%d: %.3f and %.3f of blocks are beside the one before them", batch, filled, after)
		}
	}
}
