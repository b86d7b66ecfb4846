package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// step is one call of a scenario and what its answer must be.
type step struct {
	do     string   // method and path
	body   string   // sent as JSON, unless empty
	status int      //
	want   string   // JSON that the answer must hold: objects may have more names, arrays no more elements
	absent []string // names that the answer, an object, must not have
	text   string   // part of the answer
	header [2]string
	bare   bool // the body is sent without Content-Type
}

// scenario is a life of a fresh process.
type scenario struct {
	name   string
	args   []string
	steps  []step
	more   func(t *testing.T, s *selector) // after the steps
	events bool                            // KV events are on
}

// Workers and prompts of the scenarios, whose blocks have 4 tokens.
const (
	worker1   = `{"worker_id":1,"model_name":"model","endpoint":"http://worker-1:8000","block_size":4}`
	prompt14  = `"model_name":"model","token_ids":[1,2,3,4]`
	reserve14 = `{"model_name":"model","token_ids":[1,2,3,4],"reservation_id":"res-a"}`
)

var registered = step{do: "POST /workers", body: worker1, status: 201, want: `{"lifecycle":"schedulable"}`, absent: []string{"not_schedulable_reasons"}}

// load is the step that finds worker 1 with such a load.
func load(prefill, blocks, requests int) step {
	return step{do: "GET /loads", status: 200, want: fmt.Sprintf(
		`[{"loads":[{"worker_id":1,"dp_rank":0,"potential_prefill_tokens":%d,"potential_decode_blocks":%d,"active_requests":%d}],"pending_count":0}]`,
		prefill, blocks, requests)}
}

// TestSelectionScenarios are the acceptance scenarios of the selection service, by their numbers.
func TestSelectionScenarios(t *testing.T) {
	policies := t.TempDir()
	policy := func(name, text string) string {
		path := filepath.Join(policies, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	unlimited := policy("unlimited.yaml", "default_policy_family: standard\nuncached_isl_buckets: [{min_tokens: 0, bucket: all}]\n"+
		"policy_classes: [{name: one, policy_family: standard, cache_bucket: all, quantum: 1}]\n")
	two := policy("two.yaml", "default_policy_family: batch\nuncached_isl_buckets: [{min_tokens: 0, bucket: all}]\npolicy_classes:\n"+
		"  - {name: latency, quantum: 1, prefill_busy_threshold: 0, request_queue_limit_per_worker: 0}\n"+
		"  - {name: batch-all, policy_family: batch, cache_bucket: all, quantum: 1, prefill_busy_threshold: 1024}\n")
	for _, sc := range []scenario{
		{name: "1 no workers", steps: []step{
			{do: "GET /health", status: 200, want: `{"status":"ok"}`},
			{do: "GET /ready", status: 503, want: `{"ready":false,"schedulable_workers":0,"workers":[]}`},
			{do: "POST /select", body: `{` + prompt14 + `}`, status: 503, text: "no schedulable workers are available"},
		}},
		{name: "2 without max_num_batched_tokens", steps: []step{registered, {do: "GET /ready", status: 200, want: `{"ready":true,"schedulable_workers":1}`}}},
		{name: "3 with a queue threshold", args: []string{"--router-queue-threshold", "1.0"}, steps: []step{
			{do: "POST /workers", body: worker1, status: 201, want: `{"lifecycle":"incomplete"}`, text: `"not_schedulable_reasons":["max_num_batched_tokens`},
			{do: "POST /select", body: `{` + prompt14 + `}`, status: 503},
		}},
		{name: "4 with classes that have none", args: []string{"--router-policy-config", unlimited}, steps: []step{registered}},
		{name: "5 without endpoint", steps: []step{
			registered,
			{do: "POST /workers", body: `{"worker_id":2,"model_name":"model","block_size":4}`, status: 201, want: `{"lifecycle":"incomplete","not_schedulable_reasons":["endpoint is required"]}`},
			{do: "POST /reservations", body: `{"reservation_id":"r","model_name":"model","worker_id":2,"sequence_hashes":[1],"isl_tokens":4}`, status: 404, text: "schedulable worker 2 not found for model=model tenant=default"},
		}},
		{name: "6 select", steps: []step{
			registered,
			{do: "POST /select", body: `{` + prompt14 + `,"selection_id":"sel-a"}`, status: 200, absent: []string{"reservation_id", "cached_tokens", "effective_overlap_blocks"},
				want: `{"selection_id":"sel-a","model_name":"model","tenant_id":"default","worker_id":1,"dp_rank":0,"endpoint":"http://worker-1:8000","block_size":4,
				"overlap":{"longest_matched":0,"gpu":0,"cpu":0,"disk":0,"dp":{"0":0}},"effective_prefill_tokens":4}`},
			load(0, 0, 0),
		}},
		{name: "7 select and reserve", steps: []step{
			registered,
			{do: "POST /select_and_reserve", body: reserve14, status: 200, want: `{"reservation_id":"res-a","effective_prefill_tokens":4}`},
			load(4, 1, 1),
			{do: "POST /select_and_reserve", body: reserve14, status: 409, text: "Request res-a already exists (assigned to worker WorkerWithDpRank { worker_id: 1, dp_rank: 0 })"},
			{do: "DELETE /reservations/res-a", status: 200, want: `{"status":"ok"}`},
			load(0, 0, 0),
			{do: "POST /select_and_reserve", body: reserve14, status: 200},
		}},
		{name: "8 without prefill tracking", steps: []step{
			registered,
			{do: "POST /select_and_reserve", body: `{` + prompt14 + `,"router_config_override":{"track_prefill_tokens":false}}`, status: 200},
			load(0, 1, 1),
		}},
		{name: "9 a booking and its prefill", steps: []step{
			registered,
			{do: "POST /reservations", body: `{"reservation_id":"res-b","model_name":"model","worker_id":1,"sequence_hashes":[1],"isl_tokens":4,"effective_prefill_tokens":4}`, status: 201,
				want: `{"reservation_id":"res-b","model_name":"model","tenant_id":"default","worker_id":1,"dp_rank":0,"endpoint":"http://worker-1:8000"}`},
			load(4, 1, 1),
			{do: "POST /reservations/res-b/prefill_complete", status: 200},
			load(0, 1, 1),
			{do: "POST /reservations/res-b/prefill_complete", status: 200},
		}},
		{name: "10 effective prefill tokens", steps: []step{
			registered,
			{do: "POST /reservations", body: `{"reservation_id":"r","model_name":"model","worker_id":1,"sequence_hashes":[1],"isl_tokens":4,"effective_prefill_tokens":5}`, status: 400, text: "must not exceed isl_tokens"},
			{do: "POST /reservations", body: `{"reservation_id":"r","model_name":"model","worker_id":1,"sequence_hashes":[1],"isl_tokens":4}`, status: 201},
			load(0, 1, 1),
		}},
		{name: "11 output blocks", steps: []step{
			registered,
			{do: "POST /select_and_reserve", body: reserve14, status: 200},
			{do: "POST /reservations/res-a/output_block", body: `{}`, status: 200},
			load(4, 2, 1),
			{do: "POST /reservations/res-a/output_block", body: `{"decay_fraction":1.5}`, status: 400, text: "decay_fraction must be between 0.0 and 1.0"},
			{do: "POST /reservations/nobody/output_block", body: `{}`, status: 404, text: "reservation nobody not found"},
			{do: "POST /reservations/res-a/output_block", body: " ", status: 400},
			{do: "POST /reservations/res-a/output_block", body: `{}`, bare: true, status: 415},
		}},
		{name: "12 prompts that are none", steps: []step{
			registered,
			{do: "POST /select", body: `{"model_name":"model","block_hashes":[1],"sequence_hashes":[1,2],"isl_tokens":8}`, status: 400, text: "block_hashes length 1 must match sequence_hashes length 2"},
			{do: "POST /select", body: `{"model_name":"model","block_hashes":[1],"sequence_hashes":[1],"isl_tokens":0}`, status: 400, text: "isl_tokens must be greater than 0"},
			{do: "POST /select", body: `{"model_name":"model","token_ids":[]}`, status: 400},
			{do: "POST /select", body: `{` + prompt14 + `}`, status: 200},
		}},
		{name: "13 ranks of a worker", steps: []step{registered, worker2,
			{do: "POST /overlap_scores", body: `{` + prompt14 + `}`, status: 200, want: `{"block_size":4,"num_blocks":1,
				"workers":[{"worker_id":1,"dp_rank":0},{"worker_id":2,"dp_rank":2},{"worker_id":2,"dp_rank":3}],"shared_cache":{"enabled":false}}`},
		}},
		{name: "14 a rank that is none", steps: []step{registered, worker2,
			{do: "POST /reservations", body: `{"reservation_id":"r","model_name":"model","worker_id":2,"sequence_hashes":[1],"isl_tokens":4}`, status: 404, text: "Worker WorkerWithDpRank { worker_id: 2, dp_rank: 0 } not found"},
		}},
		{name: "15 an endpoint of events that is none", events: true, steps: []step{
			{do: "POST /workers", status: 201, text: `"not_schedulable_reasons":["reconciliation failed: invalid kv_events endpoint for worker 1 dp_rank 1: invalid ZMQ endpoint`, want: `{"lifecycle":"incomplete"}`,
				body: `{"worker_id":1,"model_name":"model","endpoint":"http://w:1","block_size":4,"data_parallel_size":2,"kv_events_endpoints":{"0":"tcp://127.0.0.1:1","1":"127.0.0.1"}}`},
			{do: "PATCH /workers/1", body: `{"kv_events_endpoints":{"0":"tcp://127.0.0.1:1","1":"tcp://127.0.0.1:2"}}`, status: 200, want: `{"lifecycle":"schedulable"}`},
		}},
		{name: "16 another block size", steps: []step{registered,
			{do: "POST /workers", body: strings.NewReplacer(`:1,`, `:2,`, `:4}`, `:8}`).Replace(worker1), status: 201,
				want: `{"lifecycle":"incomplete","not_schedulable_reasons":["reconciliation failed: block_size mismatch for model=model tenant=default: existing=4 requested=8"]}`},
		}},
		{name: "17 a worker moves", steps: []step{registered,
			{do: "POST /workers", body: strings.Replace(worker1, `{`, `{"tenant_id":"b",`, 1), status: 201, want: `{"lifecycle":"schedulable","tenant_id":"b"}`},
			{do: "GET /workers?tenant_id=default", status: 200, text: `[]`},
			{do: "POST /select", body: `{` + prompt14 + `}`, status: 503, text: "no schedulable workers for model=model tenant=default"},
			{do: "POST /select", body: `{` + prompt14 + `,"tenant_id":"b"}`, status: 200},
		}},
		{name: "18 a worker is deleted", steps: []step{registered,
			{do: "POST /select_and_reserve", body: reserve14, status: 200},
			{do: "DELETE /workers/1", status: 200, want: `{"lifecycle":"unschedulable"}`},
			{do: "POST /reservations/res-a/prefill_complete", status: 404},
			{do: "GET /workers", status: 200, want: `[{"worker_id":1,"lifecycle":"unschedulable"}]`},
			{do: "DELETE /workers/1", status: 200},
			{do: "DELETE /workers/99", status: 404, text: "worker 99 not found"},
			{do: "GET /loads", status: 200, want: `[{"model_name":"model","loads":[]}]`},
		}},
		{name: "19 bookings in two partitions", steps: []step{registered,
			{do: "POST /workers", body: strings.NewReplacer(`:1,`, `:2,`, `"model_name":"model"`, `"model_name":"n"`).Replace(worker1), status: 201},
			{do: "POST /select_and_reserve", body: reserve14, status: 200},
			{do: "POST /select_and_reserve", body: `{"model_name":"n","token_ids":[1,2,3,4],"reservation_id":"res-a"}`, status: 409, text: "already exists"},
			{do: "POST /select_and_reserve", body: `{"model_name":"n","token_ids":[1,2,3,4],"reservation_id":"res-n"}`, status: 200},
			{do: "GET /loads", status: 200, want: `[{"loads":[{"active_requests":1}]},{"loads":[{"active_requests":1}]}]`},
			{do: "DELETE /reservations/res-a", status: 200},
			{do: "GET /loads", status: 200, want: `[{"model_name":"model","loads":[{"active_requests":0}]},{"model_name":"n","loads":[{"active_requests":1}]}]`},
			{do: "DELETE /reservations/res-n", status: 200},
			{do: "GET /loads", status: 200, want: `[{"loads":[{"active_requests":0}]},{"loads":[{"active_requests":0}]}]`},
		}},
		{name: "20 what nobody knows", steps: []step{
			{do: "DELETE /reservations/x", status: 404, text: "reservation x not found"}, registered, {do: "DELETE /reservations/x", status: 200},
		}},
		{name: "21 classes of the queue", args: []string{"--router-policy-config", two}, steps: []step{
			{do: "POST /workers", body: strings.Replace(worker1, `{`, `{"max_num_batched_tokens":4,`, 1), status: 201, want: `{"lifecycle":"schedulable"}`},
			{do: "POST /select_and_reserve", body: reserve14, header: class("latency"), status: 200},
			{do: "POST /select", body: `{` + prompt14 + `}`, header: class("batch"), status: 200},
			{do: "POST /select", body: `{` + prompt14 + `}`, header: class("latency"), status: 503,
				want: `{"error":"router policy class \"latency\" queue requests limit reached (current=0, limit=0)","details":{"policy_class":"latency","limit_kind":"requests","current":0,"limit":0}}`},
		}},
		{name: "22 a request waits", args: []string{"--router-queue-threshold", "0"}, steps: []step{
			{do: "POST /workers", body: strings.Replace(worker1, `{`, `{"max_num_batched_tokens":4,`, 1), status: 201, want: `{"lifecycle":"schedulable"}`},
			{do: "POST /select_and_reserve", body: reserve14, status: 200},
		}, more: waits},
		{name: "24 without replicas", steps: []step{
			{do: "GET /replica_sync/peers", status: 200, text: "[]"},
			{do: "POST /replica_sync/register_peer", body: `{"endpoint":"bad"}`, status: 409, text: "replica sync is disabled"},
			{do: "POST /replica_sync/register_peer", body: `{}`, status: 422, text: "endpoint"},
		}},
		{name: "25 a dump", steps: []step{registered, {do: "GET /dump", status: 200, want: `{"model:default":{"block_size":4,"events":[]}}`}}},
		{name: "26 a burst", more: burst},
		{name: "27 one ID for all", steps: []step{registered}, more: func(t *testing.T, s *selector) {
			if got := s.together(16, func(int) (string, string, string) { return "POST", "/select_and_reserve", reserve14 }); got[200] != 1 || got[409] != 15 {
				t.Errorf("statuses %v, want one 200 and fifteen 409", got)
			}
		}},
		{name: "28 bodies", steps: []step{
			{do: "POST /workers", body: `{"Worker_ID":1}`, status: 422, text: "worker_id"},
			{do: "POST /workers", body: `{"worker_id":1,"taints":null}`, status: 422, text: "taints"},
			{do: "POST /workers", body: `{"worker_id":1.5}`, status: 422},
			{do: "POST /workers", body: `{"worker_id":-1}`, status: 422},
			{do: "POST /workers", body: `{"worker_id":1,"nonsense":{"a":[1,null]}}`, status: 201},
		}},
		{name: "30 paths", steps: []step{
			{do: "GET /nope", status: 404, want: `{"error":"route not found"}`},
			{do: "PUT /workers", status: 405, want: `{"error":"method not allowed"}`},
			{do: "PATCH /workers/abc", body: `{}`, status: 400, text: "Invalid URL: Cannot parse"},
			{do: "GET /loads?model_name=a&model_name=b", status: 400, text: "query"},
		}},
	} {
		t.Run(sc.name, func(t *testing.T) {
			args := sc.args
			if !sc.events {
				args = append(slices.Clip(args), "--router-kv-events=false")
			}
			s := startSelector(t, args...)
			for _, st := range sc.steps {
				s.do(st)
			}
			if sc.more != nil {
				sc.more(t, s)
			}
		})
	}
}

var worker2 = step{do: "POST /workers", status: 201, want: `{"lifecycle":"schedulable"}`,
	body: `{"worker_id":2,"model_name":"model","endpoint":"http://worker-2:8000","block_size":4,"data_parallel_start_rank":2,"data_parallel_size":2}`}

func class(name string) [2]string { return [2]string{"X-Dynamo-Meta-Policy-Class", name} }

// do makes the call of a step and checks the answer.
func (s *selector) do(st step) {
	s.t.Helper()
	method, path, _ := strings.Cut(st.do, " ")
	req, err := http.NewRequest(method, s.url+path, strings.NewReader(st.body))
	if err != nil {
		s.t.Fatal(err)
	}
	if st.body != "" && !st.bare {
		req.Header.Set("Content-Type", "application/json")
	}
	if st.header[0] != "" {
		req.Header.Set(st.header[0], st.header[1])
	}
	status, text := s.send(req)
	if status != st.status {
		s.t.Errorf("%s %s = %d %s, want %d", st.do, st.body, status, text, st.status)
		return
	}
	if !strings.Contains(text, st.text) {
		s.t.Errorf("%s %s = %s, want it to hold %s", st.do, st.body, text, st.text)
	}
	if st.want != "" {
		if why := lacks(read[any](s.t, text), read[any](s.t, st.want)); why != "" {
			s.t.Errorf("%s %s = %s: %s", st.do, st.body, text, why)
		}
	}
	if len(st.absent) > 0 {
		got := read[map[string]any](s.t, text)
		for _, name := range st.absent {
			if v, ok := got[name]; ok {
				s.t.Errorf("%s %s: %s is %v, and should not be there", st.do, st.body, name, v)
			}
		}
	}
}

// lacks tells what of want is not in got, "" for nothing.
func lacks(got, want any) string {
	switch want := want.(type) {
	case map[string]any:
		have, _ := got.(map[string]any)
		for name, w := range want {
			g, ok := have[name]
			if !ok {
				return name + " is missing"
			}
			if why := lacks(g, w); why != "" {
				return name + ": " + why
			}
		}
		return ""
	case []any:
		have, ok := got.([]any)
		if !ok || len(have) != len(want) {
			return fmt.Sprintf("%v, want %d elements", got, len(want))
		}
		for i := range want {
			if why := lacks(have[i], want[i]); why != "" {
				return fmt.Sprintf("[%d]: %s", i, why)
			}
		}
		return ""
	}
	if g, w := asJSON(got), asJSON(want); g != w {
		return g + ", want " + w
	}
	return ""
}

func asJSON(v any) string { b, _ := json.Marshal(v); return string(b) }

// together makes n calls at once and counts the statuses.
func (s *selector) together(n int, call func(i int) (method, path, body string)) map[int]int {
	var mu sync.Mutex
	var all sync.WaitGroup
	got := map[int]int{}
	for i := range n {
		all.Go(func() {
			status, _ := s.call(call(i))
			mu.Lock()
			defer mu.Unlock()
			got[status]++
		})
	}
	all.Wait()
	return got
}

// waits is scenario 22, after a booking.
func waits(t *testing.T, s *selector) {
	answers := make(chan string, 1)
	ask := func() {
		go func() {
			status, text := s.call("POST", "/select", `{`+prompt14+`}`)
			answers <- fmt.Sprint(status, " ", text)
		}()
		eventually(t, "the request waits", func() bool { p := s.loads()[0]; return p.Pending == 1 && p.Tokens == 4 })
		select {
		case a := <-answers:
			t.Fatalf("a request that should wait is answered %s", a)
		default:
		}
	}
	ask()
	s.do(step{do: "DELETE /reservations/res-a", status: 200})
	if a := <-answers; !strings.HasPrefix(a, "200 ") {
		t.Errorf("after the booking was freed the answer is %s", a)
	}
	s.do(step{do: "POST /select_and_reserve", body: reserve14, status: 200})
	ask()
	s.signal(syscall.SIGTERM)
	if a := <-answers; !strings.HasPrefix(a, "503 ") || !strings.Contains(a, "endpoint subscriber shutdown") {
		t.Errorf("while the process ends the answer is %s", a)
	}
	if code := s.exit(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// burst is scenario 26.
func burst(t *testing.T, s *selector) {
	for id := 1; id <= 8; id++ {
		s.do(step{do: "POST /workers", status: 201, body: fmt.Sprintf(`{"worker_id":%d,"model_name":"model","endpoint":"http://w%d:1","block_size":4}`, id, id)})
	}
	got := s.together(64, func(i int) (string, string, string) {
		return "POST", "/select_and_reserve", fmt.Sprintf(`{"model_name":"model","token_ids":[%d,2,3,4],"reservation_id":"r%d"}`, i, i)
	})
	if got[200] != 64 {
		t.Errorf("statuses %v, want 64 of 200", got)
	}
	for _, l := range s.loads()[0].Loads {
		if l.Requests != 8 || l.Prefill != 32 || l.Blocks != 8 {
			t.Errorf("%+v, want 8 requests, 32 tokens, 8 blocks", l)
		}
	}
	s.together(64, func(i int) (string, string, string) { return "DELETE", fmt.Sprint("/reservations/r", i), "" })
	for _, l := range s.loads()[0].Loads {
		if l.Requests != 0 || l.Prefill != 0 || l.Blocks != 0 {
			t.Errorf("after all are freed: %+v", l)
		}
	}
}

// TestSelectionEvents is scenario 29, with a simulated worker whose cache is told of over ZMQ.
func TestSelectionEvents(t *testing.T) {
	sim := startSimulated(t, 2, 1, 4)
	s := startSelector(t)
	s.register(sim)
	prompt := `{"model":"sim-model","prompt":"` + strings.Repeat("abcdefgh", 16) + `","max_tokens":1}` // 32 tokens
	resp, err := http.Post(sim.url+"/v1/completions", "application/json", strings.NewReader(prompt))
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("the worker answers %v, %v", resp, err)
	}
	_ = resp.Body.Close()
	tokens := read[struct{ Tokens []uint32 }](t, postText(t, sim.url+"/tokenize", prompt)).Tokens
	ask := `{"model_name":"sim-model","token_ids":` + asJSON(tokens)
	device := func() int {
		rows := read[struct {
			Workers []struct {
				Worker int `json:"worker_id"`
				Device int `json:"device_blocks"`
			}
		}](t, s.post("/overlap_scores", ask+`}`, 200)).Workers
		if len(rows) != 2 || rows[0].Worker != 1 || rows[1].Device != 0 {
			t.Fatalf("overlaps %+v, want those of two workers, with none on the second", rows)
		}
		return rows[0].Device
	}
	// What was published before we had subscribed comes once something follows it.
	tries := 0
	eventually(t, "the blocks are known", func() bool {
		tries++
		postText(t, sim.url+"/v1/completions", fmt.Sprintf(`{"model":"sim-model","prompt":"%016d","max_tokens":1}`, tries))
		return device() == 8
	})
	s.do(step{do: "POST /select_and_reserve", body: ask + `,"reservation_id":"r"}`, status: 200,
		want: `{"worker_id":1,"overlap":{"gpu":32,"cpu":32,"disk":32,"longest_matched":32,"dp":{"0":32}},"effective_prefill_tokens":0}`})
	s.do(step{do: "PATCH /workers/1", body: `{"endpoint":"http://x"}`, status: 200, want: `{"lifecycle":"schedulable","endpoint":"http://x"}`})
	if n := device(); n != 8 {
		t.Errorf("after a change of the endpoint %d blocks are known, want 8", n)
	}
	s.do(step{do: "PATCH /workers/1", body: `{"kv_events_endpoints":{"0":"tcp://127.0.0.1:1"}}`, status: 200, want: `{"lifecycle":"schedulable"}`})
	if n := device(); n != 0 {
		t.Errorf("after a change of the events' endpoint %d blocks are known, want 0", n)
	}
	s.do(step{do: "POST /reservations/r/output_block", body: `{}`, status: 200}) // it is still booked
}

func postText(t *testing.T, url, body string) string {
	t.Helper()
	resp, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	var raw json.RawMessage
	if err := json.NewDecoder(resp.Body).Decode(&raw); err != nil {
		t.Fatal(err)
	}
	return string(raw)
}
