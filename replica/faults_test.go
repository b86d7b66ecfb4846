package replica_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"spillway/wire"
)

// TestGarbage: whatever a peer publishes that is no event is counted by its reason, and later
// events are heard.
func TestGarbage(t *testing.T) {
	s := newScript(t, "tcp://127.0.0.1:*")
	n := start(t, s.endpoint)
	s.link(t, n)
	topic := []byte(wire.ReplicaTopic)
	good := event(wire.ReplicaAdd, "good")
	body := wire.AppendReplica(nil, &good, wire.FormatTenant)
	s.send(t, []byte(wire.ReplicaTopic+".x"), body)
	s.send(t, topic)
	s.send(t, topic, body, nil)
	s.send(t, append([][]byte{topic}, make([][]byte, 1000)...)...)
	s.send(t, topic, []byte("garbage"))
	for cut := range body {
		s.send(t, topic, body[:cut])
	}
	two := wire.AppendReplica(nil, &good, wire.FormatBoth)
	two = []byte(strings.Replace(string(two), "tenant_id\xa7default", "tenant_id\xa7another", 1))
	s.send(t, topic, two)
	own := good
	own.Origin = n.Origin()
	s.publish(t, own)
	s.publish(t, good)
	eventually(t, "the good event", func() bool { return n.has("good") })
	if got := n.events(); len(got) != 1 {
		t.Errorf("heard %d events, want the good one alone", len(got))
	}
	for reason, want := range map[string]int{"topic": 1, "frames": 3, "payload": 1 + len(body), "tenant": 1, "self": 1, "queue": 0} {
		n.expect(t, "spillway_replica_dropped_total", reason, float64(want))
	}
}

// TestTooLong: a message beyond all measure ends the connection, and a new one is made. What we
// would send of that size is not sent.
func TestTooLong(t *testing.T) {
	s := newScript(t, "tcp://127.0.0.1:*")
	n := start(t, s.endpoint)
	s.link(t, n)
	s.send(t, []byte(wire.ReplicaTopic), make([]byte, wire.MaxReplicaBytes+1))
	n.expect(t, "spillway_replica_peers_connected", "", 0)
	s.link(t, n)

	long := event(wire.ReplicaAdd, "long")
	long.Promise.Hashes = slices.Repeat([]uint64{math.MaxUint64}, wire.MaxReplicaBytes/9)
	n.Publish(long)
	n.expect(t, "spillway_replica_unsent_total", "size", 1)
}

// TestReconnectFails: a connection that cannot be made again at once is made later, and meanwhile
// nothing else ends.
func TestReconnectFails(t *testing.T) {
	s := newScript(t, "tcp://127.0.0.1:*")
	n := prepare(config(s.endpoint))
	n.BindWhere(2)
	n.start(t)
	s.link(t, n)
	s.send(t, []byte(wire.ReplicaTopic), make([]byte, wire.MaxReplicaBytes+1)) // ends the connection
	n.expect(t, "spillway_replica_peers_connected", "", 0)
	s.link(t, n)
}

// TestInprocNames: an endpoint within the process takes no name that is ours.
func TestInprocNames(t *testing.T) {
	cfg := config("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "tcp://127.0.0.1:3")
	cfg.Bind = "inproc://replica-2"
	prepare(cfg).start(t)
}

// stuck is a log that takes no line until it is released.
type stuck struct {
	begun   chan struct{} // has a token once a line has come
	release chan struct{}
}

func (s stuck) Write(line []byte) (int, error) {
	select {
	case s.begun <- struct{}{}:
	default:
	}
	<-s.release
	return len(line), nil
}

// TestLastWords: all that a peer has published before it ended is heard, even by one that is behind.
func TestLastWords(t *testing.T) {
	const words = 900
	zctx, err := zmq.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	soc, err := zctx.NewSocket(zmq.PUB)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(soc.SetLinger(time.Minute), soc.Bind("tcp://127.0.0.1:*")); err != nil {
		t.Fatal(err)
	}
	endpoint, err := soc.GetLastEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	s := &script{soc, endpoint}
	n := prepare(config(endpoint))
	log := stuck{make(chan struct{}, 1), make(chan struct{})}
	n.Log(slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelWarn})))
	release := sync.OnceFunc(func() { close(log.release) })
	n.start(t)
	t.Cleanup(release) // if the test fails before; Run could not end
	s.link(t, n)
	s.send(t, []byte(wire.ReplicaTopic)) // which is logged, and so holds up what comes after it
	<-log.begun
	for i := range words {
		s.publish(t, event(wire.ReplicaFree, fmt.Sprint(i)))
	}
	if err := errors.Join(soc.Close(), zctx.Term()); err != nil { // all is on its way
		t.Fatal(err)
	}
	time.Sleep(200 * time.Millisecond) // for libzmq to hear of the end; without it the test can only pass
	release()
	eventually(t, "the last words", func() bool { return n.has(fmt.Sprint(words - 1)) })
	if got := n.events(); len(got) != words {
		t.Errorf("heard %d of %d events", len(got), words)
	}
}

// frame reads one frame of ZMTP, and whether it is a command.
func frame(in io.Reader) (body string, command bool, err error) {
	start := make([]byte, 2)
	if _, err := io.ReadFull(in, start); err != nil {
		return "", false, err
	}
	if start[0]&2 != 0 {
		return "", false, errors.New("a long frame, which nobody has reason to send")
	}
	rest := make([]byte, start[1])
	_, err = io.ReadFull(in, rest)
	return string(rest), start[0]&4 != 0, err
}

// TestHeartbeat plays a peer by hand: it is subscribed to, and since it says nothing it is asked,
// after five seconds, whether it is there, and told the time that it has for an answer.
func TestHeartbeat(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	start(t, "tcp://"+ln.Addr().String())
	conn, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	greeting := append(make([]byte, 0, 64), "\xff\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x03\x01NULL"...)[:64]
	ready := "\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
	_, err = conn.Write(append(append(greeting, 4, byte(len(ready))), ready...))
	if err = errors.Join(err, conn.SetReadDeadline(time.Now().Add(time.Minute))); err != nil {
		t.Fatal(err)
	}
	theirs := make([]byte, 64)
	if _, err := io.ReadFull(conn, theirs); err != nil || !strings.HasPrefix(string(theirs[12:]), "NULL\x00") {
		t.Fatalf("greeting = %q, %v", theirs, err)
	}
	var subscribed bool
	for {
		body, command, err := frame(conn)
		if err != nil {
			t.Fatalf("before a ping: %v", err)
		}
		switch {
		case body == "\x01"+wire.ReplicaTopic, command && body == "\x09SUBSCRIBE"+wire.ReplicaTopic:
			subscribed = true
		case command && strings.HasPrefix(body, "\x04PING"):
			if body != "\x04PING\x00\x96" || !subscribed {
				t.Errorf("a ping of %q came, subscribed %v; want 150 tenths of a second for an answer, and true", body, subscribed)
			}
			return
		}
	}
}

// TestNotZMQ: a peer that speaks something else is tried again, until a real one has taken its
// place.
func TestNotZMQ(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var answers sync.WaitGroup
	met := make(chan struct{}, 1)
	answers.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")) // the peer may have gone
			_ = conn.Close()
			select {
			case met <- struct{}{}:
			default:
			}
		}
	})
	n := start(t, "tcp://"+ln.Addr().String())
	<-met
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	answers.Wait()
	newScript(t, "tcp://"+ln.Addr().String()).link(t, n)
}

// TestRestart: a peer that is gone changes nothing, and is heard again when it is back.
func TestRestart(t *testing.T) {
	a := start(t)
	b, c := start(t, a.Endpoint()), start(t, a.Endpoint())
	link(t, a, b, c)
	if _, err := c.Register(t.Context(), b.Endpoint()); err != nil {
		t.Fatal(err)
	}
	link(t, b, c)
	a.stop()
	c.expect(t, "spillway_replica_peers_connected", "", 1)
	b.Publish(event(wire.ReplicaAdd, "meanwhile"))
	settle(t, b, c)
	if !c.has("meanwhile") {
		t.Error("with one peer gone, the other is not heard")
	}
	again := config()
	again.Bind = a.Endpoint()
	a2 := prepare(again).start(t)
	link(t, a2, b, c)
	c.expect(t, "spillway_replica_peers_connected", "", 2)
	if a2.Origin() == a.Origin() {
		t.Error("a peer that was started anew has its old identity")
	}
}

// TestFlood: events that come faster than they can be applied are dropped and counted, all the
// others are applied, and what is published meanwhile is not held up.
func TestFlood(t *testing.T) {
	const events, room = 20_000, 300
	s := newScript(t, "tcp://127.0.0.1:*")
	cfg := config(s.endpoint)
	cfg.Queue = room
	n := prepare(cfg)
	n.start(t)
	witness := start(t, n.Endpoint())
	s.link(t, n)
	link(t, n, witness)

	n.hold.Lock()
	release := sync.OnceFunc(n.hold.Unlock)
	t.Cleanup(release) // if the test fails before
	e := event(wire.ReplicaAdd, "")
	for i := range events {
		e.Reservation = fmt.Sprint(i)
		s.publish(t, e)
	}
	eventually(t, "drops", func() bool { return n.value(t, "spillway_replica_dropped_total", "queue") > 0 })
	n.Publish(event(wire.ReplicaAdd, "meanwhile"))
	settle(t, n, witness)
	if !witness.has("meanwhile") {
		t.Error("what was published during the flood is not heard")
	}
	release()
	eventually(t, "the end of the flood", func() bool {
		got := n.value(t, "spillway_replica_received_total", "add")
		return got > room && got == float64(len(n.events()))+n.value(t, "spillway_replica_dropped_total", "queue")
	})
	n.expect(t, "spillway_replica_queue_events", "in", 0)
	eventually(t, "an event after it", func() bool {
		s.publish(t, event(wire.ReplicaFree, "after"))
		return n.has("after")
	})
}

// TestFullQueue: what finds no room to be sent is counted and lost, and what comes after the end too.
func TestFullQueue(t *testing.T) {
	cfg := config()
	cfg.Queue = 1
	n := prepare(cfg)
	for range 3 {
		n.Publish(event(wire.ReplicaAdd, "r"))
	}
	n.expect(t, "spillway_replica_unsent_total", "queue", 2)
	n.expect(t, "spillway_replica_queue_events", "out", 1)
	n.start(t)
	n.expect(t, "spillway_replica_sent_total", "add", 1)
	n.expect(t, "spillway_replica_queue_events", "out", 0)
	n.stop()
	n.Publish(event(wire.ReplicaAdd, "r"))
	n.expect(t, "spillway_replica_unsent_total", "stopped", 1)
	n.expect(t, "spillway_replica_queue_events", "out", 0)
}

// TestHeavyQueue: what waits is bounded by what it holds, too.
func TestHeavyQueue(t *testing.T) {
	n := prepare(config())
	e := event(wire.ReplicaAdd, "r")
	n.BoundBytes(2 * (len("m") + len("default") + len("r") + 3*8))
	for range 3 {
		n.Publish(e)
	}
	n.expect(t, "spillway_replica_unsent_total", "queue", 1)
	n.start(t)
	n.expect(t, "spillway_replica_queue_events", "out", 0)
	n.Publish(e)
	n.expect(t, "spillway_replica_sent_total", "add", 3)
}

// TestUnsentAtTheEnd: what waits when Run ends is lost and counted.
func TestUnsentAtTheEnd(t *testing.T) {
	n := prepare(config())
	for range 3 {
		n.Publish(event(wire.ReplicaFree, "r"))
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := n.Run(ended); err != nil {
		t.Fatalf("Run = %v, want nil", err)
	}
	n.expect(t, "spillway_replica_unsent_total", "stopped", 3)
	n.expect(t, "spillway_replica_sent_total", "free", 0)
}

// TestBurst: more events than libzmq keeps for a connection arrive all the same, in order.
func TestBurst(t *testing.T) {
	const events = 20_000
	a := prepare(config())
	a.Patience(time.Minute)
	a.start(t)
	b := start(t, a.Endpoint())
	link(t, a, b)
	for i := range events {
		a.Publish(event(wire.ReplicaFree, fmt.Sprint(i)))
	}
	settle(t, a, b)
	got := b.events()
	for i, e := range got {
		if e.Reservation != fmt.Sprint(i) {
			t.Fatalf("event %d is that of %s", i, e.Reservation)
		}
	}
	if len(got) != events {
		t.Errorf("%d of %d events arrived", len(got), events)
	}
}

// TestSlowPeer: a peer that takes nothing loses what there is no room for. Nobody waits for it long,
// and others go on being told.
func TestSlowPeer(t *testing.T) {
	a := start(t)
	b := start(t, a.Endpoint())
	zctx, err := zmq.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	stuck, err := zctx.NewSocket(zmq.SUB)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := errors.Join(stuck.Close(), zctx.Term()); err != nil {
			t.Error(err)
		}
	}()
	if err := errors.Join(stuck.SetRcvhwm(1), stuck.SetSubscribe(""), stuck.SetLinger(0), stuck.Connect(a.Endpoint())); err != nil {
		t.Fatal(err)
	}
	link(t, a, b)
	eventually(t, "a subscription of the one that is stuck", func() bool {
		a.Publish(mark())
		_, err := stuck.RecvMessageBytes(zmq.DONTWAIT)
		return err == nil
	})
	e := event(wire.ReplicaAdd, "r")
	e.Promise.Hashes = slices.Repeat([]uint64{math.MaxUint64}, 200) // 2 kB, so that buffers of the kernel fill up
	eventually(t, "a peer too slow", func() bool {
		for range 100 {
			a.Publish(e)
		}
		return a.value(t, "spillway_replica_slow_total", "") > 0
	})
	reach(t, a.Publish, b)
	a.expect(t, "spillway_replica_queue_events", "out", 0)
}
