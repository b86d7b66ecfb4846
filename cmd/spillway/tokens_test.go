package main

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
)

// tokenFront is a front end in mode kv before simulated workers, as processes.
type tokenFront struct {
	t        *testing.T
	url, sim string
	next     int // prompt that was not served yet
}

func startTokenFront(t *testing.T, sim []string, front ...string) *tokenFront {
	t.Helper()
	workers := start(t, nil, append([]string{"sim", "--port", "0", "--count", "2", "--speed", "50"}, sim...)...).await(`--workers: (\S+)\n`)
	first, _, _ := strings.Cut(workers, ",")
	p := start(t, nil, append([]string{"frontend", "--workers", workers, "--http-port", "0", "--http-host", "127.0.0.1", "--router-mode", "kv"}, front...)...)
	f := &tokenFront{t: t, url: p.await(`Front end: (\S+)\n`), sim: first}
	eventually(t, "both workers can be sent to", func() bool {
		_, page := fetch(t, f.url+"/metrics")
		return strings.Contains(page, `spillway_workers{model="sim-model",state="free"} 2`)
	})
	return f
}

func (f *tokenFront) fault(fault string) {
	f.t.Helper()
	for worker := range 2 {
		res, err := http.Post(f.sim+"/sim/fault", "application/json", strings.NewReader(fmt.Sprintf(fault, worker)))
		if err != nil {
			f.t.Fatal(err)
		}
		if body, err := io.ReadAll(res.Body); res.StatusCode != 200 || err != nil {
			f.t.Fatalf("POST /sim/fault = %d %s, %v", res.StatusCode, body, err)
		}
		_ = res.Body.Close()
	}
}

// serves sends chats with texts of their own at once, and wants them all answered.
func (f *tokenFront) serves(from, to int) {
	f.t.Helper()
	var all sync.WaitGroup
	for i := from; i < to; i++ {
		all.Go(func() {
			body := fmt.Sprintf(`{"model":"sim-model","max_tokens":2,%s"messages":[{"role":"user","content":"This is conversation %d. %s"}]}`,
				[]string{"", `"stream":true,"stream_options":{"include_usage":true},`}[i%2], i, strings.Repeat("It was a dark and stormy night. ", 8))
			res, err := http.Post(f.url+"/v1/chat/completions", "application/json", strings.NewReader(body))
			if err != nil {
				f.t.Error(err)
				return
			}
			defer res.Body.Close()
			if text, err := io.ReadAll(res.Body); res.StatusCode != 200 || err != nil {
				f.t.Errorf("chat %d: %s %s, %v", i, res.Status, text, err)
			}
		})
	}
	all.Wait()
}

// metric is the value of a series, as it is written on the page; 0 if it is not there.
func (f *tokenFront) metric(series string) (value float64) {
	f.t.Helper()
	_, page := fetch(f.t, f.url+"/metrics")
	if _, line, ok := strings.Cut(page, "\n"+series+" "); ok {
		if _, err := fmt.Sscan(line, &value); err != nil {
			f.t.Fatalf("%s: %v", series, err)
		}
	}
	return value
}

// want waits until a series has at least some value: a request is over before it is counted.
func (f *tokenFront) want(series string, least float64) {
	f.t.Helper()
	eventually(f.t, fmt.Sprintf("%s is at least %v", series, least), func() bool { return f.metric(series) >= least })
}

func prompts(outcome string) string {
	return `spillway_tokenizer_prompts_total{outcome="` + outcome + `"}`
}
func calls(source, outcome string) string {
	return `spillway_tokenizer_calls_total{outcome="` + outcome + `",source="` + source + `"}`
}
func sourceOf(source string) string {
	return `spillway_kv_prompts_total{model="sim-model",source="` + source + `"}`
}

// TestTokens: the front end has the tokens of prompts from workers of either kind, once for each prompt,
// and they are those that the worker counts.
func TestTokens(t *testing.T) {
	for route, flags := range map[string][]string{"tokenize": nil, "render": {"--render-routes"}} {
		t.Run(route, func(t *testing.T) {
			f := startTokenFront(t, flags)
			f.learns(20)
			asked, known := f.metric(calls(route, "ok")), f.metric(prompts("cached"))
			f.serves(0, 20)
			f.want(prompts("cached"), known+20)
			f.want(sourceOf("tokenizer"), 40)
			f.want(`spillway_token_count_error_ratio_count{model="sim-model"}`, 40)
			for series, want := range map[string]float64{
				calls(route, "ok"): asked, "dynamo_frontend_tokenizer_cache_hits_total": known + 20, "spillway_tokenizer_inflight": 0,
				`spillway_token_count_error_ratio_bucket{model="sim-model",le="0"}`: f.metric(`spillway_token_count_error_ratio_count{model="sim-model"}`),
			} {
				if got := f.metric(series); got != want {
					t.Errorf("%s is %v, want %v", series, got, want)
				}
			}
		})
	}
}

// learns serves the first n prompts until the tokens of all are remembered. On a slow machine a call may
// take too long, and is tried again.
func (f *tokenFront) learns(n int) {
	f.t.Helper()
	eventually(f.t, "the tokens of all prompts are remembered", func() bool {
		f.serves(0, n)
		return f.metric("spillway_tokenizer_cache_entries") == float64(n)
	})
	f.next = max(f.next, n)
}

// until serves prompts that were not served before until something is so.
func (f *tokenFront) until(what string, ok func() bool) {
	f.t.Helper()
	eventually(f.t, what, func() bool {
		f.serves(f.next, f.next+20)
		f.next += 20
		return ok()
	})
}

// TestTokenizerInTrouble: whatever becomes of the tokenizer, requests are served, and what it costs is
// in the metrics.
func TestTokenizerInTrouble(t *testing.T) {
	const countOnly, compared = `spillway_tokenizer_count_only{model="sim-model"}`, `spillway_token_count_error_ratio_count{model="sim-model"}`
	t.Run("off", func(t *testing.T) {
		f := startTokenFront(t, nil)
		f.fault(`{"fault":"tokenizer-off","worker":%d}`)
		f.until("it is known that there is no route", func() bool { return f.metric(prompts("no_route")) >= 60 })
		if got := f.metric(calls("tokenize", "unsupported")); got < 1 || got > 40 {
			t.Errorf("%v calls were told that there is no such route, want few", got)
		}
		f.want(sourceOf("estimate"), float64(f.next))
	})
	t.Run("slow", func(t *testing.T) {
		f := startTokenFront(t, nil)
		f.fault(`{"fault":"tokenizer-slow","delay_ms":60000,"worker":%d}`)
		f.until("workers that have timed out are left alone", func() bool { return f.metric(prompts("resting")) > 0 })
		f.want(calls("tokenize", "timeout"), 3)
		f.want(`dynamo_frontend_tokenizer_latency_ms_count{operation="tokenize"}`, 3)
		f.want(sourceOf("estimate"), float64(f.next))
	})
	t.Run("failing", func(t *testing.T) {
		f := startTokenFront(t, nil, "--tokenizer", "tokenize")
		f.fault(`{"fault":"tokenizer-fail","worker":%d}`)
		f.until("workers that have failed are left alone", func() bool { return f.metric(prompts("resting")) > 0 })
		f.want(calls("tokenize", "failed"), 3)
		f.want(sourceOf("estimate"), float64(f.next))
		f.fault(`{"fault":"tokenizer-fail","count":1,"worker":%d}`) // it is well again, but for one more
		f.until("prompts are tokenised again", func() bool { return f.metric(calls("tokenize", "ok")) > 0 })
	})
	t.Run("lying", func(t *testing.T) {
		f := startTokenFront(t, []string{"--render-routes"})
		f.fault(`{"fault":"tokenizer-lie","extra_tokens":40,"worker":%d}`)
		f.until("tokens are used for their number alone", func() bool { return f.metric(countOnly) == 1 && f.metric(sourceOf("count")) > 0 })
		f.want(compared, 3)
		if got := f.metric(`spillway_token_count_error_ratio_bucket{model="sim-model",le="0.01"}`); got != 0 {
			t.Errorf("%v counts were right", got)
		}
		f.fault(`{"fault":"tokenizer-lie","share":0.000001,"worker":%d}`) // the truth from here on
		f.until("tokens are used again", func() bool { return f.metric(countOnly) == 0 })
		before := f.metric(sourceOf("tokenizer"))
		f.until("prompts have tokens again", func() bool { return f.metric(sourceOf("tokenizer")) > before })
	})
	t.Run("nobody's", func(t *testing.T) {
		f := startTokenFront(t, nil, "--tokenizer", "estimate")
		f.serves(0, 10)
		f.want(sourceOf("estimate"), 10)
		if _, page := fetch(t, f.url+"/metrics"); strings.Contains(page, "spillway_tokenizer_") {
			t.Error("there are metrics of a tokenizer that is not used")
		}
	})
}

// TestTokenizerBeside: one server is asked for all, by the model's name, and workers are not.
func TestTokenizerBeside(t *testing.T) {
	beside := start(t, nil, "sim", "--port", "0", "--render-routes").await(`--workers: (\S+)\n`)
	f := startTokenFront(t, nil, "--tokenizer-url", beside+"/", "--tokenizer", "render") // which the workers do not have
	f.learns(10)
	f.want(sourceOf("tokenizer"), 10)
}
