package busy

import (
	"time"

	"spillway/worker"
)

// evaluateLocked makes the verdict on one worker and reports whether the snapshot is out of
// date by it. It costs O(ranks) and allocates nothing.
func (l *List) evaluateLocked(e *entry, now time.Time) bool {
	allOver := l.checkRanksLocked(e, now)
	e.mark.settle(!allOver, now)
	set := l.thresholds.Any()
	allBusy, allMarked := true, true
	for _, r := range e.ranks {
		r.mark.settle(!r.over.Busy(), now)
		r.checks = r.over
		if !e.marked(r) {
			allMarked = false
		} else if set { // without thresholds a mark is a preference, not a verdict
			r.checks |= CheckBackpressure
		}
		if !r.checks.Busy() {
			allBusy = false
		}
	}
	if !now.Before(e.inhibitedUntil) {
		e.inhibitedUntil = time.Time{}
	}
	routable := (e.healthy || !e.probed) && e.inhibitedUntil.IsZero() && !e.draining && !e.circuitOpen
	l.scheduleLocked(e, now)

	changed := e.busy != allBusy || e.allMarked != allMarked || e.routable != routable
	if e.busy != allBusy {
		if allBusy {
			e.toBusy++
		} else {
			e.toFree++
		}
	}
	e.busy, e.allMarked, e.routable = allBusy, allMarked, routable
	return changed
}

// checkRanksLocked compares each rank with the thresholds, leaving marks aside, and reports
// whether all are over one.
func (l *List) checkRanksLocked(e *entry, now time.Time) (allOver bool) {
	if !l.thresholds.Any() {
		for _, r := range e.ranks {
			r.held, r.over = 0, 0
		}
		return false
	}
	promised := l.promisedLocked(e, now)
	allOver = true
	for _, r := range e.ranks {
		report := l.reportLocked(e, r, promised, now)
		r.held = l.thresholds.check(report, r.held, l.cfg.BusyReleaseRatio)
		r.over = r.held
		if l.cfg.StalePolicy == StaleBusy && r.wasFresh && l.stale(r, now) {
			r.over |= CheckStale
		}
		if !r.over.Busy() {
			allOver = false
		}
	}
	return allOver
}

// load is what a rank has been promised.
type load struct{ decodeBlocks, prefillTokens float64 }

// promisedLocked is each rank's share of what was booked for the worker as a whole.
func (l *List) promisedLocked(e *entry, now time.Time) load {
	if l.loads == nil || !e.engineRouted() {
		return load{}
	}
	a, p := l.loads.Promised(worker.Rank{Worker: e.id, DP: worker.AnyDP}, now)
	n := float64(e.sharers())
	return load{float64(a) / n, float64(p) / n}
}

// reportLocked joins what all sources say of a rank. share is what it was promised if its
// engine picks the rank.
func (l *List) reportLocked(e *entry, r *rank, share load, now time.Time) Report {
	report := Report{
		DecodeBlocks: share.decodeBlocks, PrefillTokens: share.prefillTokens,
		TotalBlocks: e.totalBlocks(r), MaxBatchedTokens: e.maxBatchedTokens(r),
	}
	if l.loads != nil && !e.engineRouted() {
		a, p := l.loads.Promised(worker.Rank{Worker: e.id, DP: e.number(r)}, now)
		report.DecodeBlocks, report.PrefillTokens = float64(a), float64(p)
	}
	var promisedKnown, ratioKnown bool
	for _, s := range [...]Source{Event, Scrape} { // the first that knows wins
		rec := &r.records[s]
		if !rec.held() || l.cfg.StalePolicy == StaleFree && rec.stale(now, l.cfg.SignalStaleAfter) {
			continue
		}
		if rec.known(usedBlocks) && !report.UsedKnown {
			report.UsedBlocks, report.UsedKnown = rec.counts[usedBlocks], true
		}
		if rec.known(usageRatio) && !ratioKnown {
			report.UsageRatio, ratioKnown = rec.ratio, true
		}
		if l.loads == nil && rec.known(decodeBlocks) && !promisedKnown {
			report.DecodeBlocks, promisedKnown = float64(rec.counts[decodeBlocks]), true
		}
		report.PrefillTokens = max(report.PrefillTokens, float64(rec.counts[prefillTokens]))
	}
	return report
}

// marked reports whether a mark covers the rank.
func (e *entry) marked(r *rank) bool { return e.mark.active() || r.mark.active() }

// stale reports whether the newest sample of the rank is too old. Without samples there is
// nothing to be stale.
func (l *List) stale(r *rank, now time.Time) bool {
	return r.observed() && now.Sub(r.newest()) > l.cfg.SignalStaleAfter
}

// stale reports whether the record is older than the limit, or holds nothing.
func (r *record) stale(now time.Time, limit time.Duration) bool {
	return !r.held() || now.Sub(r.takenAt) > limit
}

// scheduleLocked notes when the verdict on the worker may change by itself.
func (l *List) scheduleLocked(e *entry, now time.Time) {
	e.due = time.Time{}
	if e.mark.active() {
		e.dueAt(e.mark.end())
	}
	if !e.inhibitedUntil.IsZero() {
		e.dueAt(e.inhibitedUntil)
	}
	for _, r := range e.ranks {
		if r.mark.active() {
			e.dueAt(r.mark.end())
		}
		if r.over.Has(CheckPrefillTokens | CheckPrefillFrac) {
			l.scheduleFallLocked(e, r, now)
		}
		if l.cfg.StalePolicy == StaleHold {
			continue
		}
		for s := range r.records {
			if rec := &r.records[s]; !rec.stale(now, l.cfg.SignalStaleAfter) {
				e.dueAt(rec.takenAt.Add(l.cfg.SignalStaleAfter + 1)) // stale is strictly older
			}
		}
	}
	l.dueLocked(e.due)
}

// scheduleFallLocked notes when the prefill load of a rank that is over its limit will be within
// it, if the books expect that.
func (l *List) scheduleFallLocked(e *entry, r *rank, now time.Time) {
	if l.loads == nil {
		return
	}
	limit := l.roomLocked(e, r).MaxPrefillTokens
	if l.cfg.BusyReleaseRatio < 1 {
		limit = uint64(float64(limit) * l.cfg.BusyReleaseRatio)
	}
	id := worker.Rank{Worker: e.id, DP: e.number(r)}
	if e.engineRouted() {
		id.DP = worker.AnyDP
	}
	// If that is past, something else than the books says that the rank is over.
	if at, ok := l.loads.PrefillFalls(id, limit); ok && at.After(now) {
		e.dueAt(at)
	}
}

func (e *entry) dueAt(at time.Time) {
	if e.due.IsZero() || at.Before(e.due) {
		e.due = at
	}
}

// dueLocked brings the next Tick that has work forward to at, unless that is zero.
func (l *List) dueLocked(at time.Time) {
	if !at.IsZero() && at.UnixNano() < l.due.Load() {
		l.due.Store(at.UnixNano())
	}
}
