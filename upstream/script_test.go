package upstream_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"spillway/upstream"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long a test waits for what must happen; nothing is measured with it.
const patience = time.Minute // a failure takes longer to show; a busy machine is not one

// peer is the worker's end of one connection, driven by a script.
type peer struct {
	net.Conn
	br *bufio.Reader
	id int // in order of acceptance, from 0
}

// request reads one request with its body and returns the body; ok is false if the client has
// closed the connection instead.
func (p *peer) request() (body string, ok bool) {
	req, err := http.ReadRequest(p.br)
	if err != nil {
		return "", false
	}
	b, err := io.ReadAll(req.Body)
	return string(b), err == nil
}

// head reads the head of one request and leaves the body.
func (p *peer) head() bool {
	for {
		line, err := p.br.ReadString('\n')
		if err != nil || line == "\r\n" {
			return err == nil
		}
	}
}

func (p *peer) say(text string) { _, _ = io.WriteString(p.Conn, text) }

// gone waits until the client has closed the connection.
func (p *peer) gone() { _, _ = io.Copy(io.Discard, p.br) }

// worker is a listener that runs script on each connection, which ends with it.
type worker struct {
	net.Listener
	mu       sync.Mutex
	accepted int
}

func newWorker(t testing.TB, script func(p *peer)) *worker {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return serve(t, ln, script)
}

func serve(t testing.TB, ln net.Listener, script func(p *peer)) *worker {
	w := &worker{Listener: ln}
	var running sync.WaitGroup
	running.Go(func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			w.mu.Lock()
			p := &peer{nc, bufio.NewReader(nc), w.accepted}
			w.accepted++
			w.mu.Unlock()
			_ = nc.SetDeadline(time.Now().Add(patience)) // a failing test ends
			running.Go(func() {
				defer p.Close()
				script(p)
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		running.Wait()
	})
	return w
}

func (w *worker) connections() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.accepted
}

// client returns a client for the worker that is closed before the worker is.
func (w *worker) client(t testing.TB, cfg upstream.Config) *upstream.Client {
	t.Helper()
	scheme := "http"
	if cfg.TLS != nil {
		scheme = "https"
	}
	c, err := upstream.New(&url.URL{Scheme: scheme, Host: w.Addr().String()}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

const plain = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

// answering answers every request with text.
func answering(text string) func(p *peer) {
	return func(p *peer) {
		for {
			if _, ok := p.request(); !ok {
				return
			}
			p.say(text)
		}
	}
}

func post(body string) *upstream.Request {
	return &upstream.Request{Method: "POST", Path: "/v1/completions", Body: []byte(body)}
}

// exchange does a whole exchange and returns what came.
func exchange(ctx context.Context, c *upstream.Client, req *upstream.Request) (status int, body string, reused bool, err error) {
	resp, err := c.Do(ctx, req)
	if err != nil {
		return 0, "", false, err
	}
	defer resp.Close()
	b, err := io.ReadAll(resp)
	return resp.Status, string(b), resp.Reused(), err
}

func mustExchange(t *testing.T, c *upstream.Client, req *upstream.Request) (reused bool) {
	t.Helper()
	status, body, reused, err := exchange(t.Context(), c, req)
	if err != nil || status != 200 || body != "ok" {
		t.Fatalf("exchange = %d %q, %v, want 200 \"ok\"", status, body, err)
	}
	return reused
}

// await waits for what a script reports.
func await(t *testing.T, ch <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(patience):
		t.Fatalf("%s: did not happen", what)
	}
}

// kind names the class of an error, and "none" or "other".
func kind(err error) string {
	for _, k := range []struct {
		err  error
		name string
	}{
		{nil, "none"}, {context.Canceled, "cancelled"}, {context.DeadlineExceeded, "context deadline"},
		{os.ErrDeadlineExceeded, "deadline"}, {upstream.ErrDial, "dial"}, {upstream.ErrReset, "reset"},
		{upstream.ErrHeader, "header"}, {upstream.ErrFraming, "framing"}, {upstream.ErrTruncated, "truncated"},
		{upstream.ErrRequest, "request"}, {upstream.ErrClosed, "closed"},
	} {
		if errors.Is(err, k.err) {
			return k.name
		}
	}
	return "other"
}

// tlsWorker runs script behind TLS with cert.
func tlsWorker(t *testing.T, cert tls.Certificate, script func(p *peer)) *worker {
	t.Helper()
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{cert}})
	if err != nil {
		t.Fatal(err)
	}
	return serve(t, ln, script)
}

// trusting is the TLS configuration of a client that trusts what rt trusts.
func trusting(rt http.RoundTripper) *tls.Config { return rt.(*http.Transport).TLSClientConfig }
