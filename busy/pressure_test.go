package busy_test

import (
	"math"
	"testing"
	"time"

	"spillway/busy"
	"spillway/worker"
)

func TestLeastLoaded(t *testing.T) {
	sample := func(id worker.ID, dp uint32, used, prefill uint64) func(*busy.List) {
		return func(l *busy.List) {
			l.Observe(busy.Sample{Rank: worker.Rank{Worker: id, DP: dp}, TakenAt: t0, KVUsedBlocks: &used, PrefillTokens: &prefill}, t0)
		}
	}
	mark := func(id worker.ID) func(*busy.List) { return func(l *busy.List) { l.Mark(id, nil, 0, t0) } }
	inhibit := func(id worker.ID) func(*busy.List) {
		return func(l *busy.List) { l.Inhibit(id, t0.Add(time.Hour), t0) }
	}
	both := busy.Thresholds{DecodeFrac: new(0.8), PrefillTokens: new(uint64(1000))}
	for _, tt := range []struct {
		name string
		set  busy.Thresholds
		only *worker.ID
		had  []func(*busy.List)
		want busy.Pressure
		ok   bool
	}{
		{"nothing is checked", busy.Thresholds{}, nil, nil, busy.Pressure{}, false},
		{"nobody there", both, new(worker.ID(9)), nil, busy.Pressure{}, false},
		{"the check that is worst", both, new(worker.ID(2)), []func(*busy.List){sample(2, 0, 88, 1200)},
			busy.Pressure{Worker: 2, Name: "two", Check: busy.CheckPrefillTokens, Value: 1200, Limit: 1000, Load: 1.2}, true},
		{"the rank that is better, of the worker that is better", both, nil, []func(*busy.List){
			sample(1, 0, 100, 0), sample(1, 1, 90, 0), sample(2, 0, 96, 0)},
			busy.Pressure{Worker: 1, Name: "one", DP: 1, Check: busy.CheckDecodeBlocks, Value: 0.9, Limit: 0.8, Load: 0.9 / 0.8}, true},
		{"one that is not routable does not count", both, nil, []func(*busy.List){sample(1, 0, 100, 0), sample(1, 1, 90, 0), sample(2, 0, 96, 0), inhibit(1)},
			busy.Pressure{Worker: 2, Name: "two", Check: busy.CheckDecodeBlocks, Value: 0.96, Limit: 0.8, Load: 0.96 / 0.8}, true},
		{"unless it was asked for", both, new(worker.ID(1)), []func(*busy.List){sample(1, 0, 100, 0), sample(1, 1, 90, 0), inhibit(1)},
			busy.Pressure{Worker: 1, Name: "one", DP: 1, Check: busy.CheckDecodeBlocks, Value: 0.9, Limit: 0.8, Load: 0.9 / 0.8}, true},
		{"a mark", both, new(worker.ID(2)), []func(*busy.List){sample(2, 0, 8, 0), mark(2)},
			busy.Pressure{Worker: 2, Name: "two", Check: busy.CheckBackpressure, Value: 0.08, Limit: 0.8, Load: 1}, true},
		{"a limit of 0", busy.Thresholds{PrefillTokens: new(uint64(0))}, new(worker.ID(2)), []func(*busy.List){sample(2, 0, 8, 1)},
			busy.Pressure{Worker: 2, Name: "two", Check: busy.CheckPrefillTokens, Value: 1, Load: math.Inf(1)}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := busy.New(busy.DefaultConfig(), nil)
			l.Register(&worker.Worker{ID: 1, Name: "one", DPSize: 2, KVTotalBlocks: 100}, t0)
			l.Register(&worker.Worker{ID: 2, Name: "two", KVTotalBlocks: 100}, t0)
			l.SetThresholds(tt.set, t0)
			for _, f := range tt.had {
				f(l)
			}
			got, ok := l.LeastLoaded(tt.only, t0)
			if math.Abs(got.Load-tt.want.Load) < 1e-9 {
				got.Load = tt.want.Load
			}
			if got != tt.want || ok != tt.ok {
				t.Errorf("LeastLoaded = %+v, %v\nwant %+v, %v", got, ok, tt.want, tt.ok)
			}
		})
	}
}
