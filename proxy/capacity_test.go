package proxy_test

import (
	"encoding/json"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"spillway/busy"
	"spillway/proxy"
	"spillway/worker"
)

func (f *front) capacity(query string) proxy.Capacity {
	f.t.Helper()
	g := f.send("GET", "/internal/capacity?pool=m"+query, "")
	var c proxy.Capacity
	if err := json.Unmarshal([]byte(g.body), &c); err != nil || g.status != 200 {
		f.t.Fatalf("GET /internal/capacity = %d %s, %v", g.status, g.body, err)
	}
	return c
}

// TestCapacity follows a pool of two workers that are busy above 85 of 100 blocks.
func TestCapacity(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	w1, w2 := served("w1", s), served("w2", s)
	w2.MaxConcurrency = 20
	f := begin(t, setup{busy: decodeLimit(), models: []string{"m"}, proxy: func(c *proxy.Config) { c.CompatMetrics = true }}, w1, w2)
	var seq uint64
	for _, tt := range []struct {
		name       string
		used1      uint64
		used2      uint64
		saturation float64
	}{
		{"idle", 0, 0, 0},
		{"half", 85, 0, 0.5},
		{"one is over, and counts no more than full", 100, 0, 0.5},
		{"all are over", 100, 102, (100.0/85 + 102.0/85) / 2},
	} {
		f.report(w1.ID, tt.used1)
		f.report(w2.ID, tt.used2)
		c := f.capacity("&after=" + jsonNumber(seq))
		if math.Abs(c.Saturation-tt.saturation) > 1e-9 || c.Fullness != c.Saturation || c.ReadyEndpoints != 2 || c.Capacity.Requests != 120 || c.Capacity.Tokens != 2_000_000 {
			t.Errorf("%s: %+v, want saturation %v, 2 ready, 120 requests, 2000000 tokens", tt.name, c, tt.saturation)
		}
		if c.Seq <= seq || time.Since(c.Time()) > time.Minute {
			t.Errorf("%s: seq %d after %d, measured at %v", tt.name, c.Seq, seq, c.Time())
		}
		seq = c.Seq
	}
	f.chat(chatBody, "X-Spillway-Lane: batch")
	f.chat(chatBody)
	page := f.metrics()
	for _, want := range []string{
		`spillway_requests_shed_total{code="503",lane="batch",pool="m",reason="overloaded"} 1`,
		`spillway_requests_shed_total{code="503",lane="interactive",pool="m",reason="overloaded"} 1`,
		`spillway_pool_ready_endpoints{pool="m"} 2`, `inference_pool_ready_pods{name="m"} 2`,
		`spillway_pool_capacity{pool="m",unit="requests"} 120`,
		`inference_extension_flow_control_queue_size{fairness_id="default",inference_pool="m",model_name="m",priority="0",target_model_name="m"} 142.5`,
	} {
		if !strings.Contains(page, want) && !strings.Contains(page, want[:len(want)-3]+"142.") {
			t.Errorf("the metrics lack %s", want)
		}
	}
	f.routes.Unregister(w1.ID, time.Now())
	f.routes.Unregister(w2.ID, time.Now())
	if c := f.capacity("&after=" + jsonNumber(seq)); c.Saturation != 1 || c.ReadyEndpoints != 0 || c.Capacity.Requests != 0 {
		t.Errorf("without workers: %+v, want saturation 1 and nothing else", c)
	}
	if page := f.metrics(); !strings.Contains(page, `spillway_pool_ready_endpoints{pool="m"} 0`) {
		t.Error("the series of the pool are gone with its workers")
	}
	if g := f.send("GET", "/internal/capacity?pool=other", ""); g.status != 404 {
		t.Errorf("an unknown pool: %d %s, want 404", g.status, g.body)
	}
	if g := f.send("GET", "/internal/capacity?pool=m&after=x", ""); g.status != 400 {
		t.Errorf("after=x: %d %s, want 400", g.status, g.body)
	}
}

func jsonNumber(n uint64) string {
	b, _ := json.Marshal(n)
	return string(b)
}

// TestCapacityWithoutThresholds counts requests in flight, by lane.
func TestCapacityWithoutThresholds(t *testing.T) {
	hold := make(chan struct{})
	s := newScript(t, func(c *conn, _ received) {
		<-hold
		c.say(answer(200, jsonHeader, reply))
	})
	w := served("w", s)
	w.MaxConcurrency = 10
	f := begin(t, setup{}, w)
	answers := []<-chan got{f.asking(chatBody), f.asking(chatBody, "X-Spillway-Lane: batch"), f.asking(chatBody, "X-Spillway-Lane: batch")}
	var c proxy.Capacity
	eventually(t, "three requests are in flight", func() bool {
		c = f.capacity("")
		return c.Inflight.Batch.Requests == 2 && c.Inflight.Interactive.Requests == 1 && math.Abs(c.Saturation-0.3) < 1e-9
	})
	close(hold)
	for _, a := range answers {
		<-a
	}
	eventually(t, "none is", func() bool {
		c = f.capacity("")
		return c.Inflight.Batch.Requests == 0 && c.Inflight.Interactive.Requests == 0 && c.Saturation == 0
	})
	f.list().Mark(w.ID, nil, 0, time.Now()) // a preference, no load
	if c := f.capacity("&after=" + jsonNumber(c.Seq)); c.Saturation != 0 {
		t.Errorf("marked: %+v, want saturation 0", c)
	}
}

// TestCompatMetrics has one of two workers tell of two ranks. What llm-d's names say is made of that, and of
// the capacity.
func TestCompatMetrics(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	w1, w2 := served("w1", s), served("w2", s)
	w1.DPSize, w2.MaxConcurrency = 2, 20
	f := begin(t, setup{busy: decodeLimit(), models: []string{"m"}, proxy: func(c *proxy.Config) { c.CompatMetrics = true }}, w1, w2)
	now := time.Now()
	for _, of := range []struct {
		rank                   worker.Rank
		used, waiting, running uint64
	}{
		{worker.Rank{Worker: w1.ID}, 34, 3, 7}, {worker.Rank{Worker: w1.ID, DP: 1}, 51, 1, 8}, {worker.Rank{Worker: w2.ID}, 17, 0, 1},
	} {
		f.list().Observe(busy.Sample{Rank: of.rank, TakenAt: now, KVUsedBlocks: &of.used, KVTotalBlocks: new(uint64(100)), Waiting: &of.waiting, Running: &of.running}, now)
	}
	for series, want := range map[string]float64{
		`inference_pool_ready_pods{name="m"}`: 2, `llm_d_epp_ready_endpoints{name="m"}`: 2,
		// w1 is as full as its emptier rank: 34 of 85; w2 is so by 17 of 85.
		`inference_extension_flow_control_pool_saturation{inference_pool="m"}`: 0.3, `llm_d_epp_flow_control_pool_saturation{inference_pool="m",stage="effective"}`: 0.3,
		compatQueueSize: 0.3 * 120,
		`inference_pool_per_pod_queue_size{model_server_pod="w1",name="m"}`: 4, `inference_pool_per_pod_queue_size{model_server_pod="w2",name="m"}`: 0,
		`inference_pool_average_queue_size{name="m"}`: 2, `inference_pool_average_running_requests{name="m"}`: 8,
		`inference_pool_average_kv_cache_utilization{name="m"}`: (0.425 + 0.17) / 2,
	} {
		if got, err := strconv.ParseFloat(f.metric(series), 64); err != nil || math.Abs(got-want) > 1e-9 {
			t.Errorf("%s is %v, %v, want %v", series, got, err, want)
		}
	}
	f.routes.Unregister(w1.ID, now)
	f.routes.Unregister(w2.ID, now)
	for series, want := range map[string]string{
		`inference_pool_ready_pods{name="m"}`: "0", `inference_pool_average_queue_size{name="m"}`: "0", compatQueueSize: "0",
		`inference_extension_flow_control_pool_saturation{inference_pool="m"}`: "1", `inference_pool_per_pod_queue_size{model_server_pod="w1",name="m"}`: "",
	} {
		if got := f.metric(series); got != want {
			t.Errorf("without workers %s is %q, want %q", series, got, want)
		}
	}
}

const compatQueueSize = `inference_extension_flow_control_queue_size{fairness_id="default",inference_pool="m",model_name="m",priority="0",target_model_name="m"}`

// TestCompatQueueSize has llm-d's size of a queue be that of ours.
func TestCompatQueueSize(t *testing.T) {
	s, turn := onTurn(t)
	f := begin(t, setup{busy: onePrompt(), router: queueOf(4), proxy: func(c *proxy.Config) {
		patient(c)
		c.CompatMetrics, c.CompatQueueSize = true, "queue"
	}}, served("w", s))
	first := f.asking(chatBody)
	eventually(t, "the worker has a request", func() bool { return len(s.seen()) == 1 })
	second := f.asking(chatBody)
	f.waiting(1)
	if got := f.metric(compatQueueSize); got != "1" {
		t.Errorf("while one waits the queue's size is %q, want 1", got)
	}
	turn <- struct{}{}
	turn <- struct{}{}
	<-first
	<-second
}
