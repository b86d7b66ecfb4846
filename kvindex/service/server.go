// Package service is the KV index over HTTP: which workers are listened to, how much of a prompt
// each of them holds, and what the index holds as a whole.
package service

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"spillway/httperr"
	"spillway/jsonhttp"
	"spillway/kvindex"
	"spillway/worker"
)

// maxBody is the size of the largest body, in bytes: that of a million tokens.
const maxBody = 8 << 20

// Listener is how listening to one rank fares, in the words of the answer.
type Listener struct {
	Rank      worker.Rank
	Endpoint  string
	Status    string
	LastError string
	Degraded  bool
	Applied   *uint64  // sequence number of the last batch, nil if there is none
	Strangers []uint32 // ranks that were never registered but came up in its events
}

// Link is what cmd hands in: the listeners, which are another package's. All of it is set.
type Link struct {
	// Register begins to listen. Its errors are shown to clients if they are an httperr.Error.
	Register         func(p *kvindex.Partition, r worker.Rank, endpoint, replay string) error
	Unregister       func(r worker.Rank)     // of a worker that has other ranks
	UnregisterWorker func(id worker.ID)      // with all its ranks
	Listeners        func() []Listener       // by worker and rank
	Ready            func() bool             // whether recovery is over
	CheckPeer        func(base string) error // whether a base URL can be one
	Peers            []string                // those of the settings
}

// Server is the index over HTTP. It is safe for concurrent use.
type Server struct {
	cfg      Config
	link     Link
	log      *slog.Logger
	registry *registry
	peers    peers
	metrics  *jsonhttp.Metrics
	page     http.Handler
}

// New returns a server without workers. cfg must be valid. Nothing runs yet; metrics are registered
// with reg, which /metrics serves.
func New(cfg Config, partitions *kvindex.Partitions, reg *prometheus.Registry, log *slog.Logger) *Server {
	return &Server{
		cfg: cfg, log: log, registry: newRegistry(partitions), page: promhttp.HandlerFor(reg, promhttp.HandlerOpts{}),
		metrics: jsonhttp.NewMetrics(reg, "spillway_indexer", slices.Sorted(maps.Keys(routes))),
	}
}

// Join hands in the listeners, and registers the workers of the settings. It is called once,
// before Run.
func (s *Server) Join(l Link) error {
	s.link, s.registry.link = l, l
	s.peers.list = slices.Clone(l.Peers)
	for _, w := range s.cfg.Workers {
		rank, endpoint, err := parseWorker(w)
		if err != nil {
			return fmt.Errorf("indexer: workers: %w", err)
		}
		r := request{
			instance: uint64(rank.Worker), dp: &rank.DP, endpoint: endpoint,
			model: s.cfg.ModelName, tenant: &s.cfg.Tenant, blockSize: s.cfg.BlockSize,
		}
		if failed := s.registry.register(&r); failed != nil {
			return fmt.Errorf("indexer: workers: %s", failed.Message)
		}
	}
	return nil
}

// Run serves clients on ln until ctx ends, then lets running requests end, for at most DrainTimeout.
// After nil, nothing that it started is left.
func (s *Server) Run(ctx context.Context, ln net.Listener) error {
	if err := jsonhttp.Serve(ctx, ln, s, s.cfg.DrainTimeout, s.log); err != nil {
		return fmt.Errorf("indexer: %w", err)
	}
	return nil
}

// exchange is what one request needs; it is used again for others.
type exchange struct {
	request
	body    []byte
	out     []byte // the answer, if there is more to say than ok
	locals  []uint64
	matches kvindex.Matches
	d       jsonhttp.Decoder
}

var exchanges = sync.Pool{New: func() any { return &exchange{body: make([]byte, 0, 4096)} }}

func take() *exchange { return exchanges.Get().(*exchange) }

// maxKept bounds the memory that an exchange keeps for the next request, in bytes of a part of it.
const maxKept = 1 << 20

func (x *exchange) put() {
	if cap(x.body) > maxKept || cap(x.tokens) > maxKept/4 || cap(x.hashes) > maxKept/8 || cap(x.out) > maxKept || cap(x.locals) > maxKept/8 {
		return
	}
	x.request, x.out = request{tokens: x.tokens[:0], hashes: x.hashes[:0]}, x.out[:0]
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
		if failed.Status >= 500 && failed != errNotReady {
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
	if rt.get != nil {
		return rt.get(s, w, r)
	}
	x := take()
	defer x.put()
	if rt.body != nil {
		if failed := jsonhttp.CheckType(r); failed != nil {
			return failed
		}
		var failed *httperr.Error
		if x.body, failed = jsonhttp.ReadBody(x.body, r, maxBody); failed != nil {
			return failed
		}
		x.d.Reset(x.body)
		if failed := jsonhttp.Object(&x.d, rt.body, &x.request); failed != nil {
			return failed
		}
	}
	status, failed := rt.post(s, x)
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
