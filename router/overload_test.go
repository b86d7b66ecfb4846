package router_test

import (
	"container/heap"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"spillway/busy"
	"spillway/router"
	"spillway/sim/engine"
	"spillway/worker"
)

// The fleet of this test: the router of the front end before four simulated engines, in virtual
// time. What takes minutes over sockets takes a fraction of a second here, and gives the same
// figures each time.
const (
	fleetWorkers    = 4
	fleetBlocks     = 32768
	prefillRate     = 20000 // tokens per second
	fleetITL        = 10 * time.Millisecond
	scrapeEvery     = time.Second
	fleetRequests   = 400
	meanPrompt      = 12000 // tokens, heavy-tailed
	meanOutput      = 300
	fleetCapacity   = fleetWorkers * prefillRate / float64(meanPrompt) // requests per second; prefill binds
	shedPrefill     = 39000
	objectiveGap    = 3 * fleetITL
	objectiveWait   = 2 * time.Second
	objectiveFactor = 2

	queuedPrefill = 30000 // the threshold with a queue, which takes its part of the time
	queuePlaces   = 6
	queueWait     = 600 * time.Millisecond
)

// TestOverloadKeepsGoodput offers twice what the fleet can do. Without thresholds nearly every
// request misses its objective; with one, nearly every admitted request meets it and the fleet
// does no less good work than at any lower load.
func TestOverloadKeepsGoodput(t *testing.T) {
	limit := uint64(shedPrefill)
	off, on := busy.DefaultConfig(), busy.DefaultConfig()
	on.ActivePrefillTokensThreshold = &limit
	var best float64
	results := map[string]fleetResult{}
	for _, tt := range []struct {
		name string
		cfg  busy.Config
		load float64
	}{
		{"70% on", on, 0.7}, {"95% off", off, 0.95}, {"95% on", on, 0.95}, {"200% off", off, 2}, {"200% on", on, 2},
	} {
		r := runSimFleet(t, tt.cfg, 0, tt.load*fleetCapacity, fleetRequests)
		t.Logf("%-8s admitted %4d shed %4.1f%% met SLO %5.1f%% goodput %.2f/s TTFT p50 %v",
			tt.name, r.admitted, 100*r.shedShare(), 100*r.goodShare(), r.goodput, r.ttft(50).Round(time.Millisecond))
		results[tt.name] = r
		best = max(best, r.goodput)
	}
	over, under := results["200% on"], results["70% on"]
	if over.goodput < 0.9*best {
		t.Errorf("goodput at 200%% with the threshold = %.2f/s, want at least 90%% of %.2f/s", over.goodput, best)
	}
	if over.goodShare() < 0.99 {
		t.Errorf("share of admitted requests that met the objective = %.3f, want at least 0.99", over.goodShare())
	}
	if under.shedShare() > 0.08 {
		t.Errorf("share shed at 70%% load = %.3f, want at most 0.08", under.shedShare())
	}
	if lost := results["200% off"]; lost.goodShare() > 0.5 {
		t.Errorf("without thresholds %.2f of the requests met the objective at 200%%: the load is no overload", lost.goodShare())
	}
}

// TestQueueTakesUpBursts: requests that come together may wait for each other, if the threshold leaves
// time for it. Then fewer are refused at a load that the fleet can bear, and no more miss their
// objective at one that it cannot.
func TestQueueTakesUpBursts(t *testing.T) {
	alone, queued := busy.DefaultConfig(), busy.DefaultConfig()
	alone.ActivePrefillTokensThreshold, queued.ActivePrefillTokensThreshold = new(uint64(shedPrefill)), new(uint64(queuedPrefill))
	shed := map[int]float64{}
	for _, load := range []float64{0.7, 2} {
		for _, queue := range []int{0, queuePlaces} {
			cfg, requests := alone, 800 // of fewer too few are shed to compare
			if queue > 0 {
				cfg = queued
			}
			if load > 1 {
				if requests = 400; queue == 0 {
					continue // TestOverloadKeepsGoodput has it
				}
			}
			r := runSimFleet(t, cfg, queue, load*fleetCapacity, requests)
			t.Logf("load %3.0f%% queue %d: admitted %d shed %4.2f%% met SLO %5.2f%% goodput %.2f/s TTFT p50 %v p99 %v",
				100*load, queue, r.admitted, 100*r.shedShare(), 100*r.goodShare(), r.goodput, r.ttft(50).Round(time.Millisecond), r.ttft(99).Round(time.Millisecond))
			if r.goodShare() < 0.99 {
				t.Errorf("load %.0f%%, queue of %d: %.4f of the admitted requests met the objective, want at least 0.99", 100*load, queue, r.goodShare())
			}
			if load < 1 {
				shed[queue] = r.shedShare()
			}
		}
	}
	if shed[queuePlaces] >= shed[0] {
		t.Errorf("share shed at 70%% load = %.4f with a queue, want less than the %.4f without", shed[queuePlaces], shed[0])
	}
}

type fleetResult struct {
	offered, admitted, good int
	goodput                 float64 // requests per second that met the objective
	waits                   []time.Duration
}

func (r fleetResult) shedShare() float64 { return float64(r.offered-r.admitted) / float64(r.offered) }
func (r fleetResult) goodShare() float64 { return float64(r.good) / float64(r.admitted) }
func (r fleetResult) ttft(p int) time.Duration {
	slices.Sort(r.waits)
	return r.waits[len(r.waits)*p/100]
}

// simFleet is the state of one run.
type simFleet struct {
	part    *router.Partition
	engines []*engine.Engine
	ids     []worker.ID
	next    []time.Time // when each engine is due
	queue   agenda
	calls   []*call // by engine request ID less one
	ended   int     // calls that are over
	events  []engine.Event
}

// call is one request.
type call struct {
	due, first, last time.Time
	isl, osl         int
	id               string
	blocks           uint64
	longGaps         int
	admitted         bool
}

func runSimFleet(t *testing.T, cfg busy.Config, queue int, rate float64, requests int) fleetResult {
	t.Helper()
	start := time.Unix(1_700_000_000, 0)
	f := newSimFleet(t, cfg, queue, start)
	rng := rand.New(rand.NewPCG(7, 7))
	at := start
	for range requests {
		at = at.Add(time.Duration(rng.ExpFloat64() / rate * float64(time.Second)))
		// Lognormal with sigma 1: the mean is e^0.5 medians.
		isl := int(min(max(meanPrompt*math.Exp(rng.NormFloat64()-0.5), 16), 120_000))
		f.calls = append(f.calls, &call{due: at, isl: isl, osl: 1 + rng.IntN(2*meanOutput), id: fmt.Sprint(len(f.calls))})
		heap.Push(&f.queue, entry{at, arrival, len(f.calls) - 1})
	}
	for i := range f.engines {
		heap.Push(&f.queue, entry{start.Add(time.Duration(i) * scrapeEvery / fleetWorkers), scrape, i})
	}
	for f.ended < requests {
		e := heap.Pop(&f.queue).(entry)
		switch e.kind {
		case arrival:
			f.arrive(t, e.i, e.at)
		case engineDue:
			if e.at.Equal(f.next[e.i]) {
				f.advance(e.i, e.at)
			}
		case waitOver: // Admit will find so
		case scrape:
			used, total := uint64(f.engines[e.i].Stats().UsedBlocks), uint64(fleetBlocks)
			f.part.Busy.Scraped(f.ids[e.i], []busy.Sample{{
				Rank: worker.Rank{Worker: f.ids[e.i]}, TakenAt: e.at, KVUsedBlocks: &used, KVTotalBlocks: &total,
			}}, false, e.at)
			heap.Push(&f.queue, entry{e.at.Add(scrapeEvery), scrape, e.i})
		}
		for admitted := f.part.Admit(e.at); len(admitted) > 0; admitted = f.part.Admit(e.at) {
			f.admit(t, admitted, e.at)
		}
	}
	for rank, load := range f.part.Tracker.Loads(start) {
		if load.PrefillTokens != 0 || load.DecodeBlocks != 0 || load.Requests != 0 {
			t.Errorf("rank %v holds %+v after the last request, want nothing", rank, load)
		}
	}
	return f.result(at.Sub(start))
}

func newSimFleet(t *testing.T, cfg busy.Config, queue int, start time.Time) *simFleet {
	t.Helper()
	catalog, err := worker.NewCatalog(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	r := router.New(router.Config{Mode: router.LeastLoaded, TrackOutputBlocks: true, QueueSize: queue}, cfg, catalog, rand.New(rand.NewPCG(1, 1)))
	f := &simFleet{next: make([]time.Time, fleetWorkers)}
	for i := range fleetWorkers {
		w, err := worker.Worker{Endpoint: fmt.Sprintf("http://w%d", i), Models: []string{"m"}, BlockSize: 16}.Normalize()
		if err != nil {
			t.Fatal(err)
		}
		if f.part, err = r.Register(&w, start); err != nil {
			t.Fatal(err)
		}
		e, err := engine.New(engine.Config{
			PrefillTokensPerSecond: prefillRate, ITL: fleetITL, ITLGrowth: 1, MaxNumSeqs: 64, BlockSize: 16, KVBlocks: fleetBlocks, Speed: 1,
		}, start)
		if err != nil {
			t.Fatal(err)
		}
		f.engines, f.ids = append(f.engines, e), append(f.ids, w.ID)
	}
	return f
}

// arrive lets the router decide about a request.
func (f *simFleet) arrive(t *testing.T, i int, now time.Time) {
	c := f.calls[i]
	admitted, err := f.part.Wait(&router.Ticket{
		Query: router.Query{Reservation: c.id, PromptTokens: uint64(c.isl)},
		Order: router.Order{Deadline: now.Add(queueWait)}, Owner: i,
	}, now)
	if err != nil {
		f.ended++
	}
	f.admit(t, admitted, now)
	heap.Push(&f.queue, entry{now.Add(queueWait), waitOver, i})
}

// admit sends requests to the engines that were chosen for them, and drops those that have waited in vain.
func (f *simFleet) admit(t *testing.T, admitted []router.Admission, now time.Time) {
	for _, a := range admitted {
		if a.Err != nil {
			f.ended++
			continue
		}
		f.send(t, a.Ticket.Owner.(int), a.Selection, now)
	}
}

func (f *simFleet) send(t *testing.T, i int, sel router.Selection, now time.Time) {
	c := f.calls[i]
	c.admitted, c.blocks = true, uint64(c.isl+15)/16
	prompt := make([]uint32, c.isl)
	for j := range prompt {
		prompt[j] = uint32(i)<<17 | uint32(j) // no prefix in common
	}
	w := slices.Index(f.ids, sel.Worker.ID)
	if err := f.engines[w].Submit(engine.Request{ID: uint64(i + 1), Prompt: prompt, Output: make([]uint32, c.osl)}, now); err != nil {
		t.Fatal(err)
	}
	f.advance(w, now)
}

// advance moves one engine to now and books what came out of it.
func (f *simFleet) advance(w int, now time.Time) {
	f.events = f.engines[w].Advance(now, f.events[:0])
	for _, e := range f.events {
		if e.ID == 0 {
			continue
		}
		c := f.calls[e.ID-1]
		switch e.Kind {
		case engine.FirstToken, engine.Token:
			if c.first.IsZero() {
				c.first = e.At
				f.part.PrefillDone(c.id, e.At)
			} else if e.At.Sub(c.last) > objectiveGap {
				c.longGaps++
			}
			c.last = e.At
			if blocks := uint64(c.isl+e.Generated+15) / 16; blocks > c.blocks {
				c.blocks = blocks
				f.part.Grow(c.id, 1, nil, e.At)
			}
		case engine.Finished:
			f.ended++
			f.part.Free(c.id, e.At)
		}
	}
	if at, ok := f.engines[w].Next(); ok && !at.Equal(f.next[w]) {
		f.next[w] = at
		heap.Push(&f.queue, entry{at, engineDue, w})
	}
}

func (f *simFleet) result(window time.Duration) fleetResult {
	r := fleetResult{offered: len(f.calls)}
	for _, c := range f.calls {
		if !c.admitted {
			continue
		}
		r.admitted++
		wait := c.first.Sub(c.due)
		r.waits = append(r.waits, wait)
		allowed := objectiveWait + objectiveFactor*time.Duration(c.isl)*time.Second/prefillRate
		if wait <= allowed && c.longGaps*100 <= c.osl { // 99% of the gaps are short enough
			r.good++
		}
	}
	r.goodput = float64(r.good) / window.Seconds()
	return r
}

type entryKind uint8

const (
	arrival entryKind = iota
	engineDue
	scrape
	waitOver // of a request that may be waiting
)

type entry struct {
	at   time.Time
	kind entryKind
	i    int // of the call or the engine
}

// agenda is a heap of what happens next.
type agenda []entry

func (a agenda) Len() int           { return len(a) }
func (a agenda) Less(i, j int) bool { return a[i].at.Before(a[j].at) }
func (a agenda) Swap(i, j int)      { a[i], a[j] = a[j], a[i] }
func (a *agenda) Push(x any)        { *a = append(*a, x.(entry)) }
func (a *agenda) Pop() any {
	old := *a
	last := old[len(old)-1]
	*a = old[:len(old)-1]
	return last
}
