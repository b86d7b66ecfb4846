package replica

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"spillway/wire"
)

// Why an event of ours was not sent.
const (
	unsentQueue   = "queue"   // more wait already than may
	unsentStopped = "stopped" // the exchange has ended
	unsentSize    = "size"    // longer than peers take
)

// Why a message of a peer was not used.
const (
	droppedFrames  = "frames"  // not the frames of an event
	droppedTopic   = "topic"   // another topic
	droppedTenant  = "tenant"  // two different ones are named
	droppedPayload = "payload" // malformed
	droppedSelf    = "self"    // an event of our own
	droppedQueue   = "queue"   // more wait already than may
)

type metrics struct {
	sent     map[wire.ReplicaKind]prometheus.Counter
	unsent   map[string]prometheus.Counter // by reason
	received map[wire.ReplicaKind]prometheus.Counter
	dropped  map[string]prometheus.Counter // by reason
	slow     prometheus.Counter
}

// newMetrics makes the series of r, all at zero.
func newMetrics(reg prometheus.Registerer, r *Replica) metrics {
	f := promauto.With(reg)
	sent := f.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_replica_sent_total",
		Help: "Reservation events handed to the connections with other replicas, which lose what a slow one does not take.",
	}, []string{"kind"})
	unsent := f.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_replica_unsent_total",
		Help: "Reservation events that were lost before they were sent.",
	}, []string{"reason"})
	received := f.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_replica_received_total",
		Help: "Reservation events of other replicas.",
	}, []string{"kind"})
	dropped := f.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_replica_dropped_total",
		Help: "Messages of other replicas that were not used.",
	}, []string{"reason"})
	gauge := func(name, help string, labels prometheus.Labels, value func() int) {
		f.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: labels}, func() float64 { return float64(value()) })
	}
	const depth, depthHelp = "spillway_replica_queue_events", "Reservation events that wait to be sent (out) or applied (in)."
	gauge(depth, depthHelp, prometheus.Labels{"queue": "out"}, r.out.depth)
	gauge(depth, depthHelp, prometheus.Labels{"queue": "in"}, r.in.depth)
	gauge("spillway_replica_peers", "Replicas that are listened to.", nil, func() int { return len(r.Peers()) })
	gauge("spillway_replica_peers_connected", "Replicas that are listened to and there is a connection with.", nil,
		func() int { return int(r.connected.Load()) })

	m := metrics{
		map[wire.ReplicaKind]prometheus.Counter{}, map[string]prometheus.Counter{},
		map[wire.ReplicaKind]prometheus.Counter{}, map[string]prometheus.Counter{},
		f.NewCounter(prometheus.CounterOpts{
			Name: "spillway_replica_slow_total",
			Help: "Times that a replica was too slow to take what was sent, and lost events for up to a second.",
		}),
	}
	for _, k := range wire.ReplicaKinds {
		m.sent[k] = sent.WithLabelValues(k.String())
		m.received[k] = received.WithLabelValues(k.String())
	}
	for _, reason := range []string{unsentQueue, unsentStopped, unsentSize} {
		m.unsent[reason] = unsent.WithLabelValues(reason)
	}
	for _, reason := range []string{droppedFrames, droppedTopic, droppedTenant, droppedPayload, droppedSelf, droppedQueue} {
		m.dropped[reason] = dropped.WithLabelValues(reason)
	}
	return m
}
