package monitor_test

import (
	"encoding/binary"
	"errors"
	"math"
	"sync"
	"syscall"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"spillway/wire"
)

// kvEngine publishes KV events over real sockets, as an engine does: live ones by PUB, what was
// lost by ROUTER. Its publisher is an XPUB that tells of each subscription, so that tests can wait for subscribers.
type kvEngine struct {
	t        *testing.T
	zctx     *zmq.Context
	pub      *zmq.Socket
	endpoint string
	replay   string // of the ROUTER, if it was asked for; where it is to be, if that is set before
	stop     func()

	mu     sync.Mutex // guards the fields below, which answer requests
	ring   map[uint64][]byte
	answer func(from uint64) [][][]byte // instead of the ring
	asked  []uint64
}

// kvBlocks is the block size of all tests.
const kvBlocks = 2

// batchOf stores one block that begins a prompt and has the number of the batch for its tokens.
func batchOf(seq uint64, dp uint32) []byte {
	return wire.AppendKVBatch(nil, wire.KVArrays, 1, dp, []wire.KVPublished{{
		Kind: wire.KVStore, Hashes: []uint64{1000 + seq}, Tokens: []uint32{uint32(seq), uint32(seq)}, BlockSize: kvBlocks,
	}})
}

func newKVEngine(t *testing.T, endpoint string, connects bool) *kvEngine {
	t.Helper()
	e := &kvEngine{t: t, ring: map[uint64][]byte{}}
	var err error
	if e.zctx, err = zmq.NewContext(); err != nil {
		t.Fatal(err)
	}
	if e.pub, err = e.zctx.NewSocket(zmq.XPUB); err != nil {
		t.Fatal(err)
	}
	attach := e.pub.Bind
	if connects {
		attach = e.pub.Connect
	}
	if err := errors.Join(e.pub.SetLinger(0), e.pub.SetXpubVerbose(1), attach(endpoint)); err != nil {
		t.Fatal(err)
	}
	if e.endpoint, err = e.pub.GetLastEndpoint(); err != nil {
		t.Fatal(err)
	}
	e.stop = sync.OnceFunc(func() {
		if err := errors.Join(e.pub.Close(), e.zctx.Term()); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(e.stop)
	return e
}

// subscribed waits for a subscription.
func (e *kvEngine) subscribed() {
	e.t.Helper()
	eventually(e.t, "a subscription", func() bool {
		b, err := e.pub.RecvBytes(zmq.DONTWAIT)
		return err == nil && len(b) > 0 && b[0] == 1
	})
}

// raw publishes frames.
func (e *kvEngine) raw(frames ...[]byte) {
	e.t.Helper()
	for {
		_, err := e.pub.SendMessage(frames)
		if zmq.AsErrno(err) == zmq.Errno(syscall.EINTR) {
			continue
		}
		if err != nil {
			e.t.Fatal(err)
		}
		return
	}
}

// publish sends a payload under a number.
func (e *kvEngine) publish(seq uint64, payload []byte) {
	e.t.Helper()
	e.raw([]byte("kv@host@model"), binary.BigEndian.AppendUint64(nil, seq), payload)
}

// live sends batches of batchOf.
func (e *kvEngine) live(dp uint32, seqs ...uint64) {
	e.t.Helper()
	for _, s := range seqs {
		e.publish(s, batchOf(s, dp))
	}
}

// serve answers requests for replays from now on.
func (e *kvEngine) serve() {
	e.t.Helper()
	soc, err := e.zctx.NewSocket(zmq.ROUTER)
	if err == nil {
		at := e.replay
		if at == "" {
			at = "tcp://127.0.0.1:*"
		}
		err = errors.Join(soc.SetLinger(0), soc.SetRcvtimeo(20*time.Millisecond), soc.Bind(at))
	}
	if err != nil {
		e.t.Fatal(err)
	}
	if e.replay, err = soc.GetLastEndpoint(); err != nil {
		e.t.Fatal(err)
	}
	done := make(chan struct{})
	var ended sync.WaitGroup
	ended.Go(func() {
		for {
			select {
			case <-done:
				if err := soc.Close(); err != nil {
					e.t.Error(err)
				}
				return
			default:
			}
			frames, err := soc.RecvMessageBytes(0)
			if err != nil || len(frames) != 3 || len(frames[1]) != 0 || len(frames[2]) != 8 {
				continue
			}
			for _, reply := range e.replies(binary.BigEndian.Uint64(frames[2])) {
				if _, err := soc.SendMessage(append([][]byte{frames[0]}, reply...)); err != nil {
					e.t.Error(err)
				}
			}
		}
	})
	stop := e.stop
	e.stop = sync.OnceFunc(func() { close(done); ended.Wait(); stop() })
	e.t.Cleanup(e.stop)
}

func (e *kvEngine) replies(from uint64) [][][]byte {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.asked = append(e.asked, from)
	if e.answer != nil {
		return e.answer(from)
	}
	var all [][][]byte
	for s := uint64(0); s < 100; s++ {
		if payload, ok := e.ring[s]; ok && s >= from {
			all = append(all, newReply(s, payload))
		}
	}
	return append(all, newReply(math.MaxUint64, nil))
}

// newReply has the frames of an answer since June 2026, oldReply those before.
func newReply(seq uint64, payload []byte) [][]byte {
	return [][]byte{{}, []byte("topic"), binary.BigEndian.AppendUint64(nil, seq), payload}
}

func oldReply(seq uint64, payload []byte) [][]byte {
	return [][]byte{{}, binary.BigEndian.AppendUint64(nil, seq), payload}
}

func (e *kvEngine) requests() []uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.asked
}
