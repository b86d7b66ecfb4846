package proxy

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/busy"
	"spillway/kvindex"
	"spillway/router"
	"spillway/worker"
)

// BenchmarkPrefix is what mode kv adds to a request without its decision: whether there is room, reading
// and hashing the prompt, asking the index, and noting where the prompt went; of a prompt that is known,
// and of a new one each time.
func BenchmarkPrefix(b *testing.B) {
	for _, size := range []int{1 << 10, 32 << 10} {
		for _, known := range []bool{true, false} {
			b.Run(fmt.Sprintf("bytes=%d/known=%v", size, known), func(b *testing.B) {
				catalog, err := worker.NewCatalog(nil, nil)
				if err != nil {
					b.Fatal(err)
				}
				cfg := router.DefaultConfig()
				cfg.Mode = router.KV
				routes := router.New(cfg, busy.DefaultConfig(), catalog, rand.New(rand.NewPCG(1, 2)))
				s, err := New(DefaultConfig(), routes, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
				if err != nil {
					b.Fatal(err)
				}
				s.IndexBy(kvindex.NewPartitions(kvindex.DefaultConfig()))
				for id := range worker.ID(4) {
					if err := s.Join(&worker.Worker{ID: id, Name: id.String(), Endpoint: "http://127.0.0.1:1", Models: []string{"m"}, Tenant: worker.DefaultTenant}); err != nil {
						b.Fatal(err)
					}
				}
				body := []byte(fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":"00000000%s"}]}`, strings.Repeat("What is a spillway? ", size/20)))
				at := strings.Index(string(body), "00000000")
				read, refused := scan(body)
				if refused != nil || read.check(&endpoints[chatCompletions]) != nil {
					b.Fatal(refused)
				}
				target, err := routes.Resolve("m", "")
				if err != nil {
					b.Fatal(err)
				}
				x := &exchange{s: s, ep: &endpoints[chatCompletions], body: body, scan: read, target: target, model: s.models.of("m")}
				now, n := time.Now(), 0
				b.ReportAllocs()
				b.SetBytes(int64(len(body)))
				for b.Loop() {
					if !known {
						n++
						copy(body[at:], fmt.Sprintf("%08d", n))
						now = now.Add(time.Second) // of those of the last 120 s each is remembered
					}
					x.query = router.Query{PromptTokens: read.promptTokens()}
					if _, err := x.inform(now); err != nil {
						b.Fatal(err)
					}
					x.sel = router.Selection{Booked: worker.Rank{Worker: worker.ID(n % 4)}}
					x.conclude(now)
					x.forget()
				}
			})
		}
	}
}
