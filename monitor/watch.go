package monitor

import (
	"context"
	"reflect"
	"sync"
	"time"

	"spillway/busy"
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
	w.asleep = asleep
	w.tellLocked(false, now)
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
	same.Models, same.MaxModelLen = w.record.Models, w.record.MaxModelLen
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

func (w *watch) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gone = true
}

// running is a watch whose loops have been started.
type running struct {
	watch *watch
	stop  context.CancelFunc
}
