package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// startRedisServer runs a real Redis until the test ends, and returns its URL.
func startRedisServer(t *testing.T) string {
	t.Helper()
	port := strconv.Itoa(unusedPort(t))
	cmd := exec.Command(tool(t, "redis-server"), "--port", port, "--bind", "127.0.0.1", "--dir", t.TempDir(), "--save", "", "--appendonly", "yes", "--appendfsync", "always")
	r := launch(t, cmd, nil)
	r.await(`(Ready to accept connections)`)
	return "redis://127.0.0.1:" + port
}

// unusedPort is one that nobody listened on a moment ago, and that the system gives to nobody who lets
// it choose: those are from 32768 on.
func unusedPort(t *testing.T) int {
	t.Helper()
	for range 1000 {
		port := 12000 + rand.IntN(10000)
		if ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			_ = ln.Close() // taken over by whom it is for
			return port
		}
	}
	t.Fatal("no port is free")
	return 0
}

// dispatching is a dispatcher of one queue.
type dispatching struct {
	*running
	url, health, metrics string
}

func startDispatcher(t *testing.T, frontend string, args ...string) dispatching {
	t.Helper()
	doc := fmt.Sprintf(`{"url":%q,"queues":[{"queue_name":"q","igw_base_url":%q,"gate_type":"spillway","gate_params":{"pool":"sim-model","endpoint":%q}}]}`,
		startRedisServer(t), frontend, frontend)
	p := start(t, nil, append([]string{"dispatch", "--transport-config", doc, "--host", "127.0.0.1", "--port", "0", "--health-port", "0", "--metrics-port", "0"}, args...)...)
	return dispatching{p, p.await(`Dispatcher: (\S+)\n`), p.await(`Health: (\S+)\n`), p.await(`Metrics: (\S+)\n`)}
}

// TestDispatchInside has a front end dispatch to itself, while it is also sent what people want at once.
func TestDispatchInside(t *testing.T) {
	t.Run("one address", func(t *testing.T) { testDispatchInside(t) })
	t.Run("with a key for clients", func(t *testing.T) { testDispatchInside(t, "--admin-addr", "127.0.0.1:0", "--api-key", "theirs") })
	t.Run("with an address for operators", func(t *testing.T) { testDispatchInside(t, "--admin-addr", "127.0.0.1:0") })
}

func testDispatchInside(t *testing.T, more ...string) {
	sim := start(t, nil, "sim", "--port", "0", "--speed", "10")
	file := filepath.Join(t.TempDir(), "dispatch.yaml")
	redis := startRedisServer(t)
	doc := `transport-config: '{"url":"` + redis + `","queues":[{"queue_name":"q","gate_params":{"pool":"sim-model"}}]}'` +
		"\nconcurrency: 4\napi-key: ours\nhealth-port: 1\nbudget-log-interval: 10ms\n"
	if err := os.WriteFile(file, []byte(doc), 0o600); err != nil {
		t.Fatal(err)
	}
	front := start(t, nil, append([]string{"frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--workers", sim.await(`--workers: (\S+)\n`), "--dispatch", file}, more...)...)
	url := front.await(`Front end: (\S+)\n`)
	if len(more) > 0 {
		if status, _ := fetch(t, url+"/internal/dispatch/status"); status != 404 {
			t.Errorf("status for everybody: %d, want 404", status)
		}
		url = front.await(`Admin: (\S+)\n`)
	}
	d := dispatching{running: front, url: url}
	const n = 50
	var lines bytes.Buffer
	for i := range n {
		fmt.Fprintf(&lines, `{"id":"r%d","payload":{"model":"sim-model","prompt":"Hello","max_tokens":16}}`+"\n", i)
	}
	requests := filepath.Join(t.TempDir(), "requests.jsonl")
	if err := os.WriteFile(requests, lines.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	if status, _ := fetch(t, url+"/internal/dispatch/status"); status != 401 {
		t.Errorf("status without the key: %d, want 401", status)
	}
	d.says("submit", requests, "--api-key", "ours")
	if got := d.says("results", "--count", strconv.Itoa(n), "--wait", "1m", "--api-key", "ours"); strings.Count(got, `"status_code":200`) != n {
		t.Errorf("%d results, want %d: %s", strings.Count(got, `"status_code":200`), n, got)
	}
	if got := d.says("status", "--api-key", "ours"); !strings.Contains(got, "sim-model: open") {
		t.Errorf("status: %s", got)
	}
	_, page := fetch(t, url+"/metrics")
	for _, want := range []string{
		fmt.Sprintf(`spillway_dispatch_successful_requests_total{pool_name="default",queue_id="q",queue_name="q"} %d`, n),
		`spillway_dispatch_gate_metric_source_available{inference_pool="sim-model",source="spillway 0"} 1`,
		`spillway_pool_inflight{lane="batch",pool="sim-model",unit="requests"} 0`,
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the metrics lack %s", want)
		}
	}
	front.awaitIn(&front.stderr, `(health-port: the front end decides)`)
	front.awaitIn(&front.stderr, `(msg=budget group=sim-model)`)
	front.signal(syscall.SIGTERM)
	if code := front.exit(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// TestDispatchInsideSettings has what cannot be used in the file end the start.
func TestDispatchInsideSettings(t *testing.T) {
	for doc, want := range map[string]string{
		"lease-ttl: 10ms": "lease-ttl: 10ms is below 1s",
		"leasettl: 1m":    "leasettl: unknown key",
		"concurrency: 4":  "transport-config-file: give it or transport-config",
		`transport-config: '{"url":"redis://h","queues":[{"queue_name":"q"}]}'`: "pool: is missing",
	} {
		file := filepath.Join(t.TempDir(), "dispatch.yaml")
		if err := os.WriteFile(file, []byte(doc), 0o600); err != nil {
			t.Fatal(err)
		}
		p := start(t, nil, "frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--workers", "http://127.0.0.1:1", "--dispatch", file)
		if code := p.exit(); code != 1 || !strings.Contains(p.stderr.String(), want) {
			t.Errorf("%s: exit code %d, %s, want 1, %s", doc, code, &p.stderr, want)
		}
	}
}

// says runs a command that asks the dispatcher, and returns its standard output.
func (d dispatching) says(args ...string) string {
	d.t.Helper()
	p := start(d.t, nil, append(append([]string{"dispatch"}, args...), "--url", d.url)...)
	if code := p.exit(); code != 0 {
		d.t.Fatalf("spillway dispatch %q: exit code %d, %s", args, code, &p.stderr)
	}
	return p.stdout.String()
}

// TestDispatch has people at a terminal submit requests to a real front end with simulated workers,
// which is killed on the way.
func TestDispatch(t *testing.T) {
	sim := start(t, nil, "sim", "--port", "0", "--count", "2", "--speed", "10")
	workers := sim.await(`--workers: (\S+)\n`)
	port := strconv.Itoa(unusedPort(t))
	frontend := func() *running {
		f := start(t, nil, "frontend", "--http-host", "127.0.0.1", "--http-port", port, "--workers", workers, "--active-decode-blocks-threshold", "0.85")
		f.await(`(Front end: )`)
		return f
	}
	front := frontend()
	d := startDispatcher(t, "http://127.0.0.1:"+port, "--concurrency", "4")
	eventually(t, "the dispatcher is ready", func() bool { status, _ := fetch(t, d.health+"/readyz"); return status == 200 })
	eventually(t, "the gate is open", func() bool { return strings.Contains(d.says("status"), "sim-model: open") })

	const n = 200
	var lines bytes.Buffer
	for i := range n {
		if i%2 == 0 {
			fmt.Fprintf(&lines, `{"id":"r%d","payload":{"model":"sim-model","prompt":"Hello","max_tokens":16}}`+"\n", i)
		} else { // as in a file for OpenAI's batches
			fmt.Fprintf(&lines, `{"custom_id":"r%d","method":"POST","url":"/v1/chat/completions","body":{"model":"sim-model","messages":[{"role":"user","content":"Hello"}],"max_tokens":16}}`+"\n", i)
		}
	}
	file := filepath.Join(t.TempDir(), "requests.jsonl")
	if err := os.WriteFile(file, lines.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	ids := strings.Fields(d.says("submit", file))
	if len(ids) != n || ids[0] != "r0" || !strings.HasSuffix(ids[1], "-r1") {
		t.Fatalf("submit: %d IDs, %q", len(ids), ids[:2])
	}
	first := d.says("results", "--count", "10", "--wait", "1m")
	front.signal(syscall.SIGKILL)
	front.exit()
	frontend()
	rest := d.says("results", "--count", strconv.Itoa(n-strings.Count(first, "\n")), "--wait", "1m")
	seen := map[string]bool{}
	for line := range strings.Lines(first + rest) {
		var o struct {
			ID         string
			StatusCode int `json:"status_code"`
			Payload    string
		}
		if err := json.Unmarshal([]byte(line), &o); err != nil || o.StatusCode != 200 || !strings.Contains(o.Payload, "sim-model") || seen[o.ID] {
			t.Errorf("result %s: %v, seen before %v", line, err, seen[o.ID])
		}
		seen[o.ID] = true
	}
	for _, id := range ids {
		if !seen[id] {
			t.Errorf("no result for %s", id)
		}
	}
	if got := d.says("cancel", "r0", "nobody"); !strings.HasPrefix(got, "cancelling 0 of 2") {
		t.Errorf("cancel: %s", got)
	}
	status, page := fetch(t, d.metrics+"/metrics")
	if want := fmt.Sprintf(`spillway_dispatch_successful_requests_total{pool_name="default",queue_id="q",queue_name="q"} %d`, n); status != 200 || !strings.Contains(page, want) {
		t.Errorf("the metrics lack %s", want)
	}
	if _, page := fetch(t, "http://127.0.0.1:"+port+"/metrics"); !strings.Contains(page, `spillway_pool_inflight{lane="batch",pool="sim-model",unit="requests"} 0`) {
		t.Error("the front end does not count the batch lane")
	}
	d.signal(syscall.SIGTERM)
	if code := d.exit(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// TestMetricsToken has the metrics ask for a token, which may change.
func TestMetricsToken(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	d := startDispatcher(t, "http://127.0.0.1:1", "--metrics-endpoint-token-file", file)
	for _, tt := range []struct {
		held, sent string
		want       int
	}{{"", "", 401}, {" ", "", 401}, {"one\n", "one", 200}, {"one\n", "two", 401}, {"two\n", "two", 200}, {"two\n", "", 401}} {
		if tt.held != "" {
			if err := os.WriteFile(file, []byte(tt.held), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		req, err := http.NewRequest("GET", d.metrics+"/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+tt.sent)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != tt.want {
			t.Errorf("the file holds %q, and %q comes: %d, want %d", tt.held, tt.sent, resp.StatusCode, tt.want)
		}
	}
}

// TestDispatchSettings has what cannot be used end the start.
func TestDispatchSettings(t *testing.T) {
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--lease-ttl", "10ms"}, 2, "lease-ttl: 10ms is below 1s"},
		{nil, 1, "transport-config-file: give it or transport-config"},
		{[]string{"--transport-config", `{"url":"redis://:secret@h:x","queues":[{"queue_name":"q","igw_base_url":"http://h"}]}`}, 1, "url is no Redis URL"},
		{[]string{"--transport-config", `{"url":"redis://h","queues":[{"queue_name":"q","igw_base_url":"http://h","gate_type":"constnat"}]}`}, 1, `unknown gate_type "constnat"`},
		{[]string{"--transport-config", `{"url":"redis://h","queue":[]}`}, 1, `unknown field "queue"`},
	} {
		p := start(t, nil, append([]string{"dispatch", "--port", "0"}, tt.args...)...)
		code := p.exit()
		if text := p.stderr.String(); code != tt.code || !strings.Contains(text, tt.want) || strings.Contains(text, "secret") {
			t.Errorf("dispatch %q: exit code %d, %s, want %d, %s", tt.args, code, text, tt.code, tt.want)
		}
	}
}
