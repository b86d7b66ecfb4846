package monitor

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	zmq "github.com/pebbe/zmq4"

	"spillway/worker"
)

const maxKVTurn = 256 // batches that are taken from one publisher before it is the turn of others

// kvLine is the connection to one publisher of KV events.
type kvLine struct {
	subscription
	l          *kvListener
	generation uint64 // of the attempt that it belongs to
	told       int    // connections of the socket that its listener has been told of
}

// kvReceiver receives for all listeners. All of it belongs to one goroutine.
type kvReceiver struct {
	k      *KVListeners
	zctx   *zmq.Context
	poller *zmq.Poller             // of the open lines
	open   map[*zmq.Socket]*kvLine // likewise
	lines  map[*kvListener]*kvLine
	came   [][][]byte // messages of one turn, kept for its memory
	opened int        // ever
	looked time.Time  // when listeners and connections were last looked at
}

// receive takes in KV events until ctx ends or libzmq cannot go on. Nothing of libzmq is left when
// it returns. Listeners that are not in started are started, in loops.
func (k *KVListeners) receive(ctx context.Context, started map[*kvListener]bool, loops *sync.WaitGroup) (err error) {
	zctx, err := zmq.NewContext()
	if err != nil {
		return fmt.Errorf("monitor: starting libzmq: %w", err)
	}
	defer func() { err = errors.Join(err, zctx.Term()) }()
	const socketsEach = 4 // the subscription's two, libzmq's own end of the second, and one to close
	if err := zctx.SetMaxSockets(socketsEach * (maxKVListeners + 1)); err != nil {
		return fmt.Errorf("monitor: starting libzmq: %w", err)
	}
	r := &kvReceiver{k: k, zctx: zctx, poller: zmq.NewPoller(), open: map[*zmq.Socket]*kvLine{}, lines: map[*kvListener]*kvLine{}}
	defer func() {
		for _, line := range r.lines {
			err = errors.Join(err, line.close())
			line.l.setState(line.generation, KVPending, nil)
		}
	}()
	for ctx.Err() == nil {
		now := time.Now()
		if now.Sub(r.looked) >= pollTimeout {
			r.looked = now
			if err := r.look(ctx, now, started, loops); err != nil {
				return err
			}
		}
		if err := r.wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// wait waits for messages, for a moment, and takes some of each publisher's.
func (r *kvReceiver) wait(ctx context.Context) error {
	if len(r.open) == 0 {
		timer := time.NewTimer(pollTimeout)
		defer timer.Stop()
		if len(r.lines) == 0 {
			timer.Stop() // nothing is to be opened again
		}
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-r.k.changed:
			r.looked = time.Time{} // at once, and also if that was a moment ago: nothing else may wake us
		}
		return nil
	}
	ready, err := r.poller.Poll(pollTimeout)
	if err != nil {
		if isTransient(err) {
			return nil
		}
		return fmt.Errorf("monitor: polling: %w", err)
	}
	for _, p := range ready {
		if line := r.open[p.Socket]; line != nil {
			if err := r.take(line); err != nil {
				r.fail(line, err, time.Now())
			}
		}
	}
	return nil
}

// take takes in some of the messages that have come on a line.
func (r *kvReceiver) take(line *kvLine) error {
	err := line.drain(maxKVTurn, kvFrames, func(frames [][]byte) { r.came = append(r.came, frames) })
	line.look() // afterwards: what came over a connection, libzmq hands out after the news of that
	line.tell()
	now := time.Now()
	for _, frames := range r.came {
		line.retry = 0
		line.l.hear(frames, now)
	}
	clear(r.came)
	r.came = r.came[:0]
	return err
}

// tell tells the listener of a connection that takes the place of another one. Before the first one
// there is nothing to compare with, and after it the first batch tells what is missing.
func (line *kvLine) tell() {
	if line.told == line.made {
		return
	}
	line.l.linked = line.l.linked || line.made > line.told+1
	line.told = line.made
	if line.l.linked {
		line.l.queue.put(kvBatch{news: kvLinked})
	}
	line.l.linked = true
}

// look follows what has become of listeners and of connections.
func (r *kvReceiver) look(ctx context.Context, now time.Time, started map[*kvListener]bool, loops *sync.WaitGroup) error {
	wanted := r.k.all()
	here := make(map[*kvListener]bool, len(wanted))
	for _, l := range wanted {
		here[l] = true
		if !started[l] {
			started[l] = true
			loops.Go(func() { l.run(ctx) })
		}
		if r.lines[l] == nil {
			r.lines[l] = &kvLine{l: l, subscription: subscription{
				endpoint: l.source.Endpoint, maxFrame: maxKVFrame, heartbeat: kvHeartbeat, binds: worker.Binds(l.source.Endpoint),
			}}
		}
		l.tellSilence(now)
	}
	for l, line := range r.lines {
		if !here[l] {
			delete(r.lines, l)
			delete(started, l)
			if err := r.shut(line); err != nil {
				return err
			}
			continue
		}
		if err := r.tend(line, now); err != nil {
			return err
		}
	}
	return nil
}

// tend sees to one connection.
func (r *kvReceiver) tend(line *kvLine, now time.Time) error {
	generation, wanted := line.l.attempt()
	if line.soc != nil && (!wanted || generation != line.generation) {
		if err := r.shut(line); err != nil {
			return err
		}
		line.again, line.retry = now, 0
	}
	if !wanted {
		return nil
	}
	line.generation = generation
	if line.soc == nil {
		if !now.Before(line.again) {
			r.start(line, now)
		}
		return nil
	}
	ended := line.look() // before it is emptied, so that nothing that came is left behind
	line.tell()
	switch {
	case line.connected > 0:
		line.l.setState(generation, KVActive, nil)
	case line.failed:
		line.l.setState(generation, KVFailed, errors.New("who answers there does not speak ZMQ"))
	default:
		line.l.setState(generation, KVPending, nil)
	}
	if !ended {
		return nil
	}
	for range receiveQueue / maxKVTurn {
		if err := r.take(line); err != nil {
			r.fail(line, err, now)
			return nil
		}
	}
	if !line.look() {
		return nil // libzmq was faster than we are, and what it now receives must not be lost
	}
	line.postpone(now)
	return r.shut(line)
}

// start opens a line. One that cannot be opened must not keep the others from being.
func (r *kvReceiver) start(line *kvLine, now time.Time) {
	r.opened++
	if err := line.open(r.zctx, "kv-"+strconv.Itoa(r.opened)); err != nil {
		line.postpone(now)
		line.l.setState(line.generation, KVFailed, err)
		return
	}
	line.failed, line.told = false, 0
	r.open[line.soc] = line
	r.poller.Add(line.soc, zmq.POLLIN)
	line.l.setState(line.generation, KVPending, nil)
}

// shut closes the sockets of a line that has any.
func (r *kvReceiver) shut(line *kvLine) error {
	if line.soc == nil {
		return nil
	}
	delete(r.open, line.soc)
	return errors.Join(r.poller.RemoveBySocket(line.soc), line.close())
}

// fail closes a line on which receiving has failed, until later.
func (r *kvReceiver) fail(line *kvLine, err error, now time.Time) {
	line.postpone(now)
	line.l.setState(line.generation, KVFailed, errors.Join(err, r.shut(line)))
}
