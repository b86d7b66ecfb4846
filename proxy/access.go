package proxy

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"spillway/httperr"
)

// accessLog writes one record for each inference request. Refusals because of load are written
// at most once a second, with the number that was left out: shedding thousands of requests must
// not become a logging outage.
type accessLog struct {
	log *slog.Logger

	mu         sync.Mutex
	last       time.Time // record of a refusal
	suppressed int       // refusals since
}

func (a *accessLog) record(x *exchange, now time.Time) {
	ctx := context.Background()
	if !a.log.Enabled(ctx, slog.LevelInfo) {
		return
	}
	attrs := make([]slog.Attr, 0, 16)
	attrs = append(attrs, slog.String("request_id", x.id), slog.String("endpoint", x.ep.label), slog.Int("status", x.out.status))
	if e := x.out.failure; e != nil {
		attrs = append(attrs, slog.String("error_type", string(e.Cause)))
		if e.Reason != "" {
			attrs = append(attrs, slog.String("reason", string(e.Reason)))
		}
		if e.Reason.Rejected() || e.Reason == httperr.Draining {
			left, ok := a.allow(now)
			if !ok {
				return
			}
			attrs = append(attrs, slog.Int("suppressed", left))
		}
		if e.Detail != nil {
			attrs = append(attrs, slog.Any("err", e.Detail))
		}
	}
	if x.model != nil { // what a client wrote is not logged before it is known to be a model
		attrs = append(attrs, slog.String("model", x.model.name))
	}
	if x.attempts > 0 {
		attrs = append(attrs, slog.String("worker", x.sel.Worker.Name), slog.Uint64("dp_rank", uint64(x.sel.Rank.DP)),
			slog.Int("attempts", x.attempts))
	}
	if !x.out.firstToken.IsZero() {
		attrs = append(attrs, slog.Int64("ttft_ms", x.out.firstToken.Sub(x.start).Milliseconds()))
	}
	if x.out.usage.known {
		attrs = append(attrs, slog.Uint64("prompt_tokens", x.out.usage.prompt), slog.Uint64("cached_tokens", x.out.usage.cached))
	}
	attrs = append(attrs, slog.Uint64("output_tokens", x.out.tokens), slog.Int("bytes_in", x.bytesIn),
		slog.Int64("bytes_out", x.out.written), slog.Int64("duration_ms", now.Sub(x.start).Milliseconds()))
	a.log.LogAttrs(ctx, slog.LevelInfo, "request", attrs...)
}

// allow tells whether a refusal may be written now, and how many were not since the last one.
func (a *accessLog) allow(now time.Time) (suppressed int, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if now.Sub(a.last) < time.Second {
		a.suppressed++
		return 0, false
	}
	suppressed, a.suppressed, a.last = a.suppressed, 0, now
	return suppressed, true
}
