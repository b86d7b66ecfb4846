package selectservice

import (
	"github.com/prometheus/client_golang/prometheus"

	"spillway/router"
	"spillway/tracker"
)

// metrics reads the catalog and the books at scrape time: sums by partition, since a series for
// each of thousands of ranks would cost more than /loads does.
type metrics struct{ s *Server }

var (
	partitionLabels = []string{"model", "tenant"}
	classLabels     = []string{"model", "tenant", "policy_class"}
	workersDesc     = prometheus.NewDesc("spillway_select_workers", "Worker records, by what has become of them.", []string{"lifecycle"}, nil)
	schedulableDesc = prometheus.NewDesc("spillway_select_schedulable_workers", "Workers that requests are sent to.", partitionLabels, nil)
	ranksDesc       = prometheus.NewDesc("spillway_select_ranks", "Data-parallel ranks of the schedulable workers.", partitionLabels, nil)
	requestsDesc    = prometheus.NewDesc("spillway_select_active_requests", "Reservations that were made and not freed.", partitionLabels, nil)
	prefillDesc     = prometheus.NewDesc("spillway_select_active_prefill_tokens", "Prompt tokens of reservations whose prefill goes on.", partitionLabels, nil)
	blocksDesc      = prometheus.NewDesc("spillway_select_active_decode_blocks", "KV blocks of reservations, shared ones of a rank once.", partitionLabels, nil)
	pendingDesc     = prometheus.NewDesc("spillway_select_pending_requests", "Requests that wait for a worker.", classLabels, nil)
	pendingISLDesc  = prometheus.NewDesc("spillway_select_pending_isl_tokens", "Their prompt tokens.", classLabels, nil)
	cachedDesc      = prometheus.NewDesc("spillway_select_pending_cached_tokens", "Of these, tokens that a worker has cached.", classLabels, nil)
	refusedDesc     = prometheus.NewDesc("spillway_select_queue_refused_total", "Requests that would have had to wait and were refused, by the limit of their class.", append(classLabels, "limit_kind"), nil)
	expiredDesc     = prometheus.NewDesc("spillway_select_expired_reservations_total", "Reservations that were never freed and have been dropped.", partitionLabels, nil)
	keptDesc        = prometheus.NewDesc("spillway_select_cached_selections", "Selections that can be booked by their ID alone.", nil, nil)
	keptBytesDesc   = prometheus.NewDesc("spillway_select_cached_selections_bytes", "Memory that they take.", nil, nil)
)

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		workersDesc, schedulableDesc, ranksDesc, requestsDesc, prefillDesc, blocksDesc, pendingDesc, pendingISLDesc, cachedDesc, refusedDesc, expiredDesc, keptDesc, keptBytesDesc,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	now := m.s.now()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	count := map[lifecycle]int{incomplete: 0, schedulable: 0, unschedulable: 0}
	for _, r := range m.s.catalog.list(filter{}) {
		count[r.lifecycle]++
	}
	for state, n := range count {
		gauge(workersDesc, float64(n), string(state))
	}
	var list []tracker.Projection
	for _, p := range m.s.catalog.matching(filter{}) {
		route := p.route.Load()
		if route == nil {
			continue
		}
		labels := []string{p.key.Model, p.key.Tenant}
		list = route.Tracker.Project(nil, now, list[:0])
		var requests, prefill, blocks float64
		for i := range list {
			requests += float64(list[i].Requests)
			prefill += float64(list[i].PrefillTokens)
			blocks += float64(list[i].DecodeBlocks)
		}
		gauge(schedulableDesc, float64(p.count.Load()), labels...)
		gauge(ranksDesc, float64(len(list)), labels...)
		gauge(requestsDesc, requests, labels...)
		gauge(prefillDesc, prefill, labels...)
		gauge(blocksDesc, blocks, labels...)
		waiting := route.Backlogs(nil)
		for i, class := range p.classes {
			labels := []string{p.key.Model, p.key.Tenant, class.Name}
			gauge(pendingDesc, float64(waiting[i].Requests), labels...)
			gauge(pendingISLDesc, float64(waiting[i].ISLTokens), labels...)
			gauge(cachedDesc, float64(waiting[i].CachedTokens), labels...)
			for k, kind := range router.LimitKinds {
				ch <- prometheus.MustNewConstMetric(refusedDesc, prometheus.CounterValue, float64(p.refused[i][k].Load()), append(labels, string(kind))...)
			}
		}
		ch <- prometheus.MustNewConstMetric(expiredDesc, prometheus.CounterValue, float64(route.Tracker.ExpiredTotal()), labels...)
	}
	if m.s.pending != nil {
		entries, bytes := m.s.pending.held()
		gauge(keptDesc, float64(entries))
		gauge(keptBytesDesc, float64(bytes))
	}
}
