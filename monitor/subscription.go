package monitor

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"

	"spillway/wire"
)

const (
	receiveQueue    = 4096                   // messages kept per publisher before they are lost
	maxFrameBytes   = 64 << 10               // a publisher that sends more is cut off by libzmq
	firstReconnect  = 100 * time.Millisecond // doubled up to lastReconnect
	lastReconnect   = 5 * time.Second
	keepaliveIdle   = 10 // seconds until the first of the probes of a silent connection
	keepaliveEvery  = 5  // seconds
	keepaliveProbes = 3
)

// lost are the ends of a connection. After some of them, such as bytes that are not ZMQ's,
// libzmq does not connect again, so after each of them a new socket is made.
const lost = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL |
	zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

// subscription is the connection to one publisher. It belongs to one goroutine.
type subscription struct {
	endpoint string
	soc      *zmq.Socket // nil while closed
	events   *zmq.Socket // what libzmq tells about the connection of soc
	again    time.Time   // when to open it, while closed
	retry    time.Duration
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
		s.soc.SetRcvhwm(receiveQueue), s.soc.SetMaxmsgsize(maxFrameBytes), s.soc.SetLinger(0), s.events.SetLinger(0),
		s.soc.SetReconnectIvl(firstReconnect), s.soc.SetReconnectIvlMax(lastReconnect), s.soc.SetIpv6(true),
		// A publisher whose machine is gone says nothing, like one that has nothing to say.
		s.soc.SetTcpKeepalive(1), s.soc.SetTcpKeepaliveIdle(keepaliveIdle),
		s.soc.SetTcpKeepaliveIntvl(keepaliveEvery), s.soc.SetTcpKeepaliveCnt(keepaliveProbes),
		s.soc.SetSubscribe(wire.LoadTopic), s.soc.Monitor(name, lost),
	)
	if err == nil {
		err = errors.Join(s.events.Connect(name), s.soc.Connect(s.endpoint))
	}
	if err != nil {
		return fmt.Errorf("monitor: subscribe %s: %w", s.endpoint, errors.Join(err, s.close()))
	}
	return nil
}

// close closes the sockets that are open.
func (s *subscription) close() error {
	var errs []error
	for _, soc := range []*zmq.Socket{s.soc, s.events} {
		if soc != nil {
			errs = append(errs, soc.Close())
		}
	}
	s.soc, s.events = nil, nil
	return errors.Join(errs...)
}

// isLost reports whether the connection has ended since it was opened.
func (s *subscription) isLost() bool {
	_, _, _, err := s.events.RecvEvent(zmq.DONTWAIT)
	return err == nil
}

// postpone sets the time of the next opening, later each time.
func (s *subscription) postpone(now time.Time) {
	s.retry = min(max(firstReconnect, 2*s.retry), lastReconnect)
	s.again = now.Add(s.retry)
}

// drain hands the messages that have come to use, at most as many as are kept for one publisher.
func (s *subscription) drain(use func(frames [][]byte)) error {
	for range receiveQueue {
		frames, err := message(s.soc)
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

// message receives the frames of one message, at most one more than an event has.
func message(soc *zmq.Socket) ([][]byte, error) {
	frames := make([][]byte, 0, wire.LoadFrames)
	for {
		frame, err := soc.RecvBytes(zmq.DONTWAIT)
		if isTransient(err) {
			return nil, errNone
		}
		if err != nil {
			return nil, err
		}
		if len(frames) <= wire.LoadFrames {
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
