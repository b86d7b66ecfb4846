package proxy_test

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"spillway/busy"
	"spillway/proxy"
	"spillway/router"
	"spillway/worker"
)

// queueOf lets so many requests of a model wait.
func queueOf(size int) router.Config {
	cfg := router.DefaultConfig()
	cfg.QueueSize = size
	return cfg
}

// onePrompt is a configuration in which a worker is busy with one prompt.
func onePrompt() busy.Config {
	cfg := busy.DefaultConfig()
	cfg.ActivePrefillTokensThreshold = new(uint64(0))
	return cfg
}

// patient lets requests wait for as long as any test, and their prompts count until their answer begins.
func patient(c *proxy.Config) { c.QueueTimeout, c.UnaryPrefill = long, "hold" }

// asking sends a chat and does not wait for its answer.
func (f *front) asking(body string, headers ...string) <-chan got {
	answered := make(chan got, 1)
	go func() { answered <- f.chat(body, headers...) }()
	return answered
}

// waiting waits until so many requests wait for a worker of model m.
func (f *front) waiting(n int) {
	f.t.Helper()
	eventually(f.t, fmt.Sprintf("%d requests wait", n), func() bool { return f.partition("m").Waiting() == n })
}

// onTurn is a worker that answers a request each time that turn is sent to.
func onTurn(t testing.TB) (s *script, turn chan struct{}) {
	turn = make(chan struct{})
	return newScript(t, func(c *conn, _ received) {
		<-turn
		c.say(answer(200, jsonHeader, reply))
	}), turn
}

// TestQueue has requests that wait while all workers are busy, and go by their order when one is not.
func TestQueue(t *testing.T) {
	s, turn := onTurn(t)
	log := &lines{}
	f := begin(t, setup{router: queueOf(3), busy: onePrompt(), proxy: patient, log: log.json(slog.LevelInfo)}, served("w", s))
	running := f.asking(chatBody, "X-Request-Id: running")
	eventually(t, "the worker has a request", func() bool { return len(s.seen()) == 1 })
	low := f.asking(chatBody, "X-Request-Id: low")
	f.waiting(1)
	high := f.asking(chatBody, "X-Request-Id: high", "X-Dynamo-Request-Priority: 5")
	f.waiting(2)
	byBody := f.asking(strings.Replace(chatBody, "{", `{"nvext":{"agent_hints":{"priority":3}},`, 1), "X-Request-Id: body")
	f.waiting(3)
	for series, want := range map[string]string{
		`dynamo_queued_requests{model="m"}`: "4",
		`dynamo_frontend_router_queue_pending_requests{model="m",policy_class="default",worker_type="decode"}`:                       "3",
		`dynamo_frontend_stage_requests{phase="aggregated",stage="route"}`:                                                           "3",
		`dynamo_frontend_router_queue_backpressure_total{model="m",policy_class="default",reason="queue-full",worker_type="decode"}`: "0",
		`dynamo_tasks_issued_total{endpoint="chat_completions",model="m"}`:                                                           "1",
	} {
		if got := f.metric(series); got != want {
			t.Errorf("while three wait %s = %s, want %s", series, got, want)
		}
	}
	if got := f.metric(`dynamo_frontend_router_queue_pending_isl_tokens{model="m",policy_class="default",worker_type="decode"}`); got == "0" || got == "" {
		t.Errorf("tokens that wait = %q, want some", got)
	}

	const full = `{"message":"Service temporarily unavailable: All workers are busy, please retry later","type":"service_unavailable","code":503,` +
		`"details":{"limit_kind":"requests","current":3,"limit":3}}`
	f.chat(chatBody).is(t, "a fifth", 503, full, "X-Spillway-Reason: queue-full", "X-Llm-D-Request-Dropped-Reason: rejected-saturated", "Retry-After: 1")

	for i, answered := range []<-chan got{running, high, byBody, low} {
		turn <- struct{}{}
		(<-answered).is(t, fmt.Sprintf("answer %d", i), 200, reply)
	}
	var order []string
	for _, r := range s.seen() {
		order = append(order, r.header.Get("X-Request-Id"))
	}
	if want := []string{"running", "high", "body", "low"}; !slices.Equal(order, want) {
		t.Errorf("the worker got %q, want %q", order, want)
	}
	for series, want := range map[string]string{
		`dynamo_queued_requests{model="m"}`:                                  "0",
		`spillway_queue_wait_seconds_count{model="m",outcome="admitted"}`:    "3",
		`spillway_queue_wait_seconds_count{model="m",outcome="refused"}`:     "0",
		`spillway_rejections_total{model="m",reason="queue-full"}`:           "1",
		`dynamo_tasks_rejected_total{endpoint="chat_completions",model="m"}`: "1",
		`dynamo_tasks_issued_total{endpoint="chat_completions",model="m"}`:   "5",
	} {
		if got := f.metric(series); got != want {
			t.Errorf("afterwards %s = %s, want %s", series, got, want)
		}
	}
	eventually(t, "all are logged", func() bool { return len(log.records(t, "request")) == 5 })
	for _, r := range log.records(t, "request") {
		_, has := r["queue_ms"]
		if id := r["request_id"]; has != (id == "low" || id == "high" || id == "body") {
			t.Errorf("record of %v has queue_ms: %v", id, has)
		}
	}
}

// TestQueueTimeout: each limit that ends a wait, and both statuses for that.
func TestQueueTimeout(t *testing.T) {
	const late = `{"message":"Service temporarily unavailable: All workers are busy, please retry later","type":"request_timeout","code":408}`
	brief := func(c *proxy.Config) { c.QueueTimeout = short }
	for _, tt := range []struct {
		name   string
		proxy  func(*proxy.Config)
		header string
		status int
		body   string
	}{
		{"queue-timeout", brief, "", 503, busyBody},
		{"queue-timeout, status 408", func(c *proxy.Config) { brief(c); c.QueueTimeoutStatus = "408" }, "", 408, late},
		{"objective of the client", patient, "X-Llm-D-Slo-Ttft-Ms: 200", 503, busyBody},
		{"request-timeout", func(c *proxy.Config) { patient(c); c.RequestTimeout = short }, "", 503, busyBody},
		{"limit of the client", patient, "X-Request-Timeout-Ms: 200", 503, busyBody},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScript(t, saying(answer(200, jsonHeader, reply)))
			w := served("w", s)
			log := &lines{}
			f := begin(t, setup{router: queueOf(3), busy: decodeLimit(), proxy: tt.proxy, log: log.json(slog.LevelInfo)}, w)
			f.report(w.ID, 86)
			f.chat(chatBody, tt.header).is(t, "chat", tt.status, tt.body, "X-Spillway-Reason: queue-timeout",
				"X-Llm-D-Request-Dropped-Reason: rejected-ttl-expired", "Retry-After: 1")
			for series, want := range map[string]string{
				`spillway_queue_wait_seconds_count{model="m",outcome="refused"}`:                                                                  "1",
				`spillway_rejections_total{model="m",reason="queue-timeout"}`:                                                                     "1",
				`dynamo_tasks_rejected_total{endpoint="chat_completions",model="m"}`:                                                              "1",
				`dynamo_tasks_issued_total{endpoint="chat_completions",model="m"}`:                                                                "1",
				`dynamo_frontend_requests_total{endpoint="chat_completions",error_type="overload",model="m",request_type="unary",status="error"}`: "1",
			} {
				if got := f.metric(series); got != want {
					t.Errorf("%s = %s, want %s", series, got, want)
				}
			}
			eventually(t, "the refusal is logged", func() bool { return len(log.records(t, "request")) > 0 })
			if r := log.records(t, "request"); len(r) != 1 || r[0]["reason"] != "queue-timeout" || r[0]["queue_ms"] == nil || r[0]["check"] != "decode_blocks" {
				t.Errorf("records %v, want one with the wait and the check", r)
			}
		})
	}
}

// TestQueueWakes has each way in which room comes about while somebody waits.
func TestQueueWakes(t *testing.T) {
	for _, tt := range []struct {
		name   string
		happen func(f *front, id worker.ID)
		status int
		body   string
	}{
		{"a report", func(f *front, id worker.ID) { f.report(id, 40) }, 200, reply},
		{"a threshold is raised", func(f *front, _ worker.ID) {
			f.send("POST", "/busy_threshold", `{"model":"m","active_decode_blocks_threshold":0.95}`)
		}, 200, reply},
		{"thresholds are taken back", func(f *front, _ worker.ID) { f.send("DELETE", "/busy_threshold?model=m", "") }, 200, reply},
		{"another worker", func(f *front, id worker.ID) {
			w := *f.routes.Catalog().Find(id)
			w.ID, w.Name = worker.DefaultID("more"), "more"
			f.register(w)
		}, 200, reply},
		{"the last worker goes", func(f *front, id worker.ID) { f.routes.Unregister(id, time.Now()) }, 503,
			flat(503, "service_unavailable", "Service temporarily unavailable: No workers available for model m")},
		{"the last worker fails", func(f *front, id worker.ID) { f.list().SetHealthy(id, false, time.Now()) }, 503,
			flat(503, "service_unavailable", "Service temporarily unavailable: No workers available for model m")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newScript(t, saying(answer(200, jsonHeader, reply)))
			w := served("w", s)
			f := begin(t, setup{router: queueOf(3), busy: decodeLimit(), proxy: patient, models: []string{"m"}}, w)
			f.report(w.ID, 86)
			answered := f.asking(chatBody)
			f.waiting(1)
			tt.happen(f, w.ID)
			(<-answered).is(t, "chat", tt.status, tt.body)
		})
	}
}

// TestQueuePrefill: a first token lets the next one go, while the first stream runs on.
func TestQueuePrefill(t *testing.T) {
	first, end := make(chan struct{}), make(chan struct{})
	s := newScript(t, func(c *conn, _ received) {
		c.say(streamHead)
		<-first
		c.say(chunk(hello))
		<-end
		c.say(chunk(ended+done) + chunk(""))
	})
	f := begin(t, setup{router: queueOf(1), busy: onePrompt(), proxy: patient}, served("w", s))
	a := f.asking(streamBody)
	eventually(t, "the worker has a request", func() bool { return len(s.seen()) == 1 })
	b := f.asking(streamBody)
	f.waiting(1)
	first <- struct{}{}
	eventually(t, "the worker has two requests", func() bool { return len(s.seen()) == 2 })
	close(first)
	close(end)
	(<-a).is(t, "first", 200, hello+ended+done)
	(<-b).is(t, "second", 200, hello+ended+done)
}

// TestQueuePins: who waits for one worker does not hold up those who take any.
func TestQueuePins(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	w1, w2 := served("w1", s), served("w2", s)
	f := begin(t, setup{router: queueOf(3), busy: decodeLimit(), proxy: patient}, w1, w2)
	f.report(w1.ID, 86)
	pinned := f.asking(chatBody, "X-Worker-Instance-Id: w1")
	f.waiting(1)
	f.chat(chatBody).is(t, "another", 200, reply, "X-Spillway-Worker: w2")
	f.chat(chatBody, "X-Worker-Instance-Id: nobody").is(t, "an unknown pin", 400, invalid("the pinned worker does not serve the model"))
	f.report(w1.ID, 10)
	(<-pinned).is(t, "pinned", 200, reply, "X-Spillway-Worker: w1")
}

// TestQueueClientLeaves: its place is free at once, and it counts as what it is.
func TestQueueClientLeaves(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	w := served("w", s)
	f := begin(t, setup{router: queueOf(1), busy: decodeLimit(), proxy: patient}, w)
	f.report(w.ID, 86)
	c := f.dial()
	c.post(chatBody)
	f.waiting(1)
	_ = c.Close()
	f.waiting(0)
	for series, want := range map[string]string{
		`spillway_queue_wait_seconds_count{model="m",outcome="left"}`:                                          "1",
		`dynamo_frontend_model_cancellation_total{endpoint="chat_completions",model="m",request_type="unary"}`: "1",
		`dynamo_tasks_rejected_total{endpoint="chat_completions",model="m"}`:                                   "0",
		`dynamo_tasks_issued_total{endpoint="chat_completions",model="m"}`:                                     "1",
		`dynamo_frontend_disconnected_clients`:                                                                 "1",
	} {
		eventually(t, series+" is "+want, func() bool { return f.metric(series) == want })
	}
}

// TestQueueDrain: a drain waits for those who have a worker, not for those who have none.
func TestQueueDrain(t *testing.T) {
	s, turn := onTurn(t)
	f := begin(t, setup{router: queueOf(3), busy: onePrompt(), proxy: func(c *proxy.Config) { patient(c); c.DrainTimeout = time.Hour }}, served("w", s))
	running := f.asking(chatBody)
	eventually(t, "the worker has a request", func() bool { return len(s.seen()) == 1 })
	waits := f.asking(chatBody)
	f.waiting(1)
	f.stop()
	(<-waits).is(t, "who waits", 503, draining, "X-Spillway-Reason: draining", "Connection: close", "X-Llm-D-Request-Dropped-Reason: rejected-shutting-down")
	turn <- struct{}{}
	(<-running).is(t, "who has a worker", 200, reply)
	f.over()
}

// TestNotForTheQueue: a further attempt and a batch do not wait, nor does one who finds no worker.
func TestNotForTheQueue(t *testing.T) {
	t.Run("retry", func(t *testing.T) {
		full := newScript(t, saying(answer(429, jsonHeader, "{}")))
		broken := newScript(t, func(c *conn, _ received) { c.reset() })
		for _, tt := range []struct {
			s      *script
			status int
		}{{full, 503}, {broken, 502}} {
			w, other := served("w", tt.s), served("other", tt.s)
			f := begin(t, setup{router: queueOf(3), busy: decodeLimit(), proxy: patient}, w, other)
			f.report(other.ID, 86)
			g := f.chat(chatBody)
			if g.status != tt.status || f.partition("m").Waiting() != 0 {
				t.Errorf("chat = %d %s, want %d", g.status, g.body, tt.status)
			}
		}
	})
	t.Run("batch", func(t *testing.T) {
		s := newScript(t, saying(answer(200, jsonHeader, reply)))
		w := served("w", s)
		f := begin(t, setup{router: queueOf(3), busy: decodeLimit(), proxy: patient}, w)
		f.report(w.ID, 86)
		f.chat(chatBody, "X-Spillway-Lane: batch").is(t, "chat", 503, busyBody, "X-Spillway-Reason: overloaded")
	})
	t.Run("no worker", func(t *testing.T) {
		f := begin(t, setup{router: queueOf(3), busy: decodeLimit(), proxy: patient, models: []string{"m"}})
		f.chat(chatBody).is(t, "chat", 503, flat(503, "service_unavailable", "Service temporarily unavailable: No workers available for model m"), "X-Spillway-Reason: no-workers")
	})
}

// TestQueueBooks has clients that leave at any moment, limits that end at any moment and workers that
// come and go. What is left is looked at when the front end ends.
func TestQueueBooks(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	w1, w2 := served("w1", s), served("w2", s)
	f := begin(t, setup{router: queueOf(20), busy: onePrompt(), models: []string{"m"}, proxy: func(c *proxy.Config) {
		c.QueueTimeout, c.UnaryPrefill = 20*time.Millisecond, "hold"
	}}, w1, w2)
	stop := make(chan struct{})
	var others, clients sync.WaitGroup
	others.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(10 * time.Millisecond):
				f.routes.Unregister(w2.ID, time.Now())
				w, _ := w2.Normalize()
				_, _ = f.routes.Register(&w, time.Now())
			}
		}
	})
	var mu sync.Mutex
	statuses := map[int]int{}
	for i := range 40 {
		clients.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 1))
			for range 25 {
				ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rng.IntN(40))*time.Millisecond)
				req, _ := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(chatBody))
				req.Header.Set("Content-Type", "application/json")
				req.Header.Set("X-Tenant-Id", fmt.Sprint(i%3))
				if resp, err := f.client.Do(req); err == nil {
					mu.Lock()
					statuses[resp.StatusCode]++
					mu.Unlock()
					_ = resp.Body.Close()
				}
				cancel()
			}
		})
	}
	clients.Wait()
	close(stop)
	others.Wait()
	t.Logf("answers by status: %v", statuses)
	eventually(t, "nothing is booked", func() bool { return len(f.unsettled()) == 0 })
	if n := f.partition("m").Waiting(); n != 0 {
		t.Errorf("%d still wait", n)
	}
	f.chat(chatBody).is(t, "a chat afterwards", 200, reply)
}
