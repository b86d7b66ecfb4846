package proxy

import (
	"math"
	"math/rand/v2"
	"sync"
	"time"
)

// rates counts, second by second over the last minute, the reservations that were given back by a
// model or a worker and the requests that were refused for it, while retry-after is auto.
type rates struct {
	mu     sync.Mutex
	second [60]struct {
		at    int64 // unix time of the second
		freed uint32
		shed  uint32
	}
}

func (r *rates) free(now time.Time) { r.add(now, 1, 0) }
func (r *rates) shed(now time.Time) { r.add(now, 0, 1) }

func (r *rates) add(now time.Time, freed, shed uint32) {
	at := now.Unix()
	r.mu.Lock()
	s := &r.second[at%60]
	if s.at != at {
		s.at, s.freed, s.shed = at, 0, 0
	}
	s.freed += freed
	s.shed += shed
	r.mu.Unlock()
}

// The bounds of wait in seconds, and what is added at random at most.
const (
	minWait = 1
	maxWait = 30
	spread  = 0.25
)

// wait is when a refused client should come back: the time in which as much room is freed as
// was asked for in vain within a second, from 1 to 30 s, spread so that clients do not return
// together. What is bounded is the time before spreading: bounding the result would send all
// clients of a quick or a stuck model back at one moment.
func (r *rates) wait(now time.Time) time.Duration {
	r.mu.Lock()
	var freed, shed float64
	for _, s := range r.second {
		if s.at > now.Unix()-60 {
			freed += float64(s.freed)
			shed += float64(s.shed)
		}
	}
	r.mu.Unlock()
	seconds := math.Inf(1)
	if freed > 0 {
		seconds = max(shed, 1) / freed
	}
	seconds = min(max(seconds, minWait), maxWait/(1+spread)) * (1 + spread*rand.Float64())
	return time.Duration(seconds * float64(time.Second))
}
