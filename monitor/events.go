package monitor

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	zmq "github.com/pebbe/zmq4"

	"spillway/wire"
)

const (
	pollTimeout    = 100 * time.Millisecond // after which the end of Run and lost connections are looked for
	expireInterval = time.Second
	maxLoadFrame   = 64 << 10 // bytes
)

// listen takes in load events until ctx ends. Publishers may come and go; only sockets that
// cannot be had are a problem.
func (m *KvWorkerMonitor) listen(ctx context.Context) {
	m.log.Info("load events are taken in", "publishers", m.cfg.EventEndpoints)
	problem := ""
	told := map[string]bool{}
	for retry := firstRetry; ; retry = min(2*retry, lastRetry) {
		err := m.receive(ctx, told)
		if err != nil && err.Error() != problem {
			problem = err.Error()
			m.log.Error("load events cannot be received", "err", err)
		}
		if !pause(ctx, retry) {
			return
		}
	}
}

// receive takes in load events until ctx ends or a socket fails. Nothing of libzmq is left when
// it returns. Reasons for dropping events that have been logged are kept in told.
func (m *KvWorkerMonitor) receive(ctx context.Context, told map[string]bool) (err error) {
	zctx, err := zmq.NewContext()
	if err != nil {
		return fmt.Errorf("monitor: starting libzmq: %w", err)
	}
	defer func() { err = errors.Join(err, zctx.Term()) }()
	subs := make([]*subscription, len(m.cfg.EventEndpoints))
	for i, e := range m.cfg.EventEndpoints {
		subs[i] = &subscription{endpoint: e, topic: wire.LoadTopic, maxFrame: maxLoadFrame}
		defer func() { err = errors.Join(err, subs[i].close()) }()
	}
	const socketsEach = 4 // the subscription's two, and libzmq's own end of the second
	if err := zctx.SetMaxSockets(socketsEach * (len(subs) + 1)); err != nil {
		return fmt.Errorf("monitor: starting libzmq: %w", err)
	}
	l := listener{m: m, zctx: zctx, subs: subs, told: told, poller: zmq.NewPoller()}
	var looked, expired time.Time
	for ctx.Err() == nil {
		if err := l.wait(ctx); err != nil {
			return err
		}
		now := time.Now()
		look := now.Sub(looked) >= pollTimeout
		if look {
			looked = now
		}
		for _, s := range subs {
			if err := l.tend(s, look, now); err != nil {
				return err
			}
		}
		if now.Sub(expired) >= expireInterval {
			expired = now
			m.expire(now)
		}
	}
	return nil
}

// listener holds the subscriptions of one call of receive.
type listener struct {
	m      *KvWorkerMonitor
	zctx   *zmq.Context
	subs   []*subscription
	poller *zmq.Poller // of the open ones
	open   int
	opened int // ever
	told   map[string]bool
}

// wait waits for messages, for a moment.
func (l *listener) wait(ctx context.Context) error {
	if l.open == 0 {
		if l.opened > 0 {
			pause(ctx, pollTimeout)
		}
		return nil
	}
	if _, err := l.poller.Poll(pollTimeout); err != nil && !isTransient(err) {
		return fmt.Errorf("monitor: polling: %w", err)
	}
	return nil
}

// tend takes in what has come from one publisher. With look it also sees to the connection.
func (l *listener) tend(s *subscription, look bool, now time.Time) error {
	if s.soc == nil {
		if now.Before(s.again) {
			return nil
		}
		l.opened++
		if err := s.open(l.zctx, strconv.Itoa(l.opened)); err != nil {
			return err
		}
		l.open++
		l.poller.Add(s.soc, zmq.POLLIN)
		return nil
	}
	ended := look && s.look() // before it is emptied, so that nothing that came is left behind
	err := s.drain(receiveQueue, wire.LoadFrames, func(frames [][]byte) {
		if l.m.took(frames, l.told, now) {
			s.retry = 0
		}
	})
	if err == nil && ended {
		err = errors.Join(l.poller.RemoveBySocket(s.soc), s.close())
		l.open--
		s.postpone(now)
	}
	return err
}

// took takes in one message and reports true, or counts why not. Each reason is logged once.
func (m *KvWorkerMonitor) took(frames [][]byte, told map[string]bool, now time.Time) bool {
	m.metrics.received.Inc()
	e, err := wire.ParseLoad(frames)
	reason := reasonDropped(err)
	if reason == "" {
		reason = m.heard(e, now)
		err = fmt.Errorf("worker %v, rank %d, by publisher %d", e.Rank.Worker, e.Rank.DP, e.Publisher)
	}
	if reason == "" {
		return true
	}
	m.metrics.dropped[reason].Inc()
	if !told[reason] {
		told[reason] = true
		m.log.Warn("a load event was dropped; further ones for the same reason are only counted", "reason", reason, "err", err)
	}
	return false
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
