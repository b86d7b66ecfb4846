package sim

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"spillway/sim/engine"
)

// rank drives one engine in real time: a goroutine sleeps until the engine has something due,
// and tells the handlers what happened.
type rank struct {
	worker *worker
	dp     int
	wake   chan struct{} // capacity 1: something is due earlier than the goroutine thinks

	mu     sync.Mutex // guards the fields below and the engine
	eng    *engine.Engine
	pace   pace
	open   map[uint64]*choice // by ID: submitted and not ended by end
	lastID uint64
	alarm  time.Time // in the engine's time; the goroutine sleeps until then; zero is until woken
	events []engine.Event
	news   []*choice // to be published
	late   lateness
	tally  tally

	held    map[uint64]uint64 // what the prefix cache holds: by the engine's hash, kvhash's
	changes []engine.CacheEvent
	local   []uint64
	feed    *feed // set once; nil without KV events
}

// tally is what a rank counts beside its engine.
type tally struct {
	afterLeaving  uint64 // tokens, see figures
	undelivered   uint64 // tokens, see figures
	cut           uint64 // requests not delivered whole, counted per sequence
	promptLengths promptLengths
}

// choice is one sequence as its handler sees it.
type choice struct {
	id     uint64
	index  int // in the answer
	rank   *rank
	prompt int // tokens
	text   words
	stop   bool // ends by itself, as if by a stop token, and not by a limit
	bell   chan<- struct{}

	generated int           // guarded by the rank's lock
	reason    engine.Reason // guarded by the rank's lock
	cached    atomic.Int64  // prompt tokens that the cache held; valid once there is progress
	progress  atomic.Uint64 // generated << 8 | reason, so that a last token comes with its end

	// The handler's own.
	told  int  // tokens put into events
	ended bool // the last event is made
	had   int  // tokens that the client got or, unary, could have got
}

// state is how many tokens there are, and why these are all or 0.
func (ch *choice) state() (generated int, reason engine.Reason) {
	p := ch.progress.Load()
	return int(p >> 8), engine.Reason(p & 0xff)
}

func newRank(w *worker, dp int) (*rank, error) {
	eng, err := engine.New(w.server.cfg.engine(), w.server.started)
	if err != nil {
		return nil, err
	}
	r := &rank{
		worker: w, dp: dp, wake: make(chan struct{}, 1), eng: eng,
		open: make(map[uint64]*choice), held: make(map[uint64]uint64),
	}
	if w.server.cfg.KVEventsPort > 0 {
		r.feed = newFeed()
	}
	return r, nil
}

// run lets the engine's time pass until ctx ends.
func (r *rank) run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		if next, ok := r.advance(); ok {
			timer.Reset(time.Until(next))
		} else {
			timer.Stop()
		}
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-r.wake:
		}
	}
}

// advance tells what is due and returns the real time at which something will be next.
func (r *rank) advance() (next time.Time, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tellLocked(time.Now())
	next, ok = r.eng.Next()
	r.alarm = next
	if !ok {
		r.alarm = time.Time{}
	}
	return r.pace.when(next), ok
}

// tellLocked lets the engine catch up with now and tells the handlers. Handlers are rung once
// for all that is due.
func (r *rank) tellLocked(now time.Time) {
	r.events = r.eng.Advance(r.pace.engine(now), r.events[:0])
	for _, ev := range r.events {
		if ev.Kind == engine.Step {
			r.late.add(now.Sub(r.pace.when(ev.At)))
			continue
		}
		c := r.open[ev.ID]
		if c == nil || ev.Kind == engine.Preempted {
			continue
		}
		if ev.Kind == engine.FirstToken || ev.Kind == engine.Finished {
			c.cached.Store(int64(ev.CachedTokens))
		}
		if ev.Kind == engine.Finished {
			r.tally.promptLengths.add(c.prompt)
			c.reason = ev.Reason
		}
		c.generated = ev.Generated
		r.news = append(r.news, c)
	}
	for i, c := range r.news {
		c.progress.Store(uint64(c.generated)<<8 | uint64(c.reason))
		select {
		case c.bell <- struct{}{}:
		default:
		}
		r.news[i] = nil
	}
	r.news = r.news[:0]
	r.tellCacheLocked()
}

// rouseLocked wakes the goroutine if something is due before it would look.
func (r *rank) rouseLocked() {
	next, ok := r.eng.Next()
	if !ok || !r.alarm.IsZero() && !next.Before(r.alarm) {
		return
	}
	r.wakeUp()
}

func (r *rank) wakeUp() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// setPace makes everything take factor times as long, until then or with zero for ever.
func (r *rank) setPace(now time.Time, factor float64, until time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tellLocked(now)
	r.pace = r.pace.change(now, factor, until)
	r.wakeUp() // to sleep anew, by the new pace
}

// submit hands c to the engine, which keeps prompt and output until c has ended.
func (r *rank) submit(c *choice, prompt, output []uint32, priority int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lastID++
	c.id = r.lastID
	err := r.eng.Submit(engine.Request{ID: c.id, Prompt: prompt, Output: output, Priority: priority}, r.pace.engine(time.Now()))
	if err == nil {
		r.open[c.id] = c
	}
	r.tellCacheLocked()
	r.rouseLocked()
	return err
}

// end says that the handler of c is done with it: it has delivered all of it, or not. Then
// the sequence is aborted if it still runs.
func (r *rank) end(c *choice, whole bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !whole {
		now := time.Now()
		r.tellLocked(now)
		r.eng.Abort(c.id, r.pace.engine(now))
		r.tellCacheLocked()
		r.tally.cut++
		r.tally.undelivered += uint64(c.generated)
		r.tally.afterLeaving += uint64(max(0, c.generated-c.had))
		r.rouseLocked()
	}
	delete(r.open, c.id)
}
