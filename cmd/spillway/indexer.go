package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"

	"github.com/spf13/cobra"

	"spillway/configs"
	"spillway/httperr"
	"spillway/kvindex"
	"spillway/kvindex/service"
	"spillway/monitor"
	"spillway/worker"
)

func newIndexer(p process) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "indexer",
		Short: "Know which worker holds which KV-cache blocks, for routers that ask over HTTP",
		Long: `Listens to the KV events that engines publish over ZMQ, and answers how much of a prompt each
data-parallel rank of each registered worker has in its cache. What gets lost on the way is asked
for again where an engine replays; a new indexer takes over what another one knows.`,
		Example: `  spillway indexer
  spillway indexer --workers 7=tcp://gpu1:5557,8=tcp://gpu2:5557 --block-size 16 --model-name m
  spillway indexer --peers http://other:8090

  curl localhost:8090/register -H 'Content-Type: application/json' \
    -d '{"instance_id":7,"endpoint":"tcp://gpu1:5557","replay_endpoint":"tcp://gpu1:5558","model_name":"m","block_size":16}'
  curl localhost:8090/query -H 'Content-Type: application/json' -d '{"model_name":"m","token_ids":[1,2,3]}'
  curl localhost:8090/workers`,
	}
	return command(p, cmd, configs.DefaultIndexer(), func(c configs.Indexer) configs.Log { return c.Log },
		func(ctx context.Context, cfg configs.Indexer, log *slog.Logger) error {
			return runIndexer(ctx, p, cfg, log)
		})
}

func runIndexer(ctx context.Context, p process, cfg configs.Indexer, log *slog.Logger) error {
	metrics := newRegistry()
	partitions := kvindex.NewPartitions(cfg.Index)
	listeners := monitor.NewKVListeners(cfg.KV, partitions, log, metrics)
	server := service.New(cfg.Service, partitions, metrics, log)
	if err := server.Join(indexerLink(listeners, cfg.KV)); err != nil {
		return err
	}
	ln, err := p.open(ctx, "Indexer", cfg.Service.Host, cfg.Service.Port)
	if err != nil {
		return fmt.Errorf("indexer: %w", err)
	}
	defer easeCollector()()
	return serveFed(ctx, func(ctx context.Context) error { return server.Run(ctx, ln) }, listeners.Run)
}

// indexerLink hands listeners to the server.
func indexerLink(k *monitor.KVListeners, cfg monitor.KVConfig) service.Link {
	return service.Link{
		Register: func(p *kvindex.Partition, r worker.Rank, endpoint, replay string) error {
			return listenerError(k.Register(monitor.KVSource{
				Rank: r, Endpoint: endpoint, Replay: replay, BlockSize: uint32(p.BlockSize()), Index: p.Index,
			}))
		},
		// What the server unregisters it has registered, and nobody else unregisters.
		Unregister:       func(r worker.Rank) { _ = k.Unregister(r) },
		UnregisterWorker: func(id worker.ID) { _ = k.UnregisterWorker(id) },
		Listeners: func() []service.Listener {
			statuses := k.Statuses()
			all := make([]service.Listener, len(statuses))
			for i, s := range statuses {
				all[i] = service.Listener{
					Rank: s.Rank, Endpoint: s.Endpoint, Status: string(s.State), LastError: s.LastError, Degraded: s.Degraded,
					Applied: s.Applied, Strangers: s.Strangers,
				}
			}
			return all
		},
		Ready:     k.Ready,
		CheckPeer: monitor.CheckPeer,
		Peers:     cfg.PeerURLs(),
	}
}

// listenerError is what a client is told about an endpoint that it named.
func listenerError(err error) error {
	for _, e := range []struct {
		is     error
		status int
	}{
		{monitor.ErrKVEndpoint, http.StatusBadRequest}, {monitor.ErrKVRegistered, http.StatusConflict}, {monitor.ErrKVTooMany, http.StatusConflict},
	} {
		if errors.Is(err, e.is) {
			return httperr.New(e.status, err.Error())
		}
	}
	return err
}
