// Package proxy serves clients: it decides whether and where a request goes, forwards it,
// streams the answer back, reports what happened, and frees what was booked.
package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"

	"spillway/busy"
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
	public       *echo.Echo
	admin        *echo.Echo  // nil if there is no admin address
	operators    *routeTable // of the one of the two that is for operators
	tls          *tls.Config // nil if TLS is not served
	apiKey       secret
	adminToken   secret
	overload     int                     // status of refusals because of load
	overloadBody [anthropic + 1]measured // the body of the documented refusal, by dialect
	oneProcessor bool                    // for goroutines to run on
	trackOutput  bool                    // generated tokens are booked as KV blocks
	retryValue   []string                // of Retry-After, if it is fixed
	autoRetry    bool                    // else it follows the room that is freed
	queues       bool                    // requests may wait for a worker
	queueTimeout int                     // status of refusals of those who have
	shedCodes    [shedCodes]int          // statuses that refusals may have
	metrics      *metrics
	registry     *prometheus.Registry

	stage    atomic.Int32
	shedAt   atomic.Int64  // when the last request came that was refused because all were busy, in Unix nanoseconds
	inflight atomic.Int64  // inference requests whose answer is not written yet
	drained  chan struct{} // told when inflight reaches 0 while draining
	waitOver chan struct{} // closed when nobody may wait for a worker any more: the drain has begun

	bodies  budget   // memory of request bodies
	uploads uploads  // requests whose body is being read
	clients clients  // connections
	slots   slots    // reservations of requests that are still there
	peers   sync.Map // worker.ID -> *peer
	models  models   // what is remembered of each model
	workers directory
	access  accessLog
	share   func(Booking) // or nil; set once, then read-only

	kv        bool // ranks are chosen by cost
	sessions  bool // requests of a session go to the same rank
	cost      router.CostConfig
	caches    caches
	tokenizer Tokenizer // set once, then read-only
}

// New returns a server that decides with r. Nothing runs yet; metrics are registered with reg,
// which /metrics serves.
func New(cfg Config, r *router.Router, reg *prometheus.Registry, log *slog.Logger) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	serveTLS, err := cfg.certificate()
	if err != nil {
		return nil, err
	}
	s := &Server{
		tls: serveTLS, apiKey: newSecret(cfg.APIKey), adminToken: newSecret(cfg.AdminToken),
		cfg: cfg, router: r, log: log, registry: reg, drained: make(chan struct{}, 1), waitOver: make(chan struct{}), queues: r.Queues(),
		overload: cfg.overloadStatus(log), retryValue: []string{cfg.RetryAfter}, autoRetry: cfg.RetryAfter == "auto", trackOutput: r.TracksOutput(), access: accessLog{log: log},
	}
	s.sessions = r.Config().SessionTTLSecs != nil
	s.kv, s.cost = r.Config().Mode == router.KV, r.Config().Cost
	s.oneProcessor = runtime.GOMAXPROCS(0) == 1
	s.queueTimeout = s.overload
	if cfg.QueueTimeoutStatus == timeoutStatus408 {
		s.queueTimeout = http.StatusRequestTimeout
	}
	s.shedCodes = [...]int{s.overload, http.StatusServiceUnavailable, http.StatusRequestTimeout, http.StatusTooManyRequests}
	for d := range s.overloadBody {
		s.overloadBody[d] = measure(dialect(d).error(cfg.ErrorEnvelope, &httperr.Error{
			Status: s.overload, Cause: httperr.Overload, Message: httperr.BusyMessage,
		}))
	}
	s.metrics = newMetrics(reg, s)
	s.models.made = s.metrics.newModel
	s.bodies.limit = int64(cfg.BodyMemoryMB) << 20
	s.slots.init()
	s.uploads.init()
	s.workers = directory{server: s, entries: map[worker.ID]*entry{}, watch: func(*worker.Worker, *busy.List) {}, forget: func(worker.ID) {}}
	if err := s.routes(); err != nil {
		return nil, err
	}
	return s, nil
}

// Forget closes the connections to a worker that was unregistered.
func (s *Server) Forget(id worker.ID) {
	if p, ok := s.peers.LoadAndDelete(id); ok {
		p.(*peer).retire()
	}
}

// unwind is how long requests may take to notice that they were cut.
const unwind = 2 * time.Second

// Run serves clients on ln, and operators on admin unless that is nil, until ctx ends. Then it
// drains: new requests are refused while running ones get DrainTimeout, and the rest is cut. Both
// listeners are served until then. After nil, nothing that it started is left.
func (s *Server) Run(ctx context.Context, ln, admin net.Listener) error {
	requests, cut := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cut(nil)
	served := make(chan error, 2)
	s.warnOpen(ln, true)
	ln = clientListener{ln, &s.clients, s.cfg.ClientWriteTimeout}
	var plain *plainServer
	if s.tls == nil {
		plain = newPlainServer(requests, s, ln)
		ln = plain
	}
	servers := []*http.Server{s.start(requests, ln, s.public, served)}
	if admin != nil {
		s.warnOpen(admin, false)
		servers = append(servers, s.start(requests, clientListener{admin, &s.clients, s.cfg.ClientWriteTimeout}, s.admin, served))
	}
	running, ticked := len(servers), make(chan struct{})
	ticking, stopTicking := context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer close(ticked)
		s.tick(ticking)
	}()
	defer func() { stopTicking(); <-ticked; s.closePeers() }()

	var failed error
	select {
	case err := <-served:
		failed = fmt.Errorf("proxy: serve: %w", err)
		running--
	case <-ctx.Done():
		s.drain()
	}
	s.enter(stopping)
	cut(errStopping)
	s.uploads.wake()
	err := errors.Join(failed, shutDown(context.WithoutCancel(ctx), servers, plain))
	for ; running > 0; running-- {
		<-served
	}
	for s.inflight.Load() > 0 {
		<-s.drained
	}
	return err
}

// headTimeout is how long a client may take for the head of a request.
const headTimeout = 10 * time.Second

// start serves h on ln; what Serve returns goes to served.
func (s *Server) start(requests context.Context, ln net.Listener, h http.Handler, served chan<- error) *http.Server {
	srv := &http.Server{
		Handler: h, ReadHeaderTimeout: headTimeout, IdleTimeout: s.cfg.ClientIdleTimeout, MaxHeaderBytes: 1 << 20,
		BaseContext: func(net.Listener) context.Context { return requests }, ConnContext: withClient,
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	if s.tls == nil {
		go func() { served <- srv.Serve(ln) }()
		return srv
	}
	srv.TLSConfig = s.tls.Clone()
	go func() { served <- srv.ServeTLS(ln, "", "") }()
	return srv
}

// drain waits until the requests in flight have ended or their time is up.
func (s *Server) drain() {
	s.enter(delaying)
	if s.cfg.DrainDelay > 0 {
		time.Sleep(s.cfg.DrainDelay)
	}
	s.enter(draining) // still listening: probes and refusals need answers
	close(s.waitOver)
	deadline := time.NewTimer(s.cfg.DrainTimeout)
	defer deadline.Stop()
	for s.inflight.Load() > 0 {
		select {
		case <-s.drained:
		case <-deadline.C:
			s.log.Warn("drain timeout: cutting requests", "requests", s.inflight.Load())
			return
		}
	}
}

func shutDown(ctx context.Context, servers []*http.Server, plain *plainServer) error {
	last, cancel := context.WithTimeout(ctx, unwind)
	defer cancel()
	var failed error
	if plain != nil {
		_ = plain.Close() // or it is closed
		plain.shutdown(last)
	}
	for _, srv := range servers {
		err := srv.Shutdown(last)
		if errors.Is(err, context.DeadlineExceeded) {
			// Some client has not read its answer, or connected and asked for nothing. That is no
			// failure of ours: without its connection its request ends.
			err = srv.Close()
		}
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("proxy: shutdown: %w", err))
		}
	}
	return failed
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

// yield lets the other requests that are ready come to where they are about to write too. Whom we write
// to sleeps once it has read all that there is, and half of what a write costs is to wake it: of several
// writes in a row only the first does. While other processors have nothing to do, the runtime would wake
// one of them to go on with the request, which costs more.
func (s *Server) yield() {
	if s.oneProcessor {
		runtime.Gosched()
	}
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
