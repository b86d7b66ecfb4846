package proxy_test

import (
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"spillway/proxy"
	"spillway/router"
	"spillway/worker"
)

// gathered is a page of metrics by short names: family{values of the labels that are not the same
// in all of a test}. A histogram is its count, and its sum where that is not a duration.
type gathered map[string]float64

func (f *front) gather() gathered {
	f.t.Helper()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(f.metrics()))
	if err != nil {
		f.t.Fatal(err)
	}
	all := gathered{}
	for name, mf := range families {
		name = strings.TrimPrefix(name, "dynamo_")
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") || strings.HasPrefix(name, "promhttp_") {
			continue
		}
		for _, m := range mf.Metric {
			var values []string
			for _, l := range m.Label {
				switch l.GetName() {
				case "model":
					if l.GetValue() == "unknown_model" {
						values = append(values, "?")
					}
				case "worker_id", "worker_type", "dp_rank", "router_id", "phase":
				default:
					values = append(values, l.GetValue())
				}
			}
			key := fmt.Sprintf("%s{%s}", name, strings.Join(values, ","))
			switch mf.GetType() {
			case dto.MetricType_HISTOGRAM:
				all[key+" count"] += float64(m.Histogram.GetSampleCount())
				if strings.HasSuffix(name, "_tokens") {
					all[key+" sum"] += m.Histogram.GetSampleSum()
				}
			case dto.MetricType_COUNTER:
				all[key] += m.Counter.GetValue()
			default:
				all[key] += m.Gauge.GetValue()
			}
		}
	}
	return all
}

// since are the series that differ from what they were, of those that a request changes.
func (g gathered) since(before gathered) gathered {
	changed := gathered{}
	for key, v := range g {
		measured := strings.HasPrefix(key, "frontend_worker_last_") || strings.HasPrefix(key, "spillway_signal_") ||
			strings.HasPrefix(key, "spillway_pool_") || strings.HasPrefix(key, "spillway_requests_shed_total")
		if v != before[key] && !measured {
			changed[key] = v - before[key]
		}
	}
	return changed
}

func (g gathered) String() string {
	var all []string
	for key, v := range g {
		all = append(all, fmt.Sprintf("%s %v", key, v))
	}
	slices.Sort(all)
	return "\n\t" + strings.Join(all, "\n\t")
}

// begun is what every request changes whose model is known.
func begun(endpoint, kind, status, cause string) gathered {
	return gathered{
		"frontend_requests_started_total{" + endpoint + "," + kind + "}":                      1,
		"frontend_requests_total{" + endpoint + "," + cause + "," + kind + "," + status + "}": 1,
		"frontend_request_duration_seconds{} count":                                           1,
		"frontend_stage_duration_seconds{preprocess} count":                                   1,
	}
}

// routed is what a request changes that asks for a rank, and finds one so many times.
func routed(endpoint string, sent float64) gathered {
	g := gathered{
		"frontend_stage_duration_seconds{route} count":    max(sent, 1),
		"frontend_stage_duration_seconds{dispatch} count": sent,
		"router_overhead_scheduling_ms{} count":           max(sent, 1),
		"router_overhead_total_ms{} count":                max(sent, 1),
		"component_router_requests_started_total{}":       1,
		"component_router_requests_total{}":               1,
		"tasks_issued_total{" + endpoint + "}":            1,
	}
	if sent == 0 {
		delete(g, "frontend_stage_duration_seconds{dispatch} count")
		return g
	}
	if usualMode() == router.KV {
		g["component_router_kv_hit_rate{} count"], g["spillway_kv_prompts_total{estimate}"] = sent, 1
		if endpoint != "embeddings" {
			g["router_overhead_block_hashing_ms{} count"], g["router_overhead_seq_hashing_ms{} count"] = 1, 1
		}
	}
	return g
}

// answered is what an answer of so many tokens changes.
func answered(prompt, tokens float64) gathered {
	g := gathered{}
	for _, prefix := range []string{"frontend_", "component_router_"} {
		g[prefix+"input_sequence_tokens{} count"], g[prefix+"input_sequence_tokens{} sum"] = 1, prompt
		if tokens > 0 {
			g[prefix+"output_sequence_tokens{} count"], g[prefix+"output_sequence_tokens{} sum"] = 1, tokens
		}
	}
	if tokens > 0 {
		g["frontend_output_tokens_total{}"] = tokens
	}
	return g
}

// paced is what a stream of so many tokens changes.
func paced(tokens float64) gathered {
	g := gathered{}
	for _, prefix := range []string{"frontend_", "component_router_"} {
		g[prefix+"time_to_first_token_seconds{} count"] = 1
		if tokens > 1 {
			g[prefix+"inter_token_latency_seconds{} count"] = tokens - 1
		}
	}
	return g
}

// with is all of them together.
func (g gathered) with(more ...gathered) gathered {
	for _, m := range more {
		maps.Copy(g, m)
	}
	return g
}

// TestEveryOutcome compares all that a request changes on the page of metrics, by what becomes of
// it.
func TestEveryOutcome(t *testing.T) {
	const chat = "chat_completions"
	cachedReply := strings.Replace(reply, `"total_tokens":11`, `"total_tokens":11,"prompt_tokens_details":{"cached_tokens":8}`, 1)
	silent := func(c *conn, _ received) { c.gone() }
	many := `data: {"choices":[{"index":0,"delta":{"content":"a b c"}}],"usage":{"prompt_tokens":10,"completion_tokens":5}}` + "\n\n"
	send := func(path, body string, headers ...string) func(*front) {
		return func(f *front) { f.send("POST", path, body, headers...) }
	}
	const path = "/v1/chat/completions"
	responses := func(class string) gathered { return gathered{"spillway_upstream_responses_total{" + class + ",w}": 1} }
	rejected := func(reason string) gathered {
		return gathered{
			"tasks_rejected_total{" + chat + "}": 1, "frontend_model_rejection_total{" + chat + "}": 1,
			"spillway_rejections_total{" + reason + "}": 1,
		}
	}
	for _, tt := range []struct {
		name   string
		worker func(*conn, received)
		before func(*front)
		do     func(*front)
		want   gathered
	}{
		{"unary", saying(answer(200, jsonHeader, cachedReply)), nil, send(path, chatBody),
			begun(chat, "unary", "success", "").with(routed(chat, 1), answered(10, 1), responses("2xx"),
				gathered{"frontend_cached_tokens{} count": 1, "frontend_cached_tokens{} sum": 8})},
		{"a stream", streaming(role, hello, ended, counted, done), nil, send(path, streamBody),
			begun(chat, "stream", "success", "").with(routed(chat, 1), answered(10, 2), paced(2), responses("2xx"))},
		{"a stream of few events and many tokens", streaming(hello, many, ended, done), nil, send(path, streamBody),
			begun(chat, "stream", "success", "").with(routed(chat, 1), answered(10, 7), paced(7), responses("2xx"))},
		{"embeddings", saying(answer(200, jsonHeader, `{"usage":{"prompt_tokens":4}}`)), nil, send("/v1/embeddings", `{"model":"m","input":"x"}`),
			begun("embeddings", "unary", "success", "").with(routed("embeddings", 1), answered(4, 0), responses("2xx"),
				gathered{"frontend_embedding_latency_seconds{} count": 1})},
		{"no JSON", silent, nil, send(path, "{"), gathered{
			"frontend_requests_started_total{chat_completions,?,unary}": 1, "frontend_requests_total{chat_completions,validation,?,unary,error}": 1,
			"frontend_stage_duration_seconds{preprocess} count": 1}},
		{"no messages", silent, nil, send(path, `{"model":"m","stream":true}`), begun(chat, "stream", "error", "validation")},
		{"no such model", silent, nil, send(path, strings.Replace(chatBody, `"m"`, `"x"`, 1)), gathered{
			"frontend_requests_started_total{chat_completions,?,unary}": 1, "frontend_requests_total{chat_completions,not_found,?,unary,error}": 1,
			"frontend_stage_duration_seconds{preprocess} count": 1}},
		{"all busy", silent, func(f *front) { f.report(worker.DefaultID("w"), 86) }, send(path, streamBody),
			begun(chat, "stream", "error", "overload").with(routed(chat, 0), rejected("overloaded"))},
		{"the worker refuses", saying(answer(429, jsonHeader, "{}")), nil, send(path, chatBody),
			begun(chat, "unary", "error", "overload").with(routed(chat, 1), rejected("worker-overloaded"), responses("4xx"),
				gathered{"router_overhead_scheduling_ms{} count": 2, "router_overhead_total_ms{} count": 2, "frontend_stage_duration_seconds{route} count": 2,
					"spillway_rank_busy{backpressure,w}": 1, "spillway_worker_busy{w}": 1, "spillway_busy_transitions_total{busy,w}": 1,
					"spillway_workers{busy}": 1, "spillway_workers{unknown}": -1})},
		{"none routable", silent, func(f *front) {
			f.list().Inhibit(worker.DefaultID("w"), now().Add(time.Hour), now())
		}, send(path, chatBody), func() gathered {
			g := begun(chat, "unary", "error", "unavailable").with(routed(chat, 0), gathered{"spillway_rejections_total{no-healthy-workers}": 1})
			delete(g, "tasks_issued_total{"+chat+"}")
			return g
		}()},
		{"the client leaves", func(c *conn, _ received) { c.say(streamHead + chunk(hello)); c.gone() }, nil, func(f *front) {
			c := f.dial()
			c.post(streamBody)
			c.head()
			_, _ = c.chunk()
			_ = c.Close()
		}, begun(chat, "stream", "error", "cancelled").with(routed(chat, 1), answered(9, 1), paced(1), responses("2xx"),
			gathered{"frontend_disconnected_clients{}": 1, "frontend_model_cancellation_total{chat_completions,stream}": 1})},
		{"no time left", silent, nil, send(path, chatBody, "X-Request-Timeout-Ms: 30"),
			begun(chat, "unary", "error", "response_timeout").with(routed(chat, 1))},
		{"the worker fails", saying(answer(500, jsonHeader, "{}")), nil, send(path, chatBody),
			begun(chat, "unary", "error", "internal").with(routed(chat, 1), responses("5xx"))},
		{"strict", silent, nil, send(path, `{"model":"m","messages":[{"role":"user","content":"x"}],"functions":[]}`),
			begun(chat, "unary", "error", "not_implemented")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := begin(t, setup{busy: decodeLimit(), proxy: func(c *proxy.Config) { c.StrictValidation = true }}, served("w", newScript(t, tt.worker)))
			if tt.before != nil {
				tt.before(f)
			}
			before := f.gather()
			tt.do(f)
			var got gathered
			f.soon(func() bool { // the client may know before the books are closed
				got = f.gather().since(before)
				return maps.Equal(got, tt.want)
			})
			if !maps.Equal(got, tt.want) {
				t.Errorf("the page changed by %v\nwant %v", got.without(tt.want), tt.want.without(got))
			}
		})
	}
}

// soon gives what is asked a moment to come true; the caller judges.
func (f *front) soon(ok func() bool) {
	for deadline := time.Now().Add(patience / 10); !ok() && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
	}
}

// without are the series that o does not have so.
func (g gathered) without(o gathered) gathered {
	rest := gathered{}
	for key, v := range g {
		if ov, ok := o[key]; !ok || ov != v {
			rest[key] = v
		}
	}
	return rest
}

// TestMigration has a request that goes to a second worker, and one of which that fails as well.
func TestMigration(t *testing.T) {
	down := func(c *conn, _ received) { c.reset() }
	for _, tt := range []struct {
		second  func(*conn, received)
		outcome string
	}{
		{saying(answer(200, jsonHeader, reply)), "success"},
		{down, "failure"},
	} {
		t.Run(tt.outcome, func(t *testing.T) {
			first := served("a", newScript(t, down))
			first.ID = 1 // round robin begins there
			second := served("b", newScript(t, tt.second))
			second.ID = 2
			f := begin(t, setup{router: router.Config{Mode: router.RoundRobin}}, first, second)
			f.chat(chatBody)
			want := gathered{
				"frontend_model_migration_total{new_request}":                                      1,
				"frontend_model_migration_duration_seconds{new_request," + "success" + "} count":   0,
				"frontend_model_migration_duration_seconds{new_request," + "failure" + "} count":   0,
				"frontend_model_migration_duration_seconds{new_request," + "cancelled" + "} count": 0,
			}
			want["frontend_model_migration_duration_seconds{new_request,"+tt.outcome+"} count"] = 1
			var got gathered
			f.soon(func() bool { got = f.gather(); return len(want.without(got)) == 0 })
			if rest := want.without(got); len(rest) > 0 {
				t.Errorf("missing: %v\nof: %v", rest, got)
			}
		})
	}
}

// TestZeroAtStart has every child that a dashboard divides by, before any request.
func TestZeroAtStart(t *testing.T) {
	f := begin(t, setup{models: []string{"later"}}, served("w", newScript(t, saying(""))))
	page := f.metrics()
	for _, model := range []string{"m", "later"} {
		for _, series := range []string{
			`dynamo_tasks_issued_total{endpoint="embeddings",model=%q}`, `dynamo_tasks_rejected_total{endpoint="responses",model=%q}`,
			`dynamo_queued_requests{model=%q}`, `dynamo_frontend_queued_requests{model=%q}`, `dynamo_frontend_active_requests{model=%q}`,
			`dynamo_frontend_inflight_requests{model=%q}`,
			`dynamo_frontend_requests_started_total{endpoint="completions",model=%q,request_type="stream"}`,
			`dynamo_frontend_requests_total{endpoint="chat_completions",error_type="",model=%q,request_type="stream",status="success"}`,
			`dynamo_frontend_requests_total{endpoint="embeddings",error_type="internal",model=%q,request_type="unary",status="error"}`,
			`dynamo_frontend_model_rejection_total{endpoint="anthropic_messages",model=%q}`,
			`dynamo_frontend_model_cancellation_total{endpoint="chat_completions",model=%q,request_type="unary"}`,
			`dynamo_frontend_model_migration_total{migration_type="new_request",model=%q}`,
			`dynamo_frontend_output_tokens_total{model=%q}`, `dynamo_frontend_request_duration_seconds_count{model=%q}`,
			`dynamo_frontend_time_to_first_token_seconds_bucket{model=%q,le="0"}`, `dynamo_frontend_cached_tokens_sum{model=%q}`,
			`spillway_rejections_total{model=%q,reason="queue-full"}`, `spillway_workers{model=%q,state="busy"}`,
			`spillway_upstream_retries_total{model=%q,reason="status"}`,
		} {
			if line := "\n" + fmt.Sprintf(series, model) + " 0\n"; !strings.Contains(page, line) {
				t.Errorf("before any request there is no%s", line)
			}
		}
	}
	if strings.Contains(page, "unknown_model") || strings.Contains(page, `request_type="stream",status="success"} 1`) {
		t.Error("there are series of requests that never were")
	}
	if strings.Contains(page, `endpoint="embeddings",model="m",request_type="stream"`) {
		t.Error("there are series of streamed embeddings, which cannot be")
	}
}

// TestRemovedWorkerHasNoSeries removes a worker of two ranks, and one of a model that is in use.
func TestRemovedWorkerHasNoSeries(t *testing.T) {
	s := newScript(t, streaming(hello, ended, done))
	gone := served("gone", s)
	gone.DPSize = 2
	f := begin(t, setup{busy: decodeLimit()}, gone)
	for range 4 {
		f.chat(streamBody)
	}
	f.report(gone.ID, 86)
	page := f.metrics()
	for _, part := range []string{`worker="gone"`, `worker_id="` + gone.ID.String() + `"`, `dp_rank="1"`, "worker_last_inter_token"} {
		if !strings.Contains(page, part) {
			t.Errorf("before removal there is no %s", part)
		}
	}
	f.register(served("stays", s))
	f.routes.Unregister(gone.ID, now())
	page = f.metrics()
	for _, part := range []string{`worker="gone"`, `worker_id="` + gone.ID.String() + `"`, `dp_rank="1"`} {
		if strings.Contains(page, part) {
			t.Errorf("after removal there still is %s", part)
		}
	}
	if !strings.Contains(page, `worker="stays"`) || !strings.Contains(page, `spillway_workers{model="m",state="unknown"} 1`) {
		t.Error("the other worker has no series")
	}
}

// TestWorkerGauges compares what a page tells of a worker with what was reported of it.
func TestWorkerGauges(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	w := served("w", s)
	w.MaxNumBatchedTokens, w.MaxConcurrency, w.MaxModelLen, w.BlockSize = 2048, 64, 4096, 32
	f := begin(t, setup{busy: decodeLimit()}, w)
	f.report(w.ID, 86)
	for series, want := range map[string]string{
		`dynamo_worker_kv_blocks_active{dp_rank="0",model="m",worker="w"}`:                                                 "86",
		`dynamo_worker_kv_blocks_capacity{dp_rank="0",model="m",worker="w"}`:                                               "100",
		`dynamo_worker_kv_blocks_ratio{dp_rank="0",model="m",worker="w"}`:                                                  "0.86",
		`dynamo_frontend_worker_active_decode_blocks{dp_rank="0",worker_id="` + w.ID.String() + `",worker_type="decode"}`:  "0",
		`dynamo_frontend_worker_active_prefill_tokens{dp_rank="0",worker_id="` + w.ID.String() + `",worker_type="decode"}`: "0",
		`spillway_slots_inflight{dp_rank="0",worker="w"}`:                                                                  "0",
		`spillway_worker_busy{model="m",worker="w"}`:                                                                       "1",
		`spillway_rank_busy{check="decode_blocks",dp_rank="0",model="m",worker="w"}`:                                       "1",
		`spillway_rank_busy{check="prefill_tokens",dp_rank="0",model="m",worker="w"}`:                                      "0",
		`spillway_rank_busy{check="stale",dp_rank="0",model="m",worker="w"}`:                                               "",
		`spillway_busy_transitions_total{model="m",to="busy",worker="w"}`:                                                  "1",
		`spillway_busy_transitions_total{model="m",to="free",worker="w"}`:                                                  "0",
		`spillway_busy_threshold{check="decode_blocks",model="m"}`:                                                         "0.85",
		`spillway_busy_threshold{check="prefill_tokens",model="m"}`:                                                        "",
		`spillway_signal_stale{model="m",source="scrape",worker="w"}`:                                                      "0",
		`spillway_signal_stale{model="m",source="event",worker="w"}`:                                                       "",
		`spillway_signal_age_seconds{model="m",source="tracker",worker="w"}`:                                               "0",
		`spillway_workers{model="m",state="busy"}`:                                                                         "1",
		`dynamo_frontend_model_total_kv_blocks{model="m"}`:                                                                 "100",
		`dynamo_frontend_model_max_num_seqs{model="m"}`:                                                                    "64",
		`dynamo_frontend_model_max_num_batched_tokens{model="m"}`:                                                          "2048",
		`dynamo_frontend_model_context_length{model="m"}`:                                                                  "4096",
		`dynamo_frontend_model_kv_cache_block_size{model="m"}`:                                                             "32",
		`dynamo_frontend_model_migration_limit{model="m"}`:                                                                 "1",
	} {
		if got := f.metric(series); got != want {
			t.Errorf("%s = %q, want %q", series, got, want)
		}
	}
}

// TestMetricsPrefix renames the front end family, and no other.
func TestMetricsPrefix(t *testing.T) {
	f := begin(t, setup{proxy: func(c *proxy.Config) { c.MetricsPrefix = "1my-front.end" }}, served("w", newScript(t, saying(""))))
	page := f.metrics()
	if !strings.Contains(page, "\n_my_front_end_requests_started_total{") || strings.Contains(page, "dynamo_frontend_") ||
		!strings.Contains(page, "\ndynamo_tasks_issued_total{") {
		t.Error("want requests_started_total under _my_front_end_, none under dynamo_frontend_, and dynamo_tasks_issued_total")
	}
}

// TestPagesAddUp takes pages while requests are refused from all sides: in none of them more is
// rejected than was issued, nor more ended than begun.
func TestPagesAddUp(t *testing.T) {
	f := begin(t, setup{busy: decodeLimit()}, served("w", newScript(t, saying(""))))
	f.report(worker.DefaultID("w"), 86)
	var clients sync.WaitGroup
	for range 4 {
		clients.Go(func() {
			for range 100 {
				rec := httptest.NewRecorder()
				req := httptest.NewRequest(http.MethodPost, "/v1/chat/completions", strings.NewReader(chatBody))
				req.Header.Set("Content-Type", "application/json")
				f.server.Handler().ServeHTTP(rec, req)
			}
		})
	}
	over := make(chan struct{})
	go func() { clients.Wait(); close(over) }()
	for ended := false; !ended; {
		select {
		case <-over:
			ended = true
		default:
		}
		g := f.gather()
		issued, rejected := g["tasks_issued_total{chat_completions}"], g["tasks_rejected_total{chat_completions}"]
		started, closed := g["frontend_requests_started_total{chat_completions,unary}"], g["frontend_requests_total{chat_completions,overload,unary,error}"]
		if rejected > issued || closed > started {
			t.Fatalf("a page has %v of %v rejected, %v of %v ended", rejected, issued, closed, started)
		}
		if ended && (rejected != 400 || issued != 400 || closed != 400) {
			t.Errorf("at the end %v of %v rejected and %v ended, want 400 each", rejected, issued, closed)
		}
	}
}
