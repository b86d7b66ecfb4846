package monitor

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"spillway/buckets"
)

// Why a scrape brought less than it should have.
const (
	reasonTimeout = "timeout"
	reasonConnect = "connect"        // no answer could be had
	reasonStatus  = "status"         // an answer other than 2xx
	reasonParse   = "parse"          // something wanted was there and made no sense
	reasonMissing = "missing_metric" // the KV cache usage was not there
)

// Why a message of the event plane was dropped.
const (
	droppedFrames   = "frames"         // not the frames of an event
	droppedTopic    = "topic"          // another topic
	droppedVersion  = "version"        // of the binary frame, unknown
	droppedEnvelope = "envelope"       // malformed
	droppedIdentity = "identity"       // frames and envelope disagree
	droppedPayload  = "payload"        // malformed
	droppedWorker   = "unknown_worker" // not watched, or its models are not known yet
	droppedRank     = "unknown_rank"   // the worker has no such rank
	droppedRoom     = "no_room"        // more publishers than are kept apart
)

// metrics are the monitor's own series, those of scrapes by worker name.
type metrics struct {
	received prometheus.Counter
	dropped  map[string]prometheus.Counter // by reason
	duration *prometheus.HistogramVec
	errors   *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer, shapes *buckets.Shapes) *metrics {
	f := promauto.With(reg)
	dropped := f.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_event_dropped_total",
		Help: "Messages of the event plane that were not used.",
	}, []string{"reason"})
	m := &metrics{
		dropped: map[string]prometheus.Counter{},
		received: f.NewCounter(prometheus.CounterOpts{
			Name: "spillway_event_received_total",
			Help: "Messages of the event plane, dropped ones included.",
		}),
		duration: f.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "spillway_scrape_duration_seconds",
			Help:    "Time that a look at a worker's metrics page took, failed ones included.",
			Buckets: shapes.Of("scrape_duration_seconds", []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5}),
		}, []string{"worker"}),
		errors: f.NewCounterVec(prometheus.CounterOpts{
			Name: "spillway_scrape_errors_total",
			Help: "Looks at a worker's metrics page that brought nothing, or less than they should have.",
		}, []string{"worker", "reason"}),
	}
	for _, reason := range []string{
		droppedFrames, droppedTopic, droppedVersion, droppedEnvelope, droppedIdentity, droppedPayload,
		droppedWorker, droppedRank, droppedRoom,
	} {
		m.dropped[reason] = dropped.WithLabelValues(reason)
	}
	return m
}

// scrapeMetrics are one worker's children, resolved once.
type scrapeMetrics struct {
	duration prometheus.Observer
	errors   map[string]prometheus.Counter // by reason
}

// of makes the children of a worker, at zero.
func (m *metrics) of(name string) scrapeMetrics {
	s := scrapeMetrics{m.duration.WithLabelValues(name), map[string]prometheus.Counter{}}
	for _, reason := range []string{reasonTimeout, reasonConnect, reasonStatus, reasonParse, reasonMissing} {
		s.errors[reason] = m.errors.WithLabelValues(name, reason)
	}
	return s
}

// drop deletes the children of a worker.
func (m *metrics) drop(name string) {
	m.duration.DeletePartialMatch(prometheus.Labels{"worker": name})
	m.errors.DeletePartialMatch(prometheus.Labels{"worker": name})
}
