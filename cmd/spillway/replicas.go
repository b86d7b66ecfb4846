package main

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/proxy"
	"spillway/replica"
	"spillway/router"
	"spillway/wire"
	"spillway/worker"
)

// exchangeBookings has a front end tell other replicas what its requests are promised, and keep what
// theirs are.
func exchangeBookings(cfg replica.Config, routes *router.Router, server *proxy.Server, metrics prometheus.Registerer, log *slog.Logger) *replica.Replica {
	applier := replica.NewApplier(func(model, tenant string) (replica.Books, bool) {
		part := routes.Partition(worker.Partition{Model: model, Tenant: tenant})
		if part == nil {
			return replica.Books{}, false
		}
		// Blocks differ by worker here, and a replica may not have asked a worker yet how large its
		// are; so events are not told apart by that.
		return replica.Books{Tracker: part.Tracker, Changed: func(id worker.ID) { part.Busy.Refresh(id, time.Now()) }}, true
	}, metrics)
	peers := replica.New(cfg, func(batch []wire.ReplicaEvent) { applier.Apply(batch, time.Now()) }, metrics, log)
	server.Share(func(b proxy.Booking) { peers.Publish(replicaEvent(b)) })
	return peers
}

// replicaEvent is a change of our books as other replicas hear of it.
func replicaEvent(b proxy.Booking) wire.ReplicaEvent {
	e := wire.ReplicaEvent{
		Model: b.Partition.Model, Tenant: b.Partition.Tenant, BlockSize: b.BlockSize, Reservation: b.ID, Rank: b.Rank,
	}
	switch b.Stage {
	case proxy.Booked:
		e.Kind = wire.ReplicaAdd
		e.Promise = wire.Promise{Hashes: append(b.Hashes, privateBlocks(min(b.DecodeBlocks, maxBlocksTold-uint64(len(b.Hashes))))...), TrackPrefill: b.PrefillTokens > 0, PrefillTokens: b.PrefillTokens}
	case proxy.PrefillDone:
		e.Kind = wire.ReplicaPrefillDone
	case proxy.Freed:
		e.Kind = wire.ReplicaFree
	}
	return e
}

// maxBlocksTold bounds the blocks of one event: what no peer would take need not be made. At 16
// tokens each they are a prompt of eight million.
const maxBlocksTold = 1 << 19

// privateBlocks makes sequence hashes for blocks that no other request has.
func privateBlocks(n uint64) []uint64 {
	hashes := make([]uint64, min(n, maxBlocksTold))
	first := rand.Uint64()
	for i := range hashes {
		hashes[i] = first + uint64(i)
	}
	return hashes
}

// attend runs the exchange until ctx ends, and returns once it has begun; its end is then told to
// ended. An exchange that cannot begin is an error. One that fails later is not, since requests
// can be served without it.
func attend(ctx context.Context, peers *replica.Replica, log *slog.Logger, ended chan<- error) error {
	done := make(chan error, 1)
	go func() { done <- peers.Run(ctx) }()
	select {
	case err := <-done:
		return err
	case <-peers.Ready():
	}
	go func() {
		if err := <-done; err != nil {
			log.Error("reservations are no longer exchanged with other replicas", "err", err)
		}
		ended <- nil
	}()
	return nil
}

// attendUntil is attend for an exchange that goes on, whatever becomes of ctx, until leave.
func attendUntil(ctx context.Context, peers *replica.Replica, log *slog.Logger) (leave func(), err error) {
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	if err := attend(running, peers, log, ended); err != nil {
		stop()
		return nil, err
	}
	return func() { stop(); <-ended }, nil
}
