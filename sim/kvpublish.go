package sim

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"strconv"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"

	"spillway/wire"
)

const (
	// publishQueue is how many batches libzmq keeps for a slow subscriber, as vLLM lets it.
	publishQueue = 100_000
	// maxRingBytes bounds what a rank keeps for replays, beside the number of batches.
	maxRingBytes = 64 << 20
	// maxRequest bounds what clients send: subscriptions, and requests of 8 bytes.
	maxRequest = 4 << 10
	// replayLook is how often requests for a replay are looked for; an idle vLLM takes longer.
	replayLook = 50 * time.Millisecond
	// tendLook is how often libzmq gets to clear up after connections that have ended.
	tendLook = time.Second
	// maxRequests is how many replays are served before new batches are published.
	maxRequests = 8
)

// endOfReplay is the number of no batch.
const endOfReplay = math.MaxUint64

// publisher publishes one rank's feed, and again what a client has missed. It belongs to one
// goroutine, as its sockets do.
type publisher struct {
	feed     *feed
	layout   wire.KVLayout
	dp       uint32
	endpoint string
	replay   string // endpoint for replays, or ""
	ring     ring
	queue    int // publishQueue, but for tests

	pub, router *zmq.Socket // router is nil without replays
}

// newPublisher is the publisher of rank dp of a worker.
func newPublisher(cfg Config, workerIndex, dp int, f *feed) *publisher {
	offset := workerIndex*cfg.DPSize + dp
	p := &publisher{
		feed: f, dp: uint32(dp), layout: layouts[cfg.KVEventsLayout],
		endpoint: zmqEndpoint(cfg.Host, cfg.KVEventsPort+offset), queue: publishQueue,
	}
	if cfg.KVReplayPort > 0 {
		p.replay = zmqEndpoint(cfg.Host, cfg.KVReplayPort+offset)
		p.ring.most = cfg.KVReplayBatches
	}
	return p
}

// layouts are the values of kv-events-layout.
var layouts = map[string]wire.KVLayout{"array": wire.KVArrays, "map": wire.KVMaps}

func zmqEndpoint(host string, port int) string {
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "*"
	}
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(port))
}

// run publishes until ctx ends. What waits then is lost, as when an engine is killed.
func (p *publisher) run(ctx context.Context, zctx *zmq.Context) (err error) {
	if err := p.open(zctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	look := tendLook
	if p.router != nil {
		look = replayLook
	}
	tick := time.NewTicker(look)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			if _, err := p.pub.GetEvents(); err != nil && !isTransient(err) {
				return fmt.Errorf("sim: publishing KV events: %w", err)
			}
		case <-p.feed.filled:
		}
		for _, b := range p.feed.take() {
			if err := p.publish(b); err != nil {
				return fmt.Errorf("sim: publishing KV events: %w", err)
			}
		}
		if err := p.answer(); err != nil {
			return fmt.Errorf("sim: replaying KV events: %w", err)
		}
	}
}

func (p *publisher) open(zctx *zmq.Context) (err error) {
	if p.pub, err = bind(zctx, zmq.PUB, p.endpoint, p.queue); err != nil {
		return err
	}
	if err = p.pub.SetXpubNodrop(true); err != nil { // so that a batch too many is an error, which can be counted
		return errors.Join(err, p.close())
	}
	if p.replay == "" {
		return nil
	}
	if p.router, err = bind(zctx, zmq.ROUTER, p.replay, p.ring.most+1); err != nil { // room for a whole replay
		return errors.Join(err, p.close())
	}
	return nil
}

func bind(zctx *zmq.Context, kind zmq.Type, endpoint string, queue int) (*zmq.Socket, error) {
	soc, err := zctx.NewSocket(kind)
	if err != nil {
		return nil, fmt.Errorf("sim: making a socket for KV events: %w", err)
	}
	err = errors.Join(soc.SetLinger(0), soc.SetSndhwm(queue), soc.SetMaxmsgsize(maxRequest), soc.SetIpv6(true), soc.Bind(endpoint))
	if err != nil {
		return nil, fmt.Errorf("sim: KV events at %s: %w", endpoint, errors.Join(err, soc.Close()))
	}
	return soc, nil
}

func (p *publisher) close() error {
	var errs []error
	for _, soc := range []*zmq.Socket{p.pub, p.router} {
		if soc != nil {
			errs = append(errs, soc.Close())
		}
	}
	return errors.Join(errs...)
}

// publish sends a batch to all subscribers: an empty topic, its number, its payload.
func (p *publisher) publish(b kvBatch) error {
	seconds := float64(b.at.UnixMicro()) / 1e6
	payload := wire.AppendKVBatch(nil, p.layout, seconds, p.dp, b.events)
	if p.router != nil {
		p.ring.add(b.sequence, payload)
	}
	err := sendTo(p.pub, nil, number(b.sequence), payload)
	if zmq.AsErrno(err) != zmq.Errno(syscall.EAGAIN) {
		return err
	}
	// Somebody is publishQueue behind and loses it, the others do not. libzmq then does not count on
	// him until he reads again: what else he loses is no error.
	p.feed.lost()
	if err := p.pub.SetXpubNodrop(false); err != nil {
		return err
	}
	return errors.Join(sendTo(p.pub, nil, number(b.sequence), payload), p.pub.SetXpubNodrop(true))
}

// answer serves requests for a replay that have come: each gets the batches from the number that it
// names on, as far as they are kept, and an end. What is no request is ignored, as vLLM does.
func (p *publisher) answer() error {
	if p.router == nil {
		return nil
	}
	for range maxRequests {
		request, err := p.router.RecvMessageBytes(zmq.DONTWAIT)
		if isTransient(err) {
			return nil
		}
		if err != nil {
			return err
		}
		if len(request) != 3 || len(request[1]) > 0 || len(request[2]) != 8 {
			continue
		}
		client, start := request[0], binary.BigEndian.Uint64(request[2])
		for _, b := range p.ring.from(start) {
			if err := p.reply(client, b.sequence, b.payload); err != nil {
				return err
			}
		}
		if err := p.reply(client, endOfReplay, nil); err != nil {
			return err
		}
	}
	return nil
}

// reply sends one message of a replay. The releases of vLLM that have events as maps put a topic
// into it.
func (p *publisher) reply(client []byte, sequence uint64, payload []byte) error {
	frames := [][]byte{client, nil, number(sequence), payload}
	if p.layout == wire.KVMaps {
		frames = [][]byte{client, nil, nil, number(sequence), payload}
	}
	if err := sendTo(p.router, frames...); err != nil && !isTransient(err) {
		return err
	}
	return nil
}

// sendTo sends a message without waiting. Where its first frame has room, the others have.
func sendTo(soc *zmq.Socket, frames ...[]byte) error {
	for i, f := range frames {
		flags := zmq.DONTWAIT
		if i < len(frames)-1 {
			flags |= zmq.SNDMORE
		}
		if _, err := soc.SendBytes(f, flags); err != nil {
			return err
		}
	}
	return nil
}

func number(sequence uint64) []byte { return binary.BigEndian.AppendUint64(nil, sequence) }

func isTransient(err error) bool {
	return err != nil && (zmq.AsErrno(err) == zmq.Errno(syscall.EAGAIN) || zmq.AsErrno(err) == zmq.Errno(syscall.EINTR))
}

// ring keeps the last batches, at most most of them and maxRingBytes of payload.
type ring struct {
	most  int
	kept  []keptBatch // in order of their numbers
	bytes int
}

type keptBatch struct {
	sequence uint64
	payload  []byte
}

func (r *ring) add(sequence uint64, payload []byte) {
	r.kept = append(r.kept, keptBatch{sequence, payload})
	r.bytes += len(payload)
	for len(r.kept) > 1 && (len(r.kept) > r.most || r.bytes > maxRingBytes) {
		r.bytes -= len(r.kept[0].payload)
		r.kept[0].payload = nil
		r.kept = r.kept[1:]
	}
}

// from is the batches that are kept, from number start on.
func (r *ring) from(start uint64) []keptBatch {
	for i, b := range r.kept {
		if b.sequence >= start {
			return r.kept[i:]
		}
	}
	return nil
}
