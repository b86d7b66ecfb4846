package replica

import (
	"context"
	"errors"
	"fmt"
	"time"

	zmq "github.com/pebbe/zmq4"

	"spillway/wire"
)

// tendInterval is how often libzmq is let do its work on a publisher that has nothing to publish:
// what it keeps for connections that have ended is only given back in a call.
const tendInterval = time.Second

func (r *Replica) openPublisher(zctx *zmq.Context) (*zmq.Socket, error) {
	soc, err := zctx.NewSocket(zmq.PUB)
	if err != nil {
		return nil, fmt.Errorf("replica: making a socket: %w", err)
	}
	// What comes in are subscriptions.
	if err = errors.Join(configure(soc), soc.SetMaxmsgsize(maxSubscription)); err == nil {
		err = soc.Bind(r.cfg.Bind)
	}
	var bound string
	if err == nil {
		bound, err = soc.GetLastEndpoint()
	}
	if err != nil {
		return nil, fmt.Errorf("replica: publish at %s: %w", r.cfg.Bind, errors.Join(err, soc.Close()))
	}
	r.bound.Store(&bound)
	return soc, nil
}

const maxSubscription = 4 << 10

const (
	patience    = 20 * time.Millisecond // that peers are given to take what waits, before the slow ones lose events
	impatience  = time.Second           // for which those then lose them at once
	lookForRoom = time.Millisecond
)

// sender publishes what is put into the queue. It belongs to one goroutine. libzmq keeps highWater
// messages for a connection, which is less than a burst has; so the queue holds what comes after
// them, for as long as all peers keep up.
type sender struct {
	r     *Replica
	pub   *zmq.Socket
	buf   []byte
	lossy time.Time // until when slow peers lose events; zero: they do not
}

// run publishes until ctx ends; what waits then is lost.
func (s *sender) run(ctx context.Context) error {
	if err := s.pub.SetXpubNodrop(true); err != nil {
		return fmt.Errorf("replica: publishing: %w", err)
	}
	tend := time.NewTicker(tendInterval)
	defer tend.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tend.C:
			if _, err := s.pub.GetEvents(); err != nil && !isTransient(err) {
				return fmt.Errorf("replica: publishing: %w", err)
			}
		case <-s.r.out.filled:
		}
		for batch := s.r.out.take(); batch != nil && ctx.Err() == nil; batch = s.r.out.take() {
			for i := range batch {
				if err := s.publish(ctx, &batch[i]); err != nil {
					return fmt.Errorf("replica: publishing: %w", err)
				}
			}
			s.r.out.done(batch)
		}
	}
}

const maxBufferKept = 64 << 10

var replicaTopic = []byte(wire.ReplicaTopic)

// publish sends one event.
func (s *sender) publish(ctx context.Context, e *wire.ReplicaEvent) error {
	s.buf = wire.AppendReplica(s.buf[:0], e, s.r.format)
	size := len(s.buf)
	defer func() {
		if size > maxBufferKept {
			s.buf = nil
		}
	}()
	if size+len(replicaTopic) > wire.MaxReplicaBytes { // a peer would end the connection
		s.r.metrics.unsent[unsentSize].Inc()
		return nil
	}
	if err := s.begin(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	if _, err := s.pub.SendBytes(s.buf, zmq.DONTWAIT); err != nil { // where the first frame had room, the others do
		return err
	}
	s.r.metrics.sent[e.Kind].Inc()
	return nil
}

// begin sends the first frame of a message. It waits while there is no room for it, but not for long.
func (s *sender) begin(ctx context.Context) error {
	if !s.lossy.IsZero() && time.Now().After(s.lossy) {
		s.lossy = time.Time{}
		if err := s.pub.SetXpubNodrop(true); err != nil {
			return err
		}
	}
	_, err := s.pub.SendBytes(replicaTopic, zmq.SNDMORE|zmq.DONTWAIT)
	if !isTransient(err) {
		return err
	}
	look := time.NewTicker(lookForRoom)
	defer look.Stop()
	for began := time.Now(); isTransient(err); {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case now := <-look.C:
			if now.Sub(began) >= s.r.patience {
				s.lossy = now.Add(impatience)
				s.r.metrics.slow.Inc()
				if err := s.pub.SetXpubNodrop(false); err != nil {
					return err
				}
			}
		}
		_, err = s.pub.SendBytes(replicaTopic, zmq.SNDMORE|zmq.DONTWAIT)
	}
	return err
}
