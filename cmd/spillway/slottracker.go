package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"spillway/configs"
	"spillway/httperr"
	"spillway/replica"
	"spillway/tracker"
	"spillway/tracker/service"
	"spillway/wire"
	"spillway/worker"
)

func newSlotTracker(p process) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "slot-tracker",
		Short: "Count the active requests of worker ranks, for routers that ask over HTTP",
		Long: `Keeps books on what each data-parallel rank of each registered worker has been promised: KV
blocks, with prefixes that requests share counted once, prompt tokens still to compute, and
requests. Routers tell it of requests as they begin, get their first token and end, and ask what
one more would make of each rank. Several of them can keep each other informed.`,
		Example: `  spillway slot-tracker
  spillway slot-tracker --state-file /var/lib/spillway/slots.json
  spillway slot-tracker --replica-sync-bind tcp://0.0.0.0:8191 --replica-sync-peers tcp://other:8191

  curl localhost:8091/register -H 'Content-Type: application/json' \
    -d '{"worker_id":7,"model_name":"m","block_size":16,"dp_start":0,"dp_size":2}'
  curl localhost:8091/add -H 'Content-Type: application/json' \
    -d '{"model_name":"m","request_id":"r1","worker_id":7,"dp_rank":0,"sequence_hashes":[1,2,3],"new_isl_tokens":48}'
  curl localhost:8091/loads`,
	}
	return command(p, cmd, configs.DefaultSlotTracker(), func(c configs.SlotTracker) configs.Log { return c.Log },
		func(ctx context.Context, cfg configs.SlotTracker, log *slog.Logger) error {
			return runSlotTracker(ctx, p, cfg, log)
		})
}

func runSlotTracker(ctx context.Context, p process, cfg configs.SlotTracker, log *slog.Logger) error {
	metrics := newRegistry()
	server, err := service.New(cfg.Service, metrics, log)
	if err != nil {
		return err
	}
	leave, err := joinReplicas(ctx, cfg.Replica, server, metrics, log)
	if err != nil {
		return err
	}
	defer leave()
	ln, err := p.open(ctx, "Slot tracker", cfg.Service.Host, cfg.Service.Port)
	if err != nil {
		return fmt.Errorf("slot tracker: %w", err)
	}
	defer easeCollector()()
	return server.Run(ctx, ln)
}

// joinReplicas begins the exchange with other replicas, if it is on, and returns when peers are
// listened to. It goes on until leave; if it fails before, that is logged, and requests are served
// without it.
func joinReplicas(ctx context.Context, cfg replica.Config, server *service.Server, reg prometheus.Registerer, log *slog.Logger) (leave func(), err error) {
	if !cfg.Enabled() {
		return func() {}, nil
	}
	apply := replica.NewApplier(func(model, tenant string) (replica.Books, bool) {
		t, blockSize, known := server.Books(worker.Partition{Model: model, Tenant: tenant})
		return replica.Books{Tracker: t, BlockSize: blockSize}, known
	}, reg)
	r := replica.New(cfg, func(batch []wire.ReplicaEvent) { apply.Apply(batch, time.Now()) }, reg, log)
	server.Join(linkTo(r, "url"))
	return attendUntil(ctx, r, log)
}

// linkTo hands a server's changes to its replicas. field is what its clients call a peer.
func linkTo(r *replica.Replica, field string) service.Link {
	about := func(kind wire.ReplicaKind) func(worker.Partition, uint32, string, worker.Rank) {
		return func(p worker.Partition, blockSize uint32, id string, rank worker.Rank) {
			r.Publish(wire.ReplicaEvent{Model: p.Model, Tenant: p.Tenant, BlockSize: blockSize, Reservation: id, Rank: rank, Kind: kind})
		}
	}
	return service.Link{
		Added: func(p worker.Partition, blockSize uint32, booked tracker.Reservation) {
			hashes := booked.Hashes
			if hashes == nil {
				hashes = []uint64{} // none, as opposed to not said
			}
			r.Publish(wire.ReplicaEvent{
				Model: p.Model, Tenant: p.Tenant, BlockSize: blockSize, Reservation: booked.ID, Rank: booked.Rank, Kind: wire.ReplicaAdd,
				Promise: wire.Promise{Hashes: hashes, TrackPrefill: booked.PrefillTokens > 0, PrefillTokens: booked.PrefillTokens},
			})
		},
		PrefillDone: about(wire.ReplicaPrefillDone),
		Freed:       about(wire.ReplicaFree),
		RegisterPeer: func(ctx context.Context, endpoint string) (bool, error) {
			added, err := r.Register(ctx, endpoint)
			return added, peerError(field, err)
		},
		DeregisterPeer: func(ctx context.Context, endpoint string) error {
			return peerError(field, r.Deregister(ctx, endpoint))
		},
		Peers: r.Peers,
	}
}

// peerError is what a client is told about a peer that it named.
func peerError(field string, err error) error {
	for _, e := range []struct {
		is     error
		status int
	}{
		{replica.ErrEndpoint, http.StatusBadRequest}, {replica.ErrSelf, http.StatusBadRequest},
		{replica.ErrTooMany, http.StatusConflict}, {replica.ErrUnknownPeer, http.StatusNotFound},
		{replica.ErrStopped, http.StatusServiceUnavailable},
	} {
		if errors.Is(err, e.is) {
			return httperr.New(e.status, field+": "+err.Error())
		}
	}
	return err
}
