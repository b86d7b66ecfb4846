package proxy

import (
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/busy"
	"spillway/httperr"
	"spillway/router"
	"spillway/tracker"
	"spillway/worker"
)

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range m.families.descs {
		ch <- d
	}
}

// Collect implements prometheus.Collector. What it tells of workers it reads from the core, so
// nothing is told of one that is gone.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	p, now := page(ch), time.Now()
	models := m.server.models.all(m.server.router.Catalog().Models())
	for _, mm := range models {
		m.collectModel(p, mm, true)
		m.collectPool(p, mm, now)
	}
	if !slices.ContainsFunc(models, func(mm *modelMetrics) bool { return mm.name == unknownModel }) {
		m.collectModel(p, m.unknown, false)
	}
	m.collectProcess(p, models, now)
	c := workerCollector{metrics: m, page: p, now: now, seen: map[string]bool{}, told: map[string]*modelFacts{}}
	for _, name := range m.server.router.Catalog().Models() {
		c.told[name] = &modelFacts{}
	}
	m.server.router.Partitions("", c.partition)
	c.models()
}

// collectModel tells the counts of one model; unless all are to be told, those that are not 0.
func (m *metrics) collectModel(p page, mm *modelMetrics, all bool) {
	f := m.families
	model := labeled("model", mm.name)
	count := func(f family, n *atomic.Uint64, nameValue ...string) {
		if v := n.Load(); v > 0 || all {
			p.count(f, labeled(append(nameValue, "model", mm.name)...), v)
		}
	}
	for i := range endpoints {
		ep := endpoints[i].label
		// What contains the other is read last, so that it is never the smaller one.
		rejected := mm.rejected[i].Load()
		issued := mm.issued[i].Load()
		if all {
			l := labeled("model", mm.name, "endpoint", ep)
			p.count(f.rejected, l, rejected)
			p.count(f.modelRejected, l, rejected)
			p.count(f.issued, l, issued)
		}
		for j, kind := range requestTypes {
			if !endpoints[i].streams && j > 0 {
				continue
			}
			for k, cause := range outcomes {
				status := "error"
				if k == 0 {
					status = "success"
				}
				count(f.requests, &mm.ended[i][j][k], "endpoint", ep, "request_type", kind, "status", status, "error_type", string(cause))
			}
			count(f.started, &mm.started[i][j], "endpoint", ep, "request_type", kind)
			count(f.cancelled, &mm.cancelled[i][j], "endpoint", ep, "request_type", kind)
		}
	}
	for i, r := range httperr.Reasons {
		count(f.rejections, &mm.rejections[i], "reason", string(r))
	}
	if active := mm.active.Load(); active > 0 || all {
		p.put(f.active, model, float64(active))
		p.put(f.inflight, model, float64(active))
	}
	if all {
		m.collectAnswers(p, mm, model)
	}
}

// collectAnswers tells what only known models have.
func (m *metrics) collectAnswers(p page, mm *modelMetrics, model labels) {
	f := m.families
	queued := float64(mm.queued.Load())
	p.put(f.queued, model, queued)
	p.put(f.waiting, model, queued)
	p.count(f.outputTokens, model, mm.outputTokens.Load())
	p.put(f.migrationLimit, model, float64(m.server.cfg.MigrationLimit))
	var migrations uint64
	for i, r := range retryReasons {
		n := mm.retries[i].Load()
		migrations += n
		p.count(f.retries, labeled("model", mm.name, "reason", r), n)
	}
	p.count(f.migrations, labeled("model", mm.name, "migration_type", "new_request"), migrations)
	for i, outcome := range migrationOutcomes {
		p.histogram(f.migrationTime, labeled("model", mm.name, "migration_type", "new_request", "outcome", outcome), mm.migrations[i])
	}
	if m.server.queues {
		m.collectQueue(p, mm)
	}
	if m.server.sessions {
		for i, effect := range sessionEffects {
			if effect != "" {
				p.count(f.sessionRequests, labeled("model", mm.name, "effect", effect), mm.sessions[i].Load())
			}
		}
	}
	if m.server.kv {
		for i, source := range tokenSources {
			p.count(f.prompts, labeled("model", mm.name, "source", source), mm.tokensFrom[i].Load())
		}
	}
	p.histogram(f.duration, model, mm.duration)
	p.histogram(f.ttft, model, mm.ttft)
	p.histogram(f.itl, model, mm.itl)
	p.histogram(f.input, model, mm.input)
	p.histogram(f.cached, model, mm.cached)
	p.histogram(f.output, model, mm.output)
	p.histogram(f.embed, model, mm.embedding)
}

// collectQueue tells of those of a model who wait for a worker, by class, and of those who have.
// Refusals are not told apart by class where a policy file makes several.
func (m *metrics) collectQueue(p page, mm *modelMetrics) {
	f := m.families
	for i, outcome := range queueOutcomes {
		p.histogram(f.queueWait, labeled("model", mm.name, "outcome", outcome), mm.queueWait[i])
	}
	classes := m.server.router.Profile(mm.name).Classes
	waiting := make([]router.Backlog, len(classes))
	var one []router.Backlog
	m.server.router.Partitions(mm.name, func(part *router.Partition) {
		one = part.Backlogs(one[:0])
		for i, b := range one {
			waiting[i].Requests += b.Requests
			waiting[i].ISLTokens += b.ISLTokens
		}
	})
	of := func(class string) []string {
		return []string{"model", mm.name, "worker_type", "decode", "policy_class", class}
	}
	for i := range classes {
		p.put(f.queueRequests, labeled(of(classes[i].Name)...), float64(waiting[i].Requests))
		p.count(f.queueTokens, labeled(of(classes[i].Name)...), waiting[i].ISLTokens)
	}
	all := classes[0].Name
	if len(classes) > 1 {
		all = "all"
	}
	for _, reason := range []httperr.Reason{httperr.QueueFull, httperr.QueueTimeout} {
		p.count(f.queueRefused, labeled(append(of(all), "reason", string(reason))...), mm.rejections[slices.Index(httperr.Reasons, reason)].Load())
	}
}

// sessionEffects are the labels of router.SessionEffect.
var sessionEffects = [...]string{router.SessionNew: "new", router.SessionKept: "kept", router.SessionMoved: "moved"}

// collectProcess tells what is counted over all models.
func (m *metrics) collectProcess(p page, models []*modelMetrics, now time.Time) {
	f := m.families
	for i := preprocess; i < numSteps; i++ {
		p.put(f.stageRequests, labeled("stage", stageLabels[i][0], "phase", stageLabels[i][1]), float64(m.stages[i].requests.Load()))
		p.histogram(f.stageTime, labeled("stage", stageLabels[i][0]), m.stages[i].duration)
	}
	p.count(f.disconnected, nil, m.disconnected.Load())
	p.count(f.leaks, nil, m.leaks.Load())
	p.put(f.bodyMemory, nil, float64(m.server.bodies.held.Load()))
	p.put(f.bodyLimit, nil, float64(m.server.bodies.limit))
	id := labeled("router_id", m.routerID)
	p.histogram(f.scheduling, id, m.scheduling)
	p.histogram(f.routing, id, m.routing)
	p.count(f.routerRequests, id, m.routerRequests.Load())
	p.count(f.routerStarted, id, m.routerStarted.Load())
	if m.server.kv {
		m.collectCaches(p, id)
	}
	if m.server.sessions {
		limit := 0
		m.server.router.Partitions("", func(part *router.Partition) {
			var n int
			n, limit = part.Sessions(now)
			p.count(f.sessions, labeled("model", part.Key.Model, "tenant", part.Key.Tenant), uint64(n))
		})
		p.count(f.sessionLimit, nil, uint64(limit))
	}
	sum := func(f family, of func(*modelMetrics) *histogram) {
		var all []*histogram
		for _, mm := range models {
			all = append(all, of(mm))
		}
		p.histogram(f, id, all...)
	}
	sum(f.routerTTFT, func(mm *modelMetrics) *histogram { return mm.ttft })
	sum(f.routerITL, func(mm *modelMetrics) *histogram { return mm.itl })
	sum(f.routerInput, func(mm *modelMetrics) *histogram { return mm.input })
	sum(f.routerOutput, func(mm *modelMetrics) *histogram { return mm.output })
}

// workerCollector goes over the workers for one scrape.
type workerCollector struct {
	*metrics
	page  page
	now   time.Time
	seen  map[string]bool // names of workers: one that changes its partition must not be told twice
	told  map[string]*modelFacts
	ranks []tracker.RankLoad // scratch
	dp    []string           // ranks in decimal
}

// modelFacts are what the workers of a model have in common, the first worker that knows wins.
type modelFacts struct {
	states                                            [len(workerStates)]int
	totalBlocks, maxSeqs, maxBatched, context, blocks uint64
}

var workerStates = [...]busy.State{
	busy.StateFree, busy.StateBusy, busy.StateInhibited, busy.StateUnhealthy, busy.StateDraining, busy.StateUnknown,
}

func (c *workerCollector) partition(part *router.Partition) {
	facts := c.told[part.Key.Model]
	if facts == nil {
		return // registered since the scrape began
	}
	catalog := c.server.router.Catalog()
	for _, st := range part.Busy.Workers(c.now) {
		w := catalog.Find(st.ID)
		if w == nil || c.seen[st.Name] {
			continue
		}
		c.seen[st.Name] = true
		if i := slices.Index(workerStates[:], st.State); i >= 0 {
			facts.states[i]++
		}
		facts.learn(w, &st, part.Busy.BlockSize(st.ID))
		c.worker(part, &st)
	}
}

func (k *modelFacts) learn(w *worker.Worker, st *busy.WorkerStatus, blockSize uint32) {
	first := func(to *uint64, v uint64) {
		if *to == 0 {
			*to = v
		}
	}
	for i := range st.Ranks {
		first(&k.totalBlocks, st.Ranks[i].Report.TotalBlocks)
		first(&k.maxBatched, st.Ranks[i].Report.MaxBatchedTokens)
	}
	first(&k.maxSeqs, uint64(w.MaxConcurrency))
	first(&k.context, w.MaxModelLen)
	first(&k.blocks, uint64(blockSize))
}

// models tells what was found out about each model.
func (c *workerCollector) models() {
	f := c.families
	for name, k := range c.told {
		for i, state := range workerStates {
			c.page.put(f.workers, labeled("model", name, "state", string(state)), float64(k.states[i]))
		}
		model := labeled("model", name)
		for _, fact := range []struct {
			family family
			value  uint64
		}{
			{f.totalBlocks, k.totalBlocks}, {f.maxSeqs, k.maxSeqs}, {f.maxBatched, k.maxBatched}, {f.context, k.context}, {f.blockSize, k.blocks},
		} {
			if fact.value > 0 {
				c.page.count(fact.family, model, fact.value)
			}
		}
		_, t, ok := c.server.router.Thresholds(name)
		if !ok {
			continue
		}
		set := func(check string, v float64) {
			c.page.put(f.threshold, labeled("model", name, "check", check), v)
		}
		if t.DecodeFrac != nil {
			set("decode_blocks", *t.DecodeFrac)
		}
		if t.PrefillTokens != nil {
			set("prefill_tokens", float64(*t.PrefillTokens))
		}
		if t.PrefillFrac != nil {
			set("prefill_tokens_frac", *t.PrefillFrac)
		}
	}
}

// worker tells of one worker.
func (c *workerCollector) worker(part *router.Partition, st *busy.WorkerStatus) {
	f, p := c.families, c.page
	var known peer // of one that was never asked, all is zero
	met := &known
	if v, ok := c.server.peers.Load(st.ID); ok {
		met = v.(*peer)
	}
	model := part.Key.Model
	name := labeled("worker", st.Name)
	both := labeled("model", model, "worker", st.Name)
	p.flag(f.inhibited, name, st.Inhibited > 0)
	p.put(f.circuit, name, met.circuit.number())
	for i, class := range codeClasses {
		if class != "" {
			p.count(f.responses, labeled("worker", st.Name, "code_class", class), met.answers[i].Load())
		}
	}
	p.flag(f.workerBusy, both, st.Busy)
	p.count(f.transitions, labeled("model", model, "worker", st.Name, "to", "busy"), st.ToBusy)
	p.count(f.transitions, labeled("model", model, "worker", st.Name, "to", "free"), st.ToFree)
	c.signals(model, st, part.Busy.Snapshot().ThresholdsSet)
	for i := range st.Ranks {
		c.rank(model, st.Name, &st.Ranks[i])
	}
	c.ranks = part.Tracker.Ranks(st.ID, c.now, c.ranks[:0])
	for _, r := range c.ranks {
		c.booked(st, r, met)
	}
}

// idleStale is the age at which samples are stale while no threshold is set: workers are then
// looked at every 15 s only.
const idleStale = 45 * time.Second

// signals tells how fresh the sources of a worker are, by the rank that is behind.
func (c *workerCollector) signals(model string, st *busy.WorkerStatus, needed bool) {
	tell := func(source string, age time.Duration, stale bool) {
		l := labeled("model", model, "worker", st.Name, "source", source)
		c.page.put(c.families.signalAge, l, age.Seconds())
		c.page.flag(c.families.signalStale, l, stale && (needed || age > idleStale))
	}
	for _, source := range []busy.Source{busy.Scrape, busy.Event} {
		var age time.Duration
		known, stale := false, false
		for i := range st.Ranks {
			if s := st.Ranks[i].Signals[source]; s.Known {
				age, known, stale = max(age, s.Age), true, stale || s.Stale
			}
		}
		if known {
			tell(source.String(), age, stale)
		}
	}
	tell("tracker", 0, false) // our own books are never old
}

// rank tells of one rank what the busy rule looks at.
func (c *workerCollector) rank(model, name string, r *busy.RankStatus) {
	f, p, report := c.families, c.page, &r.Report
	dp := c.number(r.DP)
	l := labeled("model", model, "worker", name, "dp_rank", dp)
	ratio := max(report.PromisedRatio(), report.ReportedRatio())
	active := max(report.DecodeBlocks, float64(report.UsedBlocks))
	if !report.UsedKnown {
		active = max(active, report.UsageRatio*float64(report.TotalBlocks))
	}
	p.put(f.kvActive, l, active)
	if report.TotalBlocks > 0 {
		p.count(f.kvCapacity, l, report.TotalBlocks)
	}
	if report.TotalBlocks > 0 || ratio > 0 {
		p.put(f.kvRatio, l, ratio)
	}
	for _, check := range []struct {
		name string
		is   busy.Checks
	}{
		{"decode_blocks", busy.CheckDecodeBlocks}, {"prefill_tokens", busy.CheckPrefillTokens},
		{"prefill_tokens_frac", busy.CheckPrefillFrac}, {"backpressure", busy.CheckBackpressure},
	} {
		p.flag(f.rankBusy, labeled("model", model, "worker", name, "dp_rank", dp, "check", check.name), r.Checks.Has(check.is))
	}
	if r.Checks.Has(busy.CheckStale) { // only with --stale-policy busy
		p.flag(f.rankBusy, labeled("model", model, "worker", name, "dp_rank", dp, "check", "stale"), true)
	}
}

// booked tells what a rank has been promised and how it did last. Load may be booked for the
// worker as a whole.
func (c *workerCollector) booked(st *busy.WorkerStatus, r tracker.RankLoad, met *peer) {
	f, p := c.families, c.page
	dp := "none"
	if r.DP != worker.AnyDP {
		dp = c.number(r.DP)
	}
	p.count(f.slots, labeled("worker", st.Name, "dp_rank", dp), r.Requests)
	l := labeled("worker_id", st.ID.String(), "dp_rank", dp, "worker_type", "decode")
	p.count(f.workerDecode, l, r.DecodeBlocks)
	p.count(f.workerPrefill, l, r.PrefillTokens)
	v, ok := met.last.Load(r.DP)
	if !ok {
		return
	}
	last := v.(*lastSeen)
	tell := func(f family, n *atomic.Int64, unit float64) {
		if v := n.Load(); v >= 0 {
			p.put(f, l, float64(v)/unit)
		}
	}
	tell(f.lastTTFT, &last.ttft, perSecond)
	tell(f.lastInput, &last.input, perToken)
	tell(f.lastITL, &last.itl, perSecond)
}

// number is a rank in decimal.
func (c *workerCollector) number(dp uint32) string {
	for dp < worker.MaxReportedRanks && len(c.dp) <= int(dp) {
		c.dp = append(c.dp, strconv.Itoa(len(c.dp)))
	}
	if int(dp) < len(c.dp) {
		return c.dp[dp]
	}
	return strconv.FormatUint(uint64(dp), 10)
}
