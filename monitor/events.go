package monitor

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
	receiveTimeout  = 100 * time.Millisecond // after which the end of Run is looked for
	receiveQueue    = 4096                   // messages kept per publisher before they are lost
	maxFrameBytes   = 64 << 10               // a publisher that sends more is cut off by libzmq
	firstReconnect  = 100 * time.Millisecond // doubled up to lastReconnect
	lastReconnect   = 5 * time.Second
	expireInterval  = time.Second
	keepaliveIdle   = 10 // seconds until the first of the probes of a silent connection
	keepaliveEvery  = 5  // seconds
	keepaliveProbes = 3
)

// listen takes in load events until ctx ends. The loss of a connection is libzmq's business;
// only a socket that cannot be had is noticed here.
func (m *KvWorkerMonitor) listen(ctx context.Context) {
	problem := ""
	told := map[string]bool{}
	for retry := firstRetry; ; retry = min(2*retry, lastRetry) {
		err := m.receive(ctx, told)
		if ctx.Err() != nil {
			return
		}
		if err != nil && err.Error() != problem {
			problem = err.Error()
			m.log.Error("load events cannot be received", "err", err)
		}
		if !pause(ctx, retry) {
			return
		}
	}
}

// receive takes in load events until ctx ends or the socket fails. Nothing of libzmq is left when it
// returns. Reasons for dropping events that have been logged are kept in told.
func (m *KvWorkerMonitor) receive(ctx context.Context, told map[string]bool) (err error) {
	zctx, err := zmq.NewContext()
	if err != nil {
		return fmt.Errorf("monitor: starting libzmq: %w", err)
	}
	defer func() { err = errors.Join(err, zctx.Term()) }()
	soc, err := zctx.NewSocket(zmq.SUB)
	if err != nil {
		return fmt.Errorf("monitor: making a socket: %w", err)
	}
	defer func() { err = errors.Join(err, soc.Close()) }()
	if err := subscribe(soc, m.cfg.EventEndpoints); err != nil {
		return err
	}
	var expired time.Time
	for ctx.Err() == nil {
		frames, err := message(soc)
		now := time.Now()
		switch {
		case err == nil:
			m.took(frames, told, now)
		case zmq.AsErrno(err) == zmq.Errno(syscall.EAGAIN) || zmq.AsErrno(err) == zmq.Errno(syscall.EINTR):
		default:
			return fmt.Errorf("monitor: receiving: %w", err)
		}
		if now.Sub(expired) >= expireInterval {
			expired = now
			m.expire(now)
		}
	}
	return nil
}

// subscribe readies the socket. Publishers need not be there yet.
func subscribe(soc *zmq.Socket, endpoints []string) error {
	err := errors.Join(
		soc.SetRcvhwm(receiveQueue), soc.SetMaxmsgsize(maxFrameBytes), soc.SetRcvtimeo(receiveTimeout), soc.SetLinger(0),
		soc.SetReconnectIvl(firstReconnect), soc.SetReconnectIvlMax(lastReconnect), soc.SetIpv6(true),
		// A publisher whose machine is gone says nothing, like one that has nothing to say.
		soc.SetTcpKeepalive(1), soc.SetTcpKeepaliveIdle(keepaliveIdle),
		soc.SetTcpKeepaliveIntvl(keepaliveEvery), soc.SetTcpKeepaliveCnt(keepaliveProbes),
		soc.SetSubscribe(wire.LoadTopic),
	)
	if err != nil {
		return fmt.Errorf("monitor: setting up a socket: %w", err)
	}
	for _, e := range endpoints {
		if err := soc.Connect(e); err != nil {
			return fmt.Errorf("monitor: subscribe %s: %w", e, err)
		}
	}
	return nil
}

// message receives the frames of one message, at most one more than an event has.
func message(soc *zmq.Socket) ([][]byte, error) {
	frames := make([][]byte, 0, wire.LoadFrames)
	for {
		frame, err := soc.RecvBytes(0)
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

// took takes in one message, or counts why not. Each reason is logged once.
func (m *KvWorkerMonitor) took(frames [][]byte, told map[string]bool, now time.Time) {
	m.metrics.received.Inc()
	e, err := wire.ParseLoad(frames)
	reason := reasonDropped(err)
	if reason == "" {
		reason = m.heard(e, now)
		err = fmt.Errorf("worker %v, rank %d, by publisher %d", e.Rank.Worker, e.Rank.DP, e.Publisher)
	}
	if reason == "" {
		return
	}
	m.metrics.dropped[reason].Inc()
	if !told[reason] {
		told[reason] = true
		m.log.Warn("a load event was dropped; further ones for the same reason are only counted", "reason", reason, "err", err)
	}
}

// heard hands an event to the watch of its worker. It returns why it could not, or "".
func (m *KvWorkerMonitor) heard(e wire.LoadEvent, now time.Time) (dropped string) {
	m.mu.Lock()
	w := m.watches[e.Rank.Worker]
	m.mu.Unlock()
	if w == nil {
		return droppedWorker
	}
	return w.heard(e, now)
}

func (m *KvWorkerMonitor) expire(now time.Time) {
	m.mu.Lock()
	watches := slices.Collect(maps.Values(m.watches))
	m.mu.Unlock()
	for _, w := range watches {
		w.expire(now)
	}
}

// reasonDropped is the reason for an error of wire.ParseLoad, "" for none.
func reasonDropped(err error) string {
	for _, r := range []struct {
		err    error
		reason string
	}{
		{wire.ErrFrames, droppedFrames}, {wire.ErrTopic, droppedTopic}, {wire.ErrVersion, droppedVersion},
		{wire.ErrEnvelope, droppedEnvelope}, {wire.ErrIdentity, droppedIdentity},
	} {
		if errors.Is(err, r.err) {
			return r.reason
		}
	}
	if err != nil {
		return droppedPayload
	}
	return ""
}
