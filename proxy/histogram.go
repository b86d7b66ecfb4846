package proxy

import (
	"math"
	"sort"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// histogram counts values in buckets. Unlike the client library's it takes many equal values in
// one step, because one event of a stream may hold any number of tokens, and it works with
// integers: durations in nanoseconds, or tokens. It is safe for concurrent use.
type histogram struct {
	shape  *shape
	counts []atomic.Uint64 // by bucket; the last is for what is above every bound
	sum    atomic.Uint64   // wraps after 584 years of waiting
}

// shape is what histograms of one family have in common.
type shape struct {
	bounds []float64 // ascending, as exposed
	limits []uint64  // the greatest integer within each bound
	unit   float64   // of the integers in one of the exposed unit
}

// The units of values.
const (
	perSecond      = 1e9 // nanoseconds
	perMillisecond = 1e6 // nanoseconds
	perToken       = 1
	perMillionth   = 1e6 // millionths
)

func newShape(bounds []float64, unit float64) *shape {
	s := &shape{bounds: bounds, limits: make([]uint64, len(bounds)), unit: unit}
	for i, b := range bounds {
		s.limits[i] = uint64(math.Floor(b*unit + 1e-3)) // .0019 s are 1900000 ns, whatever the float64 says
	}
	return s
}

func newHistogram(s *shape) *histogram {
	return &histogram{shape: s, counts: make([]atomic.Uint64, len(s.bounds)+1)}
}

// observe counts n values v, of which one below 0 counts as 0.
func (h *histogram) observe(v int64, n uint64) {
	u := uint64(max(v, 0))
	i := 0
	for i < len(h.shape.limits) && u > h.shape.limits[i] { // few bounds, and most values are small
		i++
	}
	h.counts[i].Add(n)
	h.sum.Add(u * n)
}

// addTo adds what was counted to t.
func (h *histogram) addTo(t *totals) {
	if t.shape == nil {
		t.shape, t.counts = h.shape, make([]uint64, len(h.counts))
	}
	for i := range h.counts {
		n := h.counts[i].Load()
		t.counts[i] += n
		t.total += n
	}
	t.sum += float64(h.sum.Load()) / h.shape.unit
}

// totals is what one or several histograms of one shape have counted, as it is exposed. The count
// is that of the buckets, so that a page never contradicts itself.
type totals struct {
	shape  *shape
	counts []uint64
	total  uint64
	sum    float64
}

// write fills in an exposed histogram.
func (t *totals) write(m *dto.Metric) {
	buckets := make([]dto.Bucket, len(t.shape.bounds))
	all := make([]*dto.Bucket, len(buckets))
	below := make([]uint64, len(buckets))
	sum := uint64(0)
	for i := range buckets {
		sum += t.counts[i]
		below[i] = sum
		buckets[i].UpperBound, buckets[i].CumulativeCount = &t.shape.bounds[i], &below[i]
		all[i] = &buckets[i]
	}
	m.Histogram = &dto.Histogram{SampleCount: &t.total, SampleSum: &t.sum, Bucket: all}
}

// family is the series of one name.
type family struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

// labels are the labels of one series, by name.
type labels []*dto.LabelPair

// labeled makes labels of names and values in turn.
func labeled(nameValue ...string) labels {
	pairs := make([]dto.LabelPair, len(nameValue)/2)
	l := make(labels, len(pairs))
	for i := range l {
		pairs[i].Name, pairs[i].Value = &nameValue[2*i], &nameValue[2*i+1]
		l[i] = &pairs[i]
	}
	sort.Slice(l, func(i, j int) bool { return l[i].GetName() < l[j].GetName() })
	return l
}

// series is one value at the time of a scrape. It shares its labels with others, which makes a
// scrape of a large fleet several times cheaper than the library's constant metrics.
type series struct {
	family family
	labels labels
	value  float64
	totals *totals // instead of value, or nil
}

// Desc implements prometheus.Metric.
func (s *series) Desc() *prometheus.Desc { return s.family.desc }

// Write implements prometheus.Metric.
func (s *series) Write(m *dto.Metric) error {
	m.Label = s.labels
	switch {
	case s.totals != nil:
		s.totals.write(m)
	case s.family.kind == prometheus.CounterValue:
		m.Counter = &dto.Counter{Value: &s.value}
	default:
		m.Gauge = &dto.Gauge{Value: &s.value}
	}
	return nil
}

// page takes what a scrape finds.
type page chan<- prometheus.Metric

func (p page) put(f family, l labels, v float64) { p <- &series{family: f, labels: l, value: v} }

func (p page) count(f family, l labels, n uint64) { p.put(f, l, float64(n)) }

func (p page) flag(f family, l labels, on bool) {
	v := 0.0
	if on {
		v = 1
	}
	p.put(f, l, v)
}

func (p page) histogram(f family, l labels, all ...*histogram) {
	t := &totals{}
	for _, h := range all {
		h.addTo(t)
	}
	if t.shape != nil {
		p <- &series{family: f, labels: l, totals: t}
	}
}
