// Package proxy serves clients: it decides whether and where a request goes, forwards it,
// streams the answer back, reports what happened, and frees what was booked.
package proxy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"spillway/httperr"
	"spillway/router"
	"spillway/worker"
)

// stage is where the process is in its life.
type stage int32

const (
	ready    stage = iota
	delaying       // requests are admitted, but probes say no more
	draining       // requests are refused, running ones go on
	stopping       // running ones are cut
)

// errStopping is the cause with which requests are cancelled that outlast the drain.
var errStopping = errors.New("proxy: shutting down")

// Server is the front end for clients. It is safe for concurrent use.
type Server struct {
	cfg          Config
	router       *router.Router
	log          *slog.Logger
	echo         *echo.Echo
	overload     int      // status of refusals because of load
	overloadBody []byte   // of the documented refusal
	trackOutput  bool     // generated tokens are booked as KV blocks
	retryValue   []string // of Retry-After, if it is fixed
	metrics      *metrics
	registry     *prometheus.Registry

	stage    atomic.Int32
	inflight atomic.Int64  // inference requests whose answer is not written yet
	drained  chan struct{} // told when inflight reaches 0 while draining

	slots  slots    // reservations of requests that are still there
	peers  sync.Map // worker.ID -> *peer
	freed  rates    // of reservations given back and of refusals, for Retry-After
	models models   // what is remembered of each model
	access accessLog
}

// New returns a server that decides with r. Nothing runs yet; metrics are registered with reg,
// which /metrics serves.
func New(cfg Config, r *router.Router, reg *prometheus.Registry, log *slog.Logger) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, router: r, log: log, registry: reg, drained: make(chan struct{}, 1),
		overload: cfg.overloadStatus(log), retryValue: []string{cfg.RetryAfter}, trackOutput: r.TracksOutput(), access: accessLog{log: log},
	}
	s.overloadBody = renderError(cfg.ErrorEnvelope, &httperr.Error{
		Status: s.overload, Cause: httperr.Overload, Message: httperr.BusyMessage,
	})
	s.metrics = newMetrics(reg, r)
	s.models.made = s.metrics.model
	s.slots.init()
	if err := s.routes(); err != nil {
		return nil, err
	}
	return s, nil
}

// routes registers every route; two on one method and path are an error, they would shadow
// each other.
func (s *Server) routes() error {
	e := echo.New()
	e.HideBanner, e.HidePort = true, true
	e.HTTPErrorHandler = s.handleError
	s.echo = e
	taken := map[string]bool{}
	var err error
	add := func(method, path string, h echo.HandlerFunc) {
		if key := method + " " + path; taken[key] {
			err = errors.Join(err, fmt.Errorf("proxy: two routes for %s", key))
		} else {
			taken[key] = true
			e.Add(method, path, h)
		}
	}
	for i, path := range []string{s.cfg.ChatPath, s.cfg.CompletionsPath, s.cfg.EmbeddingsPath} {
		add(http.MethodPost, path, s.infer(&endpoints[i]))
	}
	add(http.MethodGet, s.cfg.ModelsPath, s.listModels)
	add(http.MethodGet, s.cfg.ModelsPath+"/*", s.showModel)
	add(http.MethodGet, s.cfg.HealthPath, s.health)
	add(http.MethodGet, s.cfg.LivePath, s.live)
	add(http.MethodGet, "/ready", s.readiness)
	add(http.MethodGet, s.cfg.MetricsPath, s.exposition())
	if !s.cfg.DisableAdminAPI {
		add(http.MethodGet, "/busy_threshold", s.showThresholds)
		add(http.MethodPost, "/busy_threshold", s.setThresholds)
		add(http.MethodDelete, "/busy_threshold", s.clearThresholds)
	}
	add(http.MethodGet, "/openapi.json", s.openAPI)
	add(http.MethodGet, "/docs", s.docs)
	return err
}

// exposition serves the metrics. The series of every known model exist before it is first read.
func (s *Server) exposition() echo.HandlerFunc {
	h := promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{Registry: s.registry})
	return func(c echo.Context) error {
		for _, name := range s.router.Catalog().Models() {
			s.models.of(name)
		}
		h.ServeHTTP(c.Response(), c.Request())
		return nil
	}
}

// Handler is the server without a listener.
func (s *Server) Handler() http.Handler { return s.echo }

// Forget closes the connections to a worker that was unregistered.
func (s *Server) Forget(id worker.ID) {
	if p, ok := s.peers.LoadAndDelete(id); ok {
		p.(*peer).client.Close()
	}
}

// unwind is how long requests may take to notice that they were cut.
const unwind = 2 * time.Second

// Run serves clients on ln until ctx ends, then drains: new requests are refused while running
// ones get DrainTimeout, and the rest is cut. After nil, nothing that it started is left.
func (s *Server) Run(ctx context.Context, ln net.Listener) error {
	requests, cut := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cut(nil)
	srv := &http.Server{
		Handler: s.echo, ReadHeaderTimeout: 10 * time.Second, MaxHeaderBytes: 1 << 20,
		BaseContext: func(net.Listener) context.Context { return requests },
		ErrorLog:    slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	served, ticked := make(chan error, 1), make(chan struct{})
	ticking, stopTicking := context.WithCancel(context.WithoutCancel(ctx))
	go func() { served <- srv.Serve(ln) }()
	go func() {
		defer close(ticked)
		s.tick(ticking)
	}()
	defer func() { stopTicking(); <-ticked; s.closePeers() }()

	select {
	case err := <-served:
		return fmt.Errorf("proxy: serve: %w", err)
	case <-ctx.Done():
	}
	s.enter(delaying)
	if s.cfg.DrainDelay > 0 {
		time.Sleep(s.cfg.DrainDelay)
	}
	s.enter(draining) // still listening: probes and refusals need answers
	deadline := time.NewTimer(s.cfg.DrainTimeout)
	defer deadline.Stop()
	for done := false; !done && s.inflight.Load() > 0; {
		select {
		case <-s.drained:
		case <-deadline.C:
			s.log.Warn("drain timeout: cutting requests", "requests", s.inflight.Load())
			done = true
		}
	}
	s.enter(stopping)
	cut(errStopping)
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), unwind)
	defer cancel()
	err := srv.Shutdown(last)
	if errors.Is(err, context.DeadlineExceeded) {
		// Some client has not read its answer, or connected and asked for nothing. That is no
		// failure of ours: without its connection its request ends.
		err = srv.Close()
	}
	if err != nil {
		return fmt.Errorf("proxy: shutdown: %w", err)
	}
	<-served
	for s.inflight.Load() > 0 {
		<-s.drained
	}
	return nil
}

func (s *Server) enter(next stage) {
	s.stage.Store(int32(next))
	s.log.Info("stage", "stage", next.String())
}

func (st stage) String() string {
	switch st {
	case ready:
		return "ready"
	case delaying, draining:
		return "draining"
	}
	return "stopping"
}

// admitting counts a request in, unless the server is past admitting any. The stage is looked
// at again after counting: a request that races the drain is either counted or refused.
func (s *Server) admitting() bool {
	if stage(s.stage.Load()) >= draining {
		return false
	}
	s.inflight.Add(1)
	if stage(s.stage.Load()) >= draining {
		s.leave()
		return false
	}
	return true
}

func (s *Server) leave() {
	if s.inflight.Add(-1) == 0 && stage(s.stage.Load()) >= draining {
		select {
		case s.drained <- struct{}{}:
		default:
		}
	}
}

func (s *Server) closePeers() {
	s.peers.Range(func(id, p any) bool {
		p.(*peer).client.Close()
		s.peers.Delete(id)
		return true
	})
}
