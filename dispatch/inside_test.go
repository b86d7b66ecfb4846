package dispatch_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"spillway/dispatch"
)

// TestInside has a dispatcher in the process of a front end: its queues need neither a gate_type nor an
// igw_base_url, and the budget follows what the front end says of itself.
func TestInside(t *testing.T) {
	r := startRedis(t)
	g := newGateway(t, nil)
	var says atomic.Pointer[dispatch.Capacity]
	var unknown atomic.Bool
	inside := &dispatch.Inside{URL: g.URL, Capacity: func(_ context.Context, pool string) (dispatch.Capacity, error) {
		if pool != "m" {
			t.Errorf("asked for the pool %q", pool)
		}
		if unknown.Load() {
			return dispatch.Capacity{}, errors.New("the pool is unknown")
		}
		c := *says.Load()
		c.Time = time.Now()
		return c, nil
	}}
	says.Store(&dispatch.Capacity{})
	d := begin(t, r, setup{cfg: func(c *dispatch.Config) { c.Inside = inside }},
		queueDoc{"queue_name": "q", "gate_params": map[string]any{"pool": "m", "baseline": 0.25}})
	r.enqueue("q", "a", prompt)
	for _, tt := range []struct {
		name   string
		says   dispatch.Capacity
		state  string
		maxSys float64
	}{
		{"no worker", dispatch.Capacity{Requests: 8}, "no_capacity", 0},
		{"full", dispatch.Capacity{Fullness: 0.75, ReadyEndpoints: 2, Requests: 8}, "baseline", 8},
		{"nobody says how much", dispatch.Capacity{Fullness: 0.75, ReadyEndpoints: 2}, "baseline", 200},
	} {
		says.Store(&tt.says)
		eventually(t, tt.name+" is "+tt.state, func() bool {
			s := d.status().Groups[0]
			return s.State == tt.state && s.MaxSys != nil && *s.MaxSys == tt.maxSys
		})
	}
	unknown.Store(true)
	eventually(t, "an unknown pool cannot be read", func() bool { return d.status().Groups[0].State == "unreadable" })
	if len(g.sent()) != 0 {
		t.Fatalf("sent %q", g.sent())
	}
	unknown.Store(false)
	says.Store(&dispatch.Capacity{ReadyEndpoints: 2, Requests: 8})
	r.results("result-list", 1)
}

// TestBudgetLog looks for the lines from which free capacity can be computed: of two queues that share a budget,
// while all there is room for is in flight, and when one request is left that waits for a further attempt.
func TestBudgetLog(t *testing.T) {
	r := startRedis(t)
	hold := make(chan struct{})
	var failures atomic.Int64
	g := newGateway(t, func(w http.ResponseWriter, req *http.Request, body string) {
		select {
		case <-hold:
		case <-req.Context().Done():
		}
		if strings.Contains(body, "q0") {
			if failures.Add(1) == 1 {
				w.WriteHeader(500)
				return
			}
			w.Header().Set("Retry-After", "600")
			w.WriteHeader(429)
			return
		}
		_, _ = io.WriteString(w, "{}")
	})
	var queues []queueDoc
	params := map[string]any{"pool": "m", "baseline": 0.1, "accounting": "cap", "endpoint": pool(t, func() string { return capacity(0.3, 5, time.Now()) })}
	for name, n := range map[string]int{"q": 3, "r": 2} {
		for i := range n {
			r.enqueue(name, fmt.Sprint(name, i), fmt.Sprintf(`{"prompt":"%s%d"}`, name, i))
		}
	}
	for _, name := range []string{"q", "r"} {
		queues = append(queues, queueDoc{"queue_name": name, "igw_base_url": g.URL, "gate_type": "spillway", "gate_params": params})
	}
	d := begin(t, r, setup{cfg: func(c *dispatch.Config) { c.BudgetLog, c.BacklogPoll = 10*time.Millisecond, 0 }}, queues...)
	logged := func(pattern string) func() bool {
		re := regexp.MustCompile(pattern)
		return func() bool { return re.MatchString(d.logs()) }
	}
	eventually(t, "the log tells of a full budget", logged(
		`msg=budget group=m state=open d=0\.7 b=0\.1 max_sys=5 n=(3|2\.9+) ledger=3 in_flight=3 allowed=0 pending=2 delayed=0 requests=3 retries=0 successful=0 shed=0\n`))
	close(hold)
	r.results("result-list", 4)
	eventually(t, "the log tells of what waits for an attempt", logged(
		`msg=budget group=m state=overload .* in_flight=0 allowed=0 pending=0 delayed=1 requests=5 retries=1 successful=4 shed=1\n`))
}

// TestBudgetLogIsQuiet has nothing to tell of, or has told of it a while ago.
func TestBudgetLogIsQuiet(t *testing.T) {
	for _, tt := range []struct {
		name     string
		every    time.Duration
		requests int
		most     int
	}{
		{"an empty queue", 10 * time.Millisecond, 0, 0},
		{"each hour", time.Hour, 1, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := startRedis(t)
			hold := make(chan struct{})
			g := newGateway(t, holding(hold))
			r.fill("q", tt.requests)
			d := begin(t, r, setup{cfg: func(c *dispatch.Config) { c.BudgetLog = tt.every }}, simple(g))
			eventually(t, "all are in flight", func() bool { return len(g.sent()) == tt.requests })
			quietly()
			if log := d.logs(); strings.Count(log, "msg=budget") > tt.most {
				t.Errorf("the log says more than %d times of the budget\n%s", tt.most, log)
			}
			close(hold)
		})
	}
}
