package budget

import (
	"math"
	"sync"
	"time"
)

// Accounting is which of the requests sent a reading does not show.
type Accounting uint8

// The kinds of accounting.
const (
	// Incremental counts those sent since the sample was taken: for readings of running work. A
	// reading without a time shows nothing, so then all count.
	Incremental Accounting = iota
	// Cap counts all that are in flight: for readings of waiting work, which a request that runs
	// does not change.
	Cap
)

// Source is what is known of one place that tells how much is free, and how to read it.
type Source struct {
	Rule       Rule
	Accounting Accounting
	Lag        time.Duration // after which a request that was sent shows
	MaxAge     time.Duration // of a sample that is still believed; 0 is any
	Grace      time.Duration // for which the last good reading stands when there is none
	// Fallback takes the place of D - B while there is no reading, 0 to 1; 0 is closed.
	Fallback float64
}

// Reading is one answer of a Source.
type Reading struct {
	D      float64   // free part of the capacity; NaN if it could not be read
	MaxSys float64   // capacity in the rule's unit; NaN if it could not be read
	Time   time.Time // of the oldest sample it was made of; zero if unknown
}

// unread is what is known before the first answer.
var unread = Reading{D: math.NaN(), MaxSys: math.NaN()}

// future is how far ahead of our clock a sample's time may be.
const future = 10 * time.Second

// Group is the budget that queues share which draw on the same workers. It is safe for concurrent
// use.
type Group struct {
	mu      sync.Mutex // guards the fields below
	latch   Latch
	ledger  Ledger
	sources []source
	ramp    float64   // part of what is allowed that may be sent: below 1 after the latch has cleared
	cleared time.Time // when it last had
	seen    time.Time // of the readings, the oldest time when ramp last changed
}

type source struct {
	Source
	now, good Reading
	goodAt    time.Time // when good came
}

// NewGroup returns a group that is as open as the least open of its sources, at least one, and
// closed until each of them has been read.
func NewGroup(latch Latch, sources ...Source) *Group {
	g := &Group{latch: latch, ramp: 1}
	for _, s := range sources {
		g.sources = append(g.sources, source{Source: s, now: unread, good: unread})
	}
	return g
}

// Unit is what the group counts in.
func (g *Group) Unit() Unit { return g.sources[0].Rule.Unit }

// Read takes in a reading of source i. It reports whether that is one to go by.
func (g *Group) Read(i int, r Reading, now time.Time) (usable bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := &g.sources[i]
	s.now = r
	if usable = s.readable(r, now); usable {
		s.good, s.goodAt = r, now
		oldest := g.oldestLocked()
		g.latch.Read(oldest, g.roomLocked(now), now)
		if begun := g.recoverLocked(); !begun && (oldest.IsZero() || oldest.After(g.seen)) {
			g.ramp = min(1, 2*g.ramp)
			g.seen = oldest
		}
	}
	return usable
}

// recoverLocked begins to ramp up if the latch has cleared since the last time.
func (g *Group) recoverLocked() (begun bool) {
	if g.latch.clearedAt.Equal(g.cleared) {
		return false
	}
	g.cleared, g.seen = g.latch.clearedAt, g.oldestLocked()
	if g.latch.Config.Ramp > 0 {
		g.ramp = g.latch.Config.Ramp
	}
	return true
}

// oldestLocked is the time of the oldest reading that has one.
func (g *Group) oldestLocked() time.Time {
	var oldest time.Time
	for i := range g.sources {
		if t := g.sources[i].now.Time; !t.IsZero() && (oldest.IsZero() || t.Before(oldest)) {
			oldest = t
		}
	}
	return oldest
}

// roomLocked tells whether all sources are above their baselines.
func (g *Group) roomLocked(now time.Time) bool {
	for i := range g.sources {
		if state, _, _ := g.sources[i].evaluate(&Ledger{}, false, now); state != Open {
			return false
		}
	}
	return true
}

func (s *source) readable(r Reading, now time.Time) bool {
	if math.IsNaN(r.D) || math.IsInf(r.D, 0) || math.IsNaN(r.MaxSys) || math.IsInf(r.MaxSys, 0) {
		return false
	}
	if r.Time.IsZero() {
		return true
	}
	age := now.Sub(r.Time)
	return age >= -future && (s.MaxAge == 0 || age <= s.MaxAge)
}

// effective is the reading that counts now.
func (s *source) effective(now time.Time) (Reading, Rule) {
	rule := s.Rule
	switch {
	case s.readable(s.now, now):
		return s.now, rule
	case s.Grace > 0 && !s.goodAt.IsZero() && now.Sub(s.goodAt) <= s.Grace:
		return s.good, rule
	case s.Fallback > 0:
		rule.Baseline = 0
		r := Reading{D: s.Fallback, MaxSys: s.now.MaxSys}
		if math.IsNaN(r.MaxSys) {
			r.MaxSys = s.good.MaxSys
		}
		return r, rule
	}
	return Reading{D: math.NaN(), MaxSys: s.now.MaxSys, Time: s.now.Time}, rule
}

// unseen is the weight of what the reading does not show.
func (s *source) unseen(l *Ledger, r Reading) int64 {
	if s.Accounting == Cap || r.Time.IsZero() {
		return l.Total()
	}
	return l.After(r.Time.Add(-s.Lag))
}

func (s *source) evaluate(l *Ledger, overload bool, now time.Time) (State, float64, int64) {
	r, rule := s.effective(now)
	return rule.Evaluate(r.D, r.MaxSys, s.unseen(l, r), overload)
}

// timelessLocked tells that no reading can end an overload: none has had a time.
func (g *Group) timelessLocked() bool {
	for i := range g.sources {
		if !g.sources[i].good.Time.IsZero() {
			return false
		}
	}
	return true
}

// Sent notes a request that is sent now.
func (g *Group) Sent(id string, weight int64, now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ledger.Add(id, weight, now)
}

// Ended forgets a request, however it has ended.
func (g *Group) Ended(id string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ledger.Remove(id)
}

// Shed notes that a request sent at a time was refused for overload; see Latch.Shed.
func (g *Group) Shed(sentAt time.Time, retryAfter time.Duration, now time.Time) (tripped bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.latch.Shed(sentAt, retryAfter, g.timelessLocked(), now)
}

// Unreachable notes that a connection has failed.
func (g *Group) Unreachable(now time.Time) (tripped bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.latch.Unreachable(now)
}

// Answered notes an answer; ok tells a success.
func (g *Group) Answered(ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.latch.Answered(ok)
}

// Latched tells whether the gate is closed because of refusals.
func (g *Group) Latched(now time.Time) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.latch.Closed(now)
}

// Decision is what a Group says at one moment. Its numbers are those of the source that allows
// least; D, MaxSys and N are NaN while unknown.
type Decision struct {
	State    State
	Source   int // which one it is
	D, B     float64
	MaxSys   float64
	N        float64
	Most     int64 // what a request may weigh to ever fit: N with everything free
	Ledger   int64 // weight that D does not show
	InFlight int   // requests in flight
	Allowed  int64 // weight that may be sent now
	Sampled  time.Time
	Since    time.Time // of the last refusal; zero unless the latch is closed
	Strikes  int
}

// Decide says how much may be sent now.
func (g *Group) Decide(now time.Time) Decision {
	g.mu.Lock()
	defer g.mu.Unlock()
	overload := g.latch.Closed(now)
	g.recoverLocked()
	var least Decision
	for i := range g.sources {
		s := &g.sources[i]
		r, rule := s.effective(now)
		d := Decision{Source: i, D: r.D, B: rule.Baseline, MaxSys: r.MaxSys, Sampled: r.Time, Ledger: s.unseen(&g.ledger, r)}
		d.State, d.N, d.Allowed = rule.Evaluate(r.D, r.MaxSys, d.Ledger, overload)
		if _, full, most := rule.Evaluate(1, r.MaxSys, 0, false); full > 0 {
			d.Most = most
		}
		if i == 0 || d.State > least.State || d.State == least.State && d.Allowed < least.Allowed {
			least = d
		}
	}
	if g.ramp < 1 && least.Allowed > 0 {
		least.Allowed = int64(float64(least.Allowed) * g.ramp)
		if g.Unit() == Requests {
			least.Allowed = max(1, least.Allowed)
		}
	}
	least.InFlight, least.Since, least.Strikes = g.ledger.Len(), g.latch.Since(), g.latch.Strikes(now)
	return least
}
