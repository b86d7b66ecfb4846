package proxy_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"spillway/proxy"
)

const notReady = `{"status":"not_ready","stage":%q,"message":"Service is not ready"}` + "\n"

var draining = flat(503, "service_unavailable", "Service is not ready")

// pausing is a worker whose stream begins and goes on when next is received from.
func pausing(t testing.TB) (s *script, next chan struct{}) {
	next = make(chan struct{})
	return newScript(t, func(c *conn, _ received) {
		c.say(streamHead + chunk(hello))
		if _, ok := <-next; ok {
			c.say(chunk(ended+done) + chunk(""))
			return
		}
		c.gone()
	}), next
}

// TestDrain checks each answer of a server that has been told to stop while a stream runs.
func TestDrain(t *testing.T) {
	s, next := pausing(t)
	f := begin(t, setup{proxy: func(c *proxy.Config) { c.DrainTimeout = time.Hour }}, served("w", s))
	running := f.dial()
	running.post(streamBody)
	running.head()
	if got, err := running.chunk(); got != hello || err != nil {
		t.Fatalf("first event %q, %v", got, err)
	}
	f.stop()
	eventually(t, "/health says no", func() bool { return f.send("GET", "/health", "").status == 503 })
	stage := fmt.Sprintf(notReady, "draining")
	f.send("GET", "/health", "").is(t, "GET /health", 503, stage)
	f.send("GET", "/ready", "").is(t, "GET /ready", 503, stage)
	f.send("GET", "/live", "").is(t, "GET /live", 200, `{"status":"live","message":"Service is live"}`+"\n")
	f.send("GET", "/nope", "").is(t, "GET /nope", 404, flat(404, "not_found", "No route for GET /nope"))
	for _, path := range []string{"/metrics", "/v1/models", "/busy_threshold"} {
		if g := f.send("GET", path, ""); g.status != 200 {
			t.Errorf("GET %s = %d, want 200", path, g.status)
		}
	}
	refusal := []string{"Connection: close", "X-Spillway-Reason: draining", "X-Llm-D-Request-Dropped-Reason: rejected-shutting-down",
		"Retry-After: ", "Content-Type: application/json"}
	f.chat(chatBody).is(t, "chat", 503, draining, refusal...)
	f.chat("{", "Content-Type: text/plain").is(t, "chat with a body that is never read", 503, draining, refusal...)
	f.send("POST", "/v1/embeddings", "{}").is(t, "embeddings", 503, draining, refusal...)
	if got := f.metric(`spillway_rejections_total{model="unknown_model",reason="draining"}`); got != "3" {
		t.Errorf("refused for draining: %s, want 3", got)
	}
	if got := f.metric(`dynamo_tasks_issued_total{endpoint="chat_completions",model="m"}`); got != "1" {
		t.Errorf("issued: %s, want 1: refusals of a drain are none", got)
	}
	next <- struct{}{}
	if got, err := running.chunk(); got != ended+done || err != nil {
		t.Errorf("the running stream goes on with %q, %v, want its end", got, err)
	}
	if got, err := running.chunk(); got != "" || err != nil {
		t.Errorf("and ends with %q, %v, want well", got, err)
	}
	f.over()
	rec := httptest.NewRecorder()
	f.server.Handler().ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/live", nil))
	if want := `{"status":"shutting_down","message":"Service is shutting down"}` + "\n"; rec.Code != 503 || rec.Body.String() != want {
		t.Errorf("/live when stopping = %d %s, want 503 %s", rec.Code, rec.Body, want)
	}
}

// TestDrainDelay checks that requests are admitted while load balancers are being told.
func TestDrainDelay(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{proxy: func(c *proxy.Config) { c.DrainDelay = 500 * time.Millisecond }}, served("w", s))
	f.send("GET", "/health", "")
	begun := time.Now()
	f.stop()
	eventually(t, "/health says no", func() bool { return f.send("GET", "/health", "").status == 503 })
	ready, g := f.send("GET", "/ready", ""), f.chat(chatBody)
	if time.Since(begun) > 400*time.Millisecond {
		t.Skip("the machine is too slow to tell a delay from its end")
	}
	ready.is(t, "GET /ready", 503, fmt.Sprintf(notReady, "draining"))
	g.is(t, "chat during the delay", 200, reply)
	f.over()
}

// TestDrainCuts checks what becomes of requests that outlast the drain.
func TestDrainCuts(t *testing.T) {
	s, next := pausing(t)
	defer close(next)
	silent := newScript(t, func(c *conn, _ received) { c.gone() })
	f := begin(t, setup{proxy: func(c *proxy.Config) { c.DrainTimeout = 20 * time.Millisecond }}, served("w", s), served("v", silent, "silent"))
	stream, unary, early, upload := f.dial(), f.dial(), f.dial(), f.dial()
	stream.post(streamBody)
	stream.head()
	if got, err := stream.chunk(); got != hello || err != nil {
		t.Fatalf("first event %q, %v", got, err)
	}
	head, part := f.dial(), chatBody[:len(chatBody)-1]
	_, _ = io.WriteString(head, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
	unary.post(strings.Replace(chatBody, `"m"`, `"silent"`, 1))
	early.post(strings.Replace(streamBody, `"m"`, `"silent"`, 1))
	_, _ = io.WriteString(upload, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 20000\r\n\r\n"+part)
	// The stream that has begun needs its body no more.
	eventually(t, "all are there", func() bool {
		return len(silent.seen()) == 2 && len(s.seen()) == 1 && f.metric("spillway_body_memory_bytes") == number(3*4<<10+64<<10)
	})
	f.stop()
	want := `data: {"error":{"message":"Service is not ready","type":"service_unavailable","code":503}}` + "\n\n" + done
	if got, err := stream.chunk(); got != want || err != nil {
		t.Errorf("a stream is cut with %q, %v\nwant %q", got, err, want)
	}
	if got, err := stream.chunk(); got != "" || err != nil {
		t.Errorf("and ends with %q, %v, want well", got, err)
	}
	for name, c := range map[string]*raw{"a unary request": unary, "a stream without an event": early, "an upload": upload, "an upload that has not begun": head} {
		status, header := c.head()
		body := make([]byte, len(draining))
		_, err := io.ReadFull(c.br, body)
		if status != "HTTP/1.1 503 Service Unavailable" || string(body) != draining || !strings.Contains(header, "X-Spillway-Reason: draining\r\n") ||
			!strings.Contains(header, "Connection: close\r\n") {
			t.Errorf("%s is cut with %q %q %q, %v; want 503 %s", name, status, header, body, err, draining)
		}
	}
	f.over()
	if got := f.states(); got != "w:unknown" {
		t.Errorf("afterwards %s: to be cut is no failure of the worker", got)
	}
}

// TestDrainOfStuckClients checks that clients who do nothing do not turn an end into a failure.
func TestDrainOfStuckClients(t *testing.T) {
	s := newScript(t, func(c *conn, _ received) {
		c.say(streamHead)
		for {
			if _, err := io.WriteString(c, chunk("data: "+strings.Repeat("x", 1<<16)+"\n\n")); err != nil {
				c.end = true
				return
			}
		}
	})
	f := begin(t, setup{proxy: func(c *proxy.Config) { c.DrainTimeout = 20 * time.Millisecond }}, served("w", s))
	f.dial() // connects and asks for nothing
	f.dial().post(streamBody)
	eventually(t, "the worker has the request", func() bool { return len(s.seen()) == 1 })
	f.stop()
	f.over()
	f.settled()
}
