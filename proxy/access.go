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
	e, suppressed := x.out.failure, 0
	sheds := e != nil && (e.Reason.Rejected() || e.Reason == httperr.Draining)
	if sheds {
		var ok bool
		if suppressed, ok = a.allow(now); !ok {
			return
		}
	}
	attrs := append(x.attrs[:0], slog.String("request_id", x.id), slog.String("endpoint", x.ep.label), slog.Int("status", x.out.status))
	if e != nil {
		attrs = append(attrs, slog.String("error_type", string(e.Cause)))
		if e.Reason != "" {
			attrs = append(attrs, slog.String("reason", string(e.Reason)))
		}
		if sheds {
			attrs = append(attrs, slog.Int("suppressed", suppressed))
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
	// A nameless group is written as what is in it, and a record keeps it without a copy; the source
	// line, which would be looked up too, is not logged.
	r := slog.NewRecord(now, slog.LevelInfo, "request", 0)
	r.AddAttrs(slog.Attr{Value: slog.GroupValue(attrs...)})
	_ = a.log.Handler().Handle(ctx, r) // as slog.Logger takes it
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
