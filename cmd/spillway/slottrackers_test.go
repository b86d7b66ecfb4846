package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"spillway/wire"
	"spillway/worker"
)

// syncedTracker is a slot tracker that takes part in an exchange over TCP.
type syncedTracker struct {
	slotTracker
	endpoint string
	links    int // that were tried
}

const anyEndpoint = "tcp://127.0.0.1:0"

// startSynced starts one, whose worker 7 has a rank 0. Worker 99 is for links.
func startSynced(t *testing.T, bind string, args ...string) *syncedTracker {
	t.Helper()
	s := &syncedTracker{slotTracker: startSlotTracker(t, append([]string{"--replica-sync-bind", bind}, args...)...)}
	s.endpoint = s.awaitIn(&s.stderr, `endpoint=(tcp://\S+)`)
	s.must("/register", trackedWorker, 201)
	s.must("/register", strings.Replace(trackedWorker, ":7,", ":99,", 1), 201)
	return s
}

// kill ends a tracker without notice.
func (s *syncedTracker) kill() {
	s.t.Helper()
	s.signal(syscall.SIGKILL)
	s.exit()
}

// listens tells trackers where others publish.
func (s *syncedTracker) listens(to ...*syncedTracker) {
	s.t.Helper()
	for _, o := range to {
		s.must("/register_peer", `{"url":"`+o.endpoint+`"}`, 201)
	}
}

// reaches waits until others hear a tracker: what it told before they know then, or never will. What
// is published while a connection has to be made again is lost, so a link that was not heard of, or of
// whose end was not, is followed by another one.
func (s *syncedTracker) reaches(others ...*syncedTracker) {
	s.t.Helper()
	for _, o := range others {
		eventually(s.t, s.endpoint+" reaches "+o.endpoint, func() bool {
			s.links++
			id := fmt.Sprintf(`"model_name":"m","request_id":"link %d of %s"`, s.links, s.endpoint)
			known := func(want bool) bool {
				for until := time.Now().Add(time.Second); time.Now().Before(until); time.Sleep(10 * time.Millisecond) {
					if status, _ := o.post("/prefill_complete", "{"+id+"}"); (status == 200) == want {
						return true
					}
				}
				return false
			}
			s.must("/add", fmt.Sprintf(`{%s,"worker_id":99,"dp_rank":0,"sequence_hashes":[],"new_isl_tokens":1}`, id), 201)
			heard := known(true)
			s.must("/free", "{"+id+"}", 200)
			if heard && known(false) {
				return true
			}
			o.must("/free", "{"+id+"}", 200)
			return false
		})
	}
}

func (s *syncedTracker) loads() string {
	s.t.Helper()
	_, loads := fetch(s.t, s.url+"/loads")
	return loads
}

// shows waits until worker 7 of all trackers has these loads.
func shows(tokens, blocks int, all ...*syncedTracker) {
	for _, s := range all {
		s.t.Helper()
		want := fmt.Sprintf(`"worker_id":7,"dp_rank":0,"active_prefill_tokens":%d,"active_decode_blocks":%d}`, tokens, blocks)
		eventually(s.t, s.endpoint+" shows "+want, func() bool { return strings.Contains(s.loads(), want) })
	}
}

// metric is the value of a series.
func (s *syncedTracker) metric(series string) (value float64) {
	s.t.Helper()
	_, page := fetch(s.t, s.url+"/metrics")
	_, line, ok := strings.Cut(page, "\n"+series+" ")
	if _, err := fmt.Sscan(line, &value); !ok || err != nil {
		s.t.Fatalf("no series %s: %v", series, err)
	}
	return value
}

func addOf(id string, tokens int, hashes string) string {
	return fmt.Sprintf(`{"model_name":"m","request_id":%q,"worker_id":7,"dp_rank":0,"sequence_hashes":[%s],"new_isl_tokens":%d}`, id, hashes, tokens)
}

func byID(id string) string { return fmt.Sprintf(`{"model_name":"m","request_id":%q}`, id) }

// TestThreeSlotTrackers: what is told to one of three processes, all know. One is killed and comes
// back; one is no longer listened to, and then again.
func TestThreeSlotTrackers(t *testing.T) {
	a, b, c := startSynced(t, anyEndpoint), startSynced(t, anyEndpoint), startSynced(t, anyEndpoint)
	a.listens(b, c)
	b.listens(a, c)
	c.listens(a, b)
	a.reaches(b, c)
	b.reaches(a, c)
	c.reaches(a, b)

	a.must("/add", addOf("r1", 48, "1,2,3"), 201)
	shows(48, 3, a, b, c)
	for _, s := range []*syncedTracker{b, c} {
		s.must("/add", addOf("r1", 1, ""), 409)
		const asked, want = `{"model_name":"m","sequence_hashes":[1,2,4],"new_isl_tokens":2}`, `{"worker_id":7,"dp_rank":0,"potential_prefill_tokens":50,"potential_decode_blocks":4,"active_requests":1}`
		if _, got := s.post("/potential_loads", asked); !strings.Contains(got, want) {
			t.Errorf("potential loads = %s, want %s", got, want)
		}
	}
	b.must("/prefill_complete", byID("r1"), 200)
	shows(0, 3, a, b, c)
	c.must("/free", byID("r1"), 200)
	shows(0, 0, a, b, c)

	c.must("/add", addOf("r2", 5, "1,2"), 201)
	shows(5, 2, a, b)
	c.kill()
	a.must("/add", addOf("r3", 7, "1,3"), 201) // the two go on, and what the third has booked stays
	shows(12, 3, a, b)
	b.must("/free", byID("r2"), 200)
	shows(7, 2, a, b)
	again := startSynced(t, c.endpoint, "--replica-sync-peers", a.endpoint+","+b.endpoint)
	shows(0, 0, again)
	a.reaches(again)
	b.reaches(again)
	again.reaches(a, b) // which were never told that it was gone
	shows(0, 0, again)  // what was booked before its time it never hears of
	a.must("/add", addOf("r4", 11, "9"), 201)
	shows(11, 1, again)
	shows(18, 3, a, b)
	again.must("/free", byID("r3"), 200) // unknown here: nobody is told
	a.must("/free", byID("r3"), 200)
	shows(11, 1, a, b, again)

	b.must("/deregister_peer", `{"url":"`+a.endpoint+`"}`, 200)
	a.must("/add", addOf("r5", 100, "9,10"), 201)
	shows(111, 2, a, again)
	again.must("/add", addOf("r6", 1000, ""), 201)
	shows(1011, 1, b) // hears the third, and not the first
	b.listens(a)
	a.reaches(b)
	a.must("/free", byID("r4"), 200)
	again.must("/free", byID("r6"), 200)
	shows(0, 0, b)
	shows(100, 2, a, again)
}

// TestSlotTrackerDies: what a process has booked that is killed in the middle of its work expires
// elsewhere, and nothing else does.
func TestSlotTrackerDies(t *testing.T) {
	a := startSynced(t, anyEndpoint)
	b := startSynced(t, anyEndpoint, "--replica-sync-peers", a.endpoint, "--router-active-request-expiry-secs", "2", "--expiry-interval", "200ms")
	c := startSynced(t, anyEndpoint, "--replica-sync-peers", a.endpoint+","+b.endpoint)
	a.reaches(b, c)
	b.reaches(c)
	var clients sync.WaitGroup
	for i := range 4 {
		clients.Go(func() {
			for n := range 50 {
				id := fmt.Sprint(i, ".", n)
				a.must("/add", addOf(id, 10, fmt.Sprint("1,2,", 1000*i+n)), 201)
				if n%2 == 0 {
					a.must("/prefill_complete", byID(id), 200)
				}
				if n%3 > 0 {
					a.must("/free", byID(id), 200)
				}
			}
		})
	}
	clients.Wait()
	shows(4*8*10, 2+4*17, a, c) // every third stays, of which every second still has its prefill open
	b.must("/add", addOf("mine", 3, "1"), 201)
	a.kill()
	b.must("/free", byID("mine"), 200)
	shows(0, 0, b)
	if n := b.metric("spillway_tracker_expired_requests_total"); n < 4*17 {
		t.Errorf("%v requests have expired, want at least %d", n, 4*17)
	}
	shows(4*8*10, 2+4*17, c) // remembers for 300 s
}

// script is a peer that publishes what it is told to.
type script struct {
	t        *testing.T
	soc      *zmq.Socket
	endpoint string
}

func newScript(t *testing.T) *script {
	t.Helper()
	soc, err := zmq.NewSocket(zmq.PUB)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = soc.Close() })
	if err = soc.SetLinger(0); err == nil {
		err = soc.Bind("tcp://127.0.0.1:*")
	}
	endpoint, asked := soc.GetLastEndpoint()
	if err != nil || asked != nil {
		t.Fatal(err, asked)
	}
	return &script{t, soc, endpoint}
}

func (s *script) send(frames ...string) {
	if _, err := s.soc.SendMessage(frames); err != nil {
		s.t.Error(err)
	}
}

func scripted(kind wire.ReplicaKind, id string, tokens uint64) wire.ReplicaEvent {
	e := wire.ReplicaEvent{Model: "m", Tenant: "default", BlockSize: 16, Reservation: id, Rank: worker.Rank{Worker: 7}, Kind: kind, Origin: 5}
	if kind == wire.ReplicaAdd {
		e.Promise = wire.Promise{Hashes: []uint64{1, 2, 3}, TrackPrefill: true, PrefillTokens: tokens}
	}
	return e
}

func encoded(e wire.ReplicaEvent) string {
	return string(wire.AppendReplica(nil, &e, wire.FormatTenant))
}

func (s *script) publish(e wire.ReplicaEvent) { s.send(wire.ReplicaTopic, encoded(e)) }

// TestHostilePeer: garbage, truncated events, events about what is not here and a flood are dropped
// and counted. Clients and other peers notice nothing.
func TestHostilePeer(t *testing.T) {
	hostile := newScript(t)
	a := startSynced(t, anyEndpoint)
	b := startSynced(t, anyEndpoint, "--replica-sync-peers", a.endpoint+","+hostile.endpoint)
	a.reaches(b)
	eventually(t, "b hears the hostile peer", func() bool {
		hostile.publish(scripted(wire.ReplicaFree, "nobody", 0))
		return b.metric(`spillway_replica_received_total{kind="free"}`) > 0
	})
	body := encoded(scripted(wire.ReplicaAdd, "bad", 1))
	for cut := range len(body) {
		hostile.send(wire.ReplicaTopic, body[:cut])
	}
	hostile.send(wire.ReplicaTopic, "garbage")
	hostile.send(wire.ReplicaTopic)
	hostile.send(wire.ReplicaTopic, body, "more")
	hostile.send(wire.ReplicaTopic+".x", body)
	for _, change := range []func(*wire.ReplicaEvent){
		func(e *wire.ReplicaEvent) { e.Rank.Worker = 8 }, func(e *wire.ReplicaEvent) { e.Rank.DP = 1 },
		func(e *wire.ReplicaEvent) { e.Model = "other" }, func(e *wire.ReplicaEvent) { e.Tenant = "other" },
		func(e *wire.ReplicaEvent) { e.BlockSize = 32 },
	} {
		e := scripted(wire.ReplicaAdd, "bad", 1)
		change(&e)
		hostile.publish(e)
	}
	hostile.publish(scripted(wire.ReplicaAdd, "good", 4))
	shows(4, 3, b)
	for series, want := range map[string]int{
		`spillway_replica_dropped_total{reason="payload"}`: 1 + len(body), `spillway_replica_dropped_total{reason="frames"}`: 2,
		`spillway_replica_dropped_total{reason="topic"}`: 1, `spillway_replica_outcomes_total{kind="add",result="rank"}`: 2,
		`spillway_replica_outcomes_total{kind="add",result="partition"}`: 2, `spillway_replica_outcomes_total{kind="add",result="block_size"}`: 1,
	} {
		if got := b.metric(series); got != float64(want) {
			t.Errorf("%s = %v, want %d", series, got, want)
		}
	}
	if _, workers := fetch(t, b.url+"/workers"); strings.Count(workers, "worker_id") != 2 {
		t.Errorf("workers = %s, want the two that were registered", workers)
	}

	var flood sync.WaitGroup
	flood.Go(func() {
		for i := range 50_000 {
			e := scripted(wire.ReplicaAdd, fmt.Sprint("flood ", i%5000), 1)
			if e.Rank.Worker = 1 + worker.ID(i%7); i%14 > 6 { // only what is of worker 7 is booked
				e.Kind = wire.ReplicaFree
			}
			hostile.publish(e)
		}
	})
	for i := range 20 {
		a.must("/add", addOf("honest", 100000, ""), 201)
		b.must("/add", addOf(fmt.Sprint("own ", i), 10, ""), 201)
		b.must("/free", byID(fmt.Sprint("own ", i)), 200)
		a.reaches(b)
		a.must("/free", byID("honest"), 200)
	}
	flood.Wait()
	for i := range 5000 {
		if i%500 == 0 { // as many as libzmq keeps for sure, once b has heard all that came before
			last := fmt.Sprint("last ", i)
			eventually(t, "b has heard so far", func() bool {
				hostile.publish(scripted(wire.ReplicaAdd, last, 1))
				status, _ := b.post("/prefill_complete", byID(last))
				return status == 200
			})
			hostile.publish(scripted(wire.ReplicaFree, last, 1))
		}
		hostile.publish(scripted(wire.ReplicaFree, fmt.Sprint("flood ", i), 0))
	}
	// The exchange is best effort, so one end of an honest request may have been lost in the flood.
	// Once that is over one is heard of again.
	eventually(t, "b is as before the flood", func() bool {
		a.must("/add", addOf("honest", 100000, ""), 201)
		a.must("/free", byID("honest"), 200)
		a.reaches(b)
		return strings.Contains(b.loads(), `"worker_id":7,"dp_rank":0,"active_prefill_tokens":4,"active_decode_blocks":3}`)
	})
	shows(0, 0, a)
}

// TestOwnEvents: a process that was told to listen to itself takes no notice of what it hears.
func TestOwnEvents(t *testing.T) {
	a := startSynced(t, anyEndpoint)
	a.listens(a)
	a.must("/add", addOf("r1", 8, "1"), 201)
	eventually(t, "own events are dropped", func() bool {
		a.must("/prefill_complete", byID("r1"), 200)
		return a.metric(`spillway_replica_dropped_total{reason="self"}`) > 0
	})
	shows(0, 1, a)
	if n := a.metric(`spillway_replica_received_total{kind="prefill_done"}`); n != 0 {
		t.Errorf("%v of its own events were received, want none", n)
	}
	for name, peers := range map[string]string{"itself": "tcp://10.0.0.1:8191", "nothing": "tcp://10.0.0.2:8191,"} {
		p := start(t, nil, "slot-tracker", "--port", "0", "--replica-sync-bind", anyEndpoint, "--replica-sync-advertise", "tcp://10.0.0.1:8191", "--replica-sync-peers", peers)
		if code := p.exit(); code != exitUsage || !strings.Contains(p.stderr.String(), "replica-sync-peers: ") {
			t.Errorf("exit code with %s among its peers = %d, %s; want %d", name, code, &p.stderr, exitUsage)
		}
	}
	p := start(t, nil, "slot-tracker", "--port", "0", "--replica-sync-bind", a.endpoint)
	if code := p.exit(); code != exitFailed {
		t.Errorf("exit code with an endpoint that is taken = %d, want %d", code, exitFailed)
	}
}

// TestPeerRoutes plays P1 to P13 of the specification, a table that any server can be asked that
// was started with these settings.
func TestPeerRoutes(t *testing.T) {
	s := startSlotTracker(t, "--replica-sync-bind", anyEndpoint, "--replica-sync-advertise", "tcp://10.0.0.1:8191")
	table, err := os.Open("../../tracker/service/testdata/peers.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = table.Close() }()
	rows, name := 0, ""
	for lines := bufio.NewScanner(table); lines.Scan(); rows++ {
		var call struct {
			Case, Method, Path, Body, Answer string
			Status                           int
		}
		if err := json.Unmarshal(lines.Bytes(), &call); err != nil {
			t.Fatal(err)
		}
		if call.Case != "" {
			name = call.Case
			continue
		}
		var status int
		var answer string
		if call.Method == "GET" {
			status, answer = fetch(t, s.url+call.Path)
		} else {
			status, answer = s.post(call.Path, call.Body)
		}
		if call.Answer == "" && status < 300 {
			call.Answer = `{"status":"ok"}`
		}
		if status != call.Status || call.Answer != "" && answer != call.Answer || status >= 400 && !strings.HasPrefix(answer, `{"error":"`) {
			t.Errorf("%s: %s %s %s = %d %s, want %d %s", name, call.Method, call.Path, call.Body, status, answer, call.Status, call.Answer)
		}
	}
	if rows < 50 {
		t.Errorf("%d lines, that cannot be all", rows)
	}
}
