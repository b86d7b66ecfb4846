package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// startScraper runs a real Prometheus on a port that scrapes one front end every other second, which is
// also the time that a scrape may take on a busy machine.
func startScraper(t *testing.T, frontend, port string) *running {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "prometheus.yml")
	text := "global: {scrape_interval: 2s, scrape_timeout: 2s}\nscrape_configs: [{job_name: spillway, static_configs: [{targets: ['" + strings.TrimPrefix(frontend, "http://") + "']}]}]\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p := launch(t, exec.Command(tool(t, "prometheus"), "--config.file="+file, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address=127.0.0.1:"+port), nil)
	p.awaitIn(&p.stderr, `(Server is ready to receive web requests)`)
	return p
}

// passage stands before an HTTP server and counts what is under way there.
type passage struct {
	*httptest.Server
	late atomic.Int64 // time.Duration by which answers come later
	shed atomic.Bool  // requests are answered with 429

	mu           sync.Mutex
	all, refused int
	now, most    int
	firstRefusal time.Time
}

func newPassage(t *testing.T, to string) *passage {
	t.Helper()
	u, err := url.Parse(to)
	if err != nil {
		t.Fatal(err)
	}
	r := &passage{}
	forward := httputil.NewSingleHostReverseProxy(u)
	forward.ErrorHandler = func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(502) }
	forward.ModifyResponse = func(resp *http.Response) error { // over there the request has ended when its answer was read
		body, err := io.ReadAll(resp.Body)
		resp.Body = io.NopCloser(strings.NewReader(string(body)))
		return err
	}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		refuse := r.shed.Load()
		r.count(1, refuse)
		defer r.count(-1, refuse)
		if refuse {
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		select {
		case <-time.After(time.Duration(r.late.Load())):
			forward.ServeHTTP(w, req)
		case <-req.Context().Done():
		}
	}))
	t.Cleanup(r.Server.Close)
	return r
}

func (r *passage) count(n int, refuse bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.now += n; n > 0 {
		r.all++
	}
	if n > 0 && refuse {
		if r.refused++; r.refused == 1 {
			r.firstRefusal = time.Now()
		}
	}
	r.most = max(r.most, r.now)
}

func (r *passage) seen() (all, most int, firstRefusal time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.all, r.most, r.firstRefusal
}

// startSmallFrontend is a front end of two simulated workers that take ten requests each.
func startSmallFrontend(t *testing.T, sims ...string) string {
	t.Helper()
	settings := filepath.Join(t.TempDir(), "frontend.yaml")
	var all []string
	for _, s := range sims {
		all = append(all, "{url: '"+s+"', max_concurrency: 10}")
	}
	if err := os.WriteFile(settings, []byte("workers: ["+strings.Join(all, ", ")+"]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	front := start(t, nil, "frontend", "--config", settings, "--http-host", "127.0.0.1", "--http-port", "0")
	u := front.await(`Front end: (\S+)\n`)
	eventually(t, "the front end is ready", func() bool { status, _ := fetch(t, u+"/ready"); return status == 200 })
	return u
}

// startQueues runs a dispatcher with a transport document.
func startQueues(t *testing.T, doc any, args ...string) dispatching {
	t.Helper()
	text, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	p := start(t, nil, append([]string{"dispatch", "--transport-config", string(text), "--host", "127.0.0.1", "--port", "0", "--health-port", "0", "--metrics-port", "0"}, args...)...)
	return dispatching{p, p.await(`Dispatcher: (\S+)\n`), p.await(`Health: (\S+)\n`), p.await(`Metrics: (\S+)\n`)}
}

// gate is the state of a budget.
func (d dispatching) gate(pool string) string {
	d.t.Helper()
	_, body := fetch(d.t, d.url+"/internal/dispatch/status")
	var s struct {
		Groups []struct {
			Pool  string `json:"inference_pool"`
			State string
		}
	}
	if err := json.Unmarshal([]byte(body), &s); err != nil {
		d.t.Fatalf("status %s: %v", body, err)
	}
	for _, g := range s.Groups {
		if g.Pool == pool {
			return g.State
		}
	}
	return "unknown"
}

// requests writes a file of n requests for submit.
func requests(t *testing.T, name string, n, tokens int) string {
	t.Helper()
	var lines strings.Builder
	for i := range n {
		fmt.Fprintf(&lines, `{"id":"%s%d","payload":{"model":"sim-model","prompt":"Hello","max_tokens":%d}}`+"\n", name, i, tokens)
	}
	file := filepath.Join(t.TempDir(), "requests.jsonl")
	if err := os.WriteFile(file, []byte(lines.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestGateOfPrometheus has a dispatcher ask a real Prometheus, which scrapes a real front end, while one
// after the other fails. A closed gate lets nothing through; the log of the test has the times.
func TestGateOfPrometheus(t *testing.T) {
	simPort := unusedPort(t)
	startSim := func() *running {
		s := start(t, nil, "sim", "--port", fmt.Sprint(simPort), "--count", "1", "--speed", "10")
		s.await(`--workers: (\S+)\n`)
		return s
	}
	sim := startSim()
	front := startSmallFrontend(t, fmt.Sprintf("http://127.0.0.1:%d", simPort))
	port := fmt.Sprint(unusedPort(t))
	prometheus := startScraper(t, front, port)
	slow, gateway := newPassage(t, "http://127.0.0.1:"+port), newPassage(t, front)
	d := startQueues(t, map[string]any{"url": startRedisServer(t), "poll_interval_ms": 20, "queues": []any{
		map[string]any{"queue_name": "q", "igw_base_url": gateway.URL, "gate_type": "prometheus-budget", "gate_params": map[string]any{"pool": "sim-model"}},
		// What llm-d's own formula makes of an empty pool: 0/0.
		map[string]any{"queue_name": "ratio", "budget_group": "ratio", "igw_base_url": gateway.URL, "gate_type": "prometheus-query", "gate_params": map[string]any{
			"query":           `1 - sum(spillway_pool_inflight{pool="sim-model",unit="requests"}) / scalar(max(spillway_pool_ready_endpoints{pool="sim-model"}) * 10)`,
			"freshness_query": `min(timestamp(spillway_pool_ready_endpoints{pool="sim-model"}))`, "max_sys": 10}},
	}}, "--prometheus-url", slow.URL, "--metrics-poll-interval", "200ms")
	if page, ratio := d.gate("sim-model"), d.gate("ratio"); page == "unknown" || ratio == "unknown" {
		t.Fatalf("the groups are %s and %s", page, ratio)
	}
	timed := func(what, pool, state string, do func()) {
		t.Helper()
		began := time.Now()
		do()
		eventually(t, what+": "+pool+" is "+state, func() bool { return d.gate(pool) == state })
		t.Logf("%-45s -> %-12s %6.2f s", what, state, time.Since(began).Seconds())
	}
	nothing := func() {}
	timed("start", "sim-model", "open", nothing)
	timed("start", "ratio", "open", nothing)

	// closed has it that nothing goes through until something reopens the gate, and all of it then.
	submitted := 0
	closed := func(reopen func()) {
		t.Helper()
		before, _, _ := gateway.seen()
		submitted += 5
		d.says("submit", requests(t, fmt.Sprintf("r%d-", submitted), 5, 4), "--queue", "q")
		time.Sleep(500 * time.Millisecond) // rounds of the dispatcher, 20 ms each
		if after, _, _ := gateway.seen(); after != before {
			t.Errorf("%d requests were sent through a closed gate", after-before)
		}
		reopen()
		if got := strings.Count(d.says("results", "--count", "5", "--wait", "1m"), `"status_code":200`); got != 5 {
			t.Errorf("%d good results, want 5", got)
		}
	}

	timed("Prometheus is killed", "sim-model", "unreadable", func() { prometheus.signal(syscall.SIGKILL); prometheus.exit() })
	closed(func() {
		timed("Prometheus is started", "sim-model", "open", func() { prometheus = startScraper(t, front, port) })
	})
	timed("Prometheus stands still", "sim-model", "unreadable", func() { prometheus.signal(syscall.SIGSTOP) })
	closed(func() {
		timed("Prometheus goes on", "sim-model", "open", func() { prometheus.signal(syscall.SIGCONT) })
	})
	timed("Prometheus answers 4 s late", "sim-model", "unreadable", func() { slow.late.Store(int64(4 * time.Second)) })
	closed(func() { timed("Prometheus answers in time", "sim-model", "open", func() { slow.late.Store(0) }) })
	timed("the only worker dies: D is 0/0", "ratio", "unreadable", func() { sim.signal(syscall.SIGKILL); sim.exit() })
	eventually(t, "without a worker nothing is free", func() bool { s := d.gate("sim-model"); return s == "no_capacity" || s == "baseline" })
	d.awaitIn(&d.stderr, `(the value ..NaN)`)
	closed(func() {
		timed("the worker is back", "ratio", "open", func() { sim = startSim() })
		timed("the worker is back", "sim-model", "open", nothing)
	})

	gateway.shed.Store(true)
	submitted += 5
	d.says("submit", requests(t, fmt.Sprintf("r%d-", submitted), 5, 4), "--queue", "q")
	timed("the front end answers 429", "sim-model", "overload", nothing)
	gateway.shed.Store(false)
	timed("the front end takes requests again", "sim-model", "open", nothing)
	_, _, refusal := gateway.seen()
	if sampled := sampleTime(t, "http://127.0.0.1:"+port); !sampled.After(refusal) {
		t.Errorf("the gate has opened with a sample of %v, of before the refusal at %v", sampled, refusal)
	}
	if got := strings.Count(d.says("results", "--count", "5", "--wait", "1m"), `"status_code":200`); got != 5 {
		t.Errorf("%d good results, want 5", got)
	}
	t.Logf("from the first 429 until the gate was open: %.2f s", time.Since(refusal).Seconds())
}

// sampleTime is when a Prometheus has scraped the fullness last.
func sampleTime(t *testing.T, prometheus string) time.Time {
	t.Helper()
	_, body := fetch(t, prometheus+"/api/v1/query?query="+url.QueryEscape("timestamp(spillway_pool_fullness)"))
	var answer struct {
		Data struct{ Result []struct{ Value [2]any } }
	}
	var seconds float64
	if err := json.Unmarshal([]byte(body), &answer); err != nil || len(answer.Data.Result) != 1 {
		t.Fatalf("Prometheus says %s, %v", body, err)
	}
	if _, err := fmt.Sscan(fmt.Sprint(answer.Data.Result[0].Value[1]), &seconds); err != nil {
		t.Fatal(err)
	}
	return time.UnixMilli(int64(seconds * 1000))
}

// TestTwoDispatchers has two of them fill one pool, each with half of the budget as a real Prometheus
// tells it.
func TestTwoDispatchers(t *testing.T) {
	sims := strings.Split(start(t, nil, "sim", "--port", "0", "--count", "2").await(`--workers: (\S+)\n`), ",")
	front := startSmallFrontend(t, sims...)
	port := fmt.Sprint(unusedPort(t))
	startScraper(t, front, port)
	gateway := newPassage(t, front)
	doc := map[string]any{"url": startRedisServer(t), "poll_interval_ms": 20, "queues": []any{map[string]any{
		"queue_name": "q", "igw_base_url": gateway.URL, "gate_type": "prometheus-budget",
		"gate_params": map[string]any{"pool": "sim-model", "baseline": 0.1, "budget_share": 0.5, "rounding": "floor"},
	}}}
	var both []dispatching
	for range 2 {
		d := startQueues(t, doc, "--prometheus-url", "http://127.0.0.1:"+port, "--metrics-poll-interval", "200ms")
		eventually(t, "the gate is open", func() bool { return d.gate("sim-model") == "open" })
		both = append(both, d)
	}
	const n, budget = 60, 18 // 2 x 10 x (1 - 0.1)
	both[0].says("submit", requests(t, "r", n, 150))
	if got := strings.Count(both[1].says("results", "--count", fmt.Sprint(n), "--wait", "1m"), `"status_code":200`); got != n {
		t.Errorf("%d good results, want %d", got, n)
	}
	_, most, _ := gateway.seen()
	t.Logf("%d requests were under way at most, and the budget is %d", most, budget)
	// One that has stood still for a while may spend its half once more on a reading that is no longer true.
	if most > budget+budget/2 || most < budget/2 {
		t.Errorf("%d requests were under way at most, the budget is %d", most, budget)
	}
}

// TestFillYieldRecover has batch requests fill a pool that nobody uses, wait while interactive ones take
// all of it, and go on afterwards.
func TestFillYieldRecover(t *testing.T) {
	front := startSmallFrontend(t, start(t, nil, "sim", "--port", "0").await(`--workers: (\S+)\n`))
	gateway := newPassage(t, front)
	d := startQueues(t, map[string]any{"url": startRedisServer(t), "poll_interval_ms": 20, "queues": []any{map[string]any{
		"queue_name": "q", "igw_base_url": gateway.URL, "gate_type": "spillway", "gate_params": map[string]any{"pool": "sim-model", "endpoint": front},
	}}})
	eventually(t, "the gate is open", func() bool { return d.gate("sim-model") == "open" })
	const n = 20
	d.says("submit", requests(t, "r", n, 400)) // four seconds each
	// 10 x (1 - 0.05), and what is left of it as one more.
	eventually(t, "batch fills the pool", func() bool { _, most, _ := gateway.seen(); return most >= 9 })

	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	var clients sync.WaitGroup
	for range 10 {
		clients.Go(func() {
			body := `{"model":"sim-model","prompt":"Hello","max_tokens":20000,"stream":true}`
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, front+"/v1/completions", strings.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("Content-Type", "application/json")
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				t.Errorf("an interactive request got status %d", resp.StatusCode)
			}
			_, _ = io.Copy(io.Discard, resp.Body) // until it leaves
		})
	}
	eventually(t, "batch yields", func() bool { return d.gate("sim-model") == "baseline" && gateway.idle() })
	before, most, _ := gateway.seen()
	time.Sleep(500 * time.Millisecond) // rounds of the dispatcher, 20 ms each
	if after, _, _ := gateway.seen(); after != before || before == n {
		t.Errorf("%d of %d requests were sent before and %d after, want none while the pool is full", before, n, after)
	}
	if most > 10 {
		t.Errorf("%d batch requests were under way at once, want at most 10", most)
	}
	leave()
	clients.Wait()
	eventually(t, "batch goes on", func() bool { all, _, _ := gateway.seen(); return all > before })
	if got := strings.Count(d.says("results", "--count", fmt.Sprint(n), "--wait", "1m"), `"status_code":200`); got != n {
		t.Errorf("%d good results, want %d", got, n)
	}
}

// idle tells that nothing is under way.
func (r *passage) idle() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.now == 0
}
