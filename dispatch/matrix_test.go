package dispatch_test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"spillway/dispatch"
)

var crashMessages = flag.Int("crash", 64, "requests in the queue of each crash of TestCrashMatrix")

// crashPoints are where something dies: at steps of a message, while its request is with the gateway,
// and while Redis runs a script, whose outcome then nobody is told.
var crashPoints = []string{
	string(dispatch.Peeked), "in claim", string(dispatch.Claimed), string(dispatch.Sending), "in request", string(dispatch.Answered),
	"in settle", string(dispatch.Settled), "in delay", string(dispatch.Delayed), "in promote", "in release", string(dispatch.Released),
}

const (
	crashWorkers  = 8
	crashRefusals = 20                     // answers 500, where messages are to be put aside
	crashAway     = 300 * time.Millisecond // until what was killed is started again
)

// crash is one cell of the matrix.
type crash struct {
	t       *testing.T
	victim  string // dispatcher, redis or gateway
	at      string
	redis   *server
	gateway atomic.Pointer[child]
	addr    string // of the gateway
	parent  string // URL of ours that the gateway asks

	once sync.Once
	down chan struct{} // closed when the victim is dead
	up   chan struct{} // closed when Redis or the gateway is there again

	mu       sync.Mutex
	asked    int
	refusals int
	sent     map[string]int // requests that came to the gateway, by body
	hold     bool           // requests are not answered
}

// TestCrashMatrix kills a dispatcher, Redis and the gateway with SIGKILL at each point of a message's
// way. What was killed is started again. Then there is one result for each request, and no more of them
// were sent twice than were in flight.
//
//	go test ./dispatch -run '^TestCrashMatrix$' -v -crash 1000
func TestCrashMatrix(t *testing.T) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, 6) // they mostly wait for leases to end
	for _, victim := range []string{"dispatcher", "redis", "gateway"} {
		for _, at := range crashPoints {
			wg.Go(func() {
				slots <- struct{}{}
				defer func() { <-slots }()
				t.Run(victim+"/"+strings.ReplaceAll(at, " ", "_"), func(t *testing.T) {
					c := &crash{t: t, victim: victim, at: at, redis: startRedis(t), down: make(chan struct{}), up: make(chan struct{}), sent: map[string]int{}}
					c.run(*crashMessages)
				})
			})
		}
	}
	wg.Wait()
}

func (c *crash) run(n int) {
	t, r := c.t, c.redis
	releasing := c.at == "in release" || c.at == string(dispatch.Released)
	c.hold = releasing
	ours := httptest.NewServer(http.HandlerFunc(c.answer))
	defer ours.Close()
	c.addr, c.parent = fmt.Sprintf("127.0.0.1:%d", unusedPort(t)), ours.URL
	c.startGateway()
	r.fill("q", n)

	o := order{At: dispatch.Step(c.at), After: int64(n / 10), Tell: onTelling(t, func(pid int) { c.kill(pid) })}
	if releasing || c.at == "in delay" || c.at == string(dispatch.Delayed) { // there are few
		o.After = 3
	}
	var pid atomic.Int64
	set := setup{cfg: func(cfg *dispatch.Config) {
		quick(cfg)
		cfg.OverloadCooldown, cfg.Concurrency, cfg.LeaseTTL = 200*time.Millisecond, crashWorkers, 3*time.Second
		if releasing {
			cfg.DrainTimeout = 100 * time.Millisecond
		}
	}}
	if script, ok := strings.CutPrefix(c.at, "in "); ok && script != "request" {
		o.At = ""
		set.doc = map[string]any{"url": "redis://" + c.tap(script, o.After, func() { c.kill(int(pid.Load())) })}
	}
	o.Config = config(t, r, set, queueDoc{"queue_name": "q", "igw_base_url": "http://" + c.addr})
	first := startChild(t, o)
	pid.Store(int64(first.cmd.Process.Pid))
	if c.at == "in request" {
		go func() {
			for !c.over() && c.count() < n/10 {
				time.Sleep(time.Millisecond)
			}
			c.kill(int(pid.Load()))
		}()
	}
	if releasing { // all that is in flight goes back when its dispatcher ends
		eventually(t, "all workers are at work", func() bool { return c.count() >= crashWorkers })
		_ = first.stdin.Close()
	}
	select {
	case <-c.down:
	case <-time.After(patience):
		t.Fatalf("nothing was killed\n%s", first.err)
	}
	c.mu.Lock()
	c.hold = false
	c.mu.Unlock()
	last := first
	if c.victim == "dispatcher" || releasing {
		if err := first.cmd.Wait(); (err == nil) == (c.victim == "dispatcher") {
			t.Fatalf("the first dispatcher has ended with %v\n%s", err, first.err)
		}
		o.At, set.doc = "", nil
		o.Config = config(t, r, set, queueDoc{"queue_name": "q", "igw_base_url": "http://" + c.addr})
		<-c.up
		last = startChild(t, o)
	}
	<-c.up
	seen := map[string]int{}
	for _, got := range r.results("result-list", n) {
		seen[got.ID]++
		if want := fmt.Sprintf(`{"prompt":"%s"}`, got.ID); *got.Payload != want {
			t.Errorf("%s: payload %s, want %s", got.ID, *got.Payload, want)
		}
	}
	last.end(t)
	if len(seen) != n {
		t.Errorf("results of %d requests, want each of %d once", len(seen), n)
	}
	if more, _ := r.LLen(context.Background(), "result-list").Result(); more != 0 {
		t.Errorf("%d results too many", more)
	}
	if left := r.left("q"); left != "" && left != "{q}:deliv" {
		t.Errorf("left in Redis: %s", left)
	}
	if dead, _ := r.XLen(context.Background(), "{q}:dead").Result(); dead != 0 {
		t.Errorf("%d dead letters", dead)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	again := 0
	for _, times := range c.sent {
		again += times - 1
	}
	// A machine that stands still for longer than a lease lasts has one lost without a crash.
	lost := strings.Count(last.err.String(), "a lease was lost") + strings.Count(last.err.String(), "somebody else has the message")
	if again > crashWorkers+c.refusals+lost {
		t.Errorf("%d inferences were done again, want no more than %d in flight, %d that the gateway refused and %d of lost leases", again, crashWorkers, c.refusals, lost)
	}
	if len(c.sent) != n {
		t.Errorf("%d requests were sent, want %d", len(c.sent), n)
	}
	t.Logf("%d requests: %d results, %d inferences again, of which the gateway had refused %d", n, len(seen), again, c.refusals)
}

// answer is what the gateway does.
func (c *crash) answer(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	c.mu.Lock()
	c.asked++
	c.sent[string(body)]++
	refuse := (c.at == "in delay" || c.at == string(dispatch.Delayed) || c.at == "in promote") && c.refusals < crashRefusals
	if refuse {
		c.refusals++
	}
	hold := c.hold
	c.mu.Unlock()
	if c.at == "in request" && !c.over() {
		time.Sleep(5 * time.Millisecond) // so that some are under way
	}
	if hold {
		<-r.Context().Done()
		return
	}
	if refuse {
		w.WriteHeader(500)
		return
	}
	_, _ = w.Write(body)
}

func (c *crash) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.asked
}

func (c *crash) over() bool {
	select {
	case <-c.down:
		return true
	default:
		return false
	}
}

// kill ends the victim, once, and has it started again if it is not a dispatcher, whose process ID it is
// given.
func (c *crash) kill(dispatcher int) {
	c.once.Do(func() {
		defer close(c.down)
		var again func()
		switch c.victim {
		case "dispatcher":
			_ = syscall.Kill(dispatcher, syscall.SIGKILL)
			close(c.up)
			return
		case "redis":
			c.redis.kill()
			again = c.redis.start
		case "gateway":
			g := c.gateway.Load()
			_ = g.cmd.Process.Kill()
			_ = g.cmd.Wait()
			again = c.startGateway
		}
		time.AfterFunc(crashAway, func() {
			defer close(c.up)
			again()
		})
	})
}

func (c *crash) startGateway() {
	c.gateway.Store(startSelf(c.t, asGateway+"="+c.addr+" "+c.parent))
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		conn, err := net.Dial("tcp", c.addr)
		if err == nil {
			_ = conn.Close()
			return
		}
		if time.Now().After(deadline) {
			c.t.Errorf("the gateway does not listen: %v", err)
			return
		}
	}
}

// tap is the address of Redis for a dispatcher. Right after the nth call of a script was handed on to
// Redis it calls do; a call of promote counts if it finds something due.
func (c *crash) tap(script string, n int64, do func()) string {
	hash := []byte(dispatch.ScriptHashes[script])
	if script == "promote" {
		n = 1
	}
	var calls atomic.Int64
	counts := func() bool {
		if script == "promote" {
			now := strconv.FormatInt(time.Now().UnixMilli(), 10)
			due, err := c.redis.ZCount(context.Background(), "{q}:delayed", "-inf", now).Result()
			if err != nil || due == 0 {
				return false
			}
		}
		return calls.Add(1) == n
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			down, err := ln.Accept()
			if err != nil {
				return
			}
			up, err := net.Dial("tcp", c.redis.addr())
			if err != nil {
				_ = down.Close()
				continue
			}
			go func() {
				_, _ = io.Copy(down, up)
				_, _ = down.Close(), up.Close()
			}()
			go func() {
				defer up.Close()
				defer down.Close()
				buf, tail := make([]byte, 64<<10), []byte(nil)
				for {
					n, err := down.Read(buf)
					if err != nil {
						return
					}
					text := append(tail, buf[:n]...)
					hit := false
					for range bytes.Count(text, hash) {
						hit = counts() || hit
					}
					tail = append([]byte(nil), text[max(0, len(text)-len(hash)+1):]...) // a hash may be in two pieces
					if _, err := up.Write(buf[:n]); err != nil {
						return
					}
					if hit {
						do()
					}
				}
			}()
		}
	}()
	return ln.Addr().String()
}
