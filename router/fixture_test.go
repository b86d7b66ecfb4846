package router_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"spillway/busy"
	"spillway/router"
	"spillway/tracker"
	"spillway/worker"
)

var errDuplicate = tracker.ErrDuplicate

var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// record is a worker of model M with the given ID and number of ranks; 0 declares none.
func record(t testing.TB, id worker.ID, dpSize uint32) worker.Worker {
	t.Helper()
	w, err := worker.Worker{
		ID: id, Name: fmt.Sprintf("w%d", id), Endpoint: fmt.Sprintf("http://w%d:8000", id), Models: []string{"M"}, DPSize: dpSize,
	}.Normalize()
	if err != nil {
		t.Fatalf("Normalize(worker %d) = %v", id, err)
	}
	return w
}

// rig is a router with workers, and the partition of model M.
type rig struct {
	t    testing.TB
	r    *router.Router
	p    *router.Partition
	next int
}

func limits(decode *float64, prefill *uint64) busy.Config {
	cfg := busy.DefaultConfig()
	cfg.ActiveDecodeBlocksThreshold, cfg.ActivePrefillTokensThreshold = decode, prefill
	return cfg
}

func newRig(t testing.TB, mode router.Mode, limits busy.Config, workers ...worker.Worker) *rig {
	t.Helper()
	return newSized(t, mode, limits, 0, workers...)
}

// newSized is newRig with a queue of so many places.
func newSized(t testing.TB, mode router.Mode, limits busy.Config, queue int, workers ...worker.Worker) *rig {
	t.Helper()
	cfg := router.DefaultConfig()
	cfg.Mode, cfg.QueueSize = mode, queue
	return newConfigured(t, cfg, limits, workers...)
}

func newConfigured(t testing.TB, cfg router.Config, limits busy.Config, workers ...worker.Worker) *rig {
	t.Helper()
	catalog, err := worker.NewCatalog([]string{"M"}, nil)
	if err != nil {
		t.Fatalf("NewCatalog = %v", err)
	}
	f := &rig{t: t, r: router.New(cfg, limits, catalog, rand.New(rand.NewPCG(1, 2)))}
	for _, w := range workers {
		f.register(w)
	}
	return f
}

func (f *rig) register(w worker.Worker) *router.Partition {
	f.t.Helper()
	p, err := f.r.Register(&w, start)
	if err != nil {
		f.t.Fatalf("Register(%s) = %v", w.Name, err)
	}
	if f.p == nil {
		f.p = p
	}
	return p
}

// ask selects for a request of so many tokens under an ID of its own, which it returns.
func (f *rig) ask(q router.Query) (router.Selection, string, error) {
	f.next++
	q.Reservation = fmt.Sprint("r", f.next)
	sel, err := f.p.Select(q, start)
	return sel, q.Reservation, err
}

// used reports so many of 100 KV blocks as used on each of the given ranks of a worker.
func (f *rig) used(id worker.ID, blocks uint64, ranks ...uint32) {
	total := uint64(100)
	page := make([]busy.Sample, len(ranks))
	for i, dp := range ranks {
		page[i] = busy.Sample{
			Rank: worker.Rank{Worker: id, DP: dp}, Source: busy.Scrape, TakenAt: start, KVUsedBlocks: &blocks, KVTotalBlocks: &total,
		}
	}
	f.p.Busy.Scraped(id, page, false, start)
}

// checkEmpty fails the test unless all books are zero and nobody is busy.
func (f *rig) checkEmpty() {
	f.t.Helper()
	f.r.Partitions("", func(p *router.Partition) {
		for rank, load := range p.Tracker.Loads(start) {
			if load != (tracker.Load{}) {
				f.t.Errorf("load of %+v in %+v = %+v, want none", rank, p.Key, load)
			}
		}
		if busy := p.Busy.Snapshot().Busy; len(busy) > 0 {
			f.t.Errorf("busy in %+v = %v, want nobody", p.Key, busy)
		}
	})
}

func ids(ws ...worker.Worker) []*worker.Worker {
	list := make([]*worker.Worker, len(ws))
	for i := range ws {
		list[i] = &ws[i]
	}
	return list
}

var allModes = []router.Mode{router.RoundRobin, router.Random, router.PowerOfTwo, router.LeastLoaded, router.Direct, router.KV}
