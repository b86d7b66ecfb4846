package busy

import (
	"math"
	"time"

	"spillway/worker"
)

// Pressure is how close one rank is to the limit that it is closest to, or furthest beyond.
type Pressure struct {
	Worker worker.ID
	Name   string // of the worker
	DP     uint32
	Check  Checks  // a single one
	Value  float64 // what is compared: a part of the KV blocks, tokens, or a part of the token budget
	Limit  float64 // both mean nothing if Check is CheckBackpressure or CheckStale
	Load   float64 // Value over Limit; infinite for what is over a limit of 0
}

// LeastLoaded is the pressure on the least loaded rank of the least loaded routable worker, or of
// one worker, routable or not. A rank's load is that of the check that is worst for it. It reports
// false if there is no such worker, or if nothing is checked and nothing marked. Like Workers it
// takes the lock for one worker at a time.
func (l *List) LeastLoaded(only *worker.ID, now time.Time) (least Pressure, ok bool) {
	ids := l.Snapshot().Routable
	if only != nil {
		ids = []worker.ID{*only}
	}
	for _, id := range ids {
		if p, found := l.pressure(id, now); found && (!ok || p.Load < least.Load) {
			least, ok = p, true
		}
	}
	return least, ok
}

// pressure is that on the least loaded rank of a worker.
func (l *List) pressure(id worker.ID, now time.Time) (least Pressure, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.workers[id]
	if e == nil {
		return least, false
	}
	promised := l.promisedLocked(e, now)
	for _, r := range e.ranks {
		p := l.thresholds.pressure(l.reportLocked(e, r, promised, now))
		switch beyond := r.checks & (CheckBackpressure | CheckStale); {
		case p.Load > 1 || !r.checks.Busy():
		case beyond.Has(CheckBackpressure):
			p.Check, p.Load = CheckBackpressure, max(p.Load, 1)
		case beyond.Has(CheckStale):
			p.Check, p.Load = CheckStale, max(p.Load, 1)
		}
		p.Worker, p.Name, p.DP = id, e.w.Name, e.number(r)
		if p.Check.Busy() && (!ok || p.Load < least.Load) {
			least, ok = p, true
		}
	}
	return least, ok
}

// pressure compares a report with the limit that it is worst for; Check is empty if none is set.
func (t Thresholds) pressure(r Report) (worst Pressure) {
	compare := func(check Checks, value, limit float64) {
		load := value / limit
		if limit == 0 {
			load = 0
			if value > 0 {
				load = math.Inf(1)
			}
		}
		if !worst.Check.Busy() || load > worst.Load {
			worst = Pressure{Check: check, Value: value, Limit: limit, Load: load}
		}
	}
	if t.DecodeFrac != nil {
		compare(CheckDecodeBlocks, max(r.PromisedRatio(), r.ReportedRatio()), *t.DecodeFrac)
	}
	if t.PrefillTokens != nil {
		compare(CheckPrefillTokens, r.PrefillTokens, float64(*t.PrefillTokens))
	}
	if t.PrefillFrac != nil {
		compare(CheckPrefillFrac, r.PrefillRatio(), *t.PrefillFrac)
	}
	return worst
}
