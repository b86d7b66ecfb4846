package budget_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"spillway/dispatch/budget"
)

var t0 = time.Unix(1_764_044_000, 0)

// at is a time of the tests: seconds since t0.
func at(s float64) time.Time { return t0.Add(time.Duration(s * float64(time.Second))) }

// reads gives a group one reading.
func reads(g *budget.Group, d, sys, sampled, now float64) {
	g.Read(0, budget.Reading{D: d, MaxSys: sys, Time: at(sampled)}, at(now))
}

// decides checks state and allowance.
func decides(t *testing.T, g *budget.Group, now float64, state budget.State, allowed int64) {
	t.Helper()
	if d := g.Decide(at(now)); d.State != state || d.Allowed != allowed {
		t.Errorf("at %v s: Decide = %v %d (%+v), want %v %d", now, d.State, d.Allowed, d, state, allowed)
	}
}

// TestLatchTimeline is the timeline of the specification.
func TestLatchTimeline(t *testing.T) {
	for _, ignoreLate := range []bool{false, true} {
		t.Run(fmt.Sprintf("ignore late sheds %v", ignoreLate), func(t *testing.T) {
			g := budget.NewGroup(budget.Latch{Config: budget.LatchConfig{Cooldown: 5 * time.Second, IgnoreLate: ignoreLate}},
				budget.Source{Rule: budget.Rule{Baseline: 0.05}})
			decides(t, g, -1, budget.Unreadable, 0)
			reads(g, 0.60, 100, 0, 0)
			decides(t, g, 0, budget.Open, 55)
			if !g.Shed(at(3), 0, at(4)) {
				t.Error("the first refusal does not close the gate")
			}
			decides(t, g, 4, budget.Overload, 0)
			reads(g, 0.60, 100, 0, 6) // the same sample
			decides(t, g, 6, budget.Overload, 0)
			if g.Shed(at(3), 0, at(9)) {
				t.Error("a refusal while closed closes again")
			}
			if d := g.Decide(at(9)); !d.Since.Equal(at(9)) || d.Strikes != 1 {
				t.Errorf("after two refusals: since %v, strikes %d, want 9 s and 1", d.Since.Sub(t0), d.Strikes)
			}
			reads(g, 0.03, 100, 15, 15)
			decides(t, g, 15, budget.Overload, 0)
			reads(g, 0.40, 100, 30, 30)
			decides(t, g, 30, budget.Open, 35)
			g.Shed(at(3), 0, at(31))
			if ignoreLate {
				decides(t, g, 31, budget.Open, 35)
				return
			}
			decides(t, g, 31, budget.Overload, 0)
			if d := g.Decide(at(31)); d.Strikes != 2 || !d.Since.Equal(at(31)) {
				t.Errorf("after the second close: since %v, strikes %d, want 31 s and 2", d.Since.Sub(t0), d.Strikes)
			}
			reads(g, 0.50, 100, 40, 40)
			decides(t, g, 40, budget.Overload, 0) // 10 s are not over
			reads(g, 0.50, 100, 45, 45)
			decides(t, g, 45, budget.Open, 45)
		})
	}
}

func latch(cooldown, settle time.Duration) budget.Latch {
	return budget.Latch{Config: budget.LatchConfig{Cooldown: cooldown, Settle: settle}}
}

// timeless has a source whose readings have no time.
func timeless() *budget.Group {
	g := budget.NewGroup(latch(5*time.Second, 0), budget.Source{})
	g.Read(0, budget.Reading{D: 1, MaxSys: 10}, at(0))
	return g
}

func TestLatchWithoutTimes(t *testing.T) {
	g := timeless()
	now := 0.0
	for strike, hold := range []float64{5, 10, 20, 40, 60, 60} {
		g.Shed(at(now), 0, at(now))
		g.Read(0, budget.Reading{D: 1, MaxSys: 10}, at(now+hold-0.1)) // no update
		decides(t, g, now+hold-0.1, budget.Overload, 0)
		decides(t, g, now+hold, budget.Open, 10)
		if d := g.Decide(at(now + hold - 0.1)); hold < 60 && d.Strikes != strike+1 {
			t.Errorf("strike %d: Strikes = %d", strike+1, d.Strikes)
		}
		now += min(hold, 59.9) // else the strikes are forgiven
		if hold == 60 {
			now += 0.1
			g.Decide(at(now))
			return
		}
	}
}

func TestStrikesEnd(t *testing.T) {
	g := timeless()
	g.Shed(at(0), 0, at(0))
	decides(t, g, 5, budget.Open, 10)
	for range 19 {
		g.Answered(true)
	}
	g.Answered(false)
	g.Answered(true)
	if d := g.Decide(at(5)); d.Strikes != 1 {
		t.Errorf("20 successes with a failure between: %d strikes, want 1", d.Strikes)
	}
	for range 19 {
		g.Answered(true)
	}
	if d := g.Decide(at(5)); d.Strikes != 0 {
		t.Errorf("20 successes in a row: %d strikes, want 0", d.Strikes)
	}
	g.Shed(at(6), 0, at(6))
	g.Decide(at(12))
	if d := g.Decide(at(65.9)); d.Strikes != 1 {
		t.Errorf("59.9 s later: %d strikes, want 1", d.Strikes)
	}
	if d := g.Decide(at(66)); d.Strikes != 0 {
		t.Errorf("a minute later: %d strikes, want 0", d.Strikes)
	}
}

func TestRetryAfterHoldsTheLatch(t *testing.T) {
	g := budget.NewGroup(latch(5*time.Second, 0), budget.Source{})
	reads(g, 1, 10, 0, 0)
	g.Shed(at(0), 20*time.Second, at(1))
	reads(g, 1, 10, 20, 20)
	decides(t, g, 20, budget.Overload, 0)
	reads(g, 1, 10, 21, 21)
	decides(t, g, 21, budget.Open, 10)
	g.Shed(at(21), time.Hour, at(22))
	reads(g, 1, 10, 81, 81)
	decides(t, g, 81, budget.Overload, 0)
	reads(g, 1, 10, 82, 82) // a minute is the most
	decides(t, g, 82, budget.Open, 10)
}

func TestLatchSettles(t *testing.T) {
	g := budget.NewGroup(latch(5*time.Second, 2*time.Second), budget.Source{})
	reads(g, 1, 10, 0, 0)
	g.Shed(at(0), 0, at(1))
	reads(g, 1, 10, 3, 3)
	decides(t, g, 3, budget.Overload, 0)
	reads(g, 1, 10, 3.1, 3.2)
	decides(t, g, 3.2, budget.Open, 10)
}

// TestRamp has N come back by and by after an overload: with each reading that is new twice as much.
func TestRamp(t *testing.T) {
	l := latch(5*time.Second, 0)
	l.Config.Ramp = 0.2
	g := budget.NewGroup(l, budget.Source{Rule: budget.Rule{Baseline: 0.1}})
	reads(g, 0.6, 100, 0, 0)
	decides(t, g, 1, budget.Open, 50) // nothing was refused yet
	g.Shed(at(1), 0, at(2))
	decides(t, g, 2, budget.Overload, 0)
	for _, step := range []struct {
		sampled, now float64
		allowed      int64
	}{{3, 3, 10}, {3, 4, 10}, {5, 5, 20}, {6, 6, 40}, {6, 7, 40}, {8, 8, 50}, {9, 9, 50}} {
		reads(g, 0.6, 100, step.sampled, step.now)
		decides(t, g, step.now, budget.Open, step.allowed)
	}
	g.Shed(at(9), 0, at(10))
	reads(g, 0.11, 100, 25, 25) // the second strike's hold is over; N is 1
	decides(t, g, 25, budget.Open, 1)
	c := latch(5*time.Second, 0)
	c.Config.Ramp = 0.5
	g = budget.NewGroup(c, budget.Source{Accounting: budget.Cap})
	g.Read(0, budget.Reading{D: 1, MaxSys: 8}, at(0))
	g.Shed(at(0), 0, at(1))
	decides(t, g, 20, budget.Open, 4) // cleared by time
	g.Read(0, budget.Reading{D: 1, MaxSys: 8}, at(21))
	decides(t, g, 21, budget.Open, 8)
}

func TestUnreachable(t *testing.T) {
	g := budget.NewGroup(latch(5*time.Second, 0), budget.Source{})
	reads(g, 1, 10, 0, 0)
	g.Unreachable(at(1))
	g.Unreachable(at(1))
	g.Answered(true) // it is there after all
	g.Unreachable(at(1))
	g.Unreachable(at(1))
	decides(t, g, 1, budget.Open, 10)
	if !g.Unreachable(at(1)) {
		t.Error("the third failure in a row does not close the gate")
	}
	reads(g, 1, 10, 2, 2) // looks perfect, and means nothing
	decides(t, g, 2, budget.Overload, 0)
	decides(t, g, 5.9, budget.Overload, 0)
	decides(t, g, 6, budget.Open, 10)
}

func TestJitterOfHolds(t *testing.T) {
	shortest, longest := time.Hour, time.Duration(0)
	for seed := range uint64(200) {
		l := latch(5*time.Second, 0)
		l.Rand = rand.New(rand.NewPCG(seed, 1))
		l.Shed(at(0), 0, true, at(0))
		hold := time.Duration(0)
		for ; l.Closed(t0.Add(hold)); hold += 10 * time.Millisecond {
		}
		shortest, longest = min(shortest, hold), max(longest, hold)
	}
	if shortest < 4*time.Second || longest > 6010*time.Millisecond || longest-shortest < time.Second {
		t.Errorf("holds of %v to %v, want them spread over 4s to 6s", shortest, longest)
	}
}

// TestFrozenReading spends N once, until a newer sample comes.
func TestFrozenReading(t *testing.T) {
	for _, tt := range []struct {
		name          string
		accounting    budget.Accounting
		later, freed5 int64 // after a newer sample with 30 in flight; after 5 of them have ended
	}{
		{"incremental", budget.Incremental, 30, 30},
		{"cap", budget.Cap, 0, 5},
	} {
		t.Run(tt.name, func(t *testing.T) {
			g := budget.NewGroup(latch(5*time.Second, 0), budget.Source{Rule: budget.Rule{Baseline: 0.1}, Accounting: tt.accounting, Lag: time.Second})
			reads(g, 0.7, 50, 0, 0)
			for i := range 30 {
				decides(t, g, 1, budget.Open, int64(30-i))
				g.Sent(fmt.Sprint(i), 1, at(1))
			}
			decides(t, g, 1, budget.Open, 0)
			reads(g, 0.7, 50, 0, 2) // the same sample again
			decides(t, g, 2, budget.Open, 0)
			reads(g, 0.7, 50, 1.5, 2) // newer than what was sent, but by less than it takes to show
			decides(t, g, 2, budget.Open, 0)
			reads(g, 0.7, 50, 2, 2)
			decides(t, g, 2, budget.Open, tt.later)
			for i := range 5 {
				g.Ended(fmt.Sprint(i))
				g.Ended(fmt.Sprint(i)) // once is enough
			}
			decides(t, g, 2, budget.Open, tt.freed5)
		})
	}
}

// TestConvergence is why accounting is incremental where a reading shows running work: the other one
// would stop at half.
func TestConvergence(t *testing.T) {
	for accounting, want := range map[budget.Accounting]int{budget.Incremental: 90, budget.Cap: 45} {
		g := budget.NewGroup(latch(5*time.Second, 0), budget.Source{Rule: budget.Rule{Baseline: 0.1, Rounding: budget.Floor}, Accounting: accounting})
		running := 0
		for s := range 60 {
			now := float64(s)
			reads(g, 1-float64(running)/100, 100, now, now)
			for range min(5, g.Decide(at(now+0.5)).Allowed) {
				g.Sent(fmt.Sprint(running), 1, at(now))
				running++
			}
		}
		if running != want {
			t.Errorf("accounting %v: %d requests of 100 run, want %d", accounting, running, want)
		}
	}
}

func TestUnreadable(t *testing.T) {
	for _, tt := range []struct {
		name   string
		source budget.Source
		r      budget.Reading
		now    float64
		state  budget.State
		want   int64
	}{
		{"fresh", budget.Source{MaxAge: 30 * time.Second}, budget.Reading{D: 1, MaxSys: 10, Time: at(0)}, 30, budget.Open, 10},
		{"stale", budget.Source{MaxAge: 30 * time.Second}, budget.Reading{D: 1, MaxSys: 10, Time: at(0)}, 30.1, budget.Unreadable, 0},
		{"any age", budget.Source{}, budget.Reading{D: 1, MaxSys: 10, Time: at(0)}, 3000, budget.Open, 10},
		{"a little ahead", budget.Source{}, budget.Reading{D: 1, MaxSys: 10, Time: at(10)}, 0, budget.Open, 10},
		{"far ahead", budget.Source{}, budget.Reading{D: 1, MaxSys: 10, Time: at(10.1)}, 0, budget.Unreadable, 0},
		{"no D", budget.Source{}, budget.Reading{D: nan, MaxSys: 10}, 0, budget.Unreadable, 0},
		{"no size", budget.Source{}, budget.Reading{D: 1, MaxSys: nan}, 0, budget.Unreadable, 0},
		{"a fallback", budget.Source{Rule: budget.Rule{Baseline: 0.4}, Fallback: 0.3}, budget.Reading{D: nan, MaxSys: 10}, 0, budget.Open, 3},
		{"a fallback of nothing", budget.Source{Fallback: 0.3}, budget.Reading{D: nan, MaxSys: nan}, 0, budget.Unreadable, 0},
	} {
		g := budget.NewGroup(latch(5*time.Second, 0), tt.source)
		g.Read(0, tt.r, at(0))
		if d := g.Decide(at(tt.now)); d.State != tt.state || d.Allowed != tt.want {
			t.Errorf("%s: Decide = %v %d, want %v %d", tt.name, d.State, d.Allowed, tt.state, tt.want)
		}
	}
}

func TestGrace(t *testing.T) {
	g := budget.NewGroup(latch(5*time.Second, 0), budget.Source{Grace: 3 * time.Second})
	reads(g, 1, 10, 0, 1)
	g.Read(0, budget.Reading{D: nan, MaxSys: nan}, at(2))
	decides(t, g, 4, budget.Open, 10)
	decides(t, g, 4.1, budget.Unreadable, 0)
}

// TestFallbackIsLatched: what an operator has set for blindness does not open a gate that refusals
// have closed.
func TestFallbackIsLatched(t *testing.T) {
	g := budget.NewGroup(latch(5*time.Second, 0), budget.Source{Fallback: 1})
	reads(g, 1, 10, 0, 0)
	g.Read(0, budget.Reading{D: nan, MaxSys: nan}, at(1))
	decides(t, g, 1, budget.Open, 10)
	g.Shed(at(1), 0, at(2))
	decides(t, g, 100, budget.Overload, 0) // only a reading ends it
	reads(g, 1, 10, 101, 101)
	decides(t, g, 101, budget.Open, 10)
}

// TestComposition takes the source that allows least, and the worst state.
func TestComposition(t *testing.T) {
	two := func(a, b budget.Reading) *budget.Group {
		g := budget.NewGroup(latch(5*time.Second, 0), budget.Source{}, budget.Source{Rule: budget.Rule{Baseline: 0.1}})
		g.Read(0, a, at(0))
		g.Read(1, b, at(0))
		return g
	}
	for _, tt := range []struct {
		name  string
		a, b  budget.Reading
		state budget.State
		want  int64
		by    int
	}{
		{"the first allows less", budget.Reading{D: 0.2, MaxSys: 10}, budget.Reading{D: 1, MaxSys: 10}, budget.Open, 2, 0},
		{"the second allows less", budget.Reading{D: 1, MaxSys: 100}, budget.Reading{D: 1, MaxSys: 10}, budget.Open, 9, 1},
		{"one is at its baseline", budget.Reading{D: 1, MaxSys: 10}, budget.Reading{D: 0.1, MaxSys: 10}, budget.Baseline, 0, 1},
		{"one is unread", budget.Reading{D: 0, MaxSys: 10}, budget.Reading{D: nan, MaxSys: 10}, budget.Unreadable, 0, 1},
		{"one has no worker", budget.Reading{D: 1, MaxSys: 0}, budget.Reading{D: 0.05, MaxSys: 10}, budget.NoCapacity, 0, 0},
	} {
		if d := two(tt.a, tt.b).Decide(at(0)); d.State != tt.state || d.Allowed != tt.want || d.Source != tt.by {
			t.Errorf("%s: %v %d by source %d, want %v %d by %d", tt.name, d.State, d.Allowed, d.Source, tt.state, tt.want, tt.by)
		}
	}
	g := two(budget.Reading{D: 1, MaxSys: 10, Time: at(0)}, budget.Reading{D: 1, MaxSys: 10, Time: at(0)})
	g.Shed(at(0), 0, at(1))
	g.Read(0, budget.Reading{D: 1, MaxSys: 10, Time: at(2)}, at(2))
	decides(t, g, 2, budget.Overload, 0) // the other one may still tell of overload
	g.Read(1, budget.Reading{D: 1, MaxSys: 10, Time: at(3)}, at(3))
	decides(t, g, 3, budget.Open, 9)
}

func TestMost(t *testing.T) {
	g := budget.NewGroup(latch(5*time.Second, 0), budget.Source{Rule: budget.Rule{Baseline: 0.1, Unit: budget.Bytes}})
	reads(g, 0.7, 1024*1024, 0, 0)
	if d := g.Decide(at(0)); d.Most != 943718 { // 921.6 KiB
		t.Errorf("Most = %d, want 943718", d.Most)
	}
}

func TestPatience(t *testing.T) {
	var p budget.Patience
	for _, step := range []struct {
		at   float64
		id   string
		open bool
		want time.Duration
	}{
		{0, "a", true, 0}, {10, "a", true, 10 * time.Second},
		{20, "a", false, 0}, // it was open until now
		{25, "", false, 0},
		{30, "a", true, 20 * time.Second},
		{35, "a", true, 25 * time.Second},
		{36, "b", true, 0}, {40, "b", true, 4 * time.Second}, {41, "a", true, 0},
	} {
		if !step.open {
			p.Pause(at(step.at))
			continue
		}
		if got := p.Wait(step.id, at(step.at)); got != step.want {
			t.Errorf("at %v s: Wait(%s) = %v, want %v", step.at, step.id, got, step.want)
		}
	}
	p.Reset()
	if got := p.Wait("a", at(50)); got != 0 {
		t.Errorf("Wait after Reset = %v, want 0", got)
	}
}

func TestLedgerKeepsOneEntryPerID(t *testing.T) {
	var l budget.Ledger
	l.Add("a", 5, at(0))
	l.Add("a", 7, at(1))
	l.Add("b", -3, at(2))
	if l.Total() != 7 || l.Len() != 2 || l.After(at(0.5)) != 7 || l.After(at(1)) != 0 {
		t.Errorf("Total %d, Len %d, After %d, %d, want 7, 2, 7, 0", l.Total(), l.Len(), l.After(at(0.5)), l.After(at(1)))
	}
	l.Add("c", 1<<62, at(3))
	l.Add("d", 1<<62, at(3)) // as much as a sum can hold
	if l.Total() < 0 {
		t.Errorf("Total = %d", l.Total())
	}
	for _, id := range []string{"a", "b", "c", "d", "x"} {
		l.Remove(id)
	}
	if l.Total() != 0 || l.Len() != 0 {
		t.Errorf("all removed: Total %d, Len %d", l.Total(), l.Len())
	}
}
