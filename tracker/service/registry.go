package service

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"spillway/httperr"
	"spillway/tracker"
	"spillway/worker"
)

// registry holds a tracker for each partition that has workers.
type registry struct {
	cfg Config

	mu         sync.RWMutex // guards the fields below, and the workers of partitions
	partitions map[worker.Partition]*partition
	expired    uint64 // reservations that did in trackers which are gone
}

// partition is what is known of one model and tenant.
type partition struct {
	key       worker.Partition
	blockSize uint32 // fixed
	tracker   *tracker.Tracker
	workers   map[uint64]ranks
	tick      time.Time // when all ranks are next looked at for what has expired
}

// ranks are those of a worker.
type ranks struct{ start, size uint32 }

func newRegistry(cfg Config) *registry {
	return &registry{cfg: cfg, partitions: map[worker.Partition]*partition{}}
}

func name(p worker.Partition) string {
	return fmt.Sprintf("model %.256q, tenant %.256q", p.Model, p.Tenant)
}

func unknownPartition(p worker.Partition) *httperr.Error {
	return httperr.New(http.StatusNotFound, "no worker is registered for "+name(p))
}

// find returns the partition that a request names. It may lose its last worker at any time; then
// its tracker knows no rank any more.
func (g *registry) find(key worker.Partition) (*partition, *httperr.Error) {
	g.mu.RLock()
	p := g.partitions[key]
	g.mu.RUnlock()
	if p == nil {
		return nil, unknownPartition(key)
	}
	return p, nil
}

func (g *registry) register(r *request, now time.Time) *httperr.Error {
	refused := func(format string, args ...any) *httperr.Error {
		return httperr.New(http.StatusBadRequest, fmt.Sprintf(format, args...))
	}
	switch {
	case r.blockSize == 0:
		return refused("block_size: must be more than 0")
	case r.dpSize == 0:
		return refused("dp_size: must be more than 0")
	case uint64(r.dpStart)+uint64(r.dpSize) > worker.AnyDP:
		return refused("dp_size: %d ranks from %d go beyond %d", r.dpSize, r.dpStart, uint32(worker.AnyDP-1))
	case r.dpSize > g.cfg.MaxRanksPerWorker:
		return refused("dp_size: %d is more than max-ranks-per-worker, %d", r.dpSize, g.cfg.MaxRanksPerWorker)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	key := r.partition()
	p := g.partitions[key]
	if p != nil {
		if p.blockSize != r.blockSize {
			return httperr.New(http.StatusConflict, fmt.Sprintf("block_size: %d, but %s has %d", r.blockSize, name(key), p.blockSize))
		}
		if _, ok := p.workers[r.workerID]; ok {
			return httperr.New(http.StatusConflict, fmt.Sprintf("worker_id: %d is registered for %s already", r.workerID, name(key)))
		}
	} else {
		p = &partition{
			key: key, blockSize: r.blockSize, workers: map[uint64]ranks{}, tick: now.Add(g.cfg.ExpiryInterval),
			tracker: tracker.New(tracker.Config{
				ExpireAfter: time.Duration(g.cfg.ExpireAfterSecs) * time.Second, CheckEvery: g.cfg.ExpiryInterval / 2,
			}),
		}
		g.partitions[key] = p
	}
	p.workers[r.workerID] = ranks{r.dpStart, r.dpSize}
	p.tracker.Register(&worker.Worker{ID: worker.ID(r.workerID), DPStart: r.dpStart, DPSize: r.dpSize}, now)
	return nil
}

func (g *registry) unregister(r *request) *httperr.Error {
	g.mu.Lock()
	defer g.mu.Unlock()
	p := g.partitions[r.partition()]
	if p == nil {
		return unknownPartition(r.partition())
	}
	if _, ok := p.workers[r.workerID]; !ok {
		return httperr.New(http.StatusNotFound, fmt.Sprintf("worker_id: %d is not registered for %s", r.workerID, name(p.key)))
	}
	delete(p.workers, r.workerID)
	p.tracker.Unregister(worker.ID(r.workerID))
	if len(p.workers) == 0 {
		g.expired += p.tracker.ExpiredTotal()
		delete(g.partitions, p.key)
	}
	return nil
}

// matching are the partitions that a filter lets through, sorted by model and tenant.
func (g *registry) matching(f filter) []*partition {
	g.mu.RLock()
	defer g.mu.RUnlock()
	if f.model != nil && f.tenant != nil {
		if p := g.partitions[worker.Partition{Model: *f.model, Tenant: *f.tenant}]; p != nil {
			return []*partition{p}
		}
		return nil
	}
	var all []*partition
	for key, p := range g.partitions {
		if (f.model == nil || *f.model == key.Model) && (f.tenant == nil || *f.tenant == key.Tenant) {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b *partition) int { return comparePartitions(a.key, b.key) })
	return all
}

// workersOf returns a copy of a partition's workers, and their IDs in order.
func (g *registry) workersOf(p *partition) (ids []uint64, of map[uint64]ranks) {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return slices.Sorted(maps.Keys(p.workers)), maps.Clone(p.workers)
}

// expire drops what has expired in the partitions whose time has come, and returns how many.
func (g *registry) expire(now time.Time) (dropped int) {
	var due []*partition
	g.mu.Lock()
	for _, p := range g.partitions {
		if now.Before(p.tick) {
			continue
		}
		due = append(due, p)
		late := now.Sub(p.tick) / g.cfg.ExpiryInterval // what was missed is not made up for
		p.tick = p.tick.Add((late + 1) * g.cfg.ExpiryInterval)
	}
	g.mu.Unlock()
	for _, p := range due {
		dropped += len(p.tracker.Expire(now))
	}
	return dropped
}

// expiredTotal is how many reservations have expired since the start.
func (g *registry) expiredTotal() uint64 {
	g.mu.RLock()
	defer g.mu.RUnlock()
	total := g.expired
	for _, p := range g.partitions {
		total += p.tracker.ExpiredTotal()
	}
	return total
}
