package budget

import (
	"math"
	"time"
)

// Ledger has the weights of requests that were sent and have not ended. It is bounded by its user:
// by the number of workers. The zero Ledger is empty. It is not safe for concurrent use.
type Ledger struct {
	entries map[string]sentEntry
	total   int64
}

type sentEntry struct {
	weight int64
	at     time.Time
}

// Add notes a request that is sent at a time, in place of what was noted under its ID.
func (l *Ledger) Add(id string, weight int64, at time.Time) {
	if l.entries == nil {
		l.entries = map[string]sentEntry{}
	}
	l.Remove(id)
	weight = min(max(weight, 0), math.MaxInt64-l.total)
	l.entries[id] = sentEntry{weight, at}
	l.total += weight
}

// Remove forgets a request, however it has ended.
func (l *Ledger) Remove(id string) {
	l.total -= l.entries[id].weight
	delete(l.entries, id)
}

// Len is the number of requests.
func (l *Ledger) Len() int { return len(l.entries) }

// Total is the weight of all of them.
func (l *Ledger) Total() int64 { return l.total }

// After is the weight of those that were sent after a time.
func (l *Ledger) After(t time.Time) int64 {
	var sum int64
	for _, e := range l.entries {
		if e.at.After(t) {
			sum += e.weight
		}
	}
	return sum
}
