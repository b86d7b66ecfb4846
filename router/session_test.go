package router_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"spillway/busy"
	"spillway/router"
	"spillway/worker"
)

// remembering is a configuration in which sessions last a minute.
func remembering(mode router.Mode) router.Config {
	cfg := router.DefaultConfig()
	cfg.Mode, cfg.SessionTTLSecs = mode, new(uint32(60))
	return cfg
}

// TestSessionStays: in every mode a session stays on its rank, until that is busy, gone or excluded, or a
// pin says otherwise; then it stays where it went.
func TestSessionStays(t *testing.T) {
	for _, mode := range allModes {
		if mode == router.Direct {
			continue
		}
		t.Run(string(mode), func(t *testing.T) {
			f := newConfigured(t, remembering(mode), limits(new(0.5), nil), record(t, 1, 2), record(t, 2, 2), record(t, 3, 2))
			go1 := func(q router.Query, effect router.SessionEffect) worker.Rank {
				t.Helper()
				q.Session, q.PromptTokens = "s", 100
				sel, id, err := f.ask(q)
				defer f.p.Free(id, start)
				if err != nil || sel.Session != effect {
					t.Fatalf("Select = %+v, %v; want effect %d", sel, err, effect)
				}
				return sel.Booked
			}
			at := go1(router.Query{}, router.SessionNew)
			for range 10 {
				if got := go1(router.Query{}, router.SessionKept); got != at {
					t.Fatalf("a session went from %v to %v", at, got)
				}
			}
			for range 3 { // others do not matter
				if _, _, err := f.ask(router.Query{PromptTokens: 9, Session: "other"}); err != nil {
					t.Fatal(err)
				}
			}
			f.used(at.Worker, 60, at.DP)
			second := go1(router.Query{}, router.SessionMoved)
			f.used(at.Worker, 0, at.DP)
			if got := go1(router.Query{}, router.SessionKept); got != second {
				t.Errorf("a session that moved to %v went to %v", second, got)
			}
			third := go1(router.Query{Exclude: []worker.ID{second.Worker}}, router.SessionMoved)
			if third.Worker == second.Worker {
				t.Errorf("a request went to worker %v, which is excluded", second.Worker)
			}
			f.r.Unregister(third.Worker, start)
			fourth := go1(router.Query{}, router.SessionMoved)
			pin := worker.Rank{Worker: fourth.Worker, DP: 1 - fourth.DP}
			if got := go1(router.Query{Worker: &pin.Worker, DP: &pin.DP}, router.SessionMoved); got != pin {
				t.Errorf("a pin to %v led to %v", pin, got)
			}
			if n, limit := f.p.Sessions(start); n != 2 || limit < n {
				t.Errorf("Sessions = %d of %d, want 2", n, limit)
			}
			if n, _ := f.p.Sessions(start.Add(61 * time.Second)); n != 0 {
				t.Errorf("after 61 s %d sessions are remembered", n)
			}
		})
	}
}

// TestSessionOfOwnRank: of a worker that picks its ranks a session keeps the worker.
func TestSessionOfOwnRank(t *testing.T) {
	own := func(id worker.ID) worker.Worker {
		w := record(t, id, 4)
		w.RankRouting = worker.RankByEngine
		return w
	}
	f := newConfigured(t, remembering(router.KV), busy.DefaultConfig(), own(1), own(2), own(3))
	first, _, err := f.ask(router.Query{PromptTokens: 100, Session: "s"})
	for range 10 {
		sel, _, again := f.ask(router.Query{PromptTokens: 100, Session: "s"})
		if err = errors.Join(err, again); err != nil || sel.Booked != first.Booked || sel.MultiRank {
			t.Fatalf("Select = %+v, %v; want %v as before, and no rank named", sel, err, first.Booked)
		}
	}
}

// TestOutlook compares what is expected of a request with what becomes of it.
func TestOutlook(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	sentinels := []error{router.ErrNoWorkers, router.ErrUnroutable, router.ErrOverloaded, router.ErrPinUnknown, router.ErrPinBusy}
	kind := func(err error) string {
		for _, s := range sentinels {
			if errors.Is(err, s) {
				return s.Error()
			}
		}
		return fmt.Sprint(err)
	}
	told := map[string]int{}
	for range 3000 {
		var workers []worker.Worker
		for id := range worker.ID(rng.IntN(4)) {
			workers = append(workers, record(t, id+1, uint32(rng.IntN(3))))
		}
		f := newSized(t, router.KV, limits(new(0.5), nil), 0, workers...)
		if len(workers) == 0 {
			w := record(t, 9, 0) // to have a partition at all
			f.register(w)
			f.r.Unregister(9, start)
		}
		for _, w := range workers {
			if rng.IntN(2) == 0 {
				f.used(w.ID, 90, 0, 1)
			}
			if rng.IntN(4) == 0 {
				f.p.Busy.Inhibit(w.ID, start.Add(time.Hour), start)
			}
			if rng.IntN(4) == 0 {
				f.p.Busy.Mark(w.ID, nil, time.Hour, start)
			}
		}
		q := router.Query{PromptTokens: 100}
		if rng.IntN(2) == 0 {
			q.Worker = new(worker.ID(rng.IntN(4) + 1))
		}
		if rng.IntN(3) == 0 {
			q.DP = new(uint32(rng.IntN(3)))
		}
		if rng.IntN(3) == 0 {
			q.Exclude = []worker.ID{worker.ID(rng.IntN(3) + 1)}
		}
		if rng.IntN(3) == 0 && len(workers) > 0 {
			q.Only = ids(workers[0])
		}
		expected := f.p.Outlook(&q, false, start)
		_, _, err := f.ask(q)
		if kind(expected) != kind(err) {
			t.Fatalf("Outlook(%+v) = %v, Select = %v", q, expected, err)
		}
		told[kind(err)]++
	}
	if len(told) != len(sentinels)+1 {
		t.Errorf("outcomes: %v, want all of %v and none", told, sentinels)
	}
}

// TestOutlookOfQueue: who may wait is told that it may, as long as there is a place.
func TestOutlookOfQueue(t *testing.T) {
	f := newSized(t, router.KV, limits(new(0.5), nil), 2, record(t, 1, 0))
	f.used(1, 90, 0)
	q := router.Query{PromptTokens: 100}
	for i := range 3 {
		err := f.p.Outlook(&q, true, start)
		var full *router.QueueFullError
		if errors.As(err, &full) != (i == 2) || i < 2 && err != nil {
			t.Errorf("Outlook while %d of 2 wait = %v", i, err)
		}
		if err := f.p.Outlook(&q, false, start); !errors.Is(err, router.ErrOverloaded) {
			t.Errorf("Outlook for one that must not wait = %v, want ErrOverloaded", err)
		}
		if i < 2 {
			if admitted, err := f.p.Wait(&router.Ticket{Query: router.Query{PromptTokens: 100, Reservation: fmt.Sprint(i)}}, start); err != nil || len(admitted) > 0 {
				t.Fatalf("Wait = %v, %v", admitted, err)
			}
		}
	}
}
