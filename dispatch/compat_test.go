package dispatch_test

import (
	"fmt"
	"io"
	"math"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	"spillway/dispatch"
)

// theSame is what the help of a metric begins with that is another one by another name.
var theSame = regexp.MustCompile(`^The same as (spillway_dispatch_\w+)`)

// TestCompatMetrics looks for what dashboards of llm-d's processor show, and compares it with what it is the same
// as, while there is something of everything: results, failures, retries, refusals, and requests in flight and
// in the queue.
func TestCompatMetrics(t *testing.T) {
	r := startRedis(t)
	hold := make(chan struct{})
	held := holding(hold)
	var mu sync.Mutex
	seen := map[string]bool{}
	g := newGateway(t, func(w http.ResponseWriter, req *http.Request, body string) {
		mu.Lock()
		first := !seen[body]
		seen[body] = true
		mu.Unlock()
		switch {
		case strings.Contains(body, "no"):
			w.WriteHeader(400)
		case strings.Contains(body, "again") && first:
			w.WriteHeader(500)
		case strings.Contains(body, "shed") && first:
			w.WriteHeader(429)
		case strings.Contains(body, "late"), strings.Contains(body, "hold"):
			held(w, req, body)
			return
		}
		_, _ = io.WriteString(w, "{}")
	})
	q := simple(g)
	q["gate_type"], q["gate_params"] = "redis", map[string]any{"address": r.addr(), "baseline": 0.25}
	r.Set(t.Context(), "dispatch-gate-budget", "0.75", 0)
	d := begin(t, r, setup{cfg: func(c *dispatch.Config) {
		c.CompatMetrics, c.Concurrency, c.OverloadCooldown = true, 1, 10*time.Millisecond
	}}, q)
	all := 0
	put := func(n int, kind string, left time.Duration) {
		for i := range n {
			id := fmt.Sprint(kind, i)
			r.enqueue("q", id, fmt.Sprintf(`{"prompt":%q}`, id), func(s *dispatch.Submission) { s.Deadline = time.Now().Add(left).Unix() })
			all++
		}
	}
	put(1, "late", 3*time.Second)
	put(5, "yes", time.Hour)
	put(4, "no", time.Hour)
	put(1, "again", time.Hour)
	put(2, "shed", time.Hour)
	r.results("result-list", all)
	put(1, "hold", time.Hour)
	eventually(t, "one is in flight", func() bool { return d.metric("leases_held") == 1 })
	put(2, "rest", time.Hour)
	eventually(t, "two are in the queue", func() bool { return d.metric("backlog") == 2 })

	families := gathered(t, d)
	for _, name := range []string{
		"request_total", "request_retries_total", "successful_requests_total", "failed_requests_total", "exceeded_deadline_requests_total",
		"shedded_requests_total", "gate_decisions_total", "queue_depth", "inflight_requests", "broker_backlog", "dispatch_budget", "pool_worker_limit",
		"gate_metric_value", "gate_metric_threshold", "gate_metric_source_available", "inference_latency_time_millis", "queue_residence_time_millis",
	} {
		f := families["llm_d_async_async_"+name]
		if f == nil {
			t.Errorf("there is no llm_d_async_async_%s", name)
			continue
		}
		m := theSame.FindStringSubmatch(f.GetHelp())
		if m == nil {
			continue
		}
		for _, got := range f.Metric {
			want := within(families[m[1]], got)
			switch {
			case want == nil:
				t.Errorf("%s %v: no %s has its labels", f.GetName(), got.Label, m[1])
			case got.Histogram != nil:
				sameInMillis(t, f.GetName(), got.Histogram, want.Histogram)
			case value(got) != value(want) || name != "gate_decisions_total" && value(got) == 0:
				t.Errorf("%s %v = %v, want %v as of %s, and not 0", f.GetName(), got.Label, value(got), value(want), m[1])
			}
		}
	}
	only := func(name string) float64 { return value(gathered(t, d)["llm_d_async_async_"+name].Metric[0]) }
	if a, n := only("gate_metric_source_available"), only("queue_depth"); a != 1 || n != 0 {
		t.Errorf("gate_metric_source_available = %v, queue_depth = %v, want 1 and 0", a, n)
	}
	r.Del(t.Context(), "dispatch-gate-budget")
	eventually(t, "the source cannot be read", func() bool { return only("gate_metric_source_available") == 0 })
	close(hold)
}

// gathered are all families of a dispatcher by name.
func gathered(t *testing.T, d *running) map[string]*dto.MetricFamily {
	t.Helper()
	all, err := d.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	families := map[string]*dto.MetricFamily{}
	for _, f := range all {
		families[f.GetName()] = f
	}
	return families
}

// within returns the series of a family whose labels are those of another one, as far as both have them.
func within(f *dto.MetricFamily, other *dto.Metric) *dto.Metric {
	has := map[string]string{}
	for _, l := range other.Label {
		has[l.GetName()] = l.GetValue()
	}
	for _, m := range f.GetMetric() {
		fits := true
		for _, l := range m.Label {
			v, both := has[l.GetName()]
			fits = fits && (!both || v == l.GetValue())
		}
		if fits {
			return m
		}
	}
	return nil
}

func value(m *dto.Metric) float64 { return m.GetCounter().GetValue() + m.GetGauge().GetValue() }

// sameInMillis compares a histogram of milliseconds with one of seconds.
func sameInMillis(t *testing.T, name string, got, want *dto.Histogram) {
	t.Helper()
	if got.GetSampleCount() != want.GetSampleCount() || got.GetSampleCount() == 0 || math.Abs(got.GetSampleSum()-1000*want.GetSampleSum()) > 1e-6 || len(got.Bucket) != len(want.Bucket) {
		t.Fatalf("%s is %v\nof %v", name, got, want)
	}
	for i, b := range got.Bucket {
		if b.GetCumulativeCount() != want.Bucket[i].GetCumulativeCount() || b.GetUpperBound() != math.Round(1000*want.Bucket[i].GetUpperBound()) {
			t.Errorf("%s: %v, of %v", name, b, want.Bucket[i])
		}
	}
}
