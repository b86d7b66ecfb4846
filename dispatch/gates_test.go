package dispatch_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"spillway/dispatch"
)

// quietly gives what must not happen the time to.
func quietly() {
	for range 20 {
		time.Sleep(20 * time.Millisecond)
	}
}

// TestPoolGate has the gate of a pool of workers made of a source and of a limit. Messages wait in their
// workers while the source leaves no room.
func TestPoolGate(t *testing.T) {
	r := startRedis(t)
	g := newGateway(t, nil)
	r.Set(t.Context(), "dispatch-gate-budget", "0", 0)
	pools := fmt.Sprintf(`[{"id":"default","workers":2,"gate_type":"wait-on-refuse","gate_params":{"gate":{"gate_type":"composite","gate_params":{"gates":[
		{"gate_type":"redis","gate_params":{"address":%q}},{"gate_type":"local-max-concurrency","gate_params":{"limit":1}}]}}}}]`, r.addr())
	d := begin(t, r, setup{pools: pools}, simple(g))
	eventually(t, "the source is read", func() bool { return d.metric("gate_state", "worker pool default gate 1", "baseline") == 1 })
	r.fill("q", 6)
	eventually(t, "both workers have a message", func() bool { return d.metric("leases_held") == 2 })
	quietly()
	if n := len(g.sent()); n != 0 {
		t.Fatalf("%d requests were sent through a closed gate", n)
	}
	r.Set(t.Context(), "dispatch-gate-budget", "0.5", 0)
	r.results("result-list", 6)
	if g.most != 1 {
		t.Errorf("%d requests were in flight at once, want 1", g.most)
	}
}

// TestGateHasAsManyPlacesAsWorkers has a limit that workers alone keep: whoever finds one of them free finds
// a place too, so nobody is refused and passed over for RefuseHold.
func TestGateHasAsManyPlacesAsWorkers(t *testing.T) {
	const gate = `"gate_type":"local-max-concurrency","gate_params":{"limit":1}`
	for name, of := range map[string]struct {
		pool  string
		queue queueDoc
	}{
		"queue": {"", queueDoc{"gate_type": "local-max-concurrency", "gate_params": map[string]any{"limit": 1}}},
		"pool":  {"," + gate, queueDoc{}},
	} {
		t.Run(name, func(t *testing.T) {
			r := startRedis(t)
			q := simple(newGateway(t, nil))
			for k, v := range of.queue {
				q[k] = v
			}
			r.fill("q", 50)
			d := begin(t, r, setup{pools: `[{"id":"default","workers":1` + of.pool + `}]`}, q)
			r.results("result-list", 50)
			if n := d.metric("gate_decisions_total", "quota_exhausted"); n != 0 {
				t.Errorf("%v times a message was refused", n)
			}
		})
	}
}

// TestTiers has a saturated pool: what is over its quota and cannot wait is dropped, all else waits.
func TestTiers(t *testing.T) {
	r := startRedis(t)
	g := newGateway(t, nil)
	r.Set(t.Context(), "dispatch-gate-budget", "0", 0)
	queue := func(name string, labels map[string]string) queueDoc {
		return queueDoc{"id": "id-" + name, "queue_name": name, "igw_base_url": g.URL, "labels": labels, "gate_type": "tier-priority-admission", "gate_params": map[string]any{
			"saturation_gate": "redis", "saturation_gate_params": fmt.Sprintf(`{"address":%q}`, r.addr()),
		}}
	}
	d := begin(t, r, setup{},
		queue("drops", map[string]string{"tier": "interactive", "classification": "overflow"}),
		queue("waits", map[string]string{"tier": "interactive", "classification": "reserved"}),
		queue("refuses", map[string]string{"tier": "batch", "classification": "overflow"}))
	for _, q := range []string{"waits", "refuses", "drops"} {
		r.enqueue(q, q, prompt)
	}
	if got := r.results("result-list", 1)[0]; got.ID != "drops" || got.StatusCode != 429 || got.ErrorCode != "GATE_DROPPED" || *got.Payload != `{"error": "Too Many Requests", "code": 429}` {
		t.Errorf("result %+v", got)
	}
	eventually(t, "the others were refused", func() bool {
		return d.metric("gate_decisions_total", "id-waits", "quota_exhausted") > 0 && d.metric("gate_decisions_total", "id-refuses", "quota_exhausted") > 0
	})
	if n := len(g.sent()); n != 0 {
		t.Fatalf("%d requests were sent through a closed gate", n)
	}
	r.Set(t.Context(), "dispatch-gate-budget", "1", 0)
	r.results("result-list", 2)
}

// TestQuotaIsKept has a request that takes longer than the quota's window, which is shorter than the time
// between renewals of leases: it is counted all the same.
func TestQuotaIsKept(t *testing.T) {
	r := startRedis(t)
	hold := make(chan struct{})
	g := newGateway(t, holding(hold))
	q := simple(g)
	q["gate_type"], q["gate_params"] = "redis-quota", map[string]any{"address": r.addr(), "mode": "concurrency", "limit": 1, "window": "9s"}
	r.enqueue("q", "a", prompt, func(s *dispatch.Submission) { s.Metadata = map[string]string{"userid": "alice"} })
	begin(t, r, setup{}, q)
	eventually(t, "it is in flight", func() bool { return len(g.sent()) == 1 })
	last := time.Hour
	eventually(t, "its time is extended", func() bool {
		left := r.PTTL(context.Background(), "quota:userid:alice").Val()
		if left < 0 {
			t.Fatal("it is counted no longer")
		}
		defer func() { last = left }()
		return left > last
	})
	close(hold)
	r.results("result-list", 1)
	eventually(t, "it was given back", func() bool { return r.Get(context.Background(), "quota:userid:alice").Val() == "0" })
}

// TestHungGate has the Redis of quotas take commands and answer none while requests of some queues are in
// flight: their leases are renewed all the same.
func TestHungGate(t *testing.T) {
	const all = 6
	r, quotas := startRedis(t), startRedis(t)
	hold := make(chan struct{})
	g := newGateway(t, holding(hold))
	var queues []queueDoc
	for i := range all {
		name := fmt.Sprint("q", i)
		queues = append(queues, queueDoc{"queue_name": name, "igw_base_url": g.URL, "gate_type": "redis-quota",
			"gate_params": map[string]any{"address": quotas.addr(), "mode": "concurrency", "limit": all, "window": "3s"}})
		r.enqueue(name, name, prompt, func(s *dispatch.Submission) { s.Metadata = map[string]string{"userid": "alice"} })
	}
	d := begin(t, r, setup{cfg: func(c *dispatch.Config) { c.LeaseTTL = 9 * time.Second }, beside: true}, queues...)
	eventually(t, "all are in flight", func() bool { return len(g.sent()) == all })
	if err := quotas.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	goOn := sync.OnceFunc(func() { _ = quotas.cmd.Process.Signal(syscall.SIGCONT) })
	defer goOn()
	ends := map[string]float64{} // of leases
	renewals := map[string]int{} // that were seen
	eventually(t, "leases are renewed while the gate hangs", func() bool {
		if n := d.metric("leases_lost_total"); n != 0 {
			t.Fatalf("%v leases were lost", n)
		}
		least := all
		for i := range all {
			name := fmt.Sprint("q", i)
			lease, err := r.ZRangeWithScores(t.Context(), "{"+name+"}:leases", 0, 0).Result()
			if err != nil || len(lease) != 1 {
				t.Fatalf("the lease in %s: %v, %v", name, lease, err)
			}
			if ends[name] < lease[0].Score {
				renewals[name]++
				ends[name] = lease[0].Score
			}
			least = min(least, renewals[name])
		}
		return least == 3 // the first is how it was before
	})
	goOn()
	close(hold)
	r.results("result-list", all)
	if n := len(g.sent()); n != all {
		t.Errorf("%d requests were sent, want %d", n, all)
	}
}

// TestGateFails has the Redis of a quota go away: the queue waits, without asking again and again, until it
// is back.
func TestGateFails(t *testing.T) {
	r, quotas := startRedis(t), startRedis(t)
	g := newGateway(t, nil)
	q := simple(g)
	q["gate_type"], q["gate_params"] = "redis-quota", map[string]any{"address": quotas.url(), "limit": 100}
	const hold = 200 * time.Millisecond
	d := begin(t, r, setup{cfg: func(c *dispatch.Config) { c.RefuseHold = hold }, beside: true}, q)
	quotas.kill()
	begun := time.Now()
	for i := range 50 {
		r.enqueue("q", fmt.Sprint(i), prompt, func(s *dispatch.Submission) { s.Metadata = map[string]string{"userid": "alice"} })
	}
	eventually(t, "the gate fails", func() bool {
		return d.status().Groups[0].State == "error" && d.metric("gate_state", "error") == 1 && d.metric("gate_decisions_total", "error") > 2
	})
	if n, most := d.metric("gate_decisions_total", "error"), float64(2+time.Since(begun)/hold); n > most {
		t.Errorf("the gate was asked %v times in %v, want at most %v", n, time.Since(begun), most)
	}
	if n := len(g.sent()); n != 0 {
		t.Fatalf("%d requests were sent", n)
	}
	quotas.start()
	r.results("result-list", 50)
	eventually(t, "all is well", func() bool { return d.status().Groups[0].State == "open" })
}

// TestOversize has requests that are larger than N, and one that is larger than all capacity.
func TestOversize(t *testing.T) {
	for _, tt := range []struct {
		policy string
		sizes  string // of what was sent, in order
		code   string // of the largest one's result
		dead   int64
	}{
		{"alone", "700 100 2000 50", "", 0},
		{"reject", "700 100 50", "INVALID_REQUEST", 1},
	} {
		t.Run(tt.policy, func(t *testing.T) {
			r := startRedis(t)
			g := newGateway(t, func(w http.ResponseWriter, _ *http.Request, _ string) { _, _ = io.WriteString(w, "{}") })
			q := simple(g)
			q["gate_type"] = "spillway" // N is 614 bytes of 1024, 921 if all were free
			q["gate_params"] = map[string]any{"pool": "m", "baseline": 0.1, "budget_unit": "bytes", "max_bytes_per_endpoint": 512, "accounting": "cap",
				"oversize_patience": "100ms", "oversize_policy": tt.policy, "endpoint": pool(t, func() string { return capacity(0.3, 10, time.Now()) })}
			for i, size := range []int{700, 100, 2000, 50} {
				r.enqueue("q", fmt.Sprint(i), `{"prompt":"`+strings.Repeat("x", size-len(`{"prompt":""}`))+`"}`, func(s *dispatch.Submission) { s.Deadline += int64(i) })
			}
			d := begin(t, r, setup{}, q)
			codes := map[string]string{}
			for _, o := range r.results("result-list", 4) {
				codes[o.ID] = o.ErrorCode
			}
			var sizes []string
			for _, body := range g.sent() {
				sizes = append(sizes, fmt.Sprint(len(body)))
			}
			if got := strings.Join(sizes, " "); got != tt.sizes || codes["2"] != tt.code || g.most != 1 {
				t.Errorf("sent %s, up to %d at once, results %v, want %s, one at a time, code %q", got, g.most, codes, tt.sizes, tt.code)
			}
			if n, _ := r.XLen(context.Background(), "{q}:dead").Result(); n != tt.dead || d.metric("dead_letters_total", "oversize") != float64(tt.dead) {
				t.Errorf("%d dead letters, want %d", n, tt.dead)
			}
			if got := d.metric("oversize_total"); got != 2 {
				t.Errorf("oversize_total = %v, want 2", got)
			}
		})
	}
}

// TestDedupe submits a request that is in work already.
func TestDedupe(t *testing.T) {
	r := startRedis(t)
	hold := make(chan struct{})
	g := newGateway(t, holding(hold))
	d := begin(t, r, setup{doc: map[string]any{"dedupe": "active"}}, simple(g))
	submit := func(ids ...string) (answer struct {
		Accepted int
		Active   []string
	}) {
		t.Helper()
		var lines strings.Builder
		for _, id := range ids {
			fmt.Fprintf(&lines, `{"id":%q,"deadline":%d,"payload":{"prompt":"hi"}}`+"\n", id, time.Now().Unix()+1000)
		}
		w := httptest.NewRecorder()
		d.Handler().ServeHTTP(w, httptest.NewRequest("POST", "/internal/dispatch/submit", strings.NewReader(lines.String())))
		if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil || w.Code != 200 {
			t.Fatalf("submit: %d %s, %v", w.Code, w.Body, err)
		}
		return answer
	}
	if a := submit("a"); a.Accepted != 1 || len(a.Active) != 0 {
		t.Errorf("the first: %+v", a)
	}
	if a := submit("a", "b"); a.Accepted != 1 || len(a.Active) != 1 || a.Active[0] != "a" {
		t.Errorf("one of two is in work: %+v", a)
	}
	close(hold)
	r.results("result-list", 2)
	eventually(t, "nothing is left", func() bool { return r.left("q") == "" })
	if a := submit("a"); a.Accepted != 1 {
		t.Errorf("it has its result: %+v", a)
	}
	r.results("result-list", 1)
}

// lossy dials connections of which one breaks when Redis has answered 1 for the first time.
type lossy struct{ lost atomic.Bool }

func (l *lossy) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, addr)
	return lossyConn{conn, l}, err
}

type lossyConn struct {
	net.Conn
	*lossy
}

// Read implements net.Conn.
func (c lossyConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err == nil && string(b[:n]) == ":1\r\n" && c.lost.CompareAndSwap(false, true) {
		_ = c.Close()
		return 0, io.EOF
	}
	return n, err
}

// TestDedupeRepeated has the answer to a submission be lost, so that the client sends it once more.
func TestDedupeRepeated(t *testing.T) {
	r := startRedis(t)
	var l lossy
	c := redis.NewClient(&redis.Options{Addr: r.addr(), Dialer: l.dial})
	defer c.Close()
	ctx := t.Context()
	s := dispatch.Submission{ID: "a", Deadline: time.Now().Unix() + 1000, Payload: json.RawMessage(prompt), ResultQueue: "result-list", Once: true}
	if err := dispatch.Enqueue(ctx, c, "q", s, time.Now()); err != nil || !l.lost.Load() {
		t.Fatalf("Enqueue: %v, an answer was lost: %v, want it to be enqueued", err, l.lost.Load())
	}
	if n, err := r.ZCard(ctx, "q").Result(); n != 1 || err != nil {
		t.Errorf("%d requests in the queue, %v, want 1", n, err)
	}
	if err := dispatch.Enqueue(ctx, c, "q", s, time.Now()); !errors.Is(err, dispatch.ErrActive) {
		t.Errorf("Enqueue of what is in work: %v, want ErrActive", err)
	}
}

// TestAdaptive has a gateway that answers the second and third request when both are there: the limit has to
// grow by the first one's success. Then it refuses one, after which one alone is in flight.
func TestAdaptive(t *testing.T) {
	r := startRedis(t)
	var n atomic.Int64
	both, alone := make(chan struct{}), make(chan struct{})
	g := newGateway(t, func(w http.ResponseWriter, req *http.Request, _ string) {
		wait := func(until <-chan struct{}) {
			select {
			case <-until:
			case <-req.Context().Done():
			}
		}
		switch n.Add(1) {
		case 2:
			wait(both)
			w.WriteHeader(429)
		case 3:
			close(both)
			wait(alone)
		}
		_, _ = io.WriteString(w, "{}")
	})
	q := simple(g)
	q["gate_type"], q["gate_params"] = "aimd", map[string]any{"max": 2, "increase": 1}
	r.fill("q", 6)
	d := begin(t, r, setup{cfg: func(c *dispatch.Config) { c.RefuseHold, c.OverloadCooldown = 20*time.Millisecond, 20*time.Millisecond }}, q)
	eventually(t, "one was refused", func() bool { return d.metric("shed_requests_total") == 1 })
	quietly() // the limit is 1, and one is in flight
	if got := n.Load(); got != 3 {
		t.Errorf("%d requests were sent, want 3", got)
	}
	close(alone)
	r.results("result-list", 6)
	if g.most != 2 {
		t.Errorf("%d requests were in flight at once, want 2", g.most)
	}
}
