package proxy

import (
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/busy"
	"spillway/router"
	"spillway/worker"
)

// TestForgetGone checks that a peer made too late, for a worker that has been removed, goes too.
func TestForgetGone(t *testing.T) {
	catalog, err := worker.NewCatalog(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	routes := router.New(router.DefaultConfig(), busy.DefaultConfig(), catalog, rand.New(rand.NewPCG(1, 2)))
	s, err := New(DefaultConfig(), routes, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	var parts []*router.Partition
	for id := range worker.ID(2) {
		w := &worker.Worker{ID: id, Name: id.String(), Endpoint: "http://127.0.0.1:1", Models: []string{"m"}}
		p, err := routes.Register(w, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		parts = append(parts, p)
		if id == 0 {
			routes.Unregister(id, time.Now())
		}
		if _, err := s.peer(w, p.Busy); err != nil {
			t.Fatal(err)
		}
	}
	s.forgetGone()
	for id := range worker.ID(2) {
		if _, ok := s.peers.Load(id); ok != (id == 1) {
			t.Errorf("worker %v of partitions %v has a peer: %v, want the registered one's alone", id, parts, ok)
		}
	}
}
