package proxy

import (
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sony/gobreaker/v2"

	"spillway/busy"
	"spillway/worker"
)

// TestCircuitInTime leads a circuit through hours. The breaker reads the clock itself, so this is
// the clock of a bubble.
func TestCircuitInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &worker.Worker{ID: 1, Name: "w"}
		list := busy.New(busy.DefaultConfig(), nil)
		list.Register(w, time.Now())
		c := newCircuit(DefaultConfig(), w, list, slog.New(slog.DiscardHandler))
		is := func(when string, state gobreaker.State, routable bool) {
			t.Helper()
			if got := len(list.Snapshot().Routable) == 1; c.now() != state || got != routable {
				t.Fatalf("%s: %v, routable %v; want %v, %v", when, c.now(), got, state, routable)
			}
		}
		leave := func() *permit {
			t.Helper()
			p, ok := c.allow(time.Now())
			if !ok {
				t.Fatal("no leave")
			}
			return &p
		}
		end := func(times int, v verdict, pause time.Duration) {
			t.Helper()
			for range times {
				time.Sleep(pause)
				leave().settle(v, time.Now())
			}
		}
		end(9, failed, time.Second)
		end(1, succeeded, time.Second)
		end(9, failed, time.Second)
		is("a success has ended the row", gobreaker.StateClosed, true)
		time.Sleep(3 * time.Minute)
		end(9, failed, time.Second)
		is("the row is older than the window", gobreaker.StateClosed, true)
		time.Sleep(3 * time.Minute)
		end(30, failed, 20*time.Second)
		is("never ten in one window", gobreaker.StateClosed, true)
		time.Sleep(3 * time.Minute)
		end(9, failed, 10*time.Second)
		end(50, neutral, 0)
		is("nine in one window", gobreaker.StateClosed, true)
		late := leave()
		end(1, failed, 10*time.Second)
		is("ten", gobreaker.StateOpen, false)
		late.settle(succeeded, time.Now())
		late.settle(succeeded, time.Now())
		is("what began before counts no more", gobreaker.StateOpen, false)
		if _, ok := c.allow(time.Now()); ok {
			t.Error("leave while open")
		}
		time.Sleep(59 * time.Second)
		c.refresh(time.Now())
		is("not yet", gobreaker.StateOpen, false)
		time.Sleep(2 * time.Second)
		c.refresh(time.Now())
		is("after a minute", gobreaker.StateHalfOpen, true)

		one := leave()
		is("one tries", gobreaker.StateHalfOpen, false)
		if _, ok := c.allow(time.Now()); ok {
			t.Error("two at a time")
		}
		one.settle(neutral, time.Now())
		one.settle(failed, time.Now()) // does not count
		is("a try that says nothing", gobreaker.StateHalfOpen, true)
		end(2, succeeded, 0)
		end(100, neutral, 0)
		is("two successes", gobreaker.StateHalfOpen, true)
		end(1, failed, 0)
		is("a try that fails", gobreaker.StateOpen, false)
		time.Sleep(61 * time.Second)
		c.refresh(time.Now())
		end(3, succeeded, 0)
		is("three successes", gobreaker.StateClosed, true)
		end(10, failed, 0)
		is("and again", gobreaker.StateOpen, false)
		c.retire(time.Now())
		is("retired", gobreaker.StateOpen, true)
	})
}

// TestNoCircuit is threshold 0.
func TestNoCircuit(t *testing.T) {
	cfg := DefaultConfig()
	cfg.CBFailureThreshold = 0
	c := newCircuit(cfg, &worker.Worker{ID: 1}, busy.New(busy.DefaultConfig(), nil), slog.New(slog.DiscardHandler))
	for range 100 {
		p, ok := c.allow(time.Now())
		if !ok {
			t.Fatal("no leave without a breaker")
		}
		p.settle(failed, time.Now())
	}
	c.refresh(time.Now())
	if c.now() != gobreaker.StateClosed {
		t.Errorf("state %v, want closed", c.now())
	}
}
