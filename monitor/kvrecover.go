package monitor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"spillway/kvindex"
	"spillway/wire"
	"spillway/worker"
)

// recovered are the ranks that a dump has told of, by partition.
type recovered map[*kvindex.Partition]map[worker.Rank]bool

// recover takes over what the first peer that answers knows, then lets listeners apply what has
// come meanwhile. It goes on until ranks that nobody speaks for have been forgotten.
func (k *KVListeners) recover(ctx context.Context) {
	from := recovered{}
	peers := k.cfg.PeerURLs()
	if len(peers) > 0 && !pause(ctx, k.cfg.RecoveryDelay) {
		return
	}
	for i, peer := range peers {
		err := k.take(ctx, peer, from)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			break
		}
		k.log.Warn("a peer's blocks could not be recovered", "peer", peer, "err", err)
		if i == len(peers)-1 {
			k.log.Warn("no peer could be recovered from: workers' blocks are known as far as they tell of them themselves")
		}
	}
	close(k.opened)
	flushing, cancel := context.WithTimeout(ctx, k.cfg.ReplayTotal)
	_ = k.Flush(flushing) // whoever is still being replayed is not waited for
	cancel()
	close(k.ready)
	if len(from) > 0 && pause(ctx, k.cfg.StrangerAge) {
		k.dropStrangers(from)
	}
}

// dropStrangers forgets recovered ranks of workers that are not registered for the partition, and
// those for which no publisher of their worker speaks: it may have fewer ranks than it had.
func (k *KVListeners) dropStrangers(from recovered) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for p, ranks := range from {
		for r := range ranks {
			if w := k.workers[r.Worker]; w == nil || w.index != p.Index {
				p.Index.RemoveRank(r)
			} else {
				w.dropUnlessTold(r)
			}
		}
	}
}

// dropUnlessTold forgets a rank of the worker, unless a publisher speaks for it. The lock of
// KVListeners is held.
func (w *kvWorker) dropUnlessTold(r worker.Rank) {
	w.writing.Lock()
	defer w.writing.Unlock()
	if !w.told(r.DP) {
		w.index.RemoveRank(r)
	}
}

// take applies the dump of one peer. After an error what came before it stays.
func (k *KVListeners) take(ctx context.Context, peer string, from recovered) (err error) {
	ctx, cancel := context.WithTimeout(ctx, k.cfg.DumpTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, peer+"/dump", nil)
	if err != nil {
		return fmt.Errorf("monitor: recovery: %w", err)
	}
	client := &http.Client{Transport: &http.Transport{Proxy: http.ProxyFromEnvironment}} // which asks for gzip
	defer client.CloseIdleConnections()
	began := time.Now()
	res, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("monitor: recovery: %w", err)
	}
	defer func() { err = errors.Join(err, res.Body.Close()) }()
	if res.StatusCode < 200 || res.StatusCode > 299 {
		return fmt.Errorf("monitor: recovery: %s answers %s", peer, res.Status)
	}
	found, refused, counts, err := k.read(res.Body, from)
	if err != nil {
		return fmt.Errorf("monitor: recovery: after %d events: %w", counts.Applied, err)
	}
	if refused > 0 {
		k.log.Warn("a peer's blocks are recovered in part: there is no room for all, or no block before them", "peer", peer, "events", refused)
	}
	k.log.Info("a peer's blocks are recovered", "peer", peer, "partitions", found, "events", counts.Applied, "skipped", counts.Skipped,
		"not_understood", counts.Malformed+counts.Residency+counts.Positional, "seconds", time.Since(began).Seconds())
	return nil
}

// read applies a dump and notes in from whose blocks are in it. found is the number of partitions,
// refused that of stores which the index did not take.
func (k *KVListeners) read(body io.Reader, from recovered) (found, refused int, counts wire.DumpCounts, err error) {
	var p *kvindex.Partition
	counts, err = wire.ReadDump(body, func(e wire.DumpEntry) bool {
		if e.Error != "" {
			k.log.Warn("a peer could not dump a partition", "model", e.Partition.Model, "tenant", e.Partition.Tenant, "err", e.Error)
			return false
		}
		if e.BlockSize == 0 {
			return false // it has no blocks
		}
		var err error
		if p, err = k.partitions.Recover(e.Partition, int(e.BlockSize)); err != nil {
			k.log.Warn("a peer's partition is not taken over", "err", err)
			return false
		}
		found++
		if from[p] == nil {
			from[p] = map[worker.Rank]bool{}
		}
		return true
	}, func(e *wire.KVEvent) {
		from[p][e.Rank] = true
		if status := k.store(p.Index, e); status != kvindex.Stored && status != kvindex.DuplicateStore {
			refused++
		}
	})
	return found, refused, counts, err
}

// store applies one event of a dump. While dumps are read no listener writes, but registered
// workers may go.
func (k *KVListeners) store(ix *kvindex.Index, e *wire.KVEvent) kvindex.Status {
	k.mu.Lock()
	w := k.workers[e.Rank.Worker]
	k.mu.Unlock()
	if w != nil {
		w.writing.Lock()
		defer w.writing.Unlock()
	}
	status, _ := applyKV(ix, e)
	return status
}

// applyKV applies one event to an index. The status is that of a store, unknown that of a remove.
func applyKV(ix *kvindex.Index, e *wire.KVEvent) (status kvindex.Status, unknown int) {
	switch e.Kind {
	case wire.KVStore:
		status = ix.Store(e.Rank, e.Tier, kvindex.Parent{Hash: e.Parent, Set: e.HasParent}, e.Engine, e.Local)
	case wire.KVRemove:
		_, unknown = ix.Remove(e.Rank, e.Tier, e.Engine)
	case wire.KVClear:
		ix.Clear(e.Rank)
	}
	return status, unknown
}
