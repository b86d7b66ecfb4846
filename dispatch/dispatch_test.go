package dispatch_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"spillway/dispatch"
)

// gateway is a front end that notes what it is sent.
type gateway struct {
	*httptest.Server
	mu     sync.Mutex
	bodies []string
	heads  []http.Header
	paths  []string
	now    int
	most   int
}

// newGateway answers with what says; nil is 200 with a text.
func newGateway(t testing.TB, says func(w http.ResponseWriter, r *http.Request, body string)) *gateway {
	g := &gateway{}
	g.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		g.mu.Lock()
		g.bodies, g.heads, g.paths = append(g.bodies, string(body)), append(g.heads, r.Header.Clone()), append(g.paths, r.URL.Path)
		g.now++
		g.most = max(g.most, g.now)
		g.mu.Unlock()
		defer func() {
			g.mu.Lock()
			g.now--
			g.mu.Unlock()
		}()
		if says == nil {
			_, _ = io.WriteString(w, `{"text":"hello","usage":{"prompt_tokens":3,"completion_tokens":2}}`)
			return
		}
		says(w, r, string(body))
	}))
	t.Cleanup(g.Server.Close)
	return g
}

// holding answers when the channel is closed.
func holding(until <-chan struct{}) func(http.ResponseWriter, *http.Request, string) {
	return func(w http.ResponseWriter, r *http.Request, body string) {
		select {
		case <-until:
		case <-r.Context().Done():
		}
		_, _ = io.WriteString(w, body)
	}
}

func (g *gateway) sent() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return append([]string(nil), g.bodies...)
}

// queueDoc is one queue of a transport document.
type queueDoc map[string]any

// running is a dispatcher that runs in this process.
type running struct {
	*dispatch.Dispatcher
	t    testing.TB
	reg  *prometheus.Registry
	stop func() // and wait for the end
	logs func() string
}

// setup is what a test changes.
type setup struct {
	cfg    func(*dispatch.Config)
	doc    map[string]any
	pools  string // file content
	merge  string
	trans  string
	step   func(dispatch.Step, string)
	beside bool // other tests run at the same time, so that nobody looks for goroutines
}

// config writes the documents of a dispatcher of some queues.
func config(t testing.TB, r *server, with setup, queues ...queueDoc) dispatch.Config {
	t.Helper()
	doc := map[string]any{"url": r.url(), "poll_interval_ms": 20, "queues": queues}
	for k, v := range with.doc {
		doc[k] = v
	}
	text, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	cfg := dispatch.DefaultConfig()
	cfg.Transport, cfg.Concurrency, cfg.BacklogPoll = string(text), 8, 100*time.Millisecond
	cfg.DrainTimeout = 5 * time.Second
	for _, f := range []struct {
		to   *string
		text string
	}{{&cfg.PoolFile, with.pools}, {&cfg.MergeFile, with.merge}, {&cfg.TransformFile, with.trans}} {
		if f.text != "" {
			*f.to = filepath.Join(t.TempDir(), "doc.json")
			if err := os.WriteFile(*f.to, []byte(f.text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	if with.cfg != nil {
		with.cfg(&cfg)
	}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	return cfg
}

// begin runs a dispatcher until the test ends, or stop is called. Then it must leave nothing.
func begin(t testing.TB, r *server, with setup, queues ...queueDoc) *running {
	t.Helper()
	before := goleak.IgnoreCurrent()
	var log strings.Builder
	var mu sync.Mutex
	reg := prometheus.NewRegistry()
	d, err := dispatch.New(config(t, r, with, queues...), func(string) string { return "" }, reg, slog.New(slog.NewTextHandler(writer(func(b []byte) {
		mu.Lock()
		defer mu.Unlock()
		log.Write(b)
	}), nil)))
	if err != nil {
		t.Fatal(err)
	}
	d.Witness = with.step
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	run := &running{Dispatcher: d, t: t, reg: reg, logs: func() string {
		mu.Lock()
		defer mu.Unlock()
		return log.String()
	}}
	run.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(patience):
			t.Error("the dispatcher does not end")
		}
		if with.beside {
			return
		}
		if err := goleak.Find(before, goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"), goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"),
			goleak.IgnoreAnyFunction("net/http.(*conn).serve"), goleak.IgnoreAnyFunction("github.com/redis/go-redis/v9/internal/pool.(*ConnPool).queuedNewConn.func1")); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		run.stop()
		if t.Failed() {
			t.Logf("dispatcher:\n%s", run.logs())
		}
	})
	return run
}

type writer func([]byte)

// Write implements io.Writer.
func (w writer) Write(b []byte) (int, error) { w(b); return len(b), nil }

// metric is the value of a counter or gauge whose labels contain the given values, summed.
func (r *running) metric(name string, values ...string) float64 {
	r.t.Helper()
	families, err := r.reg.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() != "spillway_dispatch_"+name {
			continue
		}
		for _, m := range f.Metric {
			n := 0
			for _, l := range m.Label {
				for _, v := range values {
					if l.GetValue() == v {
						n++
					}
				}
			}
			if n == len(values) {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum
}

// enqueue puts a request into a queue; its deadline is in an hour.
func (s *server) enqueue(queue, id, payload string, change ...func(*dispatch.Submission)) {
	s.t.Helper()
	sub := dispatch.Submission{ID: id, Deadline: time.Now().Add(time.Hour).Unix(), Payload: json.RawMessage(payload), ResultQueue: "result-list"}
	for _, c := range change {
		c(&sub)
	}
	if err := dispatch.Enqueue(context.Background(), s.Client, queue, sub, time.Now()); err != nil {
		s.t.Fatal(err)
	}
}

const prompt = `{"model":"m","prompt":"hi","max_tokens":4}`

// outcome is a result as a consumer of llm-d reads it, and ours.
type outcome struct {
	ID           string            `json:"id"`
	StatusCode   int               `json:"status_code"`
	Payload      *string           `json:"payload"`
	ErrorCode    string            `json:"error_code"`
	ErrorMessage string            `json:"error_message"`
	Metadata     map[string]string `json:"metadata"`
	Token        string            `json:"request_token"`
	Attempts     int               `json:"attempts"`
	Encoding     string            `json:"payload_encoding"`
	Usage        json.RawMessage   `json:"usage"`
}

// results waits for n results.
func (s *server) results(list string, n int) []outcome {
	s.t.Helper()
	var all []outcome
	deadline := time.Now().Add(patience)
	for len(all) < n {
		text, err := s.RPop(context.Background(), list).Result()
		if errors.Is(err, redis.Nil) {
			if time.Now().After(deadline) {
				s.t.Fatalf("%d results within %v, want %d: %+v", len(all), patience, n, all)
			}
			time.Sleep(5 * time.Millisecond)
			continue
		}
		if err != nil {
			s.t.Fatal(err)
		}
		var o outcome
		if err := json.Unmarshal([]byte(text), &o); err != nil || o.Payload == nil {
			s.t.Fatalf("result %s: %v", text, err)
		}
		all = append(all, o)
	}
	return all
}

// left lists what a queue has in Redis beside dead letters.
func (s *server) left(queue string) string {
	ctx := context.Background()
	var all []string
	for _, k := range []string{"", ":leases", ":body", ":score", ":owner", ":deliv", ":delayed"} {
		key := queue
		if k != "" {
			key = "{" + queue + "}" + k
		}
		if n, _ := s.Exists(ctx, key).Result(); n > 0 {
			all = append(all, key)
		}
	}
	return strings.Join(all, " ")
}

func simple(g *gateway) queueDoc {
	return queueDoc{"queue_name": "q", "igw_base_url": g.URL}
}

func TestResults(t *testing.T) {
	r := startRedis(t)
	g := newGateway(t, func(w http.ResponseWriter, _ *http.Request, body string) {
		switch {
		case strings.Contains(body, "unprocessable"):
			w.WriteHeader(422)
			_, _ = io.WriteString(w, `{"error":{"message":"<no> & no"}}`)
		case strings.Contains(body, "binary"):
			_, _ = w.Write([]byte{0xff, 0xfe})
		default:
			_, _ = io.WriteString(w, `{"usage":{"prompt_tokens":3,"completion_tokens":2}}`)
		}
	})
	d := begin(t, r, setup{}, simple(g))
	exact := `{"prompt": "<&> ü",  "seed":12345678901234567890, "z":1,"a":2.50}`
	r.enqueue("q", "a", exact, func(s *dispatch.Submission) { s.Metadata = map[string]string{"userid": "u-42"} })
	got := r.results("result-list", 1)[0]
	if got.ID != "a" || got.StatusCode != 200 || *got.Payload != `{"usage":{"prompt_tokens":3,"completion_tokens":2}}` || got.ErrorCode != "" ||
		got.Metadata["userid"] != "u-42" || len(got.Token) != 32 || got.Attempts != 1 || string(got.Usage) != `{"prompt_tokens":3,"completion_tokens":2}` {
		t.Errorf("result = %+v", got)
	}
	if sent := g.sent()[0]; sent != exact {
		t.Errorf("sent %s, want it as it came: %s", sent, exact)
	}
	h := g.heads[0]
	if h.Get("X-Spillway-Lane") != "batch" || h.Get("X-Request-Id") != "a" || h.Get("Idempotency-Key") != "a:"+got.Token ||
		h.Get("X-Llm-D-Inference-Fairness-Id") != "u-42" || h.Get("Content-Type") != "application/json" || g.paths[0] != "/v1/completions" {
		t.Errorf("headers %v, path %s", h, g.paths[0])
	}
	r.enqueue("q", "b", `{"prompt":"unprocessable"}`)
	if got := r.results("result-list", 1)[0]; got.StatusCode != 422 || *got.Payload != `{"error":{"message":"<no> & no"}}` || got.ErrorCode != "" {
		t.Errorf("result = %+v", got)
	}
	r.enqueue("q", "c", `{"prompt":"binary"}`)
	if got := r.results("result-list", 1)[0]; got.Encoding != "base64" || *got.Payload != "//4=" {
		t.Errorf("result = %+v", got)
	}
	r.enqueue("q", "d", `{"stream":true,"stream_options":{"include_usage":true},"prompt":"x"}`, func(s *dispatch.Submission) {
		s.Endpoint = "/v1/chat/completions"
		s.Headers = map[string]string{"x-custom": "v", "HOST": "elsewhere", "x-spillway-lane": "interactive"}
		s.ResultQueue = "mine"
	})
	r.results("mine", 1)
	if sent := g.sent()[3]; sent != `{"prompt":"x","stream":false}` || g.paths[3] != "/v1/chat/completions" || g.heads[3].Get("X-Custom") != "v" || g.heads[3].Get("X-Spillway-Lane") != "batch" {
		t.Errorf("sent %s to %s with %v", sent, g.paths[3], g.heads[3])
	}
	eventually(t, "nothing is left", func() bool { return r.left("q") == "" })
	if n, _ := r.Exists(context.Background(), "request-active:a").Result(); n != 0 {
		t.Error("the marker of a request with a result is still there")
	}
	d.stop()
	if got := d.metric("successful_requests_total"); got != 3 {
		t.Errorf("successful_requests_total = %v, want 3", got)
	}
	if got := d.metric("failed_requests_total"); got != 1 {
		t.Errorf("failed_requests_total = %v, want 1", got)
	}
	if got := d.metric("tokens_total", "output"); got != 4 {
		t.Errorf("tokens_total = %v, want 4", got)
	}
}

func TestDeadlineOrder(t *testing.T) {
	r := startRedis(t)
	g := newGateway(t, nil)
	now := time.Now()
	for _, left := range []int{300, 100, 200} {
		r.enqueue("q", fmt.Sprint(left), fmt.Sprintf(`{"prompt":"%d"}`, left), func(s *dispatch.Submission) { s.Deadline = now.Add(time.Duration(left) * time.Second).Unix() })
	}
	begin(t, r, setup{cfg: func(c *dispatch.Config) { c.Concurrency = 1 }}, simple(g))
	for i, want := range []string{"100", "200", "300"} {
		if got := r.results("result-list", 1)[0]; got.ID != want {
			t.Errorf("result %d is of %s, want %s", i, got.ID, want)
		}
	}
}

// TestHopeless has messages that must not be sent. Each gets a result, if it has an ID, also while the
// gate is closed.
func TestHopeless(t *testing.T) {
	r := startRedis(t)
	g := newGateway(t, nil)
	q := simple(g)
	q["gate_type"], q["gate_params"] = "redis", map[string]any{"address": r.addr()} // says nothing: closed
	ctx := context.Background()
	past, future := time.Now().Unix()-5, time.Now().Unix()+1000
	for i, m := range []string{
		`no JSON`, `{"data":{"id":"no kind","deadline":%[2]d,"payload":{}}}`, `{"request_kind":"redis"}`,
		`{"request_kind":"redis","data":{"id":"expired","deadline":%[1]d,"payload":{}}}`,
		`{"request_kind":"redis","data":{"id":"no deadline","payload":{}}}`,
		`{"request_kind":"redis","data":{"id":"no payload","deadline":%[2]d}}`,
		`{"request_kind":"redis","data":{"id":"elsewhere","deadline":%[2]d,"payload":{},"endpoint":"//evil/v1"}}`,
		`{"request_kind":"redis","data":{"id":"text deadline","deadline":"soon","payload":{}}}`,
	} {
		if strings.Contains(m, "%") {
			m = strings.NewReplacer("%[1]d", fmt.Sprint(past), "%[2]d", fmt.Sprint(future)).Replace(m)
		}
		if err := r.ZAdd(ctx, "q", redis.Z{Score: float64(i), Member: m}).Err(); err != nil {
			t.Fatal(err)
		}
	}
	d := begin(t, r, setup{}, q)
	codes := map[string]string{}
	for _, o := range r.results("result-list", 6) {
		codes[o.ID] = o.ErrorCode
	}
	want := map[string]string{
		"no kind": "INVALID_REQUEST", "expired": "DEADLINE_EXCEEDED", "no deadline": "INVALID_REQUEST", "no payload": "INVALID_REQUEST",
		"elsewhere": "INVALID_REQUEST", "text deadline": "INVALID_REQUEST",
	}
	for id, code := range want {
		if codes[id] != code {
			t.Errorf("%s: %q, want %s", id, codes[id], code)
		}
	}
	eventually(t, "the queue is empty", func() bool { return r.left("q") == "" })
	letters, err := r.XRange(ctx, "{q}:dead", "-", "+").Result()
	if err != nil || len(letters) != 4 {
		t.Fatalf("dead letters: %v, %v, want 4", letters, err)
	}
	for _, l := range letters {
		if l.Values["reason"] != "malformed" || l.Values["raw"] == "" || l.Values["last_error"] == "" {
			t.Errorf("dead letter %v", l.Values)
		}
	}
	if len(g.sent()) != 0 {
		t.Errorf("sent %q", g.sent())
	}
	if got := d.metric("dead_letters_total", "malformed"); got != 4 {
		t.Errorf("dead_letters_total = %v, want 4", got)
	}
}
