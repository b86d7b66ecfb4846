package proxy_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"spillway/busy"
	"spillway/kvhash"
	"spillway/kvindex"
	"spillway/proxy"
	"spillway/router"
	"spillway/tracker"
	"spillway/worker"
)

// inKV are the settings of mode kv, changed.
func inKV(change func(*router.Config)) router.Config {
	cfg := router.DefaultConfig()
	cfg.Mode = router.KV
	if change != nil {
		change(&cfg)
	}
	return cfg
}

// sentence is text that has little in common with that of another number.
func sentence(n, words int) string {
	var b strings.Builder
	for i := range words {
		fmt.Fprintf(&b, "%d is %d. ", n*1000+i, i*n)
	}
	return b.String()
}

// chatOf is a chat of messages by a user.
func chatOf(messages ...string) string {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	var all []message
	for _, m := range messages {
		all = append(all, message{"user", m})
	}
	body, err := json.Marshal(map[string]any{"model": "m", "messages": all})
	if err != nil {
		panic(err)
	}
	return string(body)
}

// at is the worker that an answer is from.
func (g got) at(t testing.TB) string {
	t.Helper()
	if g.status != 200 {
		t.Fatalf("status %d: %s", g.status, g.body)
	}
	return g.header.Get("X-Spillway-Worker")
}

// hits sums up the parts of prompts that were taken to be cached.
func (f *front) hits() float64 {
	for line := range strings.Lines(f.metrics()) {
		if strings.HasPrefix(line, "dynamo_component_router_kv_hit_rate_sum") {
			_, v, _ := strings.Cut(strings.TrimSpace(line), " ")
			x, err := strconv.ParseFloat(v, 64)
			if err != nil {
				f.t.Fatal(err)
			}
			return x
		}
	}
	f.t.Fatal("no kv_hit_rate")
	return 0
}

// threeWorkers begins a front end in mode kv over three workers that answer alike.
func threeWorkers(t *testing.T, with setup) *front {
	t.Helper()
	if with.router == (router.Config{}) {
		with.router = inKV(nil)
	}
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	return begin(t, with, served("w1", s), served("w2", s), served("w3", s))
}

// TestFollowsItsDecisions: where engines tell nothing, a prompt goes where one was sent that began like it,
// however both are written.
func TestFollowsItsDecisions(t *testing.T) {
	f := threeWorkers(t, setup{})
	text := sentence(1, 60)
	first := f.chat(chatOf(text)).at(t)
	for i, same := range []string{
		chatOf(text), chatOf(text, "and then?"), chatOf(text + sentence(2, 10)),
		strings.Replace(chatOf(text), "is", `\u0069s`, 7),
		`{"max_tokens":5,` + strings.TrimPrefix(chatOf(text), "{"),
	} {
		if at := f.chat(same).at(t); at != first {
			t.Errorf("prompt %d went to %s, want %s that has it", i, at, first)
		}
	}
	if hits := f.hits(); hits < 2.5 { // the worker counts few tokens, so parts of blocks are much
		t.Errorf("the parts that were cached sum up to %v, want most of 5", hits)
	}
	seen := map[string]bool{}
	for i := range 40 {
		seen[f.chat(chatOf(sentence(100+i, 60))).at(t)] = true
	}
	if len(seen) != 3 {
		t.Errorf("40 prompts that nobody has went to %v, want all three workers", seen)
	}
	if n := f.metric(`spillway_kv_decision_blocks{model="m",tenant="default"}`); n == "0" || n == "" {
		t.Errorf("decisions remembered: %q blocks, want some", n)
	}
}

// TestKeptApart has prompts that are the same but for what keeps caches apart.
func TestKeptApart(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	w1, w2 := served("w1", s, "m", "second", "lora"), served("w2", s, "m", "lora", "second")
	w1.Aliases, w2.Aliases = []string{"second"}, []string{"second"}
	f := begin(t, setup{router: inKV(nil)}, w1, w2)
	body := chatOf(sentence(1, 60))
	image := func(url string) string {
		return `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"` + url + `"}},{"type":"text","text":"` + sentence(9, 60) + `"}]}]}`
	}
	for _, tt := range []struct {
		name, body string
		header     string
		cached     bool
	}{
		{"nobody has it", body, "", false},
		{"again", body, "", true},
		{"of a tenant", body, "X-Tenant-Id: a", false},
		{"of the tenant again", body, "X-Tenant-Id: a", true},
		{"of another tenant", body, "X-Tenant-Id: b", false},
		{"salted", strings.Replace(body, "{", `{"cache_salt":"s",`, 1), "X-Tenant-Id: a", false},
		{"salted the same", strings.Replace(body, "{", `{"cache_salt":"s",`, 1), "X-Tenant-Id: b", true},
		{"by another name", strings.Replace(body, `"m"`, `"second"`, 1), "", true},
		{"for an adapter", strings.Replace(body, `"m"`, `"lora"`, 1), "", false},
		{"for the adapter again", strings.Replace(body, `"m"`, `"lora"`, 1), "", true},
		{"an image", image("http://x/1"), "", false},
		{"the image again", image("http://x/1"), "", true},
		{"another image", image("http://x/2"), "", false},
		{"tools first", strings.Replace(body, "{", `{"tools":[{"type":"function","function":{"name":"f"}}],`, 1), "", false},
		{"embeddings", body, "", true},
	} {
		before := f.hits()
		var headers []string
		if tt.header != "" {
			headers = append(headers, tt.header)
		}
		f.chat(tt.body, headers...).at(t)
		if hit := f.hits() - before; hit > 0.5 != tt.cached {
			t.Errorf("%s: %v of it was taken to be cached, want it cached: %v", tt.name, hit, tt.cached)
		}
	}
	before := f.hits()
	f.send("POST", "/v1/embeddings", `{"model":"m","input":"`+sentence(1, 60)+`"}`).at(t)
	f.send("POST", "/v1/embeddings", `{"model":"m","input":"`+sentence(1, 60)+`"}`).at(t)
	if f.hits() != before {
		t.Error("embeddings count as cached")
	}
}

// TestForgottenWithItsWorker: what a worker had is gone with it, and when its endpoint changes.
func TestForgottenWithItsWorker(t *testing.T) {
	s, other := newScript(t, saying(answer(200, jsonHeader, reply))), newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{router: inKV(nil), proxy: apart}, worker.Worker{ID: 7, Name: "w", Endpoint: s.url(), Models: []string{"m"}})
	body := chatOf(sentence(1, 60))
	cached := func(what string, want bool) {
		t.Helper()
		before := f.hits()
		f.chat(body).at(t)
		if hit := f.hits() - before; hit > 0.5 != want {
			t.Errorf("%s: %v was taken to be cached, want it cached: %v", what, hit, want)
		}
	}
	cached("at first", false)
	cached("again", true)
	if g := f.operator("PATCH", "/workers/7", `{"max_concurrency":9}`); g.status != 200 {
		t.Fatalf("PATCH = %d %s", g.status, g.body)
	}
	cached("after a change that does not matter", true)
	if g := f.operator("PATCH", "/workers/7", fmt.Sprintf(`{"endpoint":%q}`, other.url())); g.status != 200 {
		t.Fatalf("PATCH = %d %s", g.status, g.body)
	}
	cached("at another endpoint", false)
	cached("there again", true)
	f.operator("DELETE", "/workers/7", "")
	if n := f.metric(`spillway_kv_decision_blocks{model="m",tenant="default"}`); n != "0" && n != "" {
		t.Errorf("after the worker is gone %s blocks are remembered", n)
	}
	if g := f.operator("POST", "/workers", fmt.Sprintf(`{"worker_id":7,"model_name":"m","name":"w","endpoint":%q}`, other.url())); g.status != 201 {
		t.Fatalf("POST = %d %s", g.status, g.body)
	}
	cached("after it has come back", false)
}

// TestDecisionsExpire: what was decided is believed for its time.
func TestDecisionsExpire(t *testing.T) {
	f := threeWorkers(t, setup{router: inKV(func(c *router.Config) { c.TTLSecs = 0.3 })})
	f.chat(chatOf(sentence(1, 60))).at(t)
	eventually(t, "nothing is remembered", func() bool {
		return f.metric(`spillway_kv_decision_blocks{model="m",tenant="default"}`) == "0"
	})
	f.chat(chatOf(sentence(1, 60))).at(t)
	if hits := f.hits(); hits != 0 {
		t.Errorf("%v of a prompt was taken to be cached after its time", hits)
	}
}

// tokenizer is one that a test fills in.
type tokenizer struct {
	mu     sync.Mutex
	asked  []proxy.Prompt
	told   [][2]uint64
	answer func(body string) proxy.Tokens
}

func (k *tokenizer) use(s *proxy.Server) {
	s.TokenizeBy(proxy.Tokenizer{
		Tokenize: func(_ context.Context, p proxy.Prompt) proxy.Tokens {
			k.mu.Lock()
			defer k.mu.Unlock()
			body := string(p.Body)
			p.Body = nil
			k.asked = append(k.asked, p)
			return k.answer(body)
		},
		Counted: func(_ worker.Partition, counted, actual uint64) {
			k.mu.Lock()
			defer k.mu.Unlock()
			k.told = append(k.told, [2]uint64{counted, actual})
		},
	})
}

// ids are token IDs that have little in common with those of another number.
func ids(n, count int) (all []uint32) {
	for i := range count {
		all = append(all, uint32(n*100_000+i))
	}
	return all
}

// TestTokens has the sources of tokens and what each makes of the load that is booked.
func TestTokens(t *testing.T) {
	list, err := json.Marshal(ids(1, 100))
	if err != nil {
		t.Fatal(err)
	}
	completion := func(prompt string) string { return `{"model":"m","prompt":` + prompt + `}` }
	for _, tt := range []struct {
		name, path, body string
		answer           proxy.Tokens
		asked            bool
		prefill          uint64
		blocks           uint64
		source           string
		shared           int // sequence hashes that peers are told
	}{
		{"an estimate", "chat/completions", chatOf(strings.Repeat("x", 390)), proxy.Tokens{}, true, 106, 6, "estimate", 0}, // 394 bytes with the role, and 7
		{"IDs by the tokenizer", "chat/completions", chatOf("x"), proxy.Tokens{IDs: ids(1, 100)}, true, 100, 6, "tokenizer", 6},
		{"a count by it", "chat/completions", chatOf("x"), proxy.Tokens{Count: 77}, true, 77, 4, "count", 0},
		{"a rough count", "chat/completions", chatOf("x"), proxy.Tokens{Count: 77, Rough: true}, true, 77, 4, "count", 0},
		{"completions", "completions", completion(`"x"`), proxy.Tokens{IDs: ids(1, 100), Count: 100}, true, 100, 6, "tokenizer", 6},
		{"one in a list", "completions", completion(`["x"]`), proxy.Tokens{IDs: ids(1, 100)}, true, 100, 6, "tokenizer", 6},
		{"several", "completions", completion(`["` + strings.Repeat("x", 400) + `","` + strings.Repeat("y", 400) + `"]`), proxy.Tokens{}, false, 200, 12, "estimate", 0},
		{"IDs in the body", "completions", completion(string(list)), proxy.Tokens{}, false, 100, 6, "body", 6},
		{"IDs in a list in a list", "completions", completion("[" + string(list) + "]"), proxy.Tokens{}, false, 100, 6, "body", 6},
		{"several lists of IDs", "completions", completion("[" + string(list) + "," + string(list) + "]"), proxy.Tokens{}, false, 200, 12, "body", 0},
		{"numbers that are no IDs", "completions", completion("[1.5," + string(list)[1:]), proxy.Tokens{}, false, 101, 6, "body", 0},
		{"responses", "responses", `{"model":"m","input":"` + strings.Repeat("x", 400) + `"}`, proxy.Tokens{}, false, 100, 6, "estimate", 0},
		{"embeddings", "embeddings", `{"model":"m","input":"` + strings.Repeat("x", 400) + `"}`, proxy.Tokens{}, false, 100, 0, "estimate", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var f *front
			var load tracker.Load
			s := newScript(t, func(c *conn, _ received) {
				for _, l := range f.partition("m").Tracker.Loads(time.Now()) {
					load = l
				}
				c.say(answer(200, jsonHeader, reply))
			})
			k := &tokenizer{answer: func(string) proxy.Tokens { return tt.answer }}
			var booked []proxy.Booking
			f = begin(t, setup{router: inKV(nil), before: func(s *proxy.Server) {
				k.use(s)
				s.Share(func(b proxy.Booking) { booked = append(booked, b) })
			}}, served("w", s))
			if g := f.send("POST", "/v1/"+tt.path, tt.body); g.status != 200 {
				t.Fatalf("%d %s", g.status, g.body)
			}
			if want := (tracker.Load{PrefillTokens: tt.prefill, DecodeBlocks: tt.blocks, Requests: 1}); load != want {
				t.Errorf("booked while it is served: %+v, want %+v", load, want)
			}
			if b := booked[0]; b.Stage != proxy.Booked || b.PrefillTokens != tt.prefill || len(b.Hashes) != tt.shared || uint64(len(b.Hashes))+b.DecodeBlocks != tt.blocks {
				t.Errorf("peers are told %+v, want %d tokens and %d blocks, %d of them with a hash", b, tt.prefill, tt.blocks, tt.shared)
			}
			if asked := len(k.asked) > 0; asked != tt.asked {
				t.Errorf("the tokenizer is asked: %v, want %v", asked, tt.asked)
			} else if asked {
				want := proxy.Prompt{Partition: worker.Partition{Model: "m", Tenant: worker.DefaultTenant}, Served: "m", Chat: tt.path == "chat/completions"}
				if got := k.asked[0]; got.Partition != want.Partition || got.Served != "m" || got.Chat != want.Chat {
					t.Errorf("the tokenizer is asked for %+v, want %+v", got, want)
				}
			}
			if got := f.metric(`spillway_kv_prompts_total{model="m",source="` + tt.source + `"}`); got != "1" {
				t.Errorf("prompts of source %s: %s, want 1", tt.source, got)
			}
			var told [][2]uint64
			if (tt.source == "tokenizer" || tt.source == "count") && !tt.answer.Rough {
				told = [][2]uint64{{tt.prefill, 10}} // as the answer's usage says
			}
			if !slices.Equal(k.told, told) {
				t.Errorf("the tokenizer is told of counts %v, want %v", k.told, told)
			}
		})
	}
}

// TestRefusedUnread: a request that nobody can take is neither tokenised nor hashed.
func TestRefusedUnread(t *testing.T) {
	k := &tokenizer{answer: func(string) proxy.Tokens { return proxy.Tokens{IDs: ids(1, 100)} }}
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	w1, w2 := served("w1", s), served("w2", s)
	f := begin(t, setup{router: inKV(nil), busy: decodeLimit(), before: k.use}, w1, w2)
	f.report(w1.ID, 86)
	f.report(w2.ID, 86)
	f.chat(chatBody).is(t, "all busy", 503, busyBody, overloaded...)
	f.report(w2.ID, 10)
	pinned := f.chat(chatBody, "X-Dynamo-Worker-Instance-Id: w1")
	if pinned.status != 503 || pinned.header.Get("X-Spillway-Reason") != "overloaded-pinned" {
		t.Errorf("pinned to a busy worker: %d, %v", pinned.status, pinned.header)
	}
	if n := len(k.asked); n != 0 {
		t.Errorf("%d refused requests were tokenised", n)
	}
	if at := f.chat(chatBody).at(t); at != "w2" || len(k.asked) != 1 {
		t.Errorf("served by %s, tokenised %d times; want w2 and once", at, len(k.asked))
	}
}

// TestRetriedElsewhere: a request leaves a worker that fails, though that has its prompt, and is
// tokenised once.
func TestRetriedElsewhere(t *testing.T) {
	var refuse atomic.Value // the host that does
	refuse.Store("")
	s := newScript(t, func(c *conn, r received) {
		if r.path == refuse.Load() {
			c.say(answer(503, jsonHeader, `{}`))
			return
		}
		c.say(answer(200, jsonHeader, reply))
	})
	k := &tokenizer{answer: func(string) proxy.Tokens { return proxy.Tokens{IDs: ids(1, 100)} }}
	var all []worker.Worker
	for _, name := range []string{"w1", "w2"} {
		all = append(all, worker.Worker{Name: name, Endpoint: s.url() + "/" + name, Models: []string{"m"}})
	}
	f := begin(t, setup{router: inKV(nil), before: k.use}, all...)
	first := f.chat(chatBody).at(t)
	refuse.Store("/" + first + "/v1/chat/completions")
	g := f.chat(chatBody)
	if at := g.at(t); at == first || g.header.Get("X-Spillway-Attempts") != "2" {
		t.Errorf("served by %s after %s attempts, want the other one than %s at the second", at, g.header.Get("X-Spillway-Attempts"), first)
	}
	if n := len(k.asked); n != 2 {
		t.Errorf("two requests were tokenised %d times", n)
	}
}

// engines notes whom listeners are asked to follow.
type engines struct {
	mu     sync.Mutex
	blocks *kvindex.Partition
	events []string
}

func (e *engines) use(s *proxy.Server) {
	s.ListenBy(func(w *worker.Worker, blocks *kvindex.Partition) {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.blocks = blocks
		e.events = append(e.events, fmt.Sprintf("listen %s %d", w.Name, blocks.BlockSize()))
	}, func(id worker.ID) {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.events = append(e.events, fmt.Sprintf("unlisten %v", id))
	})
}

func (e *engines) taken() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	events := e.events
	e.events = nil
	return events
}

// TestFollowsEngines: where all workers publish KV events, those decide, and only for prompts whose tokens
// are known.
func TestFollowsEngines(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	e := &engines{}
	publishing := func(id worker.ID) worker.Worker {
		return worker.Worker{ID: id, Name: fmt.Sprint("w", uint64(id)), Endpoint: s.url(), Models: []string{"m"}, BlockSize: 32, KVEvents: map[uint32]string{0: "tcp://x:1"}}
	}
	f := begin(t, setup{router: inKV(nil), before: e.use, proxy: apart}, publishing(1), publishing(2))
	if got, want := e.taken(), []string{"listen w1 32", "listen w2 32"}; !slices.Equal(got, want) {
		t.Fatalf("followed: %v, want %v", got, want)
	}
	body, err := json.Marshal(map[string]any{"model": "m", "prompt": ids(1, 100)})
	if err != nil {
		t.Fatal(err)
	}
	store := func(id worker.ID, salt string) {
		local := kvhash.AppendBlocks(nil, ids(1, 100), kvhash.Options{BlockSize: 32, Salt: salt})
		if status := e.blocks.Index.Store(worker.Rank{Worker: id}, worker.Device, kvindex.Parent{}, local, local); status != kvindex.Stored {
			t.Fatalf("Store = %v", status)
		}
	}
	store(2, "")
	for range 10 {
		if at := f.send("POST", "/v1/completions", string(body)).at(t); at != "w2" {
			t.Fatalf("the prompt went to %s, want w2 which has told that it has it", at)
		}
	}
	if hits := f.hits(); hits < 9.5 || hits > 9.7 { // 96 of 100 tokens
		t.Errorf("the parts that were cached sum up to %v, want 9.6", hits)
	}
	f.chat(chatOf(sentence(1, 60))).at(t)
	f.chat(chatOf(sentence(1, 60))).at(t)
	if n := f.metric(`spillway_kv_decision_blocks{model="m",tenant="default"}`); n != "0" || f.hits() > 9.7 {
		t.Errorf("%s blocks of decisions, hits of %v; engines tell, and text is no tokens", n, f.hits())
	}
	// A tenant's prompts get a salt that engines pass on.
	store(1, "a")
	if at := f.send("POST", "/v1/completions", string(body), "X-Tenant-Id: a").at(t); at != "w1" {
		t.Errorf("the tenant's prompt went to %s, want w1", at)
	}
	f.send("POST", "/v1/completions", strings.Replace(string(body), "{", `{"cache_salt":null,`, 1), "X-Tenant-Id: a").at(t)
	f.send("POST", "/v1/completions", strings.Replace(string(body), "{", `{"cache_salt":"s",`, 1), "X-Tenant-Id: a").at(t)
	seen := s.seen()
	for i, want := range []string{`"dynamo-cache-salt:a"`, `"dynamo-cache-salt:a"`, `"s"`} {
		var sent map[string]json.RawMessage
		if err := json.Unmarshal([]byte(seen[len(seen)-3+i].body), &sent); err != nil || string(sent["cache_salt"]) != want || len(sent) != 3 {
			t.Errorf("request %d of a tenant was sent with %s, %v; want cache_salt %s", i, sent["cache_salt"], err, want)
		}
	}
	// One that tells nothing: decisions count for all.
	f.register(served("silent", s))
	if got, want := e.taken(), []string{"unlisten 1", "unlisten 2"}; !slices.Equal(slices.Sorted(slices.Values(got)), want) {
		t.Errorf("with a worker that tells nothing: %v, want %v", got, want)
	}
	before := f.hits()
	first := f.send("POST", "/v1/completions", string(body)).at(t)
	if f.hits() != before {
		t.Error("what engines told before still counts")
	}
	if at := f.send("POST", "/v1/completions", string(body)).at(t); at != first {
		t.Errorf("the prompt went to %s, want %s where it went before", at, first)
	}
	f.operator("DELETE", fmt.Sprintf("/workers/%d", worker.DefaultID("silent")), "")
	if got := e.taken(); len(got) != 2 || got[0] != "listen w1 32" {
		t.Errorf("without it again: %v, want both to be followed", got)
	}
}

// TestBlockSizeLearnt: when a worker turns out to have other blocks, prompts are cut into those.
func TestBlockSizeLearnt(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	e := &engines{}
	w := worker.Worker{ID: 1, Name: "w1", Endpoint: s.url(), Models: []string{"m"}, KVEvents: map[uint32]string{0: "tcp://x:1"}}
	f := begin(t, setup{router: inKV(nil), before: e.use}, w)
	if got, want := e.taken(), []string{"listen w1 16"}; !slices.Equal(got, want) {
		t.Fatalf("followed: %v, want %v", got, want)
	}
	f.list().Observe(busy.Sample{Rank: worker.Rank{Worker: 1}, TakenAt: time.Now(), BlockSize: new(uint64(64))}, time.Now())
	var got []string
	eventually(t, "it is followed anew", func() bool { got = append(got, e.taken()...); return len(got) == 2 })
	if want := []string{"unlisten 1", "listen w1 64"}; !slices.Equal(got, want) {
		t.Errorf("after it told of blocks of 64: %v, want %v", got, want)
	}
}

// TestSharedBlocks: requests with a common prompt hold its blocks once, where their tokens are known.
func TestSharedBlocks(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*router.Config)
		text   bool
		want   uint64 // blocks for three prompts of 100 tokens, with 6 complete blocks each
	}{
		{"tokens", nil, false, 6},
		{"text", nil, true, 18},
		{"no reuse", func(c *router.Config) { c.Cost.AssumeKVReuse = false }, false, 18},
		{"by load alone", func(c *router.Config) { c.Cost.LoadAware = true }, false, 18},
		{"no blocks", func(c *router.Config) { c.Cost.TrackActiveBlocks = false }, false, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			hold := make(chan struct{})
			var served3 sync.WaitGroup
			served3.Add(3)
			s := newScript(t, func(c *conn, _ received) {
				served3.Done()
				<-hold
				c.say(answer(200, jsonHeader, reply))
			})
			f := begin(t, setup{router: inKV(tt.change)}, served("w", s))
			body := chatOf(strings.Repeat("x", 368)) // 372 bytes and 7 are 100
			if !tt.text {
				b, _ := json.Marshal(map[string]any{"model": "m", "prompt": ids(1, 100)})
				body = string(b)
			}
			var over sync.WaitGroup
			for range 3 {
				over.Go(func() {
					if tt.text {
						f.chat(body)
					} else {
						f.send("POST", "/v1/completions", body)
					}
				})
			}
			served3.Wait()
			var load tracker.Load
			for _, l := range f.partition("m").Tracker.Loads(time.Now()) {
				load = l
			}
			close(hold)
			over.Wait()
			if load.DecodeBlocks != tt.want || load.Requests != 3 {
				t.Errorf("three requests hold %+v, want %d blocks", load, tt.want)
			}
		})
	}
}

// TestExpectedOutput: the nearer a request is to the end that its client expects, the less its blocks count.
func TestExpectedOutput(t *testing.T) {
	more := make(chan struct{})
	s := newScript(t, func(c *conn, _ received) {
		c.say(streamHead)
		for range 24 {
			c.say(chunk(hello))
		}
		<-more
		c.say(chunk(ended+done) + chunk(""))
	})
	f := begin(t, setup{router: inKV(nil)}, served("w", s))
	over := make(chan got, 1)
	go func() {
		over <- f.chat(`{"model":"m","stream":true,"nvext":{"agent_hints":{"osl":32}},"messages":[{"role":"user","content":"` + strings.Repeat("x", 368) + `"}]}`)
	}()
	// 100 prompt tokens: 6 complete blocks and a part. A block is begun at 13 tokens of output, when 19 of 32
	// are still expected: 7 blocks of weight 0.59.
	eventually(t, "a block of output is booked at its weight", func() bool {
		for _, l := range f.partition("m").Tracker.Loads(time.Now()) {
			if l.DecodeBlocks == 4 {
				return true
			}
		}
		return false
	})
	close(more)
	if g := <-over; g.status != 200 {
		t.Errorf("%d %s", g.status, g.body)
	}
}

// TestRankByItsName: the chosen rank is named to a worker that has several, whatever the client says, and
// none to one that picks its ranks itself, though its cache counts as a whole.
func TestRankByItsName(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{router: inKV(nil)}, worker.Worker{ID: 1, Name: "four", Endpoint: s.url(), Models: []string{"m"}, DPStart: 4, DPSize: 4})
	first := f.chat(chatOf(sentence(1, 60)), "X-Data-Parallel-Rank: 6")
	first.is(t, "pinned to rank 6", 200, reply, "X-Spillway-Dp-Rank: 6")
	for range 8 {
		f.chat(chatOf(sentence(1, 60))).is(t, "a prompt that rank 6 has", 200, reply, "X-Spillway-Dp-Rank: 6")
	}
	ranks := map[string]bool{}
	for i := range 60 {
		ranks[f.chat(chatOf(sentence(50+i, 60))).header.Get("X-Spillway-Dp-Rank")] = true
	}
	if len(ranks) != 4 {
		t.Errorf("60 prompts went to ranks %v, want all four", ranks)
	}
	for _, r := range s.seen() {
		if rank := r.header.Get("X-Data-Parallel-Rank"); rank < "4" || rank > "7" {
			t.Fatalf("a request was sent with rank %q", rank)
		}
	}
	own := begin(t, setup{router: inKV(nil)}, worker.Worker{ID: 2, Name: "own", Endpoint: s.url(), Models: []string{"m"}, DPSize: 4, RankRouting: worker.RankByEngine})
	own.chat(chatOf(sentence(1, 60))).is(t, "picks itself", 200, reply, "X-Spillway-Dp-Rank: ")
	own.chat(chatOf(sentence(1, 60))).is(t, "picks itself", 200, reply, "X-Spillway-Dp-Rank: ")
	if hits := own.hits(); hits < 0.5 {
		t.Errorf("%v of a prompt was taken to be cached by a worker that picks its ranks, want most", hits)
	}
	if seen := s.seen(); seen[len(seen)-1].header.Get("X-Data-Parallel-Rank") != "" {
		t.Error("a rank was named to a worker that picks its ranks")
	}
}

// TestSessions: requests of a session stay together in any mode, unless there is no room or a pin.
func TestSessions(t *testing.T) {
	for _, mode := range []router.Mode{router.RoundRobin, router.KV} {
		t.Run(string(mode), func(t *testing.T) {
			s := newScript(t, saying(answer(200, jsonHeader, reply)))
			w1, w2 := served("w1", s), served("w2", s)
			cfg := router.DefaultConfig()
			cfg.Mode, cfg.SessionTTLSecs = mode, new(uint32(60))
			f := begin(t, setup{router: cfg, busy: decodeLimit()}, w1, w2)
			session := func(name string) string { return f.chat(chatBody, "X-Session-Id: "+name).at(t) }
			a := session("a")
			for range 9 {
				if at := session("a"); at != a {
					t.Fatalf("the session went from %s to %s", a, at)
				}
			}
			ids := map[string]worker.ID{"w1": w1.ID, "w2": w2.ID}
			f.report(ids[a], 90)
			b := session("a")
			if b == a {
				t.Fatalf("the session stays at %s, which is busy", a)
			}
			f.report(ids[a], 10)
			if at := session("a"); at != b {
				t.Errorf("the session went back to %s", at)
			}
			if at := f.chat(chatBody, "X-Dynamo-Session-Id: a", "X-Dynamo-Worker-Instance-Id: "+a).at(t); at != a {
				t.Errorf("a pin to %s led to %s", a, at)
			}
			for effect, want := range map[string]string{"new": "1", "kept": "10", "moved": "2"} {
				if got := f.metric(`spillway_session_requests_total{effect="` + effect + `",model="m"}`); got != want {
					t.Errorf("requests of sessions, %s: %s, want %s", effect, got, want)
				}
			}
			if got := f.metric(`spillway_sessions{model="m",tenant="default"}`); got != "1" {
				t.Errorf("sessions: %s, want 1", got)
			}
		})
	}
}

// TestNoMoreThanThereIsRoomFor: a rank is not taken to have cached more blocks than it has.
func TestNoMoreThanThereIsRoomFor(t *testing.T) {
	s := newScript(t, saying(answer(200, jsonHeader, reply)))
	f := begin(t, setup{router: inKV(nil)}, worker.Worker{ID: 1, Name: "w", Endpoint: s.url(), Models: []string{"m"}, KVTotalBlocks: 25})
	n, seen := 0, ""
	eventually(t, "the rank's size is known", func() bool {
		n++
		f.chat(chatOf(sentence(n, 60))).at(t) // 10 blocks
		seen = f.metric(`spillway_kv_decision_blocks{model="m",tenant="default"}`)
		return n > 3 && seen == "25"
	})
	before := f.hits()
	f.chat(chatOf(sentence(n, 60))).at(t)
	if f.hits() == before {
		t.Error("the last prompt is forgotten, want the first ones")
	}
}

// TestTextInTokens: what a rank has of a text counts in tokens, of which there are more or fewer than words.
func TestTextInTokens(t *testing.T) {
	half := strings.Replace(reply, `"prompt_tokens":10`, `"prompt_tokens":200`, 1)
	s := newScript(t, saying(answer(200, jsonHeader, half)))
	var booked []proxy.Booking
	f := begin(t, setup{router: inKV(nil), before: func(s *proxy.Server) {
		s.Share(func(b proxy.Booking) {
			if b.Stage == proxy.Booked {
				booked = append(booked, b)
			}
		})
	}}, served("w", s))
	first, more := sentence(1, 300)[:1600], sentence(2, 300)[:1600]
	for _, prompt := range []string{first, first + more} { // of 400 words, which are 200 tokens, and of twice that
		if g := f.send("POST", "/v1/completions", `{"model":"m","prompt":"`+prompt+`"}`); g.status != 200 {
			t.Fatalf("%d %s", g.status, g.body)
		}
	}
	// It has 25 blocks of words, which are 12 of tokens: 192 of 400.
	if got := booked[1].PrefillTokens; booked[0].PrefillTokens != 400 || got != 208 {
		t.Errorf("booked are %d and %d tokens, want 400 by the first estimate, and 208 for what is new of 400", booked[0].PrefillTokens, got)
	}
}
