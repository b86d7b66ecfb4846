package logline_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	"spillway/logline"
)

// both renders a record by a Handler and by slog's own.
func both(json bool, r slog.Record) (got, want string) {
	var mine, std bytes.Buffer
	_ = logline.New(&mine, slog.LevelDebug, json).Handle(context.Background(), r.Clone())
	options := &slog.HandlerOptions{Level: slog.LevelDebug}
	var h slog.Handler = slog.NewTextHandler(&std, options)
	if json {
		h = slog.NewJSONHandler(&std, options)
	}
	_ = h.Handle(context.Background(), r.Clone())
	return mine.String(), std.String()
}

// TestSameAsSlog compares lines with slog's, of values that are rendered here and of such that are
// not.
func TestSameAsSlog(t *testing.T) {
	utc := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	far := utc.In(time.FixedZone("x", -5*3600-1800))
	values := []any{
		"plain", "", "two words", "a=b", `"quoted"`, `back\slash`, "new\nline", "é", "\x00", "\x7f", "<&>",
		1, -1, math.MinInt64, uint64(math.MaxUint64), true, false,
		0.0, 1.5, 0.001, 0.0015, 0.01, 2.05, 7.0, 100.0, 40.125, 999999999.999, 1e9, 0.1 + 0.2, 1e-4, 9.9e-5, 123456789.125, 1e15, 1e20, 1e21, 1e300, -1.5, math.Inf(1), math.Copysign(0, -1),
		time.Second, utc, errors.New("e r r"), nil, []int{1}, slog.GroupValue(slog.Int("a", 1)),
	}
	for _, at := range []time.Time{utc, utc.Add(time.Millisecond), utc.Add(120 * time.Microsecond), utc.Add(999999999), far, {}} {
		for _, level := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelInfo + 1, slog.LevelError} {
			for _, msg := range []string{"request", "two words", "", "ü"} {
				for _, v := range values {
					r := slog.NewRecord(at, level, msg, 0)
					r.Add("first", 1, "key", v, "a key", v)
					short := slog.NewRecord(at, level, msg, 0)
					short.Add("key", v)
					grouped := slog.NewRecord(at, level, msg, 0)
					grouped.AddAttrs(slog.Attr{Value: slog.GroupValue(slog.Int("a", 1), slog.Any("key", v))}, slog.Attr{Value: slog.GroupValue()}, slog.Any("", v))
					for _, json := range []bool{false, true} {
						for _, r := range []slog.Record{r, short, grouped} {
							if got, want := both(json, r); got != want {
								t.Errorf("json %v, %v, %v, %q, %#v:\n got %s\nwant %s", json, at, level, msg, v, got, want)
							}
						}
					}
				}
			}
		}
	}
}

func FuzzSameAsSlog(f *testing.F) {
	f.Add("request", "key", "value", 1.5, int64(7), int64(1767225600123456789))
	f.Fuzz(func(t *testing.T, msg, key, text string, fl float64, n, ns int64) {
		if !(ns >= 0) {
			t.Skip("a year that JSON has no form for")
		}
		r := slog.NewRecord(time.Unix(0, ns).UTC(), slog.LevelInfo, msg, 0)
		r.AddAttrs(slog.String("id", text), slog.Float64("f", fl), slog.Int64("n", n), slog.Uint64("u", uint64(n)), slog.String(key, text))
		for _, json := range []bool{false, true} {
			if got, want := both(json, r); got != want {
				t.Errorf("json %v:\n got %s\nwant %s", json, got, want)
			}
		}
	})
}

// TestDerived has a logger with attributes and groups of its own.
func TestDerived(t *testing.T) {
	var b bytes.Buffer
	slog.New(logline.New(&b, slog.LevelInfo, false)).With("a", 1).WithGroup("g").With("b", 2).Info("x", "c", 3)
	if got := b.String(); !strings.HasSuffix(got, " level=INFO msg=x a=1 g.b=2 g.c=3\n") {
		t.Errorf("line %q", got)
	}
}

// BenchmarkHandle writes a record with the fields of an access record, to nowhere.
func BenchmarkHandle(b *testing.B) {
	r := slog.NewRecord(time.Now(), slog.LevelInfo, "request", 0)
	r.AddAttrs(slog.Attr{Value: slog.GroupValue(slog.String("request_id", "0f1c4f0e-7b0a-4f65-9d9a-4f8b6f6c9a51"), slog.String("trace_id", "0af7651916cd43dd8448eb211c80319c"),
		slog.String("model", "Qwen/Qwen3-0.6B"), slog.String("endpoint", "chat_completions"), slog.String("request_type", "stream"),
		slog.Int("status", 200), slog.String("worker", "gpu3:8000"), slog.Uint64("dp_rank", 0), slog.Int("attempts", 1),
		slog.Uint64("prompt_tokens", 1000), slog.Uint64("cached_tokens", 900), slog.Uint64("output_tokens", 40),
		slog.Float64("ttft_ms", 123.456), slog.Float64("itl_ms", 20.125), slog.Float64("duration_ms", 987.654),
		slog.Int("bytes_in", 4096), slog.Int64("bytes_out", 12345))})
	for _, h := range []struct {
		name string
		slog.Handler
	}{
		{"text", logline.New(io.Discard, slog.LevelInfo, false)},
		{"json", logline.New(io.Discard, slog.LevelInfo, true)},
		{"slog text", slog.NewTextHandler(io.Discard, nil)},
		{"slog json", slog.NewJSONHandler(io.Discard, nil)},
	} {
		b.Run(h.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				_ = h.Handle(context.Background(), r)
			}
		})
	}
}
