package proxy_test

import (
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/busy"
	"spillway/proxy"
	"spillway/router"
	"spillway/worker"
)

// BenchmarkScrape1000x8 takes a page of 1,000 workers of 8 ranks each, all of them with reports.
func BenchmarkScrape1000x8(b *testing.B) {
	catalog, err := worker.NewCatalog(nil, nil)
	if err != nil {
		b.Fatal(err)
	}
	routes := router.New(router.DefaultConfig(), decodeLimit(), catalog, rand.New(rand.NewPCG(1, 2)))
	for id := range 1000 {
		w, err := worker.Worker{
			ID: worker.ID(id + 1), Name: fmt.Sprintf("w%d", id), Endpoint: "http://127.0.0.1:1", Models: []string{"m"}, DPSize: 8, KVTotalBlocks: 100,
		}.Normalize()
		if err != nil {
			b.Fatal(err)
		}
		p, err := routes.Register(&w, time.Now())
		if err != nil {
			b.Fatal(err)
		}
		for dp := range uint32(8) {
			p.Busy.Observe(busy.Sample{Rank: worker.Rank{Worker: w.ID, DP: dp}, TakenAt: time.Now(), KVUsedBlocks: new(uint64(50))}, time.Now())
		}
	}
	server, err := proxy.New(proxy.DefaultConfig(), routes, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		rec := httptest.NewRecorder()
		server.Handler().ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
		n, err := io.Copy(io.Discard, rec.Body)
		if err != nil || rec.Code != 200 || n < 1e6 {
			b.Fatalf("a page of %d bytes, status %d, %v", n, rec.Code, err)
		}
		b.SetBytes(n)
	}
}
