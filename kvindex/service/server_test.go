package service_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"spillway/httperr"
	"spillway/kvhash"
	"spillway/kvindex"
	"spillway/kvindex/service"
	"spillway/wire"
	"spillway/worker"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		http.DefaultClient.CloseIdleConnections()
		os.Exit(code)
	}))
}

// fakeListeners stand in for the monitor's.
type fakeListeners struct {
	mu     sync.Mutex
	ps     *kvindex.Partitions
	index  map[worker.ID]*kvindex.Partition
	status map[worker.Rank]service.Listener
	refuse error
	ready  bool
}

func (f *fakeListeners) link() service.Link {
	return service.Link{
		Register: func(p *kvindex.Partition, r worker.Rank, endpoint, replay string) error {
			f.mu.Lock()
			defer f.mu.Unlock()
			if f.refuse != nil {
				return f.refuse
			}
			f.index[r.Worker] = p
			f.status[r] = service.Listener{Rank: r, Endpoint: endpoint, Status: "pending"}
			return nil
		},
		Unregister: func(r worker.Rank) {
			f.mu.Lock()
			defer f.mu.Unlock()
			delete(f.status, r)
			f.index[r.Worker].Index.RemoveRank(r)
		},
		UnregisterWorker: func(id worker.ID) {
			f.mu.Lock()
			defer f.mu.Unlock()
			maps.DeleteFunc(f.status, func(r worker.Rank, _ service.Listener) bool { return r.Worker == id })
			f.index[id].Index.RemoveWorker(id)
		},
		Listeners: func() []service.Listener {
			f.mu.Lock()
			defer f.mu.Unlock()
			return slices.SortedFunc(maps.Values(f.status), func(a, b service.Listener) int {
				return 10*int(int64(a.Rank.Worker)-int64(b.Rank.Worker)) + int(a.Rank.DP) - int(b.Rank.DP)
			})
		},
		Ready: func() bool { f.mu.Lock(); defer f.mu.Unlock(); return f.ready },
		CheckPeer: func(base string) error {
			if !strings.HasPrefix(base, "http://") {
				return errors.New("no")
			}
			return nil
		},
		Peers: []string{"http://given"},
	}
}

// running is a server on a free port.
type running struct {
	t   testing.TB
	url string
	f   *fakeListeners
}

func start(t testing.TB, cfg service.Config) *running {
	t.Helper()
	f := &fakeListeners{index: map[worker.ID]*kvindex.Partition{}, status: map[worker.Rank]service.Listener{}, ready: true}
	f.ps = kvindex.NewPartitions(kvindex.DefaultConfig())
	s := service.New(cfg, f.ps, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	if err := s.Join(f.link()); err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx, ln) }()
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run = %v", err)
		}
	})
	return &running{t, "http://" + ln.Addr().String(), f}
}

func (r *running) do(method, path, body string) (int, string) {
	r.t.Helper()
	req, err := http.NewRequest(method, r.url+path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return res.StatusCode, string(text)
}

// store puts blocks with these local hashes into the index, with engine hashes 100 more.
func (r *running) store(model string, rank worker.Rank, tier worker.Tier, parent kvindex.Parent, locals ...uint64) {
	r.t.Helper()
	var engine []uint64
	for _, l := range locals {
		engine = append(engine, 100+l)
	}
	p := r.f.ps.Partition(worker.Partition{Model: model, Tenant: "default"})
	if status := p.Index.Store(rank, tier, parent, engine, locals); status != kvindex.Stored {
		r.t.Fatalf("Store = %v", status)
	}
}

const seven = `{"instance_id":7,"endpoint":"tcp://gpu:5557","model_name":"m","block_size":16}`

// TestRoutes goes through every route and status, one call after the other on one server.
func TestRoutes(t *testing.T) {
	r := start(t, service.DefaultConfig())
	post, get := "POST", "GET"
	replaced := func(old, repl string) string {
		if !strings.Contains(seven, old) {
			t.Fatalf("%s has no %s", seven, old)
		}
		return strings.Replace(seven, old, repl, 1)
	}
	ok := `{"status":"ok"}`
	for _, tt := range []struct {
		method, path, body string
		status             int
		want               string // "": anything; otherwise the whole answer, or with ~ a part of it
	}{
		{get, "/health", "", 200, ok},
		{get, "/ready", "", 200, ok},
		{"HEAD", "/health", "", 200, ""},
		{get, "/metrics", "", 200, "~spillway_indexer_requests_total"},
		{get, "/nothing", "", 404, "~route not found"},
		{get, "/health/", "", 404, "~route not found"},
		{get, "/h%65alth", "", 404, ""},
		{post, "/health", "{}", 405, "~not allowed"},
		{get, "/register", "", 405, "~not allowed"},
		{post, "/register", "", 415, "~application/json"},
		{post, "/register", "{", 400, "~ends too early"},
		{post, "/register", "[]", 422, "~an object"},
		{post, "/register", strings.Repeat(" ", 8<<20) + "{}", 413, "~longer than"},
		{post, "/reopen_logs", "", 200, ok},

		{get, "/workers", "", 200, `[]`},
		{get, "/dump", "", 200, `{}`},
		{post, "/query", `{"model_name":"m","token_ids":[1]}`, 404, "~model \\\"m\\\", tenant \\\"default\\\""},
		{post, "/query_by_hash", `{"model_name":"m","block_hashes":[1]}`, 404, "~no worker is registered"},
		{post, "/unregister", `{"instance_id":7,"model_name":"m"}`, 404, "~7"},

		{post, "/register", replaced(`"endpoint":"tcp://gpu:5557",`, ""), 422, "~endpoint"},
		{post, "/register", replaced(`7,`, `"7",`), 422, "~instance_id"},
		{post, "/register", replaced(`7,`, `-1,`), 422, "~instance_id"},
		{post, "/register", replaced(`16`, `0`), 400, "~block_size"},
		{post, "/register", replaced(`16`, `1048577`), 400, "~block_size"},
		{post, "/register", replaced(`16`, `16,"dp_rank":4294967295`), 400, "~dp_rank"},
		{post, "/register", replaced(`tcp://gpu:5557`, `tcp://gpu`), 400, "~missing TCP port"},
		{post, "/register", replaced(`16`, `16,"replay_endpoint":"gpu:1"`), 400, "~missing scheme"},
		{get, "/workers", "", 200, `[]`},
		{post, "/register", seven, 201, ok},
		{post, "/register", seven, 409, "~registered already"},
		{post, "/register", replaced(`16`, `16,"dp_rank":1,"replay_endpoint":"tcp://gpu:5600","additional_salt":"x"`), 201, ok},
		{post, "/register", replaced(`16`, `16,"dp_rank":1`), 409, "~dp_rank 1"},
		{post, "/register", replaced(`16`, `16,"dp_rank":2,"tenant_id":"t"`), 409, "~is registered for"},
		{post, "/register", replaced(`16`, `16,"dp_rank":2,"routing_group":"t"`), 409, "~is registered for"},
		{post, "/register", replaced(`7,`, `8,"dp_rank":null,"tenant_id":null,"replay_endpoint":null,"routing_group":null,`), 201, ok},
		{post, "/register", strings.Replace(replaced(`7,`, `9,`), "16", "32", 1), 409, "~existing=16 requested=32"},
		{post, "/register", replaced(`7,`, `18446744073709551615,"tenant_id":"t",`), 201, ok},

		{post, "/query", `{"model_name":"m","token_ids":[1]}`, 200, `{"scores":{},"frequencies":[],"instances":{}}`},
		{post, "/query", `{"model_name":"m","token_ids":[],"lora_name":null,"cache_salt":null,"tenant_id":null}`, 200, `{"scores":{},"frequencies":[],"instances":{}}`},
		{post, "/query", `{"model_name":"m","token_ids":[1],"tenant_id":"u"}`, 404, ""},
		{post, "/query", `{"model_name":"m","token_ids":[1],"routing_group":"t"}`, 200, ""},
		{post, "/query", `{"model_name":"m","token_ids":[4294967296]}`, 422, "~token_ids[0]"},
		{post, "/query", `{"model_name":"m","token_ids":[7,-1]}`, 422, "~token_ids[1]"},
		{post, "/query", `{"model_name":"m","token_ids":[1.5]}`, 422, "~token_ids[0]"},
		{post, "/query", `{"model_name":"m"}`, 422, "~token_ids"},
		{post, "/query", `{"token_ids":[1]}`, 422, "~model_name"},
		{post, "/query_by_hash", `{"model_name":"m","block_hashes":[-9223372036854775808,9223372036854775807],"cache_salt":null}`, 200, ""},
		{post, "/query_by_hash", `{"model_name":"m","block_hashes":[9223372036854775808]}`, 422, "~block_hashes[0]"},
		{post, "/query_by_hash", `{"model_name":"m","block_hashes":[],"cache_salt":""}`, 400, "~cache_salt"},

		{get, "/workers?model_name=m&tenant_id=t", "", 200, `[{"instance_id":18446744073709551615,"source":"zmq","status":"pending","model_name":"m","tenant_id":"t","block_size":16,` +
			`"endpoints":{"0":"tcp://gpu:5557"},"listeners":{"0":{"endpoint":"tcp://gpu:5557","status":"pending","degraded":false}},"unregistered_ranks":[]}]`},
		{get, "/workers?routing_group=t", "", 200, "~18446744073709551615"},
		{get, "/workers?model_name=x", "", 200, "[]"},
		{get, "/workers?model_name=m&model_name=m", "", 400, "~twice"},
		{get, "/workers?tenant_id=default", "", 200, `~"endpoints":{"0":"tcp://gpu:5557","1":"tcp://gpu:5557"}`},

		{post, "/unregister", `{"instance_id":7,"model_name":"x"}`, 404, ""},
		{post, "/unregister", `{"instance_id":7,"model_name":"m","tenant_id":"t"}`, 404, ""},
		{post, "/unregister", `{"instance_id":7,"model_name":"m","tenant_id":"default","dp_rank":5}`, 404, "~dp_rank"},
		{post, "/unregister", `{"instance_id":7,"model_name":"m","tenant_id":"default","dp_rank":1}`, 200, ok},
		{get, "/workers?tenant_id=default", "", 200, `~"endpoints":{"0":"tcp://gpu:5557"}`},
		{post, "/unregister", `{"instance_id":7,"model_name":"m","dp_rank":5}`, 200, ok}, // without a tenant the rank does not count
		{post, "/unregister", `{"instance_id":8,"model_name":"m","tenant_id":"default","dp_rank":0}`, 200, ok},
		{post, "/query", `{"model_name":"m","token_ids":[1]}`, 404, ""},
		{post, "/register", strings.Replace(replaced(`7,`, `9,`), "16", "32", 1), 201, ok}, // nobody needs blocks of 16 any more
		{post, "/unregister", `{"instance_id":18446744073709551615,"model_name":"m"}`, 200, ok},

		{get, "/peers", "", 200, `["http://given"]`},
		{post, "/register_peer", `{"url":"tcp://x"}`, 400, "~url"},
		{post, "/register_peer", `{}`, 422, "~url"},
		{post, "/register_peer", `{"url":" http://a:1/ "}`, 201, ok},
		{post, "/register_peer", `{"url":"http://a:1"}`, 201, ok},
		{get, "/peers", "", 200, `["http://given","http://a:1"]`},
		{post, "/deregister_peer", `{"url":"http://a:1/"}`, 200, ok},
		{post, "/deregister_peer", `{"url":"http://a:1"}`, 404, "~no peer"},
		{get, "/peers", "", 200, `["http://given"]`},
	} {
		status, got := r.do(tt.method, tt.path, tt.body)
		part, isPart := strings.CutPrefix(tt.want, "~")
		if status != tt.status || isPart && !strings.Contains(got, part) || !isPart && tt.want != "" && got != tt.want {
			t.Errorf("%s %s %.200s = %d %s, want %d %s", tt.method, tt.path, tt.body, status, got, tt.status, tt.want)
		}
		if status != 404 && tt.method != "HEAD" && tt.path != "/metrics" && !json.Valid([]byte(got)) {
			t.Errorf("%s %s: %s is no JSON", tt.method, tt.path, got)
		}
	}
	r.f.mu.Lock()
	r.f.ready, r.f.refuse = false, httperr.New(http.StatusConflict, "too many")
	r.f.mu.Unlock()
	if status, got := r.do(get, "/ready", ""); status != 503 || !strings.Contains(got, "recovered") {
		t.Errorf("/ready = %d %s, want 503", status, got)
	}
	if status, _ := r.do(get, "/health", ""); status != 200 {
		t.Errorf("/health = %d before recovery is over, want 200", status)
	}
	if status, got := r.do(post, "/register", strings.Replace(seven, "16", "32", 1)); status != 409 || !strings.Contains(got, "too many") {
		t.Errorf("/register that the listeners refuse = %d %s, want 409", status, got)
	}
	if _, got := r.do(get, "/workers?model_name=m", ""); strings.Contains(got, `"instance_id":7,`) {
		t.Errorf("a worker that was refused is listed: %s", got)
	}
}

// A worker that is refused does not cost what was recovered for its partition, nor does it fix the
// size of blocks.
func TestRefusedAfterRecovery(t *testing.T) {
	r := start(t, service.DefaultConfig())
	if _, err := r.f.ps.Recover(worker.Partition{Model: "m", Tenant: "default"}, 16); err != nil {
		t.Fatal(err)
	}
	r.store("m", worker.Rank{Worker: 7}, worker.Device, kvindex.Parent{}, 1, 2)
	r.f.mu.Lock()
	r.f.refuse = httperr.New(http.StatusBadRequest, "no")
	r.f.mu.Unlock()
	if status, got := r.do("POST", "/register", seven); status != 400 {
		t.Fatalf("/register = %d %s, want 400", status, got)
	}
	if _, got := r.do("POST", "/query_by_hash", `{"model_name":"m","block_hashes":[1,2]}`); !strings.Contains(got, `"longest_matched":32`) {
		t.Errorf("what was recovered is gone: %s", got)
	}
	r.f.mu.Lock()
	r.f.refuse = nil
	r.f.mu.Unlock()
	if status, got := r.do("POST", "/register", strings.Replace(seven, "16", "32", 1)); status != 201 {
		t.Errorf("/register with other blocks = %d %s, want 201", status, got)
	}
}

// TestQuery is the examples of kv-index.md: 24, 25, 17, and the one end to end.
func TestQuery(t *testing.T) {
	one, two := worker.Rank{Worker: 1}, worker.Rank{Worker: 1, DP: 1}
	root, after := kvindex.Parent{}, kvindex.After
	for _, tt := range []struct {
		name  string
		fill  func(r *running)
		query string
		want  string
	}{
		{"25", func(r *running) {
			r.store("m", one, worker.Device, root, 1, 2, 3, 4)
			r.store("m", two, worker.Device, root, 1, 2)
			r.store("m", one, worker.HostPinned, after(104), 5, 6)
			r.store("m", one, worker.Disk, after(106), 7, 8)
		}, "1,2,3,4,5,6,7,8", `{"scores":{"1":{"0":64,"1":32}},"frequencies":[],"instances":{"1":{"longest_matched":128,"gpu":64,"dp":{"0":64,"1":32},"cpu":96,"disk":128}}}`},
		{"24", func(r *running) {
			r.store("m", one, worker.Device, root, 1, 2, 3, 4)
			r.store("m", two, worker.Device, root, 1, 2)
			r.store("m", two, worker.HostPinned, after(102), 3, 4, 5, 6)
		}, "1,2,3,4,5,6,7,8", `{"scores":{"1":{"0":64,"1":32}},"frequencies":[],"instances":{"1":{"longest_matched":96,"gpu":64,"dp":{"0":64,"1":32},"cpu":96,"disk":96}}}`},
		{"17", func(r *running) {
			r.store("m", one, worker.HostPinned, root, 1, 2, 3)
			r.store("m", worker.Rank{Worker: 9, DP: 3}, worker.Device, root, 1)
		}, "1,2,3", `{"scores":{"9":{"3":16}},"frequencies":[],"instances":{"1":{"longest_matched":48,"gpu":0,"dp":{"0":0},"cpu":48,"disk":48},` +
			`"9":{"longest_matched":16,"gpu":16,"dp":{"3":16},"cpu":16,"disk":16}}}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := start(t, service.DefaultConfig())
			if status, got := r.do("POST", "/register", strings.Replace(seven, "7,", "1,", 1)); status != 201 {
				t.Fatal(status, got)
			}
			tt.fill(r)
			if _, got := r.do("POST", "/query_by_hash", `{"model_name":"m","block_hashes":[`+tt.query+`]}`); got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
	t.Run("tokens", func(t *testing.T) {
		r := start(t, service.DefaultConfig())
		r.do("POST", "/register", `{"instance_id":1,"endpoint":"tcp://gpu:5557","model_name":"m","block_size":4}`)
		locals := kvhash.AppendBlocks(nil, []uint32{10, 11, 12, 13, 20, 21, 22, 23}, kvhash.Options{BlockSize: 4})
		r.store("m", one, worker.Device, root, locals[0])
		r.store("m", one, worker.HostPinned, after(100+locals[0]), locals[1])
		salted := kvhash.AppendBlocks(nil, []uint32{10, 11, 12, 13}, kvhash.Options{BlockSize: 4, Salt: "s", LoRA: "l"})
		r.store("m", two, worker.Device, root, salted[0])
		for query, want := range map[string]string{
			`"token_ids":[10,11,12,13,20,21,22,23,9]`:                    `{"scores":{"1":{"0":4}},"frequencies":[],"instances":{"1":{"longest_matched":8,"gpu":4,"dp":{"0":4},"cpu":8,"disk":8}}}`,
			`"token_ids":[10,11,12,13],"lora_name":""`:                   `{"scores":{"1":{"0":4}},"frequencies":[],"instances":{"1":{"longest_matched":4,"gpu":4,"dp":{"0":4},"cpu":4,"disk":4}}}`,
			`"token_ids":[10,11,12]`:                                     `{"scores":{},"frequencies":[],"instances":{}}`,
			`"token_ids":[10,11,12,13],"cache_salt":"x"`:                 `{"scores":{},"frequencies":[],"instances":{}}`,
			`"cache_salt":"s","lora_name":"l","token_ids":[10,11,12,13]`: `{"scores":{"1":{"1":4}},"frequencies":[],"instances":{"1":{"longest_matched":4,"gpu":4,"dp":{"1":4},"cpu":4,"disk":4}}}`,
		} {
			if _, got := r.do("POST", "/query", `{"model_name":"m",`+query+`}`); got != want {
				t.Errorf("%s: got  %s\nwant %s", query, got, want)
			}
		}
	})
}

// TestDump reads a dump into another index: queries are answered alike. Partitions that nobody is
// left in are not in it.
func TestDump(t *testing.T) {
	r := start(t, service.DefaultConfig())
	for _, body := range []string{seven, `{"instance_id":8,"endpoint":"tcp://h:1","model_name":"a:b","block_size":4}`, `{"instance_id":9,"endpoint":"tcp://h:1","model_name":"gone","block_size":4}`} {
		if status, got := r.do("POST", "/register", body); status != 201 {
			t.Fatal(status, got)
		}
	}
	r.do("POST", "/unregister", `{"instance_id":9,"model_name":"gone"}`)
	rank := worker.Rank{Worker: 7, DP: 2}
	r.store("m", rank, worker.Device, kvindex.Parent{}, 1, 2, 3)
	r.store("m", rank, worker.Disk, kvindex.After(103), 4)
	var plain string
	for _, encoding := range []string{"identity", "gzip", "br;q=1, GZIP ;q=0.5", "gzip;q=0"} {
		req, err := http.NewRequest("GET", r.url+"/dump", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Accept-Encoding", encoding)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		var body io.Reader = res.Body
		zipped := res.Header.Get("Content-Encoding") == "gzip"
		if want := encoding != "identity" && encoding != "gzip;q=0"; zipped != want {
			t.Errorf("Accept-Encoding %q: gzip %v, want %v", encoding, zipped, want)
		}
		if zipped {
			if body, err = gzip.NewReader(body); err != nil {
				t.Fatal(err)
			}
		}
		text, err := io.ReadAll(body)
		if err := errors.Join(err, res.Body.Close()); err != nil {
			t.Fatal(err)
		}
		if plain == "" {
			plain = string(text)
		}
		if string(text) != plain || res.Header.Get("Content-Type") != "application/json" {
			t.Errorf("Accept-Encoding %q: %q %s, want %s", encoding, res.Header.Get("Content-Type"), text, plain)
		}
	}
	copies := map[string]*kvindex.Index{}
	var into *kvindex.Index
	_, err := wire.ReadDump(strings.NewReader(plain), func(e wire.DumpEntry) bool {
		into = kvindex.New(kvindex.DefaultConfig())
		copies[fmt.Sprintf("%s %s %d", e.Partition.Model, e.Partition.Tenant, e.BlockSize)] = into
		return true
	}, func(e *wire.KVEvent) {
		into.Store(e.Rank, e.Tier, kvindex.Parent{Hash: e.Parent, Set: e.HasParent}, e.Engine, e.Local)
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := slices.Sorted(maps.Keys(copies)); !slices.Equal(got, []string{"a:b default 4", "m default 16"}) {
		t.Errorf("partitions in the dump = %q", got)
	}
	var m kvindex.Matches
	copies["m default 16"].Query([]uint64{1, 2, 3, 4}, &m)
	if len(m.Ranks) != 1 || m.Ranks[0] != (kvindex.Match{Rank: rank, Device: 3, Disk: 1}) {
		t.Errorf("the copy has %+v", m.Ranks)
	}
}

// TestWorkerStatus: what a worker's listeners do makes its status, and /workers tells all of it.
func TestWorkerStatus(t *testing.T) {
	r := start(t, service.DefaultConfig())
	for dp := range 4 {
		if status, got := r.do("POST", "/register", strings.Replace(seven, "16", fmt.Sprintf(`16,"dp_rank":%d`, dp), 1)); status != 201 {
			t.Fatal(status, got)
		}
	}
	for _, tt := range []struct{ statuses, want string }{
		{"active active active active", "active"}, {"active paused active active", "active"}, {"paused paused paused paused", "paused"},
		{"active pending active paused", "pending"}, {"active pending failed paused", "failed"},
	} {
		r.f.mu.Lock()
		for i, status := range strings.Fields(tt.statuses) {
			rank := worker.Rank{Worker: 7, DP: uint32(i)}
			l := r.f.status[rank]
			l.Status = status
			r.f.status[rank] = l
		}
		r.f.mu.Unlock()
		if _, got := r.do("GET", "/workers", ""); !strings.Contains(got, `"source":"zmq","status":"`+tt.want+`"`) {
			t.Errorf("%s: %s, want %s", tt.statuses, got, tt.want)
		}
	}
	r.f.mu.Lock()
	r.f.status[worker.Rank{Worker: 7}] = service.Listener{
		Rank: worker.Rank{Worker: 7}, Endpoint: "tcp://gpu:5557", Status: "failed", LastError: `it "broke"`, Degraded: true, Applied: new(uint64), Strangers: []uint32{9, 2, 5}, // 2 is registered too
	}
	r.f.mu.Unlock()
	_, got := r.do("GET", "/workers", "")
	for _, want := range []string{
		`"listeners":{"0":{"endpoint":"tcp://gpu:5557","status":"failed","last_error":"it \"broke\"","degraded":true,"applied":0},`, `"unregistered_ranks":[5,9]`,
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%s has not %s", got, want)
		}
	}
}

func TestConfig(t *testing.T) {
	for _, tt := range []struct {
		workers string
		size    uint32
		want    string
	}{
		{"7=tcp://gpu:5557,7:1=tcp://gpu:5558", 16, ""},
		{"18446744073709551615:4294967294=ipc:///x", 16, ""},
		{"7=tcp://gpu:5557", 0, "block-size: "},
		{"", 1 << 21, "block-size: "},
		{"7=gpu", 16, "workers: "}, {"tcp://gpu:5557", 16, "workers: "}, {"x=tcp://gpu:1", 16, "workers: "},
		{"7:4294967295=tcp://gpu:1", 16, "workers: "}, {"7:=tcp://gpu:1", 16, "workers: "},
	} {
		cfg := service.DefaultConfig()
		cfg.BlockSize = tt.size
		if tt.workers != "" {
			cfg.Workers = strings.Split(tt.workers, ",")
		}
		if err := cfg.Validate(); tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.HasPrefix(err.Error(), tt.want)) {
			t.Errorf("Validate of %q, %d = %v, want %q", tt.workers, tt.size, err, tt.want)
		}
	}
	cfg := service.DefaultConfig()
	cfg.BlockSize, cfg.ModelName, cfg.Tenant, cfg.Workers = 16, "m", "t", []string{"7=tcp://gpu:5557", "7:1=tcp://gpu:5558"}
	r := start(t, cfg)
	if _, got := r.do("GET", "/workers?model_name=m&tenant_id=t", ""); !strings.Contains(got, `"endpoints":{"0":"tcp://gpu:5557","1":"tcp://gpu:5558"}`) {
		t.Errorf("workers of the settings: %s", got)
	}
	cfg.Workers = append(cfg.Workers, "7=tcp://gpu:5559")
	f := &fakeListeners{index: map[worker.ID]*kvindex.Partition{}, status: map[worker.Rank]service.Listener{}}
	s := service.New(cfg, kvindex.NewPartitions(kvindex.DefaultConfig()), prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	if err := s.Join(f.link()); err == nil || !strings.Contains(err.Error(), "already") {
		t.Errorf("Join with a rank twice = %v, want an error", err)
	}
}

// FuzzQuery: no body makes the server panic, and answers are JSON.
func FuzzQuery(f *testing.F) {
	for _, s := range []string{"", "{}", `{"model_name":"m","token_ids":[1,2,3,4]}`, `{"model_name":"m","token_ids":[4294967295,0],"cache_salt":null}`, `{"token_ids":[-0]}`, `{"token_ids":[1,]}`} {
		f.Add([]byte(s))
	}
	listeners := &fakeListeners{index: map[worker.ID]*kvindex.Partition{}, status: map[worker.Rank]service.Listener{}}
	cfg := service.DefaultConfig()
	cfg.BlockSize, cfg.ModelName, cfg.Workers = 2, "m", []string{"7=tcp://gpu:5557"}
	s := service.New(cfg, kvindex.NewPartitions(kvindex.DefaultConfig()), prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	if err := s.Join(listeners.link()); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		w := httptest.NewRecorder()
		req, err := http.NewRequest("POST", "/query", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		s.ServeHTTP(w, req)
		if !json.Valid(w.Body.Bytes()) || w.Code == 500 {
			t.Errorf("%q: %d %s", body, w.Code, w.Body)
		}
	})
}
