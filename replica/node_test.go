package replica_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"spillway/replica"
	"spillway/wire"
	"spillway/worker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// node is a Replica that runs, and what it has heard.
type node struct {
	*replica.Replica
	reg  *prometheus.Registry
	stop func()     // ends Run and waits for it
	hold sync.Mutex // locked by a test that lets no delivery go on

	apply func(batch []wire.ReplicaEvent) // is given what is heard, too; or nil

	mu    sync.Mutex
	heard []wire.ReplicaEvent // but for marks
	marks map[string]bool     // those heard, see markID
}

func config(peers ...string) replica.Config {
	cfg := replica.DefaultConfig()
	cfg.Bind, cfg.Peers = "tcp://127.0.0.1:0", peers
	return cfg
}

// prepare makes a node that does not run yet.
func prepare(cfg replica.Config) *node {
	n := &node{reg: prometheus.NewRegistry(), marks: map[string]bool{}}
	n.Replica = replica.New(cfg, n.deliver, n.reg, slog.New(slog.NewTextHandler(io.Discard, nil)))
	return n
}

// pass waits while deliveries are held.
func (n *node) pass() {
	n.hold.Lock()
	defer n.hold.Unlock()
}

func (n *node) deliver(batch []wire.ReplicaEvent) {
	n.pass()
	if n.apply != nil {
		n.apply(batch)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, e := range batch {
		if strings.HasPrefix(e.Reservation, markPrefix) {
			n.marks[e.Reservation] = true
		} else {
			n.heard = append(n.heard, e)
		}
	}
}

func (n *node) start(t testing.TB) *node {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx); close(ended) }()
	n.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run = %v, want nil", err)
		}
	})
	t.Cleanup(n.stop)
	select {
	case <-n.Ready():
	case err := <-ended:
		t.Fatalf("Run = %v before Ready", err)
	}
	return n
}

func start(t testing.TB, peers ...string) *node { return prepare(config(peers...)).start(t) }

func (n *node) events() []wire.ReplicaEvent {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.heard)
}

// has tells whether a node has heard of a reservation, or a mark.
func (n *node) has(id string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.marks[id] || slices.ContainsFunc(n.heard, func(e wire.ReplicaEvent) bool { return e.Reservation == id })
}

// value is what the node's page of metrics says of a series without labels, or with the one given.
func (n *node) value(t testing.TB, name, label string) float64 {
	t.Helper()
	families, err := n.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && (label == "" || len(m.GetLabel()) == 1 && m.GetLabel()[0].GetValue() == label) {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	t.Fatalf("no series %s of %q", name, label)
	return 0
}

func (n *node) expect(t testing.TB, name, label string, want float64) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s of %q to be %v", name, label, want), func() bool { return n.value(t, name, label) == want })
}

// eventually waits until something is so.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// event is an event of a kind about a reservation.
func event(kind wire.ReplicaKind, id string) wire.ReplicaEvent {
	e := wire.ReplicaEvent{Model: "m", Tenant: "default", BlockSize: 16, Reservation: id, Rank: worker.Rank{Worker: 1}, Kind: kind}
	if kind == wire.ReplicaAdd {
		e.Promise = wire.Promise{Hashes: []uint64{1, 2, 3}, TrackPrefill: true, PrefillTokens: 8}
	}
	return e
}

// Marks are events that only tell how far a connection has come.
const markPrefix = "mark "

var marks atomic.Int64

func mark() wire.ReplicaEvent {
	return event(wire.ReplicaFree, fmt.Sprint(markPrefix, marks.Add(1)))
}

// link waits until what one node publishes is heard by others.
func link(t testing.TB, from *node, to ...*node) {
	t.Helper()
	reach(t, from.Publish, to...)
	settle(t, from, to...)
}

func reach(t testing.TB, publish func(wire.ReplicaEvent), to ...*node) {
	t.Helper()
	hear(t, mark(), 20*time.Millisecond, publish, to...)
}

// hear publishes a mark, again whenever it has not been heard for so long, until all have heard it.
func hear(t testing.TB, m wire.ReplicaEvent, again time.Duration, publish func(wire.ReplicaEvent), to ...*node) {
	t.Helper()
	for _, n := range to {
		var due time.Time
		eventually(t, m.Reservation, func() bool {
			if now := time.Now(); now.After(due) {
				publish(m)
				due = now.Add(again)
			}
			return n.has(m.Reservation)
		})
	}
}

// burst is how many rounds of a few events are published before a test lets them arrive. libzmq
// keeps 1000 messages for a connection, and gives room back by the 500; the rest is lost if its
// thread does not run in time.
const burst = 100

// settle waits until all that a node has published is heard by others. On a machine that is busy enough
// a mark is lost like any event, and then publishing it again must do.
func settle(t testing.TB, from *node, to ...*node) {
	t.Helper()
	hear(t, mark(), 5*time.Second, from.Publish, to...)
}

// script is a peer that publishes whatever it is told to.
type script struct {
	soc      *zmq.Socket
	endpoint string
}

func newScript(t testing.TB, bind string) *script {
	t.Helper()
	ctx, err := zmq.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	soc, err := ctx.NewSocket(zmq.PUB)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := soc.SetLinger(0); err != nil {
			t.Error(err)
		}
		if err := soc.Close(); err != nil {
			t.Error(err)
		}
		if err := ctx.Term(); err != nil {
			t.Error(err)
		}
	})
	if err := soc.Bind(bind); err != nil {
		t.Fatal(err)
	}
	endpoint, err := soc.GetLastEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	return &script{soc, endpoint}
}

func (s *script) send(t testing.TB, frames ...[]byte) {
	t.Helper()
	if _, err := s.soc.SendMessage(frames); err != nil {
		t.Fatal(err)
	}
}

func (s *script) publish(t testing.TB, e wire.ReplicaEvent) {
	t.Helper()
	s.send(t, []byte(wire.ReplicaTopic), wire.AppendReplica(nil, &e, wire.FormatTenant))
}

// link waits until a node hears the script.
func (s *script) link(t testing.TB, to *node) {
	t.Helper()
	reach(t, func(e wire.ReplicaEvent) { s.publish(t, e) }, to)
}
