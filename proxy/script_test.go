package proxy_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"
)

// patience bounds each wait for something that must happen; only a failing test uses it up.
const patience = time.Minute // a failure takes longer to show; a busy machine is not one

// received is one request as a worker got it.
type received struct {
	path   string
	header http.Header
	host   string
	body   string
}

// conn is the worker's end of one connection.
type conn struct {
	net.Conn
	t   testing.TB
	br  *bufio.Reader
	end bool // no further request is read
}

// say sends raw bytes in one write.
func (c *conn) say(text string) { _, _ = io.WriteString(c.Conn, text) }

// gone waits until the front end has closed the connection.
func (c *conn) gone() {
	_, _ = io.Copy(io.Discard, c.br)
	c.end = true
}

// hangUp closes the connection in good order.
func (c *conn) hangUp() {
	c.end = true
	_ = c.Conn.Close()
}

// reset breaks the connection.
func (c *conn) reset() {
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	c.hangUp()
}

// script is a worker that answers each request with a function over the raw connection.
type script struct {
	ln     net.Listener
	answer func(c *conn, r received)

	mu       sync.Mutex
	requests []received
	accepted int
	open     int
}

// newScript runs a worker until the test ends.
func newScript(t testing.TB, answer func(c *conn, r received)) *script {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &script{ln: ln, answer: answer}
	var running sync.WaitGroup
	running.Go(func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			s.count(1, 1)
			_ = nc.SetDeadline(time.Now().Add(2 * patience)) // a failing test ends
			running.Go(func() {
				defer s.count(0, -1)
				defer nc.Close()
				s.serve(&conn{Conn: nc, t: t, br: bufio.NewReader(nc)})
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		running.Wait()
	})
	return s
}

func (s *script) count(accepted, open int) {
	s.mu.Lock()
	s.accepted += accepted
	s.open += open
	s.mu.Unlock()
}

func (s *script) serve(c *conn) {
	for !c.end {
		req, err := http.ReadRequest(c.br)
		if err != nil {
			return
		}
		body, err := io.ReadAll(req.Body)
		if err != nil {
			return
		}
		r := received{req.URL.RequestURI(), req.Header, req.Host, string(body)}
		s.mu.Lock()
		s.requests = append(s.requests, r)
		s.mu.Unlock()
		s.answer(c, r)
	}
}

func (s *script) url() string { return "http://" + s.ln.Addr().String() }

// seen is the requests so far.
func (s *script) seen() []received {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]received(nil), s.requests...)
}

// connections is how many were accepted and how many of them are open.
func (s *script) connections() (accepted, open int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.accepted, s.open
}

// answer is a whole response with a length.
func answer(status int, headers, body string) string {
	return fmt.Sprintf("HTTP/1.1 %d X\r\n%sContent-Length: %d\r\n\r\n%s", status, headers, len(body), body)
}

const jsonHeader = "Content-Type: application/json\r\n"

// saying answers every request with raw bytes.
func saying(text string) func(*conn, received) {
	return func(c *conn, _ received) { c.say(text) }
}

// streamHead begins a chunked event stream.
const streamHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"

// chunk frames bytes of a chunked body; the empty one ends it.
func chunk(data string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(data), data) }

// streaming answers with one event stream, each part in a write of its own.
func streaming(parts ...string) func(*conn, received) {
	return func(c *conn, _ received) {
		c.say(streamHead)
		for _, p := range parts {
			c.say(chunk(p))
		}
		c.say(chunk(""))
	}
}

// The events of a short chat.
const (
	role    = `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}` + "\n\n"
	hello   = `data: {"choices":[{"index":0,"delta":{"content":"Hello"},"finish_reason":null}]}` + "\n\n"
	ended   = `data: {"choices":[{"index":0,"delta":{"content":"."},"finish_reason":"stop"}]}` + "\n\n"
	counted = `data: {"choices":[],"usage":{"prompt_tokens":10,"completion_tokens":2,"total_tokens":12}}` + "\n\n"
	done    = "data: [DONE]\n\n"
)

const (
	chatBody   = `{"model":"m","messages":[{"role":"user","content":"Hi"}]}`
	streamBody = `{"model":"m","stream":true,"messages":[{"role":"user","content":"Hi"}]}`
	reply      = `{"id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"Hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":10,"completion_tokens":1,"total_tokens":11}}`
)
