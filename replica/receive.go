package replica

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"

	"spillway/wire"
)

const (
	pollTimeout = 50 * time.Millisecond // after which orders, the end and lost connections are looked for
	maxTurn     = 256                   // messages that are taken from one peer before it is the turn of others
	socketsEach = 4                     // a peer's two, and libzmq's own end of the second, and one to close
)

// The ends of a connection, and its beginning. After some ends, such as bytes that are not ZMQ's,
// libzmq does not connect again, so after each of them a new socket is made.
const (
	lost  = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
	found = zmq.EVENT_HANDSHAKE_SUCCEEDED
)

// peer is the connection with one peer. It belongs to the receiver's goroutine.
type peer struct {
	endpoint  string
	soc       *zmq.Socket // nil while closed
	events    *zmq.Socket // what libzmq tells about the connection of soc
	connected bool
	again     time.Time // when to open it, while closed
	retry     time.Duration
}

// receiver takes in what peers publish. All of it belongs to one goroutine.
type receiver struct {
	r      *Replica
	zctx   *zmq.Context
	poller *zmq.Poller // of the open peers
	peers  map[string]*peer
	open   int
	opened int // ever
	told   map[string]bool
}

func newReceiver(r *Replica, zctx *zmq.Context) *receiver {
	return &receiver{r: r, zctx: zctx, poller: zmq.NewPoller(), peers: map[string]*peer{}, told: map[string]bool{}}
}

// run takes in events and orders until ctx ends.
func (c *receiver) run(ctx context.Context) error {
	var looked time.Time
	for ctx.Err() == nil {
		if err := c.wait(ctx); err != nil {
			return err
		}
		now := time.Now()
		look := now.Sub(looked) >= pollTimeout
		if look {
			looked = now
		}
		for _, p := range c.peers {
			if err := c.tend(p, look, now); err != nil {
				return err
			}
		}
		c.obey()
	}
	return nil
}

// wait waits for messages, for a moment.
func (c *receiver) wait(ctx context.Context) error {
	if c.open == 0 {
		select {
		case <-ctx.Done():
		case <-time.After(pollTimeout):
		}
		return nil
	}
	if _, err := c.poller.Poll(pollTimeout); err != nil && !isTransient(err) {
		return fmt.Errorf("replica: polling: %w", err)
	}
	return nil
}

// tend takes in what has come from one peer. With look it also sees to the connection.
func (c *receiver) tend(p *peer, look bool, now time.Time) error {
	if p.soc == nil {
		if now.Before(p.again) {
			return nil
		}
		if err := c.connect(p); err != nil { // no descriptor left, perhaps: others are heard all the same
			c.warn("connect", "a peer can not be listened to again yet; further failures are not logged", "peer", p.endpoint, "err", err)
			p.later(now)
		}
		return nil
	}
	ended, turn := look && c.look(p), maxTurn
	if ended { // all that came before the end is taken, since it goes with the socket
		turn = highWater
	}
	for range turn {
		frames, err := message(p.soc)
		if errors.Is(err, errNone) {
			break
		}
		if err != nil {
			return fmt.Errorf("replica: receiving from %s: %w", p.endpoint, err)
		}
		p.retry = 0
		c.received(frames, p)
	}
	if !ended {
		return nil
	}
	p.later(now)
	return c.disconnect(p)
}

// later has the next try wait for longer than the last.
func (p *peer) later(now time.Time) {
	p.retry = min(max(firstReconnect, 2*p.retry), lastReconnect)
	p.again = now.Add(p.retry)
}

// warn logs a problem the first time that it is met.
func (c *receiver) warn(problem, message string, args ...any) {
	if !c.told[problem] {
		c.told[problem] = true
		c.r.log.Warn(message, args...)
	}
}

// received takes in one message, or counts why not. Each reason is logged once.
func (c *receiver) received(frames [][]byte, p *peer) {
	m := &c.r.metrics
	e, err := wire.ParseReplica(frames)
	reason := reasonDropped(err)
	if reason == "" && e.Origin == c.r.origin {
		reason = droppedSelf
	}
	if reason == "" {
		m.received[e.Kind].Inc()
		if c.r.in.put(&e) == taken {
			return
		}
		reason = droppedQueue
	}
	m.dropped[reason].Inc()
	c.warn(reason, "a reservation event was dropped; further ones for the same reason are only counted",
		"reason", reason, "peer", p.endpoint, "err", err)
}

// reasonDropped is the reason for an error of wire.ParseReplica, "" for none.
func reasonDropped(err error) string {
	switch {
	case err == nil:
		return ""
	case errors.Is(err, wire.ErrFrames):
		return droppedFrames
	case errors.Is(err, wire.ErrTopic):
		return droppedTopic
	case errors.Is(err, wire.ErrTenant):
		return droppedTenant
	}
	return droppedPayload
}

// obey does what has been ordered.
func (c *receiver) obey() {
	for {
		select {
		case o := <-c.r.orders:
			changed, err := c.follow(o)
			o.done <- outcome{changed, err}
		default:
			return
		}
	}
}

func (c *receiver) follow(o order) (changed bool, err error) {
	p := c.peers[o.endpoint]
	switch {
	case o.leave && p == nil:
		return false, fmt.Errorf("%w: %s", ErrUnknownPeer, o.endpoint)
	case o.leave:
		err = c.disconnect(p)
		delete(c.peers, o.endpoint)
	case p != nil:
		return false, nil
	case len(c.peers) >= MaxPeers:
		return false, fmt.Errorf("%w: there are %d", ErrTooMany, MaxPeers)
	default:
		if err = c.listen(o.endpoint); err != nil {
			return false, fmt.Errorf("%w: %w", ErrEndpoint, err)
		}
	}
	c.r.setPeers(slices.Collect(maps.Keys(c.peers)))
	c.r.log.Info("peer changed", "peer", o.endpoint, "listened_to", !o.leave)
	return true, err
}

// listen begins to listen to a peer, which need not be there yet.
func (c *receiver) listen(endpoint string) error {
	p := &peer{endpoint: endpoint}
	if err := c.connect(p); err != nil {
		return err
	}
	c.peers[endpoint] = p
	return nil
}

// connect makes the sockets of a peer. If it fails there are none.
func (c *receiver) connect(p *peer) error {
	c.opened++
	if err := p.open(c.zctx, c.r.eventsOf(c.opened)); err != nil {
		return fmt.Errorf("replica: listen to %s: %w", p.endpoint, errors.Join(err, p.close()))
	}
	c.open++
	c.poller.Add(p.soc, zmq.POLLIN)
	return nil
}

// eventsOf is where libzmq tells about the connection of the nth socket. Endpoints of operators can be
// inproc too, so the name is one that none of them will have.
func (r *Replica) eventsOf(n int) string {
	return fmt.Sprintf("inproc://replica-%016x-%d", r.origin, n)
}

func (p *peer) open(zctx *zmq.Context, events string) (err error) {
	if p.soc, err = zctx.NewSocket(zmq.SUB); err != nil {
		return err
	}
	if p.events, err = zctx.NewSocket(zmq.PAIR); err != nil {
		return err
	}
	err = errors.Join(
		configure(p.soc), p.soc.SetMaxmsgsize(wire.MaxReplicaBytes), p.soc.SetSubscribe(wire.ReplicaTopic),
		p.events.SetLinger(0), p.soc.Monitor(events, lost|found),
	)
	if err != nil {
		return err
	}
	if err := p.events.Connect(events); err != nil {
		return err
	}
	return p.soc.Connect(p.endpoint)
}

// close closes the sockets that are open. First libzmq is told to tell no more of soc: it waits
// until what it tells is taken, so with nobody left to do that its thread, and with it every
// connection of the context, would stand still.
func (p *peer) close() error {
	var errs []error
	if p.soc != nil {
		errs = append(errs, p.soc.Monitor("", 0))
	}
	for _, soc := range []*zmq.Socket{p.soc, p.events} {
		if soc != nil {
			errs = append(errs, soc.Close())
		}
	}
	p.soc, p.events = nil, nil
	return errors.Join(errs...)
}

// disconnect closes the sockets of a peer.
func (c *receiver) disconnect(p *peer) error {
	if p.soc == nil {
		return nil
	}
	err := c.poller.RemoveBySocket(p.soc)
	c.open--
	c.setConnected(p, false)
	return errors.Join(err, p.close())
}

func (c *receiver) setConnected(p *peer, connected bool) {
	switch {
	case connected && !p.connected:
		c.r.connected.Add(1)
	case !connected && p.connected:
		c.r.connected.Add(-1)
	}
	p.connected = connected
}

// look notes what has become of a connection. It reports whether it has ended.
func (c *receiver) look(p *peer) (ended bool) {
	for {
		event, _, _, err := p.events.RecvEvent(zmq.DONTWAIT)
		if err != nil {
			return ended // nothing more is told
		}
		if event&lost != 0 {
			ended = true
		} else {
			c.setConnected(p, true)
		}
	}
}

func (c *receiver) close() error {
	var errs []error
	for _, p := range c.peers {
		errs = append(errs, c.disconnect(p))
	}
	return errors.Join(errs...)
}

// errNone means that nothing has come.
var errNone = errors.New("replica: no message")

// message receives the frames of one message, at most one more than an event has.
func message(soc *zmq.Socket) ([][]byte, error) {
	frames := make([][]byte, 0, wire.ReplicaFrames+1)
	for {
		frame, err := soc.RecvBytes(zmq.DONTWAIT)
		if isTransient(err) {
			return nil, errNone
		}
		if err != nil {
			return nil, err
		}
		if len(frames) <= wire.ReplicaFrames {
			frames = append(frames, frame)
		}
		if more, err := soc.GetRcvmore(); err != nil || !more {
			return frames, err
		}
	}
}

func isTransient(err error) bool {
	return err != nil && (zmq.AsErrno(err) == zmq.Errno(syscall.EAGAIN) || zmq.AsErrno(err) == zmq.Errno(syscall.EINTR))
}
