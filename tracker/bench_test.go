package tracker_test

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"spillway/tracker"
	"spillway/worker"
)

const (
	fleetWorkers = 1000
	fleetRanks   = 8
)

func fleet() *tracker.Tracker {
	tr := tracker.New(tracker.DefaultConfig())
	for i := range fleetWorkers {
		tr.Register(&worker.Worker{ID: worker.ID(i), DPSize: fleetRanks}, start)
	}
	return tr
}

// BenchmarkLife is all that one request of the proxy asks of the books, with others in flight.
func BenchmarkLife(b *testing.B) {
	tr := fleet()
	for i := range 10000 {
		if err := tr.Reserve(reservation(fmt.Sprint(i), rank(worker.ID(i%1000), uint32(i%8)), 10, 1), tracker.NoLimit, start); err != nil {
			b.Fatal(err)
		}
	}
	limit := tracker.Limit{PrefillTokens: 1000, DecodeBlocks: 1000}
	b.ReportAllocs()
	for b.Loop() {
		if err := tr.Reserve(reservation("x", rank(500, 3), 200, 12), limit, start); err != nil {
			b.Fatal(err)
		}
		tr.PrefillDone("x", start)
		tr.Grow("x", 1, nil, start)
		tr.Free("x", start)
	}
}

// prompt returns chained-looking hashes: a start that all share, then some of its own.
func prompt(rng *rand.Rand, shared, own int) []uint64 {
	all := make([]uint64, shared+own)
	for i := range all {
		if all[i] = uint64(i); i >= shared {
			all[i] = rng.Uint64()
		}
	}
	return all
}

// loaded is a fleet with active requests of 64 blocks on random ranks.
func loaded(tb testing.TB, active, shared int) *tracker.Tracker {
	tr, rng := fleet(), rand.New(rand.NewPCG(1, uint64(shared)))
	for i := range active {
		r := tracker.Reservation{
			ID: fmt.Sprint("active-", i), Rank: rank(worker.ID(rng.IntN(fleetWorkers)), rng.Uint32N(fleetRanks)),
			Hashes: prompt(rng, shared, 64-shared), PrefillTokens: 1024, Expires: true,
		}
		if err := tr.Reserve(r, tracker.NoLimit, start); err != nil {
			tb.Fatal(err)
		}
	}
	return tr
}

// BenchmarkTriple is reserve, prefill done and free of 128 blocks on a random rank.
func BenchmarkTriple(b *testing.B) {
	for _, shared := range []int{0, 32, 64} {
		for _, active := range []int{10000, 100000} {
			b.Run(fmt.Sprintf("shared=%d/active=%d", shared, active), func(b *testing.B) {
				tr, rng := loaded(b, active, shared), rand.New(rand.NewPCG(2, 2))
				prompts, names := make([][]uint64, 4096), make([]string, 4096)
				for i := range prompts {
					prompts[i], names[i] = prompt(rng, shared, 128-shared), fmt.Sprint("new-", i)
				}
				now := start.Add(time.Minute)
				runtime.GC()
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					k := i % len(prompts)
					r := tracker.Reservation{
						ID: names[k], Rank: rank(worker.ID(rng.IntN(fleetWorkers)), rng.Uint32N(fleetRanks)),
						Hashes: prompts[k], PrefillTokens: 2048, Expires: true,
					}
					if err := tr.Reserve(r, tracker.NoLimit, now); err != nil {
						b.Fatal(err)
					}
					tr.PrefillDone(r.ID, now)
					tr.Free(r.ID, now)
				}
			})
		}
	}
}

// BenchmarkProject reads what a prompt of 64 blocks would make of 8,000 ranks, alone and while
// another goroutine books and frees. How long the calls of that one took at most is reported too.
func BenchmarkProject(b *testing.B) {
	for _, shared := range []int{0, 32} {
		for _, writing := range []bool{false, true} {
			b.Run(fmt.Sprintf("shared=%d/writer=%v", shared, writing), func(b *testing.B) {
				tr, rng := loaded(b, 10000, shared), rand.New(rand.NewPCG(3, 3))
				query := prompt(rng, shared, 64-shared)
				stop, done := make(chan struct{}), make(chan []time.Duration)
				go func() { done <- write(tr, query, writing, stop) }()
				var dst []tracker.Projection
				b.ReportAllocs()
				for b.Loop() {
					dst = tr.Project(query, start, dst[:0])
				}
				close(stop)
				if took := <-done; len(took) > 0 {
					slices.Sort(took)
					b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "ns/write-p50")
					b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "ns/write-p99")
				}
			})
		}
	}
}

func write(tr *tracker.Tracker, hashes []uint64, writing bool, stop <-chan struct{}) (took []time.Duration) {
	for i := 0; writing && len(took) < 1<<20; i++ {
		select {
		case <-stop:
			return took
		default:
		}
		from := time.Now()
		r := tracker.Reservation{ID: "w", Rank: rank(worker.ID(i%fleetWorkers), 0), Hashes: hashes, PrefillTokens: 5}
		_ = tr.Reserve(r, tracker.NoLimit, start)
		tr.Free("w", start)
		took = append(took, time.Since(from))
	}
	return took
}

// BenchmarkRead is what a router asks of the books for one decision, after one booking.
func BenchmarkRead(b *testing.B) {
	for _, shared := range []int{0, 32} {
		b.Run(fmt.Sprintf("shared=%d", shared), func(b *testing.B) {
			tr, rng := loaded(b, 10000, shared), rand.New(rand.NewPCG(3, 3))
			query := prompt(rng, shared, 64-shared)
			var board tracker.Board
			b.ReportAllocs()
			for b.Loop() {
				tr.Read(query, start, &board)
			}
		})
	}
}

// BenchmarkMemory tells what an active block costs.
func BenchmarkMemory(b *testing.B) {
	for _, shared := range []int{0, 32} {
		b.Run(fmt.Sprintf("shared=%d", shared), func(b *testing.B) {
			const active = 10000
			heap := func() uint64 {
				runtime.GC()
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				return m.HeapAlloc
			}
			empty := fleet()
			before := heap()
			for b.Loop() {
				tr := loaded(b, active, shared)
				blocks := uint64(0)
				for _, l := range tr.Loads(start) {
					blocks += l.DecodeBlocks
				}
				after := heap()
				idle := fleet() // what the ranks themselves take
				ranks := heap() - after
				b.ReportMetric(float64(after-before-ranks)/float64(blocks), "B/block")
				runtime.KeepAlive(tr)
				runtime.KeepAlive(idle)
			}
			runtime.KeepAlive(empty)
		})
	}
}
