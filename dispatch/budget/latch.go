package budget

import (
	"math/rand/v2"
	"time"
)

// LatchConfig are the times of a Latch.
type LatchConfig struct {
	Cooldown time.Duration // first hold where no reading can end it; doubled with each strike
	Settle   time.Duration // a reading must be newer by more than this than the last refusal
	// IgnoreLate ignores refusals of requests that were sent before the latch last cleared.
	IgnoreLate bool
	// Ramp is the part of what is allowed that may be sent after the latch has cleared, above 0 to 1; it
	// doubles with each newer reading. 0 is 1.
	Ramp float64
}

const (
	maxCooldown     = time.Minute // also bounds what a Retry-After may ask for
	strikesForgiven = time.Minute // without a refusal
	strikesRedeemed = 20          // successes in a row
	unreachableAt   = 3           // failed connections in a row
)

// Latch closes a gate after a refusal for overload, until a newer reading tells of room: readings
// are late, and a refusal is the news of what they will say. Where readings have no time it
// is held for a while instead, longer after each strike. The zero Latch with a Config is ready, and
// open. It is not safe for concurrent use.
type Latch struct {
	Config LatchConfig
	Rand   *rand.Rand // of the holds' jitter; nil for none

	since     time.Time // of the last refusal; zero while open
	until     time.Time // not to be cleared before
	timed     bool      // clears by time alone
	strikes   int
	successes int
	failures  int
	lastShed  time.Time
	clearedAt time.Time
}

// Shed notes that a request sent at a time was refused for overload. retryAfter is what the answer
// asked for, 0 if nothing; timeless tells that readings of the gate have no time. It reports whether
// the latch has closed by it.
func (l *Latch) Shed(sentAt time.Time, retryAfter time.Duration, timeless bool, now time.Time) (tripped bool) {
	if l.Config.IgnoreLate && sentAt.Before(l.clearedAt) {
		return false
	}
	tripped = l.trip(now)
	l.timed = timeless
	if timeless || l.strikes > 1 {
		l.hold(now, l.cooldown())
	}
	l.hold(now, min(retryAfter, maxCooldown))
	return tripped
}

// Unreachable notes that a connection to the gateway has failed. The third in a row closes the latch
// for a while: readings may look perfect meanwhile. It reports whether it has closed by it.
func (l *Latch) Unreachable(now time.Time) (tripped bool) {
	if l.failures++; l.failures < unreachableAt {
		return false
	}
	if closed := !l.since.IsZero(); closed && !l.timed {
		l.hold(now, l.cooldown())
		return false
	}
	tripped = l.trip(now)
	l.timed = true
	l.hold(now, l.cooldown())
	return tripped
}

// Answered notes an answer of the gateway: it can be reached. ok tells a success.
func (l *Latch) Answered(ok bool) {
	l.failures = 0
	if !ok {
		l.successes = 0
		return
	}
	if l.successes++; l.successes >= strikesRedeemed {
		l.strikes = 0
	}
}

func (l *Latch) trip(now time.Time) (tripped bool) {
	l.strikes = l.Strikes(now)
	if tripped = l.since.IsZero(); tripped {
		l.strikes++
	}
	if now.After(l.since) {
		l.since = now
	}
	l.lastShed, l.successes = l.since, 0
	return tripped
}

func (l *Latch) hold(now time.Time, d time.Duration) {
	if t := now.Add(d); t.After(l.until) {
		l.until = t
	}
}

// cooldown is the hold for the present number of strikes, with up to a fifth more or less.
func (l *Latch) cooldown() time.Duration {
	d := l.Config.Cooldown
	for range l.strikes - 1 {
		if d = min(2*d, maxCooldown); d == maxCooldown {
			break
		}
	}
	if l.Rand != nil {
		d += time.Duration((l.Rand.Float64() - 0.5) * 0.4 * float64(d))
	}
	return min(d, maxCooldown)
}

// Read takes in a reading whose sample is of the given time and tells of room or not. One with the
// zero time clears nothing.
func (l *Latch) Read(sample time.Time, room bool, now time.Time) {
	if l.since.IsZero() || !room || now.Before(l.until) || !sample.After(l.since.Add(l.Config.Settle)) {
		return
	}
	l.clear(now)
}

// Closed tells whether the gate is to stay closed.
func (l *Latch) Closed(now time.Time) bool {
	if !l.since.IsZero() && l.timed && !now.Before(l.until) {
		l.clear(now)
	}
	return !l.since.IsZero()
}

func (l *Latch) clear(now time.Time) {
	l.since, l.until, l.timed, l.failures, l.clearedAt = time.Time{}, time.Time{}, false, 0, now
}

// Since is when the last refusal came, the zero time while open.
func (l *Latch) Since() time.Time { return l.since }

// Strikes is how often the latch has closed lately.
func (l *Latch) Strikes(now time.Time) int {
	if now.Sub(l.lastShed) >= strikesForgiven {
		return 0
	}
	return l.strikes
}
