package selectservice_test

import (
	"context"
	"flag"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"spillway/router"
	"spillway/selectservice"
)

// latencyOnly is a policy with one class, whose requests wait for a rank that computes no prompt, so
// many of them for each worker.
func latencyOnly(t *testing.T, perWorker int) router.Config {
	t.Helper()
	rc := router.DefaultConfig()
	policies, err := router.ParsePolicies(fmt.Appendf(nil, "default_policy_family: f\nuncached_isl_buckets: [{min_tokens: 0, bucket: b}]\npolicy_classes:\n"+
		"  - {name: latency, policy_family: f, cache_bucket: b, quantum: 1, prefill_busy_threshold: 0, request_queue_limit_per_worker: %d}\n", perWorker))
	if err != nil {
		t.Fatal(err)
	}
	rc.Queue.Policies = policies
	return rc
}

const idle = 8 // workers

func startLatencyOnly(t *testing.T, perWorker int) *running {
	s := startWith(t, config(), latencyOnly(t, perWorker), selectservice.Link{})
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

var rounds = flag.Int("rounds", 100, "how often the tests of atomicity have a burst come")

// TestAtomicRefusals checks that of 64 calls at once for 8 idle workers none of which may take two,
// exactly 8 get one each, and 56 are refused with the reason.
func TestAtomicRefusals(t *testing.T) {
	s := startLatencyOnly(t, 0)
	for round := range *rounds {
		got := make(chan answered, 64)
		for i := range cap(got) {
			go s.ask(fmt.Sprintf("r%d", i), got)
		}
		workers := map[string]bool{}
		var booked []string
		refused := 0
		for range cap(got) {
			switch a := <-got; a.status {
			case 200:
				booked = append(booked, a.id)
				workers[between(a.text, `"worker_id":`, ",")] = true
			case 503:
				refused++
				if want := `,"details":{"policy_class":"latency","limit_kind":"requests","current":0,"limit":0}}`; !strings.HasSuffix(a.text, want) {
					t.Fatalf("round %d: refused with %s", round, a.text)
				}
			default:
				t.Fatalf("round %d: %d %s", round, a.status, a.text)
			}
		}
		if len(booked) != idle || len(workers) != idle || refused != 56 {
			t.Fatalf("round %d: %d booked on %d workers, %d refused", round, len(booked), len(workers), refused)
		}
		for _, id := range booked {
			s.do("DELETE", "/reservations/"+id, "", 200)
		}
	}
	s.empty()
}

// TestAtomicWaiting checks that of 24 calls 8 get a worker, 8 wait and 8 are refused, and that each
// DELETE lets exactly one go.
func TestAtomicWaiting(t *testing.T) {
	s := startLatencyOnly(t, 1)
	for round := range *rounds {
		got := make(chan answered, 3*idle)
		for i := range cap(got) {
			go s.ask(fmt.Sprintf("r%d", i), got)
		}
		var booked []string
		for refused := 0; len(booked)+refused < 2*idle; {
			switch a := <-got; a.status {
			case 200:
				booked = append(booked, a.id)
			case 503:
				refused++
			default:
				t.Fatalf("round %d: %d %s", round, a.status, a.text)
			}
		}
		if len(booked) != idle {
			t.Fatalf("round %d: %d booked, want %d", round, len(booked), idle)
		}
		if why := s.lacks("/loads", `[{"pending_count":8,"pending_isl_tokens":32}]`); why != "" {
			t.Fatalf("round %d: %s", round, why)
		}
		for i, id := range booked {
			s.do("DELETE", "/reservations/"+id, "", 200)
			if why := s.lacks("/loads", fmt.Sprintf(`[{"pending_count":%d}]`, idle-1-i)); why != "" {
				t.Fatalf("round %d, DELETE %d: %s", round, i, why)
			}
			a := <-got
			if a.status != 200 {
				t.Fatalf("round %d: after a DELETE %d %s", round, a.status, a.text)
			}
			booked = append(booked, a.id)
		}
		for _, id := range booked[idle:] {
			s.do("DELETE", "/reservations/"+id, "", 200)
		}
	}
	s.empty()
}

// TestWaitingClientGone checks that a client that leaves while it waits leaves the queue, and that
// one that is let go at that moment leaves no booking.
func TestWaitingClientGone(t *testing.T) {
	s := startLatencyOnly(t, 1000)
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

// TestWorkersWaitedFor checks that those who wait hear of the end of the only worker that they may go
// to, and of the end of the process.
func TestWorkersWaitedFor(t *testing.T) {
	s := startLatencyOnly(t, 1000)
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
