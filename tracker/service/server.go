// Package service is the slot tracker: it keeps the active requests of worker ranks in books that
// are read and written over HTTP.
package service

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

	"github.com/prometheus/client_golang/prometheus"

	"spillway/httperr"
	"spillway/jsonhttp"
	"spillway/tracker"
	"spillway/worker"
)

// maxBody is the size of the largest body, in bytes.
const maxBody = 2 << 20

// Link is what cmd hands in so that other replicas take part. Without replication all is nil.
type Link struct {
	// They are told of changes after they were made, and must not wait.
	Added       func(p worker.Partition, blockSize uint32, r tracker.Reservation)
	PrefillDone func(p worker.Partition, blockSize uint32, id string, r worker.Rank)
	Freed       func(p worker.Partition, blockSize uint32, id string, r worker.Rank)

	// Errors are shown to clients if they are an httperr.Error.
	RegisterPeer   func(ctx context.Context, endpoint string) (added bool, err error)
	DeregisterPeer func(ctx context.Context, endpoint string) error
	Peers          func() []string // sorted
}

// Server is the slot tracker. It is safe for concurrent use.
type Server struct {
	cfg      Config
	link     Link
	log      *slog.Logger
	now      func() time.Time
	registry *registry
	routes   *jsonhttp.Routes
	draining atomic.Bool
}

// New returns a server with empty books. Nothing runs yet; metrics are registered with reg, which
// /metrics serves.
func New(cfg Config, reg *prometheus.Registry, log *slog.Logger) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, log: log, now: time.Now, registry: newRegistry(cfg)}
	s.routes = jsonhttp.NewRoutes("spillway_tracker", cfg.APIKey, s.table(), reg, log)
	reg.MustRegister(books{s.registry})
	return s, nil
}

// Join hands in the exchange with other replicas. It is called before Run.
func (s *Server) Join(l Link) { s.link = l }

// Books returns the tracker of a partition and its tokens per block; false if no worker is
// registered for it.
func (s *Server) Books(p worker.Partition) (t *tracker.Tracker, blockSize uint32, known bool) {
	found, failed := s.registry.find(p)
	if failed != nil {
		return nil, 0, false
	}
	return found.tracker, found.blockSize, true
}

// Run serves clients on ln until ctx ends, then lets running requests end, for at most DrainTimeout.
// It reads the state file first and writes it last. It writes it at once, too: that it cannot be
// written is better known before there is anything to lose. After nil, nothing that it started is left.
func (s *Server) Run(ctx context.Context, ln net.Listener) error {
	err := s.load()
	if err == nil {
		err = s.save()
	}
	if err != nil {
		return errors.Join(err, ln.Close())
	}
	ticking, stop := context.WithCancel(context.WithoutCancel(ctx))
	ticked := make(chan struct{})
	go func() { defer close(ticked); s.tick(ticking) }()
	defer func() { stop(); <-ticked }()

	defer context.AfterFunc(ctx, func() { s.draining.Store(true) })()
	err = jsonhttp.Serve(ctx, ln, s, s.cfg.DrainTimeout, s.log)
	if ctx.Err() == nil {
		return fmt.Errorf("slot tracker: %w", err)
	}
	stop()
	<-ticked
	return errors.Join(err, s.save())
}

// tick drops what has expired and writes the state file now and then, until ctx ends.
func (s *Server) tick(ctx context.Context) {
	expiry := time.NewTicker(min(time.Second, s.cfg.ExpiryInterval/4))
	defer expiry.Stop()
	var due <-chan time.Time
	if s.cfg.StateFile != "" && s.cfg.StateInterval > 0 {
		saving := time.NewTicker(s.cfg.StateInterval)
		defer saving.Stop()
		due = saving.C
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-expiry.C:
			if n := s.registry.expire(s.now()); n > 0 {
				s.log.Info("requests expired: they were never freed", "requests", n)
			}
		case <-due:
			if err := s.save(); err != nil {
				s.log.Error("state file not written", "err", err)
			}
		}
	}
}

// exchange is what one request needs; it is used again for others.
type exchange struct {
	jsonhttp.Exchange
	request
	list []tracker.Projection
}

var exchanges = sync.Pool{New: func() any { return new(exchange) }}

func take() *exchange { return exchanges.Get().(*exchange) }

// maxKept bounds the memory that an exchange keeps for the next request, in bytes of a part of it.
const maxKept = 1 << 20

func (x *exchange) put() {
	hashes := x.hashes[:0]
	if !x.Clear(maxKept) || cap(hashes) > maxKept/32 {
		return
	}
	x.request = request{hashes: hashes}
	exchanges.Put(x)
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.routes.ServeHTTP(w, r) }

// post makes a handler of one that gets a body with these fields.
func (s *Server) post(fields []field, serve func(ctx context.Context, x *exchange, now time.Time) (int, *httperr.Error)) handler {
	return func(w http.ResponseWriter, r *http.Request) *httperr.Error {
		x := take()
		defer x.put()
		x.tenant = worker.DefaultTenant
		if failed := jsonhttp.ReadObject(&x.Exchange, r, maxBody, fields, &x.request); failed != nil {
			return failed
		}
		status, failed := serve(r.Context(), x, s.now())
		if failed == nil {
			x.Answer(w, status)
		}
		return failed
	}
}
