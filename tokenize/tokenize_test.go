package tokenize_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"spillway/tokenize"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// engine answers calls as a worker of some kind does. It stands where net/http's transport would.
type engine struct {
	mu     sync.Mutex
	paths  []string // asked for, in order
	answer func(req *http.Request, body string) (status int, answer string)
	delay  time.Duration
	deaf   time.Duration // how long it takes to notice that a call was given up
}

func (e *engine) RoundTrip(req *http.Request) (*http.Response, error) {
	b, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	e.paths = append(e.paths, req.URL.Host+req.URL.Path)
	delay, deaf, answer := e.delay, e.deaf, e.answer
	e.mu.Unlock()
	select {
	case <-time.After(delay):
	case <-req.Context().Done():
		time.Sleep(deaf)
		return nil, req.Context().Err()
	}
	status, text := answer(req, string(b))
	if status == 0 {
		return nil, errors.New("connection refused")
	}
	return &http.Response{StatusCode: status, Status: fmt.Sprint(status), Body: io.NopCloser(strings.NewReader(text)), Header: http.Header{}}, nil
}

func (e *engine) take() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	paths := e.paths
	e.paths = nil
	return paths
}

func (e *engine) set(answer func(*http.Request, string) (int, string)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.answer = answer
}

// having answers at some paths, and is not there at others.
func having(paths map[string]string) func(*http.Request, string) (int, string) {
	return func(req *http.Request, _ string) (int, string) {
		if text, ok := paths[req.URL.Path]; ok {
			return 200, text
		}
		return 404, `{"detail":"Not Found"}`
	}
}

func always(status int, text string) func(*http.Request, string) (int, string) {
	return func(*http.Request, string) (int, string) { return status, text }
}

const (
	renderChat        = "/v1/chat/completions/render"
	renderCompletions = "/v1/completions/render"
	threeTokens       = `{"count":3,"tokens":[1,2,3]}`
)

// fixture is a Tokenizer before engines, with its metrics.
type fixture struct {
	*tokenize.Tokenizer
	engine  *engine
	metrics *prometheus.Registry
	n       atomic.Int64
}

func set(t *testing.T, change func(*tokenize.Config), workers ...tokenize.Worker) *fixture {
	t.Helper()
	if workers == nil {
		workers = []tokenize.Worker{{ID: 1, Name: "w1", Endpoint: "http://w1"}}
	}
	f := &fixture{engine: &engine{answer: having(map[string]string{"/tokenize": threeTokens})}, metrics: prometheus.NewRegistry()}
	cfg := tokenize.DefaultConfig()
	if change != nil {
		change(&cfg)
	}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	f.Tokenizer = tokenize.New(cfg, func(_ *tokenize.Prompt, ask func(tokenize.Worker) bool) {
		for _, w := range workers {
			if !ask(w) {
				return
			}
		}
	}, f.metrics, slog.New(slog.DiscardHandler))
	f.Through(f.engine)
	t.Cleanup(f.Close)
	return f
}

// count is the value of a metric whose labels have the given values, in the order of their names.
func (f *fixture) count(t *testing.T, name string, labels ...string) float64 {
	t.Helper()
	families, err := f.metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, mf := range families {
		for _, m := range mf.Metric {
			var values []string
			for _, l := range m.Label {
				values = append(values, l.GetValue())
			}
			if mf.GetName() != name || !slices.Equal(values, labels) {
				continue
			}
			return m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	t.Fatalf("there is no metric %s %v", name, labels)
	return 0
}

func (f *fixture) prompts(t *testing.T, outcome string, want float64) {
	t.Helper()
	if got := f.count(t, "spillway_tokenizer_prompts_total", outcome); got != want {
		t.Errorf("prompts with outcome %s: %v, want %v", outcome, got, want)
	}
}

// fresh asks for a prompt that was not asked for before.
func (f *fixture) fresh(chat bool) tokenize.Tokens { return f.ask(chat, fmt.Sprint(f.n.Add(1))) }

func (f *fixture) ask(chat bool, text string) tokenize.Tokens {
	return f.Tokenize(context.Background(), promptOf(chat, text))
}

func promptOf(chat bool, text string) tokenize.Prompt {
	body := fmt.Sprintf(`{"model":"alias","prompt":%q}`, text)
	if chat {
		body = fmt.Sprintf(`{"model":"alias","messages":[{"role":"user","content":%q}]}`, text)
	}
	return tokenize.Prompt{Model: "base", Tenant: "default", Served: "served", Chat: chat, Body: []byte(body)}
}

// TestSources: which routes are asked first, of which kind of worker, and which then.
func TestSources(t *testing.T) {
	const rendered = `{"token_ids":[1,2,3],"features":null}`
	for _, tt := range []struct {
		name   string
		source string
		sglang bool
		has    map[string]string
		chat   bool
		first  string // paths asked
		then   string // for the next prompt
		known  bool
	}{
		{"later vLLM, chat", "auto", false, map[string]string{renderChat: rendered, "/tokenize": threeTokens}, true, renderChat, renderChat, true},
		{"later vLLM, completion", "auto", false, map[string]string{renderCompletions: "[" + rendered + "]"}, false, renderCompletions, renderCompletions, true},
		{"vLLM, chat", "auto", false, map[string]string{"/tokenize": threeTokens}, true, renderChat + " /tokenize", "/tokenize", true},
		{"vLLM, completion", "auto", false, map[string]string{"/tokenize": threeTokens}, false, renderCompletions + " /tokenize", "/tokenize", true},
		{"SGLang, chat", "auto", true, map[string]string{"/tokenize": threeTokens}, true, renderChat, "", false},
		{"SGLang, completion", "auto", true, map[string]string{"/v1/tokenize": threeTokens}, false, renderCompletions + " /tokenize /v1/tokenize", "/v1/tokenize", true},
		{"none, chat", "auto", false, nil, true, renderChat + " /tokenize", "", false},
		{"none, completion", "auto", false, nil, false, renderCompletions + " /tokenize /v1/tokenize", "", false},
		{"render alone", "render", false, map[string]string{"/tokenize": threeTokens}, true, renderChat, "", false},
		{"tokenize alone", "tokenize", false, map[string]string{renderChat: rendered, "/tokenize": threeTokens}, true, "/tokenize", "/tokenize", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := set(t, func(c *tokenize.Config) { c.Source = tt.source }, tokenize.Worker{ID: 1, Endpoint: "http://w", SGLang: tt.sglang})
			f.engine.set(having(tt.has))
			for i, want := range []string{tt.first, tt.then} {
				got := f.fresh(tt.chat)
				if (got.Count == 3) != tt.known || slices.Equal(got.IDs, []uint32{1, 2, 3}) != tt.known || got.Text != tt.known {
					t.Errorf("prompt %d: %+v, want known %v", i, got, tt.known)
				}
				if paths := strings.ReplaceAll(strings.Join(f.engine.take(), " "), "w/", "/"); paths != want {
					t.Errorf("prompt %d: asked %q, want %q", i, paths, want)
				}
			}
		})
	}
}

// TestProbing: a route that was not there is tried again after five minutes, by one caller.
func TestProbing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := set(t, nil)
		f.fresh(true)
		if got := f.engine.take(); len(got) != 2 {
			t.Fatalf("asked %q, want render and tokenize", got)
		}
		time.Sleep(5*time.Minute - time.Second)
		f.fresh(true)
		if got := f.engine.take(); !slices.Equal(got, []string{"w1/tokenize"}) {
			t.Errorf("after 5 minutes less 1 s: asked %q, want tokenize", got)
		}
		time.Sleep(time.Second)
		f.engine.mu.Lock()
		f.engine.delay = 10 * time.Millisecond
		f.engine.mu.Unlock()
		var all sync.WaitGroup
		for range 3 {
			all.Go(func() { f.fresh(true) })
		}
		all.Wait()
		got := f.engine.take()
		if slices.Sort(got); !slices.Equal(got, []string{"w1/tokenize", "w1/tokenize", "w1/tokenize", "w1" + renderChat}) {
			t.Errorf("after 5 minutes three asked %q, want tokenize three times and render once", got)
		}
		time.Sleep(5 * time.Minute)
		f.engine.set(having(map[string]string{renderChat: `{"token_ids":[1]}`}))
		for i, want := range [][]string{{"w1" + renderChat}, {"w1" + renderChat}} {
			if f.fresh(true); !slices.Equal(f.engine.paths, want) {
				t.Errorf("prompt %d after an update: asked %q, want %q", i, f.engine.paths, want)
			}
			f.engine.take()
		}
	})
}

// TestRefusals: a server that refuses whatever it is asked has no such route; one that has shown that
// it can is not judged by the requests of a client.
func TestRefusals(t *testing.T) {
	for _, status := range []int{400, 401, 403, 415, 422} {
		f := set(t, func(c *tokenize.Config) { c.Source = "tokenize" })
		f.engine.set(always(status, `{}`))
		for range 5 {
			f.fresh(true)
		}
		if got := f.engine.take(); len(got) != 3 {
			t.Errorf("status %d: asked %d times, want 3", status, len(got))
		}
		f.prompts(t, "no_route", 2)

		f = set(t, func(c *tokenize.Config) { c.Source = "tokenize" })
		f.fresh(true)
		f.engine.set(always(status, `{}`))
		for range 9 {
			f.fresh(true)
		}
		if got := f.engine.take(); len(got) != 10 {
			t.Errorf("status %d after a success: asked %d times, want 10", status, len(got))
		}
	}
}

// TestRest: a worker that fails three times in a row is left alone for five seconds, then tried once.
func TestRest(t *testing.T) {
	for name, fail := range map[string]func(*http.Request, string) (int, string){
		"500": always(500, ""), "429": always(429, ""), "no connection": always(0, ""), "garbage": always(200, "<html>"),
		"another count": always(200, `{"count":2,"tokens":[1]}`), "endless": always(200, strings.Repeat(" ", 1<<21)+threeTokens),
	} {
		synctest.Test(t, func(t *testing.T) {
			f := set(t, func(c *tokenize.Config) { c.Source = "tokenize" })
			f.engine.set(fail)
			for i := range 7 {
				if got := f.fresh(true); got.Count != 0 || got.IDs != nil {
					t.Errorf("%s: prompt %d = %+v, want nothing", name, i, got)
				}
			}
			if got := f.engine.take(); len(got) != 3 {
				t.Errorf("%s: asked %d times, want 3", name, len(got))
			}
			f.prompts(t, "resting", 4)
			time.Sleep(5 * time.Second)
			f.engine.mu.Lock()
			f.engine.delay = time.Millisecond
			f.engine.mu.Unlock()
			var all sync.WaitGroup
			for range 3 {
				all.Go(func() { f.fresh(true) })
			}
			all.Wait()
			f.fresh(true)
			if got := f.engine.take(); len(got) != 1 {
				t.Errorf("%s: after the rest: asked %d times, want 1", name, len(got))
			}
			time.Sleep(5 * time.Second)
			f.engine.set(always(200, threeTokens))
			for i := range 4 {
				if got := f.fresh(true); got.Count != 3 {
					t.Errorf("%s: prompt %d of a worker that is well again = %+v, want 3 tokens", name, i, got)
				}
			}
		})
	}
}

// TestImagesThatNeverCome: what a client has a worker fetch for an image does not keep others from
// having their prompts told, and is not waited for again and again.
func TestImagesThatNeverCome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := set(t, nil)
		f.engine.delay = time.Hour
		ask := func(i int) {
			p := promptOf(true, "x")
			p.Body = fmt.Appendf(nil, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"%d"}}]}]}`, i)
			f.Tokenize(t.Context(), p)
		}
		for i := range 5 {
			ask(i)
		}
		f.prompts(t, "unanswered", 3)
		f.prompts(t, "resting", 2)
		f.engine.mu.Lock()
		f.engine.delay = 0
		f.engine.mu.Unlock()
		f.engine.set(having(map[string]string{renderChat: `{"token_ids":[1,2,3]}`}))
		for i := range 3 {
			if got := f.fresh(true); got.Count != 3 {
				t.Errorf("text %d after images that never came: %+v, want 3 tokens", i, got)
			}
		}
		ask(5)
		f.prompts(t, "resting", 3) // text that is told says nothing of images
	})
}

// TestTryGivenUp: where one caller tries for all whether a worker can tell tokens by now, and its client
// leaves, the next one tries.
func TestTryGivenUp(t *testing.T) {
	tries := func(t *testing.T, f *fixture, text string) {
		f.engine.mu.Lock()
		f.engine.delay = 10 * time.Millisecond
		f.engine.mu.Unlock()
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		f.Tokenize(ctx, promptOf(true, text))
		f.engine.take()
	}
	synctest.Test(t, func(t *testing.T) { // of a route
		f := set(t, nil)
		f.fresh(true)
		time.Sleep(5 * time.Minute)
		tries(t, f, "left")
		f.engine.set(having(map[string]string{renderChat: `{"token_ids":[1]}`}))
		if got := f.fresh(true); got.Count != 1 {
			t.Errorf("after a try that was given up: %+v of %q, want a token by render", got, f.engine.paths)
		}
	})
	synctest.Test(t, func(t *testing.T) { // of a worker that rests
		f := set(t, func(c *tokenize.Config) { c.Source = "tokenize" })
		f.engine.set(always(500, ""))
		for range 3 {
			f.fresh(true)
		}
		time.Sleep(5 * time.Second)
		tries(t, f, "left")
		f.engine.set(always(200, threeTokens))
		if got := f.fresh(true); got.Count != 3 {
			t.Errorf("after a try that was given up: %+v, want 3 tokens", got)
		}
	})
}

// TestNextWorker: who rests, has no route or has enough to do is passed over.
func TestNextWorker(t *testing.T) {
	f := set(t, func(c *tokenize.Config) { c.Source = "tokenize" }, tokenize.Worker{ID: 1, Endpoint: "http://w1"}, tokenize.Worker{ID: 2, Endpoint: "http://w2"}, tokenize.Worker{ID: 3, Endpoint: "http://w3"})
	f.engine.set(func(req *http.Request, _ string) (int, string) {
		switch req.URL.Host {
		case "w1":
			return 404, ""
		case "w2":
			return 500, ""
		}
		return 200, threeTokens
	})
	for range 7 {
		f.fresh(true)
	}
	if got, want := f.engine.take(), []string{"w1/tokenize", "w2/tokenize", "w2/tokenize", "w2/tokenize", "w3/tokenize", "w3/tokenize", "w3/tokenize"}; !slices.Equal(got, want) {
		t.Errorf("asked %q\nwant %q", got, want)
	}
	f.prompts(t, "asked", 3)
	f.prompts(t, "unanswered", 4)

	f = set(t, nil)
	f.engine.set(always(404, ""))
	f.fresh(true)
	f.fresh(true)
	f.prompts(t, "no_route", 1)
}

// TestTimeout: nobody waits longer than half a second for text, or five for an image.
func TestTimeout(t *testing.T) {
	image := promptOf(true, "x")
	image.Body = []byte(`{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"u"}}]}]}`)
	for _, tt := range []struct {
		prompt tokenize.Prompt
		want   time.Duration
	}{{promptOf(true, "x"), 500 * time.Millisecond}, {promptOf(false, "x"), 500 * time.Millisecond}, {image, 5 * time.Second}} {
		synctest.Test(t, func(t *testing.T) {
			f := set(t, nil)
			f.engine.delay = time.Hour
			began := time.Now()
			if got := f.Tokenize(t.Context(), tt.prompt); got.Count != 0 || time.Since(began) != tt.want {
				t.Errorf("Tokenize(%s) = %+v after %v, want nothing after %v", tt.prompt.Body, got, time.Since(began), tt.want)
			}
			if got := f.count(t, "spillway_tokenizer_calls_total", "timeout", "render"); got != 1 {
				t.Errorf("%v calls timed out, want 1", got)
			}
		})
	}
}

// TestImage: of a prompt with an image only the count is told, and only where it is rendered.
func TestImage(t *testing.T) {
	f := set(t, nil)
	f.engine.set(having(map[string]string{renderChat: `{"token_ids":[1,2,3],"features":{}}`}))
	p := promptOf(true, "x")
	p.Body = []byte(`{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"u"}}]}]}`)
	for range 2 {
		if got := f.Tokenize(t.Context(), p); got.IDs != nil || got.Count != 3 || got.Text {
			t.Errorf("Tokenize = %+v, want 3 tokens, not text, without IDs", got)
		}
	}
	f.prompts(t, "cached", 1)
	f = set(t, nil)
	if got := f.Tokenize(t.Context(), p); got.Count != 0 || !slices.Equal(f.engine.paths, []string{"w1" + renderChat}) {
		t.Errorf("without render: %+v of %q, want nothing, without asking /tokenize", got, f.engine.paths)
	}
}

// TestSingleFlight: who asks for the same meanwhile gets the same answer, of one call, whoever
// leaves.
func TestSingleFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := set(t, func(c *tokenize.Config) { c.Source = "tokenize" })
		f.engine.delay = 400 * time.Millisecond
		got := make([]tokenize.Tokens, 4)
		ended := make([]time.Duration, 4)
		began := time.Now()
		var all sync.WaitGroup
		first, leave := context.WithCancel(t.Context())
		defer leave()
		third, leaveThird := context.WithCancel(t.Context())
		defer leaveThird()
		for i, ctx := range []context.Context{first, t.Context(), third, t.Context()} {
			all.Go(func() {
				got[i] = f.Tokenize(ctx, promptOf(true, "x"))
				ended[i] = time.Since(began)
			})
			time.Sleep(100 * time.Millisecond)
			if i == 1 {
				leave() // it has asked; the other still waits
			}
			if i == 2 {
				leaveThird()
			}
		}
		all.Wait()
		for i, want := range []uint64{3, 3, 0, 3} {
			if got[i].Count != want {
				t.Errorf("caller %d got %+v after %v, want %d tokens", i, got[i], ended[i], want)
			}
		}
		if calls := f.engine.take(); len(calls) != 1 || ended[1] != 400*time.Millisecond || ended[2] != 300*time.Millisecond {
			t.Errorf("asked %q; callers returned after %v", calls, ended)
		}
		f.prompts(t, "asked", 1)
		f.prompts(t, "shared", 2)
		f.prompts(t, "left", 1)
	})
}

// TestNobodyWaits: a call that nobody wants any more is given up, and who comes then begins anew.
func TestNobodyWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := set(t, func(c *tokenize.Config) { c.Source = "tokenize" })
		f.engine.delay = 300 * time.Millisecond
		var all sync.WaitGroup
		for range 2 {
			all.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
				defer cancel()
				if got := f.Tokenize(ctx, promptOf(true, "x")); got.Count != 0 {
					t.Errorf("a caller who left got %+v", got)
				}
			})
		}
		began := time.Now()
		all.Wait()
		if d := time.Since(began); d != 100*time.Millisecond {
			t.Errorf("callers who left returned after %v, want 100ms", d)
		}
		if got := f.ask(true, "x"); got.Count != 3 {
			t.Errorf("who came then got %+v, want 3 tokens", got)
		}
		f.engine.mu.Lock()
		f.engine.deaf = 50 * time.Millisecond
		f.engine.mu.Unlock()
		all.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			f.Tokenize(ctx, promptOf(true, "z"))
		})
		time.Sleep(120 * time.Millisecond)
		if got := f.ask(true, "z"); got.Count != 3 {
			t.Errorf("who came while a call was being given up got %+v, want 3 tokens", got)
		}
		all.Wait()
		if got := f.count(t, "spillway_tokenizer_calls_total", "left", "tokenize"); got != 2 {
			t.Errorf("%v calls given up, want 1", got)
		}
		if got := f.count(t, "spillway_tokenizer_inflight"); got != 0 {
			t.Errorf("%v calls under way at the end", got)
		}
		for range 5 { // clients who leave are no fault of the worker
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			f.Tokenize(ctx, promptOf(true, "y"))
			cancel()
		}
		if got := f.fresh(true); got.Count != 3 {
			t.Errorf("after clients who left: %+v, want 3 tokens", got)
		}
	})
}

// TestCrowded: a worker has 32 calls at a time at most; beyond that nobody waits.
func TestCrowded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := set(t, func(c *tokenize.Config) { c.Source = "tokenize" })
		f.engine.delay = 200 * time.Millisecond
		var all sync.WaitGroup
		var known, unknown atomic.Int32
		for range 40 {
			all.Go(func() {
				if f.fresh(true).Count == 3 {
					known.Add(1)
				} else {
					unknown.Add(1)
				}
			})
		}
		synctest.Wait()
		if unknown.Load() != 8 || f.count(t, "spillway_tokenizer_inflight") != 32 {
			t.Errorf("of 40 at once %d were told at once that nothing is known, want 8", unknown.Load())
		}
		all.Wait()
		if known.Load() != 32 {
			t.Errorf("%d were told their tokens, want 32", known.Load())
		}
		f.prompts(t, "crowded", 8)
	})
}

// TestRemembered: what was told once is not asked for again, what was not is.
func TestRemembered(t *testing.T) {
	f := set(t, func(c *tokenize.Config) { c.Source = "tokenize" })
	f.engine.set(always(500, ""))
	f.ask(true, "x")
	f.engine.set(always(200, threeTokens))
	for range 3 {
		if got := f.ask(true, "x"); got.Count != 3 || len(got.IDs) != 3 || !got.Text {
			t.Errorf("Tokenize = %+v, want 3 tokens", got)
		}
	}
	if got := f.engine.take(); len(got) != 2 {
		t.Errorf("asked %d times, want 2", len(got))
	}
	defer func() { // nobody writes into what was told
		f.engine.set(always(200, `{"tokens":[7,8,9]}`))
		f.ask(true, "y")
		if got := f.ask(true, "x"); !slices.Equal(got.IDs, []uint32{1, 2, 3}) {
			t.Errorf("after another prompt: %v, want 1, 2, 3", got.IDs)
		}
	}()
	if hits, misses := f.count(t, "dynamo_frontend_tokenizer_cache_hits_total"), f.count(t, "dynamo_frontend_tokenizer_cache_misses_total"); hits != 2 || misses != 2 {
		t.Errorf("%v hits, %v misses, want 2, 2", hits, misses)
	}
	if n, b := f.count(t, "spillway_tokenizer_cache_entries"), f.count(t, "spillway_tokenizer_cache_bytes"); n != 1 || b < 12 || b > 1000 {
		t.Errorf("%v entries of %v bytes, want 1 of some", n, b)
	}
	if got := f.count(t, "spillway_tokenizer_cache_limit_bytes"); got != 64<<20 {
		t.Errorf("the limit is %v, want 64 MiB", got)
	}
}

// TestUnasked: prompts that are too large, or none, cost nothing.
func TestUnasked(t *testing.T) {
	f := set(t, func(c *tokenize.Config) { c.MaxBytes = 100 })
	f.ask(true, strings.Repeat("x", 100))
	f.Tokenize(t.Context(), tokenize.Prompt{Body: []byte(`{"prompt":[1,2]}`)})
	f.prompts(t, "too_large", 1)
	f.prompts(t, "unreadable", 1)
	if got := f.engine.take(); len(got) != 0 {
		t.Errorf("asked %q, want nothing", got)
	}
}

// TestCounted: after three wrong counts in a row IDs are withheld, and what is cached is asked for
// again; after twenty right ones they are told.
func TestCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := set(t, func(c *tokenize.Config) { c.Source = "tokenize" })
		told := f.ask(true, "x")
		counted := func(n int, actual uint64) {
			for range n {
				f.Counted("base", "default", told.Count, actual)
			}
		}
		trusted := func(when string, want bool) {
			t.Helper()
			got := f.ask(true, "x")
			if (got.IDs != nil) != want || got.Count != 3 {
				t.Errorf("%s: %+v, want IDs %v", when, got, want)
			}
			if g := f.count(t, "spillway_tokenizer_count_only", "base"); (g == 0) != want {
				t.Errorf("%s: spillway_tokenizer_count_only is %v", when, g)
			}
		}
		for range 5 {
			counted(2, 4)
			counted(1, 3)
		}
		trusted("never three in a row", true)
		for range 5 { // of these nothing was known
			f.Counted("base", "default", 0, 900)
			f.Counted("base", "default", 3, 0)
		}
		f.engine.take()
		counted(3, 4)
		trusted("three in a row", false)
		if got := f.engine.take(); len(got) != 1 {
			t.Errorf("asked %q again, want one call", got)
		}
		if got := f.Tokenize(t.Context(), tokenize.Prompt{Model: "other", Served: "other", Chat: true, Body: promptOf(true, "x").Body}); got.IDs == nil {
			t.Errorf("another model: %+v, want IDs", got)
		}
		f.engine.take()
		counted(19, 3)
		trusted("nineteen in a row", false)
		counted(1, 4)
		counted(19, 3)
		counted(9, 4)
		trusted("not twenty in a row", false)
		if got := f.engine.take(); len(got) != 0 {
			t.Errorf("asked %q, want the cache to be left alone for five minutes", got)
		}
		time.Sleep(5 * time.Minute)
		counted(3, 4)
		trusted("wrong after five minutes", false)
		if got := f.engine.take(); len(got) != 1 {
			t.Errorf("asked %q after five minutes, want one call", got)
		}
		counted(20, 3)
		trusted("twenty in a row", true)
		if got := f.count(t, "spillway_token_count_error_ratio", "base"); got != 15+3+19+1+19+9+3+20 {
			t.Errorf("%v counts compared", got)
		}
	})
}

// TestForgetting: servers that have not been asked for long do not stay in memory.
func TestForgetting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var id atomic.Uint64
		f := set(t, nil)
		g := tokenize.New(tokenize.DefaultConfig(), func(_ *tokenize.Prompt, ask func(tokenize.Worker) bool) {
			ask(tokenize.Worker{ID: id.Load(), Endpoint: "http://w"})
		}, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
		g.Through(f.engine)
		for i := range 100 {
			id.Store(uint64(i))
			g.Tokenize(t.Context(), promptOf(true, fmt.Sprint(i)))
			time.Sleep(time.Minute)
		}
		if n := g.Servers(); n > 12 {
			t.Errorf("%d servers are remembered, want 12 at most", n)
		}
	})
}

func TestConfig(t *testing.T) {
	for _, tt := range []struct {
		change func(*tokenize.Config)
		want   string
		asks   bool
	}{
		{func(*tokenize.Config) {}, "", true},
		{func(c *tokenize.Config) { c.Source = "render" }, "", true},
		{func(c *tokenize.Config) { c.Source = "tokenize" }, "", true},
		{func(c *tokenize.Config) { c.Source = "estimate" }, "", false},
		{func(c *tokenize.Config) { c.Source = "off" }, "", false},
		{func(c *tokenize.Config) { c.Source = "guess" }, `tokenizer: "guess" is none of auto, render, tokenize, estimate, off`, false},
		{func(c *tokenize.Config) { c.URL = "https://t:8000/x" }, "", true},
		{func(c *tokenize.Config) { c.URL = "t:8000" }, "tokenizer-url: is no http:// or https:// URL of a server, without credentials or query", true},
		{func(c *tokenize.Config) { c.URL = "http://u:p@t" }, "tokenizer-url: is no http:// or https:// URL of a server, without credentials or query", true},
		{func(c *tokenize.Config) { c.MaxBytes = -1 }, "tokenize-max-bytes: -1 is not within 0..67108864", true},
		{func(c *tokenize.Config) { c.CacheMB = -1 }, "token-cache-mb: -1 is not within 0..1048576", true},
	} {
		c := tokenize.DefaultConfig()
		tt.change(&c)
		got := ""
		if err := c.Validate(); err != nil {
			got = err.Error()
		}
		if got != tt.want || c.Asks() != tt.asks {
			t.Errorf("Validate(%+v) = %q, asks %v, want %q, %v", c, got, c.Asks(), tt.want, tt.asks)
		}
	}
}

// TestHitAllocatesNothing: of a prompt that is remembered nothing is left to the garbage collector.
func TestHitAllocatesNothing(t *testing.T) {
	f := set(t, nil)
	p := promptOf(true, strings.Repeat("It was a dark and \\\"stormy\\\" night. ", 1000))
	ctx := t.Context()
	f.Tokenize(ctx, p)
	if n := testing.AllocsPerRun(100, func() { f.Tokenize(ctx, p) }); n != 0 {
		t.Errorf("a hit allocates %v times, want 0", n)
	}
	f.prompts(t, "asked", 1)
}

// over is a Tokenizer that asks real servers.
func over(cfg tokenize.Config, w tokenize.Worker) *tokenize.Tokenizer {
	return tokenize.New(cfg, func(_ *tokenize.Prompt, ask func(tokenize.Worker) bool) { ask(w) }, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
}

func BenchmarkTokenize(b *testing.B) {
	for _, size := range []int{1 << 10, 32 << 10} {
		ids := make([]uint32, size/4)
		for i := range ids {
			ids[i] = uint32(i * 37 % 128000)
		}
		answer, err := json.Marshal(map[string]any{"count": len(ids), "max_model_len": 131072, "tokens": ids, "token_strs": nil})
		if err != nil {
			b.Fatal(err)
		}
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			_, _ = w.Write(answer)
		}))
		x := over(tokenize.Config{Source: "tokenize", MaxBytes: 1 << 20, CacheMB: 64}, tokenize.Worker{ID: 1, Endpoint: srv.URL})
		p := promptOf(true, strings.Repeat("It was a dark and stormy night. ", size/32))
		b.Run(fmt.Sprintf("hit/%dkB", size>>10), func(b *testing.B) {
			x.Tokenize(b.Context(), p)
			b.SetBytes(int64(len(p.Body)))
			b.ReportAllocs()
			for b.Loop() {
				if x.Tokenize(b.Context(), p).Count == 0 {
					b.Fatal("unknown")
				}
			}
		})
		b.Run(fmt.Sprintf("miss/%dkB", size>>10), func(b *testing.B) { // the server's part in it included
			p, i := p, 0
			p.Body = slices.Clone(p.Body)
			at := len(p.Body) - 40
			b.SetBytes(int64(len(p.Body)))
			b.ReportAllocs()
			for b.Loop() {
				copy(p.Body[at:], fmt.Sprintf("%08d", i))
				i++
				if x.Tokenize(b.Context(), p).Count == 0 {
					b.Fatal("unknown")
				}
			}
		})
		x.Close()
		srv.Close()
	}
}
