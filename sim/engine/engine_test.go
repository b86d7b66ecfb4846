package engine_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"spillway/sim/engine"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// base is a rank with round numbers: 1 ms a prompt token, 10 ms a step whatever the batch.
func base() engine.Config {
	return engine.Config{
		PrefillTokensPerSecond: 1000, ITL: 10 * time.Millisecond,
		MaxNumSeqs: 4, BlockSize: 4, KVBlocks: 100, Speed: 1,
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// prompt gives n tokens that share nothing with a prompt of another seed.
func prompt(seed uint32, n int) []uint32 {
	p := make([]uint32, n)
	for i := range p {
		p[i] = seed<<16 + uint32(i)
	}
	return p
}

func request(id uint64, in, out int) engine.Request {
	return engine.Request{ID: id, Prompt: prompt(uint32(id), in), Output: prompt(uint32(id)+1000, out)}
}

func at(ms float64) time.Time {
	return start.Add(time.Duration(ms * float64(time.Millisecond)))
}

func submit(t *testing.T, e *engine.Engine, ms float64, reqs ...engine.Request) {
	t.Helper()
	for _, r := range reqs {
		if err := e.Submit(r, at(ms)); err != nil {
			t.Fatalf("Submit(%d): %v", r.ID, err)
		}
	}
}

// history runs e until nothing is left to happen and prints the events with their times in
// ms, without steps.
func history(t *testing.T, e *engine.Engine) []string {
	t.Helper()
	var out []string
	for {
		due, ok := e.Next()
		if !ok {
			break
		}
		for _, ev := range e.Advance(due, nil) {
			if ev.Kind != engine.Step {
				out = append(out, fmt.Sprintf("%v %d %v %d", float64(ev.At.Sub(start).Microseconds())/1000, ev.ID, ev.Kind, ev.Generated))
			}
		}
		if err := e.Check(); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

func check(t *testing.T, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("events:\n got %q\nwant %q", got, want)
	}
}

func TestOneRequest(t *testing.T) {
	e := must(engine.New(base(), start))
	submit(t, e, 5, request(1, 10, 3))
	check(t, history(t, e), "15 1 FirstToken 1", "25 1 Token 2", "35 1 Token 3", "35 1 Finished 3")
}

func TestSpeedDividesAllTimes(t *testing.T) {
	cfg := base()
	cfg.Speed = 2
	e := must(engine.New(cfg, start))
	submit(t, e, 5, request(1, 10, 2))
	check(t, history(t, e), "10 1 FirstToken 1", "15 1 Token 2", "15 1 Finished 2")
}

func TestPromptOnly(t *testing.T) {
	e := must(engine.New(base(), start))
	submit(t, e, 0, request(1, 10, 0))
	check(t, history(t, e), "10 1 Finished 0")
}

func TestPrefillIsServedInTurnBesideDecoding(t *testing.T) {
	e := must(engine.New(base(), start))
	submit(t, e, 0, request(1, 10, 3), request(2, 12, 2))
	check(t, history(t, e),
		"10 1 FirstToken 1", "20 1 Token 2", // 2 is prefilled meanwhile and slows nothing
		"22 2 FirstToken 1", "30 1 Token 3", "30 1 Finished 3",
		"40 2 Token 2", "40 2 Finished 2") // 2 joined the step that began at 30
}

func TestPrefillStallsDecode(t *testing.T) {
	cfg := base()
	cfg.PrefillStallsDecode = true
	e := must(engine.New(cfg, start))
	submit(t, e, 0, request(1, 10, 3))
	e.Advance(at(13), nil) // 3 ms into the first step
	submit(t, e, 13, request(2, 12, 1), request(3, 5, 1))
	check(t, history(t, e),
		"25 2 FirstToken 1", "25 2 Finished 1", "30 3 FirstToken 1", "30 3 Finished 1",
		"37 1 Token 2", "47 1 Token 3", "47 1 Finished 3")
}

func TestStepGrowsWithTheBatch(t *testing.T) {
	cfg := base()
	cfg.ITLGrowth = 1
	for _, tt := range []struct {
		running int
		want    time.Duration
	}{{1, 10 * time.Millisecond}, {2, 12500 * time.Microsecond}, {4, 17500 * time.Microsecond}} {
		if got := cfg.Step(tt.running); got != tt.want {
			t.Errorf("Step(%d) = %v, want %v", tt.running, got, tt.want)
		}
	}
	// Two that decode together: 10 to 20 alone, then 12.5 each with both.
	e := must(engine.New(cfg, start))
	submit(t, e, 0, request(1, 10, 4), request(2, 2, 3))
	check(t, history(t, e),
		"10 1 FirstToken 1", "12 2 FirstToken 1", "20 1 Token 2",
		"32.5 1 Token 3", "32.5 2 Token 2", "45 1 Token 4", "45 1 Finished 4", "45 2 Token 3", "45 2 Finished 3")
}

// The steps of a run that is polled late and rarely are those of one polled on time.
func TestLatePollingChangesNothing(t *testing.T) {
	cfg := base()
	cfg.KVBlocks = 1000
	run := func(late time.Duration) []engine.Event {
		e := must(engine.New(cfg, start))
		submit(t, e, 0, request(1, 10, 500), request(2, 33, 300), request(3, 7, 100))
		var events []engine.Event
		for {
			due, ok := e.Next()
			if !ok {
				return events
			}
			events = e.Advance(due.Add(late), events)
		}
	}
	want, got := run(0), run(73*time.Millisecond)
	if !slices.Equal(got, want) {
		t.Errorf("late polling gave %d events, in time %d", len(got), len(want))
	}
	if got, want := want[len(want)-1].At, at(10+10*499); !got.Equal(want) {
		t.Errorf("the last step ended at %v, want %v", got, want)
	}
}

func TestSaturatedThroughput(t *testing.T) {
	cfg := base()
	cfg.MaxNumSeqs, cfg.KVBlocks, cfg.ITLGrowth, cfg.PrefillTokensPerSecond = 64, 1<<16, 1, 1e6
	const requests, in, out = 640, 100, 1000
	e := must(engine.New(cfg, start))
	for id := range uint64(requests) {
		submit(t, e, 0, request(id+1, in, out))
	}
	var end time.Time
	for {
		due, ok := e.Next()
		if !ok {
			break
		}
		end = due
		e.Advance(due, nil)
	}
	// 10 rounds of 999 steps with 64 sequences; starting up costs at most a few steps a round.
	want := 10 * (out - 1) * cfg.Step(64)
	if got := end.Sub(start); got < want*99/100 || got > want*103/100 {
		t.Errorf("%d requests took %v, want about %v", requests, got, want)
	}
	if got := e.Stats().GeneratedTokens; got != requests*out {
		t.Errorf("generated %d tokens, want %d", got, requests*out)
	}
}

func TestSubmitRefuses(t *testing.T) {
	e := must(engine.New(base(), start))
	submit(t, e, 0, request(1, 400, 1)) // exactly the pool
	for _, tt := range []struct {
		req  engine.Request
		want error
	}{
		{request(1, 3, 1), engine.ErrDuplicate},
		{request(2, 0, 1), engine.ErrEmptyPrompt},
		{request(2, 401, 1), engine.ErrNeverFits},
		{request(2, 400, 1), nil},
	} {
		if got := e.Submit(tt.req, start); !errors.Is(got, tt.want) {
			t.Errorf("Submit(%d, %d tokens) = %v, want %v", tt.req.ID, len(tt.req.Prompt), got, tt.want)
		}
	}
}

func TestConfigValidate(t *testing.T) {
	for _, broken := range []func(*engine.Config){
		func(c *engine.Config) { c.PrefillTokensPerSecond = 0 },
		func(c *engine.Config) { c.ITL = -1 },
		func(c *engine.Config) { c.ITLGrowth = -1 },
		func(c *engine.Config) { c.MaxNumSeqs = 0 },
		func(c *engine.Config) { c.BlockSize = 0 },
		func(c *engine.Config) { c.KVBlocks = 0 },
		func(c *engine.Config) { c.Speed = 0 },
	} {
		cfg := base()
		broken(&cfg)
		if _, err := engine.New(cfg, start); err == nil {
			t.Errorf("New(%+v) = nil, want an error", cfg)
		}
	}
}
