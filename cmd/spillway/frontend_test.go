package main

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"spillway/router"
)

// slowChat asks for a stream that goes on for longer than any test. Its prompt fills several KV
// blocks, because only complete ones count as load.
var slowChat = `{"model":"sim-model","stream":true,"max_tokens":5000,"ignore_eos":true,"messages":[{"role":"user","content":"` +
	strings.Repeat("Hello, worker. ", 40) + `"}]}`

const shortChat = `{"model":"sim-model","stream":true,"max_tokens":5,"messages":[{"role":"user","content":"Hello"}]}`

func post(t *testing.T, url, body string) *http.Response {
	t.Helper()
	resp, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	return resp
}

func text(t *testing.T, resp *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestDemo does what `spillway demo` proposes: a stream, then thresholds that let nothing
// more in while a request runs, then an end by SIGTERM.
func TestDemo(t *testing.T) { inModes(t, testDemo) }

func testDemo(t *testing.T, mode router.Mode) {
	demo := start(t, nil, append([]string{"demo", "--http-port", "0", "--port", "0", "--count", "2", "--drain-timeout", "100ms"}, modeFlags(t, mode, 2)...)...)
	url := demo.await(`Front end: (\S+)\n`)
	demo.await(`(Ctrl-C) ends it`)

	if resp := post(t, url+"/v1/chat/completions", shortChat); resp.StatusCode != http.StatusOK {
		t.Fatalf("chat: %s: %s", resp.Status, text(t, resp))
	} else if body := text(t, resp); !strings.HasSuffix(body, "data: [DONE]\n\n") {
		t.Errorf("chat: the stream ends with %q, want [DONE]", body[max(0, len(body)-80):])
	}
	if status, body := fetch(t, url+"/busy_threshold"); status != http.StatusOK || !strings.Contains(body, `"active_decode_blocks_threshold":0.85`) {
		t.Errorf("GET /busy_threshold: %d %s", status, body)
	}

	// Without a first scrape the capacity is unknown, and the decode check cannot fire.
	eventually(t, "both workers' capacity is known", func() bool {
		_, body := fetch(t, url+"/v1/models/sim-model/ready")
		return strings.Count(body, `"kv_total_blocks":1024`) == 2
	})
	for i := range 2 { // one request on each worker, so that each holds a block; they begin differently, or a cache would draw both
		resp := post(t, url+"/v1/chat/completions", strings.Replace(slowChat, "Hello", fmt.Sprint("From ", i, ": hello"), 1))
		if _, err := bufio.NewReader(resp.Body).ReadString('\n'); resp.StatusCode != http.StatusOK || err != nil {
			t.Fatalf("slow chat: %s, %v", resp.Status, err)
		}
	}
	resp := post(t, url+"/busy_threshold", `{"model":"sim-model","active_decode_blocks_threshold":0}`)
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("POST /busy_threshold: %s: %s", resp.Status, text(t, resp))
	}
	resp = post(t, url+"/v1/chat/completions", shortChat)
	const want = `{"message":"Service temporarily unavailable: All workers are busy, please retry later","type":"service_unavailable","code":503}`
	if got := strings.TrimSpace(text(t, resp)); resp.StatusCode != 503 || got != want || resp.Header.Get("X-Spillway-Reason") != "overloaded" {
		t.Errorf("chat while all are busy: %d, reason %q, %s\nwant 503, overloaded, %s",
			resp.StatusCode, resp.Header.Get("X-Spillway-Reason"), got, want)
	}

	demo.signal(syscall.SIGTERM)
	if code := demo.exit(); code != 0 {
		t.Errorf("demo after SIGTERM: exit code %d, want 0", code)
	}
}

// TestFrontendAsksForModels starts a front end that knows a worker by its URL alone.
func TestFrontendAsksForModels(t *testing.T) {
	sim := start(t, nil, "sim", "--port", "0", "--model", "asked/for")
	workers := sim.await(`--workers: (\S+)\n`)
	front := start(t, []string{"SPILLWAY_WORKERS=" + workers}, "frontend", "--http-port", "0", "--http-host", "127.0.0.1")
	url := front.await(`Front end: (\S+)\n`)
	eventually(t, "the model is listed", func() bool {
		_, body := fetch(t, url+"/v1/models")
		return strings.Contains(body, `"asked/for"`)
	})
	front.signal(syscall.SIGINT)
	if code := front.exit(); code != 0 {
		t.Errorf("frontend after SIGINT: exit code %d, want 0", code)
	}
}

// TestSecondSignal checks that a drain with a request in flight can be cut short.
func TestSecondSignal(t *testing.T) { inModes(t, testSecondSignal) }

func testSecondSignal(t *testing.T, mode router.Mode) {
	demo := start(t, nil, append([]string{"demo", "--http-port", "0", "--port", "0", "--count", "2", "--drain-timeout", "1h"}, modeFlags(t, mode, 2)...)...)
	url := demo.await(`Front end: (\S+)\n`)
	resp := post(t, url+"/v1/chat/completions", slowChat)
	if _, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	demo.signal(syscall.SIGTERM)
	eventually(t, "/health says no", func() bool {
		status, _ := fetch(t, url+"/health")
		return status == http.StatusServiceUnavailable
	})
	demo.signal(syscall.SIGTERM)
	if code := demo.exit(); code != exitInterrupted {
		t.Errorf("demo after a second SIGTERM: exit code %d, want %d", code, exitInterrupted)
	}
}
