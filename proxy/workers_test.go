package proxy_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"spillway/busy"
	"spillway/proxy"
	"spillway/worker"
)

// watched notes what the monitor is told.
type watched struct {
	mu     sync.Mutex
	events []string
}

func (w *watched) link(f *front) {
	f.server.Link(func(r *worker.Worker, list *busy.List) {
		w.note(fmt.Sprintf("watch %v %s %v", r.ID, r.Endpoint, list != nil))
	}, func(id worker.ID) { w.note(fmt.Sprintf("forget %v", id)) })
}

func (w *watched) note(event string) {
	w.mu.Lock()
	w.events = append(w.events, event)
	w.mu.Unlock()
}

// taken are the events since the last call.
func (w *watched) taken() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	events := w.events
	w.events = nil
	return events
}

// record is what a test reads of an answer.
type record struct {
	ID        uint64   `json:"worker_id"`
	Model     string   `json:"model_name"`
	Lifecycle string   `json:"lifecycle"`
	Endpoint  *string  `json:"endpoint"`
	BlockSize *uint32  `json:"block_size"`
	Taints    []string `json:"taints"`
	Reasons   []string `json:"not_schedulable_reasons"`
}

func (g got) record(t *testing.T, what string, status int) (r record) {
	t.Helper()
	if err := json.Unmarshal([]byte(g.body), &r); err != nil || g.status != status {
		t.Fatalf("%s = %d %s, want %d and a record", what, g.status, g.body, status)
	}
	return r
}

// TestWorkerLife takes a worker through all that can happen to it, and serves from it when it can.
func TestWorkerLife(t *testing.T) {
	a := newScript(t, saying(answer(200, jsonHeader, reply)))
	b := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{proxy: apart})
	var w watched
	w.link(f)
	step := func(what string, g got, status int, lifecycle, reason string, events ...string) record {
		t.Helper()
		r := g.record(t, what, status)
		if r.Lifecycle != lifecycle || strings.Join(r.Reasons, "; ") != reason {
			t.Errorf("%s: %s because of %q, want %s because of %q", what, r.Lifecycle, r.Reasons, lifecycle, reason)
		}
		if got := w.taken(); !slices.Equal(got, events) {
			t.Errorf("%s: the monitor was told %q, want %q", what, got, events)
		}
		return r
	}
	chat := func(what string, status int) {
		t.Helper()
		if g := f.chat(chatBody); g.status != status {
			t.Errorf("chat, %s = %d %s, want %d", what, g.status, g.body, status)
		}
	}
	chat("before any worker", 404)

	step("POST without an endpoint", f.operator("POST", "/workers", `{"worker_id":7,"model_name":"m"}`), 201, "incomplete", "endpoint is required")
	chat("with a worker that cannot be used", 404)

	r := step("PATCH of the endpoint", f.operator("PATCH", "/workers/7", fmt.Sprintf(`{"endpoint":%q,"worker_id":8,"model_name":"x"}`, a.url())), 200,
		"schedulable", "", "watch 7 "+a.url()+" true")
	if r.ID != 7 || r.Model != "m" {
		t.Errorf("PATCH made it worker %d of model %s; it cannot move", r.ID, r.Model)
	}
	chat("with a worker", 200)
	if f.metric(`spillway_slots_inflight{dp_rank="0",worker="`+strings.TrimPrefix(a.url(), "http://")+`"}`) != "0" {
		t.Error("the worker has no series")
	}

	body := fmt.Sprintf(`{"worker_id":7,"model_name":"m","endpoint":%q,"taints":["a"],"block_size":32}`, b.url())
	step("POST of another endpoint", f.operator("POST", "/workers", body), 201, "schedulable", "", "watch 7 "+b.url()+" true")
	chat("after it has moved", 200)
	if len(a.seen()) != 1 || len(b.seen()) != 1 {
		t.Errorf("the endpoints got %d and %d requests, want one each", len(a.seen()), len(b.seen()))
	}
	eventually(t, "the old connection is closed", func() bool { _, open := a.connections(); return open == 0 })

	r = step("PATCH of nothing", f.operator("PATCH", "/workers/7", `{"block_size":null,"taints":null}`), 200, "schedulable", "", "watch 7 "+b.url()+" true")
	if len(r.Taints) != 1 || r.BlockSize == nil || *r.BlockSize != 32 {
		t.Errorf("PATCH with nulls left %+v, want all as it was", r)
	}
	step("PATCH to nonsense", f.operator("PATCH", "/workers/7", `{"block_size":0,"data_parallel_size":0}`), 200, "incomplete",
		"block_size must be greater than 0; data_parallel_size must be greater than 0", "forget 7")
	chat("after a change that makes it useless", 404)
	step("PATCH back", f.operator("PATCH", "/workers/7", `{"block_size":16,"data_parallel_size":1}`), 200, "schedulable", "", "watch 7 "+b.url()+" true")
	chat("after it has been put right", 200)

	body = fmt.Sprintf(`{"worker_id":7,"model_name":"other","endpoint":%q}`, b.url())
	r = step("POST with another model", f.operator("POST", "/workers", body), 201, "schedulable", "", "watch 7 "+b.url()+" true")
	if len(r.Taints) != 0 || r.BlockSize != nil {
		t.Errorf("POST kept of the old record %+v", r)
	}
	chat("after it serves another model", 404)
	if g := f.chat(strings.Replace(chatBody, `"m"`, `"other"`, 1)); g.status != 200 {
		t.Errorf("chat with the other model = %d %s", g.status, g.body)
	}

	step("DELETE", f.operator("DELETE", "/workers/7", ""), 200, "unschedulable", "", "forget 7")
	step("DELETE again", f.operator("DELETE", "/workers/7", ""), 200, "unschedulable", "")
	if g := f.operator("GET", "/workers/7", ""); g.record(t, "GET of a removed worker", 200).Lifecycle != "unschedulable" {
		t.Errorf("a removed worker is shown as %s", g.body)
	}
	eventually(t, "its connections are closed", func() bool { _, open := b.connections(); return open == 0 })
	if page := f.metrics(); strings.Contains(page, `worker="`+strings.TrimPrefix(b.url(), "http://")) {
		t.Errorf("series of the removed worker are left:\n%s", page)
	}
	step("PATCH of a removed worker", f.operator("PATCH", "/workers/7", `{}`), 200, "schedulable", "", "watch 7 "+b.url()+" true")

	// Two workers of one name are one too many.
	body = fmt.Sprintf(`{"worker_id":9,"model_name":"other","endpoint":%q}`, b.url())
	name := strings.TrimPrefix(b.url(), "http://")
	step("POST of a name that is taken", f.operator("POST", "/workers", body), 201, "incomplete",
		"reconciliation failed: router: register: worker "+name+": the name is taken by "+b.url())
	for _, tt := range []struct{ body, want string }{
		{`{"worker_id":10,"endpoint":"nowhere"}`, "reconciliation failed: url: "},
		{`{"worker_id":10,"endpoint":"http://x","engine":"abacus"}`, "reconciliation failed: engine: "},
		{`{"worker_id":10,"endpoint":"http://x","data_parallel_size":100000}`, "reconciliation failed: dp_size: "},
		{`{"worker_id":10,"endpoint":"http://x","kv_events_endpoint":"x:1"}`, "reconciliation failed: kv_events_endpoint: "},
	} {
		r := f.operator("POST", "/workers", tt.body).record(t, tt.body, 201)
		if r.Lifecycle != "incomplete" || len(r.Reasons) != 1 || !strings.HasPrefix(r.Reasons[0], tt.want) {
			t.Errorf("POST %s: %s because of %q, want incomplete because of %q", tt.body, r.Lifecycle, r.Reasons, tt.want)
		}
	}
	w.taken()
}

// TestWorkerNames has the names of workers asked of them.
func TestWorkerNames(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{proxy: apart})
	var w watched
	w.link(f)
	configured, err := worker.Worker{ID: 1, Endpoint: s.url(), Name: "w1"}.Normalize()
	if err != nil {
		t.Fatal(err)
	}
	if err := f.server.Join(&configured); err != nil {
		t.Fatal(err)
	}
	g := f.operator("POST", "/workers", `{"worker_id":2,"model_name":"","endpoint":"http://127.0.0.1:1","name":"w2"}`)
	if r := g.record(t, "POST without a name", 201); r.Lifecycle != "incomplete" || len(r.Reasons) != 1 {
		t.Errorf("POST without a name: %s, want incomplete until it has told", g.body)
	}
	if got, want := w.taken(), []string{"watch 1 " + s.url() + " false", "watch 2 http://127.0.0.1:1 false"}; !slices.Equal(got, want) {
		t.Errorf("the monitor was told %q, want %q", got, want)
	}
	learnt := configured
	learnt.Models, learnt.MaxModelLen = []string{"m", "adapter"}, 100
	if list, err := f.server.Learned(&learnt); err != nil || list != f.list() {
		t.Errorf("Learned = %v, %v; want the list of m", list, err)
	}
	if r := f.operator("GET", "/workers/1", "").record(t, "GET", 200); r.Lifecycle != "schedulable" || r.Model != "m" {
		t.Errorf("after its names are known: %+v, want a schedulable worker of m", r)
	}
	f.chat(chatBody).is(t, "chat", 200, reply)

	// What comes in late does not undo what has been changed meanwhile.
	if r := f.operator("PATCH", "/workers/1", `{"total_kv_blocks":99}`).record(t, "PATCH", 200); r.Lifecycle != "schedulable" {
		t.Errorf("PATCH: %+v", r)
	}
	for what, late := range map[string]worker.Worker{"a changed": learnt, "an unknown": {ID: 5, Name: "w5", Models: []string{"m"}}} {
		if _, err := f.server.Learned(&late); err != proxy.ErrNotWanted {
			t.Errorf("Learned of %s worker = %v, want ErrNotWanted", what, err)
		}
	}
	f.operator("DELETE", "/workers/2", "")
	second := worker.Worker{ID: 2, Name: "w2", Endpoint: "http://127.0.0.1:1", Models: []string{"m"}}
	if _, err := f.server.Learned(&second); err != proxy.ErrNotWanted {
		t.Errorf("Learned of a removed worker = %v, want ErrNotWanted", err)
	}
	if g := f.send("GET", "/v1/models/m/ready", ""); !strings.Contains(g.body, `"registered":1`) || !strings.Contains(g.body, `"kv_total_blocks":99`) {
		t.Errorf("afterwards %s, want one worker, with the change", g.body)
	}
}

// TestWorkerRecord checks that all fields come back, and the API key does not.
func TestWorkerRecord(t *testing.T) {
	f := begin(t, setup{proxy: apart})
	f.operator("POST", "/workers", `{"worker_id":18446744073709551615}`).is(t, "POST of an ID alone", 201,
		`{"worker_id":18446744073709551615,"model_name":"default","tenant_id":"default","lifecycle":"incomplete","endpoint":null,`+
			`"kv_events_endpoint":null,"replay_endpoint":null,"block_size":null,"data_parallel_start_rank":null,"data_parallel_size":null,`+
			`"max_num_batched_tokens":null,"total_kv_blocks":null,"stable_routing_id":null,"is_eagle":null,"taints":[],"topology_domains":{},`+
			`"kv_transfer_domain":null,"kv_transfer_enforcement":null,"kv_transfer_preferred_weight":null,"name":null,"engine":null,`+
			`"metrics_url":null,"rank_routing":null,"max_concurrency":null,"not_schedulable_reasons":["endpoint is required"]}`+"\n")
	const full = `"worker_id":3,"model_name":"m","tenant_id":"t","lifecycle":"schedulable","endpoint":"http://127.0.0.1:1",` +
		`"kv_events_endpoint":"tcp://h:1","kv_events_endpoints":{"0":"tcp://h:2"},"replay_endpoint":"tcp://h:3","replay_endpoints":{"0":"tcp://h:4"},` +
		`"block_size":32,"data_parallel_start_rank":1,"data_parallel_size":2,"max_num_batched_tokens":8192,"total_kv_blocks":1000,` +
		`"stable_routing_id":"s","is_eagle":true,"taints":["a","b"],"topology_domains":{"zone":"z"},"kv_transfer_domain":"d",` +
		`"kv_transfer_enforcement":"preferred","kv_transfer_preferred_weight":0.5,"name":"w","models":["m","adapter"],"engine":"vllm",` +
		`"metrics_url":"http://127.0.0.1:2/metrics","rank_routing":"engine","max_concurrency":64`
	f.operator("POST", "/workers", `{`+full+`,"api_key":"hidden","unheard_of":1}`).is(t, "POST of everything", 201, "{"+full+"}\n")
	w := f.routes.Catalog().Find(3)
	want := worker.Worker{
		ID: 3, Name: "w", Endpoint: "http://127.0.0.1:1", Models: []string{"m", "adapter"}, Tenant: "t", Engine: "vllm",
		MetricsURL: "http://127.0.0.1:2/metrics", APIKey: "hidden", DPStart: 1, DPSize: 2, RankRouting: worker.RankByEngine,
		KVTotalBlocks: 1000, BlockSize: 32, MaxNumBatchedTokens: 8192, MaxConcurrency: 64,
		KVEvents: map[uint32]string{0: "tcp://h:2"}, KVReplay: map[uint32]string{0: "tcp://h:4"},
	}
	if w == nil || fmt.Sprintf("%+v", *w) != fmt.Sprintf("%+v", want) {
		t.Errorf("the router knows %+v\nwant %+v", w, want)
	}
	f.operator("PATCH", "/workers/3", `{"taints":[],"kv_events_endpoints":{},"topology_domains":{"rack":"r"}}`).is(t, "PATCH of collections", 200,
		"{"+strings.NewReplacer(`"taints":["a","b"]`, `"taints":[]`, `"kv_events_endpoints":{"0":"tcp://h:2"},`, "", `"zone":"z"`, `"rack":"r"`).Replace(full)+"}\n")
	f.operator("DELETE", "/workers/3", "")
}

// TestWorkerRefusals checks what is wrong with a request, and that nothing comes of it.
func TestWorkerRefusals(t *testing.T) {
	f := begin(t, setup{proxy: apart})
	wrong := func(text string) string { return `{"error":"` + text + `"}` + "\n" }
	for _, tt := range []struct {
		method, path, body string
		status             int
		want               string
		headers            []string
	}{
		{"POST", "/workers", `{"worker_id":1}`, 415, wrong("Content-Type must be application/json"), []string{"Content-Type: text/plain"}},
		{"POST", "/workers", `{"worker_id":1}`, 415, wrong("Content-Type must be application/json"), []string{"Content-Type: "}},
		{"POST", "/workers", `{"taints":"` + strings.Repeat("x", 8<<20), 413, wrong("the body exceeds 8 MiB"), nil},
		{"POST", "/workers", `{"worker_id":1`, 400, wrong("the body is not valid JSON"), nil},
		{"POST", "/workers", `{"worker_id":1}{}`, 400, wrong("the body is not valid JSON"), nil},
		{"POST", "/workers", `[]`, 422, wrong("the body must be a JSON object"), nil},
		{"POST", "/workers", `null`, 422, wrong("the body must be a JSON object"), nil},
		{"POST", "/workers", `{}`, 422, wrong("worker_id: missing field"), nil},
		{"POST", "/workers", `{"Worker_ID":1}`, 422, wrong("worker_id: missing field"), nil},
		{"POST", "/workers", `{"worker_id":null}`, 422, wrong("worker_id: must not be null"), nil},
		{"POST", "/workers", `{"worker_id":-1}`, 422, wrong("worker_id: must be an integer from 0 to 2^64-1"), nil},
		{"POST", "/workers", `{"worker_id":1.0}`, 422, wrong("worker_id: must be an integer from 0 to 2^64-1"), nil},
		{"POST", "/workers", `{"worker_id":"1"}`, 422, wrong("worker_id: must be an integer from 0 to 2^64-1"), nil},
		{"POST", "/workers", `{"worker_id":18446744073709551616}`, 422, wrong("worker_id: must be an integer from 0 to 2^64-1"), nil},
		{"POST", "/workers", `{"worker_id":1,"model_name":null}`, 422, wrong("model_name: must not be null"), nil},
		{"POST", "/workers", `{"worker_id":1,"tenant_id":null}`, 422, wrong("tenant_id: must not be null"), nil},
		{"POST", "/workers", `{"worker_id":1,"taints":null}`, 422, wrong("taints: must not be null"), nil},
		{"POST", "/workers", `{"worker_id":1,"topology_domains":null}`, 422, wrong("topology_domains: must not be null"), nil},
		{"POST", "/workers", `{"worker_id":1,"kv_events_endpoints":null}`, 422, wrong("kv_events_endpoints: must not be null"), nil},
		{"POST", "/workers", `{"worker_id":1,"taints":[null]}`, 422, wrong("taints: must be an array of strings"), nil},
		{"POST", "/workers", `{"worker_id":1,"taints":[1]}`, 422, wrong("taints: must be an array of strings"), nil},
		{"POST", "/workers", `{"worker_id":1,"kv_events_endpoints":{"a":"tcp://h:1"}}`, 422, wrong("kv_events_endpoints: must be an object of strings by rank"), nil},
		{"POST", "/workers", `{"worker_id":1,"topology_domains":{"a":null}}`, 422, wrong("topology_domains: must be an object of strings"), nil},
		{"POST", "/workers", `{"worker_id":1,"block_size":4294967296}`, 422, wrong("block_size: must be an integer from 0 to 2^32-1"), nil},
		{"POST", "/workers", `{"worker_id":1,"endpoint":5}`, 422, wrong("endpoint: must be a string"), nil},
		{"POST", "/workers", `{"worker_id":1,"is_eagle":"yes"}`, 422, wrong("is_eagle: must be a boolean"), nil},
		{"POST", "/workers", `{"worker_id":1,"kv_transfer_enforcement":"maybe"}`, 422, wrong("kv_transfer_enforcement: must be required or preferred"), nil},
		{"PATCH", "/workers/1", `{"block_size":"x"}`, 422, wrong("block_size: must be an integer from 0 to 2^32-1"), nil},
		{"PATCH", "/workers/1", `{"worker_id":"ignored"}`, 404, wrong("worker 1 not found"), nil},
		{"PATCH", "/workers/1", ``, 415, wrong("Content-Type must be application/json"), nil},
		{"DELETE", "/workers/1", ``, 404, wrong("worker 1 not found"), nil},
		{"GET", "/workers/1", ``, 404, wrong("worker 1 not found"), nil},
		{"GET", "/workers/x", ``, 400, "Invalid URL: Cannot parse the worker ID as an integer from 0 to 2^64-1", nil},
		{"DELETE", "/workers/-1", ``, 400, "Invalid URL: Cannot parse the worker ID as an integer from 0 to 2^64-1", nil},
		{"PATCH", "/workers/18446744073709551616", `{}`, 400, "Invalid URL: Cannot parse the worker ID as an integer from 0 to 2^64-1", nil},
		{"GET", "/workers?model_name=a&model_name=b", ``, 400, "Invalid URL: Cannot parse the query string: model_name is given more than once", nil},
		{"GET", "/workers?model_name=%zz", ``, 400, "Invalid URL: Cannot parse the query string", nil},
		{"PUT", "/workers", ``, 405, flat(405, "method_not_allowed", "Method PUT is not allowed on /workers"), nil},
		{"GET", "/workers/1/x", ``, 404, flat(404, "not_found", "No route for GET /workers/1/x"), nil},
	} {
		g := f.operator(tt.method, tt.path, tt.body, tt.headers...)
		g.is(t, fmt.Sprintf("%s %s %.80s", tt.method, tt.path, tt.body), tt.status, tt.want)
	}
	f.operator("GET", "/workers", "").is(t, "GET /workers", 200, "[]\n")
	f.send("GET", "/workers", "").is(t, "GET /workers at the clients' address", 404, flat(404, "not_found", "No route for GET /workers"))
	alone := begin(t, setup{})
	alone.send("GET", "/workers", "").is(t, "GET /workers without an admin address", 404, flat(404, "not_found", "No route for GET /workers"))
}

func TestWorkerList(t *testing.T) {
	f := begin(t, setup{proxy: apart})
	for _, body := range []string{
		`{"worker_id":10,"model_name":"b"}`, `{"worker_id":9,"model_name":"b"}`, `{"worker_id":1,"model_name":"c","tenant_id":"t"}`,
		`{"worker_id":2,"model_name":"b","tenant_id":"a"}`, `{"worker_id":11,"model_name":"B"}`,
	} {
		f.operator("POST", "/workers", body)
	}
	f.operator("DELETE", "/workers/9", "")
	for query, want := range map[string][]uint64{
		"": {11, 2, 9, 10, 1}, "?model_name=b": {2, 9, 10}, "?tenant_id=t": {1}, "?model_name=b&tenant_id=a": {2}, "?model_name=": {}, "?model_name=x": {},
	} {
		var list []record
		g := f.operator("GET", "/workers"+query, "")
		if err := json.Unmarshal([]byte(g.body), &list); err != nil || list == nil {
			t.Fatalf("GET /workers%s = %d %s", query, g.status, g.body)
		}
		ids := []uint64{}
		for _, r := range list {
			ids = append(ids, r.ID)
		}
		if !slices.Equal(ids, want) {
			t.Errorf("GET /workers%s lists %v, want %v", query, ids, want)
		}
	}
}

// TestWorkerWritesGuarded checks that the token guards each write to /workers, and no read.
func TestWorkerWritesGuarded(t *testing.T) {
	f := begin(t, setup{proxy: func(c *proxy.Config) { apart(c); c.AdminToken = "open" }})
	for _, tt := range []struct {
		method, path, body string
		status             int
	}{
		{"POST", "/workers", `{"worker_id":1}`, 201}, {"PATCH", "/workers/1", `{}`, 200}, {"DELETE", "/workers/1", "", 200},
	} {
		f.operator(tt.method, tt.path, tt.body).is(t, tt.method+" without the token", 401, `{"error":"the admin token is missing or wrong"}`+"\n")
		if g := f.operator(tt.method, tt.path, tt.body, "Authorization: Bearer open"); g.status != tt.status {
			t.Errorf("%s %s with the token = %d %s, want %d", tt.method, tt.path, g.status, g.body, tt.status)
		}
	}
	for _, path := range []string{"/workers", "/workers/1"} {
		if g := f.operator("GET", path, ""); g.status != 200 {
			t.Errorf("GET %s without the token = %d %s, want 200", path, g.status, g.body)
		}
	}
}

// TestWorkersAtOnce changes workers while they serve; begin checks that nothing of it stays.
func TestWorkersAtOnce(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{models: []string{"m"}, proxy: apart}, served("steady", s))
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			body := fmt.Sprintf(`{"worker_id":%d,"model_name":"m","endpoint":%q,"name":"w%d"}`, i, s.url(), i)
			for range 20 {
				for _, call := range [][3]string{
					{"POST", "/workers", body}, {"PATCH", fmt.Sprintf("/workers/%d", i), `{"data_parallel_size":2}`}, {"DELETE", fmt.Sprintf("/workers/%d", i), ""},
				} {
					if g := f.operator(call[0], call[1], call[2]); g.status >= 300 {
						t.Errorf("%s %s = %d %s", call[0], call[1], g.status, g.body)
					}
				}
			}
		})
		all.Go(func() {
			for range 30 {
				if g := f.chat(chatBody); g.status != 200 {
					t.Errorf("chat = %d %s", g.status, g.body)
				}
			}
		})
	}
	all.Wait()
	if got := f.states(); got != "steady:unknown" {
		t.Errorf("afterwards %s, want the steady one alone", got)
	}
}
