package proxy_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"spillway/busy"
	"spillway/proxy"
	"spillway/worker"
)

// report makes a worker of model m say how many of its 100 KV blocks are in use.
func (f *front) report(id worker.ID, used uint64) {
	now := time.Now()
	f.list().Observe(busy.Sample{
		Rank: worker.Rank{Worker: id}, TakenAt: now, KVUsedBlocks: &used, KVTotalBlocks: new(uint64(100)),
	}, now)
}

// decodeLimit is a configuration in which a worker is busy above 85 of 100 blocks.
func decodeLimit() busy.Config {
	cfg := busy.DefaultConfig()
	cfg.ActiveDecodeBlocksThreshold = new(0.85)
	return cfg
}

// overloaded are the headers of the documented refusal.
var overloaded = []string{"Content-Type: application/json", "Retry-After: 1", "X-Spillway-Reason: overloaded",
	"X-Llm-D-Request-Dropped-Reason: rejected-saturated", "X-Should-Retry: ", "X-Spillway-Worker: ", fmt.Sprintf("Content-Length: %d", len(busyBody))}

// TestOverload has the rows of the status table in which all workers are busy.
func TestOverload(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	w1, w2 := served("w1", s), served("w2", s)
	wire := func(c *raw) string { // all of it, as it goes over the wire
		c.post(streamBody)
		status, header := c.head()
		body := make([]byte, len(busyBody))
		n, _ := c.br.Read(body)
		var kept []string
		for line := range strings.Lines(header) {
			if name, _, _ := strings.Cut(line, ":"); name != "Date" && name != "X-Request-Id" {
				kept = append(kept, strings.TrimSpace(line))
			}
		}
		return status + "\n" + strings.Join(kept, "\n") + "\n\n" + string(body[:n])
	}
	f := begin(t, setup{busy: decodeLimit()}, w1, w2)
	f.report(w1.ID, 86)
	f.chat(chatBody).is(t, "one of two busy", 200, reply, "X-Spillway-Worker: w2")
	for range 20 { // row 67
		f.chat(chatBody).is(t, "w1 busy, w2 free", 200, reply, "X-Spillway-Worker: w2")
	}
	f.report(w2.ID, 86)
	f.chat(chatBody).is(t, "row 66", 503, busyBody, overloaded...)
	f.chat(streamBody).is(t, "row 72", 503, busyBody, overloaded...)
	f.send("POST", "/v1/completions", `{"prompt":"x"}`).is(t, "completions", 503, busyBody, overloaded...)
	f.send("POST", "/v1/embeddings", `{"input":"x"}`).is(t, "embeddings", 503, busyBody, overloaded...)
	const exact = `HTTP/1.1 503 Service Unavailable
Content-Length: 127
Content-Type: application/json
Retry-After: 1
X-Llm-D-Request-Dropped-Reason: rejected-saturated
X-Spillway-Reason: overloaded

` + busyBody
	if got := wire(f.dial()); got != exact {
		t.Errorf("on the wire:\n%s\nwant:\n%s", got, exact)
	}
	f.chat("{").is(t, "row 73", 400, invalid("the request body is not valid JSON (near byte 1)"))
	for _, path := range []string{"/v1/models", "/health", "/ready"} { // row 74
		if g := f.send("GET", path, ""); g.status != 200 {
			t.Errorf("GET %s while all are busy = %d, want 200", path, g.status)
		}
	}
	f.list().Inhibit(w2.ID, time.Now().Add(time.Hour), time.Now())
	f.chat(chatBody).is(t, "row 68", 503, busyBody, overloaded...)
	f.list().Inhibit(w1.ID, time.Now().Add(time.Hour), time.Now())
	none := flat(503, "service_unavailable", "Service temporarily unavailable: No workers available for model m")
	f.chat(chatBody).is(t, "row 65", 503, none, "X-Spillway-Reason: no-healthy-workers",
		"X-Llm-D-Request-Dropped-Reason: rejected-no-endpoints", "Retry-After: 3600")
	for series, want := range map[string]string{
		`dynamo_tasks_issued_total{endpoint="chat_completions",model="m"}`:   "25", // not the last, nor the malformed one
		`dynamo_tasks_rejected_total{endpoint="chat_completions",model="m"}`: "4",
		`dynamo_tasks_rejected_total{endpoint="completions",model="m"}`:      "1",
		`dynamo_tasks_issued_total{endpoint="embeddings",model="m"}`:         "1",
		`spillway_rejections_total{model="m",reason="overloaded"}`:           "6",
		`spillway_rejections_total{model="m",reason="no-healthy-workers"}`:   "1",
	} {
		if got := f.metric(series); got != want {
			t.Errorf("%s = %s, want %s", series, got, want)
		}
	}
}

// TestSkimmed: while all are busy, the text of a request is not looked at, since it is refused in any
// case. All else is judged as ever, and so is everything as soon as one is free.
func TestSkimmed(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	w := served("w", s)
	f := begin(t, setup{models: []string{"M"}, busy: decodeLimit()}, w)
	long := func(body string) string { // short ones are always scanned
		return fmt.Sprintf(`%s,"user":"%0*d"}`, strings.TrimSuffix(body, "}"), 4096, 0)
	}
	var (
		broken  = long(`{"model":"m","messages":[{"role":"user","content":"\x"}]}`)
		escapes = long(`{"messages":[{"content":"\\\"\\"},{"content":"\\\\"}],"stream":true,"model":"m"}`)
		scanned = "the request body is not valid JSON (near byte 51)"
	)
	f.chat(broken).is(t, "bad text before all are busy", 400, invalid(scanned))
	f.report(w.ID, 100)
	shed := f.chat(chatBody) // from here on refusals are expected for a second; it may be over at any time
	shed.is(t, "the first refusal", 503, busyBody)
	skimmed := false
	for until := time.Now().Add(time.Minute); !skimmed && time.Now().Before(until); f.chat(chatBody) {
		skimmed = f.chat(broken).status == 503
	}
	if !skimmed {
		t.Error("bad text is looked at while all are busy")
	}
	f.chat(escapes).is(t, "quotes and backslashes in a text", 503, busyBody, overloaded...)
	if started := f.metric(`dynamo_frontend_requests_started_total{endpoint="chat_completions",model="m",request_type="stream"}`); started != "1" {
		t.Errorf("streams that were skimmed: %s, want 1", started)
	}
	for _, tt := range []struct {
		name, body string
		status     int
		want       string
		headers    []string
	}{
		{"no end", `{"user":"` + strings.Repeat("x", 4096), 400, invalid("the request body is not valid JSON (near byte 4105)"), nil},
		{"no messages", `{"model":"m","messages":[]}`, 400, invalid("messages must be an array with at least one message"), nil},
		{"no model", `{"messages":[{}]}`, 400, invalid("model is required"), nil},
		{"unknown model", `{"model":"X","messages":[{}]}`, 404, flat(404, "not_found", "Model not found: X"), nil},
		{"a model without workers", `{"model":"M","messages":[{}]}`, 503, flat(503, "service_unavailable", "Service temporarily unavailable: No workers available for model M"), nil},
		{"pinned, bad text", `{"model":"m","messages":[{"role":"user","content":"\x"}]}`, 400, invalid(scanned), []string{"X-Worker-Instance-Id: " + fmt.Sprint(uint64(w.ID))}},
		{"pinned", chatBody, 503, flat(503, "service_unavailable", "Service temporarily unavailable: Selected worker is busy, please retry later"), []string{"X-Worker-Instance-Id: " + fmt.Sprint(uint64(w.ID))}},
	} {
		f.chat(chatBody)
		if strings.HasSuffix(tt.body, "}") {
			tt.body = long(tt.body)
		}
		f.chat(tt.body, tt.headers...).is(t, tt.name, tt.status, tt.want)
	}
	f.chat(chatBody)
	f.report(w.ID, 10)
	f.chat(broken).is(t, "bad text as soon as there is room", 400, invalid(scanned))
	f.chat(chatBody).is(t, "a request as soon as there is room", 200, reply)
}

// TestUnavailable has the rows in which there is nobody to be busy.
func TestUnavailable(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{models: []string{"M"}, busy: decodeLimit()}, served("w", s))
	f.chat(`{"model":"X","messages":[{}]}`).is(t, "row 63", 404, flat(404, "not_found", "Model not found: X"), "X-Spillway-Reason: ")
	f.chat(`{"model":"M","messages":[{}]}`).is(t, "row 64", 503,
		flat(503, "service_unavailable", "Service temporarily unavailable: No workers available for model M"),
		"X-Spillway-Reason: no-workers", "X-Llm-D-Request-Dropped-Reason: rejected-no-endpoints", "Retry-After: ")
	for _, series := range []string{`dynamo_tasks_rejected_total{endpoint="chat_completions",model="M"}`, `dynamo_tasks_issued_total{endpoint="chat_completions",model="M"}`} {
		if got := f.metric(series); got != "0" {
			t.Errorf("%s = %s, want 0", series, got)
		}
	}
	w := served("w", s)
	f.list().SetHealthy(w.ID, false, time.Now())
	f.chat(`{"model":"m","messages":[{}]}`).is(t, "an unhealthy worker", 503,
		flat(503, "service_unavailable", "Service temporarily unavailable: No workers available for model m"),
		"X-Spillway-Reason: no-healthy-workers", "Retry-After: 1")
	if g := f.send("GET", "/v1/models", ""); strings.Contains(g.body, `"m"`) {
		t.Errorf("GET /v1/models lists a model whose only worker is down: %s", g.body)
	}
}

// TestPins has the rows with a pinned worker.
func TestPins(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	w1, w2 := served("w1", s), served("w2", s)
	f := begin(t, setup{busy: decodeLimit()}, w1, w2)
	f.report(w2.ID, 86)
	pinned := flat(503, "service_unavailable", "Service temporarily unavailable: Selected worker is busy, please retry later")
	f.chat(chatBody, fmt.Sprintf("X-Dynamo-Worker-Instance-Id: %d", w2.ID)).is(t, "row 70", 503, pinned,
		"X-Spillway-Reason: overloaded-pinned", "X-Llm-D-Request-Dropped-Reason: rejected-saturated", "Retry-After: 1")
	f.chat(chatBody, "X-Dynamo-Worker-Instance-Id: 77").is(t, "row 71", 400, invalid("the pinned worker or rank does not serve the model"))
	f.chat(chatBody, "X-Dynamo-Worker-Instance-Id: w1").is(t, "pinned to the free one", 200, reply, "X-Spillway-Worker: w1")
	if got := f.metric(`dynamo_tasks_rejected_total{endpoint="chat_completions",model="m"}`); got != "1" {
		t.Errorf("rejected: %s, want 1", got)
	}
	hintless := begin(t, setup{proxy: func(c *proxy.Config) { c.DisableRoutingHints = true }}, w1)
	hintless.chat(chatBody, "X-Dynamo-Worker-Instance-Id: 77").is(t, "a pin with hints disabled", 200, reply)
}

// TestOverloadSettings has the settings that change a refusal.
func TestOverloadSettings(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	full := newScript(t, saying(answer(429, "Retry-After: 9\r\n", "")))
	withCode := func(code string) string { return strings.Replace(busyBody, `"code":503`, `"code":`+code, 1) }
	for _, tt := range []struct {
		name    string
		proxy   func(*proxy.Config)
		status  int
		body    string
		headers []string
	}{
		{"status 529", func(c *proxy.Config) { c.OverloadStatusCode = "529" }, 529, withCode("529"), []string{"Retry-After: 1"}}, // row 69
		{"status 429", func(c *proxy.Config) { c.OverloadStatusCode = "429" }, 429, withCode("429"), nil},
		{"status 200", func(c *proxy.Config) { c.OverloadStatusCode = "200" }, 200, withCode("200"), nil},
		{"status 150", func(c *proxy.Config) { c.OverloadStatusCode = "150" }, 503, busyBody, nil}, // row 80
		{"status 99", func(c *proxy.Config) { c.OverloadStatusCode = "99" }, 503, busyBody, nil},
		{"status abc", func(c *proxy.Config) { c.OverloadStatusCode = "abc" }, 503, busyBody, nil},
		{"status 204", func(c *proxy.Config) { c.OverloadStatusCode = "204" }, 503, busyBody, nil},
		{"envelope openai", func(c *proxy.Config) { c.ErrorEnvelope = "openai" }, 503, `{"error":` + busyBody + `}`, nil},
		{"no Retry-After", func(c *proxy.Config) { c.RetryAfter = "0" }, 503, busyBody, []string{"Retry-After: ", "Retry-After-Ms: "}},
		{"Retry-After 5", func(c *proxy.Config) { c.RetryAfter = "5" }, 503, busyBody, []string{"Retry-After: 5"}},
		{"no retries by SDKs", func(c *proxy.Config) { c.SuppressSDKRetry = true }, 503, busyBody, []string{"X-Should-Retry: false"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w, v := served("w", s), served("v", full, "full")
			log := &lines{}
			f := begin(t, setup{busy: decodeLimit(), proxy: tt.proxy, log: log.logger()}, w, v)
			f.report(w.ID, 90)
			headers := append([]string{"X-Spillway-Reason: overloaded", "Content-Type: application/json"}, tt.headers...)
			f.chat(chatBody[:1]+`"x":1,`+chatBody[1:]).is(t, "chat", tt.status, tt.body, headers...)
			if g := f.chat(strings.Replace(chatBody, `"m"`, `"full"`, 1)); g.status != tt.status || g.body != tt.body || g.header.Get("Retry-After") != "9" {
				t.Errorf("refused by the worker = %d %s, Retry-After %s; want the same %d %s, and its own 9", g.status, g.body, g.header.Get("Retry-After"), tt.status, tt.body)
			}
			unusable := strings.HasPrefix(tt.name, "status") && tt.status == 503
			if warned := strings.Contains(log.String(), "overload-status-code"); warned != unusable {
				t.Errorf("a warning at start: %v, want %v", warned, unusable)
			}
		})
	}
}

// TestRetryAfterAuto: when to come back goes by the room that the refusing model or worker has
// freed, whatever others do.
func TestRetryAfterAuto(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	quick, idle, stuck := served("quick", s), served("idle", s), served("stuck", s, "still")
	f := begin(t, setup{busy: decodeLimit(), proxy: func(c *proxy.Config) { c.RetryAfter = "auto" }}, quick, idle, stuck)
	f.report(idle.ID, 90)
	for range 5 {
		f.chat(chatBody).is(t, "before", 200, reply, "X-Spillway-Worker: quick")
	}
	f.report(quick.ID, 90)
	now := time.Now()
	f.partition("still").Busy.Observe(busy.Sample{
		Rank: worker.Rank{Worker: stuck.ID}, TakenAt: now, KVUsedBlocks: new(uint64(90)), KVTotalBlocks: new(uint64(100)),
	}, now)
	for _, tt := range []struct {
		name, model, pin string
		least, most      int // ms
	}{
		{"a model that frees room", "m", "", 1000, 1250},
		{"a worker that frees room", "m", "quick", 1000, 1250},
		{"a worker of it that frees none", "m", "idle", 24000, 30000},
		{"another model, which frees none", "still", "", 24000, 30000},
	} {
		var pin []string
		if tt.pin != "" {
			pin = []string{"X-Worker-Instance-Id: " + tt.pin}
		}
		g := f.chat(strings.Replace(chatBody, `"m"`, `"`+tt.model+`"`, 1), pin...)
		var seconds, ms int
		if _, err := fmt.Sscan(g.header.Get("Retry-After")+" "+g.header.Get("Retry-After-Ms"), &seconds, &ms); err != nil || g.status != 503 ||
			ms < tt.least || ms > tt.most || seconds != (ms+999)/1000 {
			t.Errorf("%s: %d, Retry-After %q, Retry-After-Ms %q, want 503 and %d to %d ms", tt.name,
				g.status, g.header.Get("Retry-After"), g.header.Get("Retry-After-Ms"), tt.least, tt.most)
		}
	}
}

// TestMarksWithoutThresholds is row 79: nothing is refused, but a marked worker comes last.
func TestMarksWithoutThresholds(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	w1, w2 := served("w1", s), served("w2", s)
	f := begin(t, setup{}, w1, w2)
	f.report(w1.ID, 100)
	f.report(w2.ID, 100)
	f.list().Mark(w1.ID, nil, time.Hour, time.Now())
	for range 5 {
		f.chat(chatBody).is(t, "w1 marked", 200, reply, "X-Spillway-Worker: w2")
	}
	f.list().Mark(w2.ID, nil, time.Hour, time.Now())
	f.chat(chatBody).is(t, "both marked", 200, reply)
}

// TestThresholdCalls has the rows of calls to /busy_threshold.
func TestThresholdCalls(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	w := served("w", s, "M")
	f := begin(t, setup{models: []string{"A"}, aliases: map[string]string{"short": "M"}}, w)
	entry := func(model, decode, prefill string) string {
		return fmt.Sprintf(`{"model":%q,"active_decode_blocks_threshold":%s,"active_prefill_tokens_threshold":%s}`, model, decode, prefill)
	}
	const above = "active_decode_blocks_threshold: 1.1 is not within 0..1"
	fail := func(message string) string { return fmt.Sprintf(`{"error":%q}`, message) }
	const count = "active_prefill_tokens_threshold: must be an integer from 0 to 2^63-1"
	for _, tt := range []struct {
		row, method, target, body string
		status                    int
		want                      string
	}{
		{"before", "GET", "", "", 200, `{"thresholds":[` + entry("A", "null", "null") + "," + entry("M", "null", "null") + "]}"},
		{"81", "POST", "", `{"model":"M","active_decode_blocks_threshold":0.85,"active_prefill_tokens_threshold":10000}`, 200, entry("M", "0.85", "10000")},
		{"82", "POST", "", `{"model":"M"}`, 200, entry("M", "0.85", "10000")},
		{"82, by alias", "POST", "", `{"model":"short","active_decode_blocks_threshold":null}`, 200, entry("M", "0.85", "10000")},
		{"83", "POST", "", `{"model":"nope"}`, 200, entry("nope", "null", "null")},
		{"84", "POST", "", `{"model":"nope","active_prefill_tokens_threshold":1}`, 404, fail("model: \"nope\" is unknown")},
		{"85", "POST", "", `{"model":"M","active_decode_blocks_threshold":1.1}`, 400, fail(above)},
		{"85", "POST", "", `{"model":"M","active_decode_blocks_threshold":-0.1}`, 400, fail("active_decode_blocks_threshold: -0.1 is not within 0..1")},
		{"overflow", "POST", "", `{"model":"M","active_decode_blocks_threshold":1e400}`, 400, fail("active_decode_blocks_threshold: +Inf is not within 0..1")},
		{"NaN", "POST", "", `{"model":"M","active_decode_blocks_threshold":NaN}`, 400, fail("the body is not valid JSON")},
		{"86", "POST", "", `{"model":"M","active_decode_blocks_threshold":0.5,"active_prefill_tokens_threshold_frac":-1}`, 400,
			fail("active_prefill_tokens_threshold_frac: -1 is not a finite number of at least 0")},
		{"87", "POST", "", `{"model":"M","active_prefill_tokens_threshold":-1}`, 422, fail(count)},
		{"87", "POST", "", `{"model":"M","active_prefill_tokens_threshold":1.5}`, 422, fail(count)},
		{"87", "POST", "", `{"model":"M","active_prefill_tokens_threshold":"1"}`, 422, fail(count)},
		{"overflow", "POST", "", `{"model":"M","active_prefill_tokens_threshold":9223372036854775808}`, 422, fail(count)},
		{"88", "POST", "", `{"model":"nope","active_decode_blocks_threshold":2}`, 400, fail("active_decode_blocks_threshold: 2 is not within 0..1")},
		{"89", "POST", "", `{}`, 422, fail("model: must be a string")},
		{"90", "POST", "", `{`, 400, fail("the body is not valid JSON")},
		{"too large", "POST", "", `{"model":"M","x":"` + strings.Repeat("x", 64<<10) + `"}`, 413, fail("the body exceeds 64 KiB")},
		{"unchanged by all of these", "GET", "?model=M", "", 200, `{"thresholds":[` + entry("M", "0.85", "10000") + "]}"},
		{"a third one", "POST", "", `{"model":"M","active_prefill_tokens_threshold_frac":2}`, 200,
			strings.TrimSuffix(entry("M", "0.85", "10000"), "}") + `,"active_prefill_tokens_threshold_frac":2}`},
		{"filter, unknown", "GET", "?model=nope", "", 200, `{"thresholds":[]}`},
		{"DELETE one", "DELETE", "?model=M&field=active_prefill_tokens_threshold_frac", "", 200, entry("M", "0.85", "10000")},
		{"DELETE a field that is none", "DELETE", "?model=M&field=x", "", 400, fail("field: \"x\" is no threshold")},
		{"DELETE of nobody", "DELETE", "?model=nope", "", 404, fail("model: \"nope\" is unknown")},
		{"DELETE all", "DELETE", "?model=short", "", 200, entry("M", "null", "null")},
	} {
		f.send(tt.method, "/busy_threshold"+tt.target, tt.body).is(t, "row "+tt.row, tt.status, tt.want+"\n", "Content-Type: application/json")
	}
	f.send("POST", "/busy_threshold", `{"model":"M"}`, "Content-Type: application/x-www-form-urlencoded").is(t, "row 91", 415,
		fail("Content-Type must be application/json")+"\n")

	// A change is in force before its answer is there.
	f.routes.SetThresholds("M", func(busy.Thresholds) busy.Thresholds { return busy.Thresholds{} }, time.Now())
	list := f.partition("M").Busy
	list.Observe(busy.Sample{Rank: worker.Rank{Worker: w.ID}, TakenAt: now(), KVUsedBlocks: new(uint64(80)), KVTotalBlocks: new(uint64(100))}, now())
	ask := func() int { return f.chat(`{"model":"M","messages":[{}]}`).status }
	for _, tt := range []struct {
		method, target, body string
		want                 int
	}{
		{"POST", "", `{"model":"M","active_decode_blocks_threshold":0.7}`, http.StatusServiceUnavailable},
		{"POST", "", `{"model":"M","active_decode_blocks_threshold":0.8}`, http.StatusOK},
		{"POST", "", `{"model":"M","active_decode_blocks_threshold":0}`, http.StatusServiceUnavailable},
		{"DELETE", "?model=M", "", http.StatusOK},
	} {
		f.send(tt.method, "/busy_threshold"+tt.target, tt.body)
		if got := ask(); got != tt.want {
			t.Errorf("with 80 of 100 blocks used, after %s %s: %d, want %d", tt.method, tt.body, got, tt.want)
		}
	}
}
