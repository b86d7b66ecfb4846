package dispatch_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"spillway/dispatch"
)

func (r *running) status() dispatch.Status {
	r.t.Helper()
	s, err := r.Status(context.Background())
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

func TestRetry(t *testing.T) {
	r := startRedis(t)
	var n atomic.Int64
	g := newGateway(t, func(w http.ResponseWriter, _ *http.Request, body string) {
		if n.Add(1) == 1 {
			w.WriteHeader(502)
			return
		}
		_, _ = io.WriteString(w, body)
	})
	begin(t, r, setup{}, simple(g))
	payload := `{"prompt":"<&>","seed":12345678901234567890}`
	r.enqueue("q", "a", payload)
	eventually(t, "it is put aside", func() bool { return r.left("q") == "{q}:body {q}:score {q}:delayed" })
	body, _ := r.HVals(context.Background(), "{q}:body").Result()
	if len(body) != 1 || !strings.Contains(body[0], `"retry_count":1`) || !strings.Contains(body[0], `"spillway":{"attempts":1,"sheds":0}`) || !strings.Contains(body[0], payload) {
		t.Errorf("put aside as %q", body)
	}
	if n.Load() != 1 {
		t.Errorf("%d attempts before the delay is over, want 1", n.Load())
	}
	got := r.results("result-list", 1)[0]
	if got.StatusCode != 200 || got.Attempts != 2 || *got.Payload != payload {
		t.Errorf("result %+v", got)
	}
}

func TestAttemptsEnd(t *testing.T) {
	r := startRedis(t)
	g := newGateway(t, func(w http.ResponseWriter, _ *http.Request, body string) {
		if strings.Contains(body, "break") {
			w.Header().Set("Content-Length", "100")
			_, _ = io.WriteString(w, "half")
			return
		}
		w.WriteHeader(500)
		_, _ = io.WriteString(w, "sorry")
	})
	begin(t, r, setup{cfg: func(c *dispatch.Config) { c.MaxAttempts = 1 }}, simple(g))
	r.enqueue("q", "a", prompt)
	if got := r.results("result-list", 1)[0]; got.StatusCode != 500 || *got.Payload != "sorry" || got.ErrorCode != "" {
		t.Errorf("result %+v, want the last answer", got)
	}
	r.enqueue("q", "b", `{"prompt":"break"}`)
	if got := r.results("result-list", 1)[0]; got.ErrorCode != "ATTEMPTS_EXHAUSTED" || *got.Payload != `{"error":"no attempt was successful"}` {
		t.Errorf("result %+v, want ATTEMPTS_EXHAUSTED", got)
	}
	letters, _ := r.XRange(context.Background(), "{q}:dead", "-", "+").Result()
	if len(letters) != 2 || letters[0].Values["reason"] != "attempts_exhausted" || letters[0].Values["last_status"] != "500" || letters[0].Values["attempts"] != "1" {
		t.Errorf("dead letters %v", letters)
	}
}

// TestTimeout has an attempt that takes too long, and a deadline that passes meanwhile.
func TestTimeout(t *testing.T) {
	r := startRedis(t)
	g := newGateway(t, func(_ http.ResponseWriter, r *http.Request, _ string) { <-r.Context().Done() })
	begin(t, r, setup{cfg: func(c *dispatch.Config) { c.RequestTimeout = 100 * time.Millisecond }}, simple(g))
	r.enqueue("q", "a", prompt, func(s *dispatch.Submission) { s.Deadline = time.Now().Unix() + 3 })
	if got := r.results("result-list", 1)[0]; got.ErrorCode != "DEADLINE_EXCEEDED" {
		t.Errorf("result %+v, want DEADLINE_EXCEEDED", got)
	}
	if len(g.sent()) < 2 {
		t.Errorf("%d attempts, want an attempt that took too long to be followed by another", len(g.sent()))
	}
}

func TestUnreachableGateway(t *testing.T) {
	r := startRedis(t)
	g := newGateway(t, nil)
	g.Server.Close()
	for i := range 5 {
		r.enqueue("q", fmt.Sprint(i), prompt)
	}
	d := begin(t, r, setup{cfg: func(c *dispatch.Config) { c.MaxAttempts, c.Concurrency = 1, 1 }}, simple(g))
	eventually(t, "the gate is closed", func() bool { return d.metric("overload_trips_total", "unreachable") == 1 })
	eventually(t, "the third is put aside", func() bool { return d.status().Queues[0].Leased == 0 })
	s := d.status()
	if s.Groups[0].State != "overload" || s.Queues[0].Delayed != 3 || s.Queues[0].Pending != 2 || s.Queues[0].Dead != 0 {
		t.Errorf("status %+v, want 3 delayed, 2 pending and nothing given up", s)
	}
}

// TestLatch has each of the refusals that tell of overload.
func TestLatch(t *testing.T) {
	for _, status := range []int{429, 503, 529} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			r := startRedis(t)
			var n, early atomic.Int64
			var refusedAt atomic.Int64
			g := newGateway(t, func(w http.ResponseWriter, _ *http.Request, body string) {
				switch n.Add(1) {
				case 3:
					refusedAt.Store(time.Now().UnixNano())
					w.WriteHeader(status)
					return
				case 1, 2:
				default:
					if since := time.Now().UnixNano() - refusedAt.Load(); refusedAt.Load() > 0 && since < int64(700*time.Millisecond) {
						early.Add(1)
					}
				}
				_, _ = io.WriteString(w, body)
			})
			for i := range 12 {
				r.enqueue("q", fmt.Sprint(i), prompt)
			}
			d := begin(t, r, setup{cfg: func(c *dispatch.Config) { c.Concurrency, c.OverloadCooldown, c.MaxAttempts = 1, time.Second, 1 }}, simple(g))
			for _, o := range r.results("result-list", 12) {
				if o.StatusCode != 200 {
					t.Errorf("result %+v: a refusal counts as an attempt", o)
				}
			}
			if early.Load() > 0 {
				t.Errorf("%d requests were sent while the gate was closed", early.Load())
			}
			if got := d.metric("overload_trips_total", fmt.Sprint(status)); got != 1 {
				t.Errorf("overload_trips_total{%d} = %v, want 1", status, got)
			}
			if got := d.metric("shed_requests_total"); got != 1 {
				t.Errorf("shed_requests_total = %v, want 1", got)
			}
		})
	}
}

func TestExemptRefusal(t *testing.T) {
	r := startRedis(t)
	var n atomic.Int64
	g := newGateway(t, func(w http.ResponseWriter, _ *http.Request, body string) {
		if n.Add(1) == 1 {
			w.Header().Set("X-Llm-D-Request-Dropped-Reason", "rejected-shutting-down")
			w.WriteHeader(503)
			return
		}
		_, _ = io.WriteString(w, body)
	})
	r.enqueue("q", "a", prompt)
	d := begin(t, r, setup{cfg: func(c *dispatch.Config) { c.OverloadCooldown, c.MaxAttempts = time.Hour, 1 }}, simple(g))
	if got := r.results("result-list", 1)[0]; got.StatusCode != 200 || d.metric("overload_trips_total") != 0 {
		t.Errorf("result %+v, trips %v", got, d.metric("overload_trips_total"))
	}
}

func TestCancel(t *testing.T) {
	r := startRedis(t)
	ctx := context.Background()
	g := newGateway(t, func(w http.ResponseWriter, req *http.Request, body string) {
		if strings.Contains(body, "flight") {
			<-req.Context().Done()
			return
		}
		if strings.Contains(body, "later") {
			w.Header().Set("Retry-After", "500")
			w.WriteHeader(500)
			return
		}
		_, _ = io.WriteString(w, body)
	})
	cancel := func(id string, want bool) {
		t.Helper()
		if ok, err := dispatch.Cancel(ctx, r.Client, id); ok != want || err != nil {
			t.Errorf("Cancel(%s) = %v, %v, want %v", id, ok, err, want)
		}
	}
	q := simple(g)
	q["gate_type"], q["gate_params"] = "redis", map[string]any{"address": r.addr()}
	begin(t, r, setup{cfg: func(c *dispatch.Config) { c.CancelPoll = 50 * time.Millisecond }}, q)
	expect := func(id string) {
		t.Helper()
		if got := r.results("result-list", 1)[0]; got.ID != id || got.ErrorCode != "CANCELLED" || *got.Payload != `{"error":"cancelled"}` {
			t.Errorf("result %+v, want %s to be cancelled", got, id)
		}
	}
	r.enqueue("q", "queued", prompt)
	cancel("queued", true)
	expect("queued") // while the gate is closed
	r.Set(ctx, "dispatch-gate-budget", "1", 0)
	r.enqueue("q", "flight", `{"prompt":"flight"}`)
	eventually(t, "it is in flight", func() bool { return len(g.sent()) == 1 })
	cancel("flight", true)
	expect("flight")
	r.enqueue("q", "later", `{"prompt":"later"}`)
	eventually(t, "it is put aside", func() bool { return strings.Contains(r.left("q"), "delayed") })
	cancel("later", true)
	expect("later")
	cancel("later", false)
	cancel("nobody", false)
	r.enqueue("q", "queued", `{"prompt":"again"}`) // a new generation
	if got := r.results("result-list", 1)[0]; got.ID != "queued" || got.StatusCode != 200 {
		t.Errorf("result %+v, want the new generation to be sent", got)
	}
	eventually(t, "no marker is left", func() bool { n, _ := r.Keys(ctx, "request-*").Result(); return len(n) == 0 })
}

// pool is a front end's /internal/capacity that says what it is told.
func pool(t *testing.T, says func() string) string {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/internal/capacity" || r.URL.Query().Get("pool") != "m" {
			w.WriteHeader(404)
			return
		}
		_, _ = io.WriteString(w, says())
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func capacity(fullness float64, requests int, at time.Time) string {
	return fmt.Sprintf(`{"pool":"m","fullness":%g,"ready_endpoints":2,"capacity":{"requests":%d,"tokens":0,"bytes":0},"seq":1,"sample_time_ms":%d}`, fullness, requests, at.UnixMilli())
}

// TestSharedBudget has two queues on one pool, whose reading stays as it is: N is spent once.
func TestSharedBudget(t *testing.T) {
	for _, tt := range []struct {
		name        string
		dispatchers int
		params      map[string]any
	}{
		{"one dispatcher", 1, map[string]any{"baseline": 0.1}},
		{"two with a share each", 2, map[string]any{"baseline": "0.1", "budget_share": 0.5}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := startRedis(t)
			hold := make(chan struct{})
			g := newGateway(t, func(w http.ResponseWriter, req *http.Request, body string) {
				select {
				case <-hold:
				case <-req.Context().Done():
				}
				_, _ = io.WriteString(w, body)
			})
			frozen := time.Now()
			var thawed atomic.Bool
			tt.params["pool"], tt.params["max_sample_age"] = "m", "1h"
			tt.params["endpoint"] = pool(t, func() string {
				if thawed.Load() {
					return capacity(0.3, 20, time.Now())
				}
				return capacity(0.3, 20, frozen)
			})
			queues := []queueDoc{
				{"queue_name": "q1", "igw_base_url": g.URL, "gate_type": "spillway", "gate_params": tt.params},
				{"queue_name": "q2", "igw_base_url": g.URL, "gate_type": "spillway", "gate_params": tt.params},
			}
			for i := range 30 {
				r.enqueue(fmt.Sprintf("q%d", 1+i%2), fmt.Sprint(i), fmt.Sprintf(`{"prompt":"%d"}`, i), func(s *dispatch.Submission) { s.Deadline += int64(i) })
			}
			var all []*running
			for range tt.dispatchers {
				all = append(all, begin(t, r, setup{cfg: func(c *dispatch.Config) { c.Concurrency = 64 }, beside: true}, queues...))
			}
			const n = 12 // 20 x (0.7 - 0.1)
			eventually(t, "N are in flight", func() bool { return len(g.sent()) >= n })
			for range 20 { // and no more
				time.Sleep(20 * time.Millisecond)
			}
			if got := len(g.sent()); got != n {
				t.Errorf("%d requests were sent on one reading, want %d", got, n)
			}
			if s := all[0].status(); len(s.Groups) != 1 || s.Groups[0].InferencePool != "m" || s.Groups[0].State != "open" || s.Groups[0].Allowed != 0 || s.Groups[0].Ledger != int64(n/tt.dispatchers) {
				t.Errorf("status %+v", s.Groups)
			}
			thawed.Store(true)
			close(hold)
			r.results("result-list", 30)
			if tt.dispatchers == 1 { // earliest deadlines first, over both queues
				for i, b := range g.sent()[:n] {
					var number int
					if _, err := fmt.Sscanf(b, `{"prompt":"%d"}`, &number); err != nil || number >= n {
						t.Errorf("request %d of the first %d was %s", i, n, b)
					}
				}
			}
		})
	}
}

// TestBytes has a budget in bytes: r1 fits, r2 does not, and r3 is not pulled forward.
func TestBytes(t *testing.T) {
	r := startRedis(t)
	hold := make(chan struct{})
	g := newGateway(t, func(w http.ResponseWriter, req *http.Request, body string) {
		select {
		case <-hold:
		case <-req.Context().Done():
		}
		_, _ = io.WriteString(w, "{}")
	})
	q := simple(g)
	q["gate_type"] = "spillway"
	q["gate_params"] = map[string]any{"pool": "m", "baseline": 0.1, "budget_unit": "bytes", "max_bytes_per_endpoint": 512, "endpoint": pool(t, func() string { return capacity(0.3, 10, time.Now()) }), "accounting": "cap"}
	for i, size := range []int{600, 100, 5 + len(`{"prompt":""}`)} {
		r.enqueue("q", fmt.Sprint(i), `{"prompt":"`+strings.Repeat("x", size-len(`{"prompt":""}`))+`"}`, func(s *dispatch.Submission) { s.Deadline += int64(i) })
	}
	d := begin(t, r, setup{}, q)
	eventually(t, "the first is in flight", func() bool { return len(g.sent()) > 0 })
	for range 20 {
		time.Sleep(20 * time.Millisecond)
	}
	if got := g.sent(); len(got) != 1 || len(got[0]) != 600 {
		t.Errorf("%d requests are in flight, the first of %d bytes, want one of 600", len(got), len(got[0]))
	}
	if s := d.status().Groups[0]; s.Unit != "bytes" || s.Ledger != 600 || s.Allowed != 14 {
		t.Errorf("status %+v, want a ledger of 600 and 14 allowed", s)
	}
	close(hold)
	r.results("result-list", 3)
}

// TestUnreadableCapacity has a front end whose answers mean nothing.
func TestUnreadableCapacity(t *testing.T) {
	full := func() string { return capacity(0.95, 10, time.Now()) }
	says := func(text string) func() string { return func() string { return text } }
	var now atomic.Value
	now.Store(full)
	r := startRedis(t)
	g := newGateway(t, nil)
	q := simple(g)
	q["gate_type"] = "spillway"
	q["gate_params"] = map[string]any{"pool": "m", "endpoint": pool(t, func() string { return now.Load().(func() string)() })}
	d := begin(t, r, setup{}, q)
	r.enqueue("q", "a", prompt)
	for _, tt := range []struct {
		name  string
		says  func() string
		state string
	}{
		{"nothing", says(""), "unreadable"},
		{"another page", says("<html>"), "unreadable"},
		{"no fullness", says(`{"ready_endpoints":1,"sample_time_ms":1}`), "unreadable"},
		{"stale", func() string { return capacity(0, 10, time.Now().Add(-time.Minute)) }, "unreadable"},
		{"of the future", func() string { return capacity(0, 10, time.Now().Add(time.Hour)) }, "unreadable"},
		{"no worker", func() string {
			return strings.Replace(capacity(0, 10, time.Now()), `"ready_endpoints":2`, `"ready_endpoints":0`, 1)
		}, "no_capacity"},
	} {
		available := 1.0
		if tt.state == "unreadable" {
			available = 0
		}
		for _, is := range []struct {
			says      func() string
			state     string
			available float64
		}{{full, "baseline", 1}, {tt.says, tt.state, available}} {
			now.Store(is.says)
			eventually(t, tt.name+": "+is.state, func() bool {
				return d.status().Groups[0].State == is.state && d.metric("gate_metric_source_available") == is.available
			})
		}
		if len(g.sent()) != 0 {
			t.Fatalf("%s: a request was sent", tt.name)
		}
	}
	if d.metric("gate_decisions_total", "gate_closed") == 0 {
		t.Error("a closed gate is not counted")
	}
	now.Store(func() string { return capacity(0, 10, time.Now()) })
	r.results("result-list", 1)
}

// TestPrometheus has a Prometheus that answers in all sorts of ways.
func TestPrometheus(t *testing.T) {
	var mode atomic.Value
	mode.Store("down")
	token := t.TempDir() + "/token"
	writeFile(t, token, "first\n")
	var asked atomic.Value
	asked.Store("")
	prom := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		expr := r.FormValue("query")
		asked.Store(r.Method + " " + r.URL.Path + " " + r.Header.Get("Authorization") + " " + r.Header.Get("X-Scope-Orgid"))
		vector := func(values ...string) {
			var all []string
			for i, v := range values {
				all = append(all, fmt.Sprintf(`{"metric":{"i":"%d"},"value":[1,"%s"]}`, i, v))
			}
			_, _ = fmt.Fprintf(w, `{"status":"success","data":{"resultType":"vector","result":[%s]}}`, strings.Join(all, ","))
		}
		m := mode.Load().(string)
		switch {
		case m == "down":
			w.WriteHeader(500)
		case m == "post refused" && r.Method == http.MethodPost:
			w.WriteHeader(405)
		case !strings.Contains(expr, "spillway_"): // the weaker sources say that all is free
			if strings.Contains(m, "weaker") && !strings.Contains(expr, "timestamp") {
				vector("1")
				return
			}
			vector()
		case strings.Contains(expr, "timestamp"):
			at := time.Now()
			if m == "stale" {
				at = at.Add(-time.Minute)
			}
			vector(fmt.Sprintf("%.3f", float64(at.UnixMilli())/1000))
		case strings.Contains(expr, "capacity") && m == "no capacity":
			vector()
		case strings.Contains(expr, "ready"), strings.Contains(expr, "capacity"):
			vector("10")
		case m == "NaN" || m == "+Inf":
			vector(m)
		case m == "two":
			vector("0.5", "0.6")
		case m == "empty" || strings.Contains(m, "weaker"):
			vector()
		case m == "warns":
			_, _ = io.WriteString(w, `{"status":"success","data":{"resultType":"scalar","result":[1,"0.5"]},"warnings":["a shard is down"]}`)
		case m == "scalar":
			_, _ = io.WriteString(w, `{"status":"success","data":{"resultType":"scalar","result":[1,"0.5"]}}`)
		default:
			vector("0.5")
		}
	}))
	defer prom.Close()
	r := startRedis(t)
	g := newGateway(t, nil)
	q := simple(g)
	q["gate_type"], q["gate_params"] = "prometheus-budget", map[string]any{"pool": "m", "baseline": 0.1}
	d := begin(t, r, setup{cfg: func(c *dispatch.Config) {
		c.PrometheusURL, c.MetricsPoll = prom.URL+"/prefix/", 20*time.Millisecond
		c.Prometheus.BearerTokenFile, c.Prometheus.Headers = token, []string{"X-Scope-OrgID=us"}
	}}, q)
	for _, tt := range []struct{ mode, state string }{
		{"down", "unreadable"}, {"empty", "unreadable"}, {"NaN", "unreadable"}, {"fine", "open"}, {"+Inf", "unreadable"}, {"post refused", "open"}, {"two", "unreadable"},
		{"scalar", "open"}, {"stale", "unreadable"}, {"fine", "open"}, {"weaker", "unreadable"}, {"fine", "open"},
		{"no capacity", "unreadable"}, {"fine", "open"}, {"down", "unreadable"},
	} {
		mode.Store(tt.mode)
		eventually(t, tt.mode+" is "+tt.state, func() bool {
			return d.status().Groups[0].State == tt.state && (d.metric("gate_metric_source_available") == 1) == (tt.state == "open")
		})
	}
	mode.Store("warns")
	eventually(t, "the log tells what Prometheus warns of", func() bool { return strings.Contains(d.logs(), "a shard is down") })
	if got := asked.Load(); got != "POST /prefix/api/v1/query Bearer first us" {
		t.Errorf("asked by %v", got)
	}
	writeFile(t, token, "second\n")
	eventually(t, "the new token is used", func() bool { return strings.Contains(asked.Load().(string), "second") })
}

// TestQuota has a tenant at the head of the queue whose quota is used up: others go in its place.
func TestQuota(t *testing.T) {
	r := startRedis(t)
	hold := make(chan struct{})
	var n atomic.Int64
	g := newGateway(t, func(w http.ResponseWriter, req *http.Request, body string) {
		if strings.Contains(body, "alice") {
			if n.Add(1) == 1 { // retried: the quota must be given back
				w.WriteHeader(500)
				return
			}
			select {
			case <-hold:
			case <-req.Context().Done():
			}
		}
		_, _ = io.WriteString(w, body)
	})
	q := simple(g)
	q["gate_type"] = "redis-quota"
	q["gate_params"] = map[string]any{"address": r.addr(), "mode": "concurrency", "limit": "1"}
	for i := range 40 {
		user := "alice"
		if i == 39 {
			user = "bob"
		}
		r.enqueue("q", fmt.Sprint(i), fmt.Sprintf(`{"prompt":"%s"}`, user), func(s *dispatch.Submission) {
			s.Metadata = map[string]string{"userid": user}
			s.Deadline += int64(i)
		})
	}
	begin(t, r, setup{cfg: func(c *dispatch.Config) { c.Concurrency, c.RefuseHold = 2, 200*time.Millisecond }}, q)
	if got := r.results("result-list", 1)[0]; got.ID != "39" {
		t.Errorf("the first result is of %s, want bob's", got.ID)
	}
	eventually(t, "alice has one in flight", func() bool { v, _ := r.Get(context.Background(), "quota:userid:alice").Result(); return v == "1" })
	close(hold)
	r.results("result-list", 39)
	eventually(t, "the quota is given back", func() bool { v, _ := r.Get(context.Background(), "quota:userid:alice").Result(); return v == "0" })
}

// TestStop ends a dispatcher whose requests take longer than they may then.
func TestStop(t *testing.T) {
	r := startRedis(t)
	var n atomic.Int64
	g := newGateway(t, func(w http.ResponseWriter, req *http.Request, body string) {
		if n.Add(1)%2 == 0 {
			_, _ = io.WriteString(w, body)
			return
		}
		<-req.Context().Done()
	})
	const all = 50
	r.fill("q", all)
	d := begin(t, r, setup{cfg: func(c *dispatch.Config) { c.DrainTimeout = 300 * time.Millisecond }}, simple(g))
	eventually(t, "all workers hang", func() bool { return d.metric("leases_held") == 8 })
	d.stop()
	ctx := context.Background()
	done, _ := r.LLen(ctx, "result-list").Result()
	pending, _ := r.ZCard(ctx, "q").Result()
	if done+pending != all || pending < 8 {
		t.Errorf("%d results and %d pending, want %d together", done, pending, all)
	}
	if left := r.left("q"); left != "q" {
		t.Errorf("left in Redis: %s, want the queue alone", left)
	}
}

func TestDryRun(t *testing.T) {
	r := startRedis(t)
	g := newGateway(t, nil)
	r.fill("q", 3)
	r.ZAdd(context.Background(), "q", redis.Z{Score: 1, Member: "no JSON"})
	d := begin(t, r, setup{cfg: func(c *dispatch.Config) { c.DryRun = true }}, simple(g))
	eventually(t, "the queue is measured", func() bool { return d.metric("backlog") == 4 })
	for range 10 {
		time.Sleep(20 * time.Millisecond)
	}
	if n, _ := r.ZCard(context.Background(), "q").Result(); n != 4 || len(g.sent()) != 0 || r.left("q") != "q" {
		t.Errorf("%d are in the queue, %d were sent, left %s", n, len(g.sent()), r.left("q"))
	}
}

// TestImport takes over the retries of llm-d's processor.
func TestImport(t *testing.T) {
	r := startRedis(t)
	g := newGateway(t, nil)
	m := fmt.Sprintf(`{"internal":{"retry_count":1,"request_queue_name":"q2"},"request_kind":"redis","data":{"id":"a","deadline":%d,"payload":{}}}`, time.Now().Unix()+1000)
	r.ZAdd(context.Background(), "retry-sortedset", redis.Z{Score: float64(time.Now().Unix()), Member: m})
	begin(t, r, setup{cfg: func(c *dispatch.Config) { c.ImportRetries = true }}, simple(g), queueDoc{"queue_name": "q2", "igw_base_url": g.URL, "request_path_url": "/v2"})
	if got := r.results("result-list", 1)[0]; got.ID != "a" || g.paths[0] != "/v2" {
		t.Errorf("result %+v of %s", got, g.paths[0])
	}
	if n, _ := r.Exists(context.Background(), "retry-sortedset").Result(); n != 0 {
		t.Error("the retry set is still there")
	}
}

// TestCluster runs on a cluster of one node, where keys of different queues may not be used together.
func TestCluster(t *testing.T) {
	r := startRedis(t, "--cluster-enabled", "yes", "--cluster-port", strconv.Itoa(unusedPort(t)))
	ctx := context.Background()
	if err := r.Do(ctx, "CLUSTER", "ADDSLOTSRANGE", 0, 16383).Err(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the cluster is there", func() bool {
		info, _ := r.ClusterInfo(ctx).Result()
		return strings.Contains(info, "cluster_state:ok")
	})
	c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{r.addr()}, Dialer: (&lossy{}).dial})
	defer c.Close()
	var n atomic.Int64
	g := newGateway(t, func(w http.ResponseWriter, _ *http.Request, body string) {
		if n.Add(1) == 1 {
			w.WriteHeader(500)
			return
		}
		_, _ = io.WriteString(w, body)
	})
	const all = 20
	for i := range all {
		queue := []string{"plain", "with:{tag}:q"}[i%2]
		s := dispatch.Submission{ID: fmt.Sprint(i), Deadline: time.Now().Unix() + 1000, Payload: json.RawMessage(prompt), ResultQueue: "elsewhere", Once: i == 0}
		if err := dispatch.Enqueue(ctx, c, queue, s, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	again := dispatch.Submission{ID: "0", Deadline: time.Now().Unix() + 1000, Payload: json.RawMessage(prompt), ResultQueue: "elsewhere", Once: true}
	if err := dispatch.Enqueue(ctx, c, "plain", again, time.Now()); !errors.Is(err, dispatch.ErrActive) {
		t.Errorf("Enqueue of what is in work: %v, want ErrActive", err)
	}
	begin(t, r, setup{doc: map[string]any{"mode": "cluster"}}, queueDoc{"queue_name": "plain", "igw_base_url": g.URL}, queueDoc{"queue_name": "with:{tag}:q", "igw_base_url": g.URL})
	for _, o := range r.results("elsewhere", all) {
		if o.StatusCode != 200 {
			t.Errorf("result %+v", o)
		}
	}
	eventually(t, "nothing is left", func() bool { keys, _ := r.Keys(ctx, "*").Result(); return len(keys) == 0 })
}

// TestSlots asks a real cluster node for the slots of a queue's keys.
func TestSlots(t *testing.T) {
	r := startRedis(t, "--cluster-enabled", "yes", "--cluster-port", strconv.Itoa(unusedPort(t)))
	ctx := context.Background()
	for queue, cannot := range map[string]bool{
		"request-sortedset": false, "llm-d-async:requests:pool": false, "{tag}": false, "with:{tag}:in:it": false, "{a}{b}": false, "open{": false,
		"a{}b": true, "a}b": true, "a}{b": true, "a{}{b}": true,
	} {
		want, err := r.ClusterKeySlot(ctx, queue).Result()
		if err != nil {
			t.Fatal(err)
		}
		all, spread := dispatch.PrivateKeys(queue)
		if len(all) != 8 || spread != cannot {
			t.Errorf("%s: %d keys, spread %v, want %v", queue, len(all), spread, cannot)
		}
		for _, k := range all {
			if slot, _ := r.ClusterKeySlot(ctx, k).Result(); slot != want && !cannot {
				t.Errorf("%s: key %s is in slot %d, want %d", queue, k, slot, want)
			}
		}
	}
	cfg := dispatch.DefaultConfig()
	cfg.Transport = `{"url":"redis://h","mode":"cluster","queues":[{"queue_name":"a}b","igw_base_url":"http://h"}]}`
	if _, err := dispatch.New(cfg, func(string) string { return "" }, prometheus.NewRegistry(), slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "needs a {tag}") {
		t.Errorf("New = %v, want it to refuse a queue whose keys are spread", err)
	}
}

// TestCommands compares the commands of producers with what the specification says, byte for byte, as Redis sees them.
func TestCommands(t *testing.T) {
	r := startRedis(t)
	ctx := context.Background()
	conn, err := net.Dial("tcp", r.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "MONITOR\r\n"); err != nil {
		t.Fatal(err)
	}
	seen := bufio.NewReader(conn)
	if line, err := seen.ReadString('\n'); err != nil || line != "+OK\r\n" {
		t.Fatalf("MONITOR: %q, %v", line, err)
	}
	now := time.Now()
	deadline := now.Unix() + 500
	s := dispatch.Submission{
		ID: "a", Deadline: deadline, Payload: json.RawMessage(`{"model":"m","seed":12345678901234567890}`), Metadata: map[string]string{"userid": "<u>&"},
		Headers: map[string]string{"x-custom": "v"}, Endpoint: "/v1/chat/completions", ResultQueue: "results",
	}
	if err := dispatch.Enqueue(ctx, r.Client, "queue", s, now); err != nil {
		t.Fatal(err)
	}
	token, _ := r.Get(ctx, "request-active:a").Result()
	if ok, err := dispatch.Cancel(ctx, r.Client, "a"); !ok || err != nil {
		t.Fatalf("Cancel = %v, %v", ok, err)
	}
	r.Set(ctx, "end", "", 0)
	var got []string
	for {
		line, err := seen.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		_, command, _ := strings.Cut(strings.TrimSpace(line), "] ") // behind the time and the client
		name, rest, _ := strings.Cut(command, " ")
		switch name = strings.ToUpper(name); {
		case name == `"SET"` && strings.HasPrefix(rest, `"end"`):
			want := []string{
				`"MULTI"`,
				`"DEL" "request-cancel:a"`,
				`"SET" "request-active:a" "` + token + `" "px" "TTL"`,
				fmt.Sprintf(`"ZADD" "queue" "%d" "{\"internal\":{\"request_token\":\"%s\",\"request_queue_name\":\"queue\",\"result_queue_name\":\"results\"},\"request_kind\":\"redis\",`+
					`\"data\":{\"id\":\"a\",\"created\":%d,\"deadline\":%d,\"payload\":{\"model\":\"m\",\"seed\":12345678901234567890},\"metadata\":{\"userid\":\"<u>&\"},\"headers\":{\"x-custom\":\"v\"},\"endpoint\":\"/v1/chat/completions\"}}"`,
					deadline, token, now.Unix(), deadline),
				`"EXEC"`,
				`"GET" "request-active:a"`, // of this test
				`"GET" "request-active:a"`, // and of the script that cancels
				`"SET" "request-cancel:a" "` + token + `" "EX" "604800"`,
			}
			if a, b := strings.Join(got, "\n"), strings.Join(want, "\n"); a != b {
				t.Errorf("Redis was told\n%s\nwant\n%s", a, b)
			}
			return
		case name == `"MULTI"`, name == `"DEL"`, name == `"SET"`, name == `"ZADD"`, name == `"EXEC"`, name == `"GET"`:
			got = append(got, ttl.ReplaceAllString(strings.TrimSpace(name+" "+rest), `"px" "TTL"`))
		}
	}
}

// ttl is the time until a deadline in 500 s, which the clock makes a little less.
var ttl = regexp.MustCompile(`"px" "(49\d{4}|500000)"`)

// TestEnqueue compares what is written with what producers of llm-d write.
func TestEnqueue(t *testing.T) {
	r := startRedis(t)
	ctx := context.Background()
	now := time.Now()
	deadline := now.Unix() + 500
	r.Set(ctx, "request-cancel:a", "old", 0)
	s := dispatch.Submission{ID: "a", Deadline: deadline, Payload: json.RawMessage(`{"model":"m"}`), Metadata: map[string]string{"userid": "u"}, ResultQueue: "results"}
	if err := dispatch.Enqueue(ctx, r.Client, "queue", s, now); err != nil {
		t.Fatal(err)
	}
	token, _ := r.Get(ctx, "request-active:a").Result()
	ttl, _ := r.TTL(ctx, "request-active:a").Result()
	if len(token) != 32 || ttl < 490*time.Second || ttl > 500*time.Second {
		t.Errorf("request-active:a is %q for %v", token, ttl)
	}
	if n, _ := r.Exists(ctx, "request-cancel:a").Result(); n != 0 {
		t.Error("an old cancellation is still there")
	}
	want := fmt.Sprintf(`{"internal":{"request_token":"%s","request_queue_name":"queue","result_queue_name":"results"},"request_kind":"redis",`+
		`"data":{"id":"a","created":%d,"deadline":%d,"payload":{"model":"m"},"metadata":{"userid":"u"}}}`, token, now.Unix(), deadline)
	got, _ := r.ZRangeWithScores(ctx, "queue", 0, -1).Result()
	if len(got) != 1 || got[0].Member != want || got[0].Score != float64(deadline) {
		t.Errorf("the queue has %v\nwant %s", got, want)
	}
	for _, bad := range []func(*dispatch.Submission){
		func(s *dispatch.Submission) { s.ID = "" }, func(s *dispatch.Submission) { s.Deadline = 0 }, func(s *dispatch.Submission) { s.Deadline = now.Unix() },
		func(s *dispatch.Submission) { s.ResultQueue = "" }, func(s *dispatch.Submission) { s.Payload = nil },
	} {
		s := s
		if bad(&s); dispatch.Enqueue(ctx, r.Client, "queue", s, now) == nil {
			t.Errorf("Enqueue(%+v) is no error", s)
		}
	}
}

// TestLeases has never more messages taken than there are workers, though the next ones are claimed
// together with the results of those before.
func TestLeases(t *testing.T) {
	r := startRedis(t)
	g := newGateway(t, nil)
	const all, workers = 600, 3
	r.fill("q", all)
	begin(t, r, setup{cfg: func(c *dispatch.Config) { c.Concurrency = workers }}, simple(g))
	ctx := context.Background()
	most := int64(0)
	eventually(t, "all results are there", func() bool {
		for range 20 {
			n, err := r.ZCard(ctx, "{q}:leases").Result()
			if err != nil {
				t.Fatal(err)
			}
			most = max(most, n)
		}
		n, _ := r.LLen(ctx, "result-list").Result()
		return n == all
	})
	g.mu.Lock()
	defer g.mu.Unlock()
	if most > workers || most == 0 || g.most > workers {
		t.Errorf("%d leases and %d requests at once, want at most %d", most, g.most, workers)
	}
}

// TestResultList has a message whose result cannot be pushed, as its list is something else. Those whose results
// go to Redis together with it do not suffer, and it is not lost.
func TestResultList(t *testing.T) {
	r := startRedis(t)
	g := newGateway(t, nil)
	ctx := context.Background()
	r.Set(ctx, "text", "no list", 0)
	const all = 60
	for i := range all {
		r.enqueue("q", fmt.Sprint(i), prompt, func(s *dispatch.Submission) {
			if i%20 == 0 {
				s.ResultQueue = "text"
			}
		})
	}
	begin(t, r, setup{}, simple(g))
	r.results("result-list", all-all/20)
	if text, err := r.Get(ctx, "text").Result(); text != "no list" || err != nil {
		t.Errorf("what was no list is %q, %v", text, err)
	}
	r.Del(ctx, "text")
	r.results("text", all/20)
	eventually(t, "nothing is left", func() bool { return r.left("q") == "" })
	if n := len(g.sent()); n != all {
		t.Errorf("%d requests were sent, want %d", n, all)
	}
}

// TestLateHead has messages that were seen in time, and pass their deadline before a worker is free.
func TestLateHead(t *testing.T) {
	r := startRedis(t)
	hold := make(chan struct{})
	g := newGateway(t, holding(hold))
	soon := time.Now().Unix() + 3
	r.enqueue("q", "first", prompt, func(s *dispatch.Submission) { s.Deadline = soon })
	for i := range 5 {
		r.enqueue("q", fmt.Sprint("late", i), prompt, func(s *dispatch.Submission) { s.Deadline = soon + 1 })
	}
	r.enqueue("q", "last", prompt)
	begin(t, r, setup{cfg: func(c *dispatch.Config) { c.Concurrency = 1 }}, simple(g))
	for _, o := range r.results("result-list", 6) {
		if o.ErrorCode != "DEADLINE_EXCEEDED" {
			t.Errorf("result %+v, want DEADLINE_EXCEEDED", o)
		}
	}
	close(hold)
	if got := r.results("result-list", 1)[0]; got.ID != "last" || got.StatusCode != 200 {
		t.Errorf("result %+v", got)
	}
}
