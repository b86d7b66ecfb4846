package selectservice_test

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"spillway/router"
	"spillway/selectservice"
)

// clock is one that tests put forward.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) read() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) forward(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// TestExpiry checks that what nobody frees is dropped by its age, which progress changes only if it
// is to.
func TestExpiry(t *testing.T) {
	for _, renew := range []bool{false, true} {
		t.Run(fmt.Sprint("renew=", renew), func(t *testing.T) {
			cfg := config()
			cfg.Renew = renew
			c := &clock{now: time.Now()}
			s := start(t, cfg)
			s.server.SetClock(c.read)
			s.do("POST", "/workers", `{"worker_id":1,"endpoint":"http://w","block_size":4}`, 201)
			for _, id := range []string{"idle", "prefill", "output"} {
				s.do("POST", "/select_and_reserve", `{"token_ids":[1,2,3,4],"reservation_id":"`+id+`"}`, 200)
			}
			c.forward(200 * time.Second)
			s.do("POST", "/reservations/prefill/prefill_complete", "", 200)
			s.do("POST", "/reservations/output/output_block", "{}", 200)
			c.forward(150 * time.Second)
			s.server.Sweep()
			want := map[string]int{"idle": 404, "prefill": 404, "output": 404}
			if renew {
				want["prefill"], want["output"] = 200, 200
			}
			for id, status := range want {
				s.do("POST", "/reservations/"+id+"/prefill_complete", "", status)
			}
			c.forward(600 * time.Second)
			s.server.Sweep()
			s.empty()
			if n := s.server.Claims(); n != 0 {
				t.Errorf("%d IDs are known, want 0", n)
			}
			s.do("POST", "/select_and_reserve", `{"token_ids":[1,2,3,4],"reservation_id":"idle"}`, 200)
			s.do("DELETE", "/reservations/idle", "", 200)
			if n := s.server.Claims(); n != 0 {
				t.Errorf("after a DELETE %d IDs are known, want 0", n)
			}
		})
	}
}

func grouped(t *testing.T, change func(*selectservice.Config)) (*running, *clock) {
	cfg := config()
	cfg.APIRevision = selectservice.RevisionRoutingGroup
	if change != nil {
		change(&cfg)
	}
	c := &clock{now: time.Now()}
	s := startWith(t, cfg, router.DefaultConfig(), selectservice.Link{})
	s.server.SetClock(c.read)
	s.do("POST", "/workers", `{"worker_id":1,"routing_group":"g","endpoint":"http://w","block_size":4}`, 201)
	return s, c
}

// TestRoutingGroups checks the other contract: its names, and selections that are booked later.
func TestRoutingGroups(t *testing.T) {
	s, c := grouped(t, nil)
	if why := s.lacks("/workers?routing_group=g", `[{"routing_group":"g"}]`); why != "" {
		t.Error(why)
	}
	text := s.do("POST", "/select_and_reserve", `{"routing_group":"g","tenant_id":"g","token_ids":[1,2,3,4,5],"selection_id":"a"}`, 200)
	for _, part := range []string{`{"selection_id":"a","sequence_hashes":[-3803038269031200164],"isl_tokens":5,"track_prefill_tokens":true,`, `"routing_group":"g"`} {
		if !strings.Contains(text, part) {
			t.Errorf("answer %s, want %s", text, part)
		}
	}
	if strings.Contains(text, "reservation_id") || strings.Contains(text, "tenant_id") {
		t.Errorf("answer %s has names of the other contract", text)
	}
	if text := s.do("POST", "/select_and_reserve", `{"routing_group":"g","token_ids":[1]}`, 200); !regexp.MustCompile(`^\{"selection_id":"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"`).MatchString(text) {
		t.Errorf("answer %s, want a UUID", text)
	}
	text = s.do("POST", "/select", `{"routing_group":"g","token_ids":[9,9,9,9,9],"selection_id":"b"}`, 200)
	if strings.Contains(text, "sequence_hashes") || strings.Contains(text, "isl_tokens") {
		t.Errorf("POST /select = %s", text)
	}
	s.do("POST", "/reservations", `{"routing_group":"g","isl_tokens":4}`, 422)
	s.do("POST", "/reservations", `{"routing_group":"other","selection_id":"b"}`, 404)
	if text := s.do("POST", "/reservations", `{"routing_group":"g","selection_id":"b"}`, 201); !strings.HasPrefix(text, `{"selection_id":"b","model_name":"default","routing_group":"g","worker_id":1,"dp_rank":0`) {
		t.Errorf("POST /reservations = %s", text)
	}
	if text := s.do("POST", "/reservations", `{"routing_group":"g","selection_id":"b"}`, 404); !strings.Contains(text, "no pending selection b for model=default routing_group=g (") {
		t.Errorf("POST /reservations = %s", text)
	}
	if why := s.lacks("/loads", `[{"loads":[{"potential_prefill_tokens":11,"potential_decode_blocks":2,"active_requests":3}]}]`); why != "" {
		t.Error(why)
	}
	// One that cannot be booked stays, and an explicit booking ends it before anything else is looked at.
	s.do("POST", "/select", `{"routing_group":"g","token_ids":[1],"selection_id":"a"}`, 200)
	s.do("POST", "/reservations", `{"routing_group":"g","selection_id":"a"}`, 409)
	s.do("DELETE", "/reservations/a", "", 200)
	s.do("POST", "/reservations", `{"routing_group":"g","selection_id":"a"}`, 201)
	s.do("POST", "/select", `{"routing_group":"g","token_ids":[1],"selection_id":"c","router_config_override":{"track_prefill_tokens":false}}`, 200)
	s.do("POST", "/reservations", `{"routing_group":"g","selection_id":"c","worker_id":99,"sequence_hashes":[],"isl_tokens":1}`, 404)
	s.do("POST", "/reservations", `{"routing_group":"g","selection_id":"c"}`, 404)
	s.do("POST", "/reservations", `{"routing_group":"g","selection_id":"d","worker_id":1,"sequence_hashes":[],"isl_tokens":9,"effective_prefill_tokens":9,"track_prefill_tokens":false}`, 201)
	// Time passes.
	s.do("POST", "/select", `{"routing_group":"g","token_ids":[1],"selection_id":"e"}`, 200)
	c.forward(121 * time.Second)
	s.do("POST", "/reservations", `{"routing_group":"g","selection_id":"e"}`, 404)
}

// TestTenantNames checks that the tenant is understood by its name in the other contract too.
func TestTenantNames(t *testing.T) {
	brief := start(t, config())
	grouped, _ := grouped(t, nil)
	for _, tt := range []struct {
		s          *running
		own, other string
	}{{brief, "tenant_id", "routing_group"}, {grouped, "routing_group", "tenant_id"}} {
		tt.s.do("POST", "/workers", `{"worker_id":7,"`+tt.other+`":"a","endpoint":"http://w","block_size":4}`, 201)
		tt.s.do("POST", "/workers", `{"worker_id":8,"`+tt.own+`":"b","endpoint":"http://w","block_size":4}`, 201)
		for query, want := range map[string]string{
			"": "", "?" + tt.own + "=a": "a", "?" + tt.other + "=a": "a", "?" + tt.other + "=b": "b", "?" + tt.own + "=b&" + tt.other + "=b": "b", "?" + tt.other + "=c": "",
		} {
			rows := tt.s.do("GET", "/loads"+query, "", 200)
			if query != "" && want == "" && rows != "[]" || want != "" && (strings.Count(rows, tt.own) != 1 || !strings.Contains(rows, `"`+tt.own+`":"`+want+`"`)) {
				t.Errorf("GET /loads%s = %s, want that of %q alone", query, rows, want)
			}
		}
		for names, want := range map[string]int{`"` + tt.other + `":"a"`: 7, `"` + tt.own + `":"b"`: 8, `"` + tt.own + `":"b","` + tt.other + `":"b"`: 8} {
			if text := tt.s.do("POST", "/select", `{`+names+`,"token_ids":[1]}`, 200); !strings.Contains(text, fmt.Sprintf(`"worker_id":%d,`, want)) || strings.Contains(text, tt.other) {
				t.Errorf("POST /select with %s = %s, want worker %d and nothing of %s", names, text, want, tt.other)
			}
		}
		both := `{"` + tt.own + `":"a","` + tt.other + `":"b","worker_id":7,"token_ids":[1],"reservation_id":"r","selection_id":"r"}`
		for _, path := range []string{"/workers", "/select", "/select_and_reserve", "/reservations", "/potential_loads", "/overlap_scores"} {
			if text := tt.s.do("POST", path, both, 400); !strings.Contains(text, "tenant_id") || !strings.Contains(text, "routing_group") {
				t.Errorf("POST %s with two tenants = %s, want both names", path, text)
			}
		}
		tt.s.do("GET", "/workers?"+tt.own+"=a&"+tt.other+"=b", "", 400)
		tt.s.do("POST", "/select", `{"`+tt.other+`":null,"token_ids":[1]}`, 422)
		tt.s.do("PATCH", "/workers/7", `{"`+tt.own+`":"x","`+tt.other+`":"y"}`, 200) // it cannot move
		tt.s.empty()
	}
}

// TestReuse checks that who says that its blocks are not shared has blocks of its own.
func TestReuse(t *testing.T) {
	s := start(t, config())
	s.do("POST", "/workers", `{"worker_id":1,"endpoint":"http://w","block_size":4}`, 201)
	s.do("POST", "/select_and_reserve", `{"token_ids":[1,2,3,4]}`, 200)
	for reuse, want := range map[bool]string{true: "1", false: "2"} {
		text := s.do("POST", "/potential_loads", fmt.Sprintf(`{"token_ids":[1,2,3,4],"router_config_override":{"assume_kv_reuse":%v}}`, reuse), 200)
		if got := between(text, `"potential_decode_blocks":`, ","); got != want {
			t.Errorf("with reuse %v there would be %s blocks, want %s", reuse, got, want)
		}
	}
}

// TestPendingBounds checks that the oldest selections go when there are too many, or too much.
func TestPendingBounds(t *testing.T) {
	choose := func(s *running, id string, tokens int) {
		s.do("POST", "/select", fmt.Sprintf(`{"routing_group":"g","token_ids":[1%s],"selection_id":%q}`, strings.Repeat(",2", tokens-1), id), 200)
	}
	book := func(s *running, id string, status int) {
		t.Helper()
		s.do("POST", "/reservations", fmt.Sprintf(`{"routing_group":"g","selection_id":%q}`, id), status)
	}
	s, _ := grouped(t, func(cfg *selectservice.Config) { cfg.CacheMaxEntries = 2 })
	for _, id := range []string{"a", "b", "a", "c"} {
		choose(s, id, 1)
	}
	book(s, "b", 404)
	book(s, "a", 201)
	book(s, "c", 201)
	s, _ = grouped(t, func(cfg *selectservice.Config) { cfg.CacheMaxBytes = 80 })
	choose(s, "a", 4)
	choose(s, "b", 4*8) // 64 bytes of hashes and 9 of names
	book(s, "a", 404)
	book(s, "b", 201)
	choose(s, "c", 4)
	choose(s, "d", 4*100)
	book(s, "d", 404)
	book(s, "c", 404)
}

// TestOpenAPI checks that the document describes the routes that there are.
func TestOpenAPI(t *testing.T) {
	s := start(t, config())
	var doc struct {
		Paths map[string]map[string]any
	}
	if err := json.Unmarshal([]byte(s.do("GET", "/openapi.json", "", 200)), &doc); err != nil {
		t.Fatal(err)
	}
	for path, methods := range doc.Paths {
		at := strings.NewReplacer("{worker_id}", "0", "{id}", "x").Replace(path)
		for _, method := range []string{"GET", "POST", "PATCH", "DELETE"} {
			_, described := methods[strings.ToLower(method)]
			body := "{"
			if method == "GET" {
				body = ""
			}
			status, text, err := s.call(t.Context(), method, at, body)
			if err != nil || (status == 405) == described || status == 404 && strings.Contains(text, "route") {
				t.Errorf("%s %s = %d %s, %v; described: %v", method, at, status, text, err, described)
			}
		}
	}
	source, err := os.ReadFile("server.go")
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, m := range regexp.MustCompile(`add\(http\.Method\w+, "([^"]+)"`).FindAllStringSubmatch(string(source), -1) {
		paths = append(paths, strings.Replace(m[1], "/workers/{id}", "/workers/{worker_id}", 1))
	}
	if len(paths) < 15 {
		t.Fatalf("only %d routes found", len(paths))
	}
	for _, path := range paths {
		if _, ok := doc.Paths[path]; !ok {
			t.Errorf("%s is not described", path)
		}
	}
}

// TestExplain checks that the terms of all candidates are told, of /select alone.
func TestExplain(t *testing.T) {
	s := start(t, config())
	s.do("POST", "/workers", `{"worker_id":1,"endpoint":"http://w","block_size":4,"data_parallel_size":2}`, 201)
	var got struct {
		Explain []map[string]float64
	}
	if err := json.Unmarshal([]byte(s.do("POST", "/select", `{"token_ids":[1,2,3,4,5,6],"explain":true}`, 200)), &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]float64{
		"worker_id": 1, "dp_rank": 0, "cost": 2.5, "raw_prefill_blocks": 1.5, "prefill_cost": 1.5, "decode_blocks_cost": 1, "additional_blocks": 1,
		"effective_prefill_tokens": 6, "taint_factor": 1, "credit_factor": 1, "credit_blocks": 0, "requests_cost": 0,
	}
	if len(got.Explain) != 2 {
		t.Fatalf("%d candidates are explained, want 2", len(got.Explain))
	}
	for name, v := range want {
		if have, ok := got.Explain[0][name]; !ok || have != v {
			t.Errorf("%s = %v, %v; want %v", name, have, ok, v)
		}
	}
	for _, body := range []string{`{"token_ids":[1]}`, `{"token_ids":[1],"explain":false}`} {
		if text := s.do("POST", "/select", body, 200); strings.Contains(text, "explain") {
			t.Errorf("POST /select %s = %s", body, text)
		}
	}
	if text := s.do("POST", "/select_and_reserve", `{"token_ids":[1],"explain":true}`, 200); strings.Contains(text, "explain") {
		t.Errorf("POST /select_and_reserve = %s", text)
	}
}

// FuzzBodies reads arbitrary bytes as each route's body: failures are 400 or 422, and what is JSON by
// the standard library and an object is never 400.
func FuzzBodies(f *testing.F) {
	for _, seed := range []string{
		`{"worker_id":1,"kv_events_endpoints":{"0":"tcp://a:1"},"taints":["a"],"topology_domains":{"a":"b"}}`,
		`{"token_ids":[1,2],"block_mm_infos":[{"mm_objects":[{"mm_hash":1,"offsets":[[0,1]]}]},null],"router_config_override":{"router_temperature":1.5}}`,
		`{"pinned_worker":{"worker_id":1,"dp_rank":2},"allowed_worker_ids":[1],"routing_constraints":{"required_taints":["a"],"preferred_taints":{"a":-1e9}}}`,
		`{"routing_group":"a","tenant_id":"b","model_name":"m"}`, `{"block_hashes":[-1],"sequence_hashes":[9223372036854775807],"isl_tokens":3,"priority_jump":0.1,"explain":true,"decay_fraction":0.5}`, `{"a":[{"b":[]}]}`, `[`, `{"a"}`, `{"explain":tru}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var object map[string]any
		valid := json.Unmarshal(body, &object) == nil && object != nil
		for i, status := range selectservice.ReadBodies(body) {
			if !slices.Contains([]int{0, 400, 422}, status) || valid && status == 400 && !strings.Contains(string(body), `\`) && json.Valid(body) && isUTF8(body) {
				t.Errorf("body %d of %q: status %d", i, body, status)
			}
		}
	})
}

func isUTF8(b []byte) bool { return strings.ToValidUTF8(string(b), "") == string(b) }
