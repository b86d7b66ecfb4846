package proxy_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"spillway/busy"
	"spillway/proxy"
	"spillway/router"
	"spillway/worker"
)

// records are the lines of a JSON log with that message.
func (l *lines) records(t *testing.T, message string) (found []map[string]any) {
	t.Helper()
	for line := range strings.Lines(l.String()) {
		var r map[string]any
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		if r["msg"] == message {
			found = append(found, r)
		}
	}
	return found
}

func (l *lines) json(level slog.Level) *slog.Logger {
	return slog.New(slog.NewJSONHandler(l, &slog.HandlerOptions{Level: level}))
}

// settleRecord takes out of a record what differs from run to run, after a look at it.
func settleRecord(t *testing.T, r map[string]any) string {
	t.Helper()
	for _, key := range []string{"time", "ttft_ms", "itl_ms", "duration_ms", "err"} {
		if v, ok := r[key]; ok {
			if n, isNumber := v.(float64); isNumber && (n < 0 || n > 60_000) {
				t.Errorf("%s is %v, want up to a minute", key, n)
			}
			r[key] = "*"
		}
	}
	var all []string
	for _, key := range slices.Sorted(maps.Keys(r)) {
		all = append(all, fmt.Sprintf("%s=%v", key, r[key]))
	}
	return strings.Join(all, " ")
}

// overlap is before where mode kv adds a field to a record.
var overlap = regexp.MustCompile(`output_tokens=\d+`)

const secret = "an_SSN_that_nobody_else_may_read"

// TestAccessRecord has each field of the record, and none of what was said.
func TestAccessRecord(t *testing.T) {
	secretStream := strings.ReplaceAll(streamBody, "Hi", secret)
	secretHello := strings.ReplaceAll(hello, "Hello", secret)
	secretReply := strings.ReplaceAll(reply, "Hello", secret)
	cached := strings.ReplaceAll(counted, `"total_tokens":12`, `"prompt_tokens_details":{"cached_tokens":8}`)
	const common = "duration_ms=* endpoint=chat_completions "
	for _, tt := range []struct {
		name    string
		worker  func(*conn, received)
		body    string
		headers []string
		want    string
	}{
		{"a stream", streaming(secretHello, ended, cached, done), secretStream,
			[]string{"X-Request-Id: mine", "Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
			fmt.Sprintf("attempts=1 bytes_in=%d bytes_out=%d cached_tokens=8 dp_rank=0 ", len(secretStream), len(secretHello+ended+cached+done)) + common +
				"itl_ms=* level=INFO model=m msg=request output_tokens=2 prompt_tokens=10 request_id=mine request_type=stream status=200 time=* " +
				"trace_id=0af7651916cd43dd8448eb211c80319c ttft_ms=* worker=w"},
		{"unary", saying(answer(200, jsonHeader, secretReply)), strings.ReplaceAll(chatBody, "Hi", secret), []string{"X-Request-Id: mine", "Traceparent: nonsense"},
			fmt.Sprintf("attempts=1 bytes_in=%d bytes_out=%d dp_rank=0 ", len(chatBody)-2+len(secret), len(secretReply)) + common +
				"level=INFO model=m msg=request output_tokens=1 prompt_tokens=10 request_id=mine request_type=unary status=200 time=* worker=w"},
		{"a worker that fails", saying(answer(500, jsonHeader, "{}")), chatBody, []string{"X-Request-Id: mine"},
			fmt.Sprintf("attempts=1 bytes_in=%d bytes_out=0 dp_rank=0 ", len(chatBody)) + common +
				"err=* error_type=internal level=INFO model=m msg=request output_tokens=0 request_id=mine request_type=unary status=500 time=* worker=w"},
		{"no JSON", saying(""), `{"model":"` + secret, []string{"X-Request-Id: mine"},
			fmt.Sprintf("bytes_in=%d bytes_out=0 ", len(secret)+10) + common +
				"error_type=validation level=INFO msg=request output_tokens=0 request_id=mine request_type=unary status=400 time=*"},
		{"no such model", saying(""), strings.ReplaceAll(chatBody, `"m"`, `"`+secret+`"`), []string{"X-Request-Id: mine"},
			fmt.Sprintf("bytes_in=%d bytes_out=0 ", len(chatBody)-1+len(secret)) + common +
				"error_type=not_found level=INFO msg=request output_tokens=0 request_id=mine request_type=unary status=404 time=*"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			log := &lines{}
			f := begin(t, setup{log: log.json(slog.LevelDebug)}, served("w", newScript(t, tt.worker)))
			f.chat(tt.body, tt.headers...)
			eventually(t, "the request is logged", func() bool { return len(log.records(t, "request")) > 0 })
			records := log.records(t, "request")
			if usualMode() == router.KV && strings.HasPrefix(tt.want, "attempts=") {
				tt.want = overlap.ReplaceAllString(tt.want, "$0 overlap_tokens=0")
			}
			if got := settleRecord(t, records[0]); got != tt.want || len(records) != 1 {
				t.Errorf("%d records, the first:\n got %s\nwant %s", len(records), got, tt.want)
			}
			if strings.Contains(log.String(), secret) {
				t.Errorf("the log has what nobody else may read:\n%s", log)
			}
		})
	}
}

// TestRefusalRecord has the records of refusals: why, and by how much.
func TestRefusalRecord(t *testing.T) {
	limits := decodeLimit()
	limits.ActivePrefillTokensThreshold = new(uint64(1000))
	for _, tt := range []struct {
		name    string
		busy    busy.Config
		before  func(f *front, w1, w2 worker.ID)
		headers string
		want    string // of the record, from its check to its worker
	}{
		{"KV blocks", limits, func(f *front, w1, w2 worker.ID) { f.report(w1, 99); f.report(w2, 86) }, "",
			"check=decode_blocks least_loaded=w2 least_loaded_rank=0 reason=overloaded threshold=0.85 value=0.86"},
		{"the pinned worker", limits, func(f *front, w1, _ worker.ID) { f.report(w1, 99) }, "X-Worker-Instance-Id: w1",
			"check=decode_blocks least_loaded=w1 least_loaded_rank=0 reason=overloaded-pinned threshold=0.85 value=0.99"},
		{"marks", limits, func(f *front, w1, w2 worker.ID) { f.list().Mark(w1, nil, 0, now()); f.list().Mark(w2, nil, 0, now()) }, "",
			"check=backpressure least_loaded=w1 least_loaded_rank=0 reason=overloaded"},
		{"none routable", limits, func(f *front, w1, w2 worker.ID) {
			f.list().SetHealthy(w1, false, now())
			f.list().SetHealthy(w2, false, now())
		}, "", "reason=no-healthy-workers"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			log := &lines{}
			s := newScript(t, saying(answer(200, jsonHeader, reply)))
			w1, w2 := served("w1", s), served("w2", s)
			w1.ID, w2.ID = 1, 2
			f := begin(t, setup{busy: tt.busy, log: log.json(slog.LevelInfo)}, w1, w2)
			tt.before(f, w1.ID, w2.ID)
			for range 20 {
				f.chat(chatBody, tt.headers)
			}
			eventually(t, "a refusal is logged", func() bool { return len(log.records(t, "request")) > 0 })
			records := log.records(t, "request")
			r := records[0]
			var got []string
			for _, key := range []string{"check", "least_loaded", "least_loaded_rank", "reason", "threshold", "value"} {
				if v, ok := r[key]; ok {
					got = append(got, fmt.Sprintf("%s=%v", key, v))
				}
			}
			if got := strings.Join(got, " "); got != tt.want || r["suppressed"] != 0.0 || r["level"] != "INFO" || r["model"] != "m" {
				t.Errorf("record %v\n got %s\nwant %s, level INFO, model m, suppressed 0", r, got, tt.want)
			}
			if len(records) > 3 { // 20 requests may take more than a second, but not 3
				t.Errorf("%d records of 20 refusals, want about one a second", len(records))
			}
		})
	}
}

// TestQuietRoutes has probes, lists and scrapes logged at debug, and nothing of them above.
func TestQuietRoutes(t *testing.T) {
	log := &lines{}
	f := begin(t, setup{log: log.json(slog.LevelDebug), proxy: func(c *proxy.Config) { c.APIKey = "k" }}, served("w", newScript(t, saying(""))))
	for _, path := range []string{"/health", "/live", "/ready", "/metrics", "/v1/models", "/v1/models/m"} {
		f.send("GET", path, "")
	}
	got := map[string]string{}
	for _, r := range log.records(t, "system request") {
		got[fmt.Sprint(r["route"])] = fmt.Sprintf("%v %v %v", r["level"], r["method"], r["status"])
	}
	want := map[string]string{
		"/health": "DEBUG GET 200", "/live": "DEBUG GET 200", "/ready": "DEBUG GET 200", "/metrics": "DEBUG GET 200",
		"/v1/models": "DEBUG GET 401", "/v1/models/*": "DEBUG GET 401",
	}
	if !maps.Equal(got, want) {
		t.Errorf("logged %v\nwant %v", got, want)
	}
}

// told is a handler whose records of requests wait until the client has its answer.
type told struct {
	slog.Handler
	answered chan struct{}
	late     atomic.Bool // one has waited in vain
}

func (h *told) Enabled(context.Context, slog.Level) bool { return true }

func (h *told) Handle(_ context.Context, r slog.Record) error {
	if r.Message == "request" {
		select {
		case <-h.answered:
		case <-time.After(patience):
			h.late.Store(true)
		}
	}
	return nil
}

// TestAnswerBeforeRecord: no client waits for its request to be written down.
func TestAnswerBeforeRecord(t *testing.T) {
	for _, tt := range []struct {
		name   string
		body   string
		status int
	}{{"answer", chatBody, 200}, {"refusal", "{", 400}} {
		t.Run(tt.name, func(t *testing.T) {
			h := &told{Handler: slog.DiscardHandler, answered: make(chan struct{})}
			s := newScript(t, func(c *conn, _ received) { c.say(answer(200, jsonHeader, reply)) })
			f := begin(t, setup{log: slog.New(h)}, served("w", s))
			if got := f.chat(tt.body); got.status != tt.status {
				t.Errorf("status = %d, want %d", got.status, tt.status)
			}
			close(h.answered)
			f.stop()
			f.over()
			if h.late.Load() {
				t.Error("the client had no answer while the request was not written down")
			}
		})
	}
}
