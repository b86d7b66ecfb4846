package kvindex_test

import (
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"spillway/kvindex"
	"spillway/worker"
)

// chain is n hashes from a number on.
func chain(from uint64, n int) []uint64 {
	all := make([]uint64, n)
	for i := range all {
		all[i] = from + uint64(i)
	}
	return all
}

// TestConcurrent has many writers change the very blocks that readers ask for, on behalf of other
// ranks. What some ranks hold all the while must be reported exactly, holes included, and a rank
// must never be reported for blocks that only another one has announced from the same seat.
func TestConcurrent(t *testing.T) {
	const (
		blocks  = 40
		hole    = 17
		writers = 4
		fleet   = 40 // ranks of each writer: enough for all kinds of rows
	)
	rounds := 10_000
	if testing.Short() {
		rounds = 300
	}
	ix := kvindex.New(kvindex.DefaultConfig())
	p, q := chain(1000, blocks), chain(5000, blocks) // two prompts
	names := func(local []uint64) []uint64 { return local }
	root := kvindex.Parent{}

	full := worker.Rank{Worker: 900}
	ix.Store(full, worker.Device, root, names(p), p)
	holed := worker.Rank{Worker: 901}
	ix.Store(holed, worker.Device, root, names(p), p)
	ix.Remove(holed, worker.Device, p[hole:hole+1])
	tiered := worker.Rank{Worker: 902}
	ix.Store(tiered, worker.Device, root, p[:10], p[:10])
	ix.Store(tiered, worker.HostPinned, kvindex.After(p[9]), p[10:20], p[10:20])
	ix.Store(tiered, worker.Disk, kvindex.After(p[19]), p[20:30], p[20:30])
	hosted := worker.Rank{Worker: 903}
	ix.Store(hosted, worker.HostPinned, root, p[:5], p[:5])
	want := []kvindex.Match{{Rank: full, Device: blocks}, {Rank: holed, Device: hole}, {Rank: tiered, Device: 10, Host: 10, Disk: 10}, {Rank: hosted, Host: 5}}

	var wg sync.WaitGroup
	var stop atomic.Bool
	for w := range writers {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 7))
			for range rounds {
				// An even worker has only ever something of p, an odd one of q: they swap seats.
				rank := worker.Rank{Worker: worker.ID(2 * (w*fleet + r.IntN(fleet)))}
				mine := p
				if r.IntN(2) == 0 {
					rank.Worker++
					mine = q
				}
				n := 1 + r.IntN(blocks)
				switch r.IntN(10) {
				default:
					ix.Store(rank, worker.Device, root, mine[:n], mine[:n])
				case 4, 5, 6:
					ix.Remove(rank, worker.Device, mine[r.IntN(n):n])
				case 7:
					ix.Store(rank, worker.HostPinned, root, mine[:n], mine[:n])
				case 8:
					ix.Clear(rank)
				case 9:
					ix.RemoveRank(rank)
				}
			}
		})
	}
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			var m kvindex.Matches
			for !stop.Load() {
				ix.Query(p, &m)
				m.Sort()
				at := slices.IndexFunc(m.Ranks, func(x kvindex.Match) bool { return x.Rank.Worker >= 900 })
				if at < 0 || !slices.Equal(m.Ranks[at:], want) {
					t.Errorf("ranks that did not change: got %v, want %v", m.Ranks[max(at, 0):], want)
					return
				}
				for i, x := range m.Ranks[:at] {
					if x.Rank.Worker%2 != 0 || x.Device > blocks || i > 0 && m.Ranks[i-1].Rank == x.Rank {
						t.Errorf("of p, %v", m.Ranks[:at])
						return
					}
				}
				ix.QueryDevice(q, &m)
				for _, x := range m.Ranks {
					if x.Rank.Worker%2 != 1 || x.Host+x.Disk > 0 {
						t.Errorf("of q, %v", x)
						return
					}
				}
				runtime.Gosched()
			}
		})
	}
	readers.Go(func() {
		for !stop.Load() {
			n := 0
			ix.Dump(func(r kvindex.Run) bool {
				if r.Rank == full {
					n += len(r.Engine)
				}
				return true
			})
			if n != blocks {
				t.Errorf("the dump has %d blocks of %v, want %d", n, full, blocks)
				return
			}
			runtime.Gosched()
		}
	})
	wg.Wait()
	stop.Store(true)
	readers.Wait()
	for i := range worker.ID(2 * writers * fleet) {
		ix.RemoveWorker(i)
	}
	if got := 2*blocks - 1 + 30 + 5; ix.Entries() != got || ix.Ranks() != 4 {
		t.Errorf("%d entries of %d ranks are left, want %d of 4", ix.Entries(), ix.Ranks(), got)
	}
}

// TestOneRank has several goroutines write for one rank, which is not asked for but must not break
// anything, while it is being removed.
func TestOneRank(t *testing.T) {
	ix := kvindex.New(kvindex.DefaultConfig())
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 9))
			for range 2000 {
				c := chain(uint64(r.IntN(50)), 1+r.IntN(20))
				switch r.IntN(4) {
				case 0, 1:
					ix.Store(rankA, worker.Tier(r.IntN(2)), kvindex.Parent{}, c, c)
				case 2:
					ix.Remove(rankA, worker.Tier(r.IntN(2)), c)
				case 3:
					ix.RemoveWorker(rankA.Worker)
				}
			}
		})
	}
	wg.Wait()
	ix.Reset()
	if ix.Entries() != 0 || ix.Ranks() != 0 {
		t.Errorf("%d entries and %d ranks are left", ix.Entries(), ix.Ranks())
	}
	var m kvindex.Matches
	for from := range uint64(50) {
		if ix.Query([]uint64{from}, &m); len(m.Ranks) > 0 {
			t.Errorf("block %d is still held: %v", from, m.Ranks)
		}
	}
}

// heap is what is in use after everything else has been collected.
func heap() int {
	runtime.GC()
	runtime.GC()
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return int(s.HeapAlloc)
}

// TestMemory fills an index with blocks of one, few and many holders, in all tiers, and empties
// it in different ways. Its memory must come back.
func TestMemory(t *testing.T) {
	ix := kvindex.New(kvindex.DefaultConfig())
	const ranks, own = 40, 2000
	rank := func(i int) worker.Rank { return worker.Rank{Worker: worker.ID(i)} }
	fill := func() {
		for i := range ranks {
			shared := chain(1<<40, 500)
			ix.Store(rank(i), worker.Device, kvindex.Parent{}, shared, shared)
			mine := chain(uint64(i)<<20, own)
			ix.Store(rank(i), worker.Device, kvindex.Parent{}, mine, mine)
			ix.Store(rank(i), worker.Disk, kvindex.After(mine[own-1]), shared, shared)
			for j := range mine[:own/2] { // first blocks
				ix.Store(rank(i), worker.HostPinned, kvindex.Parent{}, mine[j:j+1], mine[j:j+1])
			}
		}
	}
	for i := range ranks { // so that what a rank itself takes is not counted
		ix.Store(rank(i), worker.Device, kvindex.Parent{}, []uint64{1}, []uint64{1})
		ix.Clear(rank(i))
	}
	empty := heap()
	for _, tt := range []struct {
		name string
		do   func(i int)
	}{
		{"clear", func(i int) { ix.Clear(rank(i)) }},
		{"remove rank", func(i int) { ix.RemoveRank(rank(i)) }},
		{"remove", func(i int) {
			ix.Remove(rank(i), worker.Device, append(chain(1<<40, 500), chain(uint64(i)<<20, own)...))
			ix.Remove(rank(i), worker.Disk, chain(1<<40, 500))
			ix.Remove(rank(i), worker.HostPinned, chain(uint64(i)<<20, own/2))
		}},
	} {
		fill()
		full := heap() - empty
		for i := range ranks {
			tt.do(i)
		}
		left := heap() - empty
		t.Logf("%s: %d bytes for %d entries, %d left", tt.name, full, ranks*(own*3/2+1000), left)
		if ix.Entries() != 0 || left > full/20 {
			t.Errorf("%s: %d entries and %d of %d bytes are left", tt.name, ix.Entries(), left, full)
		}
	}
	// Ranks that come and go at the same blocks must use the same memory over and over.
	for range 600 {
		for i := range ranks {
			ix.Store(rank(i), worker.Device, kvindex.Parent{}, chain(7, 64), chain(7, 64))
		}
		for i := range ranks - 1 {
			ix.Remove(rank(i), worker.Device, chain(7, 64))
		}
	}
	if left := heap() - empty; left > 120<<10 {
		t.Errorf("%d bytes after many rounds of the same", left)
	}
	runtime.KeepAlive(ix)
}
