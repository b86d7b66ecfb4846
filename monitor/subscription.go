package monitor

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"
)

const (
	receiveQueue    = 4096                   // messages kept per publisher before they are lost
	firstReconnect  = 100 * time.Millisecond // doubled up to lastReconnect
	lastReconnect   = 5 * time.Second
	keepaliveIdle   = 10 // seconds until the first of the probes of a silent connection
	keepaliveEvery  = 5  // seconds
	keepaliveProbes = 3
)

// The ends of a connection, and its beginning. After some ends, such as bytes that are not ZMQ's,
// libzmq does not connect again, so after each of them a new socket is made.
const (
	refused = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
	lost    = zmq.EVENT_DISCONNECTED | refused
	found   = zmq.EVENT_HANDSHAKE_SUCCEEDED
)

// subscription is the connection to one publisher. It belongs to one goroutine.
type subscription struct {
	endpoint  string
	topic     string        // "": all topics
	maxFrame  int64         // bytes; a publisher that sends more is cut off by libzmq
	heartbeat time.Duration // between signs of life; 0: none are sent
	binds     bool          // the publisher connects to us

	soc       *zmq.Socket // nil while closed
	events    *zmq.Socket // what libzmq tells about the connections of soc
	made      int         // connections, ever
	connected int         // those that there are, of which there may be several only if it binds
	ended     bool        // the connection is lost, and has not come back by itself
	failed    bool        // the last attempt to connect found somebody who does not speak ZMQ
	again     time.Time   // when to open it, while closed
	retry     time.Duration
}

// open makes the sockets. The publisher need not be there yet. name is the subscription's own
// among those of a context.
func (s *subscription) open(zctx *zmq.Context, name string) error {
	var err error
	if s.soc, err = zctx.NewSocket(zmq.SUB); err != nil {
		return fmt.Errorf("monitor: making a socket: %w", err)
	}
	if s.events, err = zctx.NewSocket(zmq.PAIR); err != nil {
		return fmt.Errorf("monitor: making a socket: %w", errors.Join(err, s.close()))
	}
	name = "inproc://" + name
	err = errors.Join(
		s.soc.SetRcvhwm(receiveQueue), s.soc.SetMaxmsgsize(s.maxFrame), s.events.SetLinger(0),
		configure(s.soc, s.heartbeat), s.soc.SetSubscribe(s.topic), s.soc.Monitor(name, lost|found),
	)
	attach := s.soc.Connect
	if s.binds {
		attach = s.soc.Bind
	}
	if err == nil {
		err = errors.Join(s.events.Connect(name), attach(s.endpoint))
	}
	if err != nil {
		return fmt.Errorf("monitor: subscribe %s: %w", s.endpoint, errors.Join(err, s.close()))
	}
	return nil
}

// configure sets what connections to engines have in common.
func configure(soc *zmq.Socket, heartbeat time.Duration) error {
	err := errors.Join(
		soc.SetLinger(0), soc.SetIpv6(true),
		soc.SetReconnectIvl(firstReconnect), soc.SetReconnectIvlMax(lastReconnect),
		// A publisher whose machine is gone says nothing, like one that has nothing to say.
		soc.SetTcpKeepalive(1), soc.SetTcpKeepaliveIdle(keepaliveIdle),
		soc.SetTcpKeepaliveIntvl(keepaliveEvery), soc.SetTcpKeepaliveCnt(keepaliveProbes),
	)
	if heartbeat > 0 {
		err = errors.Join(err, soc.SetHeartbeatIvl(heartbeat), soc.SetHeartbeatTimeout(3*heartbeat), soc.SetHeartbeatTtl(3*heartbeat))
	}
	return err
}

// close closes the sockets that are open. First libzmq is told to tell no more of soc: it waits
// until what it tells is taken, so with nobody left to do that its thread, and with it every
// connection of the context, would stand still.
func (s *subscription) close() error {
	var errs []error
	if s.soc != nil {
		errs = append(errs, s.soc.Monitor("", 0))
	}
	for _, soc := range []*zmq.Socket{s.soc, s.events} {
		if soc != nil {
			errs = append(errs, soc.Close())
		}
	}
	s.soc, s.events, s.made, s.connected, s.ended = nil, nil, 0, 0, false
	return errors.Join(errs...)
}

// look notes what has become of the connections. It reports whether the socket is of no use any
// more: it has lost the publisher that it connects to.
func (s *subscription) look() (ended bool) {
	for {
		event, _, _, err := s.events.RecvEvent(zmq.DONTWAIT)
		if err != nil {
			return s.ended // nothing more is told
		}
		switch {
		case event&found != 0:
			s.made++
			s.connected++
			s.failed, s.ended = false, false // libzmq may have been faster than we are
		case event&refused != 0:
			s.failed, s.ended = true, !s.binds
		default:
			s.connected, s.ended = max(s.connected-1, 0), !s.binds
		}
	}
}

// postpone sets the time of the next opening, later each time.
func (s *subscription) postpone(now time.Time) {
	s.retry = min(max(firstReconnect, 2*s.retry), lastReconnect)
	s.again = now.Add(s.retry)
}

// drain hands at most so many of the messages that have come to use, with their frames up to one
// more than wanted.
func (s *subscription) drain(most, wanted int, use func(frames [][]byte)) error {
	for range most {
		frames, err := message(s.soc, wanted)
		if errors.Is(err, errNone) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("monitor: receiving from %s: %w", s.endpoint, err)
		}
		use(frames)
	}
	return nil
}

// errNone means that nothing has come.
var errNone = errors.New("monitor: no message")

// message receives the frames of one message, at most one more than wanted. It does not wait.
func message(soc *zmq.Socket, wanted int) ([][]byte, error) {
	frames := make([][]byte, 0, wanted)
	for {
		frame, err := soc.RecvBytes(zmq.DONTWAIT)
		if isTransient(err) {
			return nil, errNone
		}
		if err != nil {
			return nil, err
		}
		if len(frames) <= wanted {
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
