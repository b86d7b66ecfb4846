package busy_test

import (
	"testing"

	"spillway/busy"
	"spillway/worker"
)

const (
	fleetWorkers = 1000
	fleetRanks   = 8
)

// fleet is a list of 1,000 workers with 8 ranks each, all with books and a page.
func fleet(tb testing.TB) (*busy.List, books) {
	b := books{}
	l := busy.New(config(tb, "0.85,10000,0.9"), b)
	for i := range fleetWorkers {
		id := worker.ID(i)
		l.Register(&worker.Worker{ID: id, DPSize: fleetRanks, MaxNumBatchedTokens: 8192}, t0)
		l.Scraped(id, fleetPage(id, 500), false, t0)
		for dp := range uint32(fleetRanks) {
			b[worker.Rank{Worker: id, DP: dp}] = [2]uint64{400, 2000}
		}
		l.Refresh(id, t0)
	}
	return l, b
}

func fleetPage(id worker.ID, used uint64) []busy.Sample {
	page := make([]busy.Sample, fleetRanks)
	for dp := range page {
		page[dp] = busy.Sample{Rank: worker.Rank{Worker: id, DP: uint32(dp)}, TakenAt: t0,
			KVUsedBlocks: new(used), KVTotalBlocks: new(uint64(1000)), Running: new(uint64(3)), Waiting: new(uint64(0))}
	}
	return page
}

// book sets what all ranks of a worker have been promised.
func book(b books, id worker.ID, blocks uint64) {
	for dp := range uint32(fleetRanks) {
		b[worker.Rank{Worker: id, DP: dp}] = [2]uint64{blocks, 2000}
	}
}

// What happens for each request must leave no garbage as long as no verdict changes.
func TestSteadyStateAllocatesNothing(t *testing.T) {
	l, b := fleet(t)
	page := fleetPage(500, 510)
	dst := make([]busy.Room, 0, fleetRanks)
	n := uint64(0)
	for name, f := range map[string]func(){
		"Refresh": func() {
			n++
			b[worker.Rank{Worker: 500, DP: 3}] = [2]uint64{400 + n%100, 2000}
			l.Refresh(500, t0)
		},
		"Scraped":   func() { l.Scraped(500, page, false, t0) },
		"Observe":   func() { l.Observe(page[2], t0) },
		"FreeRanks": func() { dst = l.FreeRanks(500, dst[:0]) },
		"Tick":      func() { l.Tick(t0) },
		"Snapshot":  func() { l.Snapshot() },
	} {
		if got := testing.AllocsPerRun(100, f); got != 0 {
			t.Errorf("%s: %v allocations, want 0", name, got)
		}
	}
}

func BenchmarkRefresh(b *testing.B) {
	b.Run("verdict stays", func(b *testing.B) {
		l, _ := fleet(b)
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			l.Refresh(worker.ID(i%fleetWorkers), t0)
		}
	})
	b.Run("verdict changes", func(b *testing.B) { // each publishes a snapshot of 1,000 workers
		l, loads := fleet(b)
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			book(loads, 500, uint64(1000*(i%2)))
			l.Refresh(500, t0)
		}
	})
}

func BenchmarkScraped(b *testing.B) {
	l, _ := fleet(b)
	page := fleetPage(500, 510)
	b.ReportAllocs()
	for b.Loop() {
		l.Scraped(500, page, false, t0)
	}
}

func BenchmarkSetThresholds(b *testing.B) {
	l, _ := fleet(b)
	th := limits(b, "0.85,10000,0.9")
	b.ReportAllocs()
	for b.Loop() {
		l.SetThresholds(th, t0)
	}
}

func BenchmarkFreeRanks(b *testing.B) {
	l, _ := fleet(b)
	dst := make([]busy.Room, 0, fleetRanks)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		dst = l.FreeRanks(worker.ID(i%fleetWorkers), dst[:0])
	}
}

func BenchmarkWorkers(b *testing.B) {
	l, _ := fleet(b)
	b.ReportAllocs()
	for b.Loop() {
		l.Workers(t0)
	}
}
