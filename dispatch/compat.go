package dispatch

import (
	"math"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// compatFamilies are the metrics of llm-d's processor that mean something here, by its names, but for
// histograms. Its message latency is that of another transport.
var compatFamilies = []struct {
	name, help string
	labels     []string
}{
	{"request_total", "The same as spillway_dispatch_requests_total.", queueLabels},
	{"request_retries_total", "The same as spillway_dispatch_retries_total.", queueLabels},
	{"successful_requests_total", "The same as spillway_dispatch_successful_requests_total.", queueLabels},
	{"failed_requests_total", "The same as spillway_dispatch_failed_requests_total.", queueLabels},
	{"exceeded_deadline_requests_total", "The same as spillway_dispatch_exceeded_deadline_requests_total.", queueLabels},
	{"shedded_requests_total", "The same as spillway_dispatch_shed_requests_total.", queueLabels},
	{"gate_decisions_total", "The same as spillway_dispatch_gate_decisions_total.", append([]string{"reason"}, queueLabels...)},
	{"queue_depth", "Always 0: no message is buffered in this process.", queueLabels},
	{"inflight_requests", "The same as spillway_dispatch_leases_held.", queueLabels},
	{"broker_backlog", "The same as spillway_dispatch_backlog.", queueLabels},
	{"dispatch_budget", "The same as spillway_dispatch_budget, by queue.", queueLabels},
	{"pool_worker_limit", "The same as spillway_dispatch_pool_worker_limit.", []string{"pool_name"}},
	{"gate_metric_value", "The same as spillway_dispatch_gate_metric_value, by queue.", append([]string{"inference_pool"}, queueLabels...)},
	{"gate_metric_threshold", "The same as spillway_dispatch_gate_metric_threshold, by queue.", append([]string{"inference_pool"}, queueLabels...)},
	{"gate_metric_source_available", "1 while all sources of the queue's gate can be read.", append([]string{"inference_pool"}, queueLabels...)},
}

// The histograms of llm-d's processor, which are in milliseconds.
const (
	compatLatency   = "inference_latency_time_millis"
	compatResidence = "queue_residence_time_millis"
)

const compatPrefix = "llm_d_async_async_"

// compat describes these metrics, by the last part of their names.
func compat() map[string]*prometheus.Desc {
	all := map[string]*prometheus.Desc{
		compatLatency:   prometheus.NewDesc(compatPrefix+compatLatency, "The same as spillway_dispatch_inference_latency_seconds, in milliseconds.", queueLabels, nil),
		compatResidence: prometheus.NewDesc(compatPrefix+compatResidence, "The same as spillway_dispatch_queue_wait_seconds, in milliseconds.", queueLabels, nil),
	}
	for _, f := range compatFamilies {
		all[f.name] = prometheus.NewDesc(compatPrefix+f.name, f.help, f.labels, nil)
	}
	return all
}

// collectCompat tells the same as Collect in the words of llm-d's processor.
func (m *metrics) collectCompat(ch chan<- prometheus.Metric, held map[*Queue][]*lease, now time.Time) {
	put := func(kind prometheus.ValueType, name string, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(m.compat[name], kind, v, labels...)
	}
	const counter, gauge = prometheus.CounterValue, prometheus.GaugeValue
	for _, q := range m.d.queues {
		l := []string{q.ID, q.Name, q.PoolID}
		for name, n := range map[string]uint64{
			"request_total": q.first.Load(), "request_retries_total": q.retried.Load(),
			"successful_requests_total": q.outcomes[outcomeSuccess].Load(), "failed_requests_total": q.outcomes[outcomeFailed].Load(),
			"exceeded_deadline_requests_total": q.outcomes[outcomeDeadline].Load(), "shedded_requests_total": q.outcomes[outcomeShed].Load(),
		} {
			put(counter, name, float64(n), l...)
		}
		for i, reason := range gateReasons {
			put(counter, "gate_decisions_total", float64(q.decisions[i].Load()), append([]string{reason}, l...)...)
		}
		put(gauge, "queue_depth", 0, l...)
		put(gauge, "inflight_requests", float64(len(held[q])), l...)
		put(gauge, "broker_backlog", float64(q.depth.Load().pending), l...)
		dec, available := q.group.budget.Decide(now), true
		for _, s := range q.group.states {
			available = available && s.available.Load()
		}
		put(gauge, "dispatch_budget", spare(dec), l...)
		l = append([]string{q.group.label}, l...)
		put(gauge, "gate_metric_value", dec.D, l...)
		put(gauge, "gate_metric_threshold", dec.B, l...)
		put(gauge, "gate_metric_source_available", flag(available), l...)
		m.millis(ch, compatLatency, m.took, q)
		m.millis(ch, compatResidence, m.waited, q)
	}
	for _, w := range m.d.pools {
		put(gauge, "pool_worker_limit", float64(w.Workers), w.ID)
	}
}

// millis is a histogram of seconds, in milliseconds.
func (m *metrics) millis(ch chan<- prometheus.Metric, name string, of *prometheus.HistogramVec, q *Queue) {
	var v dto.Metric
	if h, ok := of.WithLabelValues(q.ID, q.Name, q.PoolID).(prometheus.Metric); !ok || h.Write(&v) != nil {
		return // it can always be written
	}
	all := map[float64]uint64{}
	for _, b := range v.Histogram.Bucket {
		all[math.Round(b.GetUpperBound()*1000)] = b.GetCumulativeCount()
	}
	ch <- prometheus.MustNewConstHistogram(m.compat[name], v.Histogram.GetSampleCount(), v.Histogram.GetSampleSum()*1000, all, q.ID, q.Name, q.PoolID)
}
