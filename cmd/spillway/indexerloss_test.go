package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"spillway/wire"
	"spillway/worker"
)

// relay passes on what a publisher of KV events sends, but for each 50th message.
type relay struct {
	endpoint   string
	subscribed chan struct{} // closed when somebody listens

	mu      sync.Mutex // guards the fields below
	passed  []uint64   // sequence numbers
	batches [][]byte   // of those
	dropped int
}

func startRelay(t *testing.T, from string) *relay {
	t.Helper()
	zctx, err := zmq.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	sub, err := zctx.NewSocket(zmq.SUB)
	if err != nil {
		t.Fatal(err)
	}
	pub, err := zctx.NewSocket(zmq.XPUB)
	if err != nil {
		t.Fatal(err)
	}
	err = errors.Join(sub.SetLinger(0), pub.SetLinger(0), sub.SetRcvhwm(0), pub.SetSndhwm(0), sub.SetSubscribe(""), sub.Connect(from), pub.Bind("tcp://127.0.0.1:*"))
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{subscribed: make(chan struct{})}
	if r.endpoint, err = pub.GetLastEndpoint(); err != nil {
		t.Fatal(err)
	}
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		poller := zmq.NewPoller()
		poller.Add(sub, zmq.POLLIN)
		poller.Add(pub, zmq.POLLIN)
		listened := false
		for n := 1; ; {
			select {
			case <-done:
				if err := errors.Join(sub.Close(), pub.Close(), zctx.Term()); err != nil {
					t.Error(err)
				}
				return
			default:
			}
			if _, err := poller.Poll(50 * time.Millisecond); err != nil {
				continue // a signal
			}
			if b, err := pub.RecvBytes(zmq.DONTWAIT); err == nil && !listened && len(b) > 0 && b[0] == 1 {
				listened = true
				close(r.subscribed)
			}
			frames, err := sub.RecvMessageBytes(zmq.DONTWAIT)
			if err != nil || len(frames) != 3 {
				continue
			}
			r.mu.Lock()
			if n%50 == 0 {
				r.dropped++
			} else {
				r.passed = append(r.passed, binary.BigEndian.Uint64(frames[1]))
				r.batches = append(r.batches, frames[2])
				if _, err := pub.SendMessage(frames); err != nil {
					t.Error(err)
				}
			}
			r.mu.Unlock()
			n++
		}
	}()
	t.Cleanup(func() { close(done); <-ended })
	return r
}

// last is the number of the last message that was passed on, and how many there were of either kind.
func (r *relay) last() (seq uint64, passed, dropped int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.passed) > 0 {
		seq = r.passed[len(r.passed)-1]
	}
	return seq, len(r.passed), r.dropped
}

// slowIndex is what kv-index.md 3.3 to 3.5 make of the device of one rank, the obvious way. It
// knows each block by its path from the root.
type slowIndex struct {
	path map[uint64]string // of each block that the rank has, by the engine's hash
	held map[string]bool   // paths
	of   map[string]heldBlock
}

func (x *slowIndex) apply(e *wire.KVEvent) {
	switch e.Kind {
	case wire.KVClear:
		*x = newSlowIndex()
	case wire.KVRemove:
		for _, engine := range e.Engine {
			delete(x.held, x.path[engine])
			delete(x.path, engine)
		}
	case wire.KVStore:
		at, parent := "", (*uint64)(nil)
		if e.HasParent {
			var ok bool
			if at, ok = x.path[e.Parent]; !ok {
				return
			}
			parent = new(e.Parent)
		}
		for i, engine := range e.Engine {
			at += fmt.Sprintf("/%x", e.Local[i])
			x.path[engine], x.held[at], x.of[at] = at, true, heldBlock{e.Local[i], engine, parent}
			parent = new(engine)
		}
	}
}

func newSlowIndex() slowIndex {
	return slowIndex{map[uint64]string{}, map[string]bool{}, map[string]heldBlock{}}
}

// reachable are the blocks that have all before them, which is what a dump can tell.
func (x *slowIndex) reachable(r worker.Rank) holdings {
	h := holdings{}
	for path := range x.held {
		whole := true
		for at := strings.LastIndexByte(path, '/'); at > 0; at = strings.LastIndexByte(path[:at], '/') {
			whole = whole && x.held[path[:at]]
		}
		if whole {
			h.add(r, x.of[path])
		}
	}
	return h.sorted()
}

// TestIndexerLosses drops each 50th message between engine and indexer.
func TestIndexerLosses(t *testing.T) {
	for _, replay := range []bool{true, false} {
		t.Run(fmt.Sprintf("replay %v", replay), func(t *testing.T) {
			x := startIndexer(t)
			s := startSimulated(t, 1, 1, 16, "--kv-blocks", "60")
			way := startRelay(t, fmt.Sprintf("tcp://127.0.0.1:%d", s.base))
			more := ""
			if replay {
				more = fmt.Sprintf(`,"replay_endpoint":"tcp://127.0.0.1:%d"`, s.base+1)
			}
			x.post("/register", fmt.Sprintf(`{"instance_id":1,"endpoint":%q,"model_name":"m","block_size":16%s}`, way.endpoint, more), 201)
			<-way.subscribed
			rank := worker.Rank{Worker: 1}
			n := 0
			eventually(t, "five messages are dropped, and all that is passed on is applied", func() bool {
				s.send(0, prompt(n%4, n, 40))
				n++
				seq, _, dropped := way.last()
				a := x.listeners()[rank].Applied
				_, last := s.cache()
				return dropped >= 5 && a != nil && *a == seq && seq == last[rank]
			})
			seq, passed, dropped := way.last()
			lost := x.metric("spillway_kv_gap_batches_lost_total")
			degraded := x.listeners()[rank].Degraded
			if replay {
				x.agrees(s, "with replays")
				if got := x.metric(`spillway_kv_replays_total{outcome="complete"}`); lost != 0 || degraded || int(got) < dropped {
					t.Errorf("%v lost, degraded %v, %v replays, want none, false, at least %d", lost, degraded, got, dropped)
				}
				return
			}
			if want := int(seq) + 1 - passed; int(lost) != want || want < dropped || !degraded {
				t.Errorf("%v lost, degraded %v, want %d, at least %d, and true", lost, degraded, want, dropped)
			}
			if !strings.Contains(x.stderr.String(), "KV events are lost") {
				t.Errorf("the log does not tell of losses: %s", x.stderr.String())
			}
			slow := newSlowIndex()
			normalizer := wire.NewKVNormalizer(rank, 16)
			var batch wire.KVBatch
			for _, payload := range way.batches {
				if err := batch.Decode(payload); err != nil {
					t.Fatal(err)
				}
				normalizer.Each(&batch, slow.apply)
			}
			want := slow.reachable(rank)
			if got := x.dump(); !got.equal(want) {
				t.Errorf("the index holds %v\nwant %v", got, want)
			}
			if got := x.metric(`spillway_kv_index_entries{model="m",tenant="default"}`); int(got) != len(slow.path) {
				t.Errorf("%v entries, want %d", got, len(slow.path))
			}
			if cache, _ := s.cache(); want.equal(cache) {
				t.Error("the losses have made no difference, so the test has shown nothing")
			}
		})
	}
}
