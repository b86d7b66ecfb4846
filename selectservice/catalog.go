package selectservice

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"spillway/httperr"
	"spillway/kvindex"
	"spillway/router"
	"spillway/worker"
)

// catalog is what was said of workers, and which partitions those that are schedulable make. The
// index, the listeners and the router hear of a change while its lock is held, so that none keeps
// what another has dropped.
type catalog struct {
	cfg     Config
	setup   Setup
	link    *Link
	tenant  string // name of the field
	ready   atomic.Int64
	changed func(*router.Partition, time.Time) // wakes those who wait there; called with mu held

	mu         sync.RWMutex // guards the fields below
	records    map[uint64]*record
	partitions map[worker.Partition]*partition
	deletions  uint64
	stopped    bool
}

// partition is what is known of a model and tenant that have, or had, a schedulable worker.
type partition struct {
	key    worker.Partition
	blocks atomic.Pointer[kvindex.Partition]
	route  atomic.Pointer[router.Partition]
	eagle  atomic.Bool

	workers map[uint64]*record // the schedulable ones; guarded by the catalog's mu
	count   atomic.Int64       // of workers, for those who do not hold it

	classes []router.Class // of the queue
	refused []refusals     // by class, those whom its limits have kept from waiting
}

// refusals are counted by index in router.LimitKinds.
type refusals [len(router.LimitKinds)]atomic.Uint64

// refuse counts a refusal.
func (p *partition) refuse(why *router.ClassLimitError) {
	class := slices.IndexFunc(p.classes, func(c router.Class) bool { return c.Name == why.Class })
	if kind := slices.Index(router.LimitKinds[:], why.Kind); class >= 0 && kind >= 0 {
		p.refused[class][kind].Add(1)
	}
}

func (p *partition) blockSize() uint32 { return uint32(p.blocks.Load().BlockSize()) }

func (c *catalog) name(key worker.Partition) string {
	return fmt.Sprintf("model=%.256s %s=%.256s", key.Model, strings.TrimSuffix(c.tenant, "_id"), key.Tenant)
}

// find returns a partition, or nil if there never was one of that name.
func (c *catalog) find(key worker.Partition) *partition {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.partitions[key]
}

// any tells whether there ever was a partition.
func (c *catalog) any() bool {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return len(c.partitions) > 0
}

// usable returns a partition that has a schedulable worker.
func (c *catalog) usable(key worker.Partition) (*partition, *httperr.Error) {
	p := c.find(key)
	switch {
	case c.ready.Load() == 0:
		return nil, httperr.New(http.StatusServiceUnavailable, "no schedulable workers are available")
	case p == nil || p.count.Load() == 0:
		return nil, httperr.New(http.StatusServiceUnavailable, "no schedulable workers for "+c.name(key))
	}
	return p, nil
}

// schedulable returns a worker that requests of the partition may go to, or nil.
func (c *catalog) schedulable(p *partition, id uint64) *record {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return p.workers[id]
}

// matching are the partitions that a filter lets through, by model and tenant.
func (c *catalog) matching(f filter) []*partition {
	c.mu.RLock()
	defer c.mu.RUnlock()
	var all []*partition
	for key, p := range c.partitions {
		if f.passes(key) {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b *partition) int { return compare(a.key, b.key) })
	return all
}

// list are the records that a filter lets through, by model, tenant and ID.
func (c *catalog) list(f filter) []*record {
	c.mu.RLock()
	defer c.mu.RUnlock()
	var all []*record
	for _, r := range c.records {
		if f.passes(r.partition()) {
			all = append(all, r)
		}
	}
	slices.SortFunc(all, func(a, b *record) int {
		return cmp.Or(compare(a.partition(), b.partition()), cmp.Compare(a.id, b.id))
	})
	return all
}

func compare(a, b worker.Partition) int {
	return cmp.Or(strings.Compare(a.Model, b.Model), strings.Compare(a.Tenant, b.Tenant))
}

// filter is what the query of a list asks for; nil lets all through.
type filter struct{ model, tenant *string }

func (f filter) passes(key worker.Partition) bool {
	return (f.model == nil || *f.model == key.Model) && (f.tenant == nil || *f.tenant == key.Tenant)
}

func unknownWorker(id uint64) *httperr.Error {
	return httperr.New(http.StatusNotFound, fmt.Sprintf("worker %d not found", id))
}

var errStopping = httperr.New(http.StatusServiceUnavailable, "selection service is shutting down")

// put makes r the record of its worker, in place of another one.
func (c *catalog) put(r *record, now time.Time) (*record, *httperr.Error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return nil, errStopping
	}
	if c.records[r.id] == nil && len(c.records) >= c.cfg.MaxWorkers && !c.forgetLocked() {
		return nil, httperr.New(http.StatusConflict, fmt.Sprintf("worker_id: there are %d workers already, which is max-workers", len(c.records)))
	}
	return c.reconcileLocked(r, now), nil
}

// patch changes the record of a worker by what is said in by.
func (c *catalog) patch(id uint64, by *record, now time.Time) (*record, *httperr.Error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return nil, errStopping
	}
	was := c.records[id]
	if was == nil {
		return nil, unknownWorker(id)
	}
	return c.reconcileLocked(was.changed(by), now), nil
}

// remove ends a worker: nothing is sent to it any more, and what is booked on it is dropped.
func (c *catalog) remove(id uint64, now time.Time) (*record, *httperr.Error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.records[id]
	if was == nil {
		return nil, unknownWorker(id)
	}
	if was.lifecycle == schedulable {
		c.withdrawLocked(was, now)
	}
	next := *was
	c.deletions++
	next.lifecycle, next.reasons, next.deleted = unschedulable, nil, c.deletions
	c.records[id] = &next
	return &next, nil
}

// forgetLocked makes room for a record: that of the worker which was deleted first goes.
func (c *catalog) forgetLocked() bool {
	var oldest *record
	for _, r := range c.records {
		if r.lifecycle == unschedulable && (oldest == nil || r.deleted < oldest.deleted) {
			oldest = r
		}
	}
	if oldest != nil {
		delete(c.records, oldest.id)
	}
	return oldest != nil
}

// stop has put and patch refuse what comes from now on.
func (c *catalog) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stopped = true
}

// reconcileLocked finds out what r can be, and makes that so in the index, the listeners and the
// router. Reservations stay on those ranks that the worker keeps under the same partition. Blocks
// and listeners stay if nothing that concerns them has changed.
func (c *catalog) reconcileLocked(r *record, now time.Time) *record {
	was := c.records[r.id]
	if was != nil && was.lifecycle != schedulable {
		was = nil
	}
	r.lifecycle, r.deleted = incomplete, 0
	c.records[r.id] = r
	if r.reasons = r.missing(c.setup.Events, c.setup.Router.Profile(r.model).Queues(), c.cfg.MaxRanksPerWorker); len(r.reasons) > 0 {
		c.withdrawLocked(was, now)
		return r
	}
	if was != nil && was.partition() != r.partition() {
		c.withdrawLocked(was, now)
		was = nil
	}
	p, err := c.joinLocked(r)
	if err == nil && (was == nil || !r.sameCache(was)) {
		c.dropCacheLocked(was)
		err = c.listen(p, r)
	}
	if err == nil {
		var route *router.Partition
		if route, err = c.setup.Router.Register(r.worker(), now); err == nil {
			p.route.Store(route)
			if p.workers[r.id] == nil {
				p.count.Add(1)
				c.ready.Add(1)
			}
			p.workers[r.id] = r
			r.lifecycle = schedulable
			c.changed(route, now)
			return r
		}
		c.dropCacheLocked(r)
	}
	r.reasons = []string{"reconciliation failed: " + err.Error()}
	if was != nil {
		c.withdrawLocked(was, now)
	} else if p != nil && len(p.workers) == 0 {
		c.setup.Index.Withdraw(p.key)
	}
	return r
}

// joinLocked returns the partition for a worker whose record lacks nothing. The first schedulable
// worker of a partition decides the size of its blocks and whether they are Eagle's.
func (c *catalog) joinLocked(r *record) (*partition, error) {
	key := r.partition()
	p := c.partitions[key]
	others := 0
	if p != nil {
		if others = len(p.workers); p.workers[r.id] != nil {
			others--
		}
	}
	if others > 0 {
		switch size := p.blockSize(); {
		case size != *r.blockSize:
			return p, fmt.Errorf("block_size mismatch for %s: existing=%d requested=%d", c.name(key), size, *r.blockSize)
		case p.eagle.Load() != or(r.eagle, false):
			return p, fmt.Errorf("is_eagle mismatch for %s: existing=%v requested=%v", c.name(key), p.eagle.Load(), or(r.eagle, false))
		}
		return p, nil
	}
	c.setup.Index.Withdraw(key) // its blocks stay unless they are of another size
	blocks, err := c.setup.Index.Register(key, int(*r.blockSize))
	if err != nil {
		return p, err
	}
	if p == nil {
		classes := c.setup.Router.Profile(key.Model).Classes
		p = &partition{key: key, workers: map[uint64]*record{}, classes: classes, refused: make([]refusals, len(classes))}
		c.boundLocked()
		c.partitions[key] = p
	}
	p.blocks.Store(blocks)
	p.eagle.Store(or(r.eagle, false))
	return p, nil
}

// boundLocked forgets partitions that the index has forgotten: they have neither workers nor blocks.
func (c *catalog) boundLocked() {
	if len(c.partitions) < c.setup.MaxPartitions {
		return
	}
	maps.DeleteFunc(c.partitions, func(key worker.Partition, p *partition) bool {
		return len(p.workers) == 0 && c.setup.Index.Partition(key) == nil
	})
}

// listen begins to listen to the KV events of a worker, on all ranks or on none.
func (c *catalog) listen(p *partition, r *record) error {
	if !c.setup.Events {
		return nil
	}
	at := r.listenAt()
	replays := map[uint32]string{}
	invalid := func(dp uint32, err error) error {
		return fmt.Errorf("invalid kv_events endpoint for worker %d dp_rank %d: invalid ZMQ endpoint %w", r.id, dp, err)
	}
	for _, dp := range slices.Sorted(maps.Keys(at)) {
		err := worker.CheckEventEndpoint(at[dp])
		if err == nil {
			if replays[dp], err = r.replayAt(dp); err == nil && replays[dp] != "" {
				err = worker.CheckEventEndpoint(replays[dp])
			}
		}
		if err != nil {
			return invalid(dp, err)
		}
	}
	for _, dp := range slices.Sorted(maps.Keys(at)) {
		if err := c.link.Listen(p.blocks.Load(), worker.Rank{Worker: worker.ID(r.id), DP: dp}, at[dp], replays[dp]); err != nil {
			c.link.Unlisten(worker.ID(r.id))
			return invalid(dp, err)
		}
	}
	return nil
}

// dropCacheLocked ends listening to a worker, if it is there, and forgets what it holds.
func (c *catalog) dropCacheLocked(r *record) {
	if r == nil {
		return
	}
	if c.setup.Events {
		c.link.Unlisten(worker.ID(r.id))
	}
	if p := c.partitions[r.partition()]; p != nil {
		p.blocks.Load().Index.RemoveWorker(worker.ID(r.id))
	}
}

// withdrawLocked ends a worker that was schedulable, if it is there: its reservations go, and those
// who wait for it alone hear that they wait in vain.
func (c *catalog) withdrawLocked(r *record, now time.Time) {
	if r == nil {
		return
	}
	p := c.partitions[r.partition()]
	delete(p.workers, r.id)
	p.count.Add(-1)
	c.ready.Add(-1)
	c.dropCacheLocked(r)
	c.setup.Router.Unregister(worker.ID(r.id), now)
	if len(p.workers) == 0 {
		c.setup.Index.Withdraw(p.key)
	}
	c.changed(p.route.Load(), now)
}
