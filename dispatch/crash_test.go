package dispatch_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/dispatch"
)

// asDispatcher and asGateway in the environment make this test binary one of them.
const (
	asDispatcher = "RUN_AS_DISPATCHER"
	asGateway    = "RUN_AS_GATEWAY"
)

// order is what a dispatcher's process is told.
type order struct {
	Config dispatch.Config
	At     dispatch.Step // "" for never
	After  int64         // so many messages have got so far
	Tell   string        // URL that is then asked, with our process ID behind it, before the last of them goes on

	Profile string // file for a CPU profile, or ""
}

// lazyCollector is about what cmd/spillway has the collector do while the heap is small.
const lazyCollector = 400

func TestMain(m *testing.M) {
	if text := os.Getenv(asDispatcher); text != "" {
		beDispatcher(text)
	}
	if addr := os.Getenv(asGateway); addr != "" {
		beGateway(addr)
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
		if s == o.At && n.Add(1) == o.After {
			tell(o.Tell + strconv.Itoa(os.Getpid()))
		}
	}
	if o.Profile != "" {
		f, err := os.Create(o.Profile)
		if err != nil {
			panic(err)
		}
		if err := pprof.StartCPUProfile(f); err != nil {
			panic(err)
		}
	}
	debug.SetGCPercent(lazyCollector)
	runtime.GOMAXPROCS(1) // as cmd/spillway has it
	ctx, stop := context.WithCancel(context.Background())
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); stop() }() // our parent has closed it, or is gone
	if err := d.Run(ctx); err != nil {
		panic(err)
	}
	pprof.StopCPUProfile()
	os.Exit(0)
}

// tell asks a URL of our parent, who may kill us meanwhile.
func tell(url string) {
	resp, err := http.Post(url, "", nil)
	if err != nil {
		panic(err)
	}
	_ = resp.Body.Close()
}

// onTelling is a URL for Tell, and what it does with the process that asks.
func onTelling(t *testing.T, do func(pid int)) string {
	s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		pid, err := strconv.Atoi(strings.TrimPrefix(r.URL.Path, "/"))
		if err != nil {
			t.Errorf("asked for %s", r.URL)
			return
		}
		do(pid)
	}))
	t.Cleanup(s.Close)
	return s.URL + "/"
}

// beGateway answers with what it is sent, and tells its parent of each request before that.
func beGateway(text string) {
	addr, parent, _ := strings.Cut(text, " ")
	ln, err := net.Listen("tcp", addr)
	for deadline := time.Now().Add(patience); err != nil; ln, err = net.Listen("tcp", addr) {
		if time.Now().After(deadline) {
			panic(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); os.Exit(0) }()
	panic(http.Serve(ln, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		req, err := http.NewRequestWithContext(r.Context(), http.MethodPost, parent, bytes.NewReader(body))
		if err != nil {
			panic(err)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return // we are no longer asked
		}
		defer resp.Body.Close()
		w.WriteHeader(resp.StatusCode)
		_, _ = io.Copy(w, resp.Body)
	})))
}

// child is such a process.
type child struct {
	cmd   *exec.Cmd
	stdin io.Closer
	err   *strings.Builder // to be read when it has ended
}

func startChild(t *testing.T, o order, env ...string) *child {
	t.Helper()
	text, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	return startSelf(t, append(env, asDispatcher+"="+string(text))...)
}

func startSelf(t *testing.T, env ...string) *child {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := &child{cmd: exec.Command(self), err: &strings.Builder{}}
	c.cmd.Env = append(os.Environ(), env...)
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

// fill enqueues requests whose prompts are their numbers.
func (s *server) fill(queue string, n int) {
	s.t.Helper()
	for i := range n {
		s.enqueue(queue, fmt.Sprintf("r%04d", i), fmt.Sprintf(`{"prompt":"r%04d"}`, i))
	}
}

// TestRedisCrash kills Redis while requests of two dispatchers are in flight, and starts it again:
// after less than a lease lasts, and after more. Who lives keeps its leases: neither takes over what
// the other is working on.
func TestRedisCrash(t *testing.T) {
	const lease = 9 * time.Second // renewed every 3 s; who reaps waits 6 s after an outage
	for _, away := range []time.Duration{time.Second, lease + 2*time.Second} {
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
			var both []*running
			for range 2 {
				both = append(both, begin(t, r, setup{cfg: func(c *dispatch.Config) { quick(c); c.LeaseTTL, c.Concurrency = lease, 4 }, beside: true}, simple(g)))
			}
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
			for _, d := range both {
				d.stop()
				if lost, again := d.metric("leases_lost_total"), d.metric("redelivered_total"); lost+again != 0 {
					t.Errorf("%v leases were lost and %v messages taken over, though both dispatchers were alive", lost, again)
				}
			}
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
	o := order{Config: cfg, At: dispatch.Sending, After: 1, Tell: onTelling(t, func(pid int) { _ = syscall.Kill(pid, syscall.SIGKILL) })}
	for range 3 {
		if err := startChild(t, o).cmd.Wait(); err == nil {
			t.Fatal("the dispatcher was not killed")
		}
	}
	c := startChild(t, o)
	got := r.results("result-list", 1)[0]
	if got.ErrorCode != "DELIVERY_LIMIT_EXCEEDED" || got.ID != "r0000" {
		t.Errorf("result %+v, want DELIVERY_LIMIT_EXCEEDED", got)
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
