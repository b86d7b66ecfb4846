package upstream_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
	"runtime"
	"testing"
	"time"

	"spillway/upstream"
)

// TestLostConnections covers the reuse race: which deaths of a connection are made good.
func TestLostConnections(t *testing.T) {
	serveOnce := func(p *peer) bool {
		_, ok := p.request()
		p.say(plain)
		return ok
	}
	for _, tt := range []struct {
		name        string
		script      func(p *peer)
		err         string // of the second exchange
		reused      bool
		connections int
	}{
		{"alive", answering(plain), "none", true, 1},
		{"closed while idle", func(p *peer) { serveOnce(p) }, "none", false, 2},
		{"closed after the request", func(p *peer) {
			if serveOnce(p) && p.id == 0 {
				p.request()
			} else {
				p.gone()
			}
		}, "none", false, 2},
		{"closed after the request, again", func(p *peer) {
			if p.id == 0 {
				serveOnce(p)
			}
			p.request()
		}, "reset", false, 2},
		{"closed in the head", func(p *peer) {
			serveOnce(p)
			p.request()
			p.say("HTTP/1.1 2")
		}, "reset", false, 1},
		{"closed after an interim answer", func(p *peer) {
			serveOnce(p)
			p.request()
			p.say("HTTP/1.1 100 Continue\r\n\r\n")
		}, "reset", false, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorker(t, tt.script)
			c := w.client(t, upstream.Config{})
			if mustExchange(t, c, post("first")) {
				t.Error("the first exchange reused a connection")
			}
			_, _, reused, err := exchange(t.Context(), c, post("second"))
			if kind(err) != tt.err || reused != tt.reused || w.connections() != tt.connections {
				t.Errorf("second exchange: %v, reused %v, %d connections; want %s, %v, %d",
					err, reused, w.connections(), tt.err, tt.reused, tt.connections)
			}
		})
	}
}

// TestOnce has a request that must not be written twice, on a connection that is lost after it.
func TestOnce(t *testing.T) {
	w := newWorker(t, func(p *peer) {
		p.request()
		p.say(plain)
		p.request()
	})
	c := w.client(t, upstream.Config{})
	mustExchange(t, c, post("first"))
	req := post("second")
	req.Once = true
	if _, _, _, err := exchange(t.Context(), c, req); kind(err) != "reset" || w.connections() != 1 {
		t.Errorf("second exchange: %v, %d connections; want ErrReset and 1", err, w.connections())
	}
}

func TestFreshConnectionIsNotRetried(t *testing.T) {
	w := newWorker(t, func(p *peer) { p.request() })
	if _, err := w.client(t, upstream.Config{}).Do(t.Context(), post("")); kind(err) != "reset" {
		t.Errorf("Do = %v, want ErrReset", err)
	}
	if n := w.connections(); n != 1 {
		t.Errorf("%d connections, want 1", n)
	}
}

func TestUnaskedBytesAreNoAnswer(t *testing.T) {
	more := make(chan struct{})
	said := make(chan struct{})
	w := newWorker(t, func(p *peer) {
		p.request()
		p.say(plain)
		if p.id == 0 {
			<-more
			p.say("HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
			close(said)
		}
		p.gone()
	})
	c := w.client(t, upstream.Config{})
	mustExchange(t, c, post("first"))
	close(more)
	<-said
	if mustExchange(t, c, post("second")) {
		t.Error("a connection was reused on which bytes had come")
	}
}

func TestIdleConnectionsExpire(t *testing.T) {
	gone := make(chan struct{}, 3)
	w := newWorker(t, func(p *peer) {
		answering(plain)(p)
		gone <- struct{}{}
	})
	c := w.client(t, upstream.Config{IdleTimeout: 50 * time.Millisecond})
	open := make([]*upstream.Response, 3)
	for round := range 2 { // the sweep is set up again after it has run
		for i := range open {
			var err error
			if open[i], err = c.Do(t.Context(), post("")); err != nil {
				t.Fatal(err)
			}
		}
		for _, resp := range open {
			if _, err := io.ReadAll(resp); err != nil {
				t.Fatal(err)
			}
			resp.Close()
		}
		for range open {
			await(t, gone, "an idle connection is closed without a request coming")
		}
		if n := c.Idle(); n != 0 {
			t.Errorf("round %d: Idle() = %d, want 0", round, n)
		}
	}
}

func TestMaxIdleAndClose(t *testing.T) {
	gone := make(chan struct{}, 10)
	w := newWorker(t, func(p *peer) {
		answering(plain)(p)
		gone <- struct{}{}
	})
	c := w.client(t, upstream.Config{MaxIdle: 3, IdleTimeout: time.Hour})
	var open []*upstream.Response
	for range 6 {
		resp, err := c.Do(t.Context(), post(""))
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, resp)
	}
	finish := func(resp *upstream.Response) {
		t.Helper()
		if body, err := io.ReadAll(resp); string(body) != "ok" || err != nil {
			t.Errorf("ReadAll = %q, %v", body, err)
		}
		resp.Close()
	}
	for _, resp := range open[:5] {
		finish(resp)
	}
	if n := c.Idle(); n != 3 {
		t.Errorf("Idle() = %d, want MaxIdle, 3", n)
	}
	for range 2 {
		await(t, gone, "a connection over MaxIdle is closed")
	}
	c.Close()
	for range 3 {
		await(t, gone, "Close closes an idle connection")
	}
	finish(open[5])
	await(t, gone, "the open connection is closed at its end")
	mustExchange(t, c, post("after Close"))
	await(t, gone, "an exchange after Close keeps nothing")
	if n := c.Idle(); n != 0 {
		t.Errorf("Idle() = %d, want 0", n)
	}
}

func TestNewestIsReusedFirst(t *testing.T) {
	w := newWorker(t, func(p *peer) {
		answering(fmt.Sprintf("HTTP/1.1 200 OK\r\nX-Id: %d\r\nContent-Length: 0\r\n\r\n", p.id))(p)
	})
	c := w.client(t, upstream.Config{})
	do := func() *upstream.Response {
		resp, err := c.Do(t.Context(), post(""))
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	first, second := do(), do()
	first.Close()
	want := second.Header("X-Id")
	second.Close()
	third := do()
	defer third.Close()
	if got := third.Header("X-Id"); got != want {
		t.Errorf("reused connection %s, want %s, the newest", got, want)
	}
}

func TestTLS(t *testing.T) {
	issued := httptest.NewTLSServer(nil)
	defer issued.Close()
	cert, roots := issued.TLS.Certificates[0], issued.Client().Transport
	cfg := upstream.Config{TLS: trusting(roots)}

	t.Run("bodies of all sizes", func(t *testing.T) {
		w := tlsWorker(t, cert, func(p *peer) {
			for {
				body, ok := p.request()
				if !ok {
					return
				}
				p.say(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(body), body))
			}
		})
		c := w.client(t, cfg)
		for i, n := range []int{0, 10, 16 << 10, 16<<10 + 1, 4 << 20} {
			_, body, reused, err := exchange(t.Context(), c, post(prompt[:n]))
			if body != prompt[:n] || err != nil || reused != (i > 0) {
				t.Errorf("%d bytes: got %d back, reused %v, %v", n, len(body), reused, err)
			}
		}
	})
	t.Run("by Each", func(t *testing.T) {
		resp, err := tlsWorker(t, cert, answering(plain)).client(t, cfg).Do(t.Context(), post(""))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Close()
		if body, err := each(resp, nil); body != "ok" || err != io.EOF {
			t.Errorf("Each = %q, %v, want ok, EOF", body, err)
		}
	})
	t.Run("early answer", func(t *testing.T) {
		done := make(chan struct{})
		defer close(done)
		w := tlsWorker(t, cert, func(p *peer) {
			p.head()
			p.say("HTTP/1.1 413 Payload Too Large\r\nContent-Length: 0\r\n\r\n")
			<-done
		})
		if status, _, _, err := exchange(t.Context(), w.client(t, cfg), post(prompt)); status != 413 || err != nil {
			t.Errorf("exchange = %d, %v, want 413", status, err)
		}
	})
	t.Run("closed while idle", func(t *testing.T) {
		w := tlsWorker(t, cert, func(p *peer) {
			p.request()
			p.say(plain)
		})
		c := w.client(t, cfg)
		for range 3 {
			mustExchange(t, c, post(""))
		}
	})
	t.Run("unasked bytes inside TLS", func(t *testing.T) {
		said := make(chan struct{}, 2)
		w := tlsWorker(t, cert, func(p *peer) {
			p.request()
			p.say("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n") // a record each
			p.say("ok")
			p.say("HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
			said <- struct{}{}
			p.gone()
		})
		c := w.client(t, cfg)
		for i := range 2 {
			resp, err := c.Do(t.Context(), post(""))
			if err != nil {
				t.Fatal(err)
			}
			await(t, said, "the worker has said it all") // so one read brings the last two
			body, err := io.ReadAll(resp)
			if resp.Status != 200 || string(body) != "ok" || resp.Reused() || err != nil {
				t.Errorf("exchange %d = %d %q, reused %v, %v", i, resp.Status, body, resp.Reused(), err)
			}
			resp.Close()
		}
	})
	t.Run("cancelled in the handshake", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		w := newWorker(t, func(p *peer) {
			_, _ = p.br.ReadByte()
			cancel()
			p.gone()
		})
		if _, err := w.client(t, cfg).Do(ctx, post("")); kind(err) != "cancelled" {
			t.Errorf("Do = %v, want context.Canceled", err)
		}
	})
	t.Run("not trusted", func(t *testing.T) {
		gone := make(chan struct{})
		w := tlsWorker(t, cert, func(p *peer) {
			p.gone()
			close(gone)
		})
		if _, err := w.client(t, upstream.Config{TLS: &tls.Config{}}).Do(t.Context(), post("")); kind(err) != "dial" {
			t.Errorf("Do = %v, want ErrDial", err)
		}
		await(t, gone, "the connection is closed")
	})
	t.Run("no handshake", func(t *testing.T) {
		w := newWorker(t, (*peer).gone)
		slow := cfg
		slow.DialTimeout = 30 * time.Millisecond
		if _, err := w.client(t, slow).Do(t.Context(), post("")); kind(err) != "dial" {
			t.Errorf("Do = %v, want ErrDial and no deadline of the caller's", err)
		}
	})
}

func TestNothingLeaks(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("counts descriptors in /proc")
	}
	descriptors := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	gone := make(chan struct{}, 200)
	w := newWorker(t, func(p *peer) {
		defer func() { gone <- struct{}{} }()
		defer p.Close()
		switch p.request(); p.id % 4 {
		case 0:
			p.say("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel")
		case 1:
			p.say("garbage\r\n\r\n")
		case 2:
			p.say(plain)
		}
	})
	c := w.client(t, upstream.Config{})
	before := descriptors()
	for range 100 {
		_, _, _, _ = exchange(t.Context(), c, post("")) // how it fails is another test's
	}
	c.Close()
	for range w.connections() {
		await(t, gone, "a connection ends")
	}
	if after := descriptors(); after > before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}
