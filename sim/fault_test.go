package sim_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The ways in which a connection can go on after what was read.
const (
	endsWhole   = "eof"
	endsReset   = "reset"
	staysSilent = "silence"
)

// raw sends a request over a connection of its own and returns all that comes back, and how it
// ends: a client that takes no part in what an answer means.
func raw(t *testing.T, url, route, body, fault string) (got, end string) {
	t.Helper()
	conn := dial(t, url)
	defer conn.Close()
	send(t, conn, route, body, fault)
	// Far more than an answer takes. Silence needs it whole, so it is short there.
	wait := 20 * time.Second
	if strings.Contains(fault, "freeze") || fault == "silence" {
		wait = 400 * time.Millisecond
	}
	return drain(t, conn, wait)
}

func dial(t *testing.T, url string) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

func send(t *testing.T, conn net.Conn, route, body, fault string) {
	t.Helper()
	if fault != "" {
		fault = "X-Sim-Fault: " + fault + "\r\n"
	}
	_, err := fmt.Fprintf(conn, "%s HTTP/1.1\r\nHost: sim\r\nConnection: close\r\nContent-Length: %d\r\n%s\r\n%s", route, len(body), fault, body)
	if err != nil {
		t.Fatal(err)
	}
}

// drain reads until conn ends or nothing comes for the time.
func drain(t *testing.T, conn net.Conn, wait time.Duration) (got, end string) {
	t.Helper()
	var all strings.Builder
	buf := make([]byte, 64<<10)
	for {
		if err := conn.SetReadDeadline(time.Now().Add(wait)); err != nil {
			t.Fatal(err)
		}
		n, err := conn.Read(buf)
		all.Write(buf[:n])
		switch {
		case err == nil:
			continue
		case errors.Is(err, io.EOF):
			return all.String(), endsWhole
		case errors.Is(err, syscall.ECONNRESET):
			return all.String(), endsReset
		case errors.Is(err, os.ErrDeadlineExceeded):
			return all.String(), staysSilent
		}
		t.Fatalf("read: %v", err)
	}
}

const (
	streamed = `{"prompt":"hello","max_tokens":6,"stream":true}`
	unary    = `{"prompt":"hello","max_tokens":6}`
)

func TestFaultsOfOneRequest(t *testing.T) {
	url := serve(t, fast())[0]
	const (
		ok       = "HTTP/1.1 200 OK\r\n"
		lastPart = "\r\n0\r\n\r\n"
	)
	for _, tt := range []struct {
		fault, body string
		start       string // of all that comes
		tokens      int    // events with text, or -1
		last        string // of all that comes
		end         string
		aborted     uint64 // sequences that are not delivered whole
	}{
		{"reset", streamed, "", 0, "", endsReset, 0},
		{"close", streamed, "", 0, "", endsWhole, 0},
		{"freeze", streamed, "", 0, "", staysSilent, 0},
		{"429", streamed, "HTTP/1.1 429 Too Many Requests\r\n", 0, `"code":429}}`, endsWhole, 0},
		{"500", unary, "HTTP/1.1 500 Internal Server Error\r\n", 0, `"code":500}}`, endsWhole, 0},
		{"502", unary, "HTTP/1.1 502 Bad Gateway\r\n", 0, `"code":502}}`, endsWhole, 0},
		{"503", unary, "HTTP/1.1 503 Service Unavailable\r\n", 0, `"code":503}}`, endsWhole, 0},
		{"503-overload", unary, "HTTP/1.1 503 Service Unavailable\r\n", 0, `"code":503}}`, endsWhole, 0},
		{"garbage", streamed, "\x16\x03\x01", 0, "\r\n\r\n", endsWhole, 0},
		{"both-lengths", streamed, ok + "Content-Length: 7\r\nTransfer-Encoding: chunked\r\n", 6, "[DONE]\n\n" + lastPart, endsWhole, 0},
		{"oversized-header", streamed, ok + "X-Filler: xxx", 6, "[DONE]\n\n" + lastPart, endsWhole, 0},

		{"silence", streamed, ok, 0, "\r\n\r\n", staysSilent, 1},
		{"reset-stream", streamed, ok, 1, "", endsReset, 1},
		{"reset-stream;after_tokens=3", streamed, ok, 3, "", endsReset, 1},
		{"reset-stream;after_tokens=6", streamed, ok, 6, "", endsReset, 1},
		{"reset-stream;after_tokens=7", streamed, ok, 6, "[DONE]\n\n" + lastPart, endsWhole, 0}, // never gets there
		{"close-stream;after_tokens=3", streamed, ok, 3, "}\n\n\r\n", endsWhole, 1},
		{"freeze-stream;after_tokens=3", streamed, ok, 3, "}\n\n\r\n", staysSilent, 1},
		{"eof", streamed, ok, 6, "\"stop_reason\":null}]}\n\n" + lastPart, endsWhole, 1},
		{"eof;after_tokens=3", streamed, ok, 3, "\"finish_reason\":null}]}\n\n" + lastPart, endsWhole, 1},
		{"garbage-framing;after_tokens=3", streamed, ok, 3, "this is no length of a chunk\r\n", endsWhole, 1},
		{"garbage-event;after_tokens=3", streamed, ok, 6, "[DONE]\n\n" + lastPart, endsWhole, 0},
		{"oversized-event;after_tokens=3", streamed, ok, 6, "[DONE]\n\n" + lastPart, endsWhole, 0},
		{"oversized-event;bytes=1000", streamed, ok, 6, "[DONE]\n\n" + lastPart, endsWhole, 0},
		{"error-event", streamed, ok, 0, "data: [DONE]\n\n" + lastPart, endsWhole, 1},
		{"error-event;after_tokens=2;code=429", streamed, ok, 2, "data: [DONE]\n\n" + lastPart, endsWhole, 1},

		{"silence", unary, ok, 0, "\r\n\r\n", staysSilent, 1},
		{"reset-stream", unary, ok, 1, "", endsReset, 1}, // half of the body has the text
		{"close-stream", unary, ok, 1, "", endsWhole, 1},
		{"freeze-stream", unary, ok, 1, "", staysSilent, 1},
		{"eof", unary, ok, 1, lastPart, endsWhole, 1},
		{"garbage-framing", unary, ok, 1, "this is no length of a chunk\r\n", endsWhole, 1},
		{"garbage-event", unary, ok, 1, lastPart, endsWhole, 1},
		{"oversized-event;bytes=1000", unary, ok, 1, "}}" + lastPart, endsWhole, 0},
		{"error-event;code=503", unary, ok, 0, `"code":503}}` + lastPart, endsWhole, 1},
		{"both-lengths", unary, ok + "Content-Length: 7\r\nTransfer-Encoding: chunked\r\n", 1, "}}" + lastPart, endsWhole, 0},
	} {
		t.Run(fmt.Sprint(tt.fault, " stream=", tt.body == streamed), func(t *testing.T) {
			if strings.HasPrefix(tt.fault, "both-lengths") && testing.Short() {
				t.Skip("keeps its connection for some seconds")
			}
			before := statsOf(t, url)
			got, end := raw(t, url, "POST /v1/completions", tt.body, tt.fault)
			if !strings.HasPrefix(got, tt.start) || tt.start == "" && got != "" {
				t.Errorf("starts with %.100q, want %q", got, tt.start)
			}
			if !strings.HasSuffix(got, tt.last) || end != tt.end {
				t.Errorf("ends with %q and %s, want %q and %s", got[max(0, len(got)-100):], end, tt.last, tt.end)
			}
			if n := strings.Count(got, `"text":"`); n != tt.tokens {
				t.Errorf("%d texts, want %d: %.2000q", n, tt.tokens, got)
			}
			after := until(t, url, "all sequences freed", func(s stats) bool {
				return s.Running+s.Waiting+s.Used == 0 && s.Cut-before.Cut >= tt.aborted
			})
			if n := after.Cut - before.Cut; n != tt.aborted {
				t.Errorf("%d sequences were not delivered, want %d", n, tt.aborted)
			}
		})
	}
}

// What the table above does not see: details of heads and events.
func TestFaultDetails(t *testing.T) {
	url := serve(t, fast())[0]
	for _, tt := range []struct {
		fault, body, want string
		there             bool
		bytes             int // at least
	}{
		{"429", streamed, "Retry-After", false, 0},
		{"429;retry_after=7", streamed, "\r\nRetry-After: 7\r\n", true, 0},
		{"503;retry_after=0", streamed, "\r\nRetry-After: 0\r\n", true, 0},
		{"503", streamed, "overload", false, 0},
		{"503", streamed, "queue", false, 0},
		{"503-overload", streamed, "overload", true, 0},
		{"503-overload", streamed, "Retry-After", false, 0},
		{"oversized-header", streamed, "\r\nContent-Type: text/event-stream", true, 2 << 20},
		{"oversized-header;bytes=5", streamed, "\r\nX-Filler: xxxxx\r\n", true, 0},
		{"oversized-event", streamed, `data: {"choices":[],"filler":"`, true, 17 << 20},
		{"error-event", streamed, `data: {"error":{"message":"The engine has failed.","type":"InternalServerError","code":500}}` + "\n\n", true, 0},
		{"error-event;code=429", streamed, `"code":429}`, true, 0},
		{"garbage-event", streamed, "data: {\"choices\":[{\"delta\":\x00\xff]}\n\n", true, 0},
		{"close-stream", unary, "\r\nContent-Length: ", true, 0},
	} {
		got, _ := raw(t, url, "POST /v1/completions", tt.body, tt.fault)
		if strings.Contains(got, tt.want) != tt.there || len(got) < tt.bytes {
			t.Errorf("%s: %d bytes %.500q; %q should be there: %v", tt.fault, len(got), got, tt.want, tt.there)
		}
	}
	got, end := raw(t, url, "POST /v1/completions", `{"prompt":""}`, "reset-stream")
	if !strings.HasPrefix(got, "HTTP/1.1 400 ") || end != endsWhole {
		t.Errorf("a refused request got %q, %s; want a whole 400", got, end)
	}
	for _, route := range []string{"POST /v1/chat/completions", "POST /v1/embeddings"} {
		body := `{"input":"x","messages":[{"role":"user","content":"x"}]}`
		if got, end := raw(t, url, route, body, "close-stream"); !strings.HasPrefix(got, "HTTP/1.1 200 ") || strings.HasSuffix(got, "}") || end != endsWhole {
			t.Errorf("%s: %q, %s; want half an answer", route, got, end)
		}
	}
	conn := dial(t, url) // is not closed at once: a client could use it again
	defer conn.Close()
	send(t, conn, "POST /v1/completions", unary, "both-lengths")
	if got, end := drain(t, conn, 400*time.Millisecond); !strings.HasSuffix(got, "\r\n0\r\n\r\n") || end != staysSilent {
		t.Errorf("both-lengths: %q, %s; want a whole answer and an open connection", got, end)
	}
	if got, _ := raw(t, url, "GET /health", "", "health-fail"); !strings.HasPrefix(got, "HTTP/1.1 503 ") {
		t.Errorf("GET /health = %q, want 503", got)
	}
}

func TestFaultRefusals(t *testing.T) {
	urls := serve(t, fast())
	for _, tt := range []struct{ body, want string }{
		{`{`, "is not a fault"},
		{`{"fault":"429","counts":2}`, "counts"},
		{`{"fault":"430"}`, "fault: \\\"430\\\" is none of refuse, slow,"},
		{`{"fault":"429","count":-1}`, "count: is not within"},
		{`{"fault":"429","share":0}`, "share: is not above 0"},
		{`{"fault":"429","share":1.5}`, "share: is not above 0"},
		{`{"fault":"429","seconds":-1}`, "seconds: is not within"},
		{`{"fault":"429","seconds":1e9}`, "seconds: is not within"},
		{`{"fault":"429","after_tokens":1}`, "after_tokens: the fault 429 does not take it."},
		{`{"fault":"eof","after_tokens":-1}`, "after_tokens: is not within"},
		{`{"fault":"429","retry_after":-1}`, "retry_after: is not within"},
		{`{"fault":"oversized-header","bytes":67108865}`, "bytes: is not within"},
		{`{"fault":"error-event","code":200}`, "code: is not within"},
		{`{"fault":"slow","factor":0.5}`, "factor: is not within"},
		{`{"fault":"slow","count":1}`, "count: the fault slow does not take it."},
		{`{"fault":"tokenizer-slow","delay_ms":-1}`, "delay_ms: is not within"},
		{`{"fault":"tokenizer-lie","extra_tokens":0}`, "extra_tokens: is not within"},
		{`{"fault":"tokenizer-off","code":500}`, "code: the fault tokenizer-off does not take it."},
		{`{"fault":"429","worker":1}`, "worker: is not within 0..0."},
		{`{"fault":"refuse"}`, "no port would be left"},
		{`{"fault":"` + strings.Repeat("x", 70000) + `"}`, "larger than 65536 bytes"},
	} {
		code, data := post(t, urls[0]+"/sim/fault", tt.body)
		if code != 400 && code != 413 || !strings.Contains(string(data), tt.want) {
			t.Errorf("POST %.80s = %d %s, want %q", tt.body, code, data, tt.want)
		}
	}
	for header, want := range map[string]string{
		"nothing":            "is none of",
		"429;retry_after":    "is not a key and a number",
		"429;retry_after=x":  "is not a key and a number",
		"429;count=3":        "is none of after_tokens",
		"429;after_tokens=3": "does not take it",
		"slow":               "a fault of a worker",
		"refuse":             "a fault of a worker",
		"tokenizer-off":      "a fault of a worker",
		"health-fail":        "a fault of /health",
	} {
		code, data := post(t, urls[0]+"/v1/completions", unary, "X-Sim-Fault", header)
		if code != 400 || !strings.Contains(string(data), want) {
			t.Errorf("X-Sim-Fault: %s = %d %s, want 400 %q", header, code, data, want)
		}
	}
	if got := faultsOf(t, urls[0])[0]; len(got) != 0 {
		t.Errorf("faults = %+v, want none", got)
	}
}
