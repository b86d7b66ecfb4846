package proxy_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"spillway/proxy"
)

const noHealthy = `{"message":"Service temporarily unavailable: No workers available for model m","type":"service_unavailable","code":503}`

// breaking is a breaker that a test can see at work.
func breaking(threshold uint64, open time.Duration) func(*proxy.Config) {
	return func(c *proxy.Config) {
		c.CBFailureThreshold, c.CBOpen, c.InhibitedDuration = threshold, open, 0
	}
}

func (f *front) circuit(worker string) string {
	return f.metric(fmt.Sprintf("spillway_circuit_state{worker=%q}", worker))
}

// TestCircuit leads one worker's circuit once around: closed, open, half-open, open again,
// half-open, closed.
func TestCircuit(t *testing.T) {
	var status atomic.Int32
	status.Store(500)
	asked, held := make(chan struct{}), make(chan struct{})
	s := newScript(t, func(c *conn, _ received) {
		if status.Load() == 0 {
			asked <- struct{}{}
			<-held
			c.say(answer(200, jsonHeader, reply))
			return
		}
		c.say(answer(int(status.Load()), jsonHeader, reply))
	})
	f := begin(t, setup{proxy: breaking(3, 100*time.Millisecond)}, served("w", s))
	calls := 0
	expect := func(what string, status int, body string) {
		t.Helper()
		if status != 503 {
			calls++
		}
		f.chat(chatBody).is(t, what, status, body)
		if got := len(s.seen()); got != calls {
			t.Fatalf("%s: the worker saw %d requests, want %d", what, got, calls)
		}
	}
	half := func() { eventually(t, "the circuit is half-open", func() bool { return f.circuit("w") == "2" }) }

	expect("first failure", 500, failed500)
	status.Store(200)
	expect("a success, after which counting begins anew", 200, reply)
	status.Store(500)
	for range 3 {
		if got := f.circuit("w"); got != "0" {
			t.Fatalf("circuit = %s before the third failure in a row, want 0", got)
		}
		expect("failure", 500, failed500)
	}
	f.chat(chatBody).is(t, "while open", 503, noHealthy, "X-Spillway-Reason: no-healthy-workers", "Retry-After: 1")
	half()
	expect("a try that fails", 500, failed500)
	if got := f.circuit("w"); got != "1" {
		t.Errorf("circuit = %s after a try that failed, want 1", got)
	}
	half()
	if body := f.send("GET", "/v1/models/m/ready", "").body; !strings.Contains(body, `"circuit":"half-open"`) {
		t.Errorf("ready does not tell of a circuit that is half-open: %s", body)
	}
	status.Store(0)
	for range 3 {
		answered := make(chan got, 1)
		go func() { answered <- f.chat(chatBody) }()
		<-asked
		if got := len(f.list().Snapshot().Routable); got != 0 {
			t.Errorf("%d workers are routable while another request tries the only one, want 0", got)
		}
		calls++
		expect("while another request tries", 503, noHealthy)
		held <- struct{}{}
		(<-answered).is(t, "a try", 200, reply)
	}
	eventually(t, "the circuit is closed", func() bool { return f.circuit("w") == "0" })
	status.Store(200)
	expect("closed again", 200, reply)
}

// TestCircuitTriedByStream checks that a try has said enough when its stream shows a token: the rest
// may take minutes, in which a worker that has recovered must not be left with one request.
func TestCircuitTriedByStream(t *testing.T) {
	var asked atomic.Int32
	s, next := pausing(t)
	stream := s.answer
	s.answer = func(c *conn, r received) {
		switch asked.Add(1) {
		case 1:
			c.say(answer(500, "", ""))
		case 2:
			stream(c, r)
		default:
			c.say(answer(200, jsonHeader, reply))
		}
	}
	f := begin(t, setup{proxy: breaking(1, 50*time.Millisecond)}, served("w", s))
	f.chat(chatBody).is(t, "a failure", 500, failed500)
	eventually(t, "the circuit is half-open", func() bool { return f.circuit("w") == "2" })
	try := f.dial()
	try.post(streamBody)
	try.head()
	if got, err := try.chunk(); got != hello || err != nil {
		t.Fatalf("first event %q, %v", got, err)
	}
	f.chat(chatBody).is(t, "while the stream goes on", 200, reply)
	next <- struct{}{}
	if got, err := try.chunk(); got != ended+done || err != nil {
		t.Errorf("the stream goes on with %q, %v, want its end", got, err)
	}
}

// TestCircuitElsewhere checks that requests pass over a worker whose circuit is open, and that
// a half-open one gets its try while another worker serves.
func TestCircuitElsewhere(t *testing.T) {
	var mended atomic.Bool
	bad := newScript(t, func(c *conn, _ received) {
		if mended.Load() {
			c.say(answer(200, jsonHeader, reply))
		} else {
			c.say(answer(503, "", "out of order"))
		}
	})
	good := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{proxy: breaking(2, 50*time.Millisecond)}, served("bad", bad), served("good", good))
	for range 20 {
		f.chat(chatBody).is(t, "chat", 200, reply)
	}
	if got := f.circuit("good"); got != "0" {
		t.Errorf("circuit of the good worker = %s, want 0", got)
	}
	mended.Store(true)
	eventually(t, "the worker is back", func() bool {
		f.chat(chatBody).is(t, "chat", 200, reply)
		return f.circuit("bad") == "0"
	})
}

// TestNothingTrips has all that may go wrong without a worker being at fault.
func TestNothingTrips(t *testing.T) {
	for _, tt := range []struct {
		name   string
		worker func(*conn, received)
		body   string
	}{
		{"400", saying(answer(400, jsonHeader, "{}")), chatBody},
		{"404", saying(answer(404, jsonHeader, "{}")), chatBody},
		{"408", saying(answer(408, jsonHeader, "{}")), chatBody},
		{"422 for a stream", saying(answer(422, jsonHeader, "{}")), streamBody},
		{"499", saying(answer(499, jsonHeader, "{}")), chatBody},
		{"501", saying(answer(501, jsonHeader, "{}")), chatBody},
		{"429", saying(answer(429, jsonHeader, "{}")), chatBody},
		{"529", saying(answer(529, jsonHeader, "{}")), chatBody},
		{"503 with a time", saying(answer(503, "Retry-After: 1\r\n", "")), chatBody},
		{"503 of a full queue", saying(answer(503, jsonHeader, `{"error":"queue is full"}`)), chatBody},
		{"a stream that begins with 400", streaming(`data: {"error":{"message":"no","code":400}}` + "\n\n"), streamBody},
		{"a stream that begins with 429", streaming(`data: {"error":{"message":"no","code":429}}` + "\n\n"), streamBody},
		{"a stream that ends with 400", streaming(hello, `data: {"error":{"message":"no","code":400}}`+"\n\n", done), streamBody},
		{"invalid JSON", saying(answer(200, jsonHeader, reply)), `{"model":"m","messages":[`},
		{"no messages", saying(answer(200, jsonHeader, reply)), `{"model":"m","messages":[]}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScript(t, tt.worker)
			f := begin(t, setup{proxy: func(c *proxy.Config) { c.CBFailureThreshold = 2 }}, served("w", s))
			for range 10 {
				f.chat(tt.body)
			}
			if got := f.circuit("w"); got != "0" {
				t.Errorf("circuit = %s, want 0", got)
			}
			if got := f.metric(`spillway_worker_inhibited{worker="w"}`); got != "0" {
				t.Errorf("inhibited = %s, want 0", got)
			}
			if got := f.list().Snapshot().Routable; len(got) != 1 {
				t.Errorf("%d workers are routable, want 1", len(got))
			}
		})
	}
}

// TestLeavingTripsNothing has clients leave; that is no failure either.
func TestLeavingTripsNothing(t *testing.T) {
	s := newScript(t, func(c *conn, _ received) { c.say(streamHead + chunk(hello)); c.gone() })
	f := begin(t, setup{proxy: func(c *proxy.Config) { c.CBFailureThreshold = 2 }}, served("w", s))
	for i := range 10 {
		ctx, leave := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(streamBody))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := f.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		leave()
		_ = resp.Body.Close()
		want := fmt.Sprint(i + 1)
		eventually(t, "the leave is counted", func() bool { return f.metric("dynamo_frontend_disconnected_clients") == want })
		if got := f.metric(`dynamo_frontend_model_cancellation_total{endpoint="chat_completions",model="m",request_type="stream"}`); got != want {
			t.Fatalf("cancellations = %s, want %s", got, want)
		}
	}
	if got := f.states() + " " + f.circuit("w"); got != "w:unknown 0" {
		t.Errorf("afterwards %s, want w:unknown 0", got)
	}
}
