package tokenize

import "github.com/prometheus/client_golang/prometheus"

// prompted is what became of a prompt.
type prompted uint8

const (
	cached     prompted = iota
	shared              // another request was asking for the same
	asked               // a worker has told its tokens
	unanswered          // the worker that was asked has not
	left                // its client, before the answer came
	tooLarge
	unreadable // there is no text in it
	nobody     // no worker is routable; from here on the reason that tells the most comes last
	routeless  // no worker has a route for it
	resting    // all workers have failed lately
	crowded    // all workers have enough to tell
	numPrompted
)

var promptedNames = [numPrompted]string{
	cached: "cached", shared: "shared", asked: "asked", unanswered: "unanswered", left: "left", tooLarge: "too_large",
	unreadable: "unreadable", nobody: "no_worker", routeless: "no_route", resting: "resting", crowded: "crowded",
}

// metrics are what a Tokenizer tells of itself. Children are looked up here, once.
type metrics struct {
	prompts      [numPrompted]prometheus.Counter
	calls        [numRoutes][numResults]prometheus.Counter
	hits, misses prometheus.Counter
	latency      prometheus.Observer
	inflight     prometheus.Gauge
	ratio        *prometheus.HistogramVec
	countOnly    *prometheus.GaugeVec
}

func newMetrics(cfg Config, reg prometheus.Registerer, t *Tokenizer) *metrics {
	prefix := cfg.Prefix
	if prefix == "" {
		prefix = "dynamo_frontend"
	}
	prompts := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_tokenizer_prompts_total", Help: "Prompts whose tokens were wanted, by what became of that.",
	}, []string{"outcome"})
	calls := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_tokenizer_calls_total", Help: "Calls of workers for the tokens of a prompt, by route and outcome.",
	}, []string{"source", "outcome"})
	latency := prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: prefix + "_tokenizer_latency_ms", Help: "Time to ask workers for the tokens of a prompt.",
		Buckets: cfg.Histograms.Of("tokenizer_latency_ms", []float64{0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512}),
	}, []string{"operation"})
	m := &metrics{
		hits: prometheus.NewCounter(prometheus.CounterOpts{
			Name: prefix + "_tokenizer_cache_hits_total", Help: "Prompts whose tokens were remembered.",
		}),
		misses: prometheus.NewCounter(prometheus.CounterOpts{
			Name: prefix + "_tokenizer_cache_misses_total", Help: "Prompts whose tokens were not.",
		}),
		latency: latency.WithLabelValues("tokenize"),
		inflight: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "spillway_tokenizer_inflight", Help: "Calls of workers for tokens that are under way.",
		}),
		ratio: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "spillway_token_count_error_ratio", Help: "Difference between the tokens told of a prompt and those that its worker counted, over the latter.",
			Buckets: cfg.Histograms.Of("token_count_error_ratio", []float64{0, 0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2}),
		}, []string{"model"}),
		countOnly: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "spillway_tokenizer_count_only", Help: "Tenants of a model whose tokens are used for their number alone, since that was wrong.",
		}, []string{"model"}),
	}
	for i := range m.prompts {
		m.prompts[i] = prompts.WithLabelValues(promptedNames[i])
	}
	for to := range m.calls {
		for res := range m.calls[to] {
			m.calls[to][res] = calls.WithLabelValues(routeNames[to], resultNames[res])
		}
	}
	gauge := func(name, help string, read func() int64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 {
			t.mu.Lock()
			defer t.mu.Unlock()
			return float64(read())
		})
	}
	reg.MustRegister(prompts, calls, latency, m.hits, m.misses, m.inflight, m.ratio, m.countOnly,
		gauge("spillway_tokenizer_cache_bytes", "Memory of remembered tokens.", func() int64 { return t.cache.bytes }),
		gauge("spillway_tokenizer_cache_limit_bytes", "Most that remembered tokens may take.", func() int64 { return t.cache.limit }),
		gauge("spillway_tokenizer_cache_entries", "Prompts whose tokens are remembered.", func() int64 { return int64(len(t.cache.entries)) }),
	)
	return m
}
