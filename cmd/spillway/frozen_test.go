package main

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestFrozenWorker stops a worker's process, as a hanging driver or a debugger does: the kernel
// goes on accepting connections for it. It is stopped before a request, or in the middle of a
// stream, with and without other workers.
func TestFrozenWorker(t *testing.T) {
	const (
		unary    = `{"model":"sim-model","max_tokens":5,"messages":[{"role":"user","content":"Hi"}]}`
		stream   = `{"model":"sim-model","stream":true,"max_tokens":5,"messages":[{"role":"user","content":"Hi"}]}`
		endless  = `{"model":"sim-model","stream":true,"max_tokens":50000,"ignore_eos":true,"messages":[{"role":"user","content":"Hi"}]}`
		tooLate  = `{"message":"The worker did not answer in time","type":"gateway_timeout","code":504}`
		lastSaid = `data: {"error":{"message":"The worker did not answer in time","type":"gateway_timeout","code":504}}` + "\n\ndata: [DONE]\n\n"
	)
	for _, tt := range []struct {
		name    string
		body    string
		workers int
		middle  bool // it is stopped when the stream has begun
		status  int
		ends    string // the answer
		retries string
	}{
		{"unary, alone", unary, 1, false, 504, tooLate, "0"},
		{"unary, with others", unary, 3, false, 504, tooLate, "0"},
		{"stream, alone", stream, 1, false, 504, tooLate, "0"},
		{"stream, with others", stream, 3, false, 200, "data: [DONE]\n\n", "1"},
		{"in the middle, alone", endless, 1, true, 200, lastSaid, "0"},
		{"in the middle, with others", endless, 3, true, 200, lastSaid, "0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var config strings.Builder
			config.WriteString("workers:\n")
			var first *running
			for i := range tt.workers {
				sim := start(t, nil, "sim", "--port", "0")
				url := sim.await(`for --workers: (\S+)\n`)
				if i == 0 {
					first = sim
				}
				// The first in order is the first to be chosen.
				fmt.Fprintf(&config, "  - {url: %s, name: w%d, instance_id: %d, models: [sim-model]}\n", url, i+1, i+1)
			}
			file := filepath.Join(t.TempDir(), "workers.yaml")
			if err := os.WriteFile(file, []byte(config.String()), 0o600); err != nil {
				t.Fatal(err)
			}
			front := start(t, nil, "frontend", "--config", file, "--http-host", "127.0.0.1", "--http-port", "0",
				"--response-header-timeout", "2s", "--stream-inactivity-timeout", "2s", "--inhibited-duration", "1h",
				"--health-interval", "0", "--scrape-interval", "0")
			url := front.await(`Front end: (\S+)\n`)
			if !tt.middle {
				first.signal(syscall.SIGSTOP)
			}
			resp, err := http.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(tt.body))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			answer := bufio.NewReader(resp.Body)
			if tt.middle {
				if _, err := answer.Peek(1); err != nil {
					t.Fatal(err)
				}
				first.signal(syscall.SIGSTOP)
			}
			all, err := io.ReadAll(answer)
			if err != nil || resp.StatusCode != tt.status || !strings.HasSuffix(string(all), tt.ends) {
				t.Errorf("%d %.500s, %v; want %d and %s at the end", resp.StatusCode, all, err, tt.status, tt.ends)
			}
			for series, want := range map[string]string{
				`spillway_worker_inhibited{worker="w1"}`:                                                "1",
				`spillway_upstream_retries_total{model="sim-model",reason="timeout"}`:                   tt.retries,
				`dynamo_queued_requests{model="sim-model"}`:                                             "0",
				`spillway_slots_inflight{dp_rank="0",worker="w1"}`:                                      "0",
				`dynamo_frontend_disconnected_clients`:                                                  "0",
				`dynamo_frontend_model_migration_total{migration_type="new_request",model="sim-model"}`: tt.retries,
			} {
				eventually(t, series+" "+want, func() bool {
					_, page := fetch(t, url+"/metrics")
					return strings.Contains(page, "\n"+series+" "+want+"\n")
				})
			}
			first.signal(syscall.SIGCONT)
			front.signal(syscall.SIGTERM)
			if code := front.exit(); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
		})
	}
}
