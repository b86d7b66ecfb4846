package selectservice

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"spillway/httperr"
	"spillway/jsonhttp"
)

// sendText writes one of the two failures that are not JSON: a number in the path, or a query,
// that cannot be read.
func sendText(w http.ResponseWriter, text string) {
	w.Header()["Content-Type"] = []string{"text/plain; charset=utf-8"}
	w.WriteHeader(http.StatusBadRequest)
	_, _ = w.Write([]byte(text)) // a client that has left hears nothing
}

// workerID reads the path; false means that the answer was sent.
func workerID(w http.ResponseWriter, r *http.Request) (uint64, bool) {
	text := r.PathValue("id")
	id, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		sendText(w, fmt.Sprintf("Invalid URL: Cannot parse `worker_id` with value `%.64s` to a `u64`", text))
	}
	return id, err == nil
}

// filter reads the query; false means that the answer was sent.
func (s *Server) filter(w http.ResponseWriter, r *http.Request) (f filter, ok bool) {
	var other *string
	failed := jsonhttp.Query(r.URL.RawQuery, jsonhttp.Param{Name: "model_name", To: &f.model},
		jsonhttp.Param{Name: s.tenant, To: &f.tenant}, jsonhttp.Param{Name: s.otherTenant, To: &other})
	if failed == nil && other != nil {
		var named string
		named, failed = s.tenantOf(&tenancy{own: or(f.tenant, ""), hasOwn: f.tenant != nil, other: *other, hasOther: true})
		f.tenant = &named
	}
	if failed != nil {
		sendText(w, "Failed to deserialize query string: "+failed.Message)
	}
	return f, failed == nil
}

// readRecord reads what a body says of a worker.
func readRecord(r *http.Request, fields []workerField, to *registration) *httperr.Error {
	x := take()
	defer x.put()
	failed := jsonhttp.ReadObject(&x.Exchange, r, maxBody, fields, to)
	slices.Sort(to.taints)
	to.taints = slices.Compact(to.taints)
	return failed
}

func (s *Server) registerWorker(w http.ResponseWriter, r *http.Request) *httperr.Error {
	said := registration{record: record{model: defaultModel}}
	failed := readRecord(r, registerBody(s.tenant, s.otherTenant), &said)
	if failed == nil {
		said.tenant, failed = s.tenantOf(&said.names)
	}
	if failed != nil {
		return failed
	}
	rec, failed := s.catalog.put(&said.record, s.now())
	return s.sendRecord(w, http.StatusCreated, rec, failed)
}

func (s *Server) patchWorker(w http.ResponseWriter, r *http.Request) *httperr.Error {
	id, ok := workerID(w, r)
	if !ok {
		return nil
	}
	var by registration
	if failed := readRecord(r, patchBody, &by); failed != nil {
		return failed
	}
	rec, failed := s.catalog.patch(id, &by.record, s.now())
	return s.sendRecord(w, http.StatusOK, rec, failed)
}

func (s *Server) deleteWorker(w http.ResponseWriter, r *http.Request) *httperr.Error {
	id, ok := workerID(w, r)
	if !ok {
		return nil
	}
	rec, failed := s.catalog.remove(id, s.now())
	return s.sendRecord(w, http.StatusOK, rec, failed)
}

func (s *Server) sendRecord(w http.ResponseWriter, status int, rec *record, failed *httperr.Error) *httperr.Error {
	if failed == nil {
		jsonhttp.Send(w, status, appendRecord(nil, rec, s.tenant))
	}
	return failed
}

func (s *Server) listWorkers(w http.ResponseWriter, r *http.Request) *httperr.Error {
	if f, ok := s.filter(w, r); ok {
		jsonhttp.Send(w, http.StatusOK, s.appendRecords(nil, s.catalog.list(f)))
	}
	return nil
}

func (s *Server) appendRecords(b []byte, all []*record) []byte {
	b = append(b, '[')
	for i, rec := range all {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendRecord(b, rec, s.tenant)
	}
	return append(b, ']')
}

// ready lists all workers, and why they are not schedulable, whether or not one is.
func (s *Server) ready(w http.ResponseWriter, _ *http.Request) *httperr.Error {
	n := s.catalog.ready.Load()
	ready, status := n > 0 && s.serving(), http.StatusServiceUnavailable
	if ready {
		status = http.StatusOK
	}
	b := strconv.AppendBool([]byte(`{"ready":`), ready)
	b = jsonhttp.AppendUint(b, `,"schedulable_workers":`, uint64(n))
	b = s.appendRecords(append(b, `,"workers":`...), s.catalog.list(filter{}))
	jsonhttp.Send(w, status, append(b, '}'))
	return nil
}
