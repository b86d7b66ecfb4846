package dispatch_test

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"spillway/dispatch"
)

// TestHangingGate has a gate's Redis that takes what it is asked and says nothing, while two other groups go
// on: one without a gate to be asked, and one whose gate is another Redis. They do not wait for it: many
// messages of theirs are claimed and have their results, one after the other, while it is asked once. When
// it answers again, its messages go too.
func TestHangingGate(t *testing.T) {
	r, quotas := startRedis(t), startRedis(t)
	g := newGateway(t, nil)
	gated := func(name string, quotas *server) queueDoc {
		return queueDoc{"id": "id-" + name, "queue_name": name, "igw_base_url": g.URL, "worker_pool_id": name, "gate_type": "redis-quota",
			"gate_params": map[string]any{"address": quotas.addr(), "mode": "concurrency", "limit": 4, "window": "1s"}}
	}
	user := func(s *dispatch.Submission) { s.Metadata = map[string]string{"userid": "u"} }
	d := begin(t, r, setup{
		pools: `[{"id":"hangs","workers":4},{"id":"asks","workers":4},{"id":"plain","workers":4}]`,
		cfg:   func(c *dispatch.Config) { c.RefuseHold = 10 * time.Millisecond },
	}, gated("hangs", quotas), gated("asks", r), queueDoc{"queue_name": "plain", "igw_base_url": g.URL, "worker_pool_id": "plain"})
	r.enqueue("hangs", "before", prompt, user)
	r.results("result-list", 1)
	if err := quotas.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	const all = 20
	for i := range all {
		r.enqueue("hangs", fmt.Sprintf("hangs%d", i), prompt, user)
	}
	asked := func() float64 { return d.metric("gate_decisions_total", "id-hangs", "error") }
	for n, while, begun := 0, asked(), time.Now(); n < 20; n++ {
		if now := asked(); now != while {
			n, while = 0, now
		}
		if time.Since(begun) > patience {
			t.Fatal("others wait for the gate that hangs")
		}
		r.enqueue("asks", fmt.Sprintf("asks%d", n), prompt, user)
		r.enqueue("plain", fmt.Sprintf("plain%d", n), prompt)
		for _, o := range r.results("result-list", 2) {
			if o.StatusCode != 200 || strings.HasPrefix(o.ID, "hangs") {
				t.Fatalf("result %+v while the gate hangs", o)
			}
		}
	}
	eventually(t, "the gate has been asked", func() bool { return asked() > 0 })
	if err := quotas.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	r.results("result-list", all)
	eventually(t, "nothing is left", func() bool { return r.left("hangs")+r.left("asks")+r.left("plain") == "" })
}
