package monitor_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"spillway/busy"
	"spillway/monitor"
	"spillway/worker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// books is a log that can be read while it is written.
type books struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *books) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *books) count(part string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Count(b.buf.String(), part)
}

// rig is a monitor with one list, and what it logs and counts.
type rig struct {
	*monitor.KvWorkerMonitor
	list *busy.List
	log  *books
	reg  *prometheus.Registry
}

func newRig(cfg monitor.Config, thresholds busy.Thresholds) *rig {
	b := busy.DefaultConfig()
	b.ActiveDecodeBlocksThreshold = thresholds.DecodeFrac
	r := &rig{list: busy.New(b, nil), log: &books{}, reg: prometheus.NewRegistry()}
	r.KvWorkerMonitor = monitor.New(cfg, slog.New(slog.NewTextHandler(r.log, nil)), r.reg)
	return r
}

// run runs the monitor until the test ends or stop is called.
func (r *rig) run(t *testing.T) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// add registers and watches a worker.
func (r *rig) add(t *testing.T, w worker.Worker) *worker.Worker {
	t.Helper()
	if w.Models == nil {
		w.Models = []string{"m"}
	}
	w, err := w.Normalize()
	if err != nil {
		t.Fatal(err)
	}
	r.list.Register(&w, time.Now())
	r.Watch(&w, r.list)
	return &w
}

// status is the list's view of a worker in a few words.
func (r *rig) status(id worker.ID) string {
	for _, s := range r.list.Workers(time.Now()) {
		if s.ID != id {
			continue
		}
		out := string(s.State)
		for _, rank := range s.Ranks {
			out += fmt.Sprintf(" r%d", rank.DP)
			if p := rank.Report; p.UsedKnown {
				out += fmt.Sprintf(" %d/%d", p.UsedBlocks, p.TotalBlocks)
			} else if p.UsageRatio > 0 {
				out += fmt.Sprintf(" %v", p.UsageRatio)
			}
		}
		return out
	}
	return "unregistered"
}

// errors is the value of spillway_scrape_errors_total, or -1 if there is no such series.
func (r *rig) errors(t *testing.T, worker, reason string) float64 {
	t.Helper()
	families, err := r.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			l := m.GetLabel()
			if f.GetName() == "spillway_scrape_errors_total" && l[0].GetValue() == reason && l[1].GetValue() == worker {
				return m.GetCounter().GetValue()
			}
		}
	}
	return -1
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("never: %s", what)
}

// soon is the ID of a worker whose turn is early in any interval.
func soon() worker.ID {
	id := worker.ID(1)
	for monitor.Spread(id, time.Second) > time.Millisecond {
		id++
	}
	return id
}

func fast() monitor.Config {
	cfg := monitor.DefaultConfig()
	cfg.ScrapeInterval, cfg.ScrapeTimeout, cfg.HealthInterval = 20*time.Millisecond, time.Second, 0
	return cfg
}

// serve is a server that does not complain about what tests do to it.
func serve(h http.HandlerFunc) *httptest.Server {
	srv := httptest.NewUnstartedServer(h)
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	srv.Start()
	return srv
}

const goodPage = `vllm:kv_cache_usage_perc{engine="0"} 0.87
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1
process_start_time_seconds 1000
`

// A page of each bad kind comes after a good one, whose values stay.
func TestBadPages(t *testing.T) {
	// Comments, because so many samples take a busy machine too long.
	comment := []byte("# " + strings.Repeat("x", 1021) + "\n")
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	io.WriteString(z, goodPage)
	for range 17 << 20 / len(comment) {
		z.Write(comment)
	}
	z.Close()
	hang := make(chan struct{})
	for _, tt := range []struct {
		name, reason string
		answer       http.HandlerFunc
		large        bool
	}{
		{"20 status 500", "status", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusInternalServerError)
			io.WriteString(w, goodPage)
		}, false},
		{"20 timeout", "timeout", func(_ http.ResponseWriter, r *http.Request) {
			select {
			case <-r.Context().Done():
			case <-hang:
			}
		}, false},
		{"20 timeout inside the page", "timeout", func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, goodPage)
			w.(http.Flusher).Flush()
			select {
			case <-r.Context().Done():
			case <-hang:
			}
		}, false},
		{"20 HTML", "missing_metric", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "<html>\n<p>vllm</p>\n</html>\n") }, false},
		{"empty", "missing_metric", func(http.ResponseWriter, *http.Request) {}, false},
		{"garbage", "parse", func(w http.ResponseWriter, _ *http.Request) {
			w.Write([]byte("vllm:kv_cache_usage_perc{\x00\xff} 1\n"))
		}, false},
		{"NaN", "parse", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "vllm:kv_cache_usage_perc NaN\n") }, false},
		{"huge", "parse", func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, goodPage)
			for range 17 << 20 / len(comment) {
				w.Write(comment)
			}
		}, true},
		{"gzip bomb", "parse", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			w.Write(bomb.Bytes())
		}, true},
		{"redirect", "status", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/elsewhere", http.StatusFound) }, false},
		{"reset", "connect", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, false},
		{"cut before the first line ends", "parse", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100000")
			io.WriteString(w, "vllm:kv_cache_usage_pe")
		}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var bad atomic.Bool
			srv := serve(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/elsewhere" {
					t.Error("a redirect was followed")
				}
				if bad.Load() {
					tt.answer(w, r)
					return
				}
				io.WriteString(w, goodPage)
			})
			t.Cleanup(srv.Close)
			cfg := fast()
			switch {
			case tt.large: // needs time on a busy machine
				cfg.ScrapeInterval, cfg.ScrapeTimeout = 3*time.Second, 3*time.Second
			case tt.reason != "timeout":
				cfg.ScrapeInterval = time.Second
			}
			t.Parallel()
			r := newRig(cfg, busy.Thresholds{})
			w := r.add(t, worker.Worker{ID: soon(), Endpoint: srv.URL, Name: "w"})
			stop := r.run(t)
			const want = "free r0 870/1000"
			eventually(t, "a first sample", func() bool { return r.status(w.ID) == want })
			bad.Store(true)
			eventually(t, "an error of reason "+tt.reason, func() bool { return r.errors(t, "w", tt.reason) > 0 })
			if got := r.status(w.ID); got != want {
				t.Errorf("after a bad page: %s, want %s", got, want)
			}
			bad.Store(false)
			stop()
			if n := r.log.count("cannot be read"); n != 1 {
				t.Errorf("%d warnings, want 1:\n%s", n, &r.log.buf)
			}
		})
	}
}

func TestScrapeLoop(t *testing.T) {
	simDP2, err := os.ReadFile("testdata/sim_dp2.txt")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name  string
		w     worker.Worker
		pages []string // the last repeats
		want  string
	}{
		{"01", worker.Worker{}, []string{goodPage}, "busy r0 870/1000"},
		{"10 a lone label is rank 0", worker.Worker{}, []string{`vllm:kv_cache_usage_perc{engine="3"} 0.9` + "\n"}, "busy r0 0.9"},
		{"11 declared ranks", worker.Worker{DPStart: 4, DPSize: 2},
			[]string{`vllm:kv_cache_usage_perc{engine="4"} 0.9` + "\n" + `vllm:kv_cache_usage_perc{engine="5"} 0.1` + "\n"},
			"free r4 0.9 r5 0.1"},
		{"19 cut short in transit", worker.Worker{}, []string{"cut:" + goodPage + "vllm:num_re"}, "busy r0 870/1000"},
		{"22 restart", worker.Worker{}, []string{goodPage, "vllm:num_requests_running 0\nprocess_start_time_seconds 2000\n"}, "free r0"},
		{"compressed", worker.Worker{}, []string{"gzip:" + goodPage}, "busy r0 870/1000"},
		{"spillway sim", worker.Worker{}, []string{string(simDP2)}, "free r0 0/512 r1 92/512"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var served atomic.Int64
			srv := serve(func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Authorization") != "Bearer key" || r.Header.Get("Accept") != "text/plain" || r.URL.Path != "/metrics" {
					t.Errorf("asked %s with %v", r.URL, r.Header)
				}
				page := tt.pages[min(int(served.Add(1)), len(tt.pages))-1]
				if body, ok := strings.CutPrefix(page, "gzip:"); ok {
					w.Header().Set("Content-Encoding", "gzip")
					z := gzip.NewWriter(w)
					defer z.Close()
					io.WriteString(z, body)
				} else if body, ok := strings.CutPrefix(page, "cut:"); ok {
					w.Header().Set("Content-Length", "100000")
					io.WriteString(w, body)
				} else {
					io.WriteString(w, page)
				}
			})
			t.Cleanup(srv.Close)
			r := newRig(fast(), busy.Thresholds{DecodeFrac: new(0.85)})
			tt.w.Endpoint, tt.w.APIKey = srv.URL, "key"
			w := r.add(t, tt.w)
			var restarted atomic.Int64
			r.Restarted = func(id worker.ID) {
				if restarted.Add(1); id != w.ID {
					t.Errorf("worker %v began anew, want %v", id, w.ID)
				}
			}
			r.run(t)
			eventually(t, tt.want, func() bool { return r.status(w.ID) == tt.want })
			eventually(t, "it is told that the worker began anew, once", func() bool {
				return restarted.Load() == int64(strings.Count(tt.name, "restart"))
			})
		})
	}
}

// A worker that hangs is forgotten and the monitor stopped at once; no series stays.
func TestForgetWhileScraping(t *testing.T) {
	asked, stopped := make(chan struct{}, 100), make(chan struct{}, 100)
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		asked <- struct{}{}
		<-r.Context().Done()
		stopped <- struct{}{}
	}))
	t.Cleanup(srv.Close)
	cfg := fast()
	cfg.ScrapeInterval, cfg.ScrapeTimeout = time.Minute, time.Minute
	r := newRig(cfg, busy.Thresholds{})
	w := worker.Worker{ID: soon(), Endpoint: srv.URL, Name: "w"}
	id := r.add(t, w).ID
	stop := r.run(t)
	<-asked
	r.Forget(id)
	<-stopped
	if got := r.errors(t, "w", "timeout"); got != -1 {
		t.Errorf("after Forget there still is a series, with value %v", got)
	}
	if r.log.count("level=") > 0 {
		t.Errorf("forgetting was logged as something else:\n%s", &r.log.buf)
	}
	r.add(t, w)
	<-asked
	stop()
	<-stopped
}

func TestWatchBeforeAndDuringRun(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, goodPage) }))
	t.Cleanup(srv.Close)
	r := newRig(fast(), busy.Thresholds{})
	r.run(t)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for n := range 20 {
				w, err := worker.Worker{ID: worker.ID(i + 1), Name: fmt.Sprint(i), Endpoint: srv.URL, Models: []string{"m"}}.Normalize()
				if err != nil {
					t.Error(err)
				}
				r.list.Register(&w, time.Now())
				r.Watch(&w, r.list)
				if n%2 == 0 && n < 19 {
					r.Forget(w.ID)
				}
			}
		})
	}
	wg.Wait()
	if err := r.Run(t.Context()); err != monitor.ErrRunning {
		t.Errorf("a second Run returned %v, want %v", err, monitor.ErrRunning)
	}
	eventually(t, "samples of all workers", func() bool {
		for i := range 8 {
			if r.status(worker.ID(i+1)) != "free r0 870/1000" {
				return false
			}
		}
		return true
	})
}
