package proxy

import (
	"net/http"
	"slices"

	"github.com/labstack/echo/v4"

	"spillway/router"
)

// live says whether the process should be left alone. It must not fail during a drain or under
// load, or the orchestrator kills requests in flight.
func (s *Server) live(c echo.Context) error {
	if stage(s.stage.Load()) == stopping {
		return c.JSON(http.StatusServiceUnavailable, statusBody{"shutting_down", "", "Service is shutting down", ""})
	}
	return c.JSON(http.StatusOK, statusBody{"live", "", "Service is live", ""})
}

type statusBody struct {
	Status  string `json:"status"`
	Stage   string `json:"stage,omitempty"`
	Message string `json:"message"`
	Reason  string `json:"reason,omitempty"`
}

type instance struct {
	Model      string `json:"model"`
	Worker     string `json:"worker"`
	InstanceID uint64 `json:"instance_id"`
	DPSize     uint32 `json:"dp_size"`
}

// health is readiness as Dynamo's front end has it: without workers it is still 200.
func (s *Server) health(c echo.Context) error {
	if body, ok := s.notReady(); !ok {
		return c.JSON(http.StatusServiceUnavailable, body)
	}
	body := struct {
		Status    string     `json:"status"`
		Endpoints []string   `json:"endpoints"`
		Instances []instance `json:"instances"`
	}{"healthy", []string{}, []instance{}}
	for _, w := range s.router.Catalog().Workers() {
		body.Endpoints = append(body.Endpoints, w.Endpoint)
		body.Instances = append(body.Instances, instance{w.Models[0], w.Name, uint64(w.ID), max(w.DPSize, 1)})
	}
	slices.Sort(body.Endpoints)
	body.Endpoints = slices.Compact(body.Endpoints)
	return c.JSON(http.StatusOK, body)
}

// readiness is for load balancers: it is 200 while some model has a routable worker, busy or
// not. Taking an overloaded front end out would move the same load onto its peers.
func (s *Server) readiness(c echo.Context) error {
	body, ok := s.notReady()
	if !ok {
		return c.JSON(http.StatusServiceUnavailable, body)
	}
	routable := false
	s.router.Partitions("", func(p *router.Partition) { routable = routable || len(p.Busy.Snapshot().Routable) > 0 })
	if !routable {
		body.Reason = "no_workers"
		return c.JSON(http.StatusServiceUnavailable, body)
	}
	return c.JSON(http.StatusOK, statusBody{Status: "ready", Message: "Service is ready"})
}

// notReady is the body that says no, and whether the stage lets the answer be yes.
func (s *Server) notReady() (statusBody, bool) {
	st := stage(s.stage.Load())
	return statusBody{Status: "not_ready", Stage: st.String(), Message: "Service is not ready"}, st == ready
}
