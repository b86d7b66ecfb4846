package sim

import (
	"context"
	"encoding/json"
	"log/slog"
	"sync"
	"time"

	zmq "github.com/pebbe/zmq4"

	"spillway/sim/engine"
)

// Lateness gives tests the histogram behind GET /sim/stats.
type Lateness struct{ l lateness }

// Add counts a delay.
func (l *Lateness) Add(d time.Duration) { l.l.add(d) }

// Merge adds all of o.
func (l *Lateness) Merge(o *Lateness) { l.l.merge(&o.l) }

// Quantile is the delay that the share q does not exceed.
func (l *Lateness) Quantile(q float64) time.Duration { return l.l.quantile(q) }

// ParsePrompts reads a prompt as the completions route does.
func ParsePrompts(raw []byte) ([][]uint32, error) { return parsePrompts(raw) }

// ChatTokens renders a chat request.
func ChatTokens(body []byte) ([]uint32, error) {
	var c conversation
	if err := json.Unmarshal(body, &c); err != nil {
		return nil, err
	}
	return c.tokens()
}

// FaultNames lists all faults.
func FaultNames() []string {
	var names []string
	for _, k := range faultKinds() {
		names = append(names, k.name)
	}
	return names
}

// Pace gives tests the clock that the fault slow changes.
type Pace struct{ p pace }

// Engine is the engine's time at now.
func (p *Pace) Engine(now time.Time) time.Time { return p.p.engine(now) }

// When is the real time at which the engine's is t.
func (p *Pace) When(t time.Time) time.Time { return p.p.when(t) }

// Change makes everything take factor times as long from now until then.
func (p *Pace) Change(now time.Time, factor float64, until time.Time) {
	p.p = p.p.change(now, factor, until)
}

// SlowedRank runs a rank of cfg for one sequence, whose work takes factor times as long from
// its start until then, and again as before after that. It returns how long the sequence took.
func SlowedRank(ctx context.Context, cfg Config, tokens int, factor float64, until time.Duration) (time.Duration, error) {
	s, err := New(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return 0, err
	}
	ctx, stop := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	r := s.workers[0].ranks[0]
	running.Go(func() { r.run(ctx) })
	start := time.Now()
	r.setPace(start, factor, start.Add(until))
	time.Sleep(time.Second) // so that the engine is behind when the sequence comes
	start = start.Add(time.Second)
	bell := make(chan struct{}, 1)
	c := &choice{rank: r, prompt: 1, bell: bell}
	if err := r.submit(c, []uint32{7}, make([]uint32, tokens), 0); err != nil {
		return 0, err
	}
	for {
		select {
		case <-bell:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
		if _, reason := c.state(); reason != 0 {
			r.end(c, true)
			return time.Since(start), nil
		}
	}
}

// Feed is what waits for a publisher, on its own.
type Feed struct{ f *feed }

// NewFeed makes an empty one.
func NewFeed() *Feed { return &Feed{newFeed()} }

// Put adds a store of blocks of one token.
func (f *Feed) Put(blocks int) {
	f.f.put(time.Now(), []engine.CacheEvent{{Kind: engine.Stored, Hashes: make([]uint64, blocks), Tokens: make([]uint32, blocks)}}, 1)
}

// Take returns the numbers of the batches that wait.
func (f *Feed) Take() (sequences []uint64) {
	for _, b := range f.f.take() {
		sequences = append(sequences, b.sequence)
	}
	return sequences
}

// Told is the last number and how many batches were dropped.
func (f *Feed) Told() (last, dropped uint64) {
	l, dropped := f.f.told()
	return *l, dropped
}

// PublishSlowly publishes f as rank 0 of cfg until ctx ends, where libzmq keeps few batches for
// a subscriber: as many as one may be behind who reads, and of whose reading libzmq tells in lots.
func (f *Feed) PublishSlowly(ctx context.Context, zctx *zmq.Context, cfg Config) error {
	p := newPublisher(cfg, 0, 0, f.f)
	p.queue = 32
	return p.run(ctx, zctx)
}
