package monitor

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"spillway/kvindex"
	"spillway/wire"
)

// What of KV events could not be read.
const (
	kvErrorFrames = "frames" // a message that has not the frames of a batch
	kvErrorBatch  = "batch"  // a payload
)

// What became of an event, beside the words of kvindex.Status.
const (
	kvStatusOK      = "ok"
	kvStatusUnknown = "block_not_found"
)

// kvMetrics are what is told of KV events. Counters are of all listeners together: what a single
// one does is in its gauges, and in the listing of workers.
type kvMetrics struct {
	k *KVListeners

	received, dropped, gaps, lost, replayed, restarts, strangers prometheus.Counter
	duplicates, removed, removedUnknown, cleared                 prometheus.Counter

	errors   map[string]prometheus.Counter // by what could not be read
	links    map[string]prometheus.Counter // by who was there
	replays  map[string]prometheus.Counter // by outcome
	stored   map[kvindex.Status]prometheus.Counter
	filtered [wire.KVReasons]prometheus.Counter
}

func newKVMetrics(k *KVListeners, reg prometheus.Registerer) *kvMetrics {
	f := promauto.With(reg)
	counter := func(name, help string) prometheus.Counter {
		return f.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	m := &kvMetrics{
		k:        k,
		received: counter("spillway_kv_batches_received_total", "Messages with KV events that came live."),
		dropped:  counter("spillway_kv_batches_dropped_total", "Batches for which a listener's queue had no room."),
		gaps:     counter("spillway_kv_gaps_total", "Times that batches were missing before one that came."),
		lost:     counter("spillway_kv_gap_batches_lost_total", "Batches that were missing and that no replay has brought."),
		replayed: counter("spillway_kv_batches_replayed_total", "Batches applied from replays."),
		restarts: counter("spillway_kv_restarts_total", "Times that a publisher began anew, so that what it had told was dropped."),
		errors:   map[string]prometheus.Counter{}, links: map[string]prometheus.Counter{}, replays: map[string]prometheus.Counter{}, stored: map[kvindex.Status]prometheus.Counter{},
	}
	warnings := f.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_kv_warnings_total", Help: "Events that were odd, but did no harm.",
	}, []string{"kind"})
	m.duplicates, m.strangers = warnings.WithLabelValues(kvindex.DuplicateStore.String()), warnings.WithLabelValues("too_many_ranks")
	errors := f.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_kv_decode_errors_total", Help: "Messages with KV events that could not be read.",
	}, []string{"kind"})
	for _, kind := range []string{kvErrorFrames, kvErrorBatch} {
		m.errors[kind] = errors.WithLabelValues(kind)
	}
	links := f.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_kv_link_checks_total", Help: "New connections to publishers heard before, by whether their replays show the same process; unknown is asked again for a while.",
	}, []string{"publisher"})
	for _, publisher := range []string{kvSame, kvAnew, kvUnknown} {
		m.links[publisher] = links.WithLabelValues(publisher)
	}
	replays := f.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_kv_replays_total", Help: "Requests for missing batches, by what became of them.",
	}, []string{"outcome"})
	for _, outcome := range []string{replayComplete, replayTimeout, replayRank, replayMalformed, replayFailed} {
		m.replays[outcome] = replays.WithLabelValues(outcome)
	}
	events := f.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_kv_events_total", Help: "KV events that reached the index, of all tiers.",
	}, []string{"event_type", "status"})
	for _, status := range []kvindex.Status{kvindex.Stored, kvindex.DuplicateStore, kvindex.ParentUnknown, kvindex.InvalidBlock, kvindex.Full} {
		word := status.String()
		if status == kvindex.DuplicateStore {
			word = kvStatusOK
		}
		m.stored[status] = events.WithLabelValues(wire.KVStore.String(), word)
	}
	m.removed = events.WithLabelValues(wire.KVRemove.String(), kvStatusOK)
	m.removedUnknown = events.WithLabelValues(wire.KVRemove.String(), kvStatusUnknown)
	m.cleared = events.WithLabelValues(wire.KVClear.String(), kvStatusOK)
	if k.cfg.ComponentMetrics {
		reg.MustRegister(appliedEvents{events})
	}
	filtered := f.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_kv_filtered_total", Help: "KV events, or parts of them, that were not meant for the index or made no sense.",
	}, []string{"reason"})
	for r := range wire.KVReasons {
		m.filtered[r] = filtered.WithLabelValues(r.String())
	}
	reg.MustRegister(kvGauges{k})
	return m
}

// appliedEvents shows the events that reached the index by the name that they have in Dynamo.
type appliedEvents struct{ events *prometheus.CounterVec }

var appliedEventsDesc = prometheus.NewDesc("dynamo_component_kv_cache_events_applied",
	"KV events that reached the index, of all tiers.", []string{"event_type", "status"}, nil)

func (a appliedEvents) Describe(ch chan<- *prometheus.Desc) { ch <- appliedEventsDesc }

func (a appliedEvents) Collect(ch chan<- prometheus.Metric) {
	all := make(chan prometheus.Metric, 32) // more than there are types and statuses
	a.events.Collect(all)
	close(all)
	for m := range all {
		ch <- renamed{m, appliedEventsDesc}
	}
}

// renamed is a metric under another description.
type renamed struct {
	prometheus.Metric
	desc *prometheus.Desc
}

func (r renamed) Desc() *prometheus.Desc { return r.desc }

// count adds what a normaliser has counted since was, and remembers it there.
func (m *kvMetrics) count(was, now *wire.KVCounts) {
	if *was == *now {
		return
	}
	for r := range now {
		if n := now[r] - was[r]; n > 0 {
			m.filtered[r].Add(float64(n))
		}
	}
	*was = *now
}

// kvGauges reads listeners and indexes at scrape time.
type kvGauges struct{ k *KVListeners }

var (
	kvRankLabels    = []string{"worker_id", "dp_rank"}
	kvListenersDesc = prometheus.NewDesc("spillway_kv_listeners", "Listeners for KV events, by state.", []string{"status"}, nil)
	kvDegradedDesc  = prometheus.NewDesc("spillway_kv_degraded", "1 if batches of the publisher are lost for good, so that its blocks may be wrong.", kvRankLabels, nil)
	kvLagDesc       = prometheus.NewDesc("spillway_kv_lag_batches", "Batches received and not yet applied.", kvRankLabels, nil)
	kvAgeDesc       = prometheus.NewDesc("spillway_kv_age_seconds", "Time since a batch last came, or since the listener began.", kvRankLabels, nil)
	kvEntriesDesc   = prometheus.NewDesc("spillway_kv_index_entries", "Entries (block, rank, tier) that the index holds.", []string{"model", "tenant"}, nil)
	kvLimitDesc     = prometheus.NewDesc("spillway_kv_index_entries_limit", "Entries that all indexes together may hold.", nil, nil)
)

func (g kvGauges) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{kvListenersDesc, kvDegradedDesc, kvLagDesc, kvAgeDesc, kvEntriesDesc, kvLimitDesc} {
		ch <- d
	}
}

func (g kvGauges) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	states := map[KVState]int{}
	for _, s := range g.k.Statuses() {
		states[s.State]++
		id, dp := s.Rank.Worker.String(), strconv.FormatUint(uint64(s.Rank.DP), 10)
		degraded := 0.0
		if s.Degraded {
			degraded = 1
		}
		gauge(kvDegradedDesc, degraded, id, dp)
		gauge(kvLagDesc, float64(s.Waiting), id, dp)
		gauge(kvAgeDesc, s.Age.Seconds(), id, dp)
	}
	for _, state := range KVStates {
		gauge(kvListenersDesc, float64(states[state]), string(state))
	}
	for _, p := range g.k.partitions.All() {
		gauge(kvEntriesDesc, float64(p.Index.Entries()), p.Name.Model, p.Name.Tenant)
	}
	_, limit := g.k.partitions.Entries()
	gauge(kvLimitDesc, float64(limit))
}
