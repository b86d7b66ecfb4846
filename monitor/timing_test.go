package monitor_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"spillway/busy"
	"spillway/monitor"
	"spillway/worker"
)

// fake answers without a network, in the virtual time of a synctest bubble.
type fake struct {
	mu     sync.Mutex
	answer map[string]string        // by path; "" or none is no answer at all
	asked  map[string][]time.Time   // by path
	delay  map[string]time.Duration // by path
}

func newFake(answers map[string]string) *fake {
	return &fake{answer: answers, asked: map[string][]time.Time{}, delay: map[string]time.Duration{}}
}

func (f *fake) RoundTrip(r *http.Request) (*http.Response, error) {
	f.mu.Lock()
	f.asked[r.URL.Path] = append(f.asked[r.URL.Path], time.Now())
	body, delay := f.answer[r.URL.Path], f.delay[r.URL.Path]
	f.mu.Unlock()
	select {
	case <-time.After(delay):
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	if body == "" {
		return nil, errors.New("refused")
	}
	return &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(body)), Request: r}, nil
}

func (f *fake) set(path, body string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answer[path] = body
}

// count is how often path was asked for.
func (f *fake) count(path string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.asked[path])
}

// gaps are the times between the questions for path from the nth on, as a list of seconds.
func (f *fake) gaps(path string, n int) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []string
	for i := n; i < len(f.asked[path]); i++ {
		out = append(out, f.asked[path][i].Sub(f.asked[path][i-1]).Round(time.Millisecond).String())
	}
	return strings.Join(out, " ")
}

// bubble runs f in virtual time with a running monitor and one worker that is in its list.
func bubble(t *testing.T, cfg monitor.Config, answers map[string]string, set func(*rig), f func(*rig, *fake, worker.ID)) {
	synctest.Test(t, func(t *testing.T) {
		net := newFake(answers)
		r := newRig(cfg, busy.Thresholds{DecodeFrac: new(0.85)})
		r.Via(net)
		if set != nil {
			set(r)
		}
		w := r.add(t, worker.Worker{ID: 1, Endpoint: "http://worker", Name: "w"})
		stop := r.run(t)
		f(r, net, w.ID)
		stop()
	})
}

func TestScrapeSchedule(t *testing.T) {
	slow, off := monitor.DefaultConfig(), monitor.DefaultConfig()
	slow.ScrapeInterval = 8 * time.Second
	off.ScrapeInterval = 0
	quick := monitor.DefaultConfig()
	quick.ScrapeInterval = 50 * time.Millisecond
	for _, tt := range []struct {
		name string
		cfg  monitor.Config
		page string
		need func() bool
		span time.Duration
		want string
	}{
		{"each interval", monitor.DefaultConfig(), goodPage, nil, 5 * time.Second, "1s 1s 1s 1s"},
		{"back-off", monitor.DefaultConfig(), "", nil, 12 * time.Second, "1s 1s 4s 4s"},
		{"no back-off while there is something to use", monitor.DefaultConfig(), "vllm:num_requests_running 1\n", nil, 5 * time.Second, "1s 1s 1s 1s"},
		{"back-off of a short interval", quick, "", nil, 600 * time.Millisecond, "50ms 50ms 200ms 200ms"},
		{"back-off never shortens", slow, "", nil, 40 * time.Second, "8s 8s 8s 8s"},
		{"no need", monitor.DefaultConfig(), goodPage, func() bool { return false }, 50 * time.Second, "15s 15s 15s"},
		{"off", off, goodPage, nil, time.Minute, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, tt.cfg, map[string]string{"/metrics": tt.page}, func(r *rig) { r.Needed = tt.need },
				func(r *rig, net *fake, _ worker.ID) {
					time.Sleep(tt.span)
					if got := net.gaps("/metrics", 1); got != tt.want {
						t.Errorf("scrapes in %v are %s apart, want %s", tt.span, got, tt.want)
					}
				})
		})
	}
}

func TestScrapeRecovers(t *testing.T) {
	bubble(t, monitor.DefaultConfig(), map[string]string{"/health": " "}, nil, func(r *rig, net *fake, id worker.ID) {
		time.Sleep(10 * time.Second)
		net.set("/metrics", goodPage)
		time.Sleep(5 * time.Second)
		n := net.count("/metrics")
		time.Sleep(3 * time.Second)
		if got := net.gaps("/metrics", n+1); got != "1s 1s" {
			t.Errorf("after recovery scrapes are %s apart, want 1s 1s", got)
		}
		if got := r.status(id); got != "busy r0 870/1000" {
			t.Errorf("after recovery the worker is %s", got)
		}
		if warned, told := r.log.count("cannot be read"), r.log.count("can be read again"); warned != 1 || told != 1 {
			t.Errorf("logged %d failures and %d recoveries, want 1 and 1", warned, told)
		}
	})
}

// The sample bears the time of the question, so that an answer that was under way when a mark
// was made does not end it.
func TestTakenAt(t *testing.T) {
	cfg := monitor.DefaultConfig()
	cfg.ScrapeInterval = 10 * time.Second
	bubble(t, cfg, map[string]string{"/metrics": goodPage}, nil, func(r *rig, net *fake, id worker.ID) {
		net.delay["/metrics"] = 600 * time.Millisecond
		for len(r.list.Workers(time.Now())[0].Ranks) == 0 || !r.list.Workers(time.Now())[0].Ranks[0].Sampled {
			time.Sleep(time.Millisecond)
		}
		if got := r.list.Workers(time.Now())[0].Ranks[0].Age; got < 600*time.Millisecond {
			t.Errorf("a sample that took 600ms is %v old on arrival", got)
		}
	})
}

func TestHealth(t *testing.T) {
	for _, tt := range []struct {
		name    string
		answers string // of probes, one after another: + or -
		want    string // state after each: r routable, u unhealthy
	}{
		{"three failures, two successes", "+---++", "rrruur"},
		{"a success in between", "--+--+", "rrrrrr"},
		{"a failure in between", "---+-++", "rruuuur"},
		{"never probed before", "---", "rru"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := monitor.DefaultConfig()
			cfg.ScrapeInterval = 0
			bubble(t, cfg, map[string]string{}, nil, func(r *rig, net *fake, id worker.ID) {
				time.Sleep(monitor.Spread(id, 5*time.Second) - 10*time.Millisecond)
				got := ""
				for _, a := range tt.answers {
					net.set("/health", strings.ReplaceAll(string(a), "-", ""))
					time.Sleep(20 * time.Millisecond)
					state := "r"
					if !slices.Contains(r.list.Snapshot().Routable, id) {
						state = "u"
					}
					got += state
					time.Sleep(5*time.Second - 20*time.Millisecond)
				}
				if got != tt.want {
					t.Errorf("probes %s leave the worker %s, want %s", tt.answers, got, tt.want)
				}
			})
		})
	}
}

func TestProbeEndsInhibition(t *testing.T) {
	bubble(t, monitor.DefaultConfig(), map[string]string{"/health": " ", "/metrics": goodPage}, nil, func(r *rig, _ *fake, id worker.ID) {
		time.Sleep(12 * time.Second)
		now := time.Now()
		r.list.Inhibit(id, now.Add(time.Hour), now)
		time.Sleep(5 * time.Second)
		if len(r.list.Snapshot().Routable) != 1 {
			t.Error("a probe that passed did not end the inhibition")
		}
		r.list.Inhibit(id, time.Now().Add(300*time.Millisecond), time.Now())
		time.Sleep(500 * time.Millisecond)
		if len(r.list.Snapshot().Routable) != 1 {
			t.Error("an inhibition did not end by itself: nobody calls Tick")
		}
	})
}

func TestAsleep(t *testing.T) {
	state := func(awake int) string {
		return goodPage + fmt.Sprintf("vllm:engine_sleep_state{engine=\"0\",sleep_state=\"awake\"} %d\n", awake)
	}
	bubble(t, monitor.DefaultConfig(), map[string]string{"/health": " ", "/metrics": state(1)}, nil, func(r *rig, net *fake, id worker.ID) {
		for _, awake := range []int{1, 0, 0, 1} {
			net.set("/metrics", state(awake))
			time.Sleep(20 * time.Second) // healthy probes in between do not wake it
			if got := len(r.list.Snapshot().Routable); got != awake {
				t.Errorf("awake %d: %d workers routable", awake, got)
			}
		}
	})
}

func TestOutageIsLogged(t *testing.T) {
	for _, isBusy := range []bool{false, true} {
		bubble(t, monitor.DefaultConfig(), map[string]string{"/metrics": goodPage}, func(r *rig) { r.StaleIsBusy = isBusy },
			func(r *rig, net *fake, _ worker.ID) {
				time.Sleep(5 * time.Second)
				if n := r.log.count("level=ERROR"); n != 0 {
					t.Errorf("%d errors before the outage", n)
				}
				net.set("/metrics", "")
				time.Sleep(34 * time.Second)
				net.set("/metrics", goodPage)
				time.Sleep(20 * time.Second)
				want := 0
				if isBusy {
					want = 4 // from the third failure on, every 10 s
				}
				if n := r.log.count("level=ERROR"); n != want || n > 0 && r.log.count("reason=connect") < n {
					t.Errorf("stale is busy: %v: %d errors in an outage of 34s, want %d\n%s", isBusy, n, want, &r.log.buf)
				}
			})
	}
}

func TestDisagreement(t *testing.T) {
	idle := "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n" + goodPage
	working := strings.Replace(idle, "running 0", "running 1", 1)
	for _, tt := range []struct {
		name  string
		pages []string
		held  bool
		want  int
	}{
		{"idle with old reservations", []string{idle, idle, idle, idle, idle}, true, 1},
		{"twice", []string{idle, idle, idle, working, idle, idle, idle}, true, 2},
		{"not three in a row", []string{idle, idle, working, idle, idle, working}, true, 0},
		{"nothing held", []string{idle, idle, idle, idle}, false, 0},
		{"nothing said", []string{goodPage, goodPage, goodPage, goodPage}, true, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			set := func(r *rig) {
				r.Held = func(rank worker.Rank, _ time.Time) bool {
					if rank != (worker.Rank{Worker: 1}) {
						t.Errorf("asked for rank %v", rank)
					}
					return tt.held
				}
			}
			bubble(t, monitor.DefaultConfig(), map[string]string{}, set, func(r *rig, net *fake, id worker.ID) {
				net.set("/metrics", tt.pages[0])
				time.Sleep(monitor.Spread(id, time.Second) + 500*time.Millisecond)
				for _, p := range tt.pages[1:] {
					net.set("/metrics", p)
					time.Sleep(time.Second)
				}
				if got := r.log.count("old reservations"); got != tt.want {
					t.Errorf("%d warnings, want %d\n%s", got, tt.want, &r.log.buf)
				}
			})
		})
	}
}

func TestSpread(t *testing.T) {
	var parts [10]int
	for id := range 1000 {
		d := monitor.Spread(worker.ID(id), time.Second)
		if d < 0 || d >= time.Second {
			t.Fatalf("worker %d starts after %v, not within a second", id, d)
		}
		parts[d/(100*time.Millisecond)]++
	}
	for i, n := range parts {
		if n < 80 || n > 120 {
			t.Errorf("%d of 1000 workers start in tenth %d of the interval", n, i)
		}
	}
}

func TestConfig(t *testing.T) {
	if err := monitor.DefaultConfig().Validate(); err != nil {
		t.Errorf("the default is invalid: %v", err)
	}
	bad := monitor.Config{ScrapeInterval: time.Millisecond, HealthInterval: -1, Engine: "tgi", HealthPath: "health"}
	got := strings.Split(bad.Validate().Error(), "\n")
	for i, key := range []string{"scrape-interval: ", "health-interval: ", "scrape-timeout: ", "health-timeout: ", "engine: ", "health-path: "} {
		if i >= len(got) || !strings.HasPrefix(got[i], key) {
			t.Errorf("error %d of %q does not begin with %q", i, got, key)
		}
	}
	cfg := monitor.DefaultConfig()
	for configured, want := range map[time.Duration]time.Duration{5 * time.Second: 5 * time.Second, time.Second: 3 * time.Second} {
		if got := cfg.StaleAfter(configured); got != want {
			t.Errorf("StaleAfter(%v) = %v, want %v", configured, got, want)
		}
	}
}

func TestRunEnds(t *testing.T) {
	r := newRig(monitor.DefaultConfig(), busy.Thresholds{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 2 { // it may be run again
		if err := r.Run(ctx); err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
	}
}
