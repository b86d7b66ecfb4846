package dispatch_test

import (
	"context"
	"errors"
	"regexp"
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

// TestBudgetLog looks for the lines from which free capacity can be computed.
func TestBudgetLog(t *testing.T) {
	r := startRedis(t)
	hold := make(chan struct{})
	g := newGateway(t, holding(hold))
	q := simple(g)
	q["gate_type"] = "spillway"
	q["gate_params"] = map[string]any{"pool": "m", "baseline": 0.1, "accounting": "cap", "endpoint": pool(t, func() string { return capacity(0.3, 5, time.Now()) })}
	r.fill("q", 5)
	d := begin(t, r, setup{cfg: func(c *dispatch.Config) { c.BudgetLog = 10 * time.Millisecond }}, q)
	logged := func(pattern string) func() bool {
		re := regexp.MustCompile(pattern)
		return func() bool { return re.MatchString(d.logs()) }
	}
	eventually(t, "the log tells of the budget", logged(
		`msg=budget group=m state=open d=0\.7 b=0\.1 max_sys=5 n=(3|2\.9+) ledger=3 in_flight=3 allowed=0 pending=2 delayed=0 requests=3 retries=0 successful=0 shed=0\n`))
	close(hold)
	r.results("result-list", 5)
}

// TestBudgetLogIsQuiet has nothing to tell of.
func TestBudgetLogIsQuiet(t *testing.T) {
	r := startRedis(t)
	g := newGateway(t, nil)
	d := begin(t, r, setup{cfg: func(c *dispatch.Config) { c.BudgetLog = 10 * time.Millisecond }}, simple(g))
	for range 20 {
		time.Sleep(10 * time.Millisecond)
	}
	if log := d.logs(); regexp.MustCompile(`msg=budget`).MatchString(log) {
		t.Errorf("of an empty queue the log says\n%s", log)
	}
}
