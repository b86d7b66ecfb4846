package main

import (
	"context"
	"log/slog"
	"maps"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/configs"
	"spillway/kvindex"
	"spillway/monitor"
	"spillway/proxy"
	"spillway/router"
	"spillway/worker"
)

// followCaches has the server know what its workers have cached, and returns what hears it from them: nil
// if nothing is to be heard.
func followCaches(cfg configs.Serving, server *proxy.Server, index *kvindex.Partitions, metrics prometheus.Registerer, log *slog.Logger) *monitor.KVListeners {
	server.IndexBy(index)
	decides := cfg.Router.Resolved()
	if decides.Mode != router.KV || !decides.Cost.UseKVEvents || decides.Cost.Weights(nil).Credit == 0 {
		return nil
	}
	hears := monitor.DefaultKVConfig()
	hears.ComponentMetrics = true
	listeners := monitor.NewKVListeners(hears, index, log, metrics)
	server.ListenBy(func(w *worker.Worker, p *kvindex.Partition) {
		for _, dp := range slices.Sorted(maps.Keys(w.KVEvents)) {
			err := listeners.Register(monitor.KVSource{
				Rank: worker.Rank{Worker: w.ID, DP: dp}, Endpoint: w.KVEvents[dp], Replay: w.KVReplay[dp], BlockSize: uint32(p.BlockSize()), Index: p.Index,
			})
			if err != nil {
				log.Error("a worker's KV events are not heard, so nothing counts as cached there", "worker", w.Name, "dp_rank", dp, "err", err)
			}
		}
	}, func(id worker.ID) { _ = listeners.UnregisterWorker(id) }) // none could be had, perhaps
	return listeners
}

// hear runs what followCaches has returned until ctx ends.
func hear(ctx context.Context, listeners *monitor.KVListeners) error {
	if listeners == nil {
		return nil
	}
	return listeners.Run(ctx)
}
