package proxy_test

import (
	"bufio"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"spillway/proxy"
)

var (
	lateWorker  = flat(504, "gateway_timeout", "The worker did not answer in time")
	lateRequest = flat(504, "gateway_timeout", "The request took longer than its limit")
)

const (
	lateWorkerEvent  = `data: {"error":{"message":"The worker did not answer in time","type":"gateway_timeout","code":504}}` + "\n\n"
	lateRequestEvent = `data: {"error":{"message":"The request took longer than its limit","type":"gateway_timeout","code":504}}` + "\n\n"
)

// short passes in a moment, in which a worker on a busy machine can still begin to answer; long is longer than any test, but not for ever.
const (
	short = 200 * time.Millisecond
	long  = time.Hour
)

// saysThen sends the parts and then nothing until the front end gives up.
func saysThen(parts ...string) func(*conn, received) {
	return func(c *conn, _ received) {
		for _, p := range parts {
			c.say(p)
		}
		c.gone()
	}
}

// TestLimits has a worker that falls silent at each stage, and each limit that ends the wait.
func TestLimits(t *testing.T) {
	header := func(c *proxy.Config) { c.ResponseHeaderTimeout = short }
	silence := func(c *proxy.Config) { c.StreamInactivityTimeout = short }
	request := func(c *proxy.Config) { c.RequestTimeout = short }
	for _, tt := range []struct {
		name    string
		body    string
		header  string // of the request
		worker  func(*conn, received)
		proxy   func(*proxy.Config)
		status  int
		want    string
		state   string
		workers int // that were asked, of two
	}{
		{"no head, unary, response-header-timeout", chatBody, "", saysThen(), header, 504, lateWorker, "inhibited", 1},
		{"no head, stream, response-header-timeout", streamBody, "", saysThen(), header, 504, lateWorker, "inhibited", 2},
		{"no head, stream, stream-inactivity-timeout", streamBody, "", saysThen(), silence, 504, lateWorker, "inhibited", 2},
		{"no head, unary, request-timeout", chatBody, "", saysThen(), request, 504, lateRequest, "unknown", 1},
		{"no head, stream, request-timeout", streamBody, "", saysThen(), request, 504, lateRequest, "unknown", 1},
		{"no head, unary, x-request-timeout-ms", chatBody, "200", saysThen(), nil, 504, lateRequest, "unknown", 1},
		{"the client's limit is the smaller one", chatBody, " 200 ", saysThen(), func(c *proxy.Config) { c.RequestTimeout = long }, 504, lateRequest, "unknown", 1},
		{"the client's limit is the larger one", chatBody, "18446744073709551616", saysThen(), request, 504, lateRequest, "unknown", 1},
		{"the client asks for nothing sensible", chatBody, "-1", saysThen(), request, 504, lateRequest, "unknown", 1},
		{"half a head", chatBody, "", saysThen("HTTP/1.1 200 OK\r\nConte"), header, 504, lateWorker, "inhibited", 1},
		{"half a body", chatBody, "", saysThen(answer(200, jsonHeader, reply)[:150]), silence, 504, lateWorker, "inhibited", 2},
		{"half a body, request-timeout", chatBody, "", saysThen(answer(200, jsonHeader, reply)[:150]), request, 504, lateRequest, "unknown", 1},
		{"no event", streamBody, "", saysThen(streamHead), silence, 504, lateWorker, "inhibited", 2},
		{"half an event", streamBody, "", saysThen(streamHead + chunk(hello[:9])), silence, 504, lateWorker, "inhibited", 2},
		{"no event, request-timeout", streamBody, "", saysThen(streamHead), request, 504, lateRequest, "unknown", 1},
		{"no event, committed at the head", streamBody, "", saysThen(streamHead),
			func(c *proxy.Config) { silence(c); c.CommitOn = "head" }, 200, lateWorkerEvent + done, "inhibited", 1},
		{"in a stream", streamBody, "", saysThen(streamHead + chunk(hello)), silence, 200, hello + lateWorkerEvent + done, "inhibited", 1},
		{"in a stream, in an event", streamBody, "", saysThen(streamHead + chunk(hello+hello[:9])), silence, 200, hello + lateWorkerEvent + done, "inhibited", 1},
		{"in a stream, request-timeout", streamBody, "", saysThen(streamHead + chunk(hello)), request, 200, hello + lateRequestEvent + done, "unknown", 1},
		{"after an error of the worker", streamBody, "", saysThen(streamHead + chunk(hello+`data: {"error":{"code":500}}`+"\n\n")), silence, 200, hello + `data: {"error":{"code":500}}` + "\n\n", "inhibited", 1},
		{"a 500 that never ends", chatBody, "", saysThen(answer(500, "", "secret")[:40]), silence, 500, failed500, "unknown", 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, b := newScript(t, tt.worker), newScript(t, tt.worker)
			f := begin(t, setup{proxy: tt.proxy}, served("a", a), served("b", b))
			f.chat(tt.body, "X-Request-Timeout-Ms: "+tt.header).is(t, "chat", tt.status, tt.want)
			asked := 0
			for name, s := range map[string]*script{"a": a, "b": b} {
				state := "unknown"
				if len(s.seen()) > 0 {
					asked++
					state = tt.state
				}
				if got := f.states(); !slices.Contains(strings.Fields(got), name+":"+state) {
					t.Errorf("afterwards %s, want %s:%s", got, name, state)
				}
			}
			if asked != tt.workers {
				t.Errorf("%d workers were asked, want %d", asked, tt.workers)
			}
		})
	}
}

// TestSlowIsNotSilent checks that any byte counts against silence, be it of a head's chunk or an event's.
func TestSlowIsNotSilent(t *testing.T) {
	const limit = 2 * time.Second // and the worker pauses for less than a tenth of it
	s := newScript(t, func(c *conn, _ received) {
		c.say(streamHead)
		text := chunk(hello + ended + done)
		for from := 0; from < len(text); from += 16 {
			time.Sleep(limit / 12)
			c.say(text[from:min(from+16, len(text))])
		}
		c.say(chunk(""))
	})
	f := begin(t, setup{proxy: func(c *proxy.Config) { c.StreamInactivityTimeout = limit }}, served("w", s))
	f.chat(streamBody).is(t, "chat", 200, hello+ended+done)
}

// TestSlowClientIsNotASilentWorker: while a client does not read, nobody listens to the worker, who
// has sent more than sockets hold.
func TestSlowClientIsNotASilentWorker(t *testing.T) {
	const limit = 2 * time.Second
	event := "data: " + strings.Repeat("x", 64<<10) + "\n\n"
	events := strings.Repeat(event, 512)
	for _, tt := range []struct {
		name, body string
		worker     func(*conn, received)
		want       int // bytes of the answer
	}{
		{"stream", streamBody, streaming(events, ended+done), len(events + ended + done)},
		{"unary", chatBody, saying(answer(200, jsonHeader, events)), len(events)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScript(t, tt.worker)
			f := begin(t, setup{proxy: func(c *proxy.Config) { c.StreamInactivityTimeout = limit }}, served("w", s))
			nc := asking(t, f, request("1.1", "", tt.body))
			resp, err := http.ReadResponse(bufio.NewReader(nc), nil)
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * limit)
			if body, err := io.ReadAll(resp.Body); len(body) != tt.want || err != nil {
				t.Errorf("%d bytes, %v, want %d; the last are %q", len(body), err, tt.want, body[max(0, len(body)-200):])
			}
			if got := f.states(); got != "w:unknown" {
				t.Errorf("afterwards %s: a slow client is not a worker's failure", got)
			}
		})
	}
}

// TestKeepAlive checks that a client of a silent worker gets comments, between events only, and
// that they commit the stream.
func TestKeepAlive(t *testing.T) {
	proceed := make(chan string)
	s := newScript(t, func(c *conn, _ received) {
		c.say(streamHead)
		for text := range proceed {
			c.say(chunk(text))
			if text == "" {
				return
			}
		}
		c.reset()
	})
	f := begin(t, setup{proxy: func(c *proxy.Config) { c.SSEKeepAliveInterval = short }}, served("w", s))
	c := f.dial()
	c.post(streamBody)
	if status, header := c.head(); status != "HTTP/1.1 200 OK" || !strings.Contains(header, "X-Accel-Buffering: no\r\n") {
		t.Fatalf("head %s %s", status, header)
	}
	// expect reads one comment at least and then text.
	expect := func(text string) {
		t.Helper()
		for {
			got, err := c.chunk()
			if err != nil || got == text {
				if err != nil {
					t.Fatalf("while waiting for %q: %v", text, err)
				}
				return
			}
			if got != ":\n\n" {
				t.Fatalf("chunk %q, want a comment or %q", got, text)
			}
		}
	}
	comment := func() {
		t.Helper()
		if got, err := c.chunk(); got != ":\n\n" || err != nil {
			t.Fatalf("chunk %q, %v, want a comment", got, err)
		}
	}
	comment()
	comment()
	proceed <- hello[:20]
	comment()
	proceed <- hello[20:]
	expect(hello)
	comment()
	proceed <- ended + done
	expect(ended + done)
	proceed <- ""
	for got, err := c.chunk(); got != ""; got, err = c.chunk() { // what came while the worker was drained
		if err != nil || got != ":\n\n" {
			t.Fatalf("chunk %q, %v after the end", got, err)
		}
	}

	c.post(streamBody)
	c.head()
	comment()
	close(proceed) // committed, so nobody else is asked
	expect(`data: {"error":{"message":"The worker broke off the stream","type":"internal_server_error","code":500}}` + "\n\n" + done)
}

// TestKeepAliveIsNotTheWorkers checks that comments do not hide a silent worker.
func TestKeepAliveIsNotTheWorkers(t *testing.T) {
	s := newScript(t, saysThen(streamHead+chunk(hello)))
	f := begin(t, setup{proxy: func(c *proxy.Config) {
		c.SSEKeepAliveInterval, c.StreamInactivityTimeout = time.Millisecond, short
	}}, served("w", s))
	g := f.chat(streamBody)
	if got := strings.ReplaceAll(g.body, ":\n\n", ""); got != hello+lateWorkerEvent+done || got == g.body {
		t.Errorf("chat = %q, want comments and the error event", g.body)
	}
}

// TestPeek checks that a stream is committed when its first event takes too long, and not before.
func TestPeek(t *testing.T) {
	proceed := make(chan struct{})
	first := newScript(t, func(c *conn, _ received) {
		c.say(streamHead)
		<-proceed
		c.reset()
	})
	f := begin(t, setup{proxy: func(c *proxy.Config) { c.PreCommitPeek = short }}, served("w", first))
	c := f.dial()
	c.post(streamBody)
	if status, _ := c.head(); status != "HTTP/1.1 200 OK" {
		t.Fatalf("head %s, want 200 although nothing has come", status)
	}
	close(proceed)
	const broken = `data: {"error":{"message":"The worker broke off the stream","type":"internal_server_error","code":500}}` + "\n\n" + done
	if got, err := c.chunk(); got != broken || err != nil {
		t.Errorf("chunk %q, %v, want the error event", got, err)
	}

	quick := newScript(t, streaming(`data: {"error":{"message":"no","code":404}}`+"\n\n"))
	g := begin(t, setup{proxy: func(c *proxy.Config) { c.PreCommitPeek = long }}, served("w", quick))
	g.chat(streamBody).is(t, "an error within the time", 404, flat(404, "not_found", "The worker refused the request"))
}

// TestDeadlineOfClients checks that a client which is always in a hurry takes no worker out.
func TestDeadlineOfClients(t *testing.T) {
	s := newScript(t, saysThen())
	f := begin(t, setup{proxy: func(c *proxy.Config) { c.CBFailureThreshold = 2 }}, served("w", s))
	for range 10 {
		f.chat(chatBody, "X-Request-Timeout-Ms: 1").is(t, "chat", 504, lateRequest)
	}
	if got := f.states() + " " + f.circuit("w"); got != "w:unknown 0" {
		t.Errorf("afterwards %s, want w:unknown 0", got)
	}
}

// TestTrickle checks that a client which sends its request byte by byte does not hold it for ever.
func TestTrickle(t *testing.T) {
	f := begin(t, setup{models: []string{"m"}, proxy: func(c *proxy.Config) { c.ClientReadTimeout = short }})
	c := f.dial()
	_, _ = io.WriteString(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n")
	cut := make(chan struct{})
	go func() {
		defer close(cut)
		for _, err := io.WriteString(c, "{"); err == nil; _, err = io.WriteString(c, " ") {
			time.Sleep(short / 50)
		}
	}()
	if status, _ := c.head(); status != "HTTP/1.1 400 Bad Request" {
		t.Errorf("a body that trickles in = %q, want 400", status)
	}
	_ = c.Close()
	<-cut
}
