package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// step is one call of a scenario and what its answer must be, or what a simulated worker is to hold.
type step struct {
	held   *placement // instead of a call
	do     string     // method and path
	body   string     // sent as JSON, unless empty
	status int        //
	want   string     // JSON that the answer must hold: objects may have more names, arrays no more elements
	absent []string   // names that the answer, an object, must not have
	text   string     // part of the answer
	header [2]string
	bare   bool // the body is sent without Content-Type
}

// placement is a prompt that a rank of a simulated worker computes. After the step the process knows of
// its blocks, by the events of that rank.
type placement struct {
	in         string // the partition, as bodies name it
	worker, dp int
	tokens     string // of whole blocks
}

// scenario is a life of a fresh process.
type scenario struct {
	name  string
	args  []string
	steps []step
	more  func(t *testing.T, f *engines, s *selector) // after the steps
}

// Partitions and prompts of the scenarios, whose blocks have 4 tokens.
const (
	inModel   = `"model_name":"model"`
	block14   = `1,2,3,4`
	prompt14  = inModel + `,"token_ids":[` + block14 + `]`
	prompt16  = inModel + `,"token_ids":[` + block14 + `,5,6]`
	reserve14 = `{` + prompt14 + `,"reservation_id":"res-a"}`
	dumped14  = `"tokens_hash":14643705804678351452` // of block14, in a dump
)

// holds is the step after which a rank holds block14.
func holds(in string, worker, dp int) step { return step{held: &placement{in, worker, dp, block14}} }

// overlaps is the step that finds the ranks of a partition with so many blocks of block14.
func overlaps(in, rows string) step {
	return step{do: "POST /overlap_scores", body: `{` + in + `,"token_ids":[` + block14 + `]}`, status: 200, want: `{"block_size":4,"num_blocks":1,"workers":` + rows + `}`}
}

// load is the step that finds worker 1 with such a load.
func load(prefill, blocks, requests int) step {
	return step{do: "GET /loads", status: 200, want: fmt.Sprintf(
		`[{"loads":[{"worker_id":1,"dp_rank":0,"potential_prefill_tokens":%d,"potential_decode_blocks":%d,"active_requests":%d}],"pending_count":0}]`,
		prefill, blocks, requests)}
}

// engines are the simulated workers of all scenarios: 8 of 4 ranks each, of which a registration may
// name some.
type engines struct {
	*simulated
	others int // prompts that were only to follow what had to be known
}

// body registers one of the engines with the one rank 0, after changes to the text by pairs.
func (f *engines) body(id int, changes ...string) string {
	events, replay := f.ports(id-1, 0)
	return strings.NewReplacer(changes...).Replace(fmt.Sprintf(
		`{"worker_id":%d,"model_name":"model","endpoint":%q,"block_size":4,"kv_events_endpoint":"tcp://127.0.0.1:%d","replay_endpoint":"tcp://127.0.0.1:%d"}`,
		id, f.urls[id-1], events, replay))
}

// registers is the step that registers a worker, to be scheduled.
func (f *engines) registers(id int, changes ...string) step {
	return step{do: "POST /workers", body: f.body(id, changes...), status: 201, want: `{"lifecycle":"schedulable"}`, absent: []string{"not_schedulable_reasons"}}
}

// registersRanks is the step that registers worker 2 with its ranks 2 and 3.
func (f *engines) registersRanks() step {
	first, replay := f.ports(1, 2)
	return step{do: "POST /workers", status: 201, want: `{"lifecycle":"schedulable"}`, body: fmt.Sprintf(
		`{"worker_id":2,"model_name":"model","endpoint":%q,"block_size":4,"data_parallel_start_rank":2,"data_parallel_size":2,
		"kv_events_endpoints":{"2":"tcp://127.0.0.1:%d","3":"tcp://127.0.0.1:%d"},"replay_endpoint":"tcp://127.0.0.1:%d"}`, f.urls[1], first, first+1, replay)}
}

// hold has a rank compute a prompt, and waits until the process knows of its blocks. What was
// published before the process had subscribed comes once something follows it, and then the process
// goes through all that the rank ever published: the prompt may be known of an earlier scenario, and
// be forgotten again with its end. So a prompt that none had before follows, and once that is known,
// what went before is, too.
func (f *engines) hold(s *selector, h *placement) {
	s.t.Helper()
	f.complete(h.worker-1, h.dp, json.RawMessage("["+h.tokens+"]"))
	known := func(tokens string) bool {
		row := fmt.Sprintf(`"worker_id":%d,"dp_rank":%d,"device_blocks":%d,`, h.worker, h.dp, strings.Count(tokens, ",")/4+1)
		return strings.Contains(s.post("/overlap_scores", `{`+h.in+`,"token_ids":[`+tokens+`]}`, 200), row)
	}
	eventually(s.t, fmt.Sprintf("it is known that worker %d, rank %d holds %s", h.worker, h.dp, h.tokens), func() bool {
		f.others++
		follows := fmt.Sprintf("%d,0,0,0", 1_000_000+f.others)
		f.complete(h.worker-1, h.dp, json.RawMessage("["+follows+"]"))
		for range 100 {
			if known(follows) {
				return known(h.tokens)
			}
			time.Sleep(time.Millisecond)
		}
		return false
	})
}

// TestSelectionScenarios are the acceptance scenarios of the selection service, by their numbers.
// Each is a process with KV events on, whose workers are simulated ones that publish over ZMQ: what
// is cached, a request to the worker has brought there. No scenario needs what they do not have,
// which is tiers below the device.
func TestSelectionScenarios(t *testing.T) {
	f := &engines{simulated: startSimulated(t, 8, 4, 4)}
	for _, sc := range scenarios(t, f) {
		t.Run(sc.name, func(t *testing.T) {
			f.empty()
			s := startSelector(t, sc.args...)
			for _, st := range sc.steps {
				if st.held != nil {
					f.hold(s, st.held)
					continue
				}
				s.do(st)
			}
			if sc.more != nil {
				sc.more(t, f, s)
			}
		})
	}
}

func scenarios(t *testing.T, f *engines) []scenario {
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
	registered, ranks := f.registers(1), f.registersRanks()
	batched := f.registers(1, `{`, `{"max_num_batched_tokens":4,`)
	return []scenario{
		{name: "1 no workers", steps: []step{
			{do: "GET /health", status: 200, want: `{"status":"ok"}`},
			{do: "GET /ready", status: 503, want: `{"ready":false,"schedulable_workers":0,"workers":[]}`},
			{do: "POST /select", body: `{` + prompt14 + `}`, status: 503, text: "no schedulable workers are available"},
		}},
		{name: "2 without max_num_batched_tokens", steps: []step{
			registered, {do: "GET /ready", status: 200, want: `{"ready":true,"schedulable_workers":1}`}, holds(inModel, 1, 0),
		}},
		{name: "3 with a queue threshold", args: []string{"--router-queue-threshold", "1.0"}, steps: []step{
			{do: "POST /workers", body: f.body(1), status: 201, want: `{"lifecycle":"incomplete"}`, text: `"not_schedulable_reasons":["max_num_batched_tokens`},
			{do: "POST /select", body: `{` + prompt14 + `}`, status: 503},
		}},
		{name: "4 with classes that have none", args: []string{"--router-policy-config", unlimited}, steps: []step{registered, holds(inModel, 1, 0)}},
		{name: "5 without endpoint", steps: []step{
			registered,
			{do: "POST /workers", body: f.body(2, `"endpoint"`, `"no_endpoint"`), status: 201, want: `{"lifecycle":"incomplete","not_schedulable_reasons":["endpoint is required"]}`},
			{do: "POST /reservations", body: `{"reservation_id":"r","model_name":"model","worker_id":2,"sequence_hashes":[1],"isl_tokens":4}`, status: 404, text: "schedulable worker 2 not found for model=model tenant=default"},
		}},
		{name: "6 select", steps: []step{
			registered,
			{do: "POST /select", body: `{` + prompt14 + `,"selection_id":"sel-a"}`, status: 200, absent: []string{"reservation_id", "cached_tokens", "effective_overlap_blocks"},
				want: `{"selection_id":"sel-a","model_name":"model","tenant_id":"default","worker_id":1,"dp_rank":0,"endpoint":"` + f.urls[0] + `","block_size":4,
				"overlap":{"longest_matched":0,"gpu":0,"cpu":0,"disk":0,"dp":{"0":0}},"effective_prefill_tokens":4}`},
			load(0, 0, 0),
			holds(inModel, 1, 0),
			{do: "POST /select", body: `{` + prompt16 + `,"selection_id":"sel-b"}`, status: 200,
				want: `{"selection_id":"sel-b","worker_id":1,"overlap":{"longest_matched":4,"gpu":4,"cpu":4,"disk":4,"dp":{"0":4}},"effective_prefill_tokens":2}`},
			load(0, 0, 0),
			f.registers(2), f.registers(3),
			{held: &placement{inModel, 3, 0, block14 + `,5,6,7,8`}},
			{do: "POST /select", body: `{` + inModel + `,"token_ids":[` + block14 + `,5,6,7,8,9]}`, status: 200, absent: []string{"selection_id"},
				want: `{"worker_id":3,"endpoint":"` + f.urls[2] + `","overlap":{"longest_matched":8,"gpu":8,"dp":{"0":8}},"effective_prefill_tokens":1}`},
		}},
		{name: "7 select and reserve", steps: []step{
			registered,
			{do: "POST /select_and_reserve", body: reserve14, status: 200, want: `{"reservation_id":"res-a","effective_prefill_tokens":4}`},
			load(4, 1, 1),
			{do: "POST /select_and_reserve", body: reserve14, status: 409, text: "Request res-a already exists (assigned to worker WorkerWithDpRank { worker_id: 1, dp_rank: 0 })"},
			{do: "DELETE /reservations/res-a", status: 200, want: `{"status":"ok"}`},
			load(0, 0, 0),
			{do: "POST /select_and_reserve", body: reserve14, status: 200},
			holds(inModel, 1, 0),
			{do: "POST /select_and_reserve", body: `{` + prompt16 + `,"reservation_id":"res-b"}`, status: 200, want: `{"reservation_id":"res-b","overlap":{"gpu":4},"effective_prefill_tokens":2}`},
			load(6, 1, 2),
		}},
		{name: "8 without prefill tracking", steps: []step{
			registered, holds(inModel, 1, 0),
			{do: "POST /select_and_reserve", body: `{` + prompt16 + `,"router_config_override":{"track_prefill_tokens":false}}`, status: 200, want: `{"effective_prefill_tokens":2}`},
			load(0, 1, 1),
		}},
		{name: "9 a booking and its prefill", steps: []step{
			registered,
			{do: "POST /reservations", body: `{"reservation_id":"res-b","model_name":"model","worker_id":1,"sequence_hashes":[1],"isl_tokens":4,"effective_prefill_tokens":4}`, status: 201,
				want: `{"reservation_id":"res-b","model_name":"model","tenant_id":"default","worker_id":1,"dp_rank":0,"endpoint":"` + f.urls[0] + `"}`},
			load(4, 1, 1),
			{do: "POST /reservations/res-b/prefill_complete", status: 200},
			load(0, 1, 1),
			{do: "POST /reservations/res-b/prefill_complete", status: 200},
			holds(inModel, 1, 0), // which is not taken off what the client says
			{do: "POST /reservations", body: `{"reservation_id":"res-c","worker_id":1,"effective_prefill_tokens":4,` + prompt14 + `}`, status: 201},
			load(4, 2, 2),
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
		{name: "13 ranks of a worker", steps: []step{
			registered, ranks,
			overlaps(inModel, `[{"worker_id":1,"dp_rank":0,"device_blocks":0},{"worker_id":2,"dp_rank":2,"device_blocks":0},{"worker_id":2,"dp_rank":3,"device_blocks":0}]`),
			holds(inModel, 2, 3),
			overlaps(inModel, `[{"worker_id":1,"dp_rank":0,"device_blocks":0},{"worker_id":2,"dp_rank":2,"device_blocks":0},
				{"worker_id":2,"dp_rank":3,"device_blocks":1,"host_pinned_blocks":1,"disk_blocks":1,"router_credit_blocks":1}]`),
			{do: "POST /select", body: `{` + prompt14 + `}`, status: 200, want: `{"worker_id":2,"dp_rank":3,"overlap":{"gpu":4,"dp":{"2":0,"3":4}},"effective_prefill_tokens":0}`},
		}},
		{name: "14 a rank that is none", steps: []step{
			registered, ranks,
			{do: "POST /reservations", body: `{"reservation_id":"r","model_name":"model","worker_id":2,"sequence_hashes":[1],"isl_tokens":4}`, status: 404, text: "Worker WorkerWithDpRank { worker_id: 2, dp_rank: 0 } not found"},
		}},
		{name: "15 an endpoint of events that is none", steps: []step{
			{do: "POST /workers", body: f.body(1, `"kv_events_endpoint":`, `"data_parallel_size":2,"kv_events_endpoints":{"1":"127.0.0.1","0":`, `,"replay`, `},"replay`), status: 201,
				want: `{"lifecycle":"incomplete"}`, text: `"not_schedulable_reasons":["reconciliation failed: invalid kv_events endpoint for worker 1 dp_rank 1: invalid ZMQ endpoint`},
			{do: "PATCH /workers/1", body: f.eventsOf(1, 2), status: 200, want: `{"lifecycle":"schedulable"}`},
			holds(inModel, 1, 1),
			overlaps(inModel, `[{"dp_rank":0,"device_blocks":0},{"dp_rank":1,"device_blocks":1}]`),
		}},
		{name: "16 another block size", steps: []step{
			registered,
			{do: "POST /workers", body: f.body(2, `:4,`, `:8,`), status: 201,
				want: `{"lifecycle":"incomplete","not_schedulable_reasons":["reconciliation failed: block_size mismatch for model=model tenant=default: existing=4 requested=8"]}`},
		}},
		{name: "17 a worker moves", steps: []step{
			registered, holds(inModel, 1, 0),
			{do: "POST /workers", body: f.body(1, `{`, `{"tenant_id":"b",`), status: 201, want: `{"lifecycle":"schedulable","tenant_id":"b"}`},
			{do: "GET /workers?tenant_id=default", status: 200, text: `[]`},
			{do: "GET /dump", status: 200, want: `{"model:default":{"events":[]}}`},
			{do: "POST /select", body: `{` + prompt14 + `}`, status: 503, text: "no schedulable workers for model=model tenant=default"},
			{do: "POST /select", body: `{` + prompt14 + `,"tenant_id":"b"}`, status: 200},
			holds(inModel+`,"tenant_id":"b"`, 1, 0),
			{do: "GET /dump", status: 200, want: `{"model:default":{"events":[]}}`, text: dumped14},
		}},
		{name: "18 a worker is deleted", steps: []step{
			registered, holds(inModel, 1, 0),
			{do: "POST /select_and_reserve", body: reserve14, status: 200},
			{do: "DELETE /workers/1", status: 200, want: `{"lifecycle":"unschedulable"}`},
			{do: "POST /reservations/res-a/prefill_complete", status: 404},
			{do: "GET /workers", status: 200, want: `[{"worker_id":1,"lifecycle":"unschedulable"}]`},
			{do: "GET /dump", status: 200, want: `{"model:default":{"events":[]}}`},
			{do: "DELETE /workers/1", status: 200},
			{do: "DELETE /workers/99", status: 404, text: "worker 99 not found"},
			{do: "GET /loads", status: 200, want: `[{"model_name":"model","loads":[]}]`},
			registered, holds(inModel, 1, 0), load(0, 0, 0),
		}},
		{name: "19 bookings in two partitions", steps: []step{
			registered, f.registers(2, `"model"`, `"n"`), holds(inModel, 1, 0),
			{do: "POST /select_and_reserve", body: reserve14, status: 200, want: `{"overlap":{"gpu":4},"effective_prefill_tokens":0}`},
			{do: "POST /select_and_reserve", body: `{"model_name":"n","token_ids":[1,2,3,4],"reservation_id":"res-a"}`, status: 409, text: "already exists"},
			{do: "POST /select_and_reserve", body: `{"model_name":"n","token_ids":[1,2,3,4],"reservation_id":"res-n"}`, status: 200, want: `{"overlap":{"gpu":0},"effective_prefill_tokens":4}`},
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
			batched, {held: &placement{inModel, 1, 0, `5,6,7,8`}},
			{do: "POST /select_and_reserve", body: `{` + inModel + `,"token_ids":[5,6,7,8]}`, header: class("latency"), status: 200, want: `{"effective_prefill_tokens":0}`}, // computes nothing
			{do: "POST /select_and_reserve", body: reserve14, header: class("latency"), status: 200},
			{do: "POST /select", body: `{` + prompt14 + `}`, header: class("batch"), status: 200},
			{do: "POST /select", body: `{` + prompt14 + `}`, header: class("latency"), status: 503,
				want: `{"error":"router policy class \"latency\" queue requests limit reached (current=0, limit=0)","details":{"policy_class":"latency","limit_kind":"requests","current":0,"limit":0}}`},
		}},
		{name: "22 a request waits", args: []string{"--router-queue-threshold", "0"}, steps: []step{
			batched, {do: "POST /select_and_reserve", body: reserve14, status: 200},
		}, more: waits},
		{name: "23 two selectors", args: []string{"--replica-sync-port", fmt.Sprint(unusedPort(t))}, more: twoSelectors},
		{name: "24 without replicas", steps: []step{
			{do: "GET /replica_sync/peers", status: 200, text: "[]"},
			{do: "POST /replica_sync/register_peer", body: `{"endpoint":"bad"}`, status: 409, text: "replica sync is disabled"},
			{do: "POST /replica_sync/register_peer", body: `{}`, status: 422, text: "endpoint"},
		}},
		{name: "25 a dump", steps: []step{
			registered, {do: "GET /dump", status: 200, want: `{"model:default":{"block_size":4,"events":[]}}`},
			holds(inModel, 1, 0), {do: "GET /dump", status: 200, want: `{"model:default":{"block_size":4}}`, text: dumped14},
		}},
		{name: "26 a burst", more: bursts},
		{name: "27 one ID for all", steps: []step{registered}, more: func(t *testing.T, _ *engines, s *selector) {
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
		{name: "29 a worker is changed", steps: []step{
			registered, holds(inModel, 1, 0),
			{do: "POST /select_and_reserve", body: `{` + prompt14 + `,"reservation_id":"r"}`, status: 200, want: `{"worker_id":1,"effective_prefill_tokens":0}`},
			{do: "PATCH /workers/1", body: `{"endpoint":"http://x"}`, status: 200, want: `{"lifecycle":"schedulable","endpoint":"http://x"}`},
			overlaps(inModel, `[{"worker_id":1,"device_blocks":1}]`), load(0, 1, 1),
			{do: "PATCH /workers/1", body: `{"kv_events_endpoints":{"0":"tcp://127.0.0.1:1"}}`, status: 200, want: `{"lifecycle":"schedulable"}`},
			overlaps(inModel, `[{"worker_id":1,"device_blocks":0}]`), load(0, 1, 1),
			{do: "PATCH /workers/1", body: f.eventsOf(1, 1), status: 200, want: `{"lifecycle":"schedulable"}`},
			holds(inModel, 1, 0), load(0, 1, 1),
		}},
		{name: "30 paths", steps: []step{
			{do: "GET /nope", status: 404, want: `{"error":"route not found"}`},
			{do: "PUT /workers", status: 405, want: `{"error":"method not allowed"}`},
			{do: "PATCH /workers/abc", body: `{}`, status: 400, text: "Invalid URL: Cannot parse"},
			{do: "GET /loads?model_name=a&model_name=b", status: 400, text: "query"},
		}},
		{name: "with KV events off", args: []string{"--router-kv-events=false"}, steps: []step{
			{do: "POST /workers", body: `{"worker_id":1,"model_name":"model","endpoint":"http://worker-1:8000","block_size":4}`, status: 201, want: `{"lifecycle":"schedulable"}`},
			{do: "POST /select_and_reserve", body: reserve14, status: 200, want: `{"overlap":{"gpu":0},"effective_prefill_tokens":4}`},
			load(4, 1, 1),
		}},
	}
}

// eventsOf is a change of a worker to where the first ranks of one of the engines publish.
func (f *engines) eventsOf(id, ranks int) string {
	all := make([]string, ranks)
	for dp := range all {
		events, _ := f.ports(id-1, dp)
		all[dp] = fmt.Sprintf(`"%d":"tcp://127.0.0.1:%d"`, dp, events)
	}
	return `{"kv_events_endpoints":{` + strings.Join(all, ",") + `}}`
}

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
func waits(t *testing.T, _ *engines, s *selector) {
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

// bursts is scenario 26, with workers that hold nothing and with some that hold the same.
func bursts(t *testing.T, f *engines, s *selector) {
	for id := 1; id <= f.count; id++ {
		s.do(f.registers(id))
	}
	for _, tt := range []struct {
		cached string
		blocks uint64
	}{{"", 8}, {block14 + ",", 8 + 1}} {
		if tt.cached != "" {
			for id := 1; id <= f.count; id++ {
				f.hold(s, &placement{inModel, id, 0, block14})
			}
		}
		got := s.together(64, func(i int) (string, string, string) {
			return "POST", "/select_and_reserve", fmt.Sprintf(`{%s,"token_ids":[%s%d,2,3,4],"reservation_id":"r%d"}`, inModel, tt.cached, 100+i, i)
		})
		if got[200] != 64 {
			t.Errorf("statuses %v, want 64 of 200", got)
		}
		for _, l := range s.loads()[0].Loads {
			if l.Requests != 8 || l.Prefill != 32 || l.Blocks != tt.blocks {
				t.Errorf("cached [%s]: %+v, want 8 requests, 32 tokens, %d blocks", tt.cached, l, tt.blocks)
			}
		}
		s.together(64, func(i int) (string, string, string) { return "DELETE", fmt.Sprint("/reservations/r", i), "" })
		s.booksAreEmpty()
	}
}

// booksAreEmpty checks that nothing is booked, and nobody waits.
func (s *selector) booksAreEmpty() {
	s.t.Helper()
	for _, p := range s.loads() {
		for _, l := range p.Loads {
			if l.Prefill != 0 || l.Blocks != 0 || l.Requests != 0 {
				s.t.Errorf("%s, %s: in the end %+v is booked", p.Model, p.Tenant, l)
			}
		}
		if p.Pending != 0 {
			s.t.Errorf("%s, %s: in the end %d wait", p.Model, p.Tenant, p.Pending)
		}
	}
}
