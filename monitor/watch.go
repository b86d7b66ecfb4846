package monitor

import (
	"context"
	"reflect"
	"slices"
	"sync"
	"time"

	"spillway/busy"
	"spillway/wire"
	"spillway/worker"
)

// watch is what the monitor knows of one worker. Its loops read the record anew in each
// round, so that names can be learnt without starting over.
type watch struct {
	id      worker.ID
	metrics scrapeMetrics

	// mu guards the fields below. The lock of the busy list is taken while it is held, so that
	// after Forget nothing more is written; never the other way round.
	mu     sync.Mutex
	record *worker.Worker
	list   *busy.List     // nil until the worker has names
	learns bool           // the names are the worker's own, not the operator's
	naming *worker.Worker // the record that is being registered by this monitor, or nil
	gone   bool

	labels []uint32 // of the ranks on the last good page, ascending
	shares shares   // what other routers have promised the worker

	asleep    bool // by its metrics page
	unhealthy bool // by its probes
	told      health

	failures int      // scrapes that brought nothing, in a row
	known    bool     // at least one brought something
	cause    *failure // of the last of them
}

// health is what the busy list has been told.
type health uint8

const (
	toldNothing health = iota
	toldHealthy
	toldUnhealthy
)

// target is the current record, and the list that wants to know about it, or nil.
func (w *watch) target() (*worker.Worker, *busy.List) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.record, w.list
}

// scraped writes a page into the list, unless the worker has been forgotten.
func (w *watch) scraped(samples []busy.Sample, restarted, asleep bool, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gone || w.list == nil {
		return
	}
	w.list.Scraped(w.id, samples, restarted, now)
	w.labels = w.labels[:0]
	for i := range samples {
		w.labels = append(w.labels, samples[i].Rank.DP)
	}
	w.asleep = asleep
	w.tellLocked(false, now)
}

// heard writes a load event into the list. It returns why it did not, or "".
func (w *watch) heard(e wire.LoadEvent, now time.Time) (dropped string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gone || w.list == nil {
		return droppedWorker
	}
	dp, ok := w.rankLocked(e.Rank.DP)
	if !ok {
		return droppedRank
	}
	decodeBlocks, prefillTokens, ok := w.shares.add(e, dp, now)
	if !ok {
		return droppedRoom
	}
	w.list.Observe(busy.Sample{
		Rank: worker.Rank{Worker: w.id, DP: dp}, Source: busy.Event, TakenAt: now,
		DecodeBlocks: decodeBlocks, PrefillTokens: prefillTokens, KVUsedBlocks: e.KVUsedBlocks,
	}, now)
	return ""
}

// rankLocked is the label under which the list knows the rank of an event, or false if the
// worker has no such rank: an event must not make one up, because an idle rank that is not
// there would keep the worker from ever being busy.
func (w *watch) rankLocked(dp uint32) (uint32, bool) {
	switch r := w.record; {
	case r.DPSize > 0:
		return dp, dp >= r.DPStart && dp-r.DPStart < r.DPSize
	case len(w.labels) == 0: // not scraped, so events alone tell what ranks there are
		return dp, true
	case len(w.labels) == 1: // a single rank, whatever it is called
		return w.labels[0], true
	}
	_, ok := slices.BinarySearch(w.labels, dp)
	return dp, ok
}

// expire ends what publishers have promised that are not heard of any more.
func (w *watch) expire(now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gone || w.list == nil {
		return
	}
	for _, s := range w.shares.expire(w.id, now) {
		if dp, ok := w.rankLocked(s.Rank.DP); ok && dp == s.Rank.DP { // it is still there
			w.list.Observe(s, now)
		}
	}
}

// probed takes the verdict of the health probes; answered is that the last one passed.
func (w *watch) probed(unhealthy, answered bool, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.gone || w.list == nil {
		return
	}
	w.unhealthy = unhealthy
	w.tellLocked(answered, now)
}

// tellLocked tells the list whether the worker may be sent to, if that is news. A probe that
// passed is always news: it ends an inhibition.
func (w *watch) tellLocked(answered bool, now time.Time) {
	healthy := !w.unhealthy && !w.asleep
	switch {
	case healthy && (answered || w.told == toldUnhealthy):
		w.told = toldHealthy
	case !healthy && w.told != toldUnhealthy:
		w.told = toldUnhealthy
	default:
		return
	}
	w.list.SetHealthy(w.id, healthy, now)
}

func (w *watch) scrapeSucceeded() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failures, w.known, w.cause = 0, true, nil
}

func (w *watch) scrapeFailed(cause *failure) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failures++
	w.cause = cause
}

// down is why a worker that could once be scraped cannot be now; nil if it can.
func (w *watch) down() (cause *failure, known bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.list == nil || !w.known {
		return nil, false
	}
	if w.failures < backOffAfter {
		return nil, true
	}
	return w.cause, true
}

// takeOver puts a new record and list in place if they concern the same server, so that its
// loops can go on; else it reports false and changes nothing.
func (w *watch) takeOver(record *worker.Worker, list *busy.List) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	same := *record
	same.Models, same.MaxModelLen, same.Aliases = w.record.Models, w.record.MaxModelLen, w.record.Aliases
	if !reflect.DeepEqual(same, *w.record) {
		return false
	}
	if record != w.naming {
		w.naming = nil // what is being registered has become old
		if !reflect.DeepEqual(*record, *w.record) {
			w.learns = list == nil
		}
	}
	w.adoptLocked(record, list)
	return true
}

func (w *watch) adoptLocked(record *worker.Worker, list *busy.List) {
	w.record = record
	if list != w.list {
		w.list, w.told = list, toldNothing
	}
}

// forget ends the watch and returns what a watch in its place has to carry on.
func (w *watch) forget() shares {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gone = true
	return w.shares
}

// running is a watch whose loops have been started.
type running struct {
	watch *watch
	stop  context.CancelFunc
}
