package proxy_test

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/proxy"
	"spillway/worker"
)

func TestModels(t *testing.T) {
	a := newScript(t, saying(answer(200, jsonHeader, reply)))
	b := newScript(t, saying(answer(200, jsonHeader, reply)))
	wide, narrow := served("w1", a, "org/m"), served("w2", b, "org/m")
	wide.MaxModelLen, narrow.MaxModelLen = 8192, 4096
	f := begin(t, setup{models: []string{"empty"}, aliases: map[string]string{"short": "org/m"}},
		wide, narrow, served("w3", a, "foo/ready"), served("w4", b, "foo"))

	var list struct {
		Object string
		Data   []map[string]any
	}
	first := f.send("GET", "/v1/models", "")
	if err := json.Unmarshal([]byte(first.body), &list); err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, m := range list.Data {
		ids = append(ids, m["id"].(string))
		if m["object"] != "model" || m["owned_by"] == "" || m["created"].(float64) < 1e9 {
			t.Errorf("entry %v: want object model, an owner and a time", m)
		}
	}
	if want := []string{"foo", "foo/ready", "org/m", "short"}; list.Object != "list" || !slices.Equal(ids, want) {
		t.Errorf("GET /v1/models lists %q as %q, want %q as list", ids, list.Object, want)
	}
	if got := list.Data[2]["max_model_len"]; got != 4096.0 || list.Data[2]["context_window"] != 4096.0 {
		t.Errorf("org/m: max_model_len %v, want 4096, the least over its workers", got)
	}
	if again := f.send("GET", "/v1/models", ""); again.body != first.body {
		t.Errorf("GET /v1/models again = %s, want the same as before: %s", again.body, first.body)
	}

	for _, tt := range []struct {
		path   string
		status int
		want   string // a part of the body
	}{
		{"/v1/models/org/m", 200, `"id":"org/m"`},
		{"/v1/models/org%2Fm", 200, `"id":"org/m"`}, // as SDKs write it
		{"/v1/models/short", 200, `"id":"short"`},
		{"/v1/models/foo", 200, `"id":"foo"`},
		{"/v1/models/foo/ready", 200, `"id":"foo/ready"`}, // a model of that name comes first
		{"/v1/models/foo%2Fready", 200, `"id":"foo/ready"`},
		{"/v1/models/foo/ready/ready", 200, `{"model":"foo/ready","ready":true`},
		{"/v1/models/org/m/ready", 200, `{"model":"org/m","ready":true,"workers":{"registered":2,"routable":2,"busy":0,"free":2}`},
		{"/v1/models/org%2Fm/ready", 200, `{"model":"org/m","ready":true`},
		{"/v1/models/short/ready", 200, `{"model":"org/m","ready":true`},
		{"/v1/models/empty", 503, flat(503, "service_unavailable", "Service temporarily unavailable: No workers available for model empty")},
		{"/v1/models/empty/ready", 200, `{"model":"empty","ready":false,"workers":{"registered":0,"routable":0,"busy":0,"free":0},` +
			`"thresholds":{"active_decode_blocks_threshold":null,"active_prefill_tokens_threshold":null},"detail":[]}`},
		{"/v1/models/nope", 404, flat(404, "not_found", "Model not found: nope")},
		{"/v1/models/nope/ready", 404, flat(404, "not_found", "Model not found: nope")},
		{"/v1/models/", 404, flat(404, "not_found", "Model not found: ")},
	} {
		if g := f.send("GET", tt.path, ""); g.status != tt.status || !strings.Contains(g.body, tt.want) {
			t.Errorf("GET %s = %d %s\nwant %d with %s", tt.path, g.status, g.body, tt.status, tt.want)
		}
	}
}

// TestReadyDetail checks what an operator sees of each worker.
func TestReadyDetail(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{}, served("w1", s), worker.Worker{Name: "w2", Endpoint: s.url() + "/x", Models: []string{"m"}, DPSize: 2, KVTotalBlocks: 100})
	id := f.register(worker.Worker{Name: "w3", Endpoint: s.url() + "/y", Models: []string{"m"}})
	f.list().Inhibit(id, time.Now().Add(time.Hour), time.Now())
	g := f.send("GET", "/v1/models/m/ready", "")
	const want = `{"model":"m","ready":true,"workers":{"registered":3,"routable":2,"busy":0,"free":2},` +
		`"thresholds":{"active_decode_blocks_threshold":null,"active_prefill_tokens_threshold":null},"detail":[` +
		`{"worker":"w1","state":"unknown","ranks":[{"dp_rank":0,"busy":false,"active_decode_blocks":0,"active_prefill_tokens":0}]},` +
		`{"worker":"w2","state":"unknown","ranks":[` +
		`{"dp_rank":0,"busy":false,"active_decode_blocks":0,"kv_total_blocks":100,"active_prefill_tokens":0},` +
		`{"dp_rank":1,"busy":false,"active_decode_blocks":0,"kv_total_blocks":100,"active_prefill_tokens":0}]},` +
		`{"worker":"w3","state":"inhibited","inhibited_ms":N,"ranks":[{"dp_rank":0,"busy":false,"active_decode_blocks":0,"active_prefill_tokens":0}]}]}`
	g.body = regexp.MustCompile(`(_ms":)[1-9][0-9]*`).ReplaceAllString(g.body, "${1}N")
	if g.status != 200 || strings.TrimSpace(g.body) != want {
		t.Errorf("GET /v1/models/m/ready = %d %s\nwant %s", g.status, g.body, want)
	}
}

func TestProbes(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	none := begin(t, setup{models: []string{"m"}})
	none.send("GET", "/health", "").is(t, "GET /health without workers", 200, `{"status":"healthy","endpoints":[],"instances":[]}`+"\n")
	none.send("GET", "/live", "").is(t, "GET /live", 200, `{"status":"live","message":"Service is live"}`+"\n")
	none.send("GET", "/ready", "").is(t, "GET /ready without workers", 503,
		`{"status":"not_ready","stage":"ready","message":"Service is not ready","reason":"no_workers"}`+"\n")

	f := begin(t, setup{}, worker.Worker{ID: 7, Name: "w1", Endpoint: s.url(), Models: []string{"m"}, DPSize: 4},
		worker.Worker{ID: 9, Name: "w2", Endpoint: s.url(), Models: []string{"other"}})
	f.send("GET", "/health", "").is(t, "GET /health", 200, fmt.Sprintf(`{"status":"healthy","endpoints":[%q],"instances":[`+
		`{"model":"m","worker":"w1","instance_id":7,"dp_size":4},{"model":"other","worker":"w2","instance_id":9,"dp_size":1}]}`, s.url())+"\n")
	f.send("GET", "/ready", "").is(t, "GET /ready", 200, `{"status":"ready","message":"Service is ready"}`+"\n")
}

func TestUnknownRoutesAndMethods(t *testing.T) {
	f := begin(t, setup{})
	for _, tt := range []struct {
		method, path string
		status       int
		body, allow  string
	}{
		{"GET", "/nope", 404, flat(404, "not_found", "No route for GET /nope"), ""},
		{"POST", "/v1/chat", 404, flat(404, "not_found", "No route for POST /v1/chat"), ""},
		{"DELETE", "/", 404, flat(404, "not_found", "No route for DELETE /"), ""},
		{"POST", "/v1/messages", 404, flat(404, "not_found", "No route for POST /v1/messages"), ""}, // off
		{"POST", "/v1/messages/count_tokens", 404, flat(404, "not_found", "No route for POST /v1/messages/count_tokens"), ""},
		{"GET", "/v1/chat/completions", 405, flat(405, "method_not_allowed", "Method GET is not allowed on /v1/chat/completions"), "OPTIONS, POST"},
		{"PUT", "/v1/embeddings", 405, flat(405, "method_not_allowed", "Method PUT is not allowed on /v1/embeddings"), "OPTIONS, POST"},
		{"POST", "/v1/models", 405, flat(405, "method_not_allowed", "Method POST is not allowed on /v1/models"), "OPTIONS, GET"},
		{"DELETE", "/v1/models/a/b", 405, flat(405, "method_not_allowed", "Method DELETE is not allowed on /v1/models/a/b"), "OPTIONS, GET"},
		{"POST", "/health", 405, flat(405, "method_not_allowed", "Method POST is not allowed on /health"), "OPTIONS, GET"},
	} {
		f.send(tt.method, tt.path, "").is(t, tt.method+" "+tt.path, tt.status, tt.body,
			"Content-Type: application/json", "Allow: "+tt.allow)
	}
	long := "/" + strings.Repeat("x", 100_000)
	if g := f.send("GET", long, ""); g.status != 404 || len(g.body) > 1000 {
		t.Errorf("GET of a path of 100 kB: %d with a body of %d bytes, want 404 and a short one", g.status, len(g.body))
	}
}

func TestOwnPaths(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{proxy: func(c *proxy.Config) { c.ChatPath, c.ModelsPath, c.HealthPath = "/chat", "/models", "/healthz" }}, served("w", s))
	f.send("POST", "/chat", chatBody).is(t, "POST /chat", 200, reply)
	if got := s.seen()[0].path; got != "/v1/chat/completions" {
		t.Errorf("the worker got %s, want its own path", got)
	}
	for path, want := range map[string]int{"/models": 200, "/models/m": 200, "/healthz": 200, "/v1/models": 404, "/health": 404} {
		if g := f.send("GET", path, ""); g.status != want {
			t.Errorf("GET %s = %d, want %d", path, g.status, want)
		}
	}
	for what, change := range map[string]func(*proxy.Config){
		"two probes":               func(c *proxy.Config) { c.HealthPath = c.LivePath },
		"two APIs":                 func(c *proxy.Config) { c.ResponsesPath = c.ChatPath },
		"messages on responses":    func(c *proxy.Config) { c.EnableAnthropicAPI, c.AnthropicPath = true, c.ResponsesPath },
		"counting on chat":         func(c *proxy.Config) { c.EnableAnthropicAPI, c.ChatPath = true, c.AnthropicPath+"/count_tokens" },
		"a path of our own":        func(c *proxy.Config) { c.MetricsPath = "/busy_threshold" },
		"one of the admin address": func(c *proxy.Config) { apart(c); c.MetricsPath = "/workers" },
	} {
		cfg := proxy.DefaultConfig()
		change(&cfg)
		if _, err := proxy.New(cfg, f.routes, prometheus.NewRegistry(), slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "two routes for") {
			t.Errorf("New with %s on one path: %v, want an error", what, err)
		}
	}
}

func TestAdminOff(t *testing.T) {
	f := begin(t, setup{models: []string{"m"}, proxy: func(c *proxy.Config) { c.DisableAdminAPI = true }})
	for _, method := range []string{"GET", "POST", "DELETE", "PUT"} {
		f.send(method, "/busy_threshold", "").is(t, method, 404, flat(404, "not_found", "No route for "+method+" /busy_threshold"))
	}
	if g := f.send("GET", "/openapi.json", ""); strings.Contains(g.body, "busy_threshold") {
		t.Error("the document lists /busy_threshold although it is off")
	}
}

func TestOpenAPI(t *testing.T) {
	f := begin(t, setup{proxy: func(c *proxy.Config) { c.EnableAnthropicAPI = true }})
	g := f.send("GET", "/openapi.json", "")
	var doc struct {
		OpenAPI string
		Paths   map[string]map[string]struct {
			Summary   string
			Responses map[string]any
		}
	}
	if err := json.Unmarshal([]byte(g.body), &doc); err != nil || g.status != 200 || !strings.HasPrefix(doc.OpenAPI, "3.") {
		t.Fatalf("GET /openapi.json = %d %s, %v", g.status, g.body, err)
	}
	var got []string
	for path, ops := range doc.Paths {
		for method, op := range ops {
			got = append(got, strings.ToUpper(method)+" "+path)
			if op.Summary == "" || len(op.Responses) == 0 {
				t.Errorf("%s %s has no summary or no responses", method, path)
			}
		}
	}
	slices.Sort(got)
	want := []string{
		"DELETE /busy_threshold", "GET /busy_threshold", "GET /docs", "GET /health", "GET /internal/capacity", "GET /live", "GET /metrics",
		"GET /openapi.json", "GET /ready", "GET /v1/models", "GET /v1/models/{id}", "POST /busy_threshold",
		"POST /v1/chat/completions", "POST /v1/completions", "POST /v1/embeddings", "POST /v1/messages",
		"POST /v1/messages/count_tokens", "POST /v1/responses",
	}
	if !slices.Equal(got, want) {
		t.Errorf("GET /openapi.json lists %q\nwant %q", got, want)
	}
	for _, route := range want { // each of them is really there
		method, path, _ := strings.Cut(route, " ")
		if g := f.send(method, strings.Replace(path, "{id}", "x", 1), ""); g.status == 405 || strings.Contains(g.body, "No route") {
			t.Errorf("%s = %d %s, want it to exist", route, g.status, g.body)
		}
	}
}

func TestDocsLoadNothingExternal(t *testing.T) {
	f := begin(t, setup{})
	g := f.send("GET", "/docs", "")
	if g.status != 200 || !strings.HasPrefix(g.header.Get("Content-Type"), "text/html") || !strings.Contains(g.body, "/openapi.json") {
		t.Fatalf("GET /docs = %d %s %s", g.status, g.header.Get("Content-Type"), g.body)
	}
	if found := regexp.MustCompile(`(?i)https?:|["'(]//|@import|\bsrc=`).FindString(g.body); found != "" {
		t.Errorf("the page refers to something outside: %s", found)
	}
}

// TestMetricsFromTheStart checks that the series that are divided by exist before any request.
func TestMetricsFromTheStart(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{models: []string{"later"}}, worker.Worker{Name: "w", Endpoint: s.url(), Models: []string{"m"}, DPSize: 2})
	g := f.send("GET", "/metrics", "")
	if g.status != http.StatusOK || !strings.HasPrefix(g.header.Get("Content-Type"), "text/plain; version=0.0.4") {
		t.Errorf("GET /metrics = %d, %s", g.status, g.header.Get("Content-Type"))
	}
	for _, series := range []string{
		`dynamo_tasks_issued_total{endpoint="chat_completions",model="m"}`, `dynamo_tasks_rejected_total{endpoint="embeddings",model="later"}`,
		`dynamo_queued_requests{model="later"}`, `spillway_rejections_total{model="m",reason="worker-overloaded"}`,
		`spillway_slots_inflight{dp_rank="1",worker="w"}`, `spillway_slot_leaks_total`,
	} {
		if !strings.Contains(g.body, series+" 0\n") {
			t.Errorf("GET /metrics has no %s 0", series)
		}
	}
}

// TestIdleConnection checks that a client's connection is closed when it has been idle for long,
// and not while it waits for an answer.
func TestIdleConnection(t *testing.T) {
	answered := make(chan struct{})
	s := newScript(t, func(c *conn, _ received) {
		<-answered
		c.say(answer(200, jsonHeader, reply))
	})
	f := begin(t, setup{proxy: func(c *proxy.Config) { c.ClientIdleTimeout = short }}, served("w", s))
	c := f.dial()
	c.post(chatBody)
	time.AfterFunc(2*short, func() { close(answered) })
	if status, _ := c.head(); status != "HTTP/1.1 200 OK" {
		t.Errorf("an answer that takes longer than an idle connection lives = %q, want 200", status)
	}
	if rest, err := io.ReadAll(c.br); string(rest) != reply || err != nil {
		t.Errorf("and then %q, %v; want the answer and, later, a close", rest, err)
	}
}
