package proxy

import (
	"testing"
	"testing/synctest"
	"time"

	"spillway/router"
	"spillway/worker"
)

// TestWakeOrder: requests that are let go for one worker go one after the other, those of different
// workers do not wait for each other, and none waits long for one that does not get away.
func TestWakeOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := new(Server)
		a, b := &worker.Worker{ID: 1}, &worker.Worker{ID: 2}
		s.peers.Store(a.ID, new(peer))
		s.peers.Store(b.ID, new(peer))
		let := func(w *worker.Worker, err error) *waiter {
			x := &waiter{ready: make(chan router.Admission, 1), sent: make(chan struct{})}
			s.wake([]router.Admission{{Ticket: &router.Ticket{Owner: x}, Selection: router.Selection{Worker: w}, Err: err}})
			return x
		}
		waited := func(w *waiter) time.Duration {
			from := time.Now()
			w.follow()
			return time.Since(from)
		}

		first := let(a, nil)
		other := let(b, nil)
		refused := let(nil, router.ErrQueueTimeout)
		second := let(a, nil)
		third := let(a, nil)
		if d := waited(first) + waited(other) + waited(refused); d != 0 {
			t.Errorf("with nobody ahead: waited %v", d)
		}
		time.AfterFunc(time.Millisecond, func() { close(first.sent) })
		if d := waited(second); d != time.Millisecond {
			t.Errorf("the second waited %v for the first, which was on its way after 1ms", d)
		}
		if d := waited(third); d != maxBehind {
			t.Errorf("the third waited %v for the second, which never gets away; want %v", d, maxBehind)
		}
		close(third.sent)
		if d := waited(let(a, nil)); d != 0 {
			t.Errorf("the fourth waited %v for the third, which was on its way", d)
		}
	})
}
