package monitor_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"
	"github.com/tinylib/msgp/msgp"

	"spillway/busy"
	"spillway/monitor"
	"spillway/wire"
	"spillway/worker"
)

// load is one report: what is nil is sent as nil.
type load struct {
	worker         worker.ID
	dp             uint32
	decode, prompt any // A and P
	used           any // U
}

// event is the message of a report, as a publisher sends it.
func event(publisher, sequence uint64, l load) [][]byte {
	p := msgp.AppendMapHeader(nil, 5)
	p = msgp.AppendUint64(msgp.AppendString(p, "worker_id"), uint64(l.worker))
	p = msgp.AppendUint32(msgp.AppendString(p, "dp_rank"), l.dp)
	for _, f := range []struct {
		key   string
		value any
	}{{"active_decode_blocks", l.decode}, {"active_prefill_tokens", l.prompt}, {"kv_used_blocks", l.used}} {
		p, _ = msgp.AppendIntf(msgp.AppendString(p, f.key), f.value)
	}
	b := msgp.AppendMapHeader(nil, 5)
	b = msgp.AppendUint64(msgp.AppendString(b, "publisher_id"), publisher)
	b = msgp.AppendUint64(msgp.AppendString(b, "sequence"), sequence)
	b = msgp.AppendUint64(msgp.AppendString(b, "published_at"), 1_700_000_000_000)
	b = msgp.AppendString(msgp.AppendString(b, "topic"), "kv_metrics")
	b = msgp.AppendBytes(msgp.AppendString(b, "payload"), p)
	frame := append(binary.BigEndian.AppendUint32([]byte{1}, uint32(len(b))), b...)
	return [][]byte{[]byte("kv_metrics"), binary.BigEndian.AppendUint64(nil, publisher), binary.BigEndian.AppendUint64(nil, sequence), frame}
}

// publisher is a real PUB socket.
type publisher struct {
	t        *testing.T
	id, sent uint64
	soc      *zmq.Socket
	endpoint string
	close    func()
}

func publish(t *testing.T, id uint64, endpoint string) *publisher {
	t.Helper()
	zctx, err := zmq.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	soc, err := zctx.NewSocket(zmq.PUB)
	if err == nil {
		soc.SetLinger(0)
		err = soc.Bind(endpoint)
	}
	if err != nil {
		t.Fatal(err)
	}
	p := &publisher{t: t, id: id, soc: soc}
	closed := false
	p.close = func() {
		if closed {
			return
		}
		closed = true
		if err := soc.Close(); err != nil {
			t.Error(err)
		}
		if err := zctx.Term(); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(p.close)
	if p.endpoint, err = soc.GetLastEndpoint(); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *publisher) send(l load) {
	p.raw(event(p.id, p.sent, l))
	p.sent++
}

func (p *publisher) raw(frames [][]byte) {
	p.t.Helper()
	if _, err := p.soc.SendMessage(frames); err != nil {
		p.t.Fatal(err)
	}
}

// subscribed sends until something arrives: a subscription takes its time, and what is sent
// before is lost.
func (p *publisher) subscribed(r *rig) {
	p.t.Helper()
	before := r.value(p.t, "spillway_event_received_total", "")
	eventually(p.t, "a subscription", func() bool {
		p.raw([][]byte{[]byte("kv_metrics")})
		return r.value(p.t, "spillway_event_received_total", "") > before
	})
}

// value is that of a counter with one label or none, or -1 if it is not there.
func (r *rig) value(t *testing.T, name, label string) float64 {
	t.Helper()
	families, err := r.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && (label == "" || m.GetLabel()[0].GetValue() == label) {
				return m.GetCounter().GetValue()
			}
		}
	}
	return -1
}

func listening(endpoints ...string) monitor.Config {
	cfg := fast()
	cfg.ScrapeInterval, cfg.EventPlane, cfg.EventEndpoints = 0, "zmq", endpoints
	return cfg
}

// prefill is P of a worker's first rank.
func (r *rig) prefill(id worker.ID) float64 {
	for _, s := range r.list.Workers(time.Now()) {
		if s.ID == id {
			return s.Ranks[0].Report.PrefillTokens
		}
	}
	return -1
}

// Row 25 end to end, with the sums over routers, over real sockets.
func TestEvents(t *testing.T) {
	engine, one, two := publish(t, 1, "tcp://127.0.0.1:*"), publish(t, 2, "tcp://127.0.0.1:*"), publish(t, 3, "tcp://127.0.0.1:*")
	r := newRig(listening(engine.endpoint, one.endpoint, two.endpoint), busy.Thresholds{DecodeFrac: new(0.85)})
	w := r.add(t, worker.Worker{ID: 7, Endpoint: "http://h:1", KVTotalBlocks: 1000})
	stop := r.run(t)
	for _, p := range []*publisher{engine, one, two} {
		p.subscribed(r)
	}
	engine.send(load{worker: 7, used: 870})
	eventually(t, "25 busy by U", func() bool { return r.status(7) == "busy r0 870/1000" })
	one.send(load{worker: 7, decode: 20, prompt: 500})
	eventually(t, "25 both kept", func() bool { return r.prefill(7) == 500 })
	if got := r.status(7); got != "busy r0 870/1000" {
		t.Errorf("25 after a router's event the worker is %q, want busy by U still", got)
	}
	two.send(load{worker: 7, decode: 10, prompt: 1000})
	eventually(t, "both routers' tokens", func() bool { return r.prefill(7) == 1500 })
	one.send(load{worker: 7, prompt: 200}) // decode is not in it and stays
	eventually(t, "a part changed", func() bool { return r.prefill(7) == 1200 })
	if a := r.list.Workers(time.Now())[0].Ranks[0].Report.DecodeBlocks; a != 30 {
		t.Errorf("decode blocks are %v, want 30", a)
	}
	engine.send(load{worker: 7, used: 850})
	eventually(t, "at the threshold is free", func() bool { return r.status(w.ID) == "free r0 850/1000" })
	r.Forget(w.ID)
	engine.send(load{worker: 7, used: 1000})
	eventually(t, "an event for a forgotten worker", func() bool { return r.value(t, "spillway_event_dropped_total", "unknown_worker") == 1 })
	if got := r.status(7); got != "free r0 850/1000" {
		t.Errorf("after Forget: %q, want it unchanged", got)
	}
	stop()
}

// Each kind of garbage is counted, logged once, and changes nothing; what follows it is read.
func TestEventGarbage(t *testing.T) {
	p := publish(t, 0x1234, "tcp://127.0.0.1:*")
	r := newRig(listening(p.endpoint), busy.Thresholds{DecodeFrac: new(0.85)})
	r.add(t, worker.Worker{ID: 7, Endpoint: "http://h:1", KVTotalBlocks: 1000, DPStart: 4, DPSize: 2})
	stop := r.run(t)
	p.subscribed(r)
	p.send(load{worker: 7, dp: 4, used: 870})
	const want = "free r4 870/1000 r5"
	eventually(t, want, func() bool { return r.status(7) == want })
	good := func() [][]byte { return event(0x1234, 9, load{worker: 7, dp: 4, used: 1}) }
	change := func(frame, at int) [][]byte {
		f := good()
		f[frame][(at+len(f[frame]))%len(f[frame])] = 0xc1 // which MessagePack never uses
		return f
	}
	for _, tt := range []struct {
		name, reason string
		frames       [][]byte
	}{
		{"one frame", "frames", [][]byte{[]byte("kv_metrics")}},
		{"a hundred frames", "frames", append(good(), make([][]byte, 96)...)},
		{"a long frame", "frames", append(good()[:3], make([]byte, 60_000))},
		{"a topic that begins alike", "topic", append([][]byte{[]byte("kv_metrics_v2")}, good()[1:]...)},
		{"23 another publisher", "identity", change(1, 7)},
		{"23 another sequence", "identity", change(2, 7)},
		{"another version", "version", change(3, 0)},
		{"another length", "envelope", change(3, 4)},
		{"an envelope that is none", "envelope", change(3, 5)},
		{"a payload that is none", "payload", change(3, -1)},
		{"24 another worker", "unknown_worker", event(0x1234, 9, load{worker: 8, used: 1})},
		{"a rank below the declared", "unknown_rank", event(0x1234, 9, load{worker: 7, dp: 3, used: 1})},
		{"a rank above the declared", "unknown_rank", event(0x1234, 9, load{worker: 7, dp: 6, used: 1})},
	} {
		before := r.value(t, "spillway_event_dropped_total", tt.reason)
		p.raw(tt.frames)
		eventually(t, tt.name+" counted as "+tt.reason, func() bool {
			return r.value(t, "spillway_event_dropped_total", tt.reason) == before+1
		})
	}
	if got := r.status(7); got != want {
		t.Errorf("after garbage: %q, want %q", got, want)
	}
	if got := r.status(8); got != "unregistered" {
		t.Errorf("24 the unknown worker has become %q", got)
	}
	// What is too large for a socket ends the connection, which is made anew.
	p.raw(append(good()[:3], make([]byte, 1<<20)))
	p.subscribed(r)
	p.send(load{worker: 7, dp: 5, used: 900})
	eventually(t, "events after all that", func() bool { return r.status(7) == "busy r4 870/1000 r5 900/1000" })
	stop()
	if n := r.log.count("a load event was dropped"); n != 8 {
		t.Errorf("%d lines about 8 reasons:\n%s", n, &r.log.buf)
	}
}

// A publisher that goes and comes back on its port is heard again; ones that are not there do
// not matter.
func TestEventsReconnect(t *testing.T) {
	p := publish(t, 1, "tcp://127.0.0.1:*")
	r := newRig(listening("tcp://127.0.0.1:1", p.endpoint, "tcp://no-such-host.invalid:5560"), busy.Thresholds{DecodeFrac: new(0.5)})
	r.add(t, worker.Worker{ID: 7, Endpoint: "http://h:1", KVTotalBlocks: 1000})
	r.run(t)
	p.subscribed(r)
	p.send(load{worker: 7, used: 900})
	eventually(t, "busy", func() bool { return r.status(7) == "busy r0 900/1000" })
	p.close()
	again := publish(t, 2, p.endpoint)
	again.subscribed(r)
	again.send(load{worker: 7, used: 100})
	eventually(t, "free", func() bool { return r.status(7) == "free r0 100/1000" })
	again.close()
	// For a while something else has the port, and speaks first.
	met := make(chan struct{}, 100)
	other := impostor(t, strings.TrimPrefix(p.endpoint, "tcp://"), func() { met <- struct{}{} })
	<-met
	<-met
	other.Close()
	third := publish(t, 3, p.endpoint)
	third.subscribed(r)
	third.send(load{worker: 7, used: 700})
	eventually(t, "busy again", func() bool { return r.status(7) == "busy r0 700/1000" })
}

// impostor speaks HTTP to whoever comes.
func impostor(t *testing.T, addr string, met func()) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			c.Write([]byte("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"))
			c.Close()
			met()
		}
	}()
	t.Cleanup(func() {
		ln.Close()
		<-done
	})
	return ln
}

// Garbage that is not even ZMQ does not disturb the others, and nothing is left after Run: no
// goroutine (TestMain looks), descriptor or thread.
func TestEventsLeaveNothing(t *testing.T) {
	ln := impostor(t, "127.0.0.1:0", func() {})
	p := publish(t, 1, "tcp://127.0.0.1:*")
	once := func() {
		r := newRig(listening("tcp://"+ln.Addr().String(), p.endpoint), busy.Thresholds{})
		r.add(t, worker.Worker{ID: 7, Endpoint: "http://h:1", KVTotalBlocks: 1000})
		stop := r.run(t)
		p.subscribed(r)
		stop()
	}
	once() // what libraries keep for good is there after this
	before := open(t)
	for range 20 {
		once()
	}
	eventually(t, fmt.Sprintf("at most %v descriptors and threads of libzmq", before), func() bool {
		now := open(t)
		return now[0] <= before[0]+2 && now[1] <= before[1]
	})
}

// open is how many descriptors and libzmq threads this process has.
func open(t *testing.T) [2]int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("no /proc: ", err)
	}
	names, _ := filepath.Glob("/proc/self/task/*/comm")
	threads := 0
	for _, n := range names {
		if text, err := os.ReadFile(n); err == nil && strings.HasPrefix(string(text), "ZMQbg") {
			threads++
		}
	}
	return [2]int{len(fds), threads}
}

// Sums and their expiry, in given time.
func TestShares(t *testing.T) {
	type step struct {
		after     time.Duration
		publisher uint64
		load
		p float64 // afterwards
	}
	for _, tt := range []struct {
		name  string
		steps []step
	}{
		{"one", []step{{0, 1, load{prompt: 5}, 5}, {time.Second, 1, load{prompt: 3}, 3}}},
		{"two", []step{{0, 1, load{prompt: 5}, 5}, {0, 2, load{prompt: 3}, 8}, {time.Second, 1, load{prompt: 0}, 3}}},
		{"the worker's own events are no part", []step{{0, 1, load{prompt: 5}, 5}, {0, 2, load{used: 3}, 5}}},
		{"nil leaves the part alone", []step{{0, 1, load{prompt: 5, decode: 1}, 5}, {0, 1, load{decode: 2}, 5}}},
		{"59 s of silence", []step{{0, 1, load{prompt: 5}, 5}, {59 * time.Second, 2, load{prompt: 3}, 8}}},
		{"60 s of silence", []step{{0, 1, load{prompt: 5}, 5}, {60 * time.Second, 2, load{prompt: 3}, 3}}},
		{"it comes back", []step{{0, 1, load{prompt: 5}, 5}, {60 * time.Second, 2, load{prompt: 3}, 3}, {time.Second, 1, load{prompt: 4}, 7}}},
		{"all are silent", []step{{0, 1, load{prompt: 5}, 5}, {0, 2, load{prompt: 3}, 8}, {60 * time.Second, 3, load{used: 1}, 0}}},
		{"too much for a number", []step{{0, 1, load{prompt: uint64(math.MaxUint64)}, math.MaxUint64}, {0, 2, load{prompt: 3}, math.MaxUint64}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(listening("tcp://h:1"), busy.Thresholds{DecodeFrac: new(0.5)})
			r.add(t, worker.Worker{ID: 7, Endpoint: "http://h:1", KVTotalBlocks: 1000})
			now := epoch
			for i, s := range tt.steps {
				now = now.Add(s.after)
				s.worker = 7
				r.Expire(now)
				if dropped := r.Heard(parse(t, event(s.publisher, uint64(i), s.load)), now); dropped != "" {
					t.Fatalf("step %d dropped: %s", i, dropped)
				}
				if got := r.prefill(7); got != s.p {
					t.Errorf("step %d: P is %v, want %v", i, got, s.p)
				}
			}
		})
	}
}

func parse(t *testing.T, frames [][]byte) wire.LoadEvent {
	t.Helper()
	e, err := wire.ParseLoad(frames)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// An event names a rank as the worker's page does, and never makes one up.
func TestEventRanks(t *testing.T) {
	page := func(labels ...string) string {
		var b strings.Builder
		for _, l := range labels {
			fmt.Fprintf(&b, "vllm:kv_cache_usage_perc{engine=%q} 0.1\n", l)
		}
		return b.String()
	}
	for _, tt := range []struct {
		name    string
		w       worker.Worker
		page    string // "" for a worker that is not scraped
		dp      uint32
		dropped string
		want    string
	}{
		{"declared", worker.Worker{DPStart: 4, DPSize: 2}, "", 5, "", "free r4 r5 900/1000"},
		{"not declared", worker.Worker{DPStart: 4, DPSize: 2}, "", 0, "unknown_rank", "unknown r4 r5"},
		{"unknown to all", worker.Worker{}, "", 3, "", "busy r0 900/1000"},
		{"a lone label is the only rank", worker.Worker{}, page("3"), 0, "", "busy r0 900/1000"},
		{"one of two", worker.Worker{}, page("3", "4"), 4, "", "free r3 0.1 r4 900/1000"},
		{"none of two", worker.Worker{}, page("3", "4"), 5, "unknown_rank", "free r3 0.1 r4 0.1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := listening("tcp://h:1")
			r := newRig(cfg, busy.Thresholds{DecodeFrac: new(0.85)})
			if tt.page != "" {
				s := &server{pages: map[string]string{"/metrics": tt.page}, asked: map[string]int{}}
				srv := serve(s.ServeHTTP)
				t.Cleanup(srv.Close)
				tt.w.Endpoint = srv.URL
				cfg.ScrapeInterval, cfg.EventPlane = 20*time.Millisecond, "off"
				r = newRig(cfg, busy.Thresholds{DecodeFrac: new(0.85)})
			} else {
				tt.w.Endpoint = "http://h:1"
			}
			tt.w.ID, tt.w.KVTotalBlocks = 7, 1000
			r.add(t, tt.w)
			stop := r.run(t)
			if tt.page != "" {
				eventually(t, "a page", func() bool { return !strings.HasPrefix(r.status(7), "unknown") })
			}
			stop()
			dropped := r.Heard(parse(t, event(1, 0, load{worker: 7, dp: tt.dp, used: 900})), time.Now())
			got := strings.ReplaceAll(r.status(7), "100/1000", "0.1") // of the page
			if dropped != tt.dropped || got != tt.want {
				t.Errorf("rank %d: dropped %q, then %q, want %q, %q", tt.dp, dropped, got, tt.dropped, tt.want)
			}
		})
	}
}

// However many publishers turn up, the state of a worker has an end.
func TestShareLimit(t *testing.T) {
	r := newRig(listening("tcp://h:1"), busy.Thresholds{})
	r.add(t, worker.Worker{ID: 7, Endpoint: "http://h:1"})
	e := parse(t, event(1, 0, load{worker: 7, prompt: 1}))
	for i := range uint64(monitor.MaxShares) {
		e.Rank.DP, e.Publisher = uint32(i/monitor.MaxParts), i%monitor.MaxParts
		if dropped := r.Heard(e, epoch); dropped != "" {
			t.Fatalf("publisher %d of rank %d dropped: %s", e.Publisher, e.Rank.DP, dropped)
		}
		if e.Publisher == monitor.MaxParts-1 {
			more := e
			more.Publisher = monitor.MaxParts
			if dropped := r.Heard(more, epoch); dropped != "no_room" {
				t.Errorf("one publisher more about rank %d: dropped %q, want no_room", e.Rank.DP, dropped)
			}
		}
	}
	if dropped := r.Heard(e, epoch); dropped != "" {
		t.Errorf("a known publisher was dropped: %s", dropped)
	}
	e.Rank.DP++
	if dropped := r.Heard(e, epoch); dropped != "no_room" {
		t.Errorf("one rank more: dropped %q, want no_room", dropped)
	}
	r.Expire(epoch.Add(time.Minute))
	if dropped := r.Heard(e, epoch.Add(time.Minute)); dropped != "" {
		t.Errorf("after all have gone silent: dropped %q", dropped)
	}
	for _, rank := range r.list.Workers(epoch)[0].Ranks {
		if want := map[bool]float64{rank.DP == e.Rank.DP: 1}[true]; rank.Report.PrefillTokens != want {
			t.Errorf("rank %d: P is %v, want %v", rank.DP, rank.Report.PrefillTokens, want)
		}
	}
}

// A worker's new record carries on with what routers have promised it.
func TestSharesSurviveNewRecord(t *testing.T) {
	r := newRig(listening("tcp://h:1"), busy.Thresholds{})
	r.add(t, worker.Worker{ID: 7, Endpoint: "http://h:1"})
	for publisher, tokens := range []int{100, 10} {
		r.Heard(parse(t, event(uint64(publisher), 0, load{worker: 7, prompt: tokens})), epoch)
	}
	r.add(t, worker.Worker{ID: 7, Endpoint: "http://h:1", APIKey: "new"})
	r.Heard(parse(t, event(1, 1, load{worker: 7, prompt: 20})), epoch)
	if p := r.prefill(7); p != 120 {
		t.Errorf("P is %v, want 120", p)
	}
	r.Expire(epoch.Add(time.Minute))
	if p := r.prefill(7); p != 0 {
		t.Errorf("after a minute P is %v, want 0", p)
	}
}

func TestEventConfig(t *testing.T) {
	for _, tt := range []struct {
		plane, endpoints string
		want             string // what the error begins with; "" for none
	}{
		{"off", "", ""},
		{"off", "not looked at", ""},
		{"zmq", "tcp://h:5560", ""},
		{"zmq", "tcp://10.0.0.1:5560 tcp://[::1]:5560 tcp://a.b:65535", ""},
		{"zmq", "", "event-endpoints: event-plane zmq needs at least one"},
		{"nats", "", "event-plane: nats is not built in"},
		{"ZMQ", "", `event-plane: "ZMQ" is neither`},
		{"", "", `event-plane: "" is neither`},
		{"zmq", "tcp://h:1 tcp://h:1", "event-endpoints: tcp://h:1 is listed twice"},
		{"zmq", "h:5560", "event-endpoints: "},
		{"zmq", "http://h:5560", "event-endpoints: "},
		{"zmq", "tcp://*:5560", "event-endpoints: "},
		{"zmq", "tcp://h", "event-endpoints: "},
		{"zmq", "tcp://h:0", "event-endpoints: "},
		{"zmq", "tcp://h:65536", "event-endpoints: "},
		{"zmq", "tcp://:1", "event-endpoints: "},
		{"zmq", "tcp://h:1/x", "event-endpoints: "},
		{"zmq", "tcp://u@h:1", "event-endpoints: "},
		{"zmq", "ipc:///tmp/x", "event-endpoints: "},
	} {
		cfg := monitor.DefaultConfig()
		cfg.EventPlane, cfg.EventEndpoints = tt.plane, strings.Fields(tt.endpoints)
		err := cfg.Validate()
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.HasPrefix(err.Error(), tt.want)) {
			t.Errorf("event-plane %q, event-endpoints %q: %v, want %q", tt.plane, tt.endpoints, err, tt.want)
		}
	}
	for engine, ok := range map[string]bool{"auto": true, "vllm": true, "sglang": true, "trtllm": true, "custom": false, "": false} {
		cfg := monitor.DefaultConfig()
		cfg.Engine = engine
		if err := cfg.Validate(); (err == nil) != ok {
			t.Errorf("engine %q: %v", engine, err)
		}
	}
}

// A valid event that is flooded is read as fast as it comes, or lost: the end of Run does not
// wait for the rest.
func TestEventFlood(t *testing.T) {
	p := publish(t, 1, "tcp://127.0.0.1:*")
	r := newRig(listening(p.endpoint), busy.Thresholds{})
	r.add(t, worker.Worker{ID: 7, Endpoint: "http://h:1", KVTotalBlocks: 1000})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	p.subscribed(r)
	for i := range 20_000 {
		p.send(load{worker: 7, used: i % 1000})
	}
	eventually(t, "a thousand of them", func() bool { return r.value(t, "spillway_event_received_total", "") > 1000 })
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
}
