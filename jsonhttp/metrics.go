package jsonhttp

import (
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// statuses are those that routes answer with.
var statuses = [...]int{200, 201, 400, 401, 404, 405, 409, 413, 415, 422, 429, 500, 503}

// Metrics count the requests of a service and time them, by route. All children are made once.
type Metrics struct{ routes map[string]*routeMetrics }

// routeMetrics are those of one route.
type routeMetrics struct {
	answers  map[int]prometheus.Counter // by status
	duration prometheus.Observer
}

// NewMetrics registers the metrics of a service, whose names begin with prefix, and whose routes
// have these paths.
func NewMetrics(reg prometheus.Registerer, prefix string, paths []string) *Metrics {
	answers := promauto.With(reg).NewCounterVec(prometheus.CounterOpts{
		Name: prefix + "_requests_total", Help: "HTTP requests, by route and status of the answer.",
	}, []string{"route", "status"})
	duration := promauto.With(reg).NewHistogramVec(prometheus.HistogramOpts{
		Name: prefix + "_request_duration_seconds", Help: "Time from the head of a request to the end of its answer.",
		Buckets: prometheus.ExponentialBuckets(25e-6, 4, 9),
	}, []string{"route"})
	m := &Metrics{routes: map[string]*routeMetrics{}}
	add := func(path, label string) {
		r := &routeMetrics{answers: map[int]prometheus.Counter{}, duration: duration.WithLabelValues(label)}
		for _, status := range statuses {
			r.answers[status] = answers.WithLabelValues(label, strconv.Itoa(status))
		}
		m.routes[path] = r
	}
	for _, path := range paths {
		add(path, strings.TrimPrefix(path, "/"))
	}
	add("", "unknown")
	return m
}

// Answered counts a request. path is "" for one that has no route.
func (m *Metrics) Answered(path string, status int, took time.Duration) {
	r := m.routes[path]
	if c := r.answers[status]; c != nil {
		c.Inc()
	}
	r.duration.Observe(took.Seconds())
}
