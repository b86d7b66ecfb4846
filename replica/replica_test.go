package replica_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	zmq "github.com/pebbe/zmq4"

	"spillway/replica"
	"spillway/wire"
)

// TestTwoNodes: each hears what the other publishes, in order and whole, and nothing of its own,
// even if it listens to itself.
func TestTwoNodes(t *testing.T) {
	a := start(t)
	b := start(t, a.Endpoint())
	for _, to := range []string{b.Endpoint(), a.Endpoint()} { // itself, too: it advertises nothing
		if added, err := a.Register(t.Context(), to); !added || err != nil {
			t.Fatalf("Register(%s) = %v, %v, want true", to, added, err)
		}
	}
	link(t, a, b)
	link(t, b, a)
	eventually(t, "a connection with itself", func() bool { return a.Connected() == 2 })
	var want []wire.ReplicaEvent
	for i := range 300 {
		for _, kind := range wire.ReplicaKinds {
			e := event(kind, fmt.Sprint("r", i))
			a.Publish(e)
			e.Origin = a.Origin()
			want = append(want, e)
		}
		if i%burst == burst-1 {
			settle(t, a, b)
		}
	}
	settle(t, a, b)
	if got := b.events(); !reflect.DeepEqual(got, want) {
		t.Errorf("b heard %d events, want %d; the first is %+v, want %+v", len(got), len(want), got[:min(1, len(got))], want[0])
	}
	settle(t, b, a)
	eventually(t, "own events", func() bool { return a.value(t, "spillway_replica_dropped_total", "self") >= 900 })
	if got := a.events(); len(got) != 0 {
		t.Errorf("a heard %+v, want nothing of its own", got)
	}
	for _, kind := range []string{"add", "prefill_done"} {
		a.expect(t, "spillway_replica_sent_total", kind, 300)
		b.expect(t, "spillway_replica_received_total", kind, 300)
	}
	if a.Origin() == b.Origin() || a.Origin() == 0 {
		t.Errorf("identities are %x and %x, want two", a.Origin(), b.Origin())
	}
}

// TestNothingIsPassedOn: in a chain of three, the last hears the middle one alone.
func TestNothingIsPassedOn(t *testing.T) {
	a := start(t)
	b := start(t, a.Endpoint())
	c := start(t, b.Endpoint())
	link(t, a, b)
	link(t, b, c)
	a.Publish(event(wire.ReplicaAdd, "of a"))
	settle(t, a, b)
	b.Publish(event(wire.ReplicaAdd, "of b"))
	settle(t, b, c)
	if got := c.events(); !b.has("of a") || len(got) != 1 || got[0].Reservation != "of b" {
		t.Errorf("c heard %+v, want the event of b alone; b heard that of a: %v", got, b.has("of a"))
	}
}

// TestWire: what a subscriber of libzmq sees is two frames, in the configured format.
func TestWire(t *testing.T) {
	for name, format := range map[string]wire.ReplicaFormat{"both": wire.FormatBoth, "tenant": wire.FormatTenant, "group": wire.FormatGroup} {
		cfg := config()
		cfg.Format = name
		n := prepare(cfg).start(t)
		zctx, err := zmq.NewContext()
		if err != nil {
			t.Fatal(err)
		}
		sub, err := zctx.NewSocket(zmq.SUB)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(sub.SetSubscribe(""), sub.Connect(n.Endpoint()), sub.SetLinger(0)); err != nil {
			t.Fatal(err)
		}
		var got [][]byte
		e := event(wire.ReplicaAdd, "r")
		eventually(t, "a message", func() bool {
			n.Publish(e)
			got, err = sub.RecvMessageBytes(zmq.DONTWAIT)
			return err == nil
		})
		e.Origin = n.Origin()
		want := [][]byte{[]byte("dynamo.slot-tracker.v1"), wire.AppendReplica(nil, &e, format)}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("format %s: frames %q, want %q", name, got, want)
		}
		if err := errors.Join(sub.Close(), zctx.Term()); err != nil {
			t.Error(err)
		}
	}
}

// TestPeers registers and deregisters while running. Nothing comes from a peer that was left.
func TestPeers(t *testing.T) {
	a, witness := start(t), start(t)
	b := start(t, a.Endpoint(), a.Endpoint()) // the same twice is one
	if got := b.Peers(); !slices.Equal(got, []string{a.Endpoint()}) {
		t.Fatalf("Peers() = %q, want %q", got, a.Endpoint())
	}
	if added, err := b.Register(t.Context(), a.Endpoint()); added || err != nil {
		t.Errorf("Register again = %v, %v, want false, nil", added, err)
	}
	if _, err := witness.Register(t.Context(), a.Endpoint()); err != nil {
		t.Fatal(err)
	}
	link(t, a, b, witness)
	b.expect(t, "spillway_replica_peers", "", 1)
	b.expect(t, "spillway_replica_peers_connected", "", 1)
	if err := b.Deregister(t.Context(), a.Endpoint()); err != nil {
		t.Errorf("Deregister = %v", err)
	}
	if err := b.Deregister(t.Context(), a.Endpoint()); !errors.Is(err, replica.ErrUnknownPeer) {
		t.Errorf("Deregister again = %v, want %v", err, replica.ErrUnknownPeer)
	}
	b.expect(t, "spillway_replica_queue_events", "in", 0)
	b.expect(t, "spillway_replica_peers", "", 0)
	b.expect(t, "spillway_replica_peers_connected", "", 0)
	a.Publish(event(wire.ReplicaAdd, "unheard"))
	settle(t, a, witness)
	if !witness.has("unheard") || b.has("unheard") {
		t.Errorf("heard by the witness: %v, by the one that left: %v; want true, false", witness.has("unheard"), b.has("unheard"))
	}
	if _, err := b.Register(t.Context(), a.Endpoint()); err != nil {
		t.Fatal(err)
	}
	link(t, a, b)
}

// TestRegister is the rows P1 to P13 of the specification.
func TestRegister(t *testing.T) {
	cfg := config()
	cfg.Advertise = "tcp://10.0.0.1:8191"
	n := prepare(cfg).start(t)
	for _, tt := range []struct {
		row, endpoint string
		added         bool
		want          error
	}{
		{"P1", "tcp://127.0.0.1:19001", true, nil},
		{"P1", "tcp://127.0.0.1:19001", false, nil},
		{"P2", "tcp://localhost:19001", true, nil},
		{"P3", "tcp://127.0.0.1:0", true, nil},
		{"P3", "tcp://127.0.0.1:65535", true, nil},
		{"P3", "tcp://127.0.0.1:08092", true, nil},
		{"P4", "tcp://127.0.0.1:65536", false, replica.ErrEndpoint},
		{"P4", "tcp://127.0.0.1:-1", false, replica.ErrEndpoint},
		{"P4", "tcp://127.0.0.1:", false, replica.ErrEndpoint},
		{"P4", "tcp://127.0.0.1", false, replica.ErrEndpoint},
		{"P5", "tcp://:8092", false, replica.ErrEndpoint},
		{"P5", "tcp://", false, replica.ErrEndpoint},
		{"P5", "ipc://", false, replica.ErrEndpoint},
		{"P5", "tcp:/x", false, replica.ErrEndpoint},
		{"P5", "", false, replica.ErrEndpoint},
		{"P5", "invalid", false, replica.ErrEndpoint},
		{"P6", "http://a:1", false, replica.ErrEndpoint},
		{"P6", "udp://a:1", false, replica.ErrEndpoint},
		{"P6", "ws://a:1", false, replica.ErrEndpoint},
		{"P6", "TCP://a:1", false, replica.ErrEndpoint},
		{"P6", " tcp://a:1", false, replica.ErrEndpoint},
		{"P7", "tcp://[::1]:8092", true, nil},
		{"P8", "tcp://[::1:8092", false, replica.ErrEndpoint},
		{"P8", "tcp://::1:8092", false, replica.ErrEndpoint},
		{"P8", "tcp://a:b:1", false, replica.ErrEndpoint},
		{"P9", "tcp://*:8092", false, replica.ErrEndpoint},
		{"P9", "tcp://a b:1", false, replica.ErrEndpoint},
		{"P9", "tcp://127.0.0.1:+80", false, replica.ErrEndpoint},
		{"P10", "tcp://a:1/path", false, replica.ErrEndpoint},
		{"P10", "tcp://a:1 ", false, replica.ErrEndpoint},
		{"P11", "ipc:///tmp/x.sock", true, nil},
		{"P11", "inproc://abc", true, nil},
		{"P11", "tcp://nonexistent.invalid:5555", true, nil},
		{"P12", "tcp://10.0.0.1:8191", false, replica.ErrSelf},
	} {
		before := n.Peers()
		added, err := n.Register(t.Context(), tt.endpoint)
		if added != tt.added || !errors.Is(err, tt.want) {
			t.Errorf("%s: Register(%q) = %v, %v, want %v, %v", tt.row, tt.endpoint, added, err, tt.added, tt.want)
		}
		if after := n.Peers(); slices.Contains(after, tt.endpoint) != (tt.want == nil) || !tt.added && !slices.Equal(before, after) || !slices.IsSorted(after) {
			t.Errorf("%s: after Register(%q) peers are %q, before it %q", tt.row, tt.endpoint, after, before)
		}
	}
	for _, tt := range []struct {
		endpoint string
		want     error
	}{
		{"tcp://localhost:19001", nil},
		{"tcp://localhost:19001", replica.ErrUnknownPeer},
		{"tcp://localhost:19002", replica.ErrUnknownPeer},
		{"tcp://10.0.0.1:8191", replica.ErrUnknownPeer}, // its own
		{"zzz", replica.ErrEndpoint},
	} {
		if err := n.Deregister(t.Context(), tt.endpoint); !errors.Is(err, tt.want) {
			t.Errorf("P13: Deregister(%s) = %v, want %v", tt.endpoint, err, tt.want)
		}
	}
}

func TestRegisterEnds(t *testing.T) {
	n := prepare(config())
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := n.Register(gone, "tcp://127.0.0.1:1"); !errors.Is(err, context.Canceled) {
		t.Errorf("Register by a client that left = %v, want %v", err, context.Canceled)
	}
	n.start(t).stop()
	if _, err := n.Register(t.Context(), "tcp://127.0.0.1:2"); !errors.Is(err, replica.ErrStopped) {
		t.Errorf("Register after the end = %v, want %v", err, replica.ErrStopped)
	}
	if err := n.Deregister(t.Context(), "tcp://127.0.0.1:2"); !errors.Is(err, replica.ErrStopped) {
		t.Errorf("Deregister after the end = %v, want %v", err, replica.ErrStopped)
	}
}

func TestTooManyPeers(t *testing.T) {
	n := start(t)
	var added, refused atomic.Int64
	var all sync.WaitGroup
	for i := range replica.MaxPeers + 2 {
		all.Go(func() {
			ok, err := n.Register(t.Context(), fmt.Sprintf("ipc:///nowhere/%d", i))
			switch {
			case ok && err == nil:
				added.Add(1)
			case errors.Is(err, replica.ErrTooMany):
				refused.Add(1)
			default:
				t.Errorf("Register of peer %d = %v, %v", i, ok, err)
			}
		})
	}
	all.Wait()
	if added.Load() != replica.MaxPeers || refused.Load() != 2 || len(n.Peers()) != replica.MaxPeers {
		t.Errorf("%d added, %d refused, %d peers; want %d, 2", added.Load(), refused.Load(), len(n.Peers()), replica.MaxPeers)
	}
}

// TestRunFails: what cannot be bound or connected to ends Run, and leaves nothing.
func TestRunFails(t *testing.T) {
	a := start(t)
	taken, refused := config(), config("tcp://127.0.0.1:1", "tcp://*:1")
	taken.Bind = a.Endpoint()
	for name, cfg := range map[string]replica.Config{"taken": taken, "refused": refused} {
		n := prepare(cfg)
		if err := n.Run(t.Context()); err == nil {
			t.Errorf("%s: Run = nil, want an error", name)
		}
		select {
		case <-n.Ready():
			t.Errorf("%s: Ready after Run has failed", name)
		default:
		}
	}
}
