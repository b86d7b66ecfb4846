package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
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
	path, err := exec.LookPath("redis-server")
	if err != nil {
		if path, err = filepath.Abs("../../bin/tools/redis-server"); err == nil {
			_, err = os.Stat(path)
		}
	}
	if err != nil {
		const how = "redis-server is neither in the PATH nor in bin/tools; `make setup-test` puts it there"
		if os.Getenv("REQUIRE_REDIS") != "" {
			t.Fatal(how)
		}
		t.Skip(how)
	}
	port := strconv.Itoa(unusedPort(t))
	cmd := exec.Command(path, "--port", port, "--bind", "127.0.0.1", "--dir", t.TempDir(), "--save", "", "--appendonly", "yes", "--appendfsync", "always")
	r := launch(t, cmd, nil)
	r.await(`(Ready to accept connections)`)
	return "redis://127.0.0.1:" + port
}

// unusedPort is one that nobody listened on a moment ago.
func unusedPort(t *testing.T) int {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).Port
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
