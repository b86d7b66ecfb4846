package proxy

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// routeTable is the routes of one listener.
type routeTable struct {
	echo  *echo.Echo
	taken map[string]bool
	err   error // of all that were added
}

func (s *Server) newTable() *routeTable {
	e := echo.New()
	e.HideBanner, e.HidePort = true, true
	e.HTTPErrorHandler = s.handleError
	t := &routeTable{echo: e, taken: map[string]bool{}}
	t.add(http.MethodGet, "/openapi.json", func(c echo.Context) error { return openAPI(c, e) })
	return t
}

// add registers a route. Two on one method and path are an error: they would shadow each other.
func (t *routeTable) add(method, path string, h echo.HandlerFunc) {
	key := method + " " + path
	if t.taken[key] {
		t.err = errors.Join(t.err, fmt.Errorf("proxy: two routes for %s", key))
		return
	}
	t.taken[key] = true
	t.echo.Add(method, path, h)
}

// routes registers every route, those of operators on the admin address if there is one.
func (s *Server) routes() error {
	t := s.newTable()
	if s.cfg.EnableAnthropicAPI {
		t.add(http.MethodPost, s.cfg.AnthropicPath+"/count_tokens", s.countTokens)
	}
	for i, path := range s.inferencePaths() {
		t.add(http.MethodPost, path, s.infer(&endpoints[i]))
	}
	t.add(http.MethodGet, s.cfg.ModelsPath, s.quiet(s.keyed(s.listModels)))
	t.add(http.MethodGet, s.cfg.ModelsPath+"/*", s.quiet(s.keyed(s.showModel)))
	t.add(http.MethodGet, s.cfg.HealthPath, s.quiet(s.health))
	t.add(http.MethodGet, s.cfg.LivePath, s.quiet(s.live))
	t.add(http.MethodGet, "/ready", s.quiet(s.readiness))
	t.add(http.MethodGet, "/docs", s.docs)
	s.public = t.echo
	if s.cfg.AdminAddr == "" {
		s.operate(t)
		s.operators = t
		return t.err
	}
	admin := s.newTable()
	s.operators = admin
	s.operate(admin)
	s.administer(admin)
	s.admin = admin.echo
	return errors.Join(t.err, admin.err)
}

// inferencePaths are the paths of endpoints, as far as they are served.
func (s *Server) inferencePaths() []string {
	paths := []string{s.cfg.ChatPath, s.cfg.CompletionsPath, s.cfg.EmbeddingsPath, s.cfg.ResponsesPath}
	if s.cfg.EnableAnthropicAPI {
		paths = append(paths, s.cfg.AnthropicPath)
	}
	return paths
}

// exposition serves the metrics.
func (s *Server) exposition() echo.HandlerFunc {
	h := promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{Registry: s.registry})
	return func(c echo.Context) error {
		h.ServeHTTP(c.Response(), c.Request())
		return nil
	}
}

// Handler is what clients are served with, without a listener.
func (s *Server) Handler() http.Handler { return s.public }

// AdminHandler is what the admin address is served with, nil if there is none.
func (s *Server) AdminHandler() http.Handler {
	if s.admin == nil {
		return nil
	}
	return s.admin
}
