package router

import (
	"fmt"
	"testing"
	"time"

	"spillway/worker"
)

// BenchmarkQueue has the shapes of the original's policy_queue benchmark: so many requests that are
// each pinned to another rank, for a share of which there is no room. Pop lets one go and takes it in
// again, drain lets all go that can, build takes all of them in.
func BenchmarkQueue(b *testing.B) {
	for _, lanes := range []int{1, 100, 1000, 10000} {
		for _, blocked := range []int{0, 50, 90, 100} {
			waiting := make([]*Ticket, lanes)
			for i := range waiting {
				waiting[i] = &Ticket{policy: i % 2, cost: uint64(1 + i*7919%512), isl: 512}
				waiting[i].Query = Query{Worker: new(worker.ID(i)), DP: new(uint32(0))}
			}
			build := func() *queue {
				q := newQueue(&Profile{Classes: []Class{{Order: FCFS, Quantum: 512}, {Order: WSPT, Quantum: 128}}}, time.Unix(0, 0))
				for _, t := range waiting {
					q.enter(t, time.Unix(0, 0))
					q.push(t)
				}
				return &q
			}
			open := func(t *Ticket) { t.lane.set(t.index == 0 && int(*t.Query.Worker*37%100) >= blocked) }
			name := fmt.Sprintf("lanes=%d/blocked=%d", lanes, blocked)
			b.Run("pop/"+name, func(b *testing.B) {
				q := build()
				for _, t := range waiting {
					open(t)
				}
				b.ReportAllocs()
				for b.Loop() {
					if t := q.next(); t != nil {
						q.charge(t)
						q.remove(t)
						q.enter(t, time.Unix(0, 0))
						q.push(t)
						open(t)
					}
				}
			})
			b.Run("drain/"+name, func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					b.StopTimer()
					q := build()
					for _, t := range waiting {
						open(t)
					}
					b.StartTimer()
					for t := q.next(); t != nil; t = q.next() {
						q.charge(t)
						q.remove(t)
					}
				}
			})
			if blocked == 0 {
				b.Run("build/"+name, func(b *testing.B) {
					b.ReportAllocs()
					for b.Loop() {
						build()
					}
				})
			}
		}
	}
}
