package dispatch_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/dispatch"
)

// asDispatcher in the environment makes this test binary a dispatcher that may kill itself.
const asDispatcher = "RUN_AS_DISPATCHER"

// order is what such a process is told.
type order struct {
	Config dispatch.Config
	At     dispatch.Step // "" for never
	After  int64         // so many messages have got so far
}

func TestMain(m *testing.M) {
	if text := os.Getenv(asDispatcher); text != "" {
		beDispatcher(text)
	}
	os.Exit(m.Run())
}

func beDispatcher(text string) {
	var o order
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		panic(err)
	}
	d, err := dispatch.New(o.Config, os.Getenv, prometheus.NewRegistry(), slog.New(slog.NewTextHandler(os.Stderr, nil)))
	if err != nil {
		panic(err)
	}
	var n atomic.Int64
	d.Witness = func(s dispatch.Step, _ string) {
		if s == o.At && n.Add(1) >= o.After {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {} // nothing more is done
		}
	}
	ctx, stop := context.WithCancel(context.Background())
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); stop() }() // our parent has closed it, or is gone
	if err := d.Run(ctx); err != nil {
		panic(err)
	}
	os.Exit(0)
}

// child is such a process.
type child struct {
	cmd   *exec.Cmd
	stdin io.Closer
	err   *strings.Builder
}

func startChild(t *testing.T, o order) *child {
	t.Helper()
	text, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := &child{cmd: exec.Command(self), err: &strings.Builder{}}
	c.cmd.Env = append(os.Environ(), asDispatcher+"="+string(text))
	c.cmd.Stderr = c.err
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.cmd.Process.Kill() })
	return c
}

// end has it stop as it should.
func (c *child) end(t *testing.T) {
	t.Helper()
	_ = c.stdin.Close()
	if err := c.cmd.Wait(); err != nil {
		t.Errorf("the dispatcher ended with %v\n%s", err, c.err)
	}
}

// quick has short times, so that tests of crashes do not take long.
func quick(c *dispatch.Config) {
	c.LeaseTTL, c.ReapInterval, c.RequestTimeout = 2*time.Second, 200*time.Millisecond, 30*time.Second
}

// crashMessages is how many requests are in the queue of each crash.
const crashMessages = 1000

// fill enqueues requests whose prompts are their numbers.
func (s *server) fill(queue string, n int) {
	s.t.Helper()
	for i := range n {
		s.enqueue(queue, fmt.Sprintf("r%04d", i), fmt.Sprintf(`{"prompt":"r%04d"}`, i))
	}
}

// TestCrashMatrix kills a dispatcher at each step of a message, and has another one do the rest.
func TestCrashMatrix(t *testing.T) {
	for _, at := range []dispatch.Step{dispatch.Peeked, dispatch.Claimed, dispatch.Sending, dispatch.Answered, dispatch.Settled, dispatch.Delayed, dispatch.Released} {
		t.Run(string(at), func(t *testing.T) {
			t.Parallel()
			r := startRedis(t)
			var refusals atomic.Int64
			g := newGateway(t, func(w http.ResponseWriter, _ *http.Request, body string) {
				if at == dispatch.Delayed && refusals.Add(1) <= 20 {
					w.WriteHeader(500)
					return
				}
				if at == dispatch.Released && refusals.Add(1) == 20 { // what is claimed and not sent goes back
					w.Header().Set("Retry-After", "0")
					w.WriteHeader(429)
					return
				}
				_, _ = io.WriteString(w, body)
			})
			n := crashMessages
			if testing.Short() {
				n = 200
			}
			r.fill("q", n)
			after := int64(n / 10)
			if at == dispatch.Delayed || at == dispatch.Released {
				after = 1
			}
			cfg := config(t, r, setup{cfg: func(c *dispatch.Config) { quick(c); c.OverloadCooldown = 200 * time.Millisecond }}, simple(g))
			first := startChild(t, order{cfg, at, after})
			if at == dispatch.Released { // a message is released if the gate closes between its claim and its sending
				go func() {
					time.Sleep(patience / 6)
					_ = first.cmd.Process.Kill()
				}()
			}
			if err := first.cmd.Wait(); err == nil {
				t.Fatal("the first dispatcher was not killed")
			}
			second := startChild(t, order{Config: cfg})
			seen := map[string]int{}
			for _, o := range r.results("result-list", n) {
				seen[o.ID]++
				if want := fmt.Sprintf(`{"prompt":"%s"}`, o.ID); *o.Payload != want {
					t.Errorf("%s: payload %s, want %s", o.ID, *o.Payload, want)
				}
			}
			second.end(t)
			if len(seen) != n {
				t.Errorf("results of %d requests, want each of %d once", len(seen), n)
			}
			if more, _ := r.LLen(context.Background(), "result-list").Result(); more != 0 {
				t.Errorf("%d results too many", more)
			}
			if left := r.left("q"); left != "" && left != "{q}:deliv" {
				t.Errorf("left in Redis: %s", left)
			}
			sent := map[string]int{}
			for _, b := range g.sent() {
				sent[b]++
			}
			twice := 0
			for _, times := range sent {
				twice += times - 1
			}
			refused := 0
			if at == dispatch.Delayed {
				refused = 20
			} else if at == dispatch.Released {
				refused = 1
			}
			if most := cfg.Concurrency + refused; twice > most {
				t.Errorf("%d inferences were done again, want no more than the %d in flight and refused", twice, most)
			}
			t.Logf("%d requests, %d inferences again", n, twice)
		})
	}
}

// TestRedisCrash kills Redis while requests are in flight, and starts it again: shorter than a lease
// lasts, and longer.
func TestRedisCrash(t *testing.T) {
	for _, away := range []time.Duration{500 * time.Millisecond, 4 * time.Second} {
		t.Run(away.String(), func(t *testing.T) {
			t.Parallel()
			r := startRedis(t)
			hold := make(chan struct{})
			var n atomic.Int64
			g := newGateway(t, func(w http.ResponseWriter, _ *http.Request, body string) {
				if n.Add(1) <= 8 {
					<-hold
				}
				_, _ = io.WriteString(w, body)
			})
			const all = 300
			r.fill("q", all)
			d := begin(t, r, setup{cfg: quick, beside: true}, simple(g))
			eventually(t, "all workers are at work", func() bool { return n.Load() >= 8 })
			r.kill()
			time.AfterFunc(away/2, func() { close(hold) }) // answers come while Redis is away
			time.Sleep(away)
			r.start()
			seen := map[string]bool{}
			for _, o := range r.results("result-list", all) {
				seen[o.ID] = true
			}
			if len(seen) != all {
				t.Errorf("results of %d requests, want %d", len(seen), all)
			}
			eventually(t, "nothing is left", func() bool { return r.left("q") == "" })
			d.stop()
			if more, _ := r.LLen(context.Background(), "result-list").Result(); more != 0 {
				t.Errorf("%d results too many", more)
			}
			if again := len(g.sent()) - all; again > 0 {
				t.Errorf("%d requests were sent again, though their dispatcher was alive", again)
			}
		})
	}
}

// TestPoison has a message that kills every dispatcher that gets it.
func TestPoison(t *testing.T) {
	r := startRedis(t)
	g := newGateway(t, nil)
	r.fill("q", 1)
	cfg := config(t, r, setup{cfg: func(c *dispatch.Config) { quick(c); c.LeaseTTL = time.Second; c.MaxDeliveries = 3 }}, simple(g))
	for range 3 {
		c := startChild(t, order{cfg, dispatch.Sending, 1})
		if err := c.cmd.Wait(); err == nil {
			t.Fatal("the dispatcher was not killed")
		}
	}
	c := startChild(t, order{cfg, dispatch.Sending, 1})
	o := r.results("result-list", 1)[0]
	if o.ErrorCode != "DELIVERY_LIMIT_EXCEEDED" || o.ID != "r0000" {
		t.Errorf("result %+v, want DELIVERY_LIMIT_EXCEEDED", o)
	}
	c.end(t)
	if letters, _ := r.XRange(context.Background(), "{q}:dead", "-", "+").Result(); len(letters) != 1 || letters[0].Values["reason"] != "delivery_limit" || letters[0].Values["deliveries"] != "3" {
		t.Errorf("dead letters %v", letters)
	}
}

// TestLeaseLoss stops a dispatcher for longer than its lease lasts. Who has taken over publishes the
// only result.
func TestLeaseLoss(t *testing.T) {
	r := startRedis(t)
	hold := make(chan struct{})
	var n atomic.Int64
	g := newGateway(t, func(w http.ResponseWriter, _ *http.Request, body string) {
		if n.Add(1) == 1 {
			<-hold
		}
		_, _ = io.WriteString(w, body)
	})
	r.fill("q", 1)
	cfg := config(t, r, setup{cfg: quick}, simple(g))
	first := startChild(t, order{Config: cfg})
	eventually(t, "the request is in flight", func() bool { return n.Load() == 1 })
	if err := first.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	second := startChild(t, order{Config: cfg})
	r.results("result-list", 1)
	if err := first.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	close(hold)
	first.end(t)
	second.end(t)
	if more, _ := r.LLen(context.Background(), "result-list").Result(); more != 0 {
		t.Errorf("%d results too many", more)
	}
	if !strings.Contains(first.err.String(), "lease was lost") && !strings.Contains(first.err.String(), "somebody else has the message") {
		t.Errorf("the first dispatcher has not noticed:\n%s", first.err)
	}
}
