package selectservice_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"spillway/router"
	"spillway/selectservice"
	"spillway/worker"
)

// latencyOnly is a policy with one class, whose requests wait for a rank that computes no prompt.
func latencyOnly(t *testing.T) router.Config {
	t.Helper()
	rc := router.DefaultConfig()
	policies, err := router.ParsePolicies([]byte("default_policy_family: f\nuncached_isl_buckets: [{min_tokens: 0, bucket: b}]\npolicy_classes:\n" +
		"  - {name: latency, policy_family: f, cache_bucket: b, quantum: 1, prefill_busy_threshold: 0}\n"))
	if err != nil {
		t.Fatal(err)
	}
	rc.Queue.Policies = policies
	return rc
}

const idle = 8 // workers

func startLatencyOnly(t *testing.T) *running {
	s := startWith(t, config(), latencyOnly(t), selectservice.Link{})
	for id := range idle {
		s.do("POST", "/workers", fmt.Sprintf(`{"worker_id":%d,"endpoint":"http://w","block_size":4,"max_num_batched_tokens":8192}`, id), 201)
	}
	return s
}

// answered is an answer to /select_and_reserve.
type answered struct {
	id     string
	status int
	text   string
}

func (r *running) ask(id string, to chan<- answered) {
	status, text, err := r.call(context.Background(), "POST", "/select_and_reserve", fmt.Sprintf(`{"token_ids":[1,2,3,4],"reservation_id":%q}`, id))
	if err != nil {
		r.t.Error(err)
	}
	to <- answered{id, status, text}
}

// TestClassMetrics checks that who waits and who is refused is told by class.
func TestClassMetrics(t *testing.T) {
	rc := router.DefaultConfig()
	policies, err := router.ParsePolicies([]byte("default_policy_family: f\nuncached_isl_buckets: [{min_tokens: 0, bucket: b}]\npolicy_classes:\n" +
		"  - {name: batch, policy_family: f, cache_bucket: b, quantum: 1}\n" +
		"  - {name: latency, quantum: 1, prefill_busy_threshold: 0, raw_isl_token_queue_limit_per_worker: 5}\n"))
	if err != nil {
		t.Fatal(err)
	}
	rc.Queue.Policies = policies
	s := startWith(t, config(), rc, selectservice.Link{})
	s.do("POST", "/workers", `{"worker_id":1,"endpoint":"http://w","block_size":4,"max_num_batched_tokens":8192}`, 201)
	s.do("POST", "/select_and_reserve", `{"token_ids":[1,2,3,4],"reservation_id":"b"}`, 200)
	const tokens = 6
	ask := func(ctx context.Context) (int, string) {
		req, err := http.NewRequestWithContext(ctx, "POST", s.url+"/select", strings.NewReader(`{"token_ids":[1,2,3,4,5,6]}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Dynamo-Meta-Policy-Class", "latency")
		res, err := client.Do(req)
		if err != nil {
			return 0, err.Error()
		}
		defer func() { _ = res.Body.Close() }()
		text, _ := io.ReadAll(res.Body)
		return res.StatusCode, string(text)
	}
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan struct{})
	go func() { defer close(left); ask(ctx) }()
	eventually(t, "it waits", func() bool { return s.lacks("/loads", `[{"pending_count":1}]`) == "" })
	for range 3 {
		if status, text := ask(t.Context()); status != 503 || !strings.Contains(text, `"limit_kind":"raw_isl_tokens","current":6,"limit":5`) {
			t.Errorf("with %d tokens waiting one more is answered %d %s", tokens, status, text)
		}
	}
	page := s.do("GET", "/metrics", "", 200)
	leave()
	<-left
	for series, want := range map[string]int{
		`pending_requests{model="default",policy_class="latency",tenant="default"}`: 1, `pending_requests{model="default",policy_class="batch",tenant="default"}`: 0,
		`pending_isl_tokens{model="default",policy_class="latency",tenant="default"}`: tokens, `pending_cached_tokens{model="default",policy_class="latency",tenant="default"}`: 0,
		`queue_refused_total{limit_kind="raw_isl_tokens",model="default",policy_class="latency",tenant="default"}`: 3,
		`queue_refused_total{limit_kind="requests",model="default",policy_class="latency",tenant="default"}`:       0,
		`queue_refused_total{limit_kind="raw_isl_tokens",model="default",policy_class="batch",tenant="default"}`:   0,
	} {
		if line := fmt.Sprintf("\nspillway_select_%s %d\n", series, want); !strings.Contains(page, line) {
			t.Errorf("the metrics do not have%s", line)
		}
	}
}

// TestWaitingClientGone checks that a client that leaves while it waits leaves the queue, and that
// one that is let go at that moment leaves no booking.
func TestWaitingClientGone(t *testing.T) {
	s := startLatencyOnly(t)
	var booked []string
	got := make(chan answered, idle)
	for i := range idle {
		s.ask(fmt.Sprintf("b%d", i), got)
		booked = append(booked, (<-got).id)
	}
	for round := range 30 {
		ctx, cancel := context.WithCancel(context.Background())
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				_, _, _ = s.call(ctx, "POST", "/select_and_reserve", fmt.Sprintf(`{"token_ids":[1,2,3,4],"reservation_id":"g%d"}`, i)) // it is to fail
			})
		}
		eventually(t, "all wait", func() bool { return s.lacks("/loads", `[{"pending_count":8}]`) == "" })
		if round%2 == 0 { // one is let go while it leaves
			all.Go(func() { s.do("DELETE", "/reservations/"+booked[0], "", 200) })
		}
		cancel()
		all.Wait()
		eventually(t, "nobody waits", func() bool { return s.lacks("/loads", `[{"pending_count":0}]`) == "" })
		if round%2 == 0 {
			// An answer that was handed over stands, whether or not it arrived.
			eventually(t, "what was booked for who left is free", func() bool {
				for i := range 8 {
					s.do("DELETE", fmt.Sprint("/reservations/g", i), "", 200)
				}
				return strings.Count(s.do("GET", "/loads", "", 200), `"active_requests":1`) == idle-1
			})
			s.ask(booked[0], got)
			<-got
		}
	}
	for _, id := range booked {
		s.do("DELETE", "/reservations/"+id, "", 200)
	}
	s.empty()
}

// TestReplicasWake checks that what a replica frees lets go who waits for it.
func TestReplicasWake(t *testing.T) {
	s := startLatencyOnly(t)
	got := make(chan answered, idle)
	for i := range idle {
		s.ask(fmt.Sprintf("b%d", i), got)
		<-got
	}
	go s.ask("last", got)
	eventually(t, "it waits", func() bool { return s.lacks("/loads", `[{"pending_count":1}]`) == "" })
	books, _, changed, _ := s.server.Books(worker.Partition{Model: "default", Tenant: "default"})
	rank, _ := books.Free("b3", time.Now())
	changed(rank.Worker)
	if why := s.lacks("/loads", `[{"pending_count":0}]`); why != "" {
		t.Errorf("after a replica has freed what was in the way: %s", why)
	}
	if a := <-got; a.status != 200 {
		t.Errorf("after a replica has freed what was in the way: %d %s", a.status, a.text)
	}
}

// TestWorkersWaitedFor checks that those who wait hear of the end of the only worker that they may go
// to, and of the end of the process.
func TestWorkersWaitedFor(t *testing.T) {
	s := startLatencyOnly(t)
	got := make(chan answered, idle)
	for i := range idle {
		s.ask(fmt.Sprintf("b%d", i), got)
		<-got
	}
	pinned := make(chan answered, 1)
	go func() {
		status, text, _ := s.call(context.Background(), "POST", "/select", `{"token_ids":[1],"pinned_worker":{"worker_id":3,"dp_rank":0}}`)
		pinned <- answered{"", status, text}
	}()
	eventually(t, "it waits", func() bool { return s.lacks("/loads", `[{"pending_count":1}]`) == "" })
	s.do("DELETE", "/workers/3", "", 200)
	if a := <-pinned; a.status != 503 || !strings.Contains(a.text, "no endpoints available to route work") {
		t.Errorf("after the end of its worker: %d %s", a.status, a.text)
	}
	go s.ask("last", pinned)
	eventually(t, "it waits", func() bool { return s.lacks("/loads", `[{"pending_count":1}]`) == "" })
	if err := s.stop(); err != nil {
		t.Error(err)
	}
	if a := <-pinned; a.status != 503 || !strings.Contains(a.text, "endpoint subscriber shutdown") {
		t.Errorf("at the end of the process: %d %s", a.status, a.text)
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}
