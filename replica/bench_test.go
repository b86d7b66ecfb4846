package replica_test

import (
	"testing"

	"spillway/wire"
)

// BenchmarkPublish is what an event costs the request that it tells of: with room in the queue, and
// with none.
func BenchmarkPublish(b *testing.B) {
	b.Run("sent", func(b *testing.B) {
		n := start(b)
		e := event(wire.ReplicaAdd, "r")
		b.ReportAllocs()
		for b.Loop() {
			n.Publish(e)
		}
		b.ReportMetric(n.value(b, "spillway_replica_unsent_total", "queue")/float64(b.N), "drops/op")
	})
	b.Run("full", func(b *testing.B) {
		cfg := config()
		cfg.Queue = 1
		n := prepare(cfg)
		e := event(wire.ReplicaAdd, "r")
		n.Publish(e)
		b.ReportAllocs()
		for b.Loop() {
			n.Publish(e)
		}
	})
}
