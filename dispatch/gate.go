package dispatch

import (
	"encoding/json"
	"fmt"
	"math"
	"net/url"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"spillway/dispatch/budget"
)

// gate is what a gate_type and its gate_params say. A queue's has a budget made of what is read, and what
// is asked of each message; all else that may have a gate has no budget, so that a message is refused while
// a source leaves no room.
type gate struct {
	pool   string           // inference pool, "" if it has none
	inputs []input          // what the budget is made of; none for a gate that only looks at messages
	admit  admission        // of a queue's gate, or nil
	whole  func() admission // of one without a budget, which may be nil. It has the sources watched.
}

// input is one source of a budget and how it is read.
type input struct {
	id     string // type and parameters: what is the same is read once
	name   string // for people
	source budget.Source
	reader reader
	every  time.Duration // between readings
	per    float64       // capacity of one endpoint, NaN if it is not known here
	sizes
}

// sizes are parameters of whoever goes by a budget: the first input of a group has those of all.
type sizes struct {
	patience time.Duration // for which a request that is too large waits for more room
	reject   bool          // what exceeds all capacity then gets an error, and is not sent alone
	output   int64         // tokens that count for a request that sets no limit
	settle   time.Duration // a reading must be newer by so much to end an overload
	ramp     float64       // part of N that may be sent after an overload, doubled with each reading
}

// builder makes gates.
type builder struct {
	cfg     Config
	workers int // of the pool that the gate is for: the capacity where none is known
	metrics *asker
	clients map[string]redis.UniversalClient // by address, of gates in Redis; closed by their user
	owner   string                           // whose gates they are, for names
	watched []*group                         // what is to be read beside the budgets
	quotas  []*redisQuota                    // that expire if they are not renewed
}

// maxDepth bounds gates in gates.
const maxDepth = 8

func (b *builder) build(kind string, raw json.RawMessage, depth int) (*gate, error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("gate %s: more than %d gates in one another", kind, maxDepth)
	}
	make, known := map[string]func(*params, int) (*gate, error){
		"constant": b.constant, "redis": b.redisBudget, "redis-quota": b.redisQuota, "local-max-concurrency": b.localMax,
		"prometheus-saturation": b.saturation, "prometheus-budget": b.budget, "prometheus-query": b.query,
		"endpoint-scrape": b.scrape, "composite": b.composite, "wait-on-refuse": b.waitOnRefuse,
		"tier-priority-admission": b.tier, "spillway": b.spillway, "aimd": b.adaptive,
	}[kind]
	if !known {
		return nil, fmt.Errorf("unknown gate_type %q", kind)
	}
	p := newParams(raw)
	g, err := make(p, depth)
	if err == nil {
		for i := range g.inputs {
			if in := &g.inputs[i]; in.id == "" {
				in.id, in.name, in.sizes = kind+" "+string(raw), kind, readSizes(p, in.source.Lag)
			}
		}
		err = p.close()
	}
	if err != nil {
		return nil, fmt.Errorf("gate %s: %w", kind, err)
	}
	if g.whole == nil {
		g.whole = func() admission {
			if len(g.inputs) == 0 {
				return g.admit
			}
			return b.watch(g.inputs)
		}
	}
	return g, nil
}

// readSizes reads what all gates with a budget have in common, and who goes by it has to know.
func readSizes(p *params, lag time.Duration) sizes {
	return sizes{
		patience: p.duration("oversize_patience", 30*time.Second), reject: p.oneOf("oversize_policy", "alone", "reject") == "reject",
		output: int64(p.integer("default_output_tokens", 256, 0)), settle: p.duration("settle", lag), ramp: p.number("recovery_ramp", 1, 1e-3, 1),
	}
}

// watch has sources read for an admission.
func (b *builder) watch(inputs []input) admission {
	w := &group{name: fmt.Sprintf("%s gate %d", b.owner, len(b.watched)+1), inputs: inputs}
	w.begin(b.cfg)
	b.watched = append(b.watched, w)
	return room{w.budget}
}

// rule reads what all gates with a budget have in common. per is the capacity of one endpoint in the
// unit, NaN if it is not known; fixed is max_sys, NaN if it is not set.
func (b *builder) rule(p *params, baseline float64) (s budget.Source, per, fixed float64) {
	unit, err := budget.ParseUnit(p.text("budget_unit", "requests"))
	if err != nil {
		p.fail("budget_unit", err)
	}
	rounding, err := budget.ParseRounding(p.text("rounding", "floor_min1"))
	if err != nil {
		p.fail("rounding", err)
	}
	s.Rule = budget.Rule{Baseline: p.number("baseline", baseline, 0, 1), Unit: unit, Rounding: rounding, Share: p.number("budget_share", 1, 1e-6, 1)}
	s.Fallback = p.number("fallback", 0, 0, 1)
	s.Grace = p.duration("stale_grace", 0)
	per = p.number("max_concurrency", 100, 1e-6, 1e12)
	tokens := p.number("max_token_concurrency", 1_000_000, 1e-6, 1e15)
	bytes := p.number("max_bytes_per_endpoint", math.NaN(), 1, 1e18)
	fixed = p.number("max_sys", math.NaN(), 0, 1e18)
	switch {
	case unit == budget.Tokens:
		per = tokens
	case unit == budget.Bytes:
		if per = bytes; math.IsNaN(bytes) && math.IsNaN(fixed) {
			p.fail("max_bytes_per_endpoint", fmt.Errorf("is missing, and budget_unit is bytes"))
		}
	}
	return s, per, fixed
}

// accounting reads how what was sent is counted.
func (b *builder) accounting(p *params, s *budget.Source, lag time.Duration) {
	if p.oneOf("accounting", "incremental", "cap") == "cap" {
		s.Accounting = budget.Cap
	}
	s.Lag = p.duration("visibility_lag", lag)
	s.MaxAge = p.duration("max_sample_age", b.cfg.MaxSampleAge)
}

func (b *builder) constant(*params, int) (*gate, error) { return &gate{}, nil }

// client is one for an address or URL.
func (b *builder) client(p *params) redis.UniversalClient {
	address := p.required("address")
	if b.clients[address] == nil {
		opt := &redis.Options{Addr: address}
		if strings.Contains(address, "://") {
			var err error
			if opt, err = redis.ParseURL(address); err != nil {
				p.fail("address", fmt.Errorf("is no Redis URL")) // err may hold the password
				return nil
			}
		}
		opt.ContextTimeoutEnabled = true
		opt.MaxRetries, opt.DialerRetries = -1, 1 // whoever asks will ask again, and others wait for the answer
		b.clients[address] = redis.NewClient(opt)
	}
	return b.clients[address]
}

func (b *builder) redisBudget(p *params, _ int) (*gate, error) {
	r := &redisReader{redis: b.client(p), key: p.text("budget_key", "dispatch-gate-budget"), missingOpen: p.oneOf("missing", "closed", "open") == "open"}
	s, per, fixed := b.rule(p, 0)
	if r.maxSys = fixed; math.IsNaN(fixed) {
		r.maxSys = float64(b.workers)
	}
	s.Accounting = budget.Cap
	return &gate{inputs: []input{{source: s, reader: r, every: time.Second, per: per}}}, nil
}

func (b *builder) redisQuota(p *params, _ int) (*gate, error) {
	q := &redisQuota{
		redis: b.client(p), attribute: p.text("attribute", "userid"), concurrency: p.oneOf("mode", "rate-limit", "concurrency") == "concurrency",
		limit: p.integer("limit", 0, 1), window: p.duration("window", time.Minute), prefix: p.text("prefix", "quota:"),
		classify: p.oneOf("gating_mode", "blocking", "classifying") == "classifying", held: map[string]int{},
	}
	if q.limit < 1 {
		p.fail("limit", fmt.Errorf("is missing"))
	}
	if q.concurrency {
		b.quotas = append(b.quotas, q)
	}
	return &gate{admit: q}, nil
}

func (b *builder) localMax(p *params, _ int) (*gate, error) {
	l := &localMax{limit: p.integer("limit", 0, 1)}
	p.oneOf("gating_mode", "classifying", "blocking") // both refuse: nothing here may block who polls
	if l.limit < 1 {
		p.fail("limit", fmt.Errorf("is missing"))
	}
	return &gate{admit: l}, nil
}

func (b *builder) adaptive(p *params, _ int) (*gate, error) {
	a := &adaptive{limit: budget.AIMD{
		Least: p.number("min", 1, 1, maxWorkers), Most: p.number("max", float64(b.workers), 1, maxWorkers),
		Increase: p.number("increase", 1, 1e-3, maxWorkers), Decrease: p.number("decrease", 0.5, 0.01, 0.99),
	}}
	if a.limit.Most < a.limit.Least {
		p.fail("max", fmt.Errorf("%v is below min", a.limit.Most))
	}
	return &gate{admit: a}, nil
}

func (b *builder) prometheus(p *params) *promAPI {
	from := p.text("url", b.cfg.PrometheusURL)
	if u, err := url.Parse(from); err != nil || u.Host == "" {
		p.fail("url", fmt.Errorf("neither it nor prometheus-url is the URL of a Prometheus"))
	}
	return &promAPI{asker: b.metrics, url: strings.TrimSuffix(from, "/")}
}

func (b *builder) budget(p *params, _ int) (*gate, error) {
	pool, namespace := p.required("pool"), p.text("namespace", "")
	s, per, fixed := b.rule(p, 0.05)
	concurrency := p.number("max_concurrency", 100, 1e-6, 1e12)
	original := p.oneOf("compat", "none", "original") == "original"
	r := &promReader{api: b.prometheus(p), ready: ready(pool, namespace), per: per, maxSys: fixed, failover: p.boolean("cascade_failover") || original}
	b.accounting(p, &s, time.Second)
	if _, given := p.values["accounting"]; original && !given {
		s.Accounting = budget.Cap
	}
	if original {
		running, pods := promSelector("vllm:num_requests_running", "inference_pool", pool, "namespace", namespace), promSelector("inference_pool_ready_pods", "name", pool, "namespace", namespace)
		r.candidates = append(waiting(pool, namespace, concurrency, true), candidate{
			fmt.Sprintf("1 - (sum(%s) / on() (%s * %g))", running, pods, concurrency), []string{oldest(running), oldest(pods)},
		})
	} else {
		r.candidates = candidates(pool, namespace, concurrency)
		if s.Accounting == budget.Cap { // else what waits would be taken for all there is
			r.candidates = append(r.candidates, waiting(pool, namespace, concurrency, false)...)
		}
		if s.Rule.Unit == budget.Requests {
			r.capacity = "max(" + promSelector("spillway_pool_capacity", "pool", pool, "unit", "requests", "namespace", namespace) + ")"
		}
	}
	r.active = len(r.candidates)
	r.maxAge = s.MaxAge
	return &gate{pool: pool, inputs: []input{{source: s, reader: r, every: b.cfg.MetricsPoll, per: per}}}, nil
}

func (b *builder) saturation(p *params, _ int) (*gate, error) {
	pool, namespace := p.required("pool"), p.text("namespace", "")
	threshold := p.number("threshold", 0.8, 0, 1)
	fallback := p.number("fallback", 1, 0, 1) // of saturation
	delete(p.values, "fallback")
	s, per, fixed := b.rule(p, 1-threshold)
	s.Fallback = 1 - fallback
	b.accounting(p, &s, 10*time.Second)
	r := &promReader{api: b.prometheus(p), ready: ready(pool, namespace), per: per, maxSys: fixed}
	r.candidates = candidates(pool, namespace, per)[1:2]
	r.active = 1
	r.maxAge = s.MaxAge
	return &gate{pool: pool, inputs: []input{{source: s, reader: r, every: b.cfg.MetricsPoll, per: per}}}, nil
}

func (b *builder) query(p *params, _ int) (*gate, error) {
	c := candidate{d: p.required("query")}
	if f := p.text("freshness_query", ""); f != "" {
		c.fresh = []string{f}
	}
	s, per, fixed := b.rule(p, 0)
	b.accounting(p, &s, 10*time.Second)
	pool := p.text("pool", "")
	r := &promReader{api: b.prometheus(p), candidates: []candidate{c}, active: 1, per: per, maxSys: fixed}
	switch {
	case pool != "":
		r.ready = ready(pool, p.text("namespace", ""))
	case math.IsNaN(fixed):
		r.maxSys = float64(b.workers)
	}
	r.maxAge = s.MaxAge
	return &gate{pool: pool, inputs: []input{{source: s, reader: r, every: b.cfg.MetricsPoll, per: per}}}, nil
}

func (b *builder) scrape(p *params, _ int) (*gate, error) {
	r := &scrapeReader{
		asker: b.metrics, url: p.required("url"), metric: p.required("metric"), labels: p.labels("labels"),
		aggregate: p.oneOf("aggregate", "max", "sum", "avg"), isBudget: p.oneOf("value_type", "saturation", "budget") == "budget",
		perPod: p.number("max_count_per_pod", 0, 0, 1e12), podsURL: p.text("pods_url", ""), podsMetric: p.text("pods_metric", ""), podsLabels: p.labels("pods_labels"),
	}
	s, per, fixed := b.rule(p, 0)
	b.accounting(p, &s, time.Second)
	if _, given := p.values["max_sample_age"]; !given {
		s.MaxAge = b.cfg.MaxSampleAge / 6
	}
	r.perEndpoint, r.maxSys = per, fixed
	if math.IsNaN(fixed) && r.podsURL == "" {
		r.maxSys = float64(b.workers)
	}
	return &gate{pool: p.text("pool", ""), inputs: []input{{source: s, reader: r, every: time.Second, per: per}}}, nil
}

// spillwayEvery is how often a front end is asked: it measures when asked, ten times a second at most.
const spillwayEvery = 250 * time.Millisecond

func (b *builder) spillway(p *params, _ int) (*gate, error) {
	pool, endpoint := p.required("pool"), p.text("endpoint", "")
	s, per, fixed := b.rule(p, 0.05)
	lag := time.Second
	size := sizing{unit: s.Rule.Unit, per: per, maxSys: fixed}
	var r reader
	if endpoint == "" && b.cfg.Inside != nil {
		lag = 0
		r = insideReader{b.cfg.Inside.Capacity, pool, size}
	} else {
		u, err := url.Parse(endpoint)
		if err != nil || u.Host == "" {
			return nil, fmt.Errorf("endpoint: %q is no URL", endpoint)
		}
		u = u.JoinPath("internal/capacity")
		u.RawQuery = url.Values{"pool": {pool}}.Encode()
		r = &capacityReader{asker: b.metrics, url: u.String(), size: size}
	}
	b.accounting(p, &s, lag)
	if _, given := p.values["max_sample_age"]; !given {
		s.MaxAge = b.cfg.MaxSampleAge / 6
	}
	return &gate{pool: pool, inputs: []input{{source: s, reader: r, every: spillwayEvery, per: per}}}, nil
}
