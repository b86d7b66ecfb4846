// Package monitor listens to workers and writes what it learns into core state: their load
// and capacity from their metrics pages and from load events, whether they are healthy, and
// which models they serve.
package monitor

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/busy"
	"spillway/worker"
)

// ErrRunning means that Run was called while another call has not returned.
var ErrRunning = errors.New("monitor: already running")

// KvWorkerMonitor watches workers and keeps the busy lists of their partitions up to date. The
// exported fields are set before Run and read-only afterwards. Its methods are safe for
// concurrent use, also before and during Run.
type KvWorkerMonitor struct {
	// Register is called with a new record when the names of a worker or its context length
	// have become known or have changed. It registers the record and returns the list of its
	// partition. It need not call Watch, and has to check that the worker is still wanted,
	// because Forget may come in between. On an error the old record stays, and the call
	// comes again. If nil, names are not looked at.
	Register func(*worker.Worker) (*busy.List, error)
	// Needed tells whether anything depends on fresh samples; if not, workers are scraped
	// every 15 s, for their capacity. It is asked in each round. If nil, samples are needed.
	Needed func() bool
	// Held tells whether the tracker holds reservations for a rank that are so old (30 s) that
	// the engine should know of them. If nil, nothing is compared.
	Held func(r worker.Rank, now time.Time) bool
	// Restarted is told of workers whose pages show that their process has begun anew. If nil,
	// nobody is.
	Restarted func(worker.ID)
	// StaleIsBusy is that --stale-policy is busy, so that an outage of all scrapes refuses
	// everything and is worth an error.
	StaleIsBusy bool

	cfg     Config
	log     *slog.Logger
	metrics *metrics
	get     *getter
	changed chan struct{} // holds one token while Run has changes to look at

	mu      sync.Mutex // guards the fields below; taken before the lock of a watch
	watches map[worker.ID]*watch
	running bool
}

// New returns a monitor that watches nothing yet. cfg must be valid. reg must not have
// another monitor's metrics.
func New(cfg Config, log *slog.Logger, reg prometheus.Registerer) *KvWorkerMonitor {
	return &KvWorkerMonitor{
		cfg: cfg, log: log, metrics: newMetrics(reg, cfg.Histograms), get: newGetter(),
		changed: make(chan struct{}, 1), watches: map[worker.ID]*watch{},
	}
}

// Watch begins to watch a worker, which must be in list already. If list is nil, the worker's
// names are to be learnt from it: it is asked until it answers, then Register is called, and
// only then is it scraped and probed. The same worker again changes nothing; a new record
// under its ID takes the place of the old one.
func (m *KvWorkerMonitor) Watch(w *worker.Worker, list *busy.List) {
	m.mu.Lock()
	defer m.mu.Unlock()
	defer m.poke()
	old := m.watches[w.ID]
	var promised shares
	if old != nil {
		if old.takeOver(w, list) {
			return
		}
		promised = old.forget() // the list keeps it too
	}
	m.watches[w.ID] = &watch{
		id: w.ID, metrics: m.metrics.of(w.Name), record: w, list: list, learns: list == nil, shares: promised,
	}
	if old != nil {
		m.dropLocked(old)
	}
}

// Forget ends watching the worker of that ID, if it is watched. When it returns, no list hears
// of the worker any more.
func (m *KvWorkerMonitor) Forget(id worker.ID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	w := m.watches[id]
	if w == nil {
		return
	}
	delete(m.watches, id)
	w.forget()
	m.dropLocked(w)
	m.poke()
}

// dropLocked deletes the series of a watch that has been taken out, unless its worker's name
// has gone over to another one.
func (m *KvWorkerMonitor) dropLocked(out *watch) {
	record, _ := out.target()
	for _, w := range m.watches {
		if r, _ := w.target(); r.Name == record.Name {
			return
		}
	}
	m.metrics.drop(record.Name)
}

// poke has Run look at what changed.
func (m *KvWorkerMonitor) poke() {
	select {
	case m.changed <- struct{}{}:
	default:
	}
}

// tickEvery is the longest time between two calls of a list's Tick: marks and inhibitions are
// set by others, who do not say so here.
const tickEvery = 100 * time.Millisecond

// Run watches until ctx ends and then returns nil; nothing that it started is left. It
// returns ErrRunning if it is running already.
func (m *KvWorkerMonitor) Run(ctx context.Context) error {
	m.mu.Lock()
	if m.running {
		m.mu.Unlock()
		return ErrRunning
	}
	m.running = true
	m.mu.Unlock()

	ctx, cancel := context.WithCancel(ctx)
	var loops sync.WaitGroup
	defer func() {
		cancel()
		loops.Wait()
		m.get.client.CloseIdleConnections()
		m.mu.Lock()
		m.running = false
		m.mu.Unlock()
	}()

	started := map[worker.ID]running{}
	lists := m.reconcile(ctx, started, &loops)
	if m.cfg.EventPlane == "zmq" {
		loops.Go(func() { m.listen(ctx) })
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	var outage outageLog
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-m.changed:
			lists = m.reconcile(ctx, started, &loops)
		case <-timer.C:
			now := time.Now()
			wait := tickEvery
			for _, list := range lists {
				if next, ok := list.Tick(now); ok {
					wait = min(wait, max(next.Sub(now), time.Millisecond))
				}
			}
			m.tellOutage(&outage, now)
			timer.Reset(wait)
		}
	}
}

// reconcile starts and stops loops so that they are those of the watched workers, and returns
// the lists that these are in.
func (m *KvWorkerMonitor) reconcile(ctx context.Context, started map[worker.ID]running, loops *sync.WaitGroup) []*busy.List {
	m.mu.Lock()
	watches := maps.Clone(m.watches)
	m.mu.Unlock()
	for id, r := range started {
		if watches[id] != r.watch {
			r.stop()
			delete(started, id)
		}
	}
	lists := map[*busy.List]bool{}
	for id, w := range watches {
		if _, list := w.target(); list != nil {
			lists[list] = true
		}
		if _, ok := started[id]; ok {
			continue
		}
		ctx, stop := context.WithCancel(ctx)
		started[id] = running{w, stop}
		s := &scraper{m: m, w: w}
		loops.Go(func() { s.run(ctx) })
		loops.Go(func() { m.probe(ctx, w) })
		loops.Go(func() { m.learn(ctx, w) })
	}
	return slices.Collect(maps.Keys(lists))
}

func (m *KvWorkerMonitor) needed() bool { return m.Needed == nil || m.Needed() }

// outageLog remembers when the fleet was last looked at and last complained about.
type outageLog struct{ looked, logged time.Time }

// tellOutage logs that no worker can be scraped any more, where that means refusing all
// requests; at most once per 10 s.
func (m *KvWorkerMonitor) tellOutage(o *outageLog, now time.Time) {
	if !m.StaleIsBusy || now.Sub(o.looked) < time.Second {
		return
	}
	o.looked = now
	m.mu.Lock()
	watches := slices.Collect(maps.Values(m.watches))
	m.mu.Unlock()
	var cause *failure
	down := 0
	for _, w := range watches {
		why, known := w.down()
		if !known {
			continue // never heard of, so not busy by being silent
		}
		if why == nil {
			return
		}
		cause = why
		down++
	}
	if down == 0 || now.Sub(o.logged) < 10*time.Second {
		return
	}
	o.logged = now
	m.log.Error("no worker can be scraped, so all count as busy (--stale-policy=busy)",
		"workers", down, "reason", cause.reason, "err", cause.err)
}
