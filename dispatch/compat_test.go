package dispatch_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"

	"spillway/dispatch"
)

// TestCompatMetrics looks for what dashboards of llm-d's processor show.
func TestCompatMetrics(t *testing.T) {
	r := startRedis(t)
	g := newGateway(t, func(w http.ResponseWriter, _ *http.Request, body string) {
		if strings.Contains(body, "no") {
			w.WriteHeader(400)
		}
		_, _ = io.WriteString(w, "{}")
	})
	q := simple(g)
	q["gate_type"], q["gate_params"] = "redis", map[string]any{"address": r.addr()}
	r.Set(t.Context(), "dispatch-gate-budget", "0.75", 0)
	d := begin(t, r, setup{cfg: func(c *dispatch.Config) { c.CompatMetrics = true }}, q)
	r.enqueue("q", "a", prompt)
	r.enqueue("q", "b", `{"prompt":"no"}`)
	r.results("result-list", 2)
	d.stop()
	families, err := d.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var page strings.Builder
	for _, f := range families {
		if _, err := expfmt.MetricFamilyToText(&page, f); err != nil {
			t.Fatal(err)
		}
	}
	const labels = `pool_name="default",queue_id="q",queue_name="q"`
	for _, want := range []string{
		`request_total{` + labels + `} 2`, `request_retries_total{` + labels + `} 0`, `successful_requests_total{` + labels + `} 1`, `failed_requests_total{` + labels + `} 1`,
		`exceeded_deadline_requests_total{` + labels + `} 0`, `shedded_requests_total{` + labels + `} 0`, `queue_depth{` + labels + `} 0`, `inflight_requests{` + labels + `} 0`,
		`broker_backlog{` + labels + `} `, `dispatch_budget{` + labels + `} 0.75`, `pool_worker_limit{pool_name="default"} 8`,
		`gate_decisions_total{` + labels + `,reason="dropped"} 0`, `gate_metric_value{inference_pool="queue q",` + labels + `} 0.75`, `gate_metric_threshold{inference_pool="queue q",` + labels + `} 0`,
		`gate_metric_source_available{inference_pool="queue q",` + labels + `} 1`,
		`inference_latency_time_millis_bucket{` + labels + `,le="120000"} 2`, `inference_latency_time_millis_bucket{` + labels + `,le="10"} `, `inference_latency_time_millis_count{` + labels + `} 2`,
		`queue_residence_time_millis_bucket{` + labels + `,le="8.64e+07"} 2`, `queue_residence_time_millis_count{` + labels + `} 2`,
	} {
		if !strings.Contains(page.String(), "llm_d_async_async_"+want) {
			t.Errorf("the metrics lack llm_d_async_async_%s", want)
		}
	}
	if t.Failed() {
		t.Log(page.String())
	}
}
