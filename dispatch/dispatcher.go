package dispatch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"spillway/dispatch/budget"
)

// Step is a point on the way of a message.
type Step string

// The steps, in their order.
const (
	Peeked   Step = "peeked"   // it was seen in its queue
	Claimed  Step = "claimed"  // it is leased
	Sending  Step = "sending"  // its request is about to be sent
	Answered Step = "answered" // there is an answer, which is not stored
	Settled  Step = "settled"  // its result is published
	Delayed  Step = "delayed"  // it waits for its next attempt
	Released Step = "released" // it went back into its queue
)

// Dispatcher sends queued requests while their budget is open. It is safe for concurrent use.
type Dispatcher struct {
	cfg       Config
	log       *slog.Logger
	transport *Transport
	store     *store
	gates     map[string]redis.UniversalClient // of gates, by address
	pools     map[string]*workers
	groups    []*group
	watched   []*group      // sources of gates without a budget; no queues
	quotas    []*redisQuota // of gates, to be renewed
	queues    []*Queue
	merge     *mergePolicy
	transform []transformer
	gateways  []*gateway
	metrics   *metrics
	wake      chan struct{} // told when there may be something to do
	ready     atomic.Bool

	// Witness is told of each step of each message, by its ID; nil but in tests of crashes. Set before
	// Run.
	Witness func(Step, string)

	mu       sync.Mutex // guards the next fields
	held     map[*lease]context.CancelCauseFunc
	writes   []*write      // that wait for an exchange
	away     int           // writes that are in an exchange
	leaders  int           // who do exchanges
	claiming int           // exchanges on their way that claim something
	more     bool          // who does one is to look at all groups once more
	parked   []*worker     // who wait for a lease
	idle     chan struct{} // to be closed when no lease is held; nil while nobody waits for that
	over     bool          // there will be no more leases
	working  sync.WaitGroup
	requests context.Context // of requests in flight; set by Run
	leaving  chan struct{}   // closed when nothing new is to be begun
	last     chan struct{}   // closed when nothing new is being begun

	turn      sync.Mutex  // guards the next fields and what is said to be of who has the turn; taken before mu
	exchanges []*exchange // nil for one that is on its way
	turns     int
	gated     bool // there are groups whose gates have to be asked
	closeLast func()
	rng       *rand.Rand
}

// workers is a pool of them.
type workers struct {
	pool
	admit admission    // or nil
	free  atomic.Int64 // how many; below 0 for a while if those that were to be free are not
	// wanted tells that a group waits for one to be free that cannot have it sooner; of who has the turn.
	wanted bool
}

// group is a budget and the queues that share it.
type group struct {
	name     string
	pool     string // inference pool, "" if there is none
	label    string // of metrics: the pool, or what stands for it
	budget   *budget.Group
	inputs   []input
	states   []*inputState
	queues   []*Queue
	patience budget.Patience // this and closed are of who has the turn
	closed   bool            // as last logged
	asks     chan question   // about messages, for gates; nil if none has to be asked
	asked    chan question   // the same, answered
	asking   bool            // there is one between; this and hungry are of who has the turn
	hungry   bool            // when it was looked at last, a queue had no worker
}

// inputState is what is known of reading one input.
type inputState struct {
	available atomic.Bool
	logged    time.Time // of the poller's goroutine
}

// errors with which requests in flight are cancelled.
var (
	errStopping        = errors.New("dispatch: stopping")
	errClientCancelled = errors.New("dispatch: cancelled by its producer")
)

// New returns a dispatcher, with its metrics registered. Nothing runs yet and nothing is connected.
func New(cfg Config, getenv func(string) string, reg prometheus.Registerer, log *slog.Logger) (*Dispatcher, error) {
	t, err := cfg.transport(getenv)
	if err != nil {
		return nil, err
	}
	if cfg.CacheTTL > 0 {
		cfg.MetricsPoll = cfg.CacheTTL
	}
	d := &Dispatcher{
		cfg: cfg, log: log, transport: t, queues: t.Queues, pools: map[string]*workers{}, held: map[*lease]context.CancelCauseFunc{},
		gates: map[string]redis.UniversalClient{}, wake: make(chan struct{}, 1), leaving: make(chan struct{}), last: make(chan struct{}),
		rng: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())),
	}
	if d.store, err = connect(t, cfg); err != nil {
		return nil, err
	}
	asks, err := newAsker(cfg.Prometheus, cfg.QueryTimeout, log)
	if err != nil {
		return nil, fmt.Errorf("metrics-tls-ca: %w", err)
	}
	pools, err := cfg.pools()
	if err != nil {
		return nil, err
	}
	total := 0
	for _, p := range pools {
		w := &workers{pool: p}
		w.free.Store(int64(p.Workers))
		total += p.Workers
		b := &builder{cfg: cfg, workers: p.Workers, metrics: asks, clients: d.gates, owner: "worker pool " + p.ID}
		if p.GateType != "" {
			g, err := b.build(p.GateType, p.GateParams, 0)
			if err != nil {
				return nil, fmt.Errorf("pool-config-file: pool %q: %w", p.ID, err)
			}
			w.admit = g.whole()
		}
		d.watched, d.quotas = append(d.watched, b.watched...), append(d.quotas, b.quotas...)
		d.pools[p.ID] = w
	}
	if err := d.makeGroups(asks); err != nil {
		return nil, fmt.Errorf("transport-config: %w", err)
	}
	if err := d.makeGateways(total); err != nil {
		return nil, err
	}
	if d.merge, err = readMerge(cfg.MergeFile); err != nil {
		return nil, fmt.Errorf("request-merge-policy-config-file: %w", err)
	}
	if d.transform, err = readTransforms(cfg.TransformFile); err != nil {
		return nil, fmt.Errorf("transform-config-file: %w", err)
	}
	d.exchanges, d.closeLast = []*exchange{{d: d}, {d: d}}, sync.OnceFunc(func() { close(d.last) })
	d.metrics = newMetrics(d)
	if err := reg.Register(d.metrics); err != nil {
		return nil, err
	}
	return d, nil
}

// connect makes the client of the queues.
func connect(t *Transport, cfg Config) (*store, error) {
	opt := &redis.UniversalOptions{Addrs: t.Addrs, MasterName: t.MasterName, IsClusterMode: t.Mode == "cluster", ContextTimeoutEnabled: true}
	if t.URL != "" {
		one, err := redis.ParseURL(t.URL)
		if err != nil {
			return nil, errors.New("transport-config: url is no Redis URL") // err may hold the password
		}
		if len(opt.Addrs) == 0 {
			opt.Addrs = []string{one.Addr}
		}
		opt.Username, opt.Password, opt.DB, opt.TLSConfig = one.Username, one.Password, one.DB, one.TLSConfig
	}
	if opt.TLSConfig == nil {
		opt.Dialer = dialQuietly
	}
	switch t.Mode {
	case "standalone", "cluster":
	case "sentinel":
		if t.MasterName == "" {
			return nil, errors.New("transport-config: mode sentinel needs master_name")
		}
	default:
		return nil, fmt.Errorf("transport-config: mode %q is none of standalone, cluster, sentinel", t.Mode)
	}
	return &store{redis: redis.NewUniversalClient(opt), cluster: t.Mode == "cluster", deadMax: int64(cfg.DeadLetterMax)}, nil
}

// makeGroups builds the gates of queues and joins queues into groups.
func (d *Dispatcher) makeGroups(asks *asker) error {
	byName := map[string]*group{}
	for _, q := range d.queues {
		w := d.pools[q.PoolID]
		if w == nil {
			return fmt.Errorf("queue %q: worker_pool_id %q is no pool", q.Name, q.PoolID)
		}
		b := &builder{cfg: d.cfg, workers: w.Workers, metrics: asks, clients: d.gates, owner: "queue " + q.ID}
		g, err := b.build(q.GateType, q.GateParams, 0)
		if err != nil {
			return fmt.Errorf("queue %q: %w", q.Name, err)
		}
		d.watched, d.quotas = append(d.watched, b.watched...), append(d.quotas, b.quotas...)
		q.workers, q.gate, q.holds = w, g, map[string]time.Time{}
		name := cmp.Or(q.Group, g.pool, "queue "+q.ID)
		grp := byName[name]
		if grp == nil {
			grp = &group{name: name, pool: g.pool}
			byName[name] = grp
			d.groups = append(d.groups, grp)
		}
		q.group = grp
		grp.queues = append(grp.queues, q)
		for _, in := range g.inputs {
			if !slices.ContainsFunc(grp.inputs, func(o input) bool { return o.id == in.id }) {
				grp.inputs = append(grp.inputs, in)
			}
		}
	}
	for _, g := range d.groups {
		if len(g.inputs) == 0 {
			most := map[*workers]bool{}
			capacity := 0
			for _, q := range g.queues {
				if !most[q.workers] {
					most[q.workers] = true
					capacity += q.workers.Workers
				}
			}
			g.inputs = []input{{id: "constant", name: "constant", source: budget.Source{Accounting: budget.Cap}, reader: constantReader{float64(capacity)}, every: time.Minute}}
		}
		for _, in := range g.inputs {
			if in.source.Rule.Unit != g.inputs[0].source.Rule.Unit {
				return fmt.Errorf("budget_group %q: gates count in %v and in %v", g.name, g.inputs[0].source.Rule.Unit, in.source.Rule.Unit)
			}
		}
		g.begin(d.cfg)
	}
	for _, g := range d.groups {
		// In a cluster claims cannot look for cancellations.
		if d.store.cluster || slices.ContainsFunc(g.queues, func(q *Queue) bool { return q.gate.admit != nil }) {
			g.asks, g.asked, d.gated = make(chan question, 1), make(chan question, 1), true
		}
	}
	d.label()
	return nil
}

// begin makes the budget of the group's inputs.
func (g *group) begin(cfg Config) {
	var sources []budget.Source
	for _, in := range g.inputs {
		sources = append(sources, in.source)
		g.states = append(g.states, &inputState{})
	}
	g.budget = budget.NewGroup(budget.Latch{
		Config: budget.LatchConfig{Cooldown: cfg.OverloadCooldown, Settle: g.inputs[0].settle, IgnoreLate: cfg.IgnoreLateSheds, Ramp: g.inputs[0].ramp},
		Rand:   rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())),
	}, sources...)
}

// read are all groups with sources to be read.
func (d *Dispatcher) read() []*group { return slices.Concat(d.groups, d.watched) }

// label has no two groups called the same: a pool that two of them have, or one that is called like a
// group, stands for neither.
func (d *Dispatcher) label() {
	all := d.read()
	for _, g := range all {
		shared := slices.ContainsFunc(all, func(o *group) bool { return o != g && (o.pool == g.pool || o.name == g.pool) })
		if g.label = g.pool; g.pool == "" || shared {
			g.label = g.name
		}
	}
}

// announce logs what was resolved.
func (d *Dispatcher) announce() {
	for _, q := range d.queues {
		if q.GateType == "constant" {
			d.log.Warn("a queue has no gate: it is sent as fast as workers are free", "queue", q.Name)
		}
	}
	for _, g := range d.read() {
		for _, in := range g.inputs {
			r := in.source.Rule
			d.log.Info("gate", "group", g.name, "source", in.name, "baseline", r.Baseline, "unit", r.Unit.String(), "closing_load_per_endpoint", in.per*(1-r.Baseline))
			if in.source.Fallback > 0 {
				d.log.Warn("a gate stays open while it cannot be read", "group", g.name, "source", in.name, "fallback", in.source.Fallback)
			}
		}
	}
}

// Run dispatches until ctx ends. Then nothing more is claimed, requests in flight get DrainTimeout, and
// what is left goes back into its queue. After it, nothing that it started is left, and no lease.
func (d *Dispatcher) Run(ctx context.Context) error {
	d.announce()
	requests, cut := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cut(nil)
	d.requests = requests
	keeping, stopKeeping := context.WithCancel(context.WithoutCancel(ctx))
	var kept sync.WaitGroup
	kept.Go(func() { d.heartbeats(keeping) })
	for _, g := range d.read() {
		for i := range g.inputs {
			kept.Go(func() { d.poll(keeping, g, i) })
		}
	}
	for _, q := range d.quotas {
		kept.Go(func() { q.renewals(keeping) })
	}
	if d.cfg.ImportRetries && !d.cfg.DryRun {
		d.importRetries(ctx)
	}
	var begun sync.WaitGroup
	begun.Go(func() { d.sweeps(ctx) })
	for _, g := range d.groups {
		if g.asks != nil {
			kept.Go(func() { d.asks(ctx, keeping, g) })
		}
	}
	kept.Go(func() { d.watch(ctx, keeping) })
	d.ready.Store(true)
	<-ctx.Done()
	d.ready.Store(false)
	d.log.Info("stopping", "in_flight", d.inFlight())
	close(d.leaving)
	d.nudge()
	begun.Wait()
	<-d.last
	idle := make(chan struct{})
	d.mu.Lock()
	if len(d.held) == 0 {
		close(idle)
	} else {
		d.idle = idle
	}
	d.mu.Unlock()
	timer := time.NewTimer(d.cfg.DrainTimeout)
	defer timer.Stop()
	select {
	case <-idle:
	case <-timer.C:
		d.log.Warn("drain timeout: requests go back into their queues", "requests", d.inFlight())
	}
	cut(errStopping)
	<-idle
	d.mu.Lock()
	d.over = true
	for _, w := range d.parked {
		close(w.told)
	}
	d.parked = nil
	d.mu.Unlock()
	d.working.Wait()
	stopKeeping()
	kept.Wait()
	for _, g := range d.groups {
		select {
		case a := <-g.asked: // when nobody could claim any more
			d.letGo(a.going)
		default:
		}
	}
	for _, g := range d.gateways {
		g.close()
	}
	err := d.store.redis.Close()
	for _, c := range d.gates {
		err = errors.Join(err, c.Close())
	}
	return err
}

func (d *Dispatcher) inFlight() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.held)
}

func (d *Dispatcher) step(s Step, m *message) {
	if d.Witness != nil {
		d.Witness(s, m.id)
	}
}
