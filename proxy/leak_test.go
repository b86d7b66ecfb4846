package proxy_test

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"spillway/proxy"
)

// TestClientLeaves checks that a client which leaves stops its worker at once, at each stage.
func TestClientLeaves(t *testing.T) {
	for _, tt := range []struct {
		name   string
		body   string
		worker func(*conn)
		begins bool // the client sees the first byte before it leaves
	}{
		{"before a unary head", chatBody, func(*conn) {}, false},
		{"in a unary body", chatBody, func(c *conn) { c.say(answer(200, jsonHeader, reply)[:100]) }, false},
		{"in a large unary body", chatBody, func(c *conn) { c.say(answer(200, "", strings.Repeat("x", 4<<20))[:2<<20]) }, true},
		{"before a stream's head", streamBody, func(*conn) {}, false},
		{"before a stream's first event", streamBody, func(c *conn) { c.say(streamHead + chunk(hello[:9])) }, false},
		{"in a stream", streamBody, func(c *conn) { c.say(streamHead + chunk(hello)) }, true},
		{"while a worker drains its stream", streamBody, func(c *conn) { c.say(streamHead + chunk(hello+ended+done)) }, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			stopped := make(chan struct{})
			s := newScript(t, func(c *conn, _ received) {
				tt.worker(c)
				c.gone()
				close(stopped)
			})
			log := &lines{}
			f := begin(t, setup{log: log.logger()}, served("w", s))
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(tt.body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Content-Type", "application/json")
			answered := make(chan struct{})
			go func() {
				defer close(answered)
				resp, err := f.client.Do(req)
				if err != nil {
					return
				}
				defer resp.Body.Close()
				if n, _ := io.ReadAtLeast(resp.Body, make([]byte, 9), 9); n < 9 {
					t.Error("no first byte came")
				}
				leave()
			}()
			if !tt.begins {
				eventually(t, "the worker has the request", func() bool { return len(s.seen()) == 1 })
				leave()
			}
			select {
			case <-stopped:
			case <-time.After(patience):
				t.Fatal("the worker's connection was not closed")
			}
			<-answered
			eventually(t, "the request is over", func() bool { return strings.Contains(log.String(), "msg=request") })
			if got := f.states(); got != "w:unknown" {
				t.Errorf("afterwards %s: a client that leaves is not a worker's failure", got)
			}
			if tt.name != "while a worker drains its stream" && !strings.Contains(log.String(), "status=499") && !strings.Contains(log.String(), "error_type=cancelled") {
				t.Errorf("the access record does not tell of a client that left: %s", log)
			}
		})
	}
}

// TestHalfClose has clients close their sending side alone once their answer has begun. A server
// cannot tell them from clients that have left, but they still read: what they have must not end
// like a whole answer.
func TestHalfClose(t *testing.T) {
	for _, tt := range []struct {
		name, body string
		worker     func(*conn, received)
		commit     string
	}{
		{"in a stream", streamBody, saysThen(streamHead + chunk(hello)), "event"},
		{"in a stream, in an event", streamBody, saysThen(streamHead + chunk(hello+hello[:9])), "event"},
		{"in a stream that could end, but for [DONE]", streamBody, saysThen(streamHead + chunk(ended)), "event"},
		{"before the first event of a stream that was committed at its head", streamBody, saysThen(streamHead), "head"},
		{"in a large unary body in chunks", chatBody, saysThen("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(strings.Repeat("x", 2<<20))), "event"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScript(t, tt.worker)
			f := begin(t, setup{proxy: func(c *proxy.Config) { c.CommitOn = tt.commit }}, served("w", s))
			client := f.dial()
			client.post(tt.body)
			if status, header := client.head(); status != "HTTP/1.1 200 OK" || !strings.Contains(header, "Transfer-Encoding: chunked\r\n") {
				t.Fatalf("head %s %s, want 200 in chunks", status, header)
			}
			if err := client.Conn.(*net.TCPConn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			last := " "
			for err := error(nil); err == nil; {
				if last, err = client.chunk(); last == "" && err == nil {
					t.Error("the answer ends as if it were whole")
					break
				}
			}
			if _, err := client.br.ReadByte(); !errors.Is(err, io.EOF) {
				t.Errorf("after it: %v, want a connection that is closed", err)
			}
			eventually(t, "the leave is counted", func() bool { return f.metric("dynamo_frontend_disconnected_clients") == "1" })
			eventually(t, "the worker's connection is closed", func() bool { _, open := s.connections(); return open == 0 })
			if got := f.states(); got != "w:unknown" {
				t.Errorf("afterwards %s: a client that leaves is not a worker's failure", got)
			}
		})
	}
}

// TestManyLeave has clients leave at random moments of random exchanges; begin checks that
// nothing of them stays.
func TestManyLeave(t *testing.T) {
	moody := func(c *conn, r received) {
		switch rand.IntN(8) {
		case 0:
			c.reset()
		case 1:
			c.say(answer(429, "", ""))
		case 2:
			c.say(answer(500, "", "x"))
		case 3:
			c.say(streamHead + chunk(hello))
			c.hangUp()
		case 4:
			c.say(answer(200, jsonHeader, reply))
		default:
			c.say(streamHead)
			for range rand.IntN(20) {
				c.say(chunk(hello))
				time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
			}
			c.say(chunk(ended+done) + chunk(""))
		}
	}
	a, b := newScript(t, moody), newScript(t, moody)
	f := begin(t, setup{busy: limited(200), proxy: func(c *proxy.Config) { c.InhibitedDuration = time.Millisecond }}, served("a", a), served("b", b))
	var clients sync.WaitGroup
	for range 200 {
		clients.Go(func() {
			ctx, leave := context.WithTimeout(t.Context(), time.Duration(rand.IntN(30_000))*time.Microsecond)
			defer leave()
			body := streamBody
			if rand.IntN(3) == 0 {
				body = chatBody
			}
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(body))
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("Content-Type", "application/json")
			resp, err := f.client.Do(req)
			if err != nil {
				return // it left
			}
			defer resp.Body.Close()
			_, _ = io.Copy(io.Discard, resp.Body) // broken or whole
		})
	}
	clients.Wait()
	eventually(t, "all requests are over", func() bool { return strings.Contains(f.metrics(), `dynamo_queued_requests{model="m"} 0`) })
}
