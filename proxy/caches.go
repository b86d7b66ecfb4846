package proxy

import (
	"maps"
	"math"
	"sync/atomic"
	"time"

	"spillway/busy"
	"spillway/kvindex"
	"spillway/router"
	"spillway/worker"
)

// caches is what the server knows of the caches of workers: for mode kv, where they count.
type caches struct {
	index    *kvindex.Partitions // nil while caches do not count
	routed   kvindex.RoutedConfig
	events   bool // those of engines are followed where there are any
	listen   func(*worker.Worker, *kvindex.Partition)
	unlisten func(worker.ID)

	known atomic.Pointer[map[worker.Partition]*cache] // replaced under directory.mu
}

// cache is what ranks of one partition have cached. Requests read it while it changes: what they then
// ask, or write, is of no use and does no harm.
type cache struct {
	blocks   *kvindex.Partition // set once
	routed   *kvindex.Routed    // writes into blocks what decisions make likely; set once
	size     atomic.Uint32      // tokens per block
	byEvents atomic.Bool        // blocks are written by who listens to engines, else by routed

	// Guarded by directory.mu.
	open     bool // there are workers
	listened map[worker.ID]bool
}

// IndexBy has what workers have cached decide too, in mode kv unless a cached block is worth nothing. It
// is called before any worker joins.
func (s *Server) IndexBy(index *kvindex.Partitions) {
	cfg := s.router.Config()
	if cfg.Mode != router.KV || cfg.Cost.Weights(nil).Credit == 0 {
		return
	}
	s.caches.index, s.caches.routed = index, kvindex.DefaultRoutedConfig()
	s.caches.routed.TTL = time.Duration(min(cfg.TTLSecs, maxTTLSecs) * float64(time.Second))
}

// maxTTLSecs is a century: no time.Duration is much longer.
const maxTTLSecs = 100 * 365 * 24 * 60 * 60

// ListenBy has the KV events of workers followed: listen is called when those of a worker are to be
// written into an index, of blocks of so many tokens, and unlisten when no longer, before its blocks are
// forgotten. Both are called one at a time, and must not call the server. Listening to a worker begins
// anew when its record changes in what matters to that, or when the size of blocks turns out to be
// another one. It is called before any worker joins.
func (s *Server) ListenBy(listen func(*worker.Worker, *kvindex.Partition), unlisten func(worker.ID)) {
	s.caches.events = s.router.Config().Cost.UseKVEvents
	s.caches.listen, s.caches.unlisten = listen, unlisten
}

// of is what is known of a partition, nil if caches do not count there.
func (c *caches) of(key worker.Partition) *cache {
	if known := c.known.Load(); known != nil {
		return (*known)[key]
	}
	return nil
}

// expire forgets decisions whose time is over.
func (c *caches) expire(now time.Time) {
	if known := c.known.Load(); known != nil {
		for _, one := range *known {
			one.routed.Expire(now)
		}
	}
}

// collectCaches tells what mode kv knows of caches, and what that costs.
func (m *metrics) collectCaches(p page, id labels) {
	f := m.families
	p.histogram(f.hashing, id, m.hashing)
	p.histogram(f.chaining, id, m.chaining)
	p.histogram(f.matching, id, m.matching)
	p.histogram(f.hitRate, id, m.hitRate)
	p.count(f.unrecorded, nil, m.unrecorded.Load())
	p.count(f.decisionLimit, nil, uint64(m.server.caches.routed.MaxEntries))
	if known := m.server.caches.known.Load(); known != nil {
		for key, c := range *known {
			p.count(f.decisionBlocks, labeled("model", key.Model, "tenant", key.Tenant), uint64(c.routed.Entries()))
		}
	}
}

// putLocked makes a cache known, or with nil unknown.
func (c *caches) putLocked(key worker.Partition, one *cache) {
	next := map[worker.Partition]*cache{}
	if known := c.known.Load(); known != nil {
		next = maps.Clone(*known)
	}
	if next[key] = one; one == nil {
		delete(next, key)
	}
	c.known.Store(&next)
}

// enrolLocked has the router know a worker, or its changed record.
func (d *directory) enrolLocked(w *worker.Worker) (*busy.List, error) {
	r := d.server.router
	old := r.Catalog().Find(w.ID)
	part, err := r.Register(w, time.Now())
	if err != nil {
		return nil, err
	}
	if old != nil && !sameCache(old, w) {
		d.emptiedLocked(old)
	}
	if err := d.followLocked(w.Partition()); err != nil {
		d.server.log.Error("what workers have cached does not count", "model", w.Models[0], "tenant", w.Tenant, "err", err)
	}
	return part.Busy, nil
}

// dismissLocked has the router forget a worker.
func (d *directory) dismissLocked(id worker.ID) {
	r := d.server.router
	old := r.Catalog().Find(id)
	r.Unregister(id, time.Now())
	if old != nil {
		d.emptiedLocked(old)
		_ = d.followLocked(old.Partition()) // there is no need for more than there was
	}
}

// sameCache tells whether what is known of the cache of a worker stays true with another record.
func sameCache(a, b *worker.Worker) bool {
	return a.Partition() == b.Partition() && a.Endpoint == b.Endpoint && a.RankRouting == b.RankRouting &&
		a.DPStart == b.DPStart && a.DPSize == b.DPSize && maps.Equal(a.KVEvents, b.KVEvents) && maps.Equal(a.KVReplay, b.KVReplay)
}

// emptiedLocked forgets what a worker has cached.
func (d *directory) emptiedLocked(w *worker.Worker) {
	c := d.server.caches.of(w.Partition())
	if c == nil {
		return
	}
	d.unlistenLocked(c, w.ID)
	c.blocks.Index.RemoveWorker(w.ID)
}

func (d *directory) unlistenLocked(c *cache, id worker.ID) {
	if c.listened[id] {
		delete(c.listened, id)
		d.server.caches.unlisten(id)
	}
}

// follow does followLocked for all partitions: workers may have told meanwhile how large their blocks are.
func (d *directory) follow() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.server.router.Partitions("", func(p *router.Partition) {
		_ = d.followLocked(p.Key) // it was logged when the worker came
		if c := d.server.caches.of(p.Key); c != nil {
			c.routed.Limit(roomOf(p.Busy))
		}
	})
	if known := d.server.caches.known.Load(); known != nil {
		for key := range *known {
			_ = d.followLocked(key)
		}
	}
}

// followLocked makes of the present workers of a partition how their caches are known. After an error
// caches do not count there.
func (d *directory) followLocked(key worker.Partition) error {
	all := &d.server.caches
	if all.index == nil {
		return nil
	}
	c, part, workers := all.of(key), d.server.router.Partition(key), d.server.router.Catalog().In(key)
	if len(workers) == 0 || part == nil {
		if c != nil && c.open {
			d.restartLocked(key, c)
		} else if c != nil && c.routed.Entries() == 0 { // nothing is left that would have to expire
			all.putLocked(key, nil)
		}
		return nil
	}
	size, events := commonBlockSize(part.Busy, workers), all.events && worker.AllPublishKVEvents(workers)
	if c == nil || !c.open || size != c.size.Load() || events != c.byEvents.Load() {
		if c != nil {
			d.restartLocked(key, c)
		}
		blocks, err := all.index.Register(key, int(size))
		if err != nil {
			return err
		}
		if c == nil || c.blocks != blocks {
			c = &cache{blocks: blocks, routed: blocks.Index.Routed(all.routed), listened: map[worker.ID]bool{}}
		}
		c.size.Store(size)
		c.byEvents.Store(events)
		c.open = true
		all.putLocked(key, c)
	}
	for _, w := range workers {
		if events && !c.listened[w.ID] {
			c.listened[w.ID] = true
			all.listen(w, c.blocks)
		}
	}
	return nil
}

// roomOf is how many KV blocks ranks have, as far as that is known: no rank is taken to have cached more.
func roomOf(list *busy.List) map[worker.Rank]int {
	room := map[worker.Rank]int{}
	for _, w := range list.Workers(time.Now()) {
		whole, all := 0, true
		for i := range w.Ranks {
			n := int(min(w.Ranks[i].Report.TotalBlocks, math.MaxInt32))
			if whole += n; n > 0 {
				room[worker.Rank{Worker: w.ID, DP: w.Ranks[i].DP}] = n
			} else {
				all = false
			}
		}
		if all && whole > 0 { // where the engine picks the rank
			room[worker.Rank{Worker: w.ID, DP: worker.AnyDP}] = whole
		}
	}
	return room
}

// restartLocked forgets all that is cached in a partition.
func (d *directory) restartLocked(key worker.Partition, c *cache) {
	c.open = false
	for id := range c.listened {
		d.unlistenLocked(c, id)
	}
	d.server.caches.index.Release(key)
}

// commonBlockSize is the size of blocks that most of the workers have, in tokens; of two, that of the
// first worker. One that has not told yet counts as if it had the usual ones.
func commonBlockSize(list *busy.List, workers []*worker.Worker) uint32 {
	counts := map[uint32]int{}
	for _, w := range workers {
		counts[list.BlockSize(w.ID)]++
	}
	best := list.BlockSize(workers[0].ID)
	for _, w := range workers { // in their order, so that it is always the same
		if size := list.BlockSize(w.ID); counts[size] > counts[best] {
			best = size
		}
	}
	return best
}
