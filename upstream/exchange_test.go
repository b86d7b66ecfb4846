package upstream_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"spillway/upstream"
)

// prompt is a body that no pair of socket buffers can hold.
var prompt = strings.Repeat("prompt! ", 46<<20/8)

func TestRequestOnTheWire(t *testing.T) {
	got := make(chan string, 1)
	w := newWorker(t, func(p *peer) {
		b := make([]byte, 4096)
		n, _ := p.Read(b)
		got <- string(b[:n])
		p.say(plain)
		p.gone()
	})
	c, err := upstream.New(&url.URL{Scheme: "http", Host: w.Addr().String(), Path: "/engine a/"}, upstream.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	req := post(`{"prompt":"hi"}`)
	req.Path += "?x=%20"
	req.Head = upstream.AppendHeader(req.Head, "Content-Type", "application/json")
	req.Head = upstream.AppendHeader(req.Head, "X-A", "b\r\nHost: c\x00")
	mustExchange(t, c, req)
	want := "POST /engine%20a/v1/completions?x=%20 HTTP/1.1\r\nHost: " + w.Addr().String() +
		"\r\nContent-Length: 15\r\nContent-Type: application/json\r\nX-A: b  Host: c \r\n\r\n{\"prompt\":\"hi\"}"
	if got := <-got; got != want {
		t.Errorf("the worker got %q\nwant %q", got, want)
	}
}

// TestSent: the caller hears when the worker has its request, on a new connection and on a used one,
// with a body that fits into the socket and with one that does not, and before the answer is there.
func TestSent(t *testing.T) {
	for _, size := range []int{10, len(prompt)} {
		answer := make(chan struct{}, 1)
		w := newWorker(t, func(p *peer) {
			for {
				if _, ok := p.request(); !ok {
					return
				}
				<-answer
				p.say(plain)
			}
		})
		c := w.client(t, upstream.Config{})
		for range 2 {
			sent := 0
			req := post(prompt[:size])
			req.Sent = func() { sent++; answer <- struct{}{} }
			mustExchange(t, c, req)
			if sent != 1 {
				t.Errorf("%d bytes: told %d times that it is sent, want once", size, sent)
			}
		}
	}
}

func TestUnsendableRequests(t *testing.T) {
	w := newWorker(t, answering(plain))
	c := w.client(t, upstream.Config{})
	for name, req := range map[string]upstream.Request{
		"no method":       {Path: "/"},
		"method":          {Method: "GET /", Path: "/"},
		"no path":         {Method: "GET"},
		"relative path":   {Method: "GET", Path: "v1"},
		"space in path":   {Method: "GET", Path: "/ HTTP/1.1"},
		"line in path":    {Method: "GET", Path: "/\r\nX:"},
		"half a line":     {Method: "GET", Path: "/", Head: []byte("X: y")},
		"an empty line":   {Method: "GET", Path: "/", Head: []byte("X: y\r\n\r\nZ: z\r\n")},
		"only empty line": {Method: "GET", Path: "/", Head: []byte("\r\n")},
	} {
		if _, err := c.Do(t.Context(), &req); kind(err) != "request" {
			t.Errorf("%s: Do = %v, want ErrRequest", name, err)
		}
	}
	if n := w.connections(); n != 0 {
		t.Errorf("%d connections made, want none", n)
	}
}

func TestBadEndpoints(t *testing.T) {
	for _, raw := range []string{"ftp://w:1", "http:///v1", "http://u:p@w:1", "http://w:1?x=y", "http://w:1#f", "w:1"} {
		u, err := url.Parse(raw)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := upstream.New(u, upstream.Config{}); err == nil {
			t.Errorf("New(%s) = nil error", raw)
		}
	}
}

func TestEarlyAnswerToABigBody(t *testing.T) {
	const answer = "HTTP/1.1 413 Payload Too Large\r\nContent-Length: 5\r\n\r\nlarge"
	for _, closes := range []bool{false, true} {
		t.Run(fmt.Sprintf("closes=%v", closes), func(t *testing.T) {
			done := make(chan struct{})
			defer close(done)
			w := newWorker(t, func(p *peer) {
				p.head()
				p.say(answer)
				if !closes {
					<-done
				}
			})
			c := w.client(t, upstream.Config{})
			status, body, _, err := exchange(t.Context(), c, post(prompt))
			if status != 413 || body != "large" || err != nil {
				t.Errorf("exchange = %d %q, %v, want 413 \"large\"", status, body, err)
			}
			if n := c.Idle(); n != 0 {
				t.Errorf("Idle() = %d, want 0: the request was not sent whole", n)
			}
		})
	}
}

func TestBigBodyAndAnswer(t *testing.T) {
	prompt := prompt[:16<<20] // more than the buffers of two sockets take
	w := newWorker(t, func(p *peer) {
		_ = p.SetDeadline(time.Now().Add(10 * patience)) // a busy machine takes its time to copy it
		for {
			body, ok := p.request()
			if !ok {
				return
			}
			p.say(fmt.Sprintf("HTTP/1.1 200 OK\r\nX-Same: %s\r\nContent-Length: %d\r\n\r\n", map[bool]string{true: "yes", false: "no"}[body == prompt], len(body)))
			p.say(body)
		}
	})
	c := w.client(t, upstream.Config{})
	for i := range 2 {
		resp, err := c.Do(t.Context(), post(prompt))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp)
		if resp.Header("X-Same") != "yes" || string(body) != prompt || err != nil || resp.Reused() != (i > 0) {
			t.Errorf("exchange %d: sent whole: %s, %d bytes back, reused %v, %v", i, resp.Header("X-Same"), len(body), resp.Reused(), err)
		}
		resp.Close()
	}
}

func TestCancel(t *testing.T) {
	const half = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhel"
	for _, tt := range []struct {
		name   string
		body   string
		read   bool // all of the request, before answering
		answer string
		inBody bool // Do succeeds, Next fails
	}{
		{name: "before the head", body: "hi", read: true},
		{name: "inside the head", body: "hi", read: true, answer: "HTTP/1.1 200 OK\r\nContent"},
		{name: "while writing", body: prompt},
		{name: "inside the body", body: "hi", read: true, answer: half, inBody: true},
		{name: "inside a chunk", body: "hi", read: true, answer: "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nhel", inBody: true},
		{name: "inside the body, still writing", body: prompt, answer: half, inBody: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			why := errors.New("client left")
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			gone := make(chan struct{})
			w := newWorker(t, func(p *peer) {
				defer close(gone)
				if tt.read {
					p.request()
				} else {
					p.head()
				}
				p.say(tt.answer)
				if !tt.inBody {
					cancel(why)
				}
				<-ctx.Done()
				p.gone()
			})
			c := w.client(t, upstream.Config{})
			resp, err := c.Do(ctx, post(tt.body))
			if tt.inBody {
				if err != nil {
					t.Fatalf("Do = %v", err)
				}
				defer resp.Close()
				if got, err := resp.Next(); string(got) != "hel" || err != nil {
					t.Errorf("Next = %q, %v", got, err)
				}
				time.AfterFunc(time.Millisecond, func() { cancel(why) })
				_, err = resp.Next()
			}
			if kind(err) != "cancelled" || !errors.Is(err, why) {
				t.Errorf("error = %v, want context.Canceled and the cause", err)
			}
			await(t, gone, "the worker sees the connection closed")
			if n := c.Idle(); n != 0 {
				t.Errorf("Idle() = %d, want 0", n)
			}
		})
	}
}

// TestCancelTellsAStuckWorker: a worker that waits for room to send is told too, even if all that it
// has sent is read afterwards.
func TestCancelTellsAStuckWorker(t *testing.T) {
	told := make(chan struct{})
	var sent atomic.Int64
	w := newWorker(t, func(p *peer) {
		defer close(told)
		_, ok := p.request()
		_, err := io.WriteString(p, "HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
		for part := make([]byte, 64<<10); ok && err == nil; sent.Add(1) {
			_, err = p.Write(part)
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	resp, err := w.client(t, upstream.Config{}).Do(ctx, post(""))
	if err != nil {
		t.Fatal(err)
	}
	for before := int64(-1); sent.Load() != before; time.Sleep(50 * time.Millisecond) {
		before = sent.Load()
	}
	err = resp.Each(func([]byte) bool {
		cancel()
		time.Sleep(time.Millisecond) // so that the connection is shut while there is more to be read
		return true
	})
	if kind(err) != "cancelled" {
		t.Errorf("Each = %v, want context.Canceled", err)
	}
	if err := resp.Close(); err != nil {
		t.Errorf("Close = %v", err)
	}
	await(t, told, "the worker cannot write any more")
}

func TestCancelledBeforehand(t *testing.T) {
	w := newWorker(t, answering(plain))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := w.client(t, upstream.Config{}).Do(ctx, post("")); kind(err) != "cancelled" {
		t.Errorf("Do = %v, want context.Canceled", err)
	}
	if n := w.connections(); n != 0 {
		t.Errorf("%d connections made, want none", n)
	}
}

func TestCancelAfterTheEndDoesNotHurt(t *testing.T) {
	w := newWorker(t, answering(plain))
	c := w.client(t, upstream.Config{})
	ctx, cancel := context.WithCancel(t.Context())
	if _, _, _, err := exchange(ctx, c, post("")); err != nil {
		t.Fatal(err)
	}
	cancel()
	if !mustExchange(t, c, post("")) {
		t.Error("the connection was not reused")
	}
}

func TestDeadlines(t *testing.T) {
	proceed := make(chan struct{})
	w := newWorker(t, func(p *peer) {
		for {
			switch body, ok := p.request(); {
			case !ok:
				return
			case body == "silence":
			case body == "half":
				p.say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no")
				<-proceed
				p.say("k")
			default:
				p.say(plain)
			}
		}
	})
	c := w.client(t, upstream.Config{})
	mustExchange(t, c, post(""))

	silence := post("silence")
	silence.HeadDeadline = time.Now().Add(20 * time.Millisecond)
	if _, err := c.Do(t.Context(), silence); kind(err) != "deadline" {
		t.Errorf("Do with a head deadline = %v, want os.ErrDeadlineExceeded", err)
	}
	if n := w.connections(); n != 1 {
		t.Errorf("%d connections, want 1: a silent worker is not a dead connection", n)
	}

	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := c.Do(ctx, post("silence")); kind(err) != "context deadline" {
		t.Errorf("Do with a context deadline = %v, want context.DeadlineExceeded", err)
	}

	half := post("half")
	half.HeadDeadline = time.Now().Add(patience)
	resp, err := c.Do(t.Context(), half)
	if err != nil {
		t.Fatal(err)
	}
	if err := resp.SetReadDeadline(time.Now().Add(20 * time.Millisecond)); err != nil {
		t.Error(err)
	}
	if body, err := io.ReadAll(resp); string(body) != "o" || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("ReadAll = %q, %v, want os.ErrDeadlineExceeded", body, err)
	}
	if _, err := resp.Next(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Next after a deadline = %v, want os.ErrDeadlineExceeded again", err)
	}
	if err := resp.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Error(err)
	}
	proceed <- struct{}{}
	if body, err := io.ReadAll(resp); string(body) != "k" || err != nil {
		t.Errorf("ReadAll with a new deadline = %q, %v, want the rest", body, err)
	}
	resp.Close()

	if resp, err = c.Do(t.Context(), post("")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(resp); err != nil {
		t.Fatal(err)
	}
	if err := resp.SetReadDeadline(time.Unix(1, 0)); err != nil {
		t.Error(err)
	}
	resp.Close()
	if !mustExchange(t, c, post("")) {
		t.Error("a deadline outlived its exchange")
	}
}

func TestDialFails(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	c, err := upstream.New(&url.URL{Scheme: "http", Host: ln.Addr().String()}, upstream.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Do(t.Context(), post("")); kind(err) != "dial" {
		t.Errorf("Do = %v, want ErrDial", err)
	}
}

func TestClosedResponse(t *testing.T) {
	w := newWorker(t, answering(plain))
	c := w.client(t, upstream.Config{})
	resp, err := c.Do(t.Context(), post(""))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := resp.Read(make([]byte, 1)); err != nil {
		t.Errorf("Read = %v", err)
	}
	for range 3 {
		if err := resp.Close(); err != nil {
			t.Errorf("Close = %v", err)
		}
	}
	if _, err := resp.Read(make([]byte, 1)); kind(err) != "closed" {
		t.Errorf("Read = %v, want ErrClosed", err)
	}
	if _, err := resp.Next(); kind(err) != "closed" {
		t.Errorf("Next = %v, want ErrClosed", err)
	}
	if err := resp.SetReadDeadline(time.Time{}); kind(err) != "closed" {
		t.Errorf("SetReadDeadline = %v, want ErrClosed", err)
	}
	if n := c.Idle(); n != 0 {
		t.Errorf("Idle() = %d, want 0: half of the body was not read", n)
	}
}
