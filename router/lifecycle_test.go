package router_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"spillway/busy"
	"spillway/router"
	"spillway/worker"
)

// life is one request on its way through the stages of a front end.
type life struct {
	id       string
	sel      router.Selection
	query    router.Query
	stage    stage
	attempts int
}

type stage uint8

const (
	arriving stage = iota
	prefilling
	decoding
)

// TestLifecycles replays random requests in virtual time: each is cancelled at any stage,
// retried elsewhere, freed twice, or survives its worker, which comes and goes, is marked,
// inhibited and reported on. Whatever happens, nothing is booked in the end and nobody is busy.
func TestLifecycles(t *testing.T) {
	for _, mode := range allModes {
		t.Run(string(mode), func(t *testing.T) {
			done, shed := lives(t, mode, rand.New(rand.NewPCG(3, uint64(len(mode)))))
			if done < 1000 || shed < 50 {
				t.Errorf("%d requests were admitted and %d refused: the load tests nothing", done, shed)
			}
		})
	}
}

func lives(t *testing.T, mode router.Mode, rng *rand.Rand) (done, shed int) {
	cfg := limits(new(0.5), new(uint64(3000)))
	cfg.BackpressureHold = 100 * time.Millisecond
	workers := []worker.Worker{record(t, 1, 0), record(t, 2, 1), record(t, 3, 4), record(t, 4, 3)}
	workers[3].RankRouting = worker.RankByEngine
	for i := range workers {
		workers[i].KVTotalBlocks = 2000
	}
	f := newRig(t, mode, cfg, workers...)
	now := start
	var open []*life
	const requests = 6000
	for started := 0; started < requests || len(open) > 0; {
		now = now.Add(time.Duration(rng.IntN(5)) * time.Millisecond)
		if started < requests && rng.IntN(3) > 0 && len(open) < 60 {
			started++
			open = append(open, &life{query: randomQuery(rng, mode)})
		}
		if rng.IntN(50) == 0 {
			disturb(f, workers, rng, now)
		}
		if len(open) == 0 {
			continue
		}
		i := rng.IntN(len(open))
		admitted, refused, over := open[i].step(t, f, rng, now)
		done, shed = done+admitted, shed+refused
		if over {
			open = slices.Delete(open, i, i+1)
		}
	}
	now = now.Add(time.Minute) // marks and inhibitions end
	for _, w := range workers {
		for dp := range max(w.DPSize, 1) {
			f.p.Busy.Observe(busy.Sample{Rank: worker.Rank{Worker: w.ID, DP: dp}, TakenAt: now, KVUsedBlocks: new(uint64)}, now)
		}
	}
	f.p.Busy.Tick(now)
	for _, w := range workers {
		if got := f.p.Tracker.Register(&w, now).Requests(); got != 0 {
			t.Errorf("requests on worker %v = %d, want 0", w.ID, got)
		}
	}
	f.checkEmpty()
	if idle := f.p.Tracker.Idle(now.Add(time.Hour)); len(idle) > 0 {
		t.Errorf("reservations left: %v", idle)
	}
	return done, shed
}

func randomQuery(rng *rand.Rand, mode router.Mode) router.Query {
	q := router.Query{PromptTokens: uint64(rng.IntN(2000)), NoDecode: rng.IntN(10) == 0}
	if mode == router.Direct || rng.IntN(10) == 0 {
		q.Worker = new(worker.ID(1 + rng.IntN(5)))
	}
	if rng.IntN(10) == 0 {
		q.DP = new(uint32(rng.IntN(4)))
	}
	return q
}

// step moves a request on by one stage, or ends it.
func (l *life) step(t *testing.T, f *rig, rng *rand.Rand, now time.Time) (admitted, refused int, over bool) {
	if rng.IntN(8) == 0 && l.stage != arriving { // the client leaves
		f.p.Free(l.id, now)
		f.p.PrefillDone(l.id, now) // a token that was on its way
		f.p.Grow(l.id, 1, nil, now)
		return 0, 0, true
	}
	switch l.stage {
	case arriving:
		l.attempts++
		l.id = fmt.Sprintf("%p-%d", l, l.attempts)
		l.query.Reservation = l.id
		sel, err := f.p.Select(l.query, now)
		if err != nil {
			for _, known := range []error{router.ErrOverloaded, router.ErrUnroutable, router.ErrPinBusy, router.ErrPinUnknown, router.ErrNoWorkers} {
				if errors.Is(err, known) {
					return 0, 1, true
				}
			}
			t.Fatalf("Select(%+v) = %v", l.query, err)
		}
		l.sel, l.stage = sel, prefilling
		return 1, 0, false
	case prefilling:
		if rng.IntN(6) == 0 { // the worker refuses, or breaks off
			f.p.Free(l.id, now)
			if rng.IntN(4) == 0 {
				f.p.Busy.Mark(l.sel.Worker.ID, &l.sel.Rank.DP, 0, now)
			} else {
				f.p.Busy.Inhibit(l.sel.Worker.ID, now.Add(50*time.Millisecond), now)
			}
			l.query.Exclude = append(l.query.Exclude, l.sel.Worker.ID)
			l.stage = arriving
			return 0, 0, l.attempts > 2 || l.query.Worker != nil
		}
		f.p.PrefillDone(l.id, now)
		f.p.PrefillDone(l.id, now)
		l.stage = decoding
	case decoding:
		f.p.Grow(l.id, uint64(rng.IntN(20)), nil, now)
		if rng.IntN(5) == 0 {
			f.p.Free(l.id, now)
			f.p.Free(l.id, now)
			return 0, 0, true
		}
	}
	return 0, 0, false
}

// disturb lets something happen to a worker, and all report how full they are.
func disturb(f *rig, workers []worker.Worker, rng *rand.Rand, now time.Time) {
	w := workers[rng.IntN(len(workers))]
	for _, w := range workers {
		used := uint64(rng.IntN(1200)) // of 2000, at a limit of 1000
		for dp := range max(w.DPSize, 1) {
			f.p.Busy.Observe(busy.Sample{Rank: worker.Rank{Worker: w.ID, DP: dp}, TakenAt: now, KVUsedBlocks: &used}, now)
		}
	}
	switch rng.IntN(6) {
	case 0:
		if w.ID != 2 { // so that the partition stays
			f.r.Unregister(w.ID, now)
		}
	case 1:
		f.r.SetThresholds("M", func(t busy.Thresholds) busy.Thresholds { return t }, now)
	case 2:
		f.p.Busy.SetHealthy(w.ID, rng.IntN(3) > 0, now)
	case 3:
		f.p.Busy.Tick(now)
	default:
		if _, err := f.r.Register(&w, now); err != nil {
			f.t.Fatal(err)
		}
		f.p.Busy.SetHealthy(w.ID, true, now)
	}
}
