package monitor_test

import (
	"bytes"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/kvhash"
	"spillway/kvindex"
	"spillway/monitor"
	"spillway/wire"
	"spillway/worker"
)

// dumped is a dump with one block of batchOf for each worker given, in a partition of that size.
func dumped(t *testing.T, model string, size uint32, ids ...worker.ID) string {
	t.Helper()
	var ranks []worker.Rank
	for _, id := range ids {
		ranks = append(ranks, worker.Rank{Worker: id})
	}
	return dumpedRanks(t, model, size, ranks...)
}

// dumpedRanks is dumped for any ranks. Those of one worker hold the same block.
func dumpedRanks(t *testing.T, model string, size uint32, ranks ...worker.Rank) string {
	t.Helper()
	var b bytes.Buffer
	d := wire.NewDumpWriter(&b)
	d.Partition(worker.Partition{Model: model, Tenant: "default"}, size)
	for _, r := range ranks {
		n := uint32(r.Worker)
		local := kvhash.AppendBlocks(nil, []uint32{n, n}, kvhash.Options{BlockSize: kvBlocks})
		d.Store(&wire.KVEvent{Kind: wire.KVStore, Rank: r, Engine: []uint64{1000 + uint64(n)}, Local: local})
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// TestKVRecovery asks peers in their order until one has answered well.
func TestKVRecovery(t *testing.T) {
	whole := dumped(t, "m", kvBlocks, 1, 2)
	for _, tt := range []struct {
		name   string
		status int // of the first peer; 0: it hangs
		body   string
		asks   bool     // the second
		held   []uint64 // by workers of the same number
	}{
		{"the first answers", 200, dumped(t, "m", kvBlocks, 1), false, []uint64{1}},
		{"nothing is an answer", 200, "{}", false, nil},
		{"the first fails", 500, whole, true, []uint64{1, 2}},
		{"the first is cut off", 200, dumped(t, "m", kvBlocks, 3)[:len(dumped(t, "m", kvBlocks, 3))-3], true, []uint64{1, 2, 3}},
		{"the first makes no sense", 200, "<html>", true, []uint64{1, 2}},
		{"the first hangs", 0, "", true, []uint64{1, 2}},
		{"another block size", 200, dumped(t, "m", kvBlocks+1, 1), false, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			first := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path != "/dump" || r.Header.Get("Accept-Encoding") != "gzip" {
					t.Errorf("the peer is asked for %s, encoding %q", r.URL, r.Header.Get("Accept-Encoding"))
				}
				if tt.status == 0 {
					<-r.Context().Done()
					return
				}
				w.WriteHeader(tt.status)
				_, _ = w.Write([]byte(tt.body))
			}))
			defer first.Close()
			asked := make(chan bool, 1)
			second := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				asked <- true
				_, _ = w.Write([]byte(whole))
			}))
			defer second.Close()
			cfg := patientKV()
			cfg.Peers, cfg.RecoveryDelay = []string{first.URL, second.URL}, time.Millisecond
			if tt.status == 0 {
				cfg.DumpTimeout = 500 * time.Millisecond
			}
			r := newKVRig(t, cfg)
			r.run()
			eventually(t, "ready", r.k.Ready)
			var held []uint64
			for id := range worker.ID(4) {
				held = append(held, r.held(worker.Rank{Worker: id})...)
			}
			if !slices.Equal(held, tt.held) {
				t.Errorf("held = %v, want %v\n%s", held, tt.held, r.log.String())
			}
			if (len(asked) == 1) != tt.asks {
				t.Errorf("the second was asked %d times, want %v", len(asked), tt.asks)
			}
			r.stop()
		})
	}
}

// Blocks for which there is no room are missing from what is recovered, which the log tells.
func TestKVRecoveredInPart(t *testing.T) {
	peer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(dumped(t, "m", kvBlocks, 1, 2, 3)))
	}))
	defer peer.Close()
	for _, room := range []int{1, 3} {
		cfg, index := patientKV(), kvindex.DefaultConfig()
		cfg.Peers, cfg.RecoveryDelay, index.MaxEntries = []string{peer.URL}, time.Millisecond, room
		r := &kvRig{t: t, reg: prometheus.NewRegistry(), ps: kvindex.NewPartitions(index)}
		r.k = monitor.NewKVListeners(cfg, r.ps, slog.New(slog.NewTextHandler(&r.log, nil)), r.reg)
		r.run()
		eventually(t, "ready", r.k.Ready)
		r.stop()
		if held, _ := r.ps.Entries(); held != room || strings.Contains(r.log.String(), "recovered in part") != (room < 3) {
			t.Errorf("with room for %d: %d entries, and the log is %s", room, held, r.log.String())
		}
	}
}

// What a peer knew of an engine's former process is void when a new one is heard from its first
// batch on. Of one that has told more before, it is all that is known.
func TestKVRecoveredBeforeRestart(t *testing.T) {
	for _, tt := range []struct {
		name string
		live []uint64
		held []uint64 // the recovered block is that of batch 1
	}{
		{"from the first batch", []uint64{0, 2}, []uint64{0, 2}},
		{"from a later one", []uint64{3, 4}, []uint64{1, 3, 4}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			peer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				_, _ = w.Write([]byte(dumped(t, "m", kvBlocks, 1)))
			}))
			defer peer.Close()
			cfg := patientKV()
			cfg.Peers, cfg.RecoveryDelay = []string{peer.URL}, time.Millisecond
			r := newKVRig(t, cfg)
			e := newKVEngine(t, "tcp://127.0.0.1:*", false)
			rank := worker.Rank{Worker: 1}
			if err := r.k.Register(monitor.KVSource{Rank: rank, Endpoint: e.endpoint, BlockSize: kvBlocks, Index: r.p.Index}); err != nil {
				t.Fatal(err)
			}
			r.run()
			eventually(t, "ready", r.k.Ready)
			e.subscribed()
			if got := r.held(rank); !slices.Equal(got, []uint64{1}) {
				t.Fatalf("recovered %v, want 1", got)
			}
			e.live(rank.DP, tt.live...)
			r.applied(tt.live[1])
			if got := r.held(rank); !slices.Equal(got, tt.held) {
				t.Errorf("held = %v, want %v", got, tt.held)
			}
			if n := r.metric("spillway_kv_restarts_total"); n != 0 {
				t.Errorf("%v restarts are counted, want 0", n)
			}
			r.stop()
		})
	}
}

// What was recovered of workers that never register is dropped in the end, and of ranks that a
// worker has no more; nobody's else is.
func TestKVStrangersAreDropped(t *testing.T) {
	peer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(dumpedRanks(t, "m", kvBlocks, worker.Rank{Worker: 1}, worker.Rank{Worker: 1, DP: 1}, worker.Rank{Worker: 2}, worker.Rank{Worker: 3, DP: 2})))
	}))
	defer peer.Close()
	cfg := patientKV()
	cfg.Peers, cfg.RecoveryDelay, cfg.StrangerAge = []string{peer.URL}, time.Millisecond, 300*time.Millisecond
	r := newKVRig(t, cfg)
	other, err := r.ps.Register(worker.Partition{Model: "other"}, kvBlocks)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []monitor.KVSource{
		{Rank: worker.Rank{Worker: 1}, Endpoint: "tcp://127.0.0.1:1", BlockSize: kvBlocks, Index: r.p.Index},
		{Rank: worker.Rank{Worker: 2}, Endpoint: "tcp://127.0.0.1:1", BlockSize: kvBlocks, Index: other.Index}, // which 2 has gone over to
	} {
		if err := r.k.Register(s); err != nil {
			t.Fatal(err)
		}
	}
	r.run()
	eventually(t, "ready", r.k.Ready)
	if n := r.p.Index.Entries(); n != 4 {
		t.Errorf("%d entries, want 4", n)
	}
	eventually(t, "three are dropped", func() bool { return r.p.Index.Entries() == 1 })
	if got := r.held(worker.Rank{Worker: 1}); len(got) != 1 {
		t.Errorf("the registered worker holds %v", got)
	}
	r.stop()
}

func TestKVConfigValidate(t *testing.T) {
	for _, tt := range []struct {
		change func(*monitor.KVConfig)
		want   string
	}{
		{func(*monitor.KVConfig) {}, ""},
		{func(c *monitor.KVConfig) { c.Peers = []string{"", " http://a:1/ ", "https://b"} }, ""},
		{func(c *monitor.KVConfig) { c.Peers = []string{"a:1"} }, "peers: "},
		{func(c *monitor.KVConfig) { c.Peers = []string{"tcp://a:1"} }, "peers: "},
		{func(c *monitor.KVConfig) { c.Peers = []string{"http://"} }, "peers: "},
		{func(c *monitor.KVConfig) { c.Peers = []string{"http://a/?x=1"} }, "peers: "},
		{func(c *monitor.KVConfig) { c.DumpTimeout = 0 }, "dump-timeout: "},
	} {
		cfg := monitor.DefaultKVConfig()
		tt.change(&cfg)
		if err := cfg.Validate(); tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.HasPrefix(err.Error(), tt.want)) {
			t.Errorf("Validate of %+v = %v, want %q", cfg, err, tt.want)
		}
	}
}
