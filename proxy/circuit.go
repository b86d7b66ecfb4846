package proxy

import (
	"errors"
	"log/slog"
	"math"
	"sync"
	"time"

	"github.com/sony/gobreaker/v2"

	"spillway/busy"
	"spillway/worker"
)

// verdict is what one attempt says about the worker that it went to.
type verdict uint8

const (
	neutral   verdict = iota // nothing: the client left, asked for what cannot be, or came at a bad time
	succeeded                // it does its work
	failed                   // it does not
)

var (
	errNeutral = errors.New("proxy: attempt says nothing about its worker")
	errFailed  = errors.New("proxy: attempt failed")
)

// circuit keeps requests from a worker that fails again and again. It is closed while the worker
// works, opens after a row of failures, and is half-open after a while: then one request at a time
// tries the worker. It is safe for concurrent use.
type circuit struct {
	id      worker.ID
	name    string
	list    *busy.List                                 // is told while the worker may not be chosen
	log     *slog.Logger                               //
	breaker *gobreaker.TwoStepCircuitBreaker[struct{}] // nil: never opens; called with mu held, and with it its callback

	mu      sync.Mutex // guards the fields below; taken before the lock of list
	state   gobreaker.State
	trying  bool // half-open, and a request is out
	blocked bool // what list was told
}

// periods is into how many parts the window is divided: failures leave it one part at a time.
const periods = 12

func newCircuit(cfg Config, w *worker.Worker, list *busy.List, log *slog.Logger) *circuit {
	c := &circuit{id: w.ID, name: w.Name, list: list, log: log}
	if cfg.CBFailureThreshold == 0 {
		return c
	}
	most := uint32(min(cfg.CBFailureThreshold, math.MaxUint32))
	c.breaker = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		MaxRequests:  uint32(min(cfg.CBSuccessThreshold, math.MaxUint32)),
		Interval:     cfg.CBWindow,
		BucketPeriod: max(cfg.CBWindow/periods, 1),
		Timeout:      cfg.CBOpen,
		// In a row, and in the window: each count alone is one of them only.
		ReadyToTrip:   func(n gobreaker.Counts) bool { return min(n.ConsecutiveFailures, n.TotalFailures) >= most },
		OnStateChange: func(_ string, _, to gobreaker.State) { c.state = to },
		IsExcluded:    func(err error) bool { return errors.Is(err, errNeutral) },
	})
	return c
}

// permit is leave for one attempt. It must be settled; the zero permit is settled already.
type permit struct {
	circuit *circuit
	done    func(error)
	try     bool // the one request that tries a half-open worker
}

// allow asks for leave to send one request. It refuses while the circuit is open, or half-open
// with another request out.
func (c *circuit) allow(now time.Time) (p permit, ok bool) {
	if c.breaker == nil {
		return permit{}, true
	}
	c.change(now, func() {
		if c.trying {
			return
		}
		done, err := c.breaker.Allow()
		if err != nil {
			return
		}
		c.trying = c.state == gobreaker.StateHalfOpen
		p, ok = permit{c, done, c.trying}, true
	})
	return p, ok
}

// settle says how the attempt ended. Only the first call counts.
func (p *permit) settle(v verdict, now time.Time) {
	if p.done == nil {
		return
	}
	done, try := p.done, p.try
	p.done = nil
	p.circuit.change(now, func() {
		if try {
			p.circuit.trying = false
		}
		switch v {
		case succeeded:
			done(nil)
		case failed:
			done(errFailed)
		default:
			done(errNeutral)
		}
	})
}

// refresh lets an open circuit become half-open when its time has come.
func (c *circuit) refresh(now time.Time) {
	if c.breaker != nil {
		c.change(now, func() { c.breaker.State() })
	}
}

// now is the present state.
func (c *circuit) now() gobreaker.State {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state
}

// change does f under the lock and passes on what follows from it.
func (c *circuit) change(now time.Time, f func()) {
	c.mu.Lock()
	before := c.state
	f()
	after := c.state
	if blocked := after == gobreaker.StateOpen || c.trying; blocked != c.blocked {
		c.blocked = blocked
		c.list.SetCircuit(c.id, blocked, now)
	}
	c.mu.Unlock()
	if before != after {
		c.log.Warn("circuit", "worker", c.name, "state", after.String())
	}
}

// retire makes the worker's place in the list free of the circuit, which is not used any more.
func (c *circuit) retire(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.blocked {
		c.blocked = false
		c.list.SetCircuit(c.id, false, now)
	}
}

// number is the state of a circuit as metrics tell it; of none, closed.
func (c *circuit) number() float64 {
	if c == nil {
		return 0
	}
	switch c.now() {
	case gobreaker.StateOpen:
		return 1
	case gobreaker.StateHalfOpen:
		return 2
	}
	return 0
}
