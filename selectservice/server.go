// Package selectservice is worker selection over HTTP: the router's decisions, the books on what it
// has decided, and the catalog of workers that it decides among. It forwards no request.
package selectservice

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/httperr"
	"spillway/jsonhttp"
	"spillway/kvindex"
	"spillway/router"
	"spillway/tracker"
	"spillway/worker"
)

// maxBody is the size of the largest body, in bytes: that of a million tokens.
const maxBody = 8 << 20

// sweepEvery is how often what has expired is dropped and those who wait are looked at, whatever
// has happened: nothing else tells of either.
const sweepEvery = 5 * time.Second

// Setup is what a Server serves: core state that it shares with others, and what was decided
// about it.
type Setup struct {
	Router        *router.Router
	Index         *kvindex.Partitions
	MaxPartitions int                   // of Index
	Cost          router.CostConfig     // of Router
	Events        bool                  // workers have to tell of their caches
	Dump          func(io.Writer) error // writes what Index holds, for others to recover from
}

// Link is what cmd hands in. Without KV events Listen and Unlisten are nil, without replication
// what concerns replicas is.
type Link struct {
	// Listen begins to listen to the KV events of a rank; Unlisten ends that for all ranks of a
	// worker, if there are any, and forgets what they hold.
	Listen   func(p *kvindex.Partition, r worker.Rank, endpoint, replay string) error
	Unlisten func(id worker.ID)

	Recovered <-chan struct{} // closed when requests may be served; nil if they may at once

	// They are told of changes after they were made, and must not wait.
	Added       func(p worker.Partition, blockSize uint32, b Booking)
	PrefillDone func(p worker.Partition, blockSize uint32, id string, r worker.Rank)
	Freed       func(p worker.Partition, blockSize uint32, id string, r worker.Rank)

	// Errors are shown to clients if they are an httperr.Error.
	RegisterPeer   func(ctx context.Context, endpoint string) (added bool, err error)
	DeregisterPeer func(ctx context.Context, endpoint string) error
	Peers          func() []string // sorted
}

// Booking is a reservation as other replicas hear of it.
type Booking struct {
	tracker.Reservation
	TracksPrefill        bool
	ExpectedOutputTokens *uint32
	LoRA                 string // name of the adapter, "" for none
}

// Server is the selection service. It is safe for concurrent use.
type Server struct {
	cfg         Config
	setup       Setup
	link        Link
	log         *slog.Logger
	now         func() time.Time
	catalog     *catalog
	ids         *ids
	pending     *pending
	grouped     bool   // the contract is that of routing groups
	tenant      string // name of the field
	otherTenant string // its name in the other contract, which is understood too
	bodies      bodies
	routes      *jsonhttp.Routes
	stopping    chan struct{} // closed when nobody may wait any more
}

// New returns a server without workers. cfg must be valid. Nothing runs yet; metrics are registered
// with reg, which /metrics serves.
func New(cfg Config, setup Setup, reg *prometheus.Registry, log *slog.Logger) *Server {
	s := &Server{
		cfg: cfg, setup: setup, log: log, now: time.Now, ids: newIDs(), stopping: make(chan struct{}),
		grouped: cfg.APIRevision == RevisionRoutingGroup, tenant: "tenant_id", otherTenant: "routing_group",
	}
	if s.grouped {
		s.tenant, s.otherTenant = s.otherTenant, s.tenant
		s.pending = newPending(cfg)
	}
	s.catalog = &catalog{
		cfg: cfg, setup: setup, link: &s.link, tenant: s.tenant, changed: s.letGo,
		records: map[uint64]*record{}, partitions: map[worker.Partition]*partition{},
	}
	s.bodies = newBodies(s.tenant, s.otherTenant, s.grouped)
	s.routes = jsonhttp.NewRoutes("spillway_select", cfg.APIKey, s.table(), reg, log)
	reg.MustRegister(&metrics{s})
	return s
}

// Join hands in what other packages do. It is called once, before Run.
func (s *Server) Join(l Link) { s.link = l }

// Books returns the tracker of a partition, its tokens per block, and what is to be called when
// others have changed the tracker; false if no worker has been schedulable there.
func (s *Server) Books(key worker.Partition) (t *tracker.Tracker, blockSize uint32, changed func(worker.ID), known bool) {
	p := s.catalog.find(key)
	if p == nil {
		return nil, 0, nil, false
	}
	route := p.route.Load()
	if route == nil {
		return nil, 0, nil, false
	}
	return route.Tracker, p.blockSize(), func(worker.ID) { s.letGo(route, s.now()) }, true
}

// Run serves clients on ln until ctx ends. Then those who wait for a worker are refused, and running
// requests may end, for at most DrainTimeout. After nil, nothing that it started is left.
func (s *Server) Run(ctx context.Context, ln net.Listener) error {
	ticking, stop := context.WithCancel(context.WithoutCancel(ctx))
	var ticker sync.WaitGroup
	ticker.Go(func() { s.tick(ticking) })
	defer ticker.Wait()
	defer stop()
	refuse := context.AfterFunc(ctx, func() {
		s.catalog.stop()
		close(s.stopping)
	})
	defer refuse()
	if err := jsonhttp.Serve(ctx, ln, s, s.cfg.DrainTimeout, s.log); err != nil {
		return fmt.Errorf("selection service: %w", err)
	}
	return nil
}

// tick drops what has expired, until ctx ends.
func (s *Server) tick(ctx context.Context) {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.sweep(s.now())
		}
	}
}

func (s *Server) sweep(now time.Time) {
	for _, p := range s.catalog.matching(filter{}) {
		if route := p.route.Load(); route != nil {
			route.Expire(now)
			s.letGo(route, now)
		}
	}
	s.ids.sweep()
	if s.pending != nil {
		s.pending.sweep(now)
	}
}

// letGo wakes those who wait for what may have become free.
func (s *Server) letGo(route *router.Partition, now time.Time) {
	if route.Waiting() > 0 {
		wake(route.Admit(now))
	}
}

// wake tells requests that their waiting is over.
func wake(admitted []router.Admission) {
	for i := range admitted {
		admitted[i].Ticket.Owner.(chan router.Admission) <- admitted[i] // it has room for the one
	}
}

// exchange is what one request needs; it is used again for others.
type exchange struct {
	jsonhttp.Exchange
	request
	hashed  hashed
	matches kvindex.Matches
	allowed []worker.ID
	ticket  router.Ticket
	ready   chan router.Admission // who lets the ticket go need not wait for us
	terms   []router.Terms
	list    []tracker.Projection
}

var exchanges = sync.Pool{New: func() any { return &exchange{ready: make(chan router.Admission, 1)} }}

func take() *exchange { return exchanges.Get().(*exchange) }

// maxKept bounds the memory that an exchange keeps for the next request, in bytes of a part of it.
const maxKept = 1 << 20

func (x *exchange) put() {
	p := &x.request.prompt
	if !x.Clear(maxKept) || cap(p.tokens) > maxKept/4 || cap(p.locals) > maxKept/8 || cap(p.seqs) > maxKept/8 || cap(x.hashed.locals) > maxKept/8 {
		return
	}
	p.reset()
	x.request = request{prompt: x.request.prompt}
	x.ticket = router.Ticket{}
	exchanges.Put(x)
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.routes.ServeHTTP(w, r) }

type handler = func(w http.ResponseWriter, r *http.Request) *httperr.Error

// post makes a handler of one that gets a body with these fields.
func (s *Server) post(fields []field, serve func(r *http.Request, x *exchange, now time.Time) (int, *httperr.Error)) handler {
	return func(w http.ResponseWriter, r *http.Request) *httperr.Error {
		x := take()
		defer x.put()
		x.model = defaultModel
		failed := jsonhttp.ReadObject(&x.Exchange, r, maxBody, fields, &x.request)
		if failed == nil {
			x.tenant, failed = s.tenantOf(&x.names)
		}
		if failed != nil {
			return failed
		}
		status, failed := serve(r, x, s.now())
		if failed == nil {
			x.Answer(w, status)
		}
		return failed
	}
}

const defaultModel = "default"

// afterRecovery lets requests wait until what peers know has been taken over.
func (s *Server) afterRecovery(serve handler) handler {
	return func(w http.ResponseWriter, r *http.Request) *httperr.Error {
		if s.link.Recovered != nil {
			select {
			case <-s.link.Recovered:
			case <-s.stopping:
				return errStopping
			case <-r.Context().Done():
				return httperr.From(r.Context().Err(), "", 0)
			}
		}
		return serve(w, r)
	}
}

// ready tells whether requests are served.
func (s *Server) serving() bool {
	if s.link.Recovered != nil {
		select {
		case <-s.link.Recovered:
		default:
			return false
		}
	}
	return !s.isStopping()
}

func (s *Server) isStopping() bool {
	select {
	case <-s.stopping:
		return true
	default:
		return false
	}
}

// table lists the routes.
func (s *Server) table() []jsonhttp.Route {
	var all []jsonhttp.Route
	add := func(method, path string, serve handler) {
		all = append(all, jsonhttp.Route{Method: method, Path: path, Serve: s.afterRecovery(serve)})
	}
	all = append(all,
		jsonhttp.Route{Method: http.MethodGet, Path: "/health", Public: true, Serve: s.health},
		jsonhttp.Route{Method: http.MethodGet, Path: "/ready", Public: true, Serve: s.ready},
		jsonhttp.Route{Method: http.MethodGet, Path: "/openapi.json", Public: true, Serve: s.openAPI},
	)
	add(http.MethodPost, "/workers", s.registerWorker)
	add(http.MethodGet, "/workers", s.listWorkers)
	add(http.MethodPatch, "/workers/{id}", s.patchWorker)
	add(http.MethodDelete, "/workers/{id}", s.deleteWorker)
	add(http.MethodPost, "/select", s.post(s.bodies.choose, s.choose))
	add(http.MethodPost, "/select_and_reserve", s.post(s.bodies.reserve, s.chooseAndReserve))
	add(http.MethodPost, "/reservations", s.post(s.bodies.book, s.book))
	add(http.MethodPost, "/reservations/{id}/prefill_complete", s.prefillComplete)
	add(http.MethodPost, "/reservations/{id}/output_block", s.post(s.bodies.output, s.outputBlock))
	add(http.MethodDelete, "/reservations/{id}", s.free)
	add(http.MethodGet, "/loads", s.loads)
	add(http.MethodPost, "/potential_loads", s.post(s.bodies.read, s.potentialLoads))
	add(http.MethodPost, "/overlap_scores", s.post(s.bodies.read, s.overlapScores))
	add(http.MethodGet, "/dump", s.dump)
	add(http.MethodPost, "/replica_sync/register_peer", s.post(s.bodies.peer, s.registerPeer))
	add(http.MethodPost, "/replica_sync/deregister_peer", s.post(s.bodies.peer, s.deregisterPeer))
	add(http.MethodGet, "/replica_sync/peers", s.peers)
	return all
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) *httperr.Error {
	jsonhttp.Send(w, http.StatusOK, jsonhttp.OK)
	return nil
}

var (
	errNoReplicas = httperr.New(http.StatusConflict, "replica sync is disabled")
	errReplicas   = "replica peer manager is unavailable"
)

func (s *Server) registerPeer(r *http.Request, x *exchange, _ time.Time) (int, *httperr.Error) {
	if s.link.RegisterPeer == nil {
		return 0, errNoReplicas
	}
	added, err := s.link.RegisterPeer(r.Context(), x.peer)
	switch {
	case err != nil:
		return 0, peerError(err)
	case added:
		return http.StatusCreated, nil
	}
	return http.StatusOK, nil
}

func (s *Server) deregisterPeer(r *http.Request, x *exchange, _ time.Time) (int, *httperr.Error) {
	if s.link.DeregisterPeer == nil {
		return 0, errNoReplicas
	}
	if err := s.link.DeregisterPeer(r.Context(), x.peer); err != nil {
		return 0, peerError(err)
	}
	return http.StatusOK, nil
}

func peerError(err error) *httperr.Error {
	if errors.Is(err, context.DeadlineExceeded) {
		return httperr.New(http.StatusServiceUnavailable, errReplicas)
	}
	return httperr.From(err, "", http.StatusServiceUnavailable)
}

func (s *Server) peers(w http.ResponseWriter, _ *http.Request) *httperr.Error {
	var list []string
	if s.link.Peers != nil {
		list = s.link.Peers()
	}
	jsonhttp.Send(w, http.StatusOK, appendStrings(nil, list))
	return nil
}
