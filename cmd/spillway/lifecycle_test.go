package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"spillway/configs"
)

var (
	lifecycleCalls  = flag.Int("lifecycle.calls", 5000, "how many calls TestLifecycle makes")
	lifecycleExpiry = flag.Int("lifecycle.expiry", 1, "age in seconds at which its orphans expire")
	lifecycleSeed   = flag.Uint64("lifecycle.seed", 0, "what it does; 0 is something else each time")
)

const (
	lifecycleClients = 64
	heapGrowth       = 1.05 // of what is in use at the end over the start
)

// lifecycle is one run of TestLifecycle.
type lifecycle struct {
	t       *testing.T
	addr    string
	expiry  time.Duration
	seed    uint64
	sites   []site
	clients []*lifecycleClient
	quiet   int // goroutines when there is no connection
	expired int // requests that have, in the runs that are over
}

// TestLifecycle is random calls from 64 clients to one slot tracker that is never restarted. A
// tenth of the connections are cut in the middle of a call, and some requests are never freed. Now
// and then all clients stop, and every load must be that of a slow model. At the end all is freed or
// has expired, every load is zero, and the heap is as large as it was. The long runs are
//
//	go test -run '^TestLifecycle$' -timeout 60m -v ./cmd/spillway -lifecycle.calls 1000000 -lifecycle.expiry 5
//	go test -race -run '^TestLifecycle$' -timeout 60m -v ./cmd/spillway -lifecycle.calls 100000 -lifecycle.expiry 5
//
// A client does not know what became of a call whose connection it has cut. If it kept back a part of the
// request, nothing may have come of it. Otherwise it leaves that booking alone until the checkpoint,
// which waits until the server has done with all connections, and asks: an add, the end of a prefill or a
// free by making the same call again, which must be answered as either outcome has it, a
// registration by /workers. A booking of which an output block is in doubt is freed. Of a booking that
// is old enough to have expired it asks whether it is there, before and after it reads the loads,
// and reads them again if that has changed.
func TestLifecycle(t *testing.T) {
	before := goleak.IgnoreCurrent()
	l := &lifecycle{t: t, expiry: time.Duration(*lifecycleExpiry) * time.Second, seed: *lifecycleSeed}
	for l.seed == 0 {
		l.seed = rand.Uint64() >> 32
	}
	long := *lifecycleCalls >= 1_000_000 // so that memory can be judged, in a heap that is not all odds and ends
	if l.sites = sites(10); long {
		l.sites = sites(1000)
	}
	checkpoints := min(100, *lifecycleCalls/250)
	each := 1 + (*lifecycleCalls-1)/(checkpoints*lifecycleClients)
	t.Logf("-lifecycle.seed %d -lifecycle.calls %d -lifecycle.expiry %d: %d checkpoints", l.seed, *lifecycleCalls, *lifecycleExpiry, checkpoints)
	stop := l.serve()
	l.registerAll()
	l.drained()
	cold := heapInUse()
	if long { // what a server comes to hold in use is there at the start
		l.run(checkpoints/2, each)
	}
	start := heapInUse()
	l.run(checkpoints, each)
	end := heapInUse()
	t.Logf("HeapInuse after two collections: %.3f MiB before any call, %.3f at the start, %.3f at the end, ratio %.3f",
		mib(cold), mib(start), mib(end), float64(end)/float64(start))
	if long && float64(end) > heapGrowth*float64(start) {
		t.Errorf("HeapInuse is %d bytes at the end, and was %d at the start", end, start)
	}
	if err := stop(); err != nil {
		t.Errorf("slot tracker: %v", err)
	}
	goleak.VerifyNone(t, before)
}

// run makes each client make so many calls before each of some checkpoints, and ends with empty books.
func (l *lifecycle) run(checkpoints, each int) {
	l.t.Helper()
	l.seed++
	for i := range lifecycleClients {
		l.clients = append(l.clients, newLifecycleClient(l, i))
	}
	began, most := time.Now(), 0
	for range checkpoints {
		var all sync.WaitGroup
		for _, c := range l.clients {
			all.Go(func() { c.live(each) })
		}
		all.Wait()
		most = max(most, l.checkpoint())
		if l.t.Failed() {
			l.t.FailNow()
		}
	}
	took := time.Since(began)
	sum := l.finish()
	l.clients = nil
	l.drained()
	l.t.Logf("%d calls in %v (%.0f/s) over %d connections, of which %d were cut: %d calls can not have arrived, %d may have",
		sum.calls, took.Round(time.Millisecond), float64(sum.calls)/took.Seconds(), sum.conns, sum.unsent+sum.unheard, sum.unsent, sum.unheard)
	l.t.Logf("%d bookings, at most %d at one of %d checkpoints; %d expired, and %d may have; %d were asked for at checkpoints",
		sum.adds, most, checkpoints, sum.expired, sum.maybe, sum.asked)
}

func mib(bytes uint64) float64 { return float64(bytes) / (1 << 20) }

// heapInUse is what the heap takes after two collections, the first of which empties pools.
func heapInUse() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse
}

// serve runs `spillway slot-tracker` in this process.
func (l *lifecycle) serve() (stop func() error) {
	cfg := configs.DefaultSlotTracker()
	cfg.Service.Host, cfg.Service.Port = "127.0.0.1", 0
	cfg.Service.ExpireAfterSecs, cfg.Service.ExpiryInterval = uint64(*lifecycleExpiry), 200*time.Millisecond
	if err := cfg.Validate(); err != nil {
		l.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	var said output
	go func() { ended <- runSlotTracker(ctx, process{stdout: &said}, cfg, slog.New(slog.DiscardHandler)) }()
	stop = sync.OnceValue(func() error { cancel(); return <-ended })
	l.t.Cleanup(func() { _ = stop() }) // if the test has failed before
	eventually(l.t, "the slot tracker listens", func() bool {
		_, address, ok := strings.Cut(said.String(), "http://")
		l.addr = strings.TrimSpace(address)
		return ok
	})
	return stop
}

// drained waits until the server has done with every connection, and with all that came over it.
func (l *lifecycle) drained() {
	l.t.Helper()
	c := dialTracker(l.t, l.addr) // connections are accepted in their order: after this one, none is left to be
	if status, _ := c.do("GET", "/health", ""); status != 200 {
		l.t.Fatalf("GET /health = %d", status)
	}
	c.close()
	if l.quiet == 0 { // the first time: nobody else has connected yet
		time.Sleep(100 * time.Millisecond)
		l.quiet = runtime.NumGoroutine()
		return
	}
	eventually(l.t, "no connection is left", func() bool { return runtime.NumGoroutine() <= l.quiet })
}

// registerAll registers the workers that all clients book on, and that stay.
func (l *lifecycle) registerAll() {
	c := dialTracker(l.t, l.addr)
	defer c.close()
	for _, s := range l.sites {
		for w := range s.workers {
			if status, answer := c.do("POST", "/register", registration(s.Partition, uint64(w), s.ranks)); status != 201 {
				l.t.Fatalf("register: %d %s", status, answer)
			}
		}
	}
}

// checkpoint compares all loads with the model while no client calls. It returns how many bookings
// there are.
func (l *lifecycle) checkpoint() (bookings int) {
	l.t.Helper()
	l.drained()
	c := dialTracker(l.t, l.addr)
	defer c.close()
	for _, client := range l.clients {
		client.resolve(c)
	}
	for {
		l.askOld(c)
		m := l.model()
		want := m.loads()
		_, got := c.do("GET", "/loads", "")
		var wrong string
		if !bytes.Equal(got, want) {
			wrong = difference(got, want)
		}
		for _, q := range l.prospects() {
			_, got := c.do("POST", "/potential_loads", q.body())
			if w := m.potential(q); !sameElements(got, w) {
				wrong += fmt.Sprintf("potential loads for %s:\n%s", q.body(), difference(got, w))
			}
		}
		if l.askOld(c) > 0 && !l.t.Failed() { // which ends, since nothing is booked meanwhile
			continue
		}
		if wrong != "" {
			l.t.Errorf("with %d bookings:\n%s", m.bookings, wrong)
		}
		return m.bookings
	}
}

// askOld asks for all bookings that may have expired, and forgets those that have.
func (l *lifecycle) askOld(c *trackerConn) (gone int) {
	for _, client := range l.clients {
		gone += client.askOld(c)
	}
	return gone
}

// finish frees what clients still want to free, and waits for the rest to expire. All loads are zero
// then, and the server has counted as many expired requests as there were.
func (l *lifecycle) finish() (sum tallies) {
	l.t.Helper()
	c := dialTracker(l.t, l.addr)
	defer c.close()
	for _, client := range l.clients {
		client.leave(c)
		sum.plus(client.tallies)
	}
	zero := l.model().loads()
	eventually(l.t, "all loads to be zero", func() bool {
		_, got := c.do("GET", "/loads", "")
		return bytes.Equal(got, zero)
	})
	_, page := c.do("GET", "/metrics", "")
	_, line, _ := strings.Cut(string(page), "\nspillway_tracker_expired_requests_total ")
	var total int
	if _, err := fmt.Sscan(line, &total); err != nil {
		l.t.Errorf("expired requests: %v", err)
	}
	if n := total - l.expired; n < sum.expired || n > sum.expired+sum.maybe || n == 0 {
		l.t.Errorf("%d requests have expired; want from %d to %d, and some", n, sum.expired, sum.expired+sum.maybe)
	}
	l.expired = total
	return sum
}
