package proxy_test

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"spillway/proxy"
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
