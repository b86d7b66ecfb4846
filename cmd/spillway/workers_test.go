package main

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"spillway/router"
)

// ask sends a request with a JSON body.
func ask(t *testing.T, method, url, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// TestWorkersComeAndGo adds workers to a running front end, which then watches and uses them, and
// takes one out again without a trace.
func TestWorkersComeAndGo(t *testing.T) { inModes(t, testWorkersComeAndGo) }

func testWorkersComeAndGo(t *testing.T, mode router.Mode) {
	sim := start(t, nil, "sim", "--port", "0", "--count", "2")
	worker := sim.await(`--workers: (http://[^,\s]+),`)
	front := start(t, nil, "frontend", "--http-port", "0", "--admin-addr", "127.0.0.1:0", "--scrape-interval", "50ms", "--router-mode", string(mode))
	url, admin := front.await(`Front end: (\S+)\n`), front.await(`Admin: (\S+)\n`)

	if status, body := ask(t, "POST", url+"/v1/chat/completions", shortChat); status != 404 {
		t.Errorf("chat before there is a worker = %d %s, want 404", status, body)
	}
	for _, record := range []string{
		fmt.Sprintf(`{"worker_id":1,"model_name":"sim-model","endpoint":%q,"name":"first"}`, worker),
		`{"worker_id":2,"model_name":"","endpoint":"http://127.0.0.1:1","name":"second"}`,
	} {
		if status, body := ask(t, "POST", admin+"/workers", record); status != 201 {
			t.Fatalf("POST /workers = %d %s, want 201", status, body)
		}
	}
	// The second one has been given a wrong address, so nothing is known of it.
	if status, body := ask(t, "PATCH", admin+"/workers/2", fmt.Sprintf(`{"endpoint":%q}`, sim.await(`,(http://[^,\s]+)`))); status != 200 {
		t.Errorf("PATCH /workers/2 = %d %s, want 200", status, body)
	}
	eventually(t, "the second worker has told its models", func() bool {
		_, body := ask(t, "GET", admin+"/workers/2", "")
		return strings.Contains(body, `"model_name":"sim-model","tenant_id":"default","lifecycle":"schedulable"`)
	})
	eventually(t, "both workers are watched", func() bool {
		_, ready := ask(t, "GET", url+"/v1/models/sim-model/ready", "")
		_, page := ask(t, "GET", admin+"/metrics", "")
		return strings.Contains(ready, `"registered":2`) && strings.Count(ready, `"kv_total_blocks"`) == 2 &&
			strings.Contains(page, `worker="first"`) && strings.Contains(page, `worker="second"`)
	})
	for range 4 {
		if status, body := ask(t, "POST", url+"/v1/chat/completions", shortChat); status != 200 {
			t.Errorf("chat = %d %s, want 200", status, body)
		}
	}
	if status, body := ask(t, "DELETE", admin+"/workers/1", ""); status != 200 {
		t.Errorf("DELETE /workers/1 = %d %s, want 200", status, body)
	}
	if _, page := ask(t, "GET", admin+"/metrics", ""); strings.Contains(page, `worker="first"`) || !strings.Contains(page, `worker="second"`) {
		t.Errorf("after DELETE the series are not those of the second worker alone:\n%s", page)
	}
	for range 2 {
		if status, body := ask(t, "POST", url+"/v1/chat/completions", shortChat); status != 200 {
			t.Errorf("chat after DELETE = %d %s, want 200 from the other worker", status, body)
		}
	}
	ask(t, "DELETE", admin+"/workers/2", "")
	if status, body := ask(t, "POST", url+"/v1/chat/completions", shortChat); status != 404 {
		t.Errorf("chat after all workers are gone = %d %s, want 404", status, body)
	}
}

// TestSecuritySettings checks that half a setting ends the start, with its key and source.
func TestSecuritySettings(t *testing.T) {
	for _, tt := range []struct {
		env  []string
		args []string
		want string
	}{
		{nil, []string{"--tls-cert-path", "cert.pem"}, "spillway: tls-key-path: is missing beside tls-cert-path"},
		{[]string{"DYN_TLS_KEY_PATH=key.pem"}, nil, "spillway: tls-cert-path: is missing beside tls-key-path"},
		{nil, []string{"--tls-cert-path", "/nowhere/c", "--tls-key-path", "/nowhere/k"}, "spillway: tls-cert-path: open /nowhere/c: no such file or directory (from flag --tls-cert-path)"},
		{[]string{"SPILLWAY_ADMIN_ADDR=9100"}, nil, `spillway: admin-addr: "9100" is not host:port (from variable SPILLWAY_ADMIN_ADDR)`},
	} {
		p := start(t, tt.env, append([]string{"frontend", "--http-port", "0"}, tt.args...)...)
		if code := p.exit(); code != exitUsage || !strings.Contains(p.stderr.String(), tt.want) {
			t.Errorf("frontend %v %v: exit code %d, %s\nwant %d, %s", tt.env, tt.args, code, &p.stderr, exitUsage, tt.want)
		}
	}
	help := start(t, nil, "frontend", "--help")
	if code := help.exit(); code != 0 {
		t.Fatalf("--help: exit code %d", code)
	}
	for _, want := range []string{"--forward-authorization", "[DYN_ENABLE_ANTHROPIC_API]", "[DYN_HTTP_SVC_RESPONSES_PATH]", "[DYN_HTTP_SVC_ANTHROPIC_PATH]", "[DYN_TLS_CERT_PATH]"} {
		if !strings.Contains(help.stdout.String(), want) {
			t.Errorf("--help does not show %s", want)
		}
	}
	// The word alone, as for any switch.
	bare := start(t, nil, "frontend", "--forward-authorization", "--http-port", "70000")
	if code := bare.exit(); code != exitUsage || strings.Contains(bare.stderr.String(), "forward-authorization") {
		t.Errorf("--forward-authorization: exit code %d, %s", code, &bare.stderr)
	}
}
