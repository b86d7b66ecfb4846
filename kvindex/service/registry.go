package service

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"

	"spillway/httperr"
	"spillway/kvindex"
	"spillway/worker"
)

// registry is which workers are listened to, and for which partition.
type registry struct {
	partitions *kvindex.Partitions

	mu      sync.RWMutex // guards the fields below; what link does comes under it
	link    Link
	workers map[worker.ID]*registered
	counts  map[*kvindex.Partition]int // workers
}

// registered is a worker with its ranks.
type registered struct {
	partition *kvindex.Partition
	ranks     map[uint32]bool
}

func newRegistry(partitions *kvindex.Partitions) *registry {
	return &registry{partitions: partitions, workers: map[worker.ID]*registered{}, counts: map[*kvindex.Partition]int{}}
}

func name(p worker.Partition) string {
	return fmt.Sprintf("model %.256q, tenant %.256q", p.Model, p.Tenant)
}

// register begins to listen to a rank.
func (g *registry) register(r *request) *httperr.Error {
	refused := func(status int, format string, args ...any) *httperr.Error {
		return httperr.New(status, fmt.Sprintf(format, args...))
	}
	rank, key := r.rank(), r.partition()
	switch {
	case r.blockSize == 0 || r.blockSize > maxBlockSize:
		return refused(http.StatusBadRequest, "block_size: %d is not within 1..%d", r.blockSize, maxBlockSize)
	case rank.DP == worker.AnyDP:
		return refused(http.StatusBadRequest, "dp_rank: %d is no rank", rank.DP)
	}
	if err := worker.CheckEventEndpoint(r.endpoint); err != nil {
		return refused(http.StatusBadRequest, "endpoint: %v", err)
	}
	if r.replay != "" {
		if err := worker.CheckEventEndpoint(r.replay); err != nil {
			return refused(http.StatusBadRequest, "replay_endpoint: %v", err)
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	w := g.workers[rank.Worker]
	if w != nil {
		if w.partition.Name != key {
			return refused(http.StatusConflict, "instance_id: %d is registered for %s", rank.Worker, name(w.partition.Name))
		}
		if w.ranks[rank.DP] {
			return refused(http.StatusConflict, "instance_id: %d is registered already with dp_rank %d", rank.Worker, rank.DP)
		}
	}
	p, err := g.partitions.Register(key, int(r.blockSize))
	if err != nil {
		if errors.Is(err, kvindex.ErrPartitions) {
			return refused(http.StatusConflict, "model_name, tenant_id: %v", err)
		}
		return refused(http.StatusConflict, "block_size: %v", err)
	}
	if err := g.link.Register(p, rank, r.endpoint, r.replay); err != nil {
		if g.counts[p] == 0 {
			g.partitions.Withdraw(key)
		}
		return httperr.From(err, "", http.StatusServiceUnavailable)
	}
	if w == nil {
		w = &registered{partition: p, ranks: map[uint32]bool{}}
		g.workers[rank.Worker] = w
		g.counts[p]++
	}
	w.ranks[rank.DP] = true
	return nil
}

// unregister ends listening to a worker, or, if tenant and rank are named, to that rank.
func (g *registry) unregister(r *request) *httperr.Error {
	rank := r.rank()
	_, named := r.tenantOf()
	g.mu.Lock()
	defer g.mu.Unlock()
	w := g.workers[rank.Worker]
	if w == nil || w.partition.Name.Model != r.model || named && w.partition.Name != r.partition() {
		return httperr.New(http.StatusNotFound, fmt.Sprintf("instance_id: %d is not registered for %s", rank.Worker, name(r.partition())))
	}
	one := named && r.dp != nil
	if one && !w.ranks[rank.DP] {
		return httperr.New(http.StatusNotFound, fmt.Sprintf("dp_rank: instance_id %d is not registered with %d", rank.Worker, rank.DP))
	}
	if one && len(w.ranks) > 1 {
		delete(w.ranks, rank.DP)
		g.link.Unregister(rank)
		return nil
	}
	g.link.UnregisterWorker(rank.Worker)
	delete(g.workers, rank.Worker)
	if g.counts[w.partition]--; g.counts[w.partition] == 0 {
		delete(g.counts, w.partition)
		g.partitions.Release(w.partition.Name)
	}
	return nil
}

// find returns the partition that a request names. One that holds nothing and has no workers is
// none: it is left of workers that have gone.
func (g *registry) find(key worker.Partition) (*kvindex.Partition, *httperr.Error) {
	p := g.partitions.Partition(key)
	if p == nil || p.Index.Entries() == 0 && !g.has(p) {
		return nil, httperr.New(http.StatusNotFound, "no worker is registered for "+name(key))
	}
	return p, nil
}

func (g *registry) has(p *kvindex.Partition) bool {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.counts[p] > 0
}

// known are the partitions that find finds, in order.
func (g *registry) known() []*kvindex.Partition {
	return slices.DeleteFunc(g.partitions.All(), func(p *kvindex.Partition) bool { return p.Index.Entries() == 0 && !g.has(p) })
}

// listed is a worker as it was when it was listed.
type listed struct {
	id        worker.ID
	partition worker.Partition
	blockSize int
}

// list returns the workers of a model and a tenant, where nil is any, by ID.
func (g *registry) list(model, tenant *string) []listed {
	g.mu.RLock()
	defer g.mu.RUnlock()
	var all []listed
	for _, id := range slices.Sorted(maps.Keys(g.workers)) {
		w := g.workers[id]
		key := w.partition.Name
		if (model == nil || *model == key.Model) && (tenant == nil || *tenant == key.Tenant) {
			all = append(all, listed{id, key, w.partition.BlockSize()})
		}
	}
	return all
}
