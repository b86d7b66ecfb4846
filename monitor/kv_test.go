package monitor_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/kvhash"
	"spillway/kvindex"
	"spillway/monitor"
	"spillway/wire"
	"spillway/worker"
)

// kvRig is listeners with one partition.
type kvRig struct {
	t    *testing.T
	k    *monitor.KVListeners
	ps   *kvindex.Partitions
	p    *kvindex.Partition
	reg  *prometheus.Registry
	log  lockedBuffer
	stop func()
}

// lockedBuffer is a buffer for concurrent use.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// patientKV has no time-outs that a busy machine could run into.
func patientKV() monitor.KVConfig {
	cfg := monitor.DefaultKVConfig()
	cfg.ReplayIdle, cfg.ReplayTotal = time.Minute, time.Minute
	return cfg
}

func newKVRig(t *testing.T, cfg monitor.KVConfig) *kvRig {
	t.Helper()
	r := &kvRig{t: t, reg: prometheus.NewRegistry(), ps: kvindex.NewPartitions(kvindex.DefaultConfig())}
	var err error
	if r.p, err = r.ps.Register(worker.Partition{Model: "m", Tenant: "default"}, kvBlocks); err != nil {
		t.Fatal(err)
	}
	r.k = monitor.NewKVListeners(cfg, r.ps, slog.New(slog.NewTextHandler(&r.log, nil)), r.reg)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("listeners: %+v\nlog: %s", r.k.Statuses(), r.log.String())
		}
	})
	return r
}

func (r *kvRig) run() {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.k.Run(ctx) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			r.t.Errorf("Run = %v", err)
		}
	})
	r.t.Cleanup(r.stop)
}

var kvRank = worker.Rank{Worker: 7, DP: 1}

func (r *kvRig) register(e *kvEngine) {
	r.t.Helper()
	if err := r.k.Register(monitor.KVSource{Rank: kvRank, Endpoint: e.endpoint, Replay: e.replay, BlockSize: kvBlocks, Index: r.p.Index}); err != nil {
		r.t.Fatal(err)
	}
}

// hearing is a rig that runs and listens to an engine, which has heard of that.
func hearing(t *testing.T, e *kvEngine, cfg monitor.KVConfig) *kvRig {
	t.Helper()
	r := newKVRig(t, cfg)
	r.register(e)
	r.run()
	e.subscribed()
	return r
}

func (r *kvRig) status() monitor.KVStatus {
	r.t.Helper()
	all := r.k.Statuses()
	if len(all) != 1 {
		r.t.Fatalf("there are %d listeners, want 1", len(all))
	}
	return all[0]
}

func (r *kvRig) await(state monitor.KVState) {
	r.t.Helper()
	eventually(r.t, "the listener is "+string(state), func() bool { return r.status().State == state })
}

// applied waits until a batch is the last one applied.
func (r *kvRig) applied(seq uint64) {
	r.t.Helper()
	eventually(r.t, fmt.Sprintf("batch %d is applied", seq), func() bool {
		s := r.status()
		return s.Applied != nil && *s.Applied == seq && s.Waiting == 0
	})
}

// held lists the batches whose blocks a rank has.
func (r *kvRig) held(rank worker.Rank) []uint64 {
	all := []uint64{}
	var m kvindex.Matches
	for seq := range uint64(100) {
		r.p.Index.Query(kvhash.AppendBlocks(nil, []uint32{uint32(seq), uint32(seq)}, kvhash.Options{BlockSize: kvBlocks}), &m)
		if m.Rank(rank).Device > 0 {
			all = append(all, seq)
		}
	}
	return all
}

// metric is the value of a series, by name and the values of its labels in order of their names.
func (r *kvRig) metric(name string, labels ...string) float64 {
	r.t.Helper()
	families, err := r.reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			var values []string
			for _, l := range m.GetLabel() {
				values = append(values, l.GetValue())
			}
			if f.GetName() == name && slices.Equal(values, labels) {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	r.t.Fatalf("no series %s %v", name, labels)
	return 0
}

// TestKVSequences plays the table of kv-index.md 4.2, and more, over real sockets.
func TestKVSequences(t *testing.T) {
	end := func(from uint64) [][][]byte { return [][][]byte{newReply(math.MaxUint64, nil)} }
	send := func(reply func(uint64, []byte) [][]byte, dp uint32, seqs ...uint64) func(uint64) [][][]byte {
		return func(uint64) (all [][][]byte) {
			for _, s := range seqs {
				all = append(all, reply(s, batchOf(s, dp)))
			}
			return append(all, reply(math.MaxUint64, nil))
		}
	}
	for _, tt := range []struct {
		name     string
		live     []uint64
		answer   func(uint64) [][][]byte // nil: there is nobody to ask
		held     []uint64
		lost     float64
		asked    []uint64
		outcome  string // of replays
		degraded bool
	}{
		{"1", []uint64{0, 1, 2}, nil, []uint64{0, 1, 2}, 0, nil, "", false},
		{"2", []uint64{0, 1, 4}, nil, []uint64{0, 1, 4}, 2, nil, "", true},
		{"3", []uint64{0, 1, 4}, send(newReply, 1, 2, 3, 4), []uint64{0, 1, 2, 3, 4}, 0, []uint64{2}, "complete", false},
		{"3, the older form", []uint64{0, 1, 4}, send(oldReply, 1, 2, 3, 4), []uint64{0, 1, 2, 3, 4}, 0, []uint64{2}, "complete", false},
		{"4", []uint64{0, 1, 4, 5, 6}, send(newReply, 1, 2, 3, 4, 5), []uint64{0, 1, 2, 3, 4, 5, 6}, 0, []uint64{2}, "complete", false},
		{"5", []uint64{5}, send(oldReply, 1, 0, 1, 2, 3, 4, 5), []uint64{0, 1, 2, 3, 4, 5}, 0, []uint64{0}, "complete", false},
		{"6", []uint64{5}, send(newReply, 1, 3, 4, 5), []uint64{3, 4, 5}, 3, []uint64{0}, "complete", true},
		{"7", []uint64{5}, end, []uint64{5}, 5, []uint64{0}, "complete", true},
		{"8", []uint64{0, 3}, send(newReply, 1, 1), []uint64{0, 1, 3}, 1, []uint64{1}, "complete", true},
		{"9", []uint64{0, 4}, send(newReply, 1, 1, 3), []uint64{0, 1, 3, 4}, 1, []uint64{1}, "complete", true},
		{"11", []uint64{0, 1, 2, 0, 1}, nil, []uint64{0, 1}, 0, nil, "", false},
		{"12", []uint64{7, 8, 9, 3}, nil, []uint64{3}, 10, nil, "", true},
		{"13", []uint64{1, 2}, send(newReply, 1, 1), []uint64{1, 2}, 0, []uint64{0}, "complete", false},
		{"a replay of another rank", []uint64{0, 3}, send(newReply, 0, 1, 2, 3), []uint64{0, 3}, 2, []uint64{1}, "rank_mismatch", true},
		{"an answer of one frame", []uint64{0, 2}, func(uint64) [][][]byte { return [][][]byte{{[]byte("what?")}} }, []uint64{0, 2}, 1, []uint64{1}, "malformed", true},
		{"an answer of five frames", []uint64{0, 2}, func(uint64) [][][]byte { return [][][]byte{append(newReply(1, batchOf(1, 1)), nil)} }, []uint64{0, 2}, 1, []uint64{1}, "malformed", true},
		{"an answer that is numbered oddly", []uint64{0, 2}, func(uint64) [][][]byte { return [][][]byte{{{}, {1}, batchOf(1, 1)}} }, []uint64{0, 2}, 1, []uint64{1}, "malformed", true},
		{"an answer that cannot be read", []uint64{0, 2}, func(uint64) [][][]byte {
			return [][][]byte{newReply(1, []byte{0xc1}), newReply(math.MaxUint64, nil)}
		}, []uint64{0, 2}, 0, []uint64{1}, "complete", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := newKVEngine(t, "tcp://127.0.0.1:*", false)
			if tt.answer != nil {
				e.answer = tt.answer
				e.serve()
			}
			r := hearing(t, e, patientKV())
			e.live(kvRank.DP, tt.live...)
			r.applied(tt.live[len(tt.live)-1])
			if got := r.held(kvRank); !slices.Equal(got, tt.held) {
				t.Errorf("batches applied and not void = %v, want %v", got, tt.held)
			}
			if got := r.metric("spillway_kv_gap_batches_lost_total"); got != tt.lost {
				t.Errorf("lost = %v, want %v", got, tt.lost)
			}
			if got := e.requests(); !slices.Equal(got, tt.asked) {
				t.Errorf("asked from %v, want %v", got, tt.asked)
			}
			if tt.outcome != "" && r.metric("spillway_kv_replays_total", tt.outcome) != 1 {
				t.Errorf("no replay was %s", tt.outcome)
			}
			r.await(monitor.KVActive)
			if s := r.status(); s.Degraded != tt.degraded || s.State != monitor.KVActive || s.LastError != "" {
				t.Errorf("status = %+v, want active, degraded %v", s, tt.degraded)
			}
			if logged := strings.Contains(r.log.String(), "KV events are lost"); logged != (tt.lost > 0) {
				t.Errorf("the log is %s, with %v lost", r.log.String(), tt.lost)
			}
		})
	}
}

// Row 10: an engine that never answers costs a moment, and nothing of what comes meanwhile.
func TestKVReplayNeverAnswers(t *testing.T) {
	for _, tt := range []struct {
		name   string
		answer func(uint64) [][][]byte
		held   []uint64
	}{
		{"silence", func(uint64) [][][]byte { return nil }, []uint64{0, 3, 4}},
		{"silence before the end", func(uint64) [][][]byte { return [][][]byte{newReply(1, batchOf(1, 1))} }, []uint64{0, 1, 3, 4}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := newKVEngine(t, "tcp://127.0.0.1:*", false)
			e.answer = tt.answer
			e.serve()
			cfg := monitor.DefaultKVConfig()
			cfg.ReplayIdle = 300 * time.Millisecond
			r := hearing(t, e, cfg)
			e.live(1, 0, 3, 4)
			r.applied(4)
			if got := r.held(kvRank); !slices.Equal(got, tt.held) {
				t.Errorf("applied %v, want %v", got, tt.held)
			}
			if n := r.metric("spillway_kv_replays_total", "timeout"); n != 1 {
				t.Errorf("%v replays have timed out, want 1", n)
			}
			if !strings.Contains(r.log.String(), "outcome=timeout") {
				t.Errorf("the log does not tell: %s", r.log.String())
			}
		})
	}
}

// Nobody listens where a replay should come from: it is as if it never answered.
func TestKVReplayNobodyThere(t *testing.T) {
	e := newKVEngine(t, "tcp://127.0.0.1:*", false)
	e.replay = "tcp://127.0.0.1:1"
	cfg := monitor.DefaultKVConfig()
	cfg.ReplayIdle = 200 * time.Millisecond
	r := hearing(t, e, cfg)
	e.live(1, 2, 3)
	r.applied(3)
	if n := r.metric("spillway_kv_replays_total", "timeout"); n != 1 {
		t.Errorf("%v replays have timed out, want 1", n)
	}
}

// Where so many engines are asked for replays that a further one finds no place, the listener that
// waits for one goes on without when its time is over.
func TestKVReplayFindsNoPlace(t *testing.T) {
	e := newKVEngine(t, "tcp://127.0.0.1:*", false)
	e.serve()
	cfg := monitor.DefaultKVConfig()
	cfg.ReplayTotal = 300 * time.Millisecond
	r := newKVRig(t, cfg)
	r.k.OccupyReplays()
	r.register(e)
	r.run()
	e.subscribed()
	e.live(1, 0, 2)
	r.applied(2)
	if n := r.metric("spillway_kv_replays_total", "timeout"); n != 1 || len(e.requests()) != 0 {
		t.Errorf("%v replays have timed out, want 1, and %d were asked for, want none", n, len(e.requests()))
	}
}

// An answer without end is cut off by the bound on its whole.
func TestKVReplayWithoutEnd(t *testing.T) {
	e := newKVEngine(t, "tcp://127.0.0.1:*", false)
	e.answer = func(uint64) (all [][][]byte) {
		for range 50 {
			all = append(all, newReply(0, batchOf(0, 1)))
		}
		return all
	}
	e.serve()
	cfg := monitor.DefaultKVConfig()
	cfg.ReplayIdle, cfg.ReplayTotal = time.Minute, 300*time.Millisecond
	r := hearing(t, e, cfg)
	e.live(1, 2)
	r.applied(2)
	if n := r.metric("spillway_kv_replays_total", "timeout"); n != 1 {
		t.Errorf("%v replays have timed out, want 1", n)
	}
}

// A message that is none is counted and changes nothing; a payload that is none counts as a batch.
func TestKVGarbage(t *testing.T) {
	e := newKVEngine(t, "tcp://127.0.0.1:*", false)
	e.serve()
	r := hearing(t, e, patientKV())
	e.live(1, 0)
	seq := []byte{0, 0, 0, 0, 0, 0, 0, 9}
	e.raw([]byte("topic"))
	e.raw([]byte("topic"), seq)
	e.raw([]byte("topic"), seq, batchOf(9, 1), []byte("more"))
	e.raw([]byte("topic"), seq[1:], batchOf(9, 1))
	e.raw([]byte("topic"), bytes.Repeat([]byte{255}, 8), batchOf(9, 1))
	e.publish(1, []byte{0xc1}) // row 14
	e.publish(2, append(batchOf(2, 1), 0))
	e.live(1, 3)
	r.applied(3)
	if got := r.held(kvRank); !slices.Equal(got, []uint64{0, 3}) {
		t.Errorf("applied %v, want 0 and 3", got)
	}
	for kind, want := range map[string]float64{"frames": 5, "batch": 2} {
		if got := r.metric("spillway_kv_decode_errors_total", kind); got != want {
			t.Errorf("%v decode errors of kind %s, want %v", got, kind, want)
		}
	}
	if n := len(e.requests()); n != 0 {
		t.Errorf("%d replays were asked for, want none", n)
	}
}

// TestKVStates pauses and resumes, and has engines that are not there yet, go, come back and do
// not speak ZMQ.
func TestKVStates(t *testing.T) {
	ln := impostor(t, "127.0.0.1:0", func() {})
	endpoint := "tcp://" + ln.Addr().String()
	r := newKVRig(t, patientKV())
	if err := r.k.Register(monitor.KVSource{Rank: kvRank, Endpoint: endpoint, BlockSize: kvBlocks, Index: r.p.Index}); err != nil {
		t.Fatal(err)
	}
	r.run()
	r.await(monitor.KVFailed)
	if s := r.status(); !strings.Contains(s.LastError, "ZMQ") {
		t.Errorf("last error = %q", s.LastError)
	}
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	r.await(monitor.KVPending) // nobody is there
	e := newKVEngine(t, endpoint, false)
	e.subscribed()
	r.await(monitor.KVActive)
	if s := r.status(); s.LastError != "" {
		t.Errorf("last error of an active listener = %q", s.LastError)
	}
	e.live(1, 0, 1)
	r.applied(1)
	if err := r.k.Resume(kvRank); !errors.Is(err, monitor.ErrKVState) {
		t.Errorf("Resume of an active listener = %v, want ErrKVState", err)
	}
	if err := r.k.Pause(kvRank); err != nil {
		t.Fatal(err)
	}
	if err := r.k.Pause(kvRank); !errors.Is(err, monitor.ErrKVState) {
		t.Errorf("Pause of a paused listener = %v, want ErrKVState", err)
	}
	r.await(monitor.KVPaused)
	eventually(t, "the subscription ends", func() bool {
		b, err := e.pub.RecvBytes(1) // DONTWAIT
		return err == nil && len(b) > 0 && b[0] == 0
	})
	e.live(1, 2)
	if err := r.k.Resume(kvRank); err != nil {
		t.Fatal(err)
	}
	e.subscribed()
	e.live(1, 3)
	r.applied(3)
	if got := r.held(kvRank); !slices.Equal(got, []uint64{0, 1, 3}) || r.metric("spillway_kv_gap_batches_lost_total") != 1 {
		t.Errorf("after a pause: %v, want 0, 1, 3 and one lost", got)
	}
	e.stop() // as if it were killed
	r.await(monitor.KVPending)
	e = newKVEngine(t, endpoint, false)
	e.subscribed()
	e.live(1, 0)
	r.applied(0)
	if got := r.held(kvRank); !slices.Equal(got, []uint64{0}) || r.metric("spillway_kv_restarts_total") != 1 {
		t.Errorf("after the engine's restart: %v, want 0 alone", got)
	}
	r.await(monitor.KVActive)
	for state, want := range map[monitor.KVState]float64{monitor.KVActive: 1, monitor.KVFailed: 0, monitor.KVPending: 0, monitor.KVPaused: 0} {
		if got := r.metric("spillway_kv_listeners", string(state)); got != want {
			t.Errorf("spillway_kv_listeners of %s = %v, want %v", state, got, want)
		}
	}
	r.stop()
}

// An endpoint with * is bound, and the engine connects.
func TestKVBinds(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := free.Addr().(*net.TCPAddr).Port
	if err := free.Close(); err != nil {
		t.Fatal(err)
	}
	r := newKVRig(t, patientKV())
	if err := r.k.Register(monitor.KVSource{Rank: kvRank, Endpoint: fmt.Sprintf("tcp://*:%d", port), BlockSize: kvBlocks, Index: r.p.Index}); err != nil {
		t.Fatal(err)
	}
	r.run()
	for range 2 { // the second time after the engine is gone
		e := newKVEngine(t, fmt.Sprintf("tcp://127.0.0.1:%d", port), true)
		e.subscribed()
		r.await(monitor.KVActive)
		e.live(1, 0, 1)
		r.applied(1)
		e.stop()
		r.await(monitor.KVPending)
	}
	if n := r.metric("spillway_kv_restarts_total"); n != 1 {
		t.Errorf("%v restarts, want 1", n)
	}
}

// TestKVRegistration: what is registered again begins anew; what is unregistered is forgotten,
// ranks that only its events named included.
func TestKVRegistration(t *testing.T) {
	e := newKVEngine(t, "tcp://127.0.0.1:*", false)
	r := newKVRig(t, patientKV())
	r.register(e)
	source := monitor.KVSource{Rank: kvRank, Endpoint: e.endpoint, BlockSize: kvBlocks, Index: r.p.Index}
	if err := r.k.Register(source); !errors.Is(err, monitor.ErrKVRegistered) {
		t.Errorf("registered again = %v, want ErrKVRegistered", err)
	}
	for _, bad := range []monitor.KVSource{
		{Rank: worker.Rank{Worker: 8}, Endpoint: "", Index: r.p.Index}, {Rank: worker.Rank{Worker: 8}, Endpoint: "tcp://h", Index: r.p.Index},
		{Rank: worker.Rank{Worker: 8}, Endpoint: "tcp://h:1", Replay: "h", Index: r.p.Index}, {Rank: worker.Rank{Worker: 8}, Endpoint: "tcp://h:1", Replay: "tcp://*:1", Index: r.p.Index},
	} {
		if err := r.k.Register(bad); !errors.Is(err, monitor.ErrKVEndpoint) {
			t.Errorf("Register(%+v) = %v, want ErrKVEndpoint", bad, err)
		}
	}
	r.run()
	e.subscribed()
	e.live(1, 0)
	e.live(5, 1) // a rank that nobody registered
	r.applied(1)
	if got := r.status().Strangers; !slices.Equal(got, []uint32{5}) {
		t.Errorf("ranks that were not registered = %v, want 5", got)
	}
	stranger := worker.Rank{Worker: 7, DP: 5}
	if got := r.held(stranger); !slices.Equal(got, []uint64{1}) {
		t.Errorf("rank 5 holds %v, want 1", got)
	}
	other := source
	other.Rank.DP, other.Endpoint = 2, "tcp://127.0.0.1:1"
	if err := r.k.Register(other); err != nil {
		t.Fatal(err)
	}
	if err := r.k.Unregister(other.Rank); err != nil {
		t.Fatal(err)
	}
	if got := r.held(stranger); len(got) != 1 {
		t.Errorf("after another rank has gone rank 5 holds %v", got)
	}
	if err := r.k.Unregister(kvRank); err != nil {
		t.Fatal(err)
	}
	if n := r.p.Index.Entries(); n != 0 {
		t.Errorf("%d entries are left of a worker that is gone", n)
	}
	for _, err := range []error{r.k.Unregister(kvRank), r.k.UnregisterWorker(7), r.k.Pause(kvRank), r.k.Resume(kvRank)} {
		if !errors.Is(err, monitor.ErrKVUnknown) {
			t.Errorf("of a worker that is gone: %v, want ErrKVUnknown", err)
		}
	}
	e.serve()
	e.ring[0], e.ring[1] = batchOf(0, 1), batchOf(1, 1)
	r.register(e)
	e.subscribed()
	e.live(1, 2)
	r.applied(2)
	if got := r.held(kvRank); !slices.Equal(got, []uint64{0, 1, 2}) {
		t.Errorf("registered anew it holds %v, want all that the engine remembers", got)
	}
	if err := r.k.UnregisterWorker(7); err != nil || r.p.Index.Entries() != 0 {
		t.Errorf("UnregisterWorker = %v, and %d entries are left", err, r.p.Index.Entries())
	}
	if n := len(r.k.Statuses()); n != 0 {
		t.Errorf("%d listeners are left", n)
	}
}

// A restart voids the blocks of all ranks that the publisher has spoken for.
func TestKVRestartOfManyRanks(t *testing.T) {
	e := newKVEngine(t, "tcp://127.0.0.1:*", false)
	r := hearing(t, e, patientKV())
	e.live(5, 0)
	e.live(6, 1)
	e.live(1, 2, 0)
	eventually(t, "the restart is seen", func() bool { return r.metric("spillway_kv_restarts_total") == 1 })
	r.applied(0)
	eventually(t, "only the new process's block is left", func() bool { return r.p.Index.Entries() == 1 })
	if got := r.held(kvRank); !slices.Equal(got, []uint64{0}) {
		t.Errorf("held = %v, want 0", got)
	}
}

// Ranks that only one publisher speaks for go with it, while the worker has others.
func TestKVUnregisteredSpokesman(t *testing.T) {
	r := newKVRig(t, patientKV())
	engines := map[uint32]*kvEngine{}
	for _, dp := range []uint32{1, 2, 3} {
		e := newKVEngine(t, "tcp://127.0.0.1:*", false)
		if err := r.k.Register(monitor.KVSource{Rank: worker.Rank{Worker: 7, DP: dp}, Endpoint: e.endpoint, BlockSize: kvBlocks, Index: r.p.Index}); err != nil {
			t.Fatal(err)
		}
		engines[dp] = e
	}
	r.run()
	for _, e := range engines {
		e.subscribed()
	}
	for seq, dp := range []uint32{1, 2, 5, 6} { // 2 has a publisher of its own
		engines[1].live(dp, uint64(seq))
	}
	engines[3].live(6, 0)
	eventually(t, "all are applied", func() bool {
		all := r.k.Statuses()
		return all[0].Applied != nil && *all[0].Applied == 3 && all[2].Applied != nil && *all[2].Applied == 0
	})
	if err := r.k.Unregister(worker.Rank{Worker: 7, DP: 1}); err != nil {
		t.Fatal(err)
	}
	for dp, want := range map[uint32][]uint64{1: {}, 2: {1}, 5: {}, 6: {0, 3}} {
		if got := r.held(worker.Rank{Worker: 7, DP: dp}); !slices.Equal(got, want) {
			t.Errorf("rank %d holds %v, want %v", dp, got, want)
		}
	}
	r.stop()
}

// Two tell of events by type and status.
func TestKVEventCounters(t *testing.T) {
	e := newKVEngine(t, "tcp://127.0.0.1:*", false)
	cfg := patientKV()
	cfg.ComponentMetrics = true
	r := hearing(t, e, cfg)
	store := wire.KVPublished{Kind: wire.KVStore, Hashes: []uint64{11}, Tokens: []uint32{1, 1}, BlockSize: kvBlocks}
	orphan := wire.KVPublished{Kind: wire.KVStore, Hashes: []uint64{12}, HasParent: true, Parent: 99, Tokens: []uint32{2, 2}, BlockSize: kvBlocks}
	large := wire.KVPublished{Kind: wire.KVStore, Hashes: []uint64{13}, Tokens: []uint32{1, 1, 1}, BlockSize: 3}
	placeholder := wire.KVPublished{Kind: wire.KVStore, Hashes: []uint64{14}}
	e.publish(0, wire.AppendKVBatch(nil, wire.KVMaps, 1, 1, []wire.KVPublished{
		store, store, orphan, large, placeholder, {Kind: wire.KVRemove, Hashes: []uint64{11, 98}}, {Kind: wire.KVRemove, Hashes: nil}, {Kind: wire.KVClear},
	}))
	r.applied(0)
	for _, tt := range []struct {
		name   string
		labels []string
		want   float64
	}{
		{"spillway_kv_events_total", []string{"stored", "parent_block_not_found"}, 1},
		{"spillway_kv_events_total", []string{"removed", "block_not_found"}, 1},
		{"spillway_kv_events_total", []string{"removed", "ok"}, 1},
		{"spillway_kv_events_total", []string{"cleared", "ok"}, 1},
		{"spillway_kv_events_total", []string{"stored", "full"}, 0},
		{"dynamo_component_kv_cache_events_applied", []string{"stored", "parent_block_not_found"}, 1},
		{"dynamo_component_kv_cache_events_applied", []string{"cleared", "ok"}, 1},
		{"spillway_kv_warnings_total", []string{"duplicate_store"}, 1},
		{"spillway_kv_filtered_total", []string{"block_size_mismatch"}, 1},
		{"spillway_kv_filtered_total", []string{"placeholder"}, 1},
		{"spillway_kv_filtered_total", []string{"unknown_medium"}, 0},
		{"spillway_kv_batches_received_total", nil, 1},
		{"spillway_kv_lag_batches", []string{"1", "7"}, 0},
		{"spillway_kv_degraded", []string{"1", "7"}, 0},
		{"spillway_kv_index_entries", []string{"m", "default"}, 0},
	} {
		if got := r.metric(tt.name, tt.labels...); got != tt.want {
			t.Errorf("%s%v = %v, want %v", tt.name, tt.labels, got, tt.want)
		}
	}
	if got := r.metric("spillway_kv_events_total", "stored", "ok"); got < 2 {
		t.Errorf("%v stores were ok, want at least 2", got)
	}
	if log := r.log.String(); strings.Count(log, "reason=block_size_mismatch") != 1 || strings.Contains(log, "placeholder") {
		t.Errorf("the log has no warning of a wrong block size, or one too many: %s", log)
	}
}

// Blocks of one token are legal, and worth a word.
func TestKVBlocksOfOneToken(t *testing.T) {
	r := newKVRig(t, patientKV())
	for dp, size := range []uint32{2, 1} {
		err := r.k.Register(monitor.KVSource{Rank: worker.Rank{Worker: 7, DP: uint32(dp)}, Endpoint: "tcp://127.0.0.1:1", BlockSize: size, Index: r.p.Index})
		if err != nil {
			t.Fatal(err)
		}
		if told := strings.Contains(r.log.String(), "blocks of one token"); told != (size == 1) {
			t.Errorf("block size %d: the log is %q", size, r.log.String())
		}
	}
}

// A publisher that has never sent anything is told of, once.
func TestKVSilence(t *testing.T) {
	e := newKVEngine(t, "tcp://127.0.0.1:*", false)
	cfg := patientKV()
	cfg.SilentAfter = 100 * time.Millisecond
	r := newKVRig(t, cfg)
	r.register(e)
	r.run()
	const told = "no KV event has come from a worker"
	eventually(t, "a warning", func() bool { return strings.Contains(r.log.String(), told) })
	e.subscribed()
	e.live(1, 0)
	r.applied(0)
	if n := strings.Count(r.log.String(), told); n != 1 {
		t.Errorf("%d warnings, want 1", n)
	}
}

// Until recovery is over nothing is applied, and nothing that came is lost.
func TestKVGate(t *testing.T) {
	asked, release := make(chan struct{}), make(chan struct{})
	peer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		close(asked)
		select {
		case <-release:
		case <-req.Context().Done():
		}
		_, _ = w.Write([]byte("{}"))
	}))
	defer peer.Close()
	cfg := patientKV()
	cfg.Peers, cfg.RecoveryDelay = []string{" ", "http://127.0.0.1:1/", " " + peer.URL + "/ "}, time.Millisecond
	e := newKVEngine(t, "tcp://127.0.0.1:*", false)
	r := newKVRig(t, cfg)
	r.register(e)
	r.run()
	<-asked
	e.subscribed()
	e.live(1, 0, 1, 2)
	eventually(t, "three batches wait", func() bool { return r.status().Waiting == 3 })
	if s := r.status(); s.Applied != nil || s.State != monitor.KVPending || r.k.Ready() || r.p.Index.Entries() != 0 {
		t.Errorf("before recovery is over: %+v, ready %v, %d entries", s, r.k.Ready(), r.p.Index.Entries())
	}
	close(release)
	eventually(t, "ready", r.k.Ready)
	if got := r.held(kvRank); !slices.Equal(got, []uint64{0, 1, 2}) {
		t.Errorf("when ready it holds %v, want 0, 1, 2", got)
	}
	r.await(monitor.KVActive)
	r.stop()
}

// Flush returns when what came before is applied, also while listeners end.
func TestKVFlush(t *testing.T) {
	e := newKVEngine(t, "tcp://127.0.0.1:*", false)
	r := hearing(t, e, patientKV())
	e.live(1, 0, 1)
	eventually(t, "two have come", func() bool { return r.metric("spillway_kv_batches_received_total") == 2 })
	if err := r.k.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := r.held(kvRank); len(got) != 2 {
		t.Errorf("after Flush it holds %v, want 0 and 1", got)
	}
	if err := r.k.UnregisterWorker(7); err != nil {
		t.Fatal(err)
	}
	if err := r.k.Flush(t.Context()); err != nil {
		t.Errorf("Flush without listeners = %v", err)
	}
}

// A listener that comes at any moment after the start is seen to.
func TestKVRegisteredLater(t *testing.T) {
	e := newKVEngine(t, "tcp://127.0.0.1:*", false)
	r := newKVRig(t, patientKV())
	r.run()
	for wait := range 12 {
		time.Sleep(time.Duration(wait) * 20 * time.Millisecond) // no bound: moments between two looks, of which none must matter
		r.register(e)
		r.await(monitor.KVActive)
		if err := r.k.UnregisterWorker(kvRank.Worker); err != nil {
			t.Fatal(err)
		}
	}
	r.stop()
}
