package proxy

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/labstack/echo/v4"

	"spillway/busy"
	"spillway/httperr"
	"spillway/worker"
)

// accessLog writes one record for each inference request. Of refusals it writes at most one a
// second and model, with the number that was left out: shedding thousands of requests must not
// become a logging outage. What a client wrote in its prompt, and what a worker answered, is never
// in a record.
type accessLog struct {
	log     *slog.Logger
	unknown refusals // of requests refused before their model was known
}

// refusals are those of one model that may not be written yet.
type refusals struct {
	mu         sync.Mutex
	last       time.Time // of a record
	suppressed uint64    // since
}

// allow tells whether a refusal may be written now, and how many were not since the last one.
func (r *refusals) allow(now time.Time) (suppressed uint64, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now.Sub(r.last) < time.Second {
		r.suppressed++
		return 0, false
	}
	suppressed, r.suppressed, r.last = r.suppressed, 0, now
	return suppressed, true
}

// record writes down what became of x.
func (a *accessLog) record(x *exchange, now time.Time) {
	ctx := context.Background()
	if !a.log.Enabled(ctx, slog.LevelInfo) {
		return
	}
	if e := x.out.failure; e == nil || e.Reason == "" {
		a.write(now, x.fields(now))
		return
	}
	of := &a.unknown
	if x.model != nil {
		of = &x.model.refusals
	}
	left, ok := of.allow(now)
	if !ok {
		return
	}
	attrs := append(x.fields(now), slog.Uint64("suppressed", left))
	a.write(now, x.blame(attrs, now))
}

// write hands a record to the handler. A nameless group is written as what is in it, and a record
// keeps it without a copy; slog.Logger would also look up the source line, which is not logged.
func (a *accessLog) write(now time.Time, attrs []slog.Attr) {
	r := slog.NewRecord(now, slog.LevelInfo, "request", 0)
	r.AddAttrs(slog.Attr{Value: slog.GroupValue(attrs...)})
	_ = a.log.Handler().Handle(context.Background(), r) // a log has nobody to tell that it is broken
}

// fields are those of a record. One that does not apply is left out.
func (x *exchange) fields(now time.Time) []slog.Attr {
	out := &x.out
	to := append(x.attrs[:0], slog.String("request_id", x.id))
	if id := traceID(first(x.req.Header, "Traceparent")); id != "" {
		to = append(to, slog.String("trace_id", id))
	}
	if x.model != nil { // what a client wrote is not logged before it is known to be a model
		to = append(to, slog.String("model", x.model.name))
	}
	to = append(to, slog.String("endpoint", x.ep.label), slog.String("request_type", requestTypes[x.scan.requestType()]), slog.Int("status", out.status))
	if e := out.failure; e != nil {
		to = append(to, slog.String("error_type", string(e.Cause)))
		if e.Reason != "" {
			to = append(to, slog.String("reason", string(e.Reason)))
		}
		if e.Detail != nil {
			to = append(to, slog.String("err", e.Detail.Error()))
		}
	}
	if x.attempts > 0 {
		to = append(to, slog.String("worker", x.sel.Worker.Name))
		if x.sel.Rank.DP != worker.AnyDP {
			to = append(to, slog.Uint64("dp_rank", uint64(x.sel.Rank.DP)))
		}
		to = append(to, slog.Int("attempts", x.attempts))
	}
	if x.queued > 0 {
		to = append(to, slog.Float64("queue_ms", ms(x.queued)))
	}
	if x.s.kv && x.attempts > 0 {
		to = append(to, slog.Uint64("overlap_tokens", min(x.sel.CachedTokens, x.query.PromptTokens)))
	}
	if u := &out.usage; u.known {
		to = append(to, slog.Uint64("prompt_tokens", u.prompt))
		if u.cachedKnown {
			to = append(to, slog.Uint64("cached_tokens", u.cached))
		}
	}
	to = append(to, slog.Uint64("output_tokens", out.tokens))
	if !out.firstToken.IsZero() {
		to = append(to, slog.Float64("ttft_ms", ms(out.firstToken.Sub(x.start))))
		if out.tokens > 1 {
			to = append(to, slog.Float64("itl_ms", ms(out.lastToken.Sub(out.firstToken)/time.Duration(min(out.tokens-1, 1<<32)))))
		}
	}
	return append(to, slog.Float64("duration_ms", ms(now.Sub(x.start))), slog.Int("bytes_in", x.bytesIn), slog.Int64("bytes_out", out.written))
}

// ms is a duration in milliseconds, to the microsecond.
func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// blame appends why the least loaded worker, or the one that the client asked for, could not take
// the request.
func (x *exchange) blame(to []slog.Attr, now time.Time) []slog.Attr {
	if !x.out.failure.Reason.Rejected() || x.target.Partition == nil {
		return to
	}
	p, ok := x.target.Partition.Busy.LeastLoaded(x.query.Worker, now)
	if !ok {
		return to
	}
	to = append(to, slog.String("least_loaded", p.Name), slog.Uint64("least_loaded_rank", uint64(p.DP)), slog.String("check", p.Check.Names()[0]))
	if p.Check.Has(busy.CheckBackpressure | busy.CheckStale) {
		return to
	}
	return append(to, slog.Float64("value", p.Value), slog.Float64("threshold", p.Limit))
}

// traceID is the trace of a W3C traceparent, "" if it is none.
func traceID(v string) string {
	if len(v) < 55 || v[2] != '-' || v[35] != '-' || v[52] != '-' {
		return ""
	}
	id := v[3:35]
	zero := true
	for i := range len(id) {
		if ch := id[i]; (ch < '0' || ch > '9') && (ch < 'a' || ch > 'f') {
			return ""
		}
		zero = zero && id[i] == '0'
	}
	if zero {
		return ""
	}
	return id
}

// quiet logs the requests of a route that is no inference at debug: probes and scrapes come all
// the time and tell nothing.
func (s *Server) quiet(h echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		ctx := context.Background()
		if !s.log.Enabled(ctx, slog.LevelDebug) {
			return h(c)
		}
		start := time.Now()
		err := h(c)
		status := c.Response().Status
		if err != nil {
			status = httperr.From(err, "", s.overload).Status
		}
		s.log.LogAttrs(ctx, slog.LevelDebug, "system request", slog.String("method", c.Request().Method), slog.String("route", c.Path()),
			slog.Int("status", status), slog.Float64("duration_ms", ms(time.Since(start))))
		return err
	}
}
