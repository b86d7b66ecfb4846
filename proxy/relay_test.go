package proxy_test

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"spillway/busy"
	"spillway/proxy"
	"spillway/worker"
)

// What a client is told of a worker that failed.
var (
	badGateway = flat(502, "bad_gateway", "The worker could not be reached or broke the connection")
	failed500  = flat(500, "internal_server_error", "The worker failed to process the request")
)

// TestOneWorker has everything that a single worker can do to a request that is not streamed.
func TestOneWorker(t *testing.T) {
	const vllm = `{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}` + "\n"
	for _, tt := range []struct {
		name    string
		worker  func(*conn, received)
		proxy   func(*proxy.Config)
		status  int
		want    string
		headers []string
		state   string
		calls   int // requests that the worker saw
	}{
		{"200", saying(answer(200, jsonHeader+"Server: uvicorn\r\nX-Mine: 1\r\nConnection: X-Hop\r\nX-Hop: 1\r\n", reply)), nil,
			200, reply, []string{"X-Mine: 1", "X-Hop: ", "Server: ", "X-Spillway-Worker: w", "X-Spillway-Attempts: ", "X-Spillway-Dp-Rank: "}, "unknown", 1},
		{"200 in chunks", saying("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(reply[:9]) + chunk(reply[9:]) + chunk("")), nil,
			200, reply, []string{fmt.Sprintf("Content-Length: %d", len(reply))}, "unknown", 1},
		{"200 until close", func(c *conn, _ received) { c.say("HTTP/1.1 200 OK\r\n" + jsonHeader + "\r\n" + reply); c.hangUp() }, nil, 200, reply, nil, "unknown", 1},
		{"100 before 200", saying("HTTP/1.1 100 Continue\r\n\r\n" + answer(200, jsonHeader, reply)), nil, 200, reply, nil, "unknown", 1},
		{"worker headers hidden", saying(answer(200, jsonHeader, reply)), func(c *proxy.Config) { c.HideWorkerHeaders = true },
			200, reply, []string{"X-Spillway-Worker: "}, "unknown", 1},
		{"400 byte for byte", saying(answer(400, jsonHeader+"Retry-After: 3\r\n", vllm)), nil, 400, vllm,
			[]string{"Content-Type: application/json", "Retry-After: ", "X-Spillway-Reason: "}, "unknown", 1},
		{"404 with text", saying(answer(404, "Content-Type: text/plain; charset=latin1\r\n", "caf\xe9")), nil, 404, "caf\xe9", []string{"Content-Type: text/plain; charset=latin1"}, "unknown", 1},
		{"422", saying(answer(422, jsonHeader, "{}")), nil, 422, "{}", nil, "unknown", 1},
		{"500", saying(answer(500, jsonHeader, "secret")), nil, 500, failed500, []string{"Content-Type: application/json", "X-Spillway-Worker: w"}, "unknown", 1},
		{"500 exposed", saying(answer(500, jsonHeader, "secret")), func(c *proxy.Config) { c.ExposeUpstreamError = true }, 500, "secret", nil, "unknown", 1},
		{"500 of 100 kB is never exposed in part", saying(answer(500, jsonHeader, strings.Repeat("x", 100<<10))), func(c *proxy.Config) { c.ExposeUpstreamError = true }, 500, failed500, nil, "unknown", 1},
		{"501", saying(answer(501, "", "secret")), nil, 501, flat(501, "not_implemented", "The worker failed to process the request"), nil, "unknown", 1},
		{"502, nobody else", saying(answer(502, "", "secret")), nil, 502, flat(502, "bad_gateway", "The worker failed to process the request"), nil, "unknown", 1},
		{"504, nobody else", saying(answer(504, "", "secret")), nil, 504, flat(504, "gateway_timeout", "The worker failed to process the request"), nil, "unknown", 1},
		{"503 without a word of load", saying(answer(503, jsonHeader, `{"detail":"starting"}`)), nil, 503,
			flat(503, "service_unavailable", "Service temporarily unavailable: the worker is not available"), []string{"Retry-After: ", "X-Spillway-Reason: "}, "unknown", 1},
		{"499", saying(answer(499, jsonHeader, "{}")), nil, 499, flat(499, "client_closed_request", "Client closed request"), nil, "unknown", 1},
		{"a redirect", saying(answer(302, "Location: http://127.0.0.1:1/\r\n", "")), nil, 502, badGateway, []string{"Location: "}, "unknown", 1},
		{"a switch of protocols", saying("HTTP/1.1 101 Switching Protocols\r\n\r\n"), nil, 502, badGateway, nil, "inhibited", 1},
		{"garbage", func(c *conn, _ received) { c.say("SSH-2.0-x\r\n"); c.gone() }, nil, 502, badGateway, nil, "inhibited", 1},
		{"reset before the head", func(c *conn, _ received) { c.reset() }, nil, 502, badGateway, []string{"Retry-After: ", "X-Spillway-Worker: w"}, "inhibited", 1},
		{"closed in the head", func(c *conn, _ received) { c.say("HTTP/1.1 200 OK\r\nConte"); c.hangUp() }, nil, 502, badGateway, nil, "inhibited", 1},
		{"closed in the body", func(c *conn, _ received) { c.say(answer(200, jsonHeader, reply)[:150]); c.hangUp() }, nil, 502, badGateway, nil, "inhibited", 1},
		{"two lengths", saying("HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"), nil, 502, badGateway, nil, "inhibited", 1},
		{"a failure that inhibits nobody", func(c *conn, _ received) { c.reset() }, func(c *proxy.Config) { c.InhibitedDuration = 0 }, 502, badGateway, nil, "unknown", 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScript(t, tt.worker)
			f := begin(t, setup{proxy: tt.proxy}, served("w", s))
			f.chat(chatBody).is(t, "chat", tt.status, tt.want, tt.headers...)
			if got := f.states(); got != "w:"+tt.state {
				t.Errorf("afterwards %s, want %s", got, tt.state)
			}
			if got := len(s.seen()); got != tt.calls {
				t.Errorf("the worker saw %d requests, want %d", got, tt.calls)
			}
			if got := f.metric(`dynamo_tasks_rejected_total{endpoint="chat_completions",model="m"}`); got != "0" {
				t.Errorf("counted as rejected: %s, want 0", got)
			}
		})
	}
}

// TestCapacityRefusals has every way in which a worker says that it has too much to do.
func TestCapacityRefusals(t *testing.T) {
	for _, tt := range []struct {
		name, answer, retryAfter string
	}{
		{"429", answer(429, jsonHeader, "{}"), "1"},
		{"429 with a time", answer(429, "Retry-After: 7\r\n", ""), "7"},
		{"429 with a time beyond what SDKs take", answer(429, "Retry-After: 3600\r\n", ""), "60"},
		{"429 with nonsense", answer(429, "Retry-After: soon\r\n", ""), "1"},
		{"529", answer(529, jsonHeader, "{}"), "1"},
		{"503 with a time", answer(503, "Retry-After: 2\r\n", "sorry"), "2"},
		{"503 that speaks of overload", answer(503, jsonHeader, `{"error":{"message":"Server Overloaded"}}`), "1"},
		{"503 that speaks of a queue", answer(503, jsonHeader, `{"error":"queue full"}`), "1"},
		{"first event of a stream is a 429", "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {\"error\":{\"message\":\"x\",\"code\":429}}\n\n", "1"},
		{"first event of a stream is a 503 for load", "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {\"error\":{\"message\":\"overloaded\",\"code\":503}}\n\n", "1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			say := func(c *conn, _ received) { c.say(tt.answer); c.hangUp() }
			full, free := newScript(t, say), newScript(t, saying(answer(200, jsonHeader, reply)))
			alone := begin(t, setup{}, served("full", full)) // row 77
			alone.chat(chatBody).is(t, "chat with a full worker alone", 503, busyBody, "Content-Type: application/json",
				"X-Spillway-Reason: worker-overloaded", "X-Llm-D-Request-Dropped-Reason: rejected-saturated", "Retry-After: "+tt.retryAfter)
			for series, want := range map[string]string{
				`dynamo_tasks_issued_total{endpoint="chat_completions",model="m"}`:   "1",
				`dynamo_tasks_rejected_total{endpoint="chat_completions",model="m"}`: "1",
				`spillway_rejections_total{model="m",reason="worker-overloaded"}`:    "1",
			} {
				if got := alone.metric(series); got != want {
					t.Errorf("%s = %s, want %s", series, got, want)
				}
			}

			f := begin(t, setup{busy: limited(1)}, served("a-full", full), served("b-free", free)) // row 76
			f.inOrder("a-full", "b-free")
			f.pin("a-full", func() string {
				return f.chat(streamBody).header.Get("X-Spillway-Attempts")
			})
			if got := f.states(); !strings.Contains(got, "a-full:busy") {
				t.Errorf("afterwards %s, want a-full marked, which with a threshold is busy", got)
			}
			f.chat(chatBody).is(t, "the next chat", 200, reply, "X-Spillway-Worker: b-free", "X-Spillway-Attempts: ")
		})
	}
}

// limited is a configuration in which a prefill threshold is set.
func limited(tokens uint64) busy.Config {
	cfg := busy.DefaultConfig()
	cfg.ActivePrefillTokensThreshold = &tokens
	return cfg
}

// pin repeats try, with round-robin choosing the worker, until one went to name first and
// then elsewhere, as the number of attempts tells.
func (f *front) pin(name string, try func() string) {
	f.t.Helper()
	for range 2 {
		if try() == "2" {
			return
		}
	}
	f.t.Fatalf("no request was tried on %s first and then elsewhere; states %s", name, f.states())
}

// refusing is an address where nobody listens.
func refusing(t *testing.T) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return "http://" + ln.Addr().String()
}

// TestRetries goes to two workers that fail, or one that fails and one that does not, in turn.
func TestRetries(t *testing.T) {
	ok := saying(answer(200, jsonHeader, reply))
	reset := func(c *conn, _ received) { c.reset() }
	full := saying(answer(429, "", ""))
	for _, tt := range []struct {
		name          string
		first, second func(*conn, received) // nil is a dial error
		limit         int
		status        int
		reason        string
		attempts      string
		states        string
	}{
		{"dial error, other one serves", nil, ok, 1, 200, "", "2", "a:inhibited b:unknown"},
		{"dial error with no retries allowed, other one serves", nil, ok, 0, 200, "", "2", "a:inhibited b:unknown"},
		{"dial error twice, no more", nil, nil, 0, 502, "", "2", "a:inhibited b:inhibited"},
		{"reset, other one serves", reset, ok, 1, 200, "", "2", "a:inhibited b:unknown"},
		{"reset with no retries allowed", reset, ok, 0, 502, "", "", "a:inhibited b:unknown"},
		{"502, other one serves", saying(answer(502, "", "")), ok, 1, 200, "", "2", "a:unknown b:unknown"},
		{"503, other one serves", saying(answer(503, "", "")), ok, 1, 200, "", "2", "a:unknown b:unknown"},
		{"504, other one serves", saying(answer(504, "", "")), ok, 1, 200, "", "2", "a:unknown b:unknown"},
		{"503 as first event, other one serves", streaming("data: {\"error\":{\"code\":503}}\n\n"), ok, 1, 200, "", "2", "a:unknown b:unknown"},
		{"500 is not retried", saying(answer(500, "", "")), ok, 1, 500, "", "", "a:unknown b:unknown"},
		{"500 as first event is not retried", streaming("data: {\"error\":{\"code\":500}}\n\n"), ok, 1, 500, "", "", "a:unknown b:unknown"},
		{"400 is not retried", saying(answer(400, "", "")), ok, 1, 400, "", "", "a:unknown b:unknown"},
		{"400 as first event is not retried", streaming("data: {\"error\":{\"code\":400}}\n\n"), ok, 1, 400, "", "", "a:unknown b:unknown"},
		{"cut body, other one serves", func(c *conn, _ received) { c.say(answer(200, "", reply)[:60]); c.hangUp() }, ok, 1, 200, "", "2", "a:inhibited b:unknown"},
		{"full with no retries allowed", full, ok, 0, 503, "worker-overloaded", "", "a:unknown b:unknown"},
		{"full, other one down", full, nil, 1, 503, "worker-overloaded", "2", "a:unknown b:inhibited"}, // row 78
		{"down, other one full", nil, full, 1, 502, "", "2", "a:inhibited b:unknown"},
		{"stream cut before its first event, other one serves", func(c *conn, _ received) { c.say(streamHead + "5\r\ndata:"); c.reset() }, ok, 1, 200, "", "2", "a:inhibited b:unknown"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			make := func(name string, do func(*conn, received)) (worker.Worker, *script) {
				if do == nil {
					return worker.Worker{Name: name, Endpoint: refusing(t), Models: []string{"m"}}, nil
				}
				s := newScript(t, do)
				return served(name, s), s
			}
			a, _ := make("a", tt.first)
			b, second := make("b", tt.second)
			a.ID, b.ID = 1, 2 // round-robin begins with the lowest
			f := begin(t, setup{proxy: func(c *proxy.Config) { c.MigrationLimit = tt.limit }}, a, b)
			f.inOrder("a", "b")
			g := f.chat(streamBody, "X-Request-Id: mine")
			if g.status != tt.status || g.header.Get("X-Spillway-Reason") != tt.reason || g.header.Get("X-Spillway-Attempts") != tt.attempts {
				t.Errorf("chat = %d %s, reason %q, attempts %q\nwant %d, reason %q, attempts %q", g.status, g.body,
					g.header.Get("X-Spillway-Reason"), g.header.Get("X-Spillway-Attempts"), tt.status, tt.reason, tt.attempts)
			}
			if g.status == 200 && (g.body != reply || g.header.Get("X-Spillway-Worker") != "b") {
				t.Errorf("served %q by %s, want the whole reply of b", g.body, g.header.Get("X-Spillway-Worker"))
			}
			if got := g.header.Get("X-Request-Id"); got != "mine" {
				t.Errorf("the client's request ID came back as %q", got)
			}
			if second != nil && tt.attempts == "2" {
				if got := second.seen()[0].header.Get("X-Request-Id"); got != "mine-r1" {
					t.Errorf("the second worker got request ID %q, want mine-r1", got)
				}
			}
			if got := f.states(); got != tt.states {
				t.Errorf("afterwards %s, want %s", got, tt.states)
			}
			if got := f.metric(`dynamo_tasks_issued_total{endpoint="chat_completions",model="m"}`); got != "1" {
				t.Errorf("issued: %s, want 1 however many attempts there were", got)
			}
		})
	}
}

// TestPinnedIsNotRetried checks that a pin is kept even if the worker fails.
func TestPinnedIsNotRetried(t *testing.T) {
	down := worker.Worker{ID: 5, Name: "down", Endpoint: refusing(t), Models: []string{"m"}}
	ok := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{}, down, served("ok", ok))
	f.chat(chatBody, "X-Dynamo-Worker-Instance-Id: 5").is(t, "pinned to a worker that is down", 502, badGateway, "X-Spillway-Attempts: ")
	f.chat(chatBody, "X-Worker-Instance-Id: down").is(t, "again", 503,
		flat(503, "service_unavailable", "Service temporarily unavailable: No workers available for model m"), "X-Spillway-Reason: no-healthy-workers", "Retry-After: 5")
	f.chat(chatBody, "X-Worker-Instance-Id: ok").is(t, "pinned to the other", 200, reply)
}

// TestLargeUnary checks that an answer beyond what is held back arrives whole, and that one
// which breaks then does not look whole.
func TestLargeUnary(t *testing.T) {
	big := strings.Repeat("0123456789abcdef", 3<<20/16)
	for _, framing := range []string{"length", "chunks"} {
		whole, torn := answer(200, jsonHeader, big), answer(200, jsonHeader, big)[:2<<20]
		if framing == "chunks" {
			head := "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
			whole, torn = head+chunk(big)+chunk(""), (head + chunk(big))[:2<<20]
		}
		s := newScript(t, func(c *conn, r received) {
			if strings.Contains(r.body, "torn") {
				c.say(torn)
				c.hangUp()
				return
			}
			c.say(whole)
		})
		f := begin(t, setup{}, served("w", s))
		f.chat(chatBody).is(t, "3 MiB by "+framing, 200, big)
		g := f.chat(`{"messages":[{"content":"torn"}]}`)
		if g.status != 200 || g.err == nil || len(g.body) >= len(big) || !strings.HasPrefix(big, g.body) {
			t.Errorf("by %s, torn after 2 MiB = %d, %d bytes, %v; want 200 and an error before the end", framing, g.status, len(g.body), g.err)
		}
		if got := f.states(); got != "w:inhibited" {
			t.Errorf("by %s, after a torn answer: %s, want w:inhibited", framing, got)
		}
	}
}

// TestReuse checks that connections to a worker are used again, also after errors that it
// answered with.
func TestReuse(t *testing.T) {
	n := 0
	s := newScript(t, func(c *conn, _ received) {
		n++
		switch n % 3 {
		case 0:
			c.say(answer(429, "", "busy"))
		case 1:
			c.say(streamHead + chunk(hello+done+": more\n\n") + chunk(""))
		default:
			c.say(answer(500, "", strings.Repeat("x", 1000)))
		}
	})
	f := begin(t, setup{}, served("w", s))
	for range 9 {
		f.chat(streamBody)
	}
	if accepted, _ := s.connections(); accepted != 1 || len(s.seen()) != 9 {
		t.Errorf("9 requests took %d connections, and %d came; want 1 and 9", accepted, len(s.seen()))
	}
}

// TestHeadersToWorker checks the whole head of a forwarded request.
func TestHeadersToWorker(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	many := served("many", s, "many")
	many.DPStart, many.DPSize = 4, 2
	keyed := served("keyed", s, "keyed")
	keyed.APIKey, keyed.Endpoint = "secret", s.url()+"/base"
	f := begin(t, setup{}, served("w", s), many, keyed)
	post := func(model, rank string) received {
		t.Helper()
		f.send("POST", "/v1/completions?x=1", `{"model":"`+model+`","prompt":"Hi"}`, "Authorization: Bearer mine", "Accept-Encoding: gzip",
			"X-Mine: a, b", "x-data-parallel-rank: "+rank, "X-Tenant-Id: t", "Te: trailers", "X-Forwarded-For: 10.0.0.1", "Traceparent: 00-1-2-01",
			"Connection: X-Hop", "X-Hop: 1", "User-Agent: test", "X-Request-Id: id").is(t, model, 200, reply)
		seen := s.seen()
		return seen[len(seen)-1]
	}
	want := http.Header{
		"Accept-Encoding": {"identity"}, "Authorization": {"Bearer mine"}, "Content-Length": {"27"}, "Content-Type": {"application/json"},
		"Traceparent": {"00-1-2-01"}, "User-Agent": {"test"}, "X-Forwarded-For": {"10.0.0.1, 127.0.0.1"},
		"X-Forwarded-Host": {f.addr}, "X-Forwarded-Proto": {"http"}, "X-Mine": {"a, b"}, "X-Request-Id": {"id"},
	}
	r := post("m", "0")
	if got := fmt.Sprint(r.header); got != fmt.Sprint(want) || "http://"+r.host != s.url() || r.path != "/v1/completions" {
		t.Errorf("the worker got %s %s %s\nwant %s", r.host, r.path, got, fmt.Sprint(want))
	}
	if r := post("keyed", ""); r.header.Get("Authorization") != "Bearer secret" || r.path != "/base/v1/completions" {
		t.Errorf("a worker with a key got %s with %q, want its own key and path", r.path, r.header.Get("Authorization"))
	}
	if r := post("many", "5"); r.header.Get("X-Data-Parallel-Rank") != "5" {
		t.Errorf("a worker with ranks got rank %q, want the pinned 5", r.header.Get("X-Data-Parallel-Rank"))
	}
	g := f.send("POST", "/v1/completions", `{"model":"many","prompt":"Hi"}`)
	if dp := g.header.Get("X-Spillway-Dp-Rank"); dp != "4" && dp != "5" {
		t.Errorf("X-Spillway-Dp-Rank = %q, want 4 or 5", dp)
	}
}

// TestUnaryPrefill checks when the prompt of a request that shows nothing until its end stops
// counting: by an estimate, or only at its end.
func TestUnaryPrefill(t *testing.T) {
	held := make(chan struct{})
	asked := make(chan got, 2)
	begun := func(mode string) *front {
		s := newScript(t, func(c *conn, _ received) { <-held; c.say(answer(200, jsonHeader, reply)) })
		f := begin(t, setup{proxy: func(c *proxy.Config) { c.UnaryPrefill = mode }}, served("w", s))
		go func() { asked <- f.chat(chatBody) }()
		eventually(t, "the worker has the request", func() bool { return len(s.seen()) == 1 })
		return f
	}
	prefill := func(f *front) float64 { return f.list().Workers(time.Now())[0].Ranks[0].Report.PrefillTokens }
	hold, estimate := begun("hold"), begun("estimate") // the one that waits longer begins first
	eventually(t, "the prompt is taken to be computed", func() bool { return prefill(estimate) == 0 })
	if got := prefill(hold); got != 9 {
		t.Errorf("with hold, %v tokens are in prefill before the answer, want all 9", got)
	}
	if got := hold.metric(`dynamo_queued_requests{model="m"}`); got != "1" {
		t.Errorf("dynamo_queued_requests = %s before the head, want 1", got)
	}
	close(held)
	for range 2 {
		(<-asked).is(t, "chat", 200, reply)
	}
}
