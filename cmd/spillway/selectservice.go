package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"spillway/busy"
	"spillway/configs"
	"spillway/kvindex"
	kvservice "spillway/kvindex/service"
	"spillway/monitor"
	"spillway/replica"
	"spillway/router"
	"spillway/selectservice"
	"spillway/wire"
	"spillway/worker"
)

func newSelectService(p process) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "select-service",
		Short: "Choose workers and book load on them, for routers that ask over HTTP",
		Long: `Chooses a data-parallel rank of a registered worker for each prompt, by what the ranks have in
their KV caches and by what they have been promised, and books the prompt on it. It forwards
nothing: clients call the worker themselves and tell of the first token and of the end.`,
		Example: `  spillway select-service
  spillway select-service --router-kv-events=false
  spillway select-service --indexer-peers http://other:8092 --replica-sync-port 8192 --replica-sync-peers tcp://other:8192

  curl localhost:8092/workers -H 'Content-Type: application/json' \
    -d '{"worker_id":1,"model_name":"m","endpoint":"http://gpu1:8000","block_size":16,"kv_events_endpoint":"tcp://gpu1:5557"}'
  curl localhost:8092/select_and_reserve -H 'Content-Type: application/json' \
    -d '{"model_name":"m","token_ids":[1,2,3,4],"reservation_id":"r1"}'
  curl -X POST localhost:8092/reservations/r1/prefill_complete
  curl -X DELETE localhost:8092/reservations/r1`,
	}
	return command(p, cmd, configs.DefaultSelectService(), func(c configs.SelectService) configs.Log { return c.Log },
		func(ctx context.Context, cfg configs.SelectService, log *slog.Logger) error {
			return runSelectService(ctx, p, cfg, log)
		})
}

func runSelectService(ctx context.Context, p process, cfg configs.SelectService, log *slog.Logger) error {
	metrics := newRegistry()
	models, err := worker.NewCatalog(nil, nil)
	if err != nil {
		return err
	}
	cost := cfg.Router().Cost
	index := kvindex.NewPartitions(cfg.Index)
	setup := selectservice.Setup{
		Router: router.New(cfg.Router(), busy.DefaultConfig(), models, rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))),
		Index:  index, MaxPartitions: cfg.Index.MaxPartitions, Cost: cost, Events: cost.UseKVEvents,
		Dump: func(w io.Writer) error { return kvservice.WriteDump(w, index.All()) },
	}
	if text, err := json.Marshal(cfg.Router()); err == nil {
		log.Info("the router's settings", "router", string(text))
	}
	server := selectservice.New(cfg.Service, setup, metrics, log)
	listeners := monitor.NewKVListeners(cfg.KV(), index, log, metrics)
	link := selectservice.Link{
		Recovered: listeners.Recovered(),
		Listen: func(p *kvindex.Partition, r worker.Rank, endpoint, replay string) error {
			return listeners.Register(monitor.KVSource{Rank: r, Endpoint: endpoint, Replay: replay, BlockSize: uint32(p.BlockSize()), Index: p.Index})
		},
		Unlisten: func(id worker.ID) { _ = listeners.UnregisterWorker(id) }, // it may have none
	}
	leave, err := joinSelectors(ctx, cfg.Replica(), server, &link, metrics, log)
	if err != nil {
		return err
	}
	defer leave()
	ln, err := p.open(ctx, "Selection service", cfg.Service.Host, cfg.Service.Port)
	if err != nil {
		return fmt.Errorf("selection service: %w", err)
	}
	defer easeCollector()()
	return serveFed(ctx, func(ctx context.Context) error { return server.Run(ctx, ln) }, listeners.Run)
}

// joinSelectors hands link to the server, and begins the exchange with other replicas, if it is on,
// which goes on until leave. It returns when peers are listened to.
func joinSelectors(ctx context.Context, cfg replica.Config, server *selectservice.Server, link *selectservice.Link, reg prometheus.Registerer, log *slog.Logger) (leave func(), err error) {
	if !cfg.Enabled() {
		server.Join(*link)
		return func() {}, nil
	}
	apply := replica.NewApplier(func(model, tenant string) (replica.Books, bool) {
		t, blockSize, changed, known := server.Books(worker.Partition{Model: model, Tenant: tenant})
		return replica.Books{Tracker: t, BlockSize: blockSize, Changed: changed}, known
	}, reg)
	r := replica.New(cfg, func(batch []wire.ReplicaEvent) { apply.Apply(batch, time.Now()) }, reg, log)
	told := linkTo(r, "endpoint")
	link.PrefillDone, link.Freed, link.Peers = told.PrefillDone, told.Freed, told.Peers
	link.RegisterPeer, link.DeregisterPeer = told.RegisterPeer, told.DeregisterPeer
	link.Added = func(p worker.Partition, blockSize uint32, b selectservice.Booking) {
		r.Publish(wire.ReplicaEvent{
			Model: p.Model, Tenant: p.Tenant, BlockSize: blockSize, Reservation: b.ID, Rank: b.Rank, Kind: wire.ReplicaAdd, LoRA: b.LoRA,
			Promise: wire.Promise{
				Hashes: b.Hashes, TrackPrefill: b.TracksPrefill, PrefillTokens: b.PrefillTokens, ExpectedOutputTokens: b.ExpectedOutputTokens,
			},
		})
	}
	server.Join(*link)
	return attendUntil(ctx, r, log)
}
