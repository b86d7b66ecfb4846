package sim

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"
)

const (
	maxFaultBody = 64 << 10
	// reopening is how long DELETE waits until a worker listens again.
	reopening = 5 * time.Second
)

// setFault serves POST /sim/fault, and answers like GET.
func (w *worker) setFault(rw http.ResponseWriter, r *http.Request) error {
	body, err := io.ReadAll(http.MaxBytesReader(rw, r.Body, maxFaultBody))
	if err != nil {
		return err
	}
	var spec faultSpec
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields() // a misspelled key must not make another fault
	if err := d.Decode(&spec); err != nil {
		return badRequest("The request body is not a fault: %v", err)
	}
	kind, err := spec.check()
	if err != nil {
		return err
	}
	if spec.Worker != nil {
		if !within(spec.Worker, 0, len(w.server.workers)-1) {
			return badRequest("worker: is not within 0..%d.", len(w.server.workers)-1)
		}
		w = w.server.workers[*spec.Worker]
		spec.Worker = nil
	}
	s := w.server
	s.faulting.Lock()
	defer s.faulting.Unlock()
	now := time.Now()
	if kind.name == refuse && spec.Seconds == 0 && !s.reachableWithout(w, now) {
		return badRequest("refuse: no port would be left on which it could be cleared; set seconds.")
	}
	f := newFault(spec, kind, now)
	w.faults.add(f)
	switch kind.name {
	case refuse:
		w.door.shut()
	case slow:
		w.setPace(now, or(spec.Factor, slowFactor), f.until)
	}
	s.log.Info("fault set", "worker", w.index, "fault", kind.name)
	return s.writeFaults(rw)
}

// reachableWithout tells whether another worker than w listens, or will by itself.
func (s *Server) reachableWithout(w *worker, now time.Time) bool {
	for _, o := range s.workers {
		if f := o.faults.find(refuse, now); o != w && (f == nil || !f.until.IsZero()) {
			return true
		}
	}
	return false
}

// clearFaults serves DELETE /sim/fault?worker=I&fault=NAME; without a name it clears all of
// the worker's. It answers like GET.
func (w *worker) clearFaults(rw http.ResponseWriter, r *http.Request) error {
	if v := r.URL.Query().Get("worker"); v != "" {
		i, err := strconv.Atoi(v)
		if err != nil || !within(&i, 0, len(w.server.workers)-1) {
			return badRequest("worker: %.20q is not within 0..%d.", v, len(w.server.workers)-1)
		}
		w = w.server.workers[i]
	}
	name := r.URL.Query().Get("fault")
	if name != "" && kindOf(name) == nil {
		return badRequest("fault: there is no %.40q.", name)
	}
	w.server.faulting.Lock()
	defer w.server.faulting.Unlock()
	w.faults.remove(name)
	if name == "" || name == slow {
		w.setPace(time.Now(), 1, time.Time{})
	}
	w.server.log.Info("fault cleared", "worker", w.index, "fault", name)
	if opened := w.door.waiting(); opened != nil && w.faults.find(refuse, time.Now()) == nil {
		late := time.NewTimer(reopening)
		defer late.Stop()
		select {
		case <-opened:
		case <-r.Context().Done():
			return errCut
		case <-late.C:
			return errors.New("sim: the worker's port is taken; the worker goes on trying to listen on it")
		}
	}
	return w.server.writeFaults(rw)
}

// setPace makes the work of all ranks take factor times as long until then.
func (w *worker) setPace(now time.Time, factor float64, until time.Time) {
	for _, r := range w.ranks {
		r.setPace(now, factor, until)
	}
}

// faultStates serves GET /sim/fault, the same on every worker of the process.
func (s *Server) faultStates(rw http.ResponseWriter, _ *http.Request) error { return s.writeFaults(rw) }

func (s *Server) writeFaults(rw http.ResponseWriter) error {
	type workerFaults struct {
		Worker int          `json:"worker"`
		Port   int          `json:"port"`
		Faults []faultState `json:"faults"`
	}
	all := make([]workerFaults, len(s.workers))
	for i, w := range s.workers {
		all[i] = workerFaults{i, w.port, w.faults.state(time.Now())}
	}
	return writeJSON(rw, http.StatusOK, map[string][]workerFaults{"workers": all})
}
