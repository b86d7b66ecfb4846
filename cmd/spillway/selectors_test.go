package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// twoSelectors is scenario 23 and what goes with it: A publishes, B listens, and C comes late
// and recovers the index from A.
func twoSelectors(t *testing.T, f *engines, a *selector) {
	peer := "tcp://127.0.0.1:" + a.cmd.Args[len(a.cmd.Args)-1]
	b := startSelector(t, "--replica-sync-port", fmt.Sprint(unusedPort(t)), "--replica-sync-peers", peer)
	for _, s := range []*selector{a, b} {
		s.do(f.registers(1))
		s.do(f.registers(2))
	}
	b.do(step{do: "GET /replica_sync/peers", status: 200, want: `["` + peer + `"]`})
	b.do(step{do: "POST /replica_sync/register_peer", body: `{"endpoint":"` + peer + `"}`, status: 200})
	b.do(step{do: "POST /replica_sync/register_peer", body: `{"endpoint":"http://x"}`, status: 400, text: "endpoint"})
	b.do(step{do: "POST /replica_sync/deregister_peer", body: `{"endpoint":"tcp://127.0.0.1:9"}`, status: 404})

	// What is published before B has subscribed is lost, so the first booking may need a few tries.
	tries := 0
	eventually(t, "B hears of a booking", func() bool {
		tries++
		a.post("/select_and_reserve", fmt.Sprintf(`{"model_name":"model","token_ids":[9],"reservation_id":"try%d"}`, tries), 200)
		a.ask(http.MethodDelete, fmt.Sprint("/reservations/try", tries), "", 200)
		return b.outcomes("changed") > 0
	})
	b.becomes(loadOf{})
	a.post("/select_and_reserve", reserve14, 200)
	b.becomes(loadOf{Prefill: 4, Blocks: 1, Requests: 1})
	b.do(step{do: "POST /select_and_reserve", body: reserve14, status: 409, text: "already exists"})
	a.do(step{do: "POST /reservations/res-a/prefill_complete", status: 200})
	b.becomes(loadOf{Blocks: 1, Requests: 1})
	a.do(step{do: "POST /reservations/res-a/output_block", body: `{}`, status: 200})
	a.post("/reservations", `{"reservation_id":"s","model_name":"model","worker_id":1,"sequence_hashes":[5,6],"isl_tokens":8}`, 201)
	a.becomes(loadOf{Blocks: 4, Requests: 2})
	b.becomes(loadOf{Blocks: 3, Requests: 2}) // what came after the output block has come, and nothing of that
	// Either may end it, and A does not hear B.
	b.do(step{do: "DELETE /reservations/s", status: 200})
	b.becomes(loadOf{Blocks: 1, Requests: 1})
	a.do(step{do: "DELETE /reservations/s", status: 200})
	a.do(step{do: "DELETE /reservations/res-a", status: 200})
	b.becomes(loadOf{})
	unknownToOneSelector(t, f, a, b)
	lateSelector(t, f, a)
}

// unknownToOneSelector has A book on a worker and in a partition of which B was not told.
func unknownToOneSelector(t *testing.T, f *engines, a, b *selector) {
	a.do(f.registers(3))
	a.do(f.registers(4, `"model"`, `"other"`))
	a.post("/select_and_reserve", `{"model_name":"other","token_ids":[1],"reservation_id":"o"}`, 200)
	a.post("/reservations", `{"reservation_id":"p","model_name":"model","worker_id":3,"sequence_hashes":[5],"isl_tokens":4}`, 201)
	eventually(t, "B drops what it does not know", func() bool { return b.outcomes("partition") == 1 && b.outcomes("rank") == 1 })
	b.becomes(loadOf{})
	if all := b.loads(); len(all) != 1 || len(all[0].Loads) != 2 {
		t.Errorf("B has %+v, want one partition with the two workers that it was told of", all)
	}
	b.do(step{do: "DELETE /reservations/p", status: 200})
	a.becomes(loadOf{Prefill: 1, Blocks: 1, Requests: 2})
}

// lateSelector has a process recover the index from A, by way of somebody slow.
func lateSelector(t *testing.T, f *engines, a *selector) {
	f.hold(a, &placement{inModel, 1, 0, block14})
	asked, answer := make(chan struct{}, 1), make(chan struct{})
	slow := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- struct{}{}
		<-answer
		resp, err := http.Get(a.url + r.URL.Path)
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = io.Copy(w, resp.Body) // C says what it has heard
		_ = resp.Body.Close()
	}))
	defer slow.Close()
	c := startSelector(t, "--indexer-peers", slow.URL)
	<-asked
	registered := make(chan int, 1)
	go func() {
		// Its events are nobody's, so that C can learn of the blocks from A alone.
		status, _ := c.call("POST", "/workers", f.body(1, fmt.Sprint(f.base), "1", fmt.Sprint(f.base+f.count*f.dp), "1"))
		registered <- status
	}()
	for range 20 {
		c.do(step{do: "GET /health", status: 200})
		c.do(step{do: "GET /ready", status: 503, want: `{"ready":false,"schedulable_workers":0,"workers":[]}`})
	}
	select {
	case status := <-registered:
		t.Errorf("before the index is recovered a registration is answered %d", status)
		registered <- status
	default:
	}
	close(answer)
	if status := <-registered; status != 201 {
		t.Errorf("a registration that waited for the recovery is answered %d", status)
	}
	c.do(step{do: "GET /ready", status: 200, want: `{"ready":true,"schedulable_workers":1}`})
	c.do(overlaps(inModel, `[{"worker_id":1,"device_blocks":1}]`))
}

// becomes waits until the sum over all ranks is that.
func (s *selector) becomes(want loadOf) {
	s.t.Helper()
	eventually(s.t, fmt.Sprintf("the load is %+v", want), func() bool {
		var sum loadOf
		for _, p := range s.loads() {
			for _, l := range p.Loads {
				sum.Prefill, sum.Blocks, sum.Requests = sum.Prefill+l.Prefill, sum.Blocks+l.Blocks, sum.Requests+l.Requests
			}
		}
		return sum == want
	})
}

// outcomes is how many bookings of other replicas had such a result.
func (s *selector) outcomes(result string) (n int) {
	s.t.Helper()
	_, page := fetch(s.t, s.url+"/metrics")
	_, line, ok := strings.Cut(page, "\n"+`spillway_replica_outcomes_total{kind="add",result="`+result+`"} `)
	if _, err := fmt.Sscan(line, &n); !ok || err != nil {
		s.t.Fatalf("no count of bookings with the result %s: %v", result, err)
	}
	return n
}
