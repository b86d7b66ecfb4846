package proxy

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/labstack/echo/v4"

	"spillway/worker"
)

// maxWorkerBody bounds the body of a write to /workers in bytes.
const maxWorkerBody = 8 << 20

// defaultModel is the model of a worker of which none is said.
const defaultModel = "default"

func (s *Server) listWorkers(c echo.Context) error {
	query, err := url.ParseQuery(c.Request().URL.RawQuery)
	if err != nil {
		return c.String(http.StatusBadRequest, "Invalid URL: Cannot parse the query string")
	}
	var filters [2]*string
	for i, name := range []string{"model_name", "tenant_id"} {
		switch given := query[name]; len(given) {
		case 0:
		case 1:
			filters[i] = &given[0]
		default:
			return c.String(http.StatusBadRequest, "Invalid URL: Cannot parse the query string: "+name+" is given more than once")
		}
	}
	return c.JSON(http.StatusOK, s.workers.list(filters[0], filters[1]))
}

// workerID reads the ID in the path; false means that the request has been answered.
func workerID(c echo.Context) (worker.ID, bool, error) {
	if strings.Contains(c.Param("id"), "/") { // echo lets the last parameter be a path
		return 0, false, echo.ErrNotFound
	}
	id, err := strconv.ParseUint(c.Param("id"), 10, 64)
	if err != nil {
		return 0, false, c.String(http.StatusBadRequest, "Invalid URL: Cannot parse the worker ID as an integer from 0 to 2^64-1")
	}
	return worker.ID(id), true, nil
}

func (s *Server) showWorker(c echo.Context) error {
	id, ok, err := workerID(c)
	if !ok {
		return err
	}
	record, ok := s.workers.find(id)
	if !ok {
		return refuse(c, notFound(id))
	}
	return c.JSON(http.StatusOK, record)
}

func notFound(id worker.ID) *adminError {
	return &adminError{http.StatusNotFound, "worker " + id.String() + " not found"}
}

// setWorker adds a worker, or replaces all that is known of it. One that cannot be used is
// accepted all the same, and its record says why.
func (s *Server) setWorker(c echo.Context) error {
	fields, bad := s.readRecord(c)
	if bad == nil && fields["worker_id"] == nil {
		bad = &adminError{http.StatusUnprocessableEntity, "worker_id: missing field"}
	}
	next := workerRecord{Model: defaultModel, Tenant: worker.DefaultTenant}
	if bad == nil {
		bad = next.set(fields, false)
	}
	if bad != nil {
		return refuse(c, bad)
	}
	record, err := s.workers.put(next.ID, true, func(r *workerRecord) { *r = next })
	return s.changed(c, http.StatusCreated, next.ID, record, err)
}

// patchWorker changes the fields that the body names.
func (s *Server) patchWorker(c echo.Context) error {
	id, ok, err := workerID(c)
	if !ok {
		return err
	}
	fields, bad := s.readRecord(c)
	if bad == nil {
		var trial workerRecord // what is wrong shows here, and then nothing is changed
		bad = trial.set(fields, true)
	}
	if bad != nil {
		return refuse(c, bad)
	}
	record, err := s.workers.put(id, false, func(r *workerRecord) { _ = r.set(fields, true) })
	return s.changed(c, http.StatusOK, id, record, err)
}

func (s *Server) removeWorker(c echo.Context) error {
	id, ok, err := workerID(c)
	if !ok {
		return err
	}
	record, err := s.workers.remove(id)
	return s.changed(c, http.StatusOK, id, record, err)
}

// changed answers a write.
func (s *Server) changed(c echo.Context, status int, id worker.ID, record workerRecord, err error) error {
	switch {
	case errors.Is(err, errUnknownWorker):
		return refuse(c, notFound(id))
	case errors.Is(err, errTooManyWorkers):
		return refuse(c, &adminError{http.StatusConflict, "no more than " + strconv.Itoa(maxRecords) + " workers can be known"})
	case err != nil:
		return err
	}
	s.log.Info("worker changed", "worker", record.ID.String(), "model", record.Model, "lifecycle", record.Lifecycle,
		"reasons", record.Reasons, "method", c.Request().Method, "client", c.Request().RemoteAddr)
	return c.JSON(status, record)
}

// readRecord reads a body as the members of a JSON object.
func (s *Server) readRecord(c echo.Context) (map[string]json.RawMessage, *adminError) {
	raw, bad := s.readSmall(c, maxWorkerBody, "the body exceeds 8 MiB")
	if bad != nil {
		return nil, bad
	}
	at := cursor{b: raw}
	if at.skip(0) != nil || at.peek() != 0 || at.i < len(raw) {
		return nil, &adminError{http.StatusBadRequest, "the body is not valid JSON"}
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil || fields == nil {
		return nil, &adminError{http.StatusUnprocessableEntity, "the body must be a JSON object"}
	}
	return fields, nil
}
