package sim_test

import (
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"spillway/sim"
)

func TestPace(t *testing.T) {
	start := time.Unix(1000, 0)
	at := func(s float64) time.Time { return start.Add(time.Duration(s * float64(time.Second))) }
	var p sim.Pace
	p.Change(at(10), 4, at(30)) // 20 s that count as 5
	p.Change(at(18), 2, at(30)) // the first 8 of them counted as 2, the other 12 count as 6
	for _, tt := range []struct{ real, engine float64 }{{18, 12}, {20, 13}, {30, 18}, {31, 19}, {100, 88}} {
		if got := p.Engine(at(tt.real)); !got.Equal(at(tt.engine)) {
			t.Errorf("Engine(%v s) = %v, want %v", tt.real, got.Sub(start), tt.engine)
		}
		if got := p.When(at(tt.engine)); !got.Equal(at(tt.real)) {
			t.Errorf("When(%v s) = %v, want %v", tt.engine, got.Sub(start), tt.real)
		}
	}
}

// Without a change the two times are the same, to the nanosecond: measurements rest on it.
func TestPaceUnchanged(t *testing.T) {
	var p sim.Pace
	now := time.Now()
	if got := p.Engine(now); got != now {
		t.Errorf("Engine(%v) = %v", now, got)
	}
	if got := p.When(now); got != now {
		t.Errorf("When(%v) = %v", now, got)
	}
}

// An engine's time never runs backwards, never faster than the real one, and When is where it
// gets to.
func TestPaceProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var p sim.Pace
		now := time.Unix(1000, 0)
		engine := now
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			step := time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "step"))
			now = now.Add(step)
			got := p.Engine(now)
			if got.Before(engine) || got.Sub(engine) > step+1 {
				t.Fatalf("%v later the engine's time went from %v to %v", step, engine, got)
			}
			engine = got
			if rapid.Bool().Draw(t, "change") {
				until := time.Time{}
				if rapid.Bool().Draw(t, "ends") {
					until = now.Add(time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "until")))
				}
				p.Change(now, rapid.Float64Range(1, 1000).Draw(t, "factor"), until)
				if again := p.Engine(now); again != engine {
					t.Fatalf("the change moved the engine's time from %v to %v", engine, again)
				}
			}
			due := engine.Add(time.Duration(rapid.Int64Range(1, int64(time.Hour)).Draw(t, "due")))
			when := p.When(due)
			if off := p.Engine(when).Sub(due); off < -2 || off > 2 {
				t.Fatalf("Engine(When(%v)) is off by %v", due, off)
			}
		}
	})
}

// In a bubble time passes only while all sleep: a rank that looks again and again instead of
// sleeping until the right moment never ends.
func TestSlowedRank(t *testing.T) {
	cfg := sim.DefaultConfig() // 50 µs for the prompt's token, 10 ms for each after the first
	const alone = 50*time.Microsecond + 10*10*time.Millisecond
	for _, tt := range []struct {
		factor      float64
		until, want time.Duration
	}{
		{1, time.Hour, alone},
		{3, time.Hour, 3 * alone},
		{1000, time.Hour, 1000 * alone},
		{4, 1200 * time.Millisecond, 200*time.Millisecond + alone - 50*time.Millisecond}, // 200 ms for 50, then as ever
		{1000, time.Second / 2, alone}, // over before it came
	} {
		synctest.Test(t, func(t *testing.T) {
			got, err := sim.SlowedRank(t.Context(), cfg, 11, tt.factor, tt.until)
			if off := got - tt.want; err != nil || off < -time.Microsecond || off > time.Microsecond {
				t.Errorf("SlowedRank(%v, %v) = %v, %v, want %v", tt.factor, tt.until, got, err, tt.want)
			}
		})
	}
}
