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

// send publishes what is put into the queue until ctx ends; what waits then is lost. A PUB socket
// never makes anybody wait: it loses what a slow peer does not take.
func (r *Replica) send(ctx context.Context, pub *zmq.Socket) error {
	tend := time.NewTicker(tendInterval)
	defer tend.Stop()
	var buf []byte
	var err error
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tend.C:
			if _, err = pub.GetEvents(); err != nil && !isTransient(err) {
				return fmt.Errorf("replica: publishing: %w", err)
			}
		case <-r.out.filled:
		}
		for batch := r.out.take(); batch != nil && ctx.Err() == nil; batch = r.out.take() {
			for i := range batch {
				if buf, err = r.publish(pub, &batch[i], buf); err != nil {
					return fmt.Errorf("replica: publishing: %w", err)
				}
			}
			r.out.done(batch)
		}
	}
}

const maxBufferKept = 64 << 10

var replicaTopic = []byte(wire.ReplicaTopic)

// publish sends one event. It returns buf, or what has become of it, to be used again.
func (r *Replica) publish(pub *zmq.Socket, e *wire.ReplicaEvent, buf []byte) ([]byte, error) {
	buf = wire.AppendReplica(buf[:0], e, r.format)
	if len(buf)+len(replicaTopic) > wire.MaxReplicaBytes { // a peer would end the connection
		r.metrics.unsent[unsentSize].Inc()
		return nil, nil
	}
	if _, err := pub.SendBytes(replicaTopic, zmq.SNDMORE|zmq.DONTWAIT); err != nil {
		return nil, err
	}
	if _, err := pub.SendBytes(buf, zmq.DONTWAIT); err != nil {
		return nil, err
	}
	r.metrics.sent[e.Kind].Inc()
	if cap(buf) > maxBufferKept {
		buf = nil
	}
	return buf, nil
}
