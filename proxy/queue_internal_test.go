package proxy

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"spillway/busy"
	"spillway/httperr"
	"spillway/router"
	"spillway/worker"
)

// TestOrder has what a request says of its place in the queue.
func TestOrder(t *testing.T) {
	start := time.Now()
	in := func(d time.Duration) time.Time { return start.Add(d) }
	const body = `{"nvext":{"agent_hints":{"priority":-4}}}`
	for _, tt := range []struct {
		name     string
		headers  []string
		body     string
		disabled bool
		want     router.Order
	}{
		{name: "nothing"},
		{name: "all", headers: []string{"X-Dynamo-Request-Priority:  -7 ", "X-Dynamo-Request-Strict-Priority: 4294967295", "X-Llm-D-Slo-Ttft-Ms: 1500", "X-Llm-D-Inference-Fairness-Id: f"},
			want: router.Order{Tenant: "f", Priority: -7, StrictPriority: 1<<32 - 1, Objective: in(1500 * time.Millisecond), Deadline: in(1500 * time.Millisecond)}},
		{name: "hints disabled", disabled: true, body: body, headers: []string{"X-Dynamo-Request-Priority: 1", "X-Dynamo-Request-Strict-Priority: 1", "X-Llm-D-Slo-Ttft-Ms: 1", "X-Llm-D-Inference-Fairness-Id: f"}},
		{name: "nonsense", headers: []string{"X-Dynamo-Request-Priority: 2147483648", "X-Dynamo-Request-Strict-Priority: -1", "X-Llm-D-Slo-Ttft-Ms: 0", "X-Llm-D-Inference-Fairness-Id: "}},
		{name: "body", body: body, want: router.Order{Priority: -4}},
		{name: "header before body", body: body, headers: []string{"X-Dynamo-Request-Priority: 0"}},
		{name: "malformed header", body: body, headers: []string{"X-Dynamo-Request-Priority: high"}, want: router.Order{Priority: -4}},
		{name: "body without sense", body: `{"nvext":{"agent_hints":{"priority":1.5}}}`},
		{name: "body, too large", body: `{"nvext":{"agent_hints":{"priority":2147483648}}}`},
		{name: "body, twice", body: `{"nvext":{"agent_hints":{"priority":1}}, "n" : 1 , "nvext" : {"agent_hints":{"priority":2}} }`, want: router.Order{Priority: 2}},
		{name: "alias", headers: []string{"X-Slo-Ttft-Ms: 70", "X-Gateway-Inference-Fairness-Id: g"}, want: router.Order{Tenant: "g", Objective: in(70 * time.Millisecond), Deadline: in(70 * time.Millisecond)}},
		{name: "an alias does not stand in", headers: []string{"X-Slo-Ttft-Ms: 70", "X-Llm-D-Slo-Ttft-Ms: soon"}},
		{name: "longer than the queue's own limit", headers: []string{"X-Slo-Ttft-Ms: 18446744073709551616"}, want: router.Order{Objective: in(24 * time.Hour)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			x := asked(tt.headers...)
			x.s.cfg.QueueTimeout, x.s.cfg.DisableRoutingHints = 5*time.Second, tt.disabled
			x.start, x.stepAt, x.tenant = start, start, "t"
			if tt.body != "" {
				var bad *httperr.Error
				x.body = []byte(tt.body)
				if x.scan, bad = scan(x.body); x.scan.nvext != object {
					t.Fatalf("scan(%s) = %v", tt.body, bad)
				}
			}
			want := tt.want
			if want.Tenant == "" {
				want.Tenant = "t"
			}
			if want.Deadline.IsZero() {
				want.Deadline = in(5 * time.Second)
			}
			if got := x.order(); got != want {
				t.Errorf("order = %+v\nwant %+v", got, want)
			}
		})
	}
}

// TestLeftAndLetGo: the booking that was made for a client at the moment in which it left is freed.
func TestLeftAndLetGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		catalog, err := worker.NewCatalog(nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		limit := busy.DefaultConfig()
		limit.ActivePrefillTokensThreshold = new(uint64(0))
		cfg := router.DefaultConfig()
		cfg.QueueSize = 1
		r := router.New(cfg, limit, catalog, rand.New(rand.NewPCG(1, 1)))
		w, err := worker.Worker{Endpoint: "http://w", Models: []string{"m"}}.Normalize()
		if err != nil {
			t.Fatal(err)
		}
		part, err := r.Register(&w, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := part.Select(router.Query{Reservation: "old", PromptTokens: 1}, time.Now()); err != nil {
			t.Fatal(err)
		}
		waiting := &waiter{ready: make(chan router.Admission, 1), sent: make(chan struct{})}
		ticket := &router.Ticket{Query: router.Query{Reservation: "new", PromptTokens: 1}, Owner: waiting}
		if _, err := part.Wait(ticket, time.Now()); err != nil {
			t.Fatal(err)
		}
		part.Free("old", time.Now())
		admitted := part.Admit(time.Now()) // of which the waiter has not heard yet
		ctx, leave := context.WithCancel(t.Context())
		leave()
		x := &exchange{s: &Server{waitOver: make(chan struct{})}, req: &http.Request{}, ctx: ctx}
		ended := make(chan error, 1)
		go func() {
			_, err := x.awaitTurn(part, ticket, waiting.ready, time.Hour)
			ended <- err
		}()
		synctest.Wait()
		x.s.wake(admitted)
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("awaitTurn = %v, want that the client has left", err)
		}
		if load := part.Tracker.Load(worker.Rank{Worker: w.ID}, time.Now()); load.Requests != 0 || load.PrefillTokens != 0 {
			t.Errorf("load = %+v, want none", load)
		}
	})
}
