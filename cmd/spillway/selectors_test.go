package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// TestTwoSelectors is scenario 23 and what goes with it: A publishes, B listens, and C comes late
// and recovers the index from A.
func TestTwoSelectors(t *testing.T) {
	sim := startSimulated(t, 2, 1, 4)
	port := freePorts(t, 2)
	peer := fmt.Sprintf("tcp://127.0.0.1:%d", port)
	a := startSelector(t, "--replica-sync-port", fmt.Sprint(port))
	b := startSelector(t, "--replica-sync-port", fmt.Sprint(port+1), "--replica-sync-peers", peer)
	a.register(sim)
	b.register(sim)
	b.do(step{do: "GET /replica_sync/peers", status: 200, want: `["` + peer + `"]`})
	b.do(step{do: "POST /replica_sync/register_peer", body: `{"endpoint":"` + peer + `"}`, status: 200})
	b.do(step{do: "POST /replica_sync/register_peer", body: `{"endpoint":"http://x"}`, status: 400, text: "endpoint"})
	b.do(step{do: "POST /replica_sync/deregister_peer", body: `{"endpoint":"tcp://127.0.0.1:9"}`, status: 404})

	sum := func(s *selector) (l loadOf) {
		for _, p := range s.loads() {
			for _, x := range p.Loads {
				l.Prefill, l.Blocks, l.Requests = l.Prefill+x.Prefill, l.Blocks+x.Blocks, l.Requests+x.Requests
			}
		}
		return l
	}
	become := func(want loadOf) {
		t.Helper()
		eventually(t, fmt.Sprintf("B has %+v", want), func() bool { return sum(b) == want })
	}
	// What is published before B has subscribed is lost, so the first booking may need a few tries.
	tries := 0
	eventually(t, "B hears of a booking", func() bool {
		tries++
		a.post("/select_and_reserve", fmt.Sprintf(`{"model_name":"sim-model","token_ids":[9],"reservation_id":"try%d"}`, tries), 200)
		a.ask(http.MethodDelete, fmt.Sprint("/reservations/try", tries), "", 200)
		_, page := fetch(t, b.url+"/metrics")
		return strings.Contains(page, `spillway_replica_outcomes_total{kind="add",result="changed"}`) &&
			!strings.Contains(page, `spillway_replica_outcomes_total{kind="add",result="changed"} 0`)
	})
	become(loadOf{})
	a.post("/select_and_reserve", `{"model_name":"sim-model","token_ids":[1,2,3,4],"reservation_id":"r"}`, 200)
	become(loadOf{Prefill: 4, Blocks: 1, Requests: 1})
	b.do(step{do: "POST /select_and_reserve", body: `{"model_name":"sim-model","token_ids":[1,2,3,4],"reservation_id":"r"}`, status: 409, text: "already exists"})
	a.do(step{do: "POST /reservations/r/prefill_complete", status: 200})
	become(loadOf{Blocks: 1, Requests: 1})
	a.do(step{do: "POST /reservations/r/output_block", body: `{}`, status: 200})
	a.post("/reservations", `{"reservation_id":"s","model_name":"sim-model","worker_id":1,"sequence_hashes":[5,6],"isl_tokens":8}`, 201)
	become(loadOf{Blocks: 3, Requests: 2}) // what came after the output block has come, and nothing of that
	// Either may end it, and A does not hear B.
	b.do(step{do: "DELETE /reservations/s", status: 200})
	become(loadOf{Blocks: 1, Requests: 1})
	a.do(step{do: "DELETE /reservations/s", status: 200})
	a.do(step{do: "DELETE /reservations/r", status: 200})
	become(loadOf{})
	// Of a worker that B does not know it hears in vain.
	a.do(step{do: "POST /workers", status: 201, body: `{"worker_id":77,"model_name":"other","endpoint":"http://x","block_size":4,"kv_events_endpoint":"tcp://127.0.0.1:1"}`})
	a.post("/select_and_reserve", `{"model_name":"other","token_ids":[1],"reservation_id":"o"}`, 200)
	eventually(t, "B drops what it does not know", func() bool {
		_, page := fetch(t, b.url+"/metrics")
		return strings.Contains(page, `spillway_replica_outcomes_total{kind="add",result="partition"} 1`)
	})
	if got := len(b.loads()); got != 1 {
		t.Errorf("B has %d partitions, want the 1 that it was told of", got)
	}

	prompt := strings.Repeat("abcdefgh", 16)
	postText(t, sim.url+"/v1/completions", `{"model":"sim-model","prompt":"`+prompt+`","max_tokens":1}`)
	tokens := asJSON(read[struct{ Tokens []uint32 }](t, postText(t, sim.url+"/tokenize", `{"prompt":"`+prompt+`"}`)).Tokens)
	overlap := step{do: "POST /overlap_scores", body: `{"model_name":"sim-model","token_ids":` + tokens + `}`, status: 200,
		want: `{"workers":[{"worker_id":1,"device_blocks":8},{"worker_id":2,"device_blocks":0}]}`}
	eventually(t, "A knows the blocks", func() bool {
		_, got := a.call("POST", "/overlap_scores", overlap.body)
		return strings.Contains(got, `"device_blocks":8`)
	})
	sim.kill() // so that C can learn of the blocks from A alone
	c := startSelector(t, "--indexer-peers", a.url)
	if got, _ := c.call("GET", "/health", ""); got != 200 {
		t.Errorf("C, which recovers, is not healthy: %d", got)
	}
	c.register(sim) // waits for the recovery
	c.do(step{do: "GET /ready", status: 200})
	c.do(overlap)
}
