package proxy

import (
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sony/gobreaker/v2"

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

	retries      *prometheus.CounterVec
	migrations   *prometheus.CounterVec
	cancelled    *prometheus.CounterVec
	disconnected prometheus.Gauge
}

// newMetrics registers the metrics of a server that decides with r and sends to peers.
func newMetrics(reg prometheus.Registerer, r *router.Router, peers *sync.Map) *metrics {
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
		retries: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "spillway_upstream_retries_total",
			Help: "Attempts on a further worker, by why the one before failed.",
		}, []string{"model", "reason"}),
		migrations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dynamo_frontend_model_migration_total",
			Help: "Attempts on a further worker.",
		}, []string{"model", "migration_type"}),
		cancelled: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "dynamo_frontend_model_cancellation_total",
			Help: "Requests whose client left before the end of its answer.",
		}, []string{"model", "endpoint", "request_type"}),
		disconnected: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "dynamo_frontend_disconnected_clients",
			Help: "Clients that left before the end of their answer; only ever goes up.",
		}),
	}
	reg.MustRegister(m.issued, m.rejected, m.queued, m.rejections, m.leaks, m.retries, m.migrations, m.cancelled, m.disconnected,
		slotCollector{r}, workerCollector{r, peers})
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
	retries    [len(retryReasons)]prometheus.Counter
	migrations prometheus.Counter
	cancelled  [numEndpoints][len(requestTypes)]prometheus.Counter
}

// model makes the children of a model.
func (m *metrics) model(name string) *modelMetrics {
	mm := &modelMetrics{
		queued: m.queued.WithLabelValues(name), rejections: map[httperr.Reason]prometheus.Counter{},
		migrations: m.migrations.WithLabelValues(name, "new_request"),
	}
	for i := range endpoints {
		mm.issued[i] = m.issued.WithLabelValues(name, endpoints[i].label)
		mm.rejected[i] = m.rejected.WithLabelValues(name, endpoints[i].label)
		for j, kind := range requestTypes {
			mm.cancelled[i][j] = m.cancelled.WithLabelValues(name, endpoints[i].label, kind)
		}
	}
	for _, r := range httperr.Reasons {
		mm.rejections[r] = m.rejections.WithLabelValues(name, string(r))
	}
	for i, r := range retryReasons {
		mm.retries[i] = m.retries.WithLabelValues(name, r)
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

// workerCollector tells of each registered worker what keeps it from being chosen and how it has
// answered. Of a worker that is gone nothing is told.
type workerCollector struct {
	router *router.Router
	peers  *sync.Map
}

var (
	inhibitedDesc = prometheus.NewDesc("spillway_worker_inhibited",
		"1 while a worker is left alone after a hard failure.", []string{"worker"}, nil)
	circuitDesc = prometheus.NewDesc("spillway_circuit_state",
		"Circuit of a worker: 0 closed, 1 open, 2 half-open.", []string{"worker"}, nil)
	responsesDesc = prometheus.NewDesc("spillway_upstream_responses_total",
		"Answers of a worker by class of status.", []string{"worker", "code_class"}, nil)
)

func (c workerCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- inhibitedDesc
	ch <- circuitDesc
	ch <- responsesDesc
}

func (c workerCollector) Collect(ch chan<- prometheus.Metric) {
	now := time.Now()
	c.router.Partitions("", func(p *router.Partition) {
		for _, st := range p.Busy.Workers(now) {
			inhibited := 0.0
			if st.Inhibited > 0 {
				inhibited = 1
			}
			ch <- prometheus.MustNewConstMetric(inhibitedDesc, prometheus.GaugeValue, inhibited, st.Name)
			var known peer // of one that was never asked, all is zero
			met := &known
			if v, ok := c.peers.Load(st.ID); ok {
				met = v.(*peer)
			}
			ch <- prometheus.MustNewConstMetric(circuitDesc, prometheus.GaugeValue, met.circuit.number(), st.Name)
			for i, class := range codeClasses {
				if class != "" {
					ch <- prometheus.MustNewConstMetric(responsesDesc, prometheus.CounterValue, float64(met.answers[i].Load()), st.Name, class)
				}
			}
		}
	})
}

// number is the state of a circuit as metrics tell it; of none, closed.
func (c *circuit) number() float64 {
	if c == nil {
		return 0
	}
	switch c.now() {
	case gobreaker.StateOpen:
		return 1
	case gobreaker.StateHalfOpen:
		return 2
	}
	return 0
}
