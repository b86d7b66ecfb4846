package proxy_test

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"spillway/proxy"
)

// broken is what a client in the middle of a stream sees of a worker that fails.
const broken = `data: {"error":{"message":"The worker broke off the stream","type":"internal_server_error","code":500}}` + "\n\n" + done

// crlf writes events with other line ends.
func crlf(s string) string { return strings.ReplaceAll(s, "\n", "\r\n") }

// TestStreams has everything that a worker can do to a stream, and what the client gets.
func TestStreams(t *testing.T) {
	const failedEvent = `data: {"error":{"message":"oops","type":"x","code":503}}` + "\n\n"
	both := `data: {"choices":[{"index":0,"delta":{"content":"."},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}` + "\n\n"
	second := strings.ReplaceAll(hello, `"index":0`, `"index":1`)
	secondEnded := strings.ReplaceAll(ended, `"index":0`, `"index":1`)
	long := `data: {"choices":[{"index":0,"delta":{"content":"` + strings.Repeat("x", 1<<20) + `"}}]}` + "\n\n"
	long16 := `data: {"choices":[{"index":0,"delta":{"content":"` + strings.Repeat("x", 16<<20) + `"}}]}` + "\n\n"
	cut := func(parts ...string) func(*conn, received) { // reset after the parts
		return func(c *conn, _ received) {
			c.say(streamHead + chunk(strings.Join(parts, "")))
			c.hangUp()
		}
	}
	for _, tt := range []struct {
		name   string
		worker func(*conn, received)
		want   string
		state  string
	}{
		{"plain", streaming(role, hello, ended, done), role + hello + ended + done, "unknown"},
		{"in one read", streaming(role + hello + ended + done), role + hello + ended + done, "unknown"},
		{"usage that the client asked for itself", streaming(hello, ended, counted, done), hello + ended + counted + done, "unknown"},
		{"comments and other fields", streaming(": ping\n\n", "event: x\nid: 7\nretry: 10\n"+hello, ended, done), ": ping\n\nevent: x\nid: 7\nretry: 10\n" + hello + ended + done, "unknown"},
		{"CRLF", streaming(crlf(role), crlf(hello+ended), crlf(done)), crlf(role + hello + ended + done), "unknown"},
		{"CR", streaming(strings.ReplaceAll(hello+ended+done, "\n", "\r")), strings.ReplaceAll(hello+ended+done, "\n", "\r"), "unknown"},
		{"a byte at a time", streaming(strings.Split(role+hello+ended+done, "")...), role + hello + ended + done, "unknown"},
		{"a CRLF byte at a time", streaming(strings.Split(crlf(role+hello+ended+done), "")...), crlf(role + hello + ended + done), "unknown"},
		{"until close", func(c *conn, _ received) {
			c.say("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n\r\n" + hello + ended + done)
			c.hangUp()
		}, hello + ended + done, "unknown"},
		{"1 MiB in an event", streaming(long, ended, done), long + ended + done, "unknown"},
		{"16 MiB in an event are too much", streaming(hello, long16, ended, done), hello + broken, "inhibited"},
		{"[DONE] missing, but all choices ended", streaming(role, hello, ended), role + hello + ended + done, "unknown"},
		{"the same with CRLF", streaming(crlf(hello), crlf(ended)), crlf(hello+ended) + done, "unknown"},
		{"the same with CRLF, torn at the last byte", streaming(crlf(hello), strings.TrimSuffix(crlf(ended), "\n"), "\n"), crlf(hello+ended) + done, "unknown"},
		{"the same with usage last", streaming(hello, ended, counted), hello + ended + counted + done, "unknown"},
		{"[DONE] missing, and a choice goes on", streaming(role, hello), role + hello + broken, "inhibited"},
		{"[DONE] missing, and one of two goes on", streaming(hello, second, ended), hello + second + ended + broken, "inhibited"},
		{"[DONE] missing, and both ended", streaming(hello, second, ended, secondEnded), hello + second + ended + secondEnded + done, "unknown"},
		{"the last event is cut", streaming(hello, ended[:40]), hello + broken, "inhibited"},
		{"[DONE] without its blank line", streaming(hello, "data: [DONE]\n"), hello + broken, "inhibited"},
		{"no chunk to end it, but all ended", cut(hello, ended), hello + ended + broken, "inhibited"},
		{"no chunk to end it after [DONE]", cut(hello, ended, done), hello + ended + done, "unknown"},
		{"broken off", cut(role, hello), role + hello + broken, "inhibited"},
		{"broken off in an event", cut(role, hello[:30]), role + broken, "inhibited"},
		{"bad chunk", func(c *conn, _ received) { c.say(streamHead + chunk(hello) + "zz\r\n"); c.gone() }, hello + broken, "inhibited"},
		{"bytes after [DONE]", streaming(hello, ended, done+hello, hello), hello + ended + done, "unknown"},
		{"an error event", streaming(hello, failedEvent, done), hello + failedEvent + done, "unknown"},
		{"an error event and the end", streaming(hello, failedEvent), hello + failedEvent, "unknown"},
		{"an error event and a reset", cut(hello, failedEvent), hello + failedEvent, "inhibited"},
		{"choices and usage in one", streaming(hello, both, done), hello + both + done, "unknown"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScript(t, tt.worker)
			f := begin(t, setup{}, served("w", s))
			g := f.chat(streamBody)
			if len(g.body) > 2<<20 {
				t.Fatalf("%d bytes came, want %d", len(g.body), len(tt.want))
			}
			if g.body != tt.want && len(tt.want) > 1<<20 {
				t.Fatalf("%d bytes came that are not the %d that were sent", len(g.body), len(tt.want))
			}
			g.is(t, "stream", 200, tt.want, "Content-Type: text/event-stream; charset=utf-8",
				"Cache-Control: no-cache", "X-Accel-Buffering: no", "Content-Length: ", "X-Spillway-Worker: w")
			if got := f.states(); got != "w:"+tt.state {
				t.Errorf("afterwards %s, want %s", got, tt.state)
			}
		})
	}
}

// TestFlush checks that each arrival is one write, which comes at once, and that events which
// are not complete wait.
func TestFlush(t *testing.T) {
	next := make(chan struct{})
	s := newScript(t, func(c *conn, _ received) {
		c.say(streamHead + chunk(role+hello+hello)) // three in one read
		<-next
		c.say(chunk(hello + ended[:20]))
		<-next
		c.say(chunk(ended[20:] + done[:5]))
		<-next
		c.say(chunk(done[5:]) + chunk(""))
	})
	f := begin(t, setup{}, served("w", s))
	c := f.dial()
	c.post(streamBody)
	if status, header := c.head(); status != "HTTP/1.1 200 OK" || !strings.Contains(header, "Transfer-Encoding: chunked") {
		t.Fatalf("head %q %q", status, header)
	}
	for i, want := range []string{role + hello + hello, hello, ended, done, ""} {
		if got, err := c.chunk(); got != want || err != nil { // the worker says no more before this has come
			t.Errorf("flush %d = %q, %v, want %q", i, got, err, want)
		}
		if i < 3 {
			next <- struct{}{}
		}
	}
}

// TestTornLineEnd has the last LF of a stream that lacks its [DONE] come on its own.
func TestTornLineEnd(t *testing.T) {
	next := make(chan struct{})
	torn := strings.TrimSuffix(crlf(ended), "\n")
	s := newScript(t, func(c *conn, _ received) {
		c.say(streamHead + chunk(torn))
		<-next
		c.say(chunk("\n") + chunk(""))
	})
	f := begin(t, setup{}, served("w", s))
	c := f.dial()
	c.post(streamBody)
	c.head()
	if got, err := c.chunk(); got != torn || err != nil { // a CR ends a line too
		t.Errorf("first %q, %v, want %q", got, err, torn)
	}
	next <- struct{}{}
	if got, err := c.chunk(); got != "\n"+done || err != nil {
		t.Errorf("then %q, %v, want the LF and [DONE]", got, err)
	}
}

// TestCommit checks when the client gets its head: with the first event, or with the worker's.
func TestCommit(t *testing.T) {
	next := make(chan struct{})
	s := newScript(t, func(c *conn, _ received) {
		c.say(streamHead)
		<-next
		c.say(chunk(`data: {"error":{"message":"no","code":400}}`+"\n\n") + chunk(""))
	})
	early := begin(t, setup{proxy: func(c *proxy.Config) { c.CommitOn = "head" }}, served("w", s))
	c := early.dial()
	c.post(streamBody)
	if status, _ := c.head(); status != "HTTP/1.1 200 OK" { // nothing else has come from the worker
		t.Errorf("committed on the head: %q, want 200", status)
	}
	next <- struct{}{}
	if got, _ := c.chunk(); !strings.HasPrefix(got, `data: {"error"`) {
		t.Errorf("the error event came as %q, want it unchanged", got)
	}
	late := begin(t, setup{}, served("w", s))
	go func() { next <- struct{}{} }()
	late.chat(streamBody).is(t, "committed on the first event", 400, flat(400, "bad_request", "The worker refused the request"))
}

// TestNotAStream checks that the answer decides what is streamed, not the question.
func TestNotAStream(t *testing.T) {
	const refusal = `{"error":{"message":"no streams here"}}`
	s := newScript(t, func(c *conn, r received) {
		if strings.Contains(r.body, `"stream":true`) {
			c.say(answer(400, jsonHeader, refusal))
			return
		}
		streaming(hello, done)(c, r)
	})
	f := begin(t, setup{}, served("w", s))
	f.chat(streamBody).is(t, "JSON for a stream", 400, refusal, "Content-Type: application/json", "Cache-Control: ")
	f.chat(chatBody).is(t, "a stream unasked", 200, hello+done, "Cache-Control: no-cache")
}

// TestErrorFirst checks what a stream becomes whose first event is an error.
func TestErrorFirst(t *testing.T) {
	for _, tt := range []struct {
		event  string
		status int
		want   string
	}{
		{`{"error":{"message":"too long","code":400}}`, 400, flat(400, "bad_request", "The worker refused the request")},
		{`{"error":{"message":"oops","code":500}}`, 500, failed500},
		{`{"error":{"message":"oops"}}`, 500, failed500},
		{`{"error":{"message":"oops","code":"x"}}`, 500, failed500},
		{`{"error":{"message":"oops","code":200}}`, 500, failed500},
		{`{"error":{"message":"loading","code":503}}`, 503, flat(503, "service_unavailable", "Service temporarily unavailable: the worker is not available")},
		{`{"error":{"message":"queue full","code":503}}`, 503, busyBody},
		{`{"error":{"message":"x","code":529}}`, 503, busyBody},
	} {
		s := newScript(t, streaming(": ping\n\ndata: "+tt.event+"\n\n", done))
		// A comment counts as an event, and commits; without it nothing has been sent.
		f := begin(t, setup{}, served("w", newScript(t, streaming("data: "+tt.event+"\n\n", done))), served("v", s, "other"))
		f.chat(streamBody).is(t, tt.event, tt.status, tt.want, "Content-Type: application/json", "X-Accel-Buffering: ")
		f.chat(strings.Replace(streamBody, `"m"`, `"other"`, 1)).is(t, "after a comment", 200, ": ping\n\ndata: "+tt.event+"\n\n"+done)
	}
}

// TestForcedUsage checks that usage is asked for on the client's behalf and kept from it.
func TestForcedUsage(t *testing.T) {
	both := strings.Replace(ended, `]}`, `],"usage":{"prompt_tokens":1,"completion_tokens":1}}`, 1)
	s := newScript(t, streaming(hello+ended+both+counted+done))
	f := begin(t, setup{proxy: func(c *proxy.Config) { c.ForceIncludeUsage = true }}, served("w", s))
	for _, tt := range []struct{ body, forwarded, want string }{
		{streamBody, streamBody[:len(streamBody)-1] + `,"stream_options":{"include_usage":true}}`, hello + ended + both + done},
		{`{"stream_options":{"include_usage":false,"x":1},"stream":true,"messages":[{}]}`,
			`{"stream_options":{"include_usage":true,"x":1},"stream":true,"messages":[{}]}`, hello + ended + both + done},
		{`{"stream_options":{"include_usage":true},"stream":true,"messages":[{}]}`,
			`{"stream_options":{"include_usage":true},"stream":true,"messages":[{}]}`, hello + ended + both + counted + done},
	} {
		f.chat(tt.body).is(t, tt.body, 200, tt.want)
		seen := s.seen()
		if got := seen[len(seen)-1].body; got != tt.forwarded {
			t.Errorf("forwarded %s\nwant %s", got, tt.forwarded)
		}
	}
	torn := newScript(t, streaming(append(append([]string{hello}, strings.Split(counted, "")...), ended+done)...))
	g := begin(t, setup{proxy: func(c *proxy.Config) { c.ForceIncludeUsage = true }}, served("w", torn))
	g.chat(streamBody).is(t, "a usage event torn into bytes", 200, hello+ended+done)
}

// TestAliases checks that a worker is asked for the name that it knows.
func TestAliases(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{aliases: map[string]string{"short": "m"}}, served("w", s, "m", "adapter"))
	for _, tt := range []struct{ body, forwarded string }{
		{`{"model" : "short" ,"messages":[{}],"model2":"short"}`, `{"model" : "m" ,"messages":[{}],"model2":"short"}`},
		{`{"model":"adapter","messages":[{}]}`, `{"model":"adapter","messages":[{}]}`},
		{`{"model":"m","messages":[{}]}`, `{"model":"m","messages":[{}]}`},
	} {
		f.chat(tt.body).is(t, tt.body, 200, reply)
		seen := s.seen()
		if r := seen[len(seen)-1]; r.body != tt.forwarded || r.header.Get("Content-Length") != fmt.Sprint(len(tt.forwarded)) {
			t.Errorf("forwarded %s with length %s\nwant %s", r.body, r.header.Get("Content-Length"), tt.forwarded)
		}
	}
	if got := f.metric(`dynamo_tasks_issued_total{endpoint="chat_completions",model="m"}`); got != "3" {
		t.Errorf("issued for m: %s, want 3 with alias and adapter", got)
	}
}

// TestBackpressure checks that a client which does not read stops the worker's connection, and
// does not fill memory.
func TestBackpressure(t *testing.T) {
	sent := make(chan int, 1)
	s := newScript(t, func(c *conn, _ received) {
		event, n := strings.Repeat("x", 1<<16), 0
		c.say(streamHead)
		for ; n < 1000; n++ {
			if _, err := io.WriteString(c, chunk("data: "+event+"\n\n")); err != nil {
				break
			}
		}
		sent <- n
		c.end = true
	})
	f := begin(t, setup{proxy: func(c *proxy.Config) { c.ClientWriteTimeout = 200e6 }}, served("w", s))
	c := f.dial()
	c.post(streamBody)
	if n := <-sent; n >= 1000 { // ended by the write limit, after what sockets hold
		t.Errorf("the worker could send all %d events of 64 kB to a client that does not read", n)
	}
	eventually(t, "the load is freed", func() bool { return f.list().Workers(now())[0].Ranks[0].Report.PrefillTokens == 0 })
	if _, err := io.Copy(io.Discard, c); err == nil || errors.Is(err, io.EOF) {
		t.Log("the connection was closed in good order") // the kernel's choice
	}
	if got := f.states(); got != "w:unknown" {
		t.Errorf("afterwards %s: a slow client is not a worker's failure", got)
	}
}

// request is a chat request as a client sends it, with further header lines.
func request(version, header, body string) string {
	return fmt.Sprintf("POST /v1/chat/completions HTTP/%s\r\nHost: x\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n%s", version, header, len(body), body)
}

// asking is a connection to f on which text has been sent.
func asking(t *testing.T, f *front, text string) net.Conn {
	t.Helper()
	nc, err := net.Dial("tcp", f.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nc.Close() })
	_ = nc.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(nc, text); err != nil {
		t.Fatal(err)
	}
	return nc
}

// TestStreamFraming: events come in chunks where the protocol has them, and in the plain where it has
// not; the answers to requests that came together are kept apart, and the connection ends when it should.
func TestStreamFraming(t *testing.T) {
	long := `data: {"choices":[{"index":0,"delta":{"content":"` + strings.Repeat("x", 100<<10) + `"}}]}` + "\n\n"
	want := role + hello + long + ended + done
	s := newScript(t, streaming(role, hello, long, ended, done))
	f := begin(t, setup{}, served("w", s))
	again := request("1.1", "", streamBody)
	for name, text := range map[string]string{
		"1.0":   again + again + request("1.0", "", streamBody),
		"close": again + request("1.1", "Expect: 100-continue\r\n", streamBody) + request("1.1", "Connection: close\r\n", streamBody),
	} {
		br := bufio.NewReader(asking(t, f, text))
		for i := range 3 {
			resp, err := http.ReadResponse(br, nil)
			for err == nil && resp.StatusCode == http.StatusContinue {
				resp, err = http.ReadResponse(br, nil)
			}
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp.Body)
			if string(body) != want || err != nil {
				t.Errorf("%s, request %d: %d bytes, %v, want %d", name, i, len(body), err, len(want))
			}
			if chunked := len(resp.TransferEncoding) > 0; chunked != (name != "1.0" || i < 2) {
				t.Errorf("%s, request %d: transfer coding %v", name, i, resp.TransferEncoding)
			}
		}
		if b, err := br.ReadByte(); err != io.EOF {
			t.Errorf("%s: %q, %v after the last answer, want the end", name, b, err)
		}
	}
}
