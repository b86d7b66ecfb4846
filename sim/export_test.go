package sim

import "time"

// Lateness gives tests the histogram behind GET /sim/stats.
type Lateness struct{ l lateness }

// Add counts a delay.
func (l *Lateness) Add(d time.Duration) { l.l.add(d) }

// Merge adds all of o.
func (l *Lateness) Merge(o *Lateness) { l.l.merge(&o.l) }

// Quantile is the delay that the share q does not exceed.
func (l *Lateness) Quantile(q float64) time.Duration { return l.l.quantile(q) }
