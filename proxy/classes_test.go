package proxy_test

import (
	"slices"
	"testing"

	"spillway/busy"
	"spillway/router"
)

// TestClasses has requests wait in the classes of a policy file, without busy thresholds, while the
// one rank has a prompt to compute.
func TestClasses(t *testing.T) {
	policies, err := router.ParsePolicies([]byte(`
default_policy_family: standard
uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
policy_classes:
  - {name: strict, policy_family: standard, cache_bucket: all, quantum: 1, prefill_busy_threshold: 0, request_queue_limit_per_worker: 1}
  - {name: lax, quantum: 1, prefill_busy_threshold: 1000000}`))
	if err != nil {
		t.Fatal(err)
	}
	cfg := router.DefaultConfig()
	cfg.Queue.Policies = policies
	s, turn := onTurn(t)
	f := begin(t, setup{router: cfg, busy: busy.DefaultConfig(), proxy: patient}, served("w", s))
	running := f.asking(chatBody, "X-Request-Id: running")
	eventually(t, "the worker has a request", func() bool { return len(s.seen()) == 1 })
	waits := f.asking(chatBody, "X-Request-Id: waits", "X-Dynamo-Meta-Policy-Class: unknown")
	f.waiting(1)
	for class, want := range map[string]string{"strict": "1", "lax": "0"} {
		series := `dynamo_frontend_router_queue_pending_requests{model="m",policy_class="` + class + `",worker_type="decode"}`
		if got := f.metric(series); got != want {
			t.Errorf("%s = %s, want %s", series, got, want)
		}
	}
	const full = `{"message":"Service temporarily unavailable: All workers are busy, please retry later","type":"service_unavailable","code":503,` +
		`"details":{"policy_class":"strict","limit_kind":"requests","current":1,"limit":1}}`
	f.chat(chatBody).is(t, "one too many", 503, full, "X-Spillway-Reason: queue-full")
	passes := f.asking(chatBody, "X-Request-Id: passes", "X-Dynamo-Meta-Policy-Class: lax")
	eventually(t, "the worker has another request", func() bool { return len(s.seen()) == 2 })
	for range 3 {
		turn <- struct{}{}
	}
	for _, answered := range []<-chan got{running, passes, waits} {
		(<-answered).is(t, "an answer", 200, reply)
	}
	var order []string
	for _, r := range s.seen() {
		order = append(order, r.header.Get("X-Request-Id"))
	}
	if want := []string{"running", "passes", "waits"}; !slices.Equal(order, want) {
		t.Errorf("the worker got %q, want %q", order, want)
	}
	series := `dynamo_frontend_router_queue_backpressure_total{model="m",policy_class="all",reason="queue-full",worker_type="decode"}`
	if got := f.metric(series); got != "1" {
		t.Errorf("%s = %s, want 1", series, got)
	}
}
