package tracker_test

import (
	"fmt"
	"testing"

	"spillway/tracker"
	"spillway/worker"
)

// BenchmarkLife is all that one request asks of the books, with others in flight.
func BenchmarkLife(b *testing.B) {
	tr := tracker.New()
	for i := range 1000 {
		tr.Register(&worker.Worker{ID: worker.ID(i), DPSize: 8})
	}
	for i := range 10000 {
		if err := tr.Reserve(reservation(fmt.Sprint(i), rank(worker.ID(i%1000), uint32(i%8)), 10, 1), tracker.NoLimit, start); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportAllocs()
	for b.Loop() {
		if err := tr.Reserve(reservation("x", rank(500, 3), 200, 12), tracker.NoLimit, start); err != nil {
			b.Fatal(err)
		}
		tr.PrefillDone("x", start)
		tr.Grow("x", 1, start)
		tr.Free("x")
	}
}
