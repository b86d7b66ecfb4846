package proxy

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"spillway/router"
	"spillway/worker"
)

// nowhere is a handler that does nothing with records.
type nowhere struct{ slog.Handler }

func (nowhere) Enabled(context.Context, slog.Level) bool  { return true }
func (nowhere) Handle(context.Context, slog.Record) error { return nil }

// BenchmarkAccessRecord writes the record of a stream that succeeded, to nowhere.
func BenchmarkAccessRecord(b *testing.B) {
	for _, handler := range []struct {
		name string
		slog.Handler
	}{
		{"collected", nowhere{}}, // what package logline makes of it is measured there
		{"slog text", slog.NewTextHandler(io.Discard, nil)},
	} {
		b.Run(handler.name, func(b *testing.B) {
			now := time.Now()
			a := accessLog{log: slog.New(handler)}
			x := &exchange{
				s:  &Server{},
				ep: &endpoints[0], id: "0f1c4f0e-7b0a-4f65-9d9a-4f8b6f6c9a51", start: now.Add(-time.Second), attempts: 1,
				req:   &http.Request{Header: http.Header{"Traceparent": {"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}}},
				model: &model{name: "Qwen/Qwen3-0.6B"}, sel: router.Selection{Worker: &worker.Worker{Name: "gpu3:8000"}},
				out: outcome{
					status: 200, firstToken: now.Add(-900 * time.Millisecond), lastToken: now, tokens: 40, written: 12345,
					usage: usage{known: true, cachedKnown: true, prompt: 1000, cached: 900, completion: 40},
				},
			}
			b.ReportAllocs()
			for b.Loop() {
				a.record(x, now)
			}
		})
	}
}
