// Package service is the slot tracker: it keeps the active requests of worker ranks in books that
// are read and written over HTTP.
package service

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

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
	metrics  *jsonhttp.Metrics
	page     http.Handler
	token    [sha256.Size]byte // of the API key
	draining atomic.Bool
}

// New returns a server with empty books. Nothing runs yet; metrics are registered with reg, which
// /metrics serves.
func New(cfg Config, reg *prometheus.Registry, log *slog.Logger) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Server{
		cfg: cfg, log: log, now: time.Now, registry: newRegistry(cfg), token: sha256.Sum256([]byte(cfg.APIKey)),
		page: promhttp.HandlerFor(reg, promhttp.HandlerOpts{}),
	}
	s.metrics = newMetrics(reg, s.registry)
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
	request
	body []byte
	out  []byte // the answer, if there is more to say than ok
	list []tracker.Projection
	d    jsonhttp.Decoder
}

var exchanges = sync.Pool{New: func() any { return &exchange{body: make([]byte, 0, 4096)} }}

func take() *exchange { return exchanges.Get().(*exchange) }

// maxKept bounds the memory that an exchange keeps for the next request, in bytes of a part of it.
const maxKept = 256 << 10

func (x *exchange) put() {
	hashes := x.hashes[:0]
	if cap(x.body) > maxKept || cap(hashes) > maxKept/8 || cap(x.out) > 4*maxKept {
		return
	}
	x.request, x.out = request{hashes: hashes}, x.out[:0]
	x.d.Reset(nil)
	exchanges.Put(x)
}

// ServeHTTP finds the route of a request by its exact path, and answers.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	path := r.URL.Path
	rt, known := routes[path]
	if r.URL.RawPath != "" {
		known = false // an escape where none is needed makes another path
	}
	if !known {
		path = ""
	}
	told := jsonhttp.Tell(w)
	if failed := s.serve(told, r, rt, known); failed != nil {
		jsonhttp.Send(told, failed.Status, jsonhttp.AppendError(nil, failed))
		if failed.Status >= 500 {
			s.log.Error("request failed", "path", path, "err", failed)
		}
	}
	s.metrics.Answered(path, told.Status, time.Since(start))
}

func (s *Server) serve(w http.ResponseWriter, r *http.Request, rt route, known bool) *httperr.Error {
	if !known {
		return jsonhttp.UnknownRoute(r)
	}
	if failed := jsonhttp.CheckMethod(w, r, rt.get != nil); failed != nil {
		return failed
	}
	switch {
	case !rt.public && !s.admits(r):
		return httperr.New(http.StatusUnauthorized, "the API key is missing or wrong")
	case rt.get != nil:
		return rt.get(s, w, r)
	}
	if failed := jsonhttp.CheckType(r); failed != nil {
		return failed
	}
	x := take()
	defer x.put()
	var failed *httperr.Error
	if x.body, failed = jsonhttp.ReadBody(x.body, r, maxBody); failed != nil {
		return failed
	}
	x.tenant = worker.DefaultTenant
	x.d.Reset(x.body)
	if failed := jsonhttp.Object(&x.d, rt.body, &x.request); failed != nil {
		return failed
	}
	status, failed := rt.post(s, r.Context(), x, s.now())
	if failed != nil {
		return failed
	}
	if len(x.out) > 0 {
		jsonhttp.Send(w, status, x.out)
	} else {
		jsonhttp.Send(w, status, jsonhttp.OK)
	}
	return nil
}

// admits tells whether a request has the API key, if one is set.
func (s *Server) admits(r *http.Request) bool {
	if s.cfg.APIKey == "" {
		return true
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	sum := sha256.Sum256([]byte(strings.TrimSpace(token)))
	return strings.EqualFold(scheme, "Bearer") && subtle.ConstantTimeCompare(sum[:], s.token[:]) == 1
}
