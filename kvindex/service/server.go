// Package service is the KV index over HTTP: which workers are listened to, how much of a prompt
// each of them holds, and what the index holds as a whole.
package service

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

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
	routes   *jsonhttp.Routes
}

// New returns a server without workers. cfg must be valid. Nothing runs yet; metrics are registered
// with reg, which /metrics serves.
func New(cfg Config, partitions *kvindex.Partitions, reg *prometheus.Registry, log *slog.Logger) *Server {
	s := &Server{cfg: cfg, log: log, registry: newRegistry(partitions)}
	s.routes = jsonhttp.NewRoutes("spillway_indexer", "", s.table(), reg, log)
	return s
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
	jsonhttp.Exchange
	request
	locals  []uint64
	matches kvindex.Matches
}

var exchanges = sync.Pool{New: func() any { return new(exchange) }}

func take() *exchange { return exchanges.Get().(*exchange) }

// maxKept bounds the memory that an exchange keeps for the next request, in bytes of a part of it.
const maxKept = 1 << 20

func (x *exchange) put() {
	if !x.Clear(maxKept) || cap(x.tokens) > maxKept/4 || cap(x.hashes) > maxKept/8 || cap(x.locals) > maxKept/8 {
		return
	}
	x.request = request{tokens: x.tokens[:0], hashes: x.hashes[:0]}
	exchanges.Put(x)
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.routes.ServeHTTP(w, r) }

// post makes a handler of one that gets a body with these fields.
func (s *Server) post(fields []field, serve func(x *exchange) (int, *httperr.Error)) handler {
	return func(w http.ResponseWriter, r *http.Request) *httperr.Error {
		x := take()
		defer x.put()
		if failed := jsonhttp.ReadObject(&x.Exchange, r, maxBody, fields, &x.request); failed != nil {
			return failed
		}
		status, failed := serve(x)
		if failed == nil {
			x.Answer(w, status)
		}
		return failed
	}
}
