package dispatch

import (
	"math"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/tidwall/gjson"

	"spillway/dispatch/budget"
)

var nan = math.NaN()

// Why a gate keeps messages back, by index in gateReasons.
const (
	gateClosed = iota
	gateQuota
	gateDropped
	gateError
)

var gateReasons = [...]string{"gate_closed", "quota_exhausted", "dropped", "error"}

// What became of requests, by index.
const (
	outcomeSuccess = iota
	outcomeFailed
	outcomeDeadline
	outcomeShed
	numOutcomes
)

// The reasons of dead letters.
const (
	deadMalformed  = "malformed"
	deadDeliveries = "delivery_limit"
	deadAttempts   = "attempts_exhausted"
	deadOversize   = "oversize"
)

var deadReasons = [...]string{deadMalformed, deadDeliveries, deadAttempts, deadOversize}

// tripCodes are why latches close.
var tripCodes = [...]string{"429", "503", "529", "unreachable"}

// trips counts them.
type trips [len(tripCodes)]atomic.Uint64

func (t *trips) add(code string) {
	for i, c := range tripCodes {
		if c == code {
			t[i].Add(1)
		}
	}
}

// counts are those of one queue.
type counts struct {
	first, retried, redelivered, lost, fenced, oversize atomic.Uint64
	outcomes                                            [numOutcomes]atomic.Uint64
	decisions                                           [len(gateReasons)]atomic.Uint64
	letters                                             [len(deadReasons)]atomic.Uint64
	tokensIn, tokensOut                                 atomic.Uint64
	trips                                               trips
	took, waited, headroom                              prometheus.Observer
}

func (c *counts) letter(reason string) {
	for i, r := range deadReasons {
		if r == reason {
			c.letters[i].Add(1)
		}
	}
}

// metrics reads the dispatcher's numbers when it is scraped.
type metrics struct {
	d                      *Dispatcher
	descs                  map[string]*prometheus.Desc
	compat                 map[string]*prometheus.Desc // nil unless they are asked for
	redisErrors            atomic.Uint64
	took, waited, headroom *prometheus.HistogramVec
}

var queueLabels = []string{"queue_id", "queue_name", "pool_name"}

// families are the metrics but for histograms: name, help, and labels beside those of the queue, or
// instead of them.
var families = []struct {
	name, help string
	labels     []string
}{
	{"requests_total", "First attempts.", queueLabels},
	{"retries_total", "Further attempts.", queueLabels},
	{"successful_requests_total", "Requests that were answered with 2xx.", queueLabels},
	{"failed_requests_total", "Requests whose result is a failure, but for deadlines.", queueLabels},
	{"exceeded_deadline_requests_total", "Requests whose deadline has passed.", queueLabels},
	{"shed_requests_total", "Attempts that were refused for overload: 429, 503, 529.", queueLabels},
	{"redelivered_total", "Claims of requests that had been claimed before without an outcome.", queueLabels},
	{"leases_lost_total", "Requests that another dispatcher has taken over.", queueLabels},
	{"fenced_results_total", "Outcomes that were dropped because the lease was lost.", queueLabels},
	{"oversize_total", "Requests that were sent alone, or rejected, because they are larger than the budget.", queueLabels},
	{"gate_decisions_total", "Times that a gate has kept messages back; closed ones count while there is a backlog.", append([]string{"reason"}, queueLabels...)},
	{"dead_letters_total", "Messages that were given up.", append([]string{"reason"}, queueLabels...)},
	{"tokens_total", "Tokens as answers tell them.", append([]string{"direction"}, queueLabels...)},
	{"overload_trips_total", "Times that a refusal has closed the gate.", append([]string{"code"}, queueLabels...)},
	{"backlog", "Messages in the queue.", queueLabels},
	{"delayed", "Messages that wait for their next attempt.", queueLabels},
	{"dead_letters", "Dead letters that are kept.", queueLabels},
	{"leased", "Messages that any dispatcher works on.", queueLabels},
	{"oldest_message_age_seconds", "Age of the message with the earliest deadline.", queueLabels},
	{"leases_held", "Messages that this dispatcher works on.", queueLabels},
	{"pool_worker_limit", "Workers of a pool.", []string{"pool_name"}},
	{"budget", "D - B, the part of the capacity that may be used.", []string{"inference_pool"}},
	{"gate_metric_value", "D, the free part of the capacity.", []string{"inference_pool"}},
	{"gate_metric_threshold", "B, the reserved part.", []string{"inference_pool"}},
	{"gate_metric_source_available", "1 while the source of D can be read.", []string{"inference_pool", "source"}},
	{"max_sys", "Capacity.", []string{"inference_pool", "unit"}},
	{"allowed", "What may be sent now.", []string{"inference_pool", "unit"}},
	{"ledger", "What was sent and D does not show yet.", []string{"inference_pool", "unit"}},
	{"gate_state", "1 for the present state of the gate.", []string{"inference_pool", "state"}},
	{"closing_load_per_endpoint", "Load of an endpoint at which the gate closes; one that no endpoint can reach leaves it open.", []string{"inference_pool"}},
	{"overload_latched", "1 while the gate is closed because of refusals.", []string{"inference_pool"}},
	{"sample_age_seconds", "Age of the sample that D was computed from.", []string{"inference_pool"}},
	{"redis_errors_total", "Operations in Redis that have failed.", nil},
}

const metricPrefix = "spillway_dispatch_"

func newMetrics(d *Dispatcher) *metrics {
	m := &metrics{d: d, descs: map[string]*prometheus.Desc{}}
	for _, f := range families {
		m.descs[f.name] = prometheus.NewDesc(metricPrefix+f.name, f.help, f.labels, nil)
	}
	if d.cfg.CompatMetrics {
		m.compat = compat()
	}
	histogram := func(of func(*counts) *prometheus.Observer, name, help string, buckets ...float64) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: metricPrefix + name, Help: help, Buckets: buckets}, queueLabels)
		for _, q := range d.queues {
			*of(&q.counts) = h.WithLabelValues(q.ID, q.Name, q.PoolID)
		}
		return h
	}
	m.took = histogram(func(c *counts) *prometheus.Observer { return &c.took }, "inference_latency_seconds", "Time of one attempt.", .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120)
	m.waited = histogram(func(c *counts) *prometheus.Observer { return &c.waited }, "queue_wait_seconds", "From when a request was created to its first attempt.", .5, 1, 5, 15, 60, 300, 900, 3600, 14400, 43200, 86400)
	m.headroom = histogram(func(c *counts) *prometheus.Observer { return &c.headroom }, "deadline_headroom_seconds", "What is left until the deadline when an attempt begins.", 1, 5, 15, 60, 300, 900, 3600, 14400, 43200, 86400)
	return m
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, f := range families {
		ch <- m.descs[f.name]
	}
	for _, d := range m.compat {
		ch <- d
	}
	for _, h := range []*prometheus.HistogramVec{m.took, m.waited, m.headroom} {
		h.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	count := func(name string, v uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(m.descs[name], prometheus.CounterValue, float64(v), labels...)
	}
	gauge := func(name string, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(m.descs[name], prometheus.GaugeValue, v, labels...)
	}
	now := time.Now()
	held := m.d.inHand()
	for _, q := range m.d.queues {
		l := []string{q.ID, q.Name, q.PoolID}
		more := func(first string) []string { return append([]string{first}, l...) }
		count("requests_total", q.first.Load(), l...)
		count("retries_total", q.retried.Load(), l...)
		count("successful_requests_total", q.outcomes[outcomeSuccess].Load(), l...)
		count("failed_requests_total", q.outcomes[outcomeFailed].Load(), l...)
		count("exceeded_deadline_requests_total", q.outcomes[outcomeDeadline].Load(), l...)
		count("shed_requests_total", q.outcomes[outcomeShed].Load(), l...)
		count("redelivered_total", q.redelivered.Load(), l...)
		count("leases_lost_total", q.lost.Load(), l...)
		count("fenced_results_total", q.fenced.Load(), l...)
		count("oversize_total", q.oversize.Load(), l...)
		for i, reason := range gateReasons {
			count("gate_decisions_total", q.decisions[i].Load(), more(reason)...)
		}
		for i, reason := range deadReasons {
			count("dead_letters_total", q.letters[i].Load(), more(reason)...)
		}
		for i, code := range tripCodes {
			count("overload_trips_total", q.trips[i].Load(), more(code)...)
		}
		count("tokens_total", q.tokensIn.Load(), more("input")...)
		count("tokens_total", q.tokensOut.Load(), more("output")...)
		depth := q.depth.Load()
		gauge("backlog", float64(depth.pending), l...)
		gauge("delayed", float64(depth.delayed), l...)
		gauge("dead_letters", float64(depth.dead), l...)
		gauge("leased", float64(depth.leased), l...)
		gauge("oldest_message_age_seconds", depth.age(now), l...)
		gauge("leases_held", float64(len(held[q])), l...)
	}
	for _, w := range m.d.pools {
		gauge("pool_worker_limit", float64(w.Workers), w.ID)
	}
	for _, g := range m.d.read() {
		m.group(g, gauge, now)
	}
	if m.compat != nil {
		m.collectCompat(ch, held, now)
	}
	count("redis_errors_total", m.redisErrors.Load())
	for _, h := range []*prometheus.HistogramVec{m.took, m.waited, m.headroom} {
		h.Collect(ch)
	}
}

func (m *metrics) group(g *group, gauge func(string, float64, ...string), now time.Time) {
	pool, unit := g.label, g.budget.Unit().String()
	dec := g.decide(now)
	gauge("budget", spare(dec), pool)
	gauge("gate_metric_value", dec.D, pool)
	gauge("gate_metric_threshold", dec.B, pool)
	for i, in := range g.inputs {
		gauge("gate_metric_source_available", flag(g.states[i].available.Load()), pool, in.name+" "+strconv.Itoa(i))
	}
	gauge("max_sys", dec.MaxSys, pool, unit)
	gauge("allowed", float64(dec.Allowed), pool, unit)
	gauge("ledger", float64(dec.Ledger), pool, unit)
	for _, s := range budget.States {
		gauge("gate_state", flag(s == dec.State), pool, s.String())
	}
	in := g.inputs[dec.Source]
	gauge("closing_load_per_endpoint", in.per*(1-in.source.Rule.Baseline), pool)
	gauge("overload_latched", flag(!dec.Since.IsZero()), pool)
	age := 0.0
	if !dec.Sampled.IsZero() {
		age = now.Sub(dec.Sampled).Seconds()
	}
	gauge("sample_age_seconds", age, pool)
}

// spare is D - B, at least 0; NaN while D is unknown.
func spare(dec budget.Decision) float64 { return max(0, math.Min(1, math.Max(0, dec.D))-dec.B) }

func flag(on bool) float64 {
	if on {
		return 1
	}
	return 0
}

// age is how old the head is, in seconds, 0 if there is none or it does not say.
func (d *depth) age(now time.Time) float64 {
	if d.head == nil || d.head.created <= 0 {
		return 0
	}
	return max(0, now.Sub(time.Unix(d.head.created, 0)).Seconds())
}

// sent notes an attempt that begins.
func (c *counts) sent(m *message, now time.Time) {
	c.headroom.Observe(m.deadline.Sub(now).Seconds())
	if m.retries == 0 && m.created > 0 {
		c.waited.Observe(now.Sub(time.Unix(m.created, 0)).Seconds())
	}
}

// used counts tokens that an answer tells of; usage may be nil.
func (c *counts) used(usage []byte) {
	if len(usage) == 0 {
		return
	}
	all := gjson.ParseBytes(usage)
	c.tokensIn.Add(tokensOf(all.Get("prompt_tokens")))
	c.tokensOut.Add(tokensOf(all.Get("completion_tokens")))
}

// tokensOf is a number of tokens, within reason.
func tokensOf(v gjson.Result) uint64 { return uint64(min(max(v.Int(), 0), 1<<40)) }
