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
