package service

import (
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"spillway/tracker"
)

// statuses are those that routes answer with.
var statuses = [...]int{200, 201, 400, 401, 404, 405, 409, 413, 415, 422, 500, 503}

// routeMetrics are those of one route.
type routeMetrics struct {
	answers  map[int]prometheus.Counter // by status
	duration prometheus.Observer
}

// metrics holds the children of all routes, made once; state of the books is read when it is asked for.
type metrics struct{ routes map[string]*routeMetrics }

func newMetrics(reg prometheus.Registerer, g *registry) *metrics {
	answers := promauto.With(reg).NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_tracker_requests_total", Help: "HTTP requests, by route and status of the answer.",
	}, []string{"route", "status"})
	duration := promauto.With(reg).NewHistogramVec(prometheus.HistogramOpts{
		Name: "spillway_tracker_request_duration_seconds", Help: "Time from the head of a request to the end of its answer.",
		Buckets: prometheus.ExponentialBuckets(25e-6, 4, 9),
	}, []string{"route"})
	m := &metrics{routes: map[string]*routeMetrics{}}
	for path := range routes {
		m.add(path, strings.TrimPrefix(path, "/"), answers, duration)
	}
	m.add("", "unknown", answers, duration)
	reg.MustRegister(books{g})
	return m
}

func (m *metrics) add(path, label string, answers *prometheus.CounterVec, duration *prometheus.HistogramVec) {
	r := &routeMetrics{answers: map[int]prometheus.Counter{}, duration: duration.WithLabelValues(label)}
	for _, status := range statuses {
		r.answers[status] = answers.WithLabelValues(label, strconv.Itoa(status))
	}
	m.routes[path] = r
}

func (m *metrics) answered(path string, status int, took time.Duration) {
	r := m.routes[path]
	if c := r.answers[status]; c != nil {
		c.Inc()
	}
	r.duration.Observe(took.Seconds())
}

// books reads the registry at scrape time: sums by partition, since a series for each of
// thousands of ranks would cost more than /loads does.
type books struct{ *registry }

var (
	partitionLabels = []string{"model", "tenant"}
	workersDesc     = prometheus.NewDesc("spillway_tracker_workers", "Registered workers.", partitionLabels, nil)
	ranksDesc       = prometheus.NewDesc("spillway_tracker_ranks", "Data-parallel ranks of the registered workers.", partitionLabels, nil)
	requestsDesc    = prometheus.NewDesc("spillway_tracker_active_requests", "Requests that were added and not freed.", partitionLabels, nil)
	prefillDesc     = prometheus.NewDesc("spillway_tracker_active_prefill_tokens", "Prompt tokens of open prefills.", partitionLabels, nil)
	blocksDesc      = prometheus.NewDesc("spillway_tracker_active_decode_blocks", "KV blocks that active requests hold, shared ones of a rank once.", partitionLabels, nil)
	expiredDesc     = prometheus.NewDesc("spillway_tracker_expired_requests_total", "Requests that were never freed and have been dropped.", nil, nil)
)

func (b books) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{workersDesc, ranksDesc, requestsDesc, prefillDesc, blocksDesc, expiredDesc} {
		ch <- d
	}
}

func (b books) Collect(ch chan<- prometheus.Metric) {
	var list []tracker.Projection
	now := time.Now()
	for _, p := range b.matching(filter{}) {
		ids, _ := b.workersOf(p)
		list = p.tracker.Project(nil, now, list[:0])
		var requests, prefill, blocks float64
		for i := range list {
			requests += float64(list[i].Requests)
			prefill += float64(list[i].PrefillTokens)
			blocks += float64(list[i].DecodeBlocks)
		}
		gauge := func(d *prometheus.Desc, v float64) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, p.key.Model, p.key.Tenant)
		}
		gauge(workersDesc, float64(len(ids)))
		gauge(ranksDesc, float64(len(list)))
		gauge(requestsDesc, requests)
		gauge(prefillDesc, prefill)
		gauge(blocksDesc, blocks)
	}
	ch <- prometheus.MustNewConstMetric(expiredDesc, prometheus.CounterValue, float64(b.expiredTotal()))
}
