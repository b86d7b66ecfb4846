package main

import (
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"

	"spillway/router"
)

// cutStream is the end of a stream that a stopping front end could not wait for.
const cutStream = `data: {"error":{"message":"Service is not ready","type":"service_unavailable","code":503}}` + "\n\ndata: [DONE]\n\n"

// TestSIGTERM checks a drain as an orchestrator and its clients see it: while one stream runs,
// probes and new requests are told; it may end, or is cut with an event that says so.
func TestSIGTERM(t *testing.T) { inModes(t, testSIGTERM) }

func testSIGTERM(t *testing.T, mode router.Mode) {
	for _, tt := range []struct {
		name, timeout string
		tokens        string
		suffix        string
	}{
		{"the stream ends in time", "1m", `"max_tokens":150`, "data: [DONE]\n\n"},
		{"the stream is cut", "500ms", `"max_tokens":5000`, cutStream},
	} {
		t.Run(tt.name, func(t *testing.T) {
			demo := start(t, nil, append([]string{"demo", "--http-port", "0", "--port", "0", "--count", "1", "--itl", "10ms", "--drain-timeout", tt.timeout}, modeFlags(t, mode, 1)...)...)
			url := demo.await(`Front end: (\S+)\n`)
			resp := post(t, url+"/v1/chat/completions", strings.Replace(slowChat, `"max_tokens":5000`, tt.tokens, 1))
			if _, err := io.ReadFull(resp.Body, make([]byte, 10)); err != nil || resp.StatusCode != http.StatusOK {
				t.Fatalf("stream: %s, %v", resp.Status, err)
			}
			demo.signal(syscall.SIGTERM)
			eventually(t, "/health says no", func() bool { status, _ := fetch(t, url+"/health"); return status == http.StatusServiceUnavailable })
			if status, body := fetch(t, url+"/live"); status != http.StatusOK {
				t.Errorf("GET /live while draining = %d %s, want 200", status, body)
			}
			refused := post(t, url+"/v1/chat/completions", shortChat)
			if got := text(t, refused); refused.StatusCode != 503 || got != `{"message":"Service is not ready","type":"service_unavailable","code":503}` ||
				refused.Header.Get("X-Spillway-Reason") != "draining" || !refused.Close {
				t.Errorf("chat while draining = %s %s, close %v; want 503 with reason draining and a close", refused.Status, got, refused.Close)
			}
			body := text(t, resp)
			if !strings.HasSuffix(body, tt.suffix) || strings.Contains(body, "error") != (tt.suffix == cutStream) {
				t.Errorf("the stream ends with %q, want %q", body[max(0, len(body)-300):], tt.suffix)
			}
			if code := demo.exit(); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
		})
	}
}
