package sim

import "time"

// pace tells real time from an engine's time. The zero value makes them the same. The fault
// slow lets an engine's time pass at a fraction of the real one, so that all of its work takes
// longer and its physics need not know; from then on it is behind.
type pace struct {
	behind time.Duration // at from
	from   time.Time
	until  time.Time // slowed from from to then; zero is without end
	factor float64   // how many times as long everything takes; 1 or less is no change
}

func (p pace) behindAt(now time.Time) time.Duration {
	if p.factor <= 1 {
		return p.behind
	}
	d := now.Sub(p.from)
	if !p.until.IsZero() {
		d = min(d, p.until.Sub(p.from))
	}
	d = max(d, 0)
	return p.behind + d - time.Duration(float64(d)/p.factor)
}

// engine is the engine's time at now.
func (p pace) engine(now time.Time) time.Time { return now.Add(-p.behindAt(now)) }

// when is the real time at which the engine's is t.
func (p pace) when(t time.Time) time.Time {
	unslowed := t.Add(p.behind)
	if p.factor <= 1 || !unslowed.After(p.from) {
		return unslowed
	}
	slowed := p.from.Add(time.Duration(float64(unslowed.Sub(p.from)) * p.factor))
	if !p.until.IsZero() && slowed.After(p.until) {
		return t.Add(p.behindAt(p.until))
	}
	return slowed
}

// change is the pace that goes on at now with another factor until then.
func (p pace) change(now time.Time, factor float64, until time.Time) pace {
	return pace{behind: p.behindAt(now), from: now, until: until, factor: factor}
}
