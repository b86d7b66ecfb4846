package main

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"spillway/router"
	"spillway/worker"
)

var (
	abuseDuration = flag.Duration("abuse.duration", 8*time.Second, "how long TestAbuse goes on")
	abuseSeed     = flag.Uint64("abuse.seed", 0, "what TestAbuse does; 0 is something else each time")
	abuseRate     = flag.Float64("abuse.rate", 300, "requests per second of TestAbuse")
	abuseMeasured = flag.Bool("abuse.measured", false, "run TestAbuse's front end in a process of its own, and judge its memory")
)

const (
	abusedWorkers = 4
	abuseSpeed    = 20  // of the workers' clocks
	abuseClients  = 400 // at a time
	idlePerWorker = 256 // connections that a front end keeps to a worker
	connIdle      = 4 * time.Second
	memoryGrowth  = 1.3 // of the last third's median over the first's
)

// abuse is one run of TestAbuse.
type abuse struct {
	*fleet
	mode    router.Mode
	front   *frontend // nil if it is a process of its own
	seed    uint64
	workers []*victim
	load    tally
	samples []footprint
}

// footprint is what the front end's process holds at a moment.
type footprint struct{ heap, rss, goroutines, fds float64 }

// TestAbuse lets everything happen at once: workers are killed, stopped and restarted, have every
// fault, and thresholds change each second, while clients ask, leave, ask nonsense and fall
// silent. Every answer must be one of those documented; in the end nothing may be booked, open or
// running that was not before, and every request must succeed again. A longer run is
//
//	go test -race -run TestAbuse -timeout 30m ./cmd/spillway -abuse.duration 10m
func TestAbuse(t *testing.T) { inModes(t, testAbuse) }

func testAbuse(t *testing.T, mode router.Mode) {
	before := goleak.IgnoreCurrent()
	a := &abuse{mode: mode, seed: *abuseSeed, fleet: &fleet{t: t, http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}}}
	for a.seed == 0 {
		a.seed = rand.Uint64() >> 32
	}
	t.Logf("-abuse.seed %d -abuse.duration %v -abuse.rate %v, workers at %d times the speed", a.seed, *abuseDuration, *abuseRate, abuseSpeed)
	t.Cleanup(func() { goleak.VerifyNone(t, before) })
	t.Cleanup(func() {
		a.http.CloseIdleConnections()
		http.DefaultClient.CloseIdleConnections()
	})
	for i := range abusedWorkers {
		a.workers = append(a.workers, newVictim(t, &a.load, a.random(100+uint64(i))))
	}
	errors := a.serve()
	a.recovered("at the start")
	start := a.footprint()

	a.rage()
	defer a.report()

	for _, v := range a.workers {
		eventually(t, "faults are cleared", v.heal)
	}
	if status, body := ask(t, "DELETE", a.url+"/busy_threshold?model=sim-model", ""); status != 200 {
		t.Errorf("DELETE /busy_threshold = %d %s", status, body)
	}
	a.recovered("after all")
	a.lastRound()
	a.settled()
	a.remembered()
	for _, v := range a.workers {
		eventually(t, "nothing runs on a worker", v.idle)
	}
	a.returned(start)
	if s := errors.String(); s != "" {
		t.Errorf("the front end logged errors:\n%.2000s", s)
	}
}

func (a *abuse) random(stream uint64) *rand.Rand { return rand.New(rand.NewPCG(a.seed, stream)) }

// arguments are the front end's: every limit is short, so that all of them are met.
func (a *abuse) arguments() []string {
	var settings strings.Builder
	settings.WriteString("workers:\n")
	for _, v := range a.workers {
		fmt.Fprintf(&settings, "  - {url: '%s', kv_events_endpoint: 'tcp://127.0.0.1:%d', replay_endpoint: 'tcp://127.0.0.1:%d'}\n", v.url, v.port+1, v.port+2)
	}
	file := filepath.Join(a.t.TempDir(), "frontend.yaml")
	if err := os.WriteFile(file, []byte(settings.String()), 0o600); err != nil {
		a.t.Fatal(err)
	}
	args := []string{
		"--config", file, "--router-mode", string(a.mode), "--http-host", "127.0.0.1", "--http-port", "0", "--log-level", "error",
		"--scrape-interval", "100ms", "--health-interval", "500ms", "--health-timeout", "500ms",
		"--dial-timeout", "500ms", "--response-header-timeout", "3s", "--stream-inactivity-timeout", "2s", "--request-timeout", "20s",
		"--client-read-timeout", "5s", "--body-limit-mb", "1", "--migration-limit", "2",
		"--inhibited-duration", "300ms", "--cb-failure-threshold", "5", "--cb-open", "500ms",
		"--canary-after", "1s", "--canary-timeout", "1s", "--slot-max-age", "5s", "--sse-keep-alive-interval", "300ms",
	}
	if a.seed%2 == 0 {
		args = append(args, "--pre-commit-peek", "50ms")
	}
	return args
}

// serve runs the front end until the test ends. What it logs is errors alone.
func (a *abuse) serve() *output {
	if *abuseMeasured {
		p := start(a.t, nil, append([]string{"frontend"}, a.arguments()...)...)
		a.url = p.await(`Front end: (\S+)\n`)
		return &p.stderr
	}
	f, d, logged := serveFrontend(a.t, a.arguments()...)
	a.front, a.url = f, d.url()
	return logged
}

// rage does it all for the set time, and waits for the last client.
func (a *abuse) rage() {
	ctx, calm := context.WithTimeout(a.t.Context(), *abuseDuration)
	defer calm()
	var all sync.WaitGroup
	for i, v := range a.workers {
		all.Go(func() { v.suffer(ctx, a.random(200+uint64(i))) })
	}
	all.Go(func() { a.setFaults(ctx, a.random(1)) })
	all.Go(func() { a.setThresholds(ctx, a.random(2)) })
	all.Go(func() { a.send(ctx) })
	second := time.NewTicker(time.Second)
	defer second.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-second.C:
			a.samples = append(a.samples, a.footprint())
		}
	}
	all.Wait()
}

// page is /metrics by series.
func (a *abuse) page() map[string]float64 {
	a.t.Helper()
	status, text := fetch(a.t, a.url+"/metrics")
	if status != 200 {
		a.t.Fatalf("GET /metrics = %d", status)
	}
	page := map[string]float64{}
	for line := range strings.Lines(text) {
		if i := strings.LastIndexByte(line, ' '); i > 0 && line[0] != '#' {
			page[line[:i]], _ = strconv.ParseFloat(strings.TrimSpace(line[i:]), 64)
		}
	}
	return page
}

func (a *abuse) footprint() footprint {
	p := a.page()
	return footprint{p["go_memstats_heap_alloc_bytes"], p["process_resident_memory_bytes"], p["go_goroutines"], p["process_open_fds"]}
}

// recovered waits until every worker may be sent to again.
func (a *abuse) recovered(when string) {
	a.t.Helper()
	want := fmt.Sprintf(`"registered":%d,"routable":%[1]d,"busy":0,"free":%[1]d`, abusedWorkers)
	eventually(a.t, "all workers are well "+when, func() bool {
		_, ready := fetch(a.t, a.url+"/v1/models/sim-model/ready")
		if !strings.Contains(ready, want) {
			return false
		}
		for series, value := range a.page() {
			if strings.HasPrefix(series, "spillway_circuit_state") && value != 0 {
				return false
			}
		}
		return true
	})
}

// lastRound sends requests that must all succeed.
func (a *abuse) lastRound() {
	var clients sync.WaitGroup
	for i := range 16 {
		rng := a.random(300 + uint64(i))
		clients.Go(func() {
			for range 15 {
				r := goodRequest(rng)
				got, problem := a.ask(a.t.Context(), &r, rng)
				if problem != nil || got != whole {
					a.load.illegal("in the last round, %s %s: %s, %v", r.path, r.body, got, problem)
				}
			}
		})
	}
	clients.Wait()
}

// remembered compares what the front end knows of the workers' caches with what is in them.
func (a *abuse) remembered() {
	if a.mode != router.KV {
		return
	}
	ends := 0
	for _, v := range a.workers {
		ends += v.ends
	}
	a.t.Logf("%v restarts of engines are seen, of %d ends of workers", a.sum("spillway_kv_restarts_total"), ends)
	caches := func() (holdings, map[worker.Rank]uint64) {
		all, last := holdings{}, map[worker.Rank]uint64{}
		for _, v := range a.workers {
			cached, batch := cacheOf(a.t, v.url, func(int) worker.ID { return worker.DefaultID(v.url) })
			maps.Copy(all, cached)
			maps.Copy(last, batch)
		}
		return all, last
	}
	entries := func() int { return a.sum("spillway_kv_index_entries{") }
	if a.front == nil { // all that it tells is how many there are
		eventually(a.t, "as many blocks are known as there are", func() bool { all, _ := caches(); return entries() == all.blocks() })
		return
	}
	if want := follows(a.t, a.front, "in the end", caches).blocks(); entries() != want || want == 0 {
		a.t.Errorf("%d blocks are known, want %d, and some", entries(), want)
	}
}

// returned waits until the front end holds what it held at the start: connections to workers go
// when they have been idle for a while.
func (a *abuse) returned(start footprint) {
	a.http.CloseIdleConnections()
	var now footprint
	deadline := time.Now().Add(patience + connIdle)
	for {
		now = a.footprint()
		few := float64(4 * abusedWorkers) // canaries, scrapes and probes come and go
		if now.fds <= start.fds+few && now.goroutines <= start.goroutines+few {
			return
		}
		if time.Now().After(deadline) {
			a.t.Fatalf("in the end there are %v goroutines and %v open files, %v and %v at the start", now.goroutines, now.fds, start.goroutines, start.fds)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// report prints what happened, and judges what must not grow.
func (a *abuse) report() {
	for _, w := range a.load.wrong {
		a.t.Error(w)
	}
	if n := a.load.wrongs - len(a.load.wrong); n > 0 {
		a.t.Errorf("and %d more", n)
	}
	var restarts int
	for _, v := range a.workers {
		restarts += v.ends
	}
	a.t.Logf("%d ends of workers; answers:\n%s", restarts, a.load.String())
	if a.load.count(whole) == 0 || *abuseDuration >= time.Minute && a.load.count("503 overloaded") == 0 {
		a.t.Error("nothing was served, or in a minute nothing refused: that is no test")
	}
	for _, m := range []struct {
		name string
		of   func(footprint) float64
		unit float64
		top  float64 // of any sample, 0: any
		flat bool
	}{
		{"heap MiB", func(f footprint) float64 { return f.heap }, 1 << 20, 0, false},
		{"RSS MiB", func(f footprint) float64 { return f.rss }, 1 << 20, 0, true},
		{"goroutines", func(f footprint) float64 { return f.goroutines }, 1, 0, false},
		{"open files", func(f footprint) float64 { return f.fds }, 1, 3*abuseClients + abusedWorkers*idlePerWorker, false},
	} {
		var all []float64
		for _, s := range a.samples[min(len(a.samples), max(1, len(a.samples)/10)):] { // the rest is warm-up
			all = append(all, m.of(s)/m.unit)
		}
		if len(all) < 3 {
			continue
		}
		first, last := all[:len(all)/3], all[len(all)-len(all)/3:]
		a.t.Logf("%-10s first third %s, last third %s", m.name, spread(first), spread(last))
		if *abuseMeasured && m.flat && median(last) > memoryGrowth*median(first) {
			a.t.Errorf("%s: median grew from %.1f to %.1f", m.name, median(first), median(last))
		}
		if m.top > 0 && slices.Max(all) > m.top {
			a.t.Errorf("%s: up to %.0f, want at most %.0f", m.name, slices.Max(all), m.top)
		}
	}
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}

func spread(v []float64) string {
	return fmt.Sprintf("min %.1f median %.1f max %.1f", slices.Min(v), median(v), slices.Max(v))
}
