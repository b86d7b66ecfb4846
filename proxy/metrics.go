package proxy

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/httperr"
	"spillway/router"
	"spillway/worker"
)

// metrics are the counters of the front end. Children are made at zero when a model becomes
// known, so that a rate over them is never absent, and are not looked up per request.
type metrics struct {
	issued     *prometheus.CounterVec
	rejected   *prometheus.CounterVec
	queued     *prometheus.GaugeVec
	rejections *prometheus.CounterVec
	leaks      prometheus.Counter
}

func newMetrics(reg prometheus.Registerer, r *router.Router) *metrics {
	m := &metrics{
		issued: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dynamo_tasks_issued_total",
			Help: "Inference requests that reached admission, those then rejected included.",
		}, []string{"model", "endpoint"}),
		rejected: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dynamo_tasks_rejected_total",
			Help: "Inference requests answered with the overload status because of load.",
		}, []string{"model", "endpoint"}),
		queued: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "dynamo_queued_requests",
			Help: "Requests that have not yet received the first byte of an answer from a worker.",
		}, []string{"model"}),
		rejections: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "spillway_rejections_total",
			Help: "Refused requests by the reason that X-Spillway-Reason gives.",
		}, []string{"model", "reason"}),
		leaks: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "spillway_slot_leaks_total",
			Help: "Reservations whose request was gone; must stay 0.",
		}),
	}
	reg.MustRegister(m.issued, m.rejected, m.queued, m.rejections, m.leaks, slotCollector{r})
	return m
}

// unknownModel is the model label where the model is not known: never what a client wrote.
const unknownModel = "unknown_model"

// modelMetrics are the children of one model.
type modelMetrics struct {
	issued     [numEndpoints]prometheus.Counter // by index in endpoints
	rejected   [numEndpoints]prometheus.Counter
	queued     prometheus.Gauge
	rejections map[httperr.Reason]prometheus.Counter
}

// model makes the children of a model.
func (m *metrics) model(name string) *modelMetrics {
	mm := &modelMetrics{queued: m.queued.WithLabelValues(name), rejections: map[httperr.Reason]prometheus.Counter{}}
	for i := range endpoints {
		mm.issued[i] = m.issued.WithLabelValues(name, endpoints[i].label)
		mm.rejected[i] = m.rejected.WithLabelValues(name, endpoints[i].label)
	}
	for _, r := range httperr.Reasons {
		mm.rejections[r] = m.rejections.WithLabelValues(name, string(r))
	}
	return mm
}

// slotCollector reads the books when Prometheus asks, so that no second count drifts from them.
type slotCollector struct{ router *router.Router }

var slotsDesc = prometheus.NewDesc("spillway_slots_inflight",
	"Reservations of requests in flight.", []string{"worker", "dp_rank"}, nil)

func (c slotCollector) Describe(ch chan<- *prometheus.Desc) { ch <- slotsDesc }

func (c slotCollector) Collect(ch chan<- prometheus.Metric) {
	catalog := c.router.Catalog()
	c.router.Partitions("", func(p *router.Partition) {
		for rank, load := range p.Tracker.Loads() {
			w := catalog.Find(rank.Worker)
			if w == nil {
				continue
			}
			dp := strconv.FormatUint(uint64(rank.DP), 10)
			if rank.DP == worker.AnyDP {
				dp = "any"
			}
			ch <- prometheus.MustNewConstMetric(slotsDesc, prometheus.GaugeValue, float64(load.Requests), w.Name, dp)
		}
	})
}
