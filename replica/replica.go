// Package replica exchanges reservation events with peer processes over ZMQ, best effort: what is
// lost makes estimates of load worse until it expires, and nothing else. No request ever waits for
// a peer.
package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	zmq "github.com/pebbe/zmq4"
	"github.com/prometheus/client_golang/prometheus"

	"spillway/wire"
)

// What Register and Deregister return if they changed nothing.
var (
	ErrEndpoint    = errors.New("replica: not an endpoint")               // its form, or libzmq refuses it
	ErrSelf        = errors.New("replica: this process's own endpoint")   // as replica-sync-advertise has it
	ErrUnknownPeer = errors.New("replica: no such peer")                  // to be deregistered
	ErrTooMany     = errors.New("replica: no room for another peer")      // MaxPeers
	ErrStopped     = errors.New("replica: the exchange has been stopped") // or is just being
)

// Replica is this process's part in the exchange. It publishes what it is told to, and hands on what
// its peers publish. Nothing is passed on from peer to peer.
type Replica struct {
	cfg     Config
	format  wire.ReplicaFormat
	deliver func(batch []wire.ReplicaEvent)
	log     *slog.Logger
	metrics metrics
	origin  uint64 // by which we know our own events; never 0

	patience time.Duration // set once

	out, in   *queue
	orders    chan order
	ready     chan struct{}
	stopped   chan struct{}
	connected atomic.Int64 // peers that there is a connection with
	bound     atomic.Pointer[string]

	mu    sync.Mutex // guards peers
	peers []string   // sorted; changed by the receiver alone
}

// order asks the receiver to listen to a peer, or to leave it.
type order struct {
	endpoint string
	leave    bool
	done     chan<- outcome // has room
}

type outcome struct {
	changed bool
	err     error
}

const maxOrders = 64 // that wait for the receiver

// New returns a Replica that runs nothing yet. deliver is given the events of peers in the order in
// which they came, from one goroutine; it must not keep the batch. cfg must be valid and enabled.
func New(cfg Config, deliver func(batch []wire.ReplicaEvent), reg prometheus.Registerer, log *slog.Logger) *Replica {
	r := &Replica{
		cfg: cfg, format: formats[cfg.Format], deliver: deliver, log: log,
		out: newQueue(cfg.Queue), in: newQueue(cfg.Queue), orders: make(chan order, maxOrders),
		ready: make(chan struct{}), stopped: make(chan struct{}), peers: cfg.peers(), patience: patience,
	}
	for r.origin == 0 {
		r.origin = rand.Uint64()
	}
	r.metrics = newMetrics(reg, r)
	return r
}

// Run takes part until ctx ends, and returns nil then. It returns an error if an endpoint can not be
// bound or connected to, or libzmq fails later; the books are then what they were. It is called once.
func (r *Replica) Run(ctx context.Context) (err error) {
	defer close(r.stopped)
	defer func() {
		r.metrics.unsent[unsentStopped].Add(float64(r.out.close()))
		r.in.close()
	}()
	zctx, err := zmq.NewContext()
	if err != nil {
		return fmt.Errorf("replica: starting libzmq: %w", err)
	}
	defer func() { err = errors.Join(err, zctx.Term()) }()
	if err := zctx.SetMaxSockets(socketsEach * (MaxPeers + 2)); err != nil {
		return fmt.Errorf("replica: starting libzmq: %w", err)
	}
	pub, err := r.openPublisher(zctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pub.Close()) }() // after the sender has ended
	rec := newReceiver(r, zctx)
	defer func() { err = errors.Join(err, rec.close()) }()
	for _, e := range r.Peers() {
		if err := rec.listen(e); err != nil {
			return err
		}
	}
	r.log.Info("reservations are exchanged with other replicas", "endpoint", *r.bound.Load(), "peers", r.Peers())
	close(r.ready)

	running, stop := context.WithCancel(ctx)
	var others sync.WaitGroup
	var sendErr error
	others.Go(func() { sendErr = (&sender{r: r, pub: pub}).run(running); stop() })
	others.Go(func() { r.hand(running) })
	err = rec.run(running)
	stop()
	others.Wait()
	return errors.Join(err, sendErr)
}

// Ready is closed once events are published and peers are listened to. Connections with them come
// about later, as each becomes reachable.
func (r *Replica) Ready() <-chan struct{} { return r.ready }

// Endpoint is where events are published, after Ready: replica-sync-bind with the port that a 0
// has become.
func (r *Replica) Endpoint() string { return *r.bound.Load() }

// Publish tells peers of an event, whose Origin it sets. It never waits: what finds more events
// waiting than may, or comes after Run, is counted and lost. Hashes are read later and must not
// be changed.
func (r *Replica) Publish(e wire.ReplicaEvent) {
	e.Origin = r.origin
	switch r.out.put(&e) {
	case full:
		r.metrics.unsent[unsentQueue].Inc()
	case closed:
		r.metrics.unsent[unsentStopped].Inc()
	}
}

// Register listens to one more peer from now on. It reports false if it is listened to already. Errors
// are ErrEndpoint, ErrSelf, ErrTooMany, ErrStopped, or those of ctx, after which it may still come
// about.
func (r *Replica) Register(ctx context.Context, endpoint string) (added bool, err error) {
	if err := checkEndpoint(endpoint); err != nil {
		return false, fmt.Errorf("%w: %w", ErrEndpoint, err)
	}
	if endpoint == r.cfg.Advertise {
		return false, fmt.Errorf("%w: %s", ErrSelf, endpoint)
	}
	return r.order(ctx, order{endpoint: endpoint})
}

// Deregister listens to a peer no more. What it has booked stays until it expires. Errors are
// ErrEndpoint, ErrUnknownPeer, ErrStopped, or those of ctx, after which it may still come about.
func (r *Replica) Deregister(ctx context.Context, endpoint string) error {
	if err := checkEndpoint(endpoint); err != nil {
		return fmt.Errorf("%w: %w", ErrEndpoint, err)
	}
	_, err := r.order(ctx, order{endpoint: endpoint, leave: true})
	return err
}

func (r *Replica) order(ctx context.Context, o order) (bool, error) {
	done := make(chan outcome, 1)
	o.done = done
	select {
	case <-r.stopped: // the queue of orders may have room all the same
		return false, ErrStopped
	default:
	}
	select {
	case r.orders <- o:
	case <-r.stopped:
		return false, ErrStopped
	case <-ctx.Done():
		return false, ctx.Err()
	}
	select {
	case out := <-done:
		return out.changed, out.err
	case <-r.stopped:
		return false, ErrStopped
	case <-ctx.Done():
		return false, ctx.Err()
	}
}

// Peers are the endpoints that are listened to, as they were given, sorted by their bytes. There
// need not be a connection.
func (r *Replica) Peers() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.peers)
}

func (r *Replica) setPeers(endpoints []string) {
	slices.Sort(endpoints)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.peers = endpoints
}

// hand hands events on until ctx ends.
func (r *Replica) hand(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.in.filled:
		}
		for batch := r.in.take(); batch != nil && ctx.Err() == nil; batch = r.in.take() {
			r.deliver(batch)
			r.in.done(batch)
		}
	}
}

const (
	highWater      = 1000                   // messages that libzmq keeps for one peer, or of one
	firstReconnect = 100 * time.Millisecond // doubled up to lastReconnect
	lastReconnect  = 5 * time.Second
	heartbeat      = 5 * time.Second // a silent peer is asked whether it is there
	heartbeatLimit = 15 * time.Second
)

// configure sets what both kinds of socket have in common.
func configure(soc *zmq.Socket) error {
	return errors.Join(
		soc.SetLinger(0), soc.SetSndhwm(highWater), soc.SetRcvhwm(highWater),
		soc.SetReconnectIvl(firstReconnect), soc.SetReconnectIvlMax(lastReconnect), soc.SetTcpKeepalive(1),
		soc.SetHeartbeatIvl(heartbeat), soc.SetHeartbeatTimeout(heartbeatLimit), soc.SetHeartbeatTtl(heartbeatLimit),
	)
}
