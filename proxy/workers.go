package proxy

import (
	"cmp"
	"errors"
	"reflect"
	"slices"
	"sync"
	"time"

	"spillway/busy"
	"spillway/worker"
)

// ErrNotWanted means that a worker was removed or changed while its names were being learnt.
var ErrNotWanted = errors.New("proxy: the worker has changed meanwhile")

// maxRecords bounds the workers that are remembered, removed ones included.
const maxRecords = 16384

// directory is what is known of the workers that were ever registered. The router, the monitor
// and the connection pools hear of them only from here, while mu is held: one change after the
// other, so that none of them is left with what another has already dropped.
type directory struct {
	server *Server
	watch  func(*worker.Worker, *busy.List)
	forget func(worker.ID)

	mu      sync.Mutex // guards entries and the fields of each; taken before the router's lock
	entries map[worker.ID]*entry
}

// entry is one worker: what was said of it, and what is made of that.
type entry struct {
	said      workerRecord
	record    *worker.Worker // what the worker is registered with, nil if it is not
	learns    bool           // its names are asked of the worker
	lifecycle string
	reasons   []string // why it is not schedulable
	removed   time.Time
}

// The stages of a worker's life.
const (
	incomplete    = "incomplete"
	schedulable   = "schedulable"
	unschedulable = "unschedulable" // removed, and remembered
)

// Link tells the server how workers come to be watched and forgotten by what looks at their load
// and health. It is called before any worker joins.
func (s *Server) Link(watch func(*worker.Worker, *busy.List), forget func(worker.ID)) {
	s.workers.watch, s.workers.forget = watch, forget
}

// Join makes a worker known that the configuration names. If it has no model names yet, they are
// to be learnt from it, and Learned registers it. It fails if a name would mean two things.
func (s *Server) Join(w *worker.Worker) error {
	d := &s.workers
	d.mu.Lock()
	defer d.mu.Unlock()
	e := &entry{said: recordOf(w), record: w, learns: len(w.Models) == 0, lifecycle: incomplete}
	if e.learns {
		e.reasons = []string{namesUnknown}
		d.watch(w, nil)
	} else {
		if err := d.registerLocked(w); err != nil {
			return err
		}
		e.lifecycle = schedulable
	}
	d.entries[w.ID] = e
	return nil
}

// Learned registers what was learnt of a worker: names, where none were configured, which of
// them are aliases, and the context length. It returns the list that reports belong in, or ErrNotWanted.
func (s *Server) Learned(w *worker.Worker) (*busy.List, error) {
	d := &s.workers
	d.mu.Lock()
	defer d.mu.Unlock()
	e := d.entries[w.ID]
	if e == nil || e.record == nil {
		return nil, ErrNotWanted
	}
	same := *w
	same.MaxModelLen, same.Aliases = e.record.MaxModelLen, e.record.Aliases
	if e.learns {
		same.Models = e.record.Models
	}
	if !reflect.DeepEqual(&same, e.record) {
		return nil, ErrNotWanted
	}
	list, err := d.enrolLocked(w)
	if err != nil {
		if e.lifecycle != schedulable {
			e.reasons = []string{"reconciliation failed: " + err.Error()}
		}
		return nil, err
	}
	e.record, e.lifecycle, e.reasons = w, schedulable, nil
	e.said.named(w.Models)
	return list, nil
}

// registerLocked registers a worker that has names, and has it watched.
func (d *directory) registerLocked(w *worker.Worker) error {
	list, err := d.enrolLocked(w)
	if err != nil {
		return err
	}
	d.watch(w, list)
	return nil
}

// withdrawLocked takes a worker out. Requests that it still answers go on.
func (d *directory) withdrawLocked(e *entry) {
	if e.record == nil {
		return
	}
	id := e.record.ID
	e.record, e.learns = nil, false
	d.forget(id)
	d.dismissLocked(id)
	d.server.Forget(id)
}

// put replaces what is said of a worker by what change makes of it, and makes that so. Unless it
// may create one it returns errUnknownWorker for an ID that it does not know.
func (d *directory) put(id worker.ID, create bool, change func(*workerRecord)) (workerRecord, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e := d.entries[id]
	switch {
	case e != nil:
	case !create:
		return workerRecord{}, errUnknownWorker
	case !d.roomLocked():
		return workerRecord{}, errTooManyWorkers
	default:
		e = &entry{}
		d.entries[id] = e
	}
	change(&e.said)
	d.reconcileLocked(e)
	return e.shown(), nil
}

var (
	errUnknownWorker  = errors.New("unknown worker")
	errTooManyWorkers = errors.New("too many workers")
)

// reconcileLocked makes what is said of a worker true, or explains why that cannot be. Names that
// were learnt stay as they are from then on.
func (d *directory) reconcileLocked(e *entry) {
	next, reasons := e.said.worker()
	if len(reasons) == 0 {
		if old := e.record; old != nil && old.Endpoint == next.Endpoint {
			next.MaxModelLen, next.Aliases = old.MaxModelLen, old.Aliases
		} else if old != nil {
			d.server.Forget(next.ID) // connections to where it was
		}
		reasons = d.enterLocked(e, next)
	}
	e.lifecycle, e.reasons = schedulable, reasons
	if len(reasons) > 0 {
		e.lifecycle = incomplete
	}
	if len(reasons) > 0 && !e.learns {
		d.withdrawLocked(e)
	}
}

// enterLocked has a worker take part, as soon as it has a name.
func (d *directory) enterLocked(e *entry, w *worker.Worker) (reasons []string) {
	if len(w.Models) == 0 {
		d.withdrawLocked(e)
		e.record, e.learns = w, true
		d.watch(w, nil)
		return []string{namesUnknown}
	}
	e.learns = false
	if err := d.registerLocked(w); err != nil {
		return []string{"reconciliation failed: " + err.Error()}
	}
	e.record = w
	return nil
}

const namesUnknown = "the worker has not told its models yet"

// remove takes a worker out and keeps its record.
func (d *directory) remove(id worker.ID) (workerRecord, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e := d.entries[id]
	if e == nil {
		return workerRecord{}, errUnknownWorker
	}
	d.withdrawLocked(e)
	e.lifecycle, e.reasons, e.removed = unschedulable, nil, time.Now()
	return e.shown(), nil
}

// roomLocked makes room for one more record: the worker that was removed first is forgotten.
func (d *directory) roomLocked() bool {
	if len(d.entries) < maxRecords {
		return true
	}
	var oldest *entry
	for _, e := range d.entries {
		if e.lifecycle == unschedulable && (oldest == nil || e.removed.Before(oldest.removed)) {
			oldest = e
		}
	}
	if oldest != nil {
		delete(d.entries, oldest.said.ID)
	}
	return oldest != nil
}

func (d *directory) find(id worker.ID) (workerRecord, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e := d.entries[id]
	if e == nil {
		return workerRecord{}, false
	}
	return e.shown(), true
}

// list is all records that the filters, nil for any, let through: by model, tenant and ID.
func (d *directory) list(model, tenant *string) []workerRecord {
	d.mu.Lock()
	found := []workerRecord{}
	for _, e := range d.entries {
		if (model == nil || e.said.Model == *model) && (tenant == nil || e.said.Tenant == *tenant) {
			found = append(found, e.shown())
		}
	}
	d.mu.Unlock()
	slices.SortFunc(found, func(a, b workerRecord) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.ID, b.ID))
	})
	return found
}

func (e *entry) shown() workerRecord {
	r := e.said
	if r.Taints == nil {
		r.Taints = []string{}
	}
	if r.TopologyDomains == nil {
		r.TopologyDomains = map[string]string{}
	}
	r.Lifecycle, r.Reasons = e.lifecycle, e.reasons
	return r
}
