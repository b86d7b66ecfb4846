package service

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/tracker"
)

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
