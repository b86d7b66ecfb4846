// Package router chooses a rank for a request and books it. It does no I/O, starts no goroutine
// and never reads the clock: callers pass now.
package router

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"spillway/busy"
	"spillway/tracker"
	"spillway/worker"
)

// Mode is the rule by which a worker is picked among the free ones.
type Mode string

// The modes. Loads compared are live reservations; ties are broken at random.
const (
	RoundRobin  Mode = "round-robin"
	Random      Mode = "random"
	PowerOfTwo  Mode = "power-of-two" // the less loaded of two random workers
	LeastLoaded Mode = "least-loaded"
	Direct      Mode = "direct" // serves pinned requests only
	KV          Mode = "kv"     // the rank with the lowest cost of CostConfig
)

// Config is what an operator sets.
type Config struct {
	Mode              Mode `koanf:"router-mode" dyn:"DYN_ROUTER_MODE" usage:"how a worker is picked: round-robin, random, power-of-two, least-loaded, direct or kv"`
	TrackOutputBlocks bool `koanf:"router-track-output-blocks" dyn:"DYN_ROUTER_TRACK_OUTPUT_BLOCKS" bad:"unreadable" usage:"book KV blocks for generated tokens too, not only for prompts"`
	QueueSize         int  `koanf:"queue-size" usage:"requests of a model that may wait while all its workers are busy; 0 refuses them at once"`

	// TTLSecs is how long a prompt that was sent to a rank is taken to stay in its cache, where engines
	// publish no KV events: at least 0 seconds.
	TTLSecs float64 `koanf:"router-ttl-secs" dyn:"DYN_ROUTER_TTL_SECS" bad:"unreadable" usage:"how long a prompt is taken to be cached where it was sent, in seconds; for mode kv without KV events"`

	// SessionTTLSecs has the requests of a session go to the same rank, until the session has been idle for
	// so long, from 1 s to a year; nil is off.
	SessionTTLSecs *uint32 `koanf:"router-session-affinity-ttl-secs" dyn:"DYN_ROUTER_SESSION_AFFINITY_TTL_SECS" bad:"unreadable" usage:"requests of a session (x-dynamo-session-id) go to the same rank while there is room, until it has been idle for so many seconds; unset is off"`

	Cost  CostConfig  `koanf:",squash"`
	Queue QueueConfig `koanf:",squash"`
}

// maxQueueSize bounds what one look at a queue may cost.
const maxQueueSize = 65536

// DefaultConfig is round-robin with output blocks tracked.
func DefaultConfig() Config {
	return Config{Mode: RoundRobin, TrackOutputBlocks: true, TTLSecs: 120, Cost: DefaultCostConfig(), Queue: DefaultQueueConfig()}
}

// Resolved is the Config with what its presets stand for. Output is not tracked without prompts.
func (c Config) Resolved() Config {
	if c.Cost.LoadAware {
		c.Mode = KV
		c.Cost.OverlapScoreCredit, c.Cost.OverlapScoreWeight = 0, nil
		c.Cost.UseKVEvents, c.Cost.AssumeKVReuse = false, false
		c.Cost.TrackActiveBlocks, c.Cost.TrackPrefillTokens = true, true
	}
	c.TrackOutputBlocks = c.TrackOutputBlocks && c.Cost.TrackActiveBlocks
	return c
}

// Validate returns all findings, each beginning with its key.
func (c Config) Validate() error {
	errs := []error{c.Cost.Validate(), c.Queue.Validate(), atLeast0("router-ttl-secs", c.TTLSecs), checkSessionTTL(c.SessionTTLSecs)}
	if c.QueueSize < 0 || c.QueueSize > maxQueueSize {
		errs = append(errs, fmt.Errorf("queue-size: %d is not within 0..%d", c.QueueSize, maxQueueSize))
	}
	switch c.Mode {
	case RoundRobin, Random, PowerOfTwo, LeastLoaded, Direct, KV:
	default:
		errs = append(errs, fmt.Errorf("router-mode: %q is none of round-robin, random, power-of-two, least-loaded, direct, kv", c.Mode))
	}
	return errors.Join(errs...)
}

// Router holds the partitions and decides within them. It is safe for concurrent use.
type Router struct {
	cfg       Config
	busyCfg   busy.Config
	synthetic *Profile // of models that no policy file has told of
	view      atomic.Pointer[view]

	mu         sync.Mutex // guards changes of view and the fields below; taken before a partition's lock
	rng        *rand.Rand
	thresholds map[string]busy.Thresholds // by canonical model; kept while the process lives
	places     map[string]*places         // likewise
}

// view is one immutable picture: a request works with the one it began with.
type view struct {
	catalog    *worker.Catalog
	partitions map[worker.Partition]*Partition
}

// New returns a router that knows the models of catalog and, until Register, no worker. rng
// breaks ties; it belongs to the router from now on.
func New(cfg Config, busyCfg busy.Config, catalog *worker.Catalog, rng *rand.Rand) *Router {
	r := &Router{
		cfg: cfg.Resolved(), busyCfg: busyCfg, rng: rng, thresholds: map[string]busy.Thresholds{}, places: map[string]*places{},
		synthetic: syntheticProfile(cfg.Queue.QueueThreshold, cfg.Queue.QueuePolicy),
	}
	r.view.Store(&view{catalog: catalog, partitions: map[worker.Partition]*Partition{}})
	return r
}

// Register makes a worker known, or replaces its record: its load and reports stay unless its
// model or tenant changed. It returns the partition that the worker is now in, and fails if a
// model name would mean two things.
func (r *Router) Register(w *worker.Worker, now time.Time) (*Partition, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.view.Load()
	catalog, err := old.catalog.With(w)
	if err != nil {
		return nil, fmt.Errorf("router: register: %w", err)
	}
	if was := old.catalog.Find(w.ID); was != nil && was.Partition() != w.Partition() {
		old.partitions[was.Partition()].unregister(w.ID, now)
	}
	p := old.partitions[w.Partition()]
	if p == nil {
		p = r.newPartitionLocked(w.Partition(), now)
	}
	p.register(w, now)
	r.publishLocked(catalog, p)
	return p, nil
}

// Unregister forgets a worker with its load and reports. Requests that it still answers go on;
// their reservations are gone. Unknown IDs are ignored.
func (r *Router) Unregister(id worker.ID, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := r.view.Load()
	w := old.catalog.Find(id)
	if w == nil {
		return
	}
	old.partitions[w.Partition()].unregister(id, now)
	r.publishLocked(old.catalog.Without(id), nil)
}

// publishLocked swaps the view: the partitions that still have workers or requests that wait for
// one and have to be told, and added.
func (r *Router) publishLocked(catalog *worker.Catalog, added *Partition) {
	next := &view{catalog: catalog, partitions: map[worker.Partition]*Partition{}}
	for key, p := range r.view.Load().partitions {
		if len(p.Busy.Snapshot().Registered) > 0 || p.Waiting() > 0 {
			next.partitions[key] = p
		}
	}
	if added != nil {
		next.partitions[added.Key] = added
	}
	r.view.Store(next)
}

func (r *Router) newPartitionLocked(key worker.Partition, now time.Time) *Partition {
	expiry := tracker.DefaultConfig()
	if secs := r.cfg.Cost.ActiveRequestExpirySecs; secs > 0 {
		expiry.ExpireAfter = time.Duration(secs) * time.Second
	}
	expiry.CheckEvery = min(expiry.CheckEvery, expiry.ExpireAfter/10)
	books := tracker.New(expiry)
	if r.places[key.Model] == nil {
		r.places[key.Model] = &places{limit: cmp.Or(r.cfg.QueueSize, maxQueueSize), hold: r.cfg.QueueSize > 0}
	}
	profile := r.Profile(key.Model)
	p := &Partition{
		Key: key, Busy: busy.New(r.busyCfg, books), Tracker: books, places: r.places[key.Model],
		mode: r.cfg.Mode, cost: r.cfg.Cost, rng: rand.New(rand.NewPCG(r.rng.Uint64(), r.rng.Uint64())),
		profile: profile, refresh: r.cfg.Queue.refreshAfter(), queue: newQueue(profile, now),
	}
	if secs := r.cfg.SessionTTLSecs; secs != nil {
		p.sessions = newSessions(time.Duration(*secs)*time.Second, maxSessions)
	}
	p.Busy.SetThresholds(r.thresholdsLocked(key.Model), now)
	return p
}

// Target is where a model name leads.
type Target struct {
	Model     string           // canonical
	Served    string           // what the worker is asked for
	Adapter   bool             // Served is an adapter of the model, as far as is known
	Partition *Partition       // nil while no worker is registered
	Only      []*worker.Worker // the workers that serve Served, by ID, or nil for all of the partition
}

// Resolve finds the target of a model name and tenant. It returns ErrUnknownModel.
func (r *Router) Resolve(model, tenant string) (Target, error) {
	v := r.view.Load()
	name, ok := v.catalog.Resolve(model, tenant)
	if !ok {
		return Target{}, ErrUnknownModel
	}
	t := Target{Model: name.Partition.Model, Served: name.Served, Adapter: name.Adapter, Partition: v.partitions[name.Partition]}
	if name.Narrowed {
		t.Only = name.Workers
		if len(t.Only) == 0 {
			t.Partition = nil
		}
	}
	return t, nil
}

// Config is what the router was made with, Resolved.
func (r *Router) Config() Config { return r.cfg }

// TracksOutput tells whether KV blocks of generated tokens are to be booked.
func (r *Router) TracksOutput() bool { return r.cfg.TrackOutputBlocks }

// QueueSize is how many requests of a model may wait.
func (r *Router) QueueSize() int { return r.cfg.QueueSize }

// Queues tells whether requests may have to wait: while all workers are busy, or while all ranks
// are full to their class.
func (r *Router) Queues() bool {
	return r.cfg.QueueSize > 0 || r.synthetic.Queues() || r.cfg.Queue.Policies.queues()
}

// Profile is the classes in which requests of a model wait, by its canonical name.
func (r *Router) Profile(model string) *Profile {
	if p := r.cfg.Queue.Policies.profile(model); p != nil {
		return p
	}
	return r.synthetic
}

// Catalog is the present picture of workers and models.
func (r *Router) Catalog() *worker.Catalog { return r.view.Load().catalog }

// Partition is that of a model, by its canonical name, and a tenant; nil while it has no worker.
func (r *Router) Partition(key worker.Partition) *Partition { return r.view.Load().partitions[key] }

// Partitions calls f for each partition of the model, or of all models if it is "".
func (r *Router) Partitions(model string, f func(*Partition)) {
	for key, p := range r.view.Load().partitions {
		if model == "" || key.Model == model {
			f(p)
		}
	}
}

// ThresholdsSet tells whether any model has a limit.
func (r *Router) ThresholdsSet() bool {
	set := r.busyCfg.Thresholds().Any()
	r.Partitions("", func(p *Partition) { set = set || p.Busy.Snapshot().ThresholdsSet })
	return set
}

// Held tells whether a rank has a reservation without progress since the given time.
func (r *Router) Held(rank worker.Rank, since time.Time) bool {
	w := r.Catalog().Find(rank.Worker)
	if w == nil {
		return false
	}
	p := r.view.Load().partitions[w.Partition()]
	return p != nil && p.Tracker.Held(rank, since)
}

// Thresholds are those of a model, by any of its names; false if it is unknown.
func (r *Router) Thresholds(name string) (model string, t busy.Thresholds, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	model, ok = r.view.Load().catalog.Canonical(name)
	if !ok {
		return "", busy.Thresholds{}, false
	}
	return model, r.thresholdsLocked(model), true
}

// SetThresholds replaces a model's thresholds by what change makes of them. When it returns,
// every worker of the model has been judged anew. It reports false for an unknown name.
func (r *Router) SetThresholds(name string, change func(busy.Thresholds) busy.Thresholds, now time.Time) (model string, old, t busy.Thresholds, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	model, ok = r.view.Load().catalog.Canonical(name)
	if !ok {
		return "", old, t, false
	}
	old = r.thresholdsLocked(model)
	t = change(old)
	r.thresholds[model] = t
	r.Partitions(model, func(p *Partition) { p.Busy.SetThresholds(t, now) })
	return model, old, t, true
}

// thresholdsLocked copies the start-up defaults to a model that is asked for the first time.
func (r *Router) thresholdsLocked(model string) busy.Thresholds {
	t, ok := r.thresholds[model]
	if !ok {
		t = r.busyCfg.Thresholds()
		r.thresholds[model] = t
	}
	return t
}
