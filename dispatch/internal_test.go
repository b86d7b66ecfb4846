package dispatch

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

func TestBackoff(t *testing.T) {
	s := func(v float64) time.Duration { return time.Duration(v * float64(time.Second)) }
	for _, tt := range []struct {
		k           int
		left, hint  float64
		least, most float64 // most is not reached
	}{
		{1, 1000, 0, 2, 4}, {2, 1000, 0, 4, 8}, {3, 1000, 0, 8, 16}, {4, 1000, 0, 16, 32}, {5, 1000, 0, 30, 60}, {6, 1000, 0, 30, 60}, {5000, 1000, 0, 30, 60},
		{1, 1, 0, 0.5, 1}, {6, 10, 0, 5, 10},
		{1, 100, 30, 30, 37.5}, {1, 40, 300, 20, 25}, {2, 5, 30, 2.5, 5}, {6, 1000, 1, 30, 60},
	} {
		least, most := time.Hour, time.Duration(0)
		for seed := range uint64(2000) {
			d, ok := backoff(tt.k, s(tt.left), s(tt.hint), rand.New(rand.NewPCG(seed, 7)))
			if !ok {
				t.Fatalf("backoff(%d, %v, %v) gives up", tt.k, tt.left, tt.hint)
			}
			least, most = min(least, d), max(most, d)
		}
		spread := s((tt.most - tt.least) / 20)
		if least < s(tt.least) || most >= s(tt.most) || least > s(tt.least)+spread || most < s(tt.most)-4*spread {
			t.Errorf("backoff(%d, left %v s, hint %v s) is within %v..%v, want all of %v..%v s", tt.k, tt.left, tt.hint, least, most, tt.least, tt.most)
		}
	}
	if _, ok := backoff(1, 0, 0, nil); ok {
		t.Error("backoff with nothing left does not give up")
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	for v, want := range map[string]time.Duration{
		"": 0, "0": 0, "7": 7 * time.Second, "-3": 0, "soon": 0, "1.5": 0, " 2 ": 2 * time.Second,
		"Sat, 21 Nov 2026 12:00:30 GMT": 30 * time.Second, "Sat, 21 Nov 2026 11:00:00 GMT": 0,
	} {
		if got := retryAfter(v, now); got != want {
			t.Errorf("retryAfter(%q) = %v, want %v", v, got, want)
		}
	}
}

func TestJudge(t *testing.T) {
	exempt := DefaultConfig().OverloadExempt
	for status, want := range map[int]verdict{
		200: final, 204: final, 301: final, 400: final, 401: final, 403: final, 404: final, 405: final, 409: final, 410: final, 413: final, 415: final, 422: final, 418: final,
		408: again, 425: again, 500: again, 502: again, 504: again, 599: again, 429: refused, 503: refused, 529: refused,
	} {
		if got := judge(status, "", exempt); got != want {
			t.Errorf("judge(%d) = %v, want %v", status, got, want)
		}
	}
	for reason, want := range map[string]verdict{
		"rejected-context-cancelled": overtaken, "rejected-shutting-down": overtaken, "evicted": refused, "evicted-priority": refused, "rejected-saturated": refused,
	} {
		if got := judge(503, reason, exempt); got != want {
			t.Errorf("judge(503, %s) = %v, want %v", reason, got, want)
		}
	}
}

func TestKeys(t *testing.T) {
	for queue, prefix := range map[string]string{"q": "{q}", "a:{tag}:b": "a:{tag}:b", "a{}b": "{a{}b}", "a}{b": "{a}{b}"} {
		if got := keysOf(queue); got.leases != prefix+":leases" || got.queue != queue {
			t.Errorf("keysOf(%s) = %+v, want prefix %s", queue, got, prefix)
		}
	}
}

func TestRewritten(t *testing.T) {
	raw := `{"x":  [1, 2.50],"internal":{"retry_count":2,"request_token":"t","own":{"a":1}},"request_kind":"redis","data":{"id":"i","deadline":99999999999,"payload":{"seed":12345678901234567890,"s":"<>&\u003c"},"new":true}}`
	m, err := parse(raw, 1)
	if err != nil {
		t.Fatal(err)
	}
	next, err := m.rewritten(&Queue{ID: "qi", Name: "qn"}, 3, 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{`"x":[1, 2.50]`, `"own":{"a":1}`, `"data":{"id":"i","deadline":99999999999,"payload":{"seed":12345678901234567890,"s":"<>&\u003c"},"new":true}`, `"retry_count":3`, `"spillway":{"attempts":3,"sheds":1}`, `"queue_id":"qi"`, `"request_queue_name":"qn"`} {
		if !strings.Contains(string(next), part) {
			t.Errorf("rewritten is %s\nwant %s in it", next, part)
		}
	}
	again, err := parse(string(next), 1)
	if err != nil || again.gid != m.gid || again.retries != 3 || again.attempts != 3 || again.sheds != 1 || again.gid != "i\x1ft" {
		t.Errorf("parse(rewritten) = %+v, %v", again, err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(`{"internal":{"retry_count":1},"request_kind":"redis","data":{"id":"a","deadline":5,"payload":{"a":1}}}`)
	f.Add(`{"internal":null,"request_kind":"plain","data":{}}`)
	f.Fuzz(func(t *testing.T, raw string) {
		m, err := parse(raw, 0)
		if err != nil {
			return
		}
		next, err := m.rewritten(&Queue{ID: "q", Name: "q"}, 1, 0)
		if err != nil {
			t.Fatalf("%q was parsed and cannot be rewritten: %v", raw, err)
		}
		again, err := parse(string(next), 0)
		if err != nil || again.id != m.id || !again.deadline.Equal(m.deadline) || again.attempts != 1 {
			t.Fatalf("%q became %q: %+v, %v", raw, next, again, err)
		}
	})
}

func TestTokens(t *testing.T) {
	for payload, want := range map[string]int64{
		`{"prompt":"12345678"}`: 3 + 256, `{"prompt":"123456","max_tokens":10}`: 2 + 10, `{"max_tokens":10,"max_completion_tokens":5}`: 5,
		`{"max_output_tokens":7,"n":3}`: 21, `{"max_tokens":9,"max_output_tokens":7}`: 9, `{"messages":[{"a":1}],"max_tokens":0}`: 3,
	} {
		if got := tokens([]byte(payload), 256); got != want {
			t.Errorf("tokens(%s) = %d, want %d", payload, got, want)
		}
	}
}

func TestPromValue(t *testing.T) {
	for body, want := range map[string]string{
		`{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"0.5"]}]}}`:                                        "",
		`{"status":"success","data":{"resultType":"scalar","result":[1,"0.5"]}}`:                                                                "",
		`{"status":"success","data":{"resultType":"vector","result":[]}}`:                                                                       "no series",
		`{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"0.5"]},{"metric":{"a":"b"},"value":[1,"0.5"]}]}}`: "2 series where one is expected",
		`{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"NaN"]}]}}`:                                        `the value "NaN"`,
		`{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1,"+Inf"]}]}}`:                                       `the value "+Inf"`,
		`{"status":"success","data":{"resultType":"matrix","result":[]}}`:                                                                       `a result of type "matrix"`,
		`{"status":"error","error":"bad"}`: `status "error": bad`,
	} {
		v, err := promValue([]byte(body))
		if want == "" && (err != nil || v != 0.5) || want != "" && (err == nil || err.Error() != want) {
			t.Errorf("promValue(%s) = %v, %v, want %q", body, v, err, want)
		}
	}
	if _, err := promValue([]byte(`<html>`)); err == nil {
		t.Error("promValue of a page is no error")
	}
}

func TestCheckEndpoint(t *testing.T) {
	for path, ok := range map[string]bool{
		"": true, "/v1/completions": true, "/a?b=c": true, "v1": false, "http://evil/": false, "//evil/a": false, "/a/../b": false, "/%2e%2e/b": false, "/a\\b": false,
	} {
		if err := checkEndpoint(path); (err == nil) != ok {
			t.Errorf("checkEndpoint(%q) = %v", path, err)
		}
	}
}

// TestGates builds gates from parameters as llm-d's configurations have them.
func TestGates(t *testing.T) {
	cfg := DefaultConfig()
	cfg.PrometheusURL = "http://prometheus:9090"
	b := &builder{cfg: cfg, workers: 64, metrics: &asker{}}
	for _, tt := range []struct {
		kind, params string
		want         string // part of the error, or ""
	}{
		{"prometheus-budget", `{"pool":"p","max_concurrency":"100","baseline":0.05}`, ""},
		{"prometheus-budget", `"{\"pool\":\"p\",\"baseline\":\"0.05\"}"`, ""},
		{"prometheus-budget", `{"baseline":0.05}`, "pool: is missing"},
		{"prometheus-budget", `{"pool":"p","baselin":0.05}`, "baselin: unknown parameter"},
		{"prometheus-budget", `{"pool":"p","baseline":1.5}`, "baseline: 1.5 is no number within 0..1"},
		{"prometheus-budget", `{"pool":"p","budget_unit":"bytes"}`, "max_bytes_per_endpoint: is missing"},
		{"prometheus-saturation", `{"pool":"p","threshold":0.8,"fallback":0.3}`, ""},
		{"prometheus-query", `{"query":"up"}`, ""},
		{"local-max-concurrency", `{"limit":2.5}`, "limit: 2.5 is no whole number"},
		{"local-max-concurrency", `{}`, "limit: is missing"},
		{"constat", `{}`, `unknown gate_type "constat"`},
		{"composite", `{"gates":[{"gate_type":"constant"},{"gate_type":"local-max-concurrency","gate_params":"{\"limit\":3}"}]}`, ""},
		{"composite", `{"gates":[{"gate_type":"nothing"}]}`, "entry 1"},
		{"wait-on-refuse", `{"gate":{"gate_type":"local-max-concurrency","gate_params":{"limit":"3"}}}`, ""},
		{"tier-priority-admission", `{"saturation_gate":"local-max-concurrency","saturation_gate_params":{"limit":1}}`, ""},
		{"tier-priority-admission", `{"saturation_gate":"prometheus-saturation","saturation_gate_params":{"pool":"p"}}`, ""},
		{"tier-priority-admission", `{"saturation_gate":"constant"}`, "constant refuses no message"},
		{"tier-priority-admission", `{"saturation_gate":"composite","saturation_gate_params":{"gates":[]}}`, "composite refuses no message"},
		{"prometheus-query", `{"query":"up","oversize_patience":"1m","oversize_policy":"reject","default_output_tokens":"7","settle":"0s","recovery_ramp":0.25}`, ""},
		{"prometheus-query", `{"query":"up","oversize_policy":"drop"}`, "oversize_policy: \"drop\" is none of alone, reject"},
		{"prometheus-query", `{"query":"up","recovery_ramp":0}`, "recovery_ramp: 0 is no number"},
		{"local-max-concurrency", `{"limit":1,"oversize_policy":"reject"}`, "oversize_policy: unknown parameter"},
		{"aimd", `{"min":"2","max":64,"increase":2,"decrease":0.9}`, ""},
		{"aimd", `{"min":8,"max":4}`, "max: 4 is below min"},
		{"aimd", `{"decrease":1}`, "decrease: 1 is no number"},
		{"spillway", `{"pool":"p"}`, "endpoint: \"\" is no URL"},
		{"spillway", `{"pool":"p","endpoint":"http://front:8000"}`, ""},
		{"endpoint-scrape", `{"url":"http://a","metric":"m","labels":{"a":"b"},"max_count_per_pod":"5"}`, ""},
	} {
		_, err := b.build(tt.kind, json.RawMessage(tt.params), 0)
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("gate %s %s: %v, want %q", tt.kind, tt.params, err, tt.want)
		}
	}
	for _, kind := range []string{"prometheus-budget", "prometheus-saturation", "prometheus-query"} {
		params := `{"pool":"p","max_sample_age":"7s"}`
		if kind == "prometheus-query" {
			params = `{"query":"up","max_sample_age":"7s"}`
		}
		g, err := b.build(kind, json.RawMessage(params), 0)
		if err != nil {
			t.Fatal(err)
		}
		if got := g.inputs[0].reader.(*promReader).maxAge; got != 7*time.Second {
			t.Errorf("%s: samples may be %v old, want 7s", kind, got)
		}
	}
	g, err := b.build("prometheus-saturation", json.RawMessage(`{"pool":"p","threshold":0.8}`), 0)
	if err != nil || g.inputs[0].source.Fallback != 0 || g.inputs[0].source.Rule.Baseline < 0.19 || g.inputs[0].source.Rule.Baseline > 0.21 {
		t.Errorf("prometheus-saturation: %+v, %v", g, err)
	}
}

// TestCacheTTL has the time for which llm-d's processor keeps an answer of Prometheus be that between questions.
func TestCacheTTL(t *testing.T) {
	for ttl, want := range map[time.Duration]time.Duration{0: 2 * time.Second, time.Second: time.Second, time.Minute: time.Minute} {
		cfg := DefaultConfig()
		cfg.PrometheusURL, cfg.CacheTTL = "http://prometheus:9090", ttl
		cfg.Transport = `{"url":"redis://h","queues":[{"queue_name":"q","igw_base_url":"http://h","gate_type":"prometheus-budget","gate_params":{"pool":"p"}}]}`
		if err := cfg.Validate(); err != nil {
			t.Fatal(err)
		}
		d, err := New(cfg, func(string) string { return "" }, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		if got := d.groups[0].inputs[0].every; got != want {
			t.Errorf("prometheus-cache-ttl %v: asked every %v, want %v", ttl, got, want)
		}
	}
}

// TestStaleCandidate has a better query whose samples are too old, and a weaker one: the first answer is the
// weaker one's. Once the better one has answered the weaker one takes its place no more.
func TestStaleCandidate(t *testing.T) {
	const maxAge = 30 * time.Second
	old := map[string]bool{}
	prom := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		value := map[string]float64{"better": 0.1, "weaker": 0.9}[r.FormValue("query")]
		if of, is := strings.CutPrefix(r.FormValue("query"), "time of "); is {
			at := time.Now()
			if old[of] {
				at = at.Add(-2 * maxAge)
			}
			value = float64(at.UnixMilli()) / 1000
		}
		_, _ = fmt.Fprintf(w, `{"status":"success","data":{"resultType":"scalar","result":[1,"%f"]}}`, value)
	}))
	defer prom.Close()
	p := &promReader{
		api:        &promAPI{asker: &asker{client: prom.Client(), timeout: time.Minute}, url: prom.URL},
		candidates: []candidate{{"better", []string{"time of better"}}, {"weaker", []string{"time of weaker"}}}, active: 2, maxSys: 1, maxAge: maxAge,
	}
	for _, tt := range []struct {
		name string
		old  []string
		want float64 // 0: an error
	}{
		{"both are old", []string{"better", "weaker"}, 0},
		{"the better one is old", []string{"better"}, 0.9},
		{"neither is old", nil, 0.1},
		{"the better one is old, after it has answered", []string{"better"}, 0},
	} {
		clear(old)
		for _, of := range tt.old {
			old[of] = true
		}
		r, err := p.read(t.Context())
		if r.D != tt.want || (err == nil) != (tt.want > 0) {
			t.Errorf("%s: D is %v, %v, want %v", tt.name, r.D, err, tt.want)
		}
	}
}
