package sim

import (
	"encoding/json"
	"time"
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
