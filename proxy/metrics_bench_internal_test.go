package proxy

import (
	"context"
	"net/http"
	"testing"
	"time"

	"spillway/router"
	"spillway/worker"
)

// BenchmarkRequestMetrics counts everything that one request adds to the metrics: a stream of so
// many events, of one token each. The clock, which the relay reads anyway, is not read for events.
func BenchmarkRequestMetrics(b *testing.B) {
	f := newFamilies("dynamo_frontend", nil, false)
	m := &metrics{families: f, scheduling: newHistogram(f.schedulingShape), routing: newHistogram(f.routed)}
	m.unknown = m.newModel(unknownModel)
	for i := range m.stages {
		m.stages[i].duration = newHistogram(f.stageShape)
	}
	s := &Server{metrics: m}
	known := &model{name: "m", metrics: m.newModel("m")}
	to := &peer{}
	req := (&http.Request{}).WithContext(context.Background())
	at := time.Now()
	for _, events := range []struct {
		name string
		n    int
	}{{"unary", 0}, {"events=1", 1}, {"events=257", 257}} {
		b.Run(events.name, func(b *testing.B) {
			b.ReportAllocs()
			x := &exchange{}
			for b.Loop() {
				*x = exchange{
					s: s, ep: &endpoints[0], req: req, start: at, peer: to, sel: router.Selection{Rank: worker.Rank{Worker: 1}},
					out: outcome{usage: usage{known: true, cachedKnown: true, prompt: 100, cached: 50}},
				}
				x.open()
				x.enter(preprocess, at)
				x.known(known)
				x.counts.queued.Add(1)
				x.waiting = true
				x.enter(route, at)
				x.counts.issued[0].Add(1)
				x.decided(nil, at)
				x.received(at)
				for i := range events.n {
					x.generated(1, at.Add(time.Duration(i)*10*time.Millisecond))
					x.out.tokens++
				}
				x.close(at.Add(time.Second))
			}
		})
	}
}
