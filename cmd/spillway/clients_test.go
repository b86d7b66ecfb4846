package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"spillway/configs"
	"spillway/router"
)

// guestModel stands for the model in the bodies below.
const guestModel = "GUESTMODEL"

const (
	guestStream = `{"model":"GUESTMODEL","stream":true,"max_tokens":4000,"ignore_eos":true,"messages":[{"role":"user","content":"Hello"}]}`
	guestUnary  = `{"model":"GUESTMODEL","max_tokens":4000,"ignore_eos":true,"messages":[{"role":"user","content":"Hello"}]}`
	guestShort  = `{"model":"GUESTMODEL","max_tokens":3,"messages":[{"role":"user","content":"Hello"}]}`
)

// longPrompt is a prompt of some 11,000 tokens.
var longPrompt = strings.Replace(guestStream, "Hello", strings.Repeat("Hello, worker. ", 3000), 1)

// manner is one way in which clients behave that a server cannot choose.
type manner struct {
	name  string
	many  int                                                 // guests at a time when measured
	visit func(ctx context.Context, addr, model string) error // one guest; one that stays leaves when ctx ends
	stays bool
	read  time.Duration // client-read-timeout, 0 is the default
	limit int           // body-limit-mb, 0 is the default
	heard string        // a metric that must count the guests, "" is none
	flood bool          // what they send keeps processors busy
}

const disconnected = "dynamo_frontend_disconnected_clients"

func manners() []manner {
	return []manner{
		{name: "leave while the prompt is sent", many: 100, visit: leaveSending},
		{name: "leave before the first token", many: 100, visit: leaveWaiting, heard: disconnected},
		{name: "leave in the stream", many: 100, visit: leaveReading, heard: disconnected},
		{name: "read a byte a second", many: 200, visit: readSlowly, stays: true, heard: disconnected},
		{name: "half-close after the request", many: 100, visit: halfClose, heard: disconnected},
		{name: "pipeline", many: 20, visit: pipeline},
		{name: "leave a pipeline", many: 100, visit: leavePipeline},
		{name: "never end a body", many: 200, visit: endlessTrickle, read: 500 * time.Millisecond},
		{name: "send a body past the limit", many: 8, visit: endlessFlood, limit: 1, flood: true, read: time.Minute},
	}
}

// leaveSending is a client that is gone before its request is whole.
func leaveSending(ctx context.Context, addr, _ string) error {
	g, err := call(ctx, addr)
	if err != nil {
		return err
	}
	defer g.leave()
	_, _ = io.WriteString(g, chatHead+"Content-Length: 1000000\r\n\r\n"+strings.Repeat(" ", 20000+rand.IntN(50000)))
	pause(ctx, time.Duration(rand.IntN(20))*time.Millisecond)
	return nil
}

// leaveWaiting is a client that is gone while its prompt waits or is computed.
func leaveWaiting(ctx context.Context, addr, model string) error {
	g, err := call(ctx, addr)
	if err != nil {
		return err
	}
	defer g.leave()
	if err := g.ask("waiting", strings.Replace(longPrompt, guestModel, model, 1)); err != nil {
		return err
	}
	pause(ctx, 100*time.Millisecond+time.Duration(rand.IntN(100))*time.Millisecond)
	return nil
}

// leaveReading is a client that is gone after some of its stream.
func leaveReading(ctx context.Context, addr, model string) error {
	g, err := call(ctx, addr)
	if err != nil {
		return err
	}
	defer g.leave()
	if err := g.ask("reading", strings.Replace(guestStream, guestModel, model, 1)); err != nil {
		return err
	}
	resp, err := http.ReadResponse(g.br, nil)
	if err != nil {
		return err
	}
	if n, err := io.CopyN(io.Discard, resp.Body, int64(1+rand.IntN(1000))); err != nil || resp.StatusCode != 200 {
		return fmt.Errorf("%s and %d bytes of a stream: %w", resp.Status, n, err)
	}
	return nil
}

// readSlowly is a client with a full disk, or a bad mind.
func readSlowly(ctx context.Context, addr, model string) error {
	g, err := call(ctx, addr)
	if err != nil {
		return err
	}
	defer g.leave()
	if err := g.ask("slow", strings.Replace(guestStream, guestModel, model, 1)); err != nil {
		return err
	}
	for one := make([]byte, 1); ; {
		if _, err := io.ReadFull(g, one); err != nil {
			return fmt.Errorf("a byte of a stream that goes on: %w", err)
		}
		if !pause(ctx, time.Second) {
			return nil
		}
	}
}

// halfClose is a client that closes its sending side when it has sent its request. To net/http,
// and so to us, it has left: nothing tells it from one whose process has ended. It can still hear that.
func halfClose(ctx context.Context, addr, model string) error {
	g, err := call(ctx, addr)
	if err != nil {
		return err
	}
	defer g.leave()
	if err := g.ask("half", strings.Replace(guestUnary, guestModel, model, 1)); err != nil {
		return err
	}
	if err := g.CloseWrite(); err != nil {
		return err
	}
	return g.is(499, "Client closed request")
}

// pipeline is a client that sends its requests without waiting for answers.
func pipeline(ctx context.Context, addr, model string) error {
	g, err := call(ctx, addr)
	if err != nil {
		return err
	}
	defer g.leave()
	short := strings.Replace(guestShort, guestModel, model, 1)
	stream := strings.Replace(short, `"max_tokens"`, `"stream":true,"max_tokens"`, 1)
	if _, err := io.WriteString(g, chatRequest("first", stream)+chatRequest("second", short)); err != nil {
		return err
	}
	for _, want := range []struct{ id, part string }{{"first", "data: [DONE]"}, {"second", `"chat.completion"`}} {
		resp, body, err := g.answer()
		if err != nil || resp.StatusCode != 200 || resp.Header.Get("X-Request-Id") != want.id || !strings.Contains(body, want.part) {
			return fmt.Errorf("pipelined: %v %.300q, %w; want 200, the %s, with %q", resp, body, err, want.id, want.part)
		}
	}
	return nil
}

// leavePipeline is a client that has sent more than its first request when it leaves. net/http
// does not look further than the next byte, so it is missed only when it is written to.
func leavePipeline(ctx context.Context, addr, model string) error {
	g, err := call(ctx, addr)
	if err != nil {
		return err
	}
	defer g.leave()
	body := strings.Replace(guestStream, guestModel, model, 1)
	if _, err := io.WriteString(g, chatRequest("first", body)+chatRequest("second", body)); err != nil {
		return err
	}
	pause(ctx, time.Duration(rand.IntN(50))*time.Millisecond)
	return nil
}

// endlessTrickle is a client that always has a little more to send.
func endlessTrickle(ctx context.Context, addr, _ string) error {
	g, err := call(ctx, addr)
	if err != nil {
		return err
	}
	defer g.leave()
	if _, err := io.WriteString(g, chatHead+"Transfer-Encoding: chunked\r\n\r\n"); err != nil {
		return err
	}
	told := make(chan error, 1)
	go func() { told <- g.is(400, "The request body could not be read") }()
	for {
		select {
		case err := <-told:
			return err
		case <-time.After(20 * time.Millisecond):
			_, _ = io.WriteString(g, "1\r\n \r\n") // that it has ended is told above
		}
	}
}

// endlessFlood is a client that sends as fast as it can.
func endlessFlood(ctx context.Context, addr, _ string) error {
	g, err := call(ctx, addr)
	if err != nil {
		return err
	}
	defer g.leave()
	told := make(chan error, 1)
	go func() { told <- g.is(413, "body-limit-mb") }()
	part := "10000\r\n" + strings.Repeat(" ", 1<<16) + "\r\n"
	for _, err := io.WriteString(g, chatHead+"Transfer-Encoding: chunked\r\n\r\n"); err == nil; {
		_, err = io.WriteString(g, part)
	}
	return <-told
}

// TestClients has 20 clients behave in each manner at once. Others are served meanwhile, and
// nothing of them stays: no booking, no work, no connection and no goroutine.
func TestClients(t *testing.T) { inModes(t, testClients) }

func testClients(t *testing.T, mode router.Mode) {
	for _, m := range manners() {
		t.Run(m.name, func(t *testing.T) {
			f := begin(t, mode, func(c *configs.Demo) {
				c.Serving.Busy.ActiveDecodeBlocksThreshold, c.Serving.Busy.ActivePrefillTokensThreshold = nil, nil
				c.Sim.Count, c.Sim.MaxNumSeqs = 2, 64
				c.Sim.PrefillTokensPerSecond = 100 // a long prompt that is not cancelled takes longer than all waits below
				c.Serving.Proxy.ClientReadTimeout = max(m.read, time.Second)
				c.Serving.Proxy.BodyLimitMB = max(m.limit, 1)
			})
			addr := strings.TrimPrefix(f.url, "http://")
			ctx, end := context.WithCancel(t.Context())
			defer end()
			const guests = 20
			var there sync.WaitGroup
			for range guests {
				there.Go(func() {
					if err := m.visit(ctx, addr, "sim-model"); err != nil {
						t.Error(err)
					}
				})
			}
			if m.stays {
				eventually(t, "all guests are there", func() bool { return f.stats().Running > 0 && f.sum("spillway_slots_inflight") == guests })
			}
			other := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
			if got := put(other, f.url, shortChat); !got.whole() {
				t.Errorf("another client meanwhile: %d %.200q, %v; want the whole answer", got.status, got.body, got.err)
			}
			end()
			there.Wait()
			f.settled()
			eventually(t, "the workers have nothing to do", func() bool { s := f.stats(); return s.Running+s.Waiting == 0 })
			if m.heard != "" {
				eventually(t, m.heard+" counts all guests", func() bool { return f.sum(m.heard) == guests })
			}
			f.abandoned(addr)
		})
	}
}

// sum adds up the values of all series whose name begins so.
func (f *fleet) sum(name string) (n int) {
	f.t.Helper()
	for series, value := range f.metrics(name) {
		var v float64
		if _, err := fmt.Sscan(value, &v); err != nil {
			f.t.Fatalf("%s %s: %v", series, value, err)
		}
		n += int(v)
	}
	return n
}

// abandoned checks that the front end keeps no connection when no client does.
func (f *fleet) abandoned(addr string) {
	f.t.Helper()
	eventually(f.t, "no client is connected", func() bool {
		f.http.CloseIdleConnections()
		http.DefaultClient.CloseIdleConnections()
		return connections(f.t, addr) == 0
	})
}

// crowd holds connections without a request.
type crowd struct {
	addr   string
	guests []*guest
}

// gather connects n clients that stay, each of which has been answered once unless silent.
func gather(ctx context.Context, addr string, n int, silent bool) (*crowd, error) {
	c := &crowd{addr: addr, guests: make([]*guest, n)}
	var callers sync.WaitGroup
	var next atomic.Int64
	failed := make(chan error, 16)
	for range cap(failed) {
		callers.Go(func() {
			for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
				g, err := call(ctx, addr)
				if err == nil {
					c.guests[i] = g
					if !silent {
						_, err = io.WriteString(g, "GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
					}
				}
				if err == nil && !silent {
					err = g.is(200, "live")
				}
				if err != nil {
					failed <- fmt.Errorf("connection %d: %w", i, err)
					return
				}
			}
		})
	}
	callers.Wait()
	close(failed)
	return c, <-failed
}

// disperse closes all connections.
func (c *crowd) disperse() {
	for _, g := range c.guests {
		if g != nil {
			_ = g.Close() // some may have been closed by the server
		}
	}
}
