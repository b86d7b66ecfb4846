package tokenize

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

func TestRead(t *testing.T) {
	for _, tt := range []struct {
		name, body string
		chat       bool
		ok, media  bool
		prompts    int
		sent       string // to /tokenize
	}{
		{name: "a chat", chat: true, ok: true, prompts: 1,
			body: ` { "temperature" : 1 , "messages" : [ {"role":"user","content":"Hi \"you\\\""} ] , "model":"m","stream":true}`,
			sent: `{"model":"w","messages":[ {"role":"user","content":"Hi \"you\\\""} ]}`},
		{name: "all that changes the prompt, and nothing else", chat: true, ok: true, prompts: 1,
			body: `{"seed":1,"mm_processor_kwargs":{"a":1},"reasoning_effort":"low","documents":[{}],"add_special_tokens":true,"continue_final_message":false,` +
				`"add_generation_prompt":true,"chat_template_kwargs":{"b":[2]},"chat_template":"t","tool_choice":"auto","tools":[{"type":"function"}],` +
				`"messages":[],"max_tokens":5,"cache_salt":"s","prompt":"of another route","functions":[]}`,
			sent: `{"model":"w","messages":[],"tools":[{"type":"function"}],"tool_choice":"auto","chat_template":"t","chat_template_kwargs":{"b":[2]},` +
				`"add_generation_prompt":true,"continue_final_message":false,"add_special_tokens":true,"documents":[{}],"reasoning_effort":"low","mm_processor_kwargs":{"a":1}}`},
		{name: "null is left out", chat: true, ok: true, prompts: 1, body: `{"messages":[],"tools":null}`, sent: `{"model":"w","messages":[]}`},
		{name: "the last of two, which is none", chat: true, body: `{"messages":[{}],"messages":[1]}`},
		{name: "the last of two", chat: true, ok: true, prompts: 1, body: `{"tools":[1],"messages":[],"tools":[2]}`, sent: `{"model":"w","messages":[],"tools":[2]}`},
		{name: "a key with escapes", chat: true, ok: true, prompts: 1, body: `{"mess\u0061ges":[],"\u0074ools" : [1]}`, sent: `{"model":"w","messages":[],"tools":[1]}`},
		{name: "text parts", chat: true, ok: true, prompts: 1,
			body: `{"messages":[{"role":"user","content":[{"type":"text","text":"a"},"b",{"text":"c","type":"input_text"}],"tool_calls":[{"type":"function"}]}]}`},
		{name: "an image", chat: true, ok: true, media: true, prompts: 1, body: `{"messages":[{"content":[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"u"}}]}]}`},
		{name: "a part without a type", chat: true, ok: true, media: true, prompts: 1, body: `{"messages":[{"content":[{"image_url":"u"}]}]}`},
		{name: "a part that is a number", chat: true, ok: true, media: true, prompts: 1, body: `{"messages":[{"content":[7]}]}`},
		{name: "no messages", chat: true, body: `{"prompt":"x"}`},
		{name: "messages that are none", chat: true, body: `{"messages":"x"}`},
		{name: "a text", ok: true, prompts: 1, body: `{"prompt":"x","messages":[],"add_special_tokens":false,"tools":[]}`, sent: `{"model":"w","prompt":"x","add_special_tokens":false}`},
		{name: "a list of one text", ok: true, prompts: 1, body: `{"prompt":[ "x" ]}`, sent: `{"model":"w","prompt":"x"}`},
		{name: "two texts", ok: true, prompts: 2, body: `{"prompt":["x","y"]}`},
		{name: "token IDs", body: `{"prompt":[1,2]}`},
		{name: "lists of token IDs", body: `{"prompt":[[1,2]]}`},
		{name: "no prompt", body: `{"prompt":null}`},
		{name: "no text", body: `{"prompt":[]}`},
		{name: "embeddings", body: `{"prompt":"x","prompt_embeds":"e"}`},
		{name: "no object", body: `["prompt"]`},
		{name: "half of one", body: `{"prompt":"x"`},
		{name: "more than one", body: `{"prompt":"x"}{}`},
		{name: "nothing"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, ok := read([]byte(tt.body), tt.chat)
			if ok != tt.ok || ok && (r.media != tt.media || r.prompts != tt.prompts) {
				t.Fatalf("read(%s) = %v, media %v, %d prompts, want %v, %v, %d", tt.body, ok, r.media, r.prompts, tt.ok, tt.media, tt.prompts)
			}
			if got := string(r.appendTokenize(nil, "w")); tt.sent != "" && got != tt.sent {
				t.Errorf("appendTokenize = %s\nwant %s", got, tt.sent)
			}
		})
	}
}

func TestAppendRender(t *testing.T) {
	for body, want := range map[string]string{
		`{"messages":[],"model":"alias","n":1}`:       `{"messages":[],"model":"served/\"m\"","n":1}`,
		`{"model" : "a" , "messages":[],"model":"b"}`: `{"model" : "a" , "messages":[],"model":"served/\"m\""}`,
		` { "messages":[]}`:                           ` {"model":"served/\"m\"", "messages":[]}`,
	} {
		r, ok := read([]byte(body), true)
		if got := string(r.appendRender(nil, []byte(body), `served/"m"`)); !ok || got != want {
			t.Errorf("appendRender(%s) = %s, want %s", body, got, want)
		}
	}
}

func fixed() *Tokenizer {
	t := New(DefaultConfig(), only(Worker{}), prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	t.seed = 1
	return t
}

// TestKeys: whatever may change the tokens changes the key, and nothing else does.
func TestKeys(t *testing.T) {
	x := fixed()
	keyOf := func(p Prompt, generation uint64) key {
		r, ok := read(p.Body, p.Chat)
		if !ok {
			t.Fatalf("read(%s) = false", p.Body)
		}
		return x.keyOf(&p, &r, generation)
	}
	chat := func(model, tenant, served, body string) Prompt {
		return Prompt{model, tenant, served, true, []byte(body)}
	}
	base := keyOf(chat("m", "t", "s", `{"messages":[{}],"tools":[2]}`), 0)
	if same := keyOf(chat("m", "t", "s", `{"model":"any","tools":[2],"messages":[{}],"max_tokens":7,"chat_template":null}`), 0); same != base {
		t.Errorf("the same prompt in another request has another key")
	}
	seen := map[key]string{base: "the first"}
	for name, k := range map[string]key{
		"generation":        keyOf(chat("m", "t", "s", `{"messages":[{}],"tools":[2]}`), 1),
		"model":             keyOf(chat("n", "t", "s", `{"messages":[{}],"tools":[2]}`), 0),
		"tenant":            keyOf(chat("m", "u", "s", `{"messages":[{}],"tools":[2]}`), 0),
		"served":            keyOf(chat("m", "t", "r", `{"messages":[{}],"tools":[2]}`), 0),
		"names run on":      keyOf(chat("mt", "", "s", `{"messages":[{}],"tools":[2]}`), 0),
		"messages":          keyOf(chat("m", "t", "s", `{"messages":[{"a":1}],"tools":[2]}`), 0),
		"no tools":          keyOf(chat("m", "t", "s", `{"messages":[{}]}`), 0),
		"a value elsewhere": keyOf(chat("m", "t", "s", `{"messages":[{}],"documents":[2]}`), 0),
		"truncated":         keyOf(chat("m", "t", "s", `{"messages":[{}],"tools":[2],"truncate_prompt_tokens":5}`), 0),
		"a completion":      keyOf(Prompt{"m", "t", "s", false, []byte(`{"prompt":"x"}`)}, 0),
		"another one":       keyOf(Prompt{"m", "t", "s", false, []byte(`{"prompt":"y"}`)}, 0),
		"a list of one":     keyOf(Prompt{"m", "t", "s", false, []byte(`{"prompt":["y"]}`)}, 0),
		"special tokens":    keyOf(Prompt{"m", "t", "s", false, []byte(`{"prompt":"y","add_special_tokens":true}`)}, 0),
	} {
		if other, ok := seen[k]; ok {
			t.Errorf("%s and %s have the same key", name, other)
		}
		seen[k] = name
	}
}

// FuzzRead compares what is copied of a body with what encoding/json finds in it.
func FuzzRead(f *testing.F) {
	for _, seed := range []string{
		`{"messages":[{"role":"user","content":"x"}],"tools":[{"a":"\"}"}],"model":"m"}`,
		`{"messages":[{"content":[{"type":"text"},{"type":"image_url"}]}],"messages" : []}`,
		`{"prompt":["a","b\\"],"prompt_embeds":null}`, `{"prompt":"\\\"", "mod\u0065l" : 1}`, `{"prompt":[1]}`, `{"a":`, `{"prompt":"x"} x`,
		`{"messages":[],"tools":{"b":[true,-1.5e9,{}]}}`,
	} {
		f.Add([]byte(seed), true)
		f.Add([]byte(seed), false)
	}
	f.Fuzz(func(t *testing.T, body []byte, chat bool) {
		r, ok := read(body, chat)
		var all map[string]json.RawMessage
		if json.Unmarshal(body, &all) != nil || all == nil {
			return // it is enough that nothing breaks
		}
		for i, name := range fieldNames {
			want, given := all[name]
			if _, known := fieldOf([]byte(name), chat); !known || string(want) == "null" {
				given = false
			}
			if given != (r.values[i] != nil) || given && !bytes.Equal(want, r.values[i]) {
				t.Fatalf("read(%s): %s is %s, want %s", body, name, r.values[i], want)
			}
		}
		text := readable(all, chat)
		if ok != text {
			t.Fatalf("read(%s, chat %v) = %v, want %v", body, chat, ok, text)
		}
		if !ok {
			return
		}
		for _, sent := range [][]byte{r.appendRender(nil, body, "w"), r.appendTokenize(nil, "w")} {
			var again map[string]json.RawMessage
			if err := json.Unmarshal(sent, &again); err != nil && r.prompts == 1 {
				t.Fatalf("of %s was made %s: %v", body, sent, err)
			} else if err == nil && string(again["model"]) != `"w"` {
				t.Fatalf("of %s was made %s, whose model is not w", body, sent)
			}
		}
		var rendered map[string]json.RawMessage
		if err := json.Unmarshal(r.appendRender(nil, body, "w"), &rendered); err != nil {
			t.Fatal(err)
		}
		for name, want := range all {
			if name != "model" && !bytes.Equal(rendered[name], want) {
				t.Fatalf("appendRender(%s) has %s %s, want %s", body, name, rendered[name], want)
			}
		}
	})
}

// readable is the slow way to tell whether there is text to be tokenised.
func readable(all map[string]json.RawMessage, chat bool) bool {
	if chat {
		var list []json.RawMessage
		if json.Unmarshal(all["messages"], &list) != nil || list == nil {
			return false
		}
		return !slices.ContainsFunc(list, func(m json.RawMessage) bool { return m[0] != '{' })
	}
	if e := all["prompt_embeds"]; e != nil && string(e) != "null" {
		return false
	}
	var list []json.RawMessage
	p := all["prompt"]
	if json.Unmarshal(p, &list) != nil {
		return len(p) > 0 && p[0] == '"'
	}
	return len(list) > 0 && !slices.ContainsFunc(list, func(m json.RawMessage) bool { return m[0] != '"' })
}

func TestAnswered(t *testing.T) {
	one, two, image := &reading{prompts: 1}, &reading{prompts: 2}, &reading{prompts: 1, media: true}
	for _, tt := range []struct {
		name  string
		to    route
		r     *reading
		body  string
		ids   []uint32
		count uint64 // 0: an error
		text  bool
	}{
		{"vLLM's", toTokenize, one, `{"count":3,"max_model_len":9,"tokens":[1,0,4294967295],"token_strs":null}`, []uint32{1, 0, 4294967295}, 3, true},
		{"in another order and spelling", toTokenizeV1, one, " {\"tokens\" : [ 1 ,\n2 ] , \"x\":[{}], \"count\" : 2 } ", []uint32{1, 2}, 2, true},
		{"without a count", toTokenize, one, `{"tokens":[5]}`, []uint32{5}, 1, true},
		{"another count", toTokenize, one, `{"count":4,"tokens":[1,2,3]}`, nil, 0, false},
		{"no tokens", toTokenize, one, `{"count":0,"tokens":[]}`, nil, 0, false},
		{"null", toTokenize, one, `{"count":1,"tokens":null}`, nil, 0, false},
		{"a negative", toTokenize, one, `{"tokens":[1,-2]}`, nil, 0, false},
		{"too large", toTokenize, one, `{"tokens":[4294967296]}`, nil, 0, false},
		{"far too large", toTokenize, one, `{"tokens":[18446744073709551617]}`, nil, 0, false},
		{"a fraction", toTokenize, one, `{"tokens":[1.5]}`, nil, 0, false},
		{"text", toTokenize, one, `{"tokens":["1"]}`, nil, 0, false},
		{"cut short", toTokenize, one, `{"tokens":[1,2`, nil, 0, false},
		{"more after it", toTokenize, one, `{"tokens":[1,2]} {}`, nil, 0, false},
		{"of render", toTokenize, one, `{"token_ids":[1]}`, nil, 0, false},
		{"an error", toTokenize, one, `{"error":{"message":"m"}}`, nil, 0, false},
		{"a page", toTokenize, one, `<html>`, nil, 0, false},
		{"with an image", toTokenize, image, `{"tokens":[1,2]}`, nil, 2, false},
		{"a chat", toRender, one, `{"token_ids":[7,8],"features":null}`, []uint32{7, 8}, 2, true},
		{"a chat with features", toRender, one, `{"token_ids":[7,8],"features":{"mm_hashes":{}}}`, nil, 2, false},
		{"a completion", toRender, one, `[{"token_ids":[7,8]}]`, []uint32{7, 8}, 2, true},
		{"two prompts", toRender, two, `[{"token_ids":[7,8]},{"token_ids":[9]}]`, nil, 3, true},
		{"one of two prompts", toRender, two, `[{"token_ids":[7,8]}]`, nil, 0, false},
		{"two of one prompt", toRender, one, `[{"token_ids":[7,8]},{"token_ids":[9]}]`, nil, 0, false},
		{"one without tokens", toRender, two, `[{"token_ids":[7,8]},{}]`, nil, 0, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := answered(tt.to, []byte(tt.body), tt.r)
			if (err == nil) != (tt.count > 0) || !slices.Equal(got.IDs, tt.ids) || (got.IDs == nil) != (tt.ids == nil) || got.Count != tt.count || got.Text != tt.text {
				t.Errorf("answered(%s) = %+v, %v, want %v, %d, text %v", tt.body, got, err, tt.ids, tt.count, tt.text)
			}
		})
	}
}

// FuzzAnswered: what is taken for tokens is what encoding/json reads; all else is an error.
func FuzzAnswered(f *testing.F) {
	for _, seed := range []string{
		`{"count":3,"tokens":[1,0,4294967295],"token_strs":null}`, `{"token_ids":[7,8],"features":{"a":[1]}}`, `[{"token_ids":[7]},{"token_ids":[9]}]`,
		`{"tokens":[31999,128000,12345678,87654321,4294967295,4294967296,9999999999,1,2,3,4]}`, `{"tokens":[01]}`, `{"tokens":[1,]}`, `{"tok\u0065ns":[1],"count":1}`, `{"tokens":[1e2]}`, `[{"token_ids":[7]}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for to := range numRoutes {
			got, err := answered(to, body, &reading{prompts: 1})
			if err != nil {
				continue
			}
			if got.Count == 0 || got.IDs != nil && uint64(len(got.IDs)) != got.Count {
				t.Fatalf("answered(%s) = %+v", body, got)
			}
			if !json.Valid(body) {
				continue
			}
			var whole map[string]json.RawMessage
			if list := []json.RawMessage{}; json.Unmarshal(body, &list) == nil {
				body = list[0]
			}
			name := "tokens"
			if to == toRender {
				name = "token_ids"
			}
			var want []uint32
			if json.Unmarshal(body, &whole) != nil || json.Unmarshal(whole[name], &want) != nil || uint64(len(want)) != got.Count || got.IDs != nil && !slices.Equal(got.IDs, want) {
				t.Fatalf("answered(%s) = %+v, want %v", body, got, want)
			}
		}
	})
}

// TestLists: IDs of all lengths, at all places of a word, in all company, are read as encoding/json reads
// them, or not at all.
func TestLists(t *testing.T) {
	some := []string{"0", "7", "42", "815", "2048", "31999", "128000", "1048576", "10000000", "99999999", "123456789", "4294967295",
		"4294967296", "9999999999", "12345678901", "00", "012", "00000000", "0123456789", "", "-1", "1.5", "1e3", "x", "1x", "12345678x", " 12", "\t5 ", "\x80", "1\xff"}
	for _, odd := range some {
		for _, usual := range []string{"1", "12345", "12345678", "4000000000"} {
			for at := range 4 {
				for behind := range 4 {
					ids := slices.Repeat([]string{usual}, at+1+behind)
					ids[at] = odd
					list := "[" + strings.Join(ids, ",") + "]"
					var want []uint32
					good := json.Unmarshal([]byte(list), &want) == nil
					var a answer
					c := cursor{b: []byte(list)}
					if ok := a.list(&c) && c.next() == 0; ok != good || ok && !slices.Equal(a.ids, want) {
						t.Fatalf("list(%q) = %d, %v, want %d, %v", list, a.ids, ok, want, good)
					}
				}
			}
		}
	}
}

// TestCacheAgreesWithModel compares the cache with a list that is searched from its end.
func TestCacheAgreesWithModel(t *testing.T) {
	const limit = 10 * (entryBytes + 40)
	c := newCache(limit)
	type kept struct {
		k key
		n int
	}
	var all []kept // the newest last
	size := func(n int) int64 { return entryBytes + int64(n)*4 }
	find := func(k key) int { return slices.IndexFunc(all, func(o kept) bool { return o.k == k }) }
	state := uint64(7)
	for step := range 20000 {
		state = state*6364136223846793005 + 1442695040888963407
		k, n := key{state >> 60, 0}, int(state>>40%60)
		if state>>33%3 == 0 && int64(n) > 50 {
			n = int(limit) // too large to be kept
		}
		i := find(k)
		if state>>50%2 == 0 {
			tokens, ok := c.find(k)
			if ok != (i >= 0) || ok && len(tokens.IDs) != all[i].n {
				t.Fatalf("step %d: find = %d tokens, %v, want %v", step, len(tokens.IDs), ok, i >= 0)
			}
			if ok {
				all = append(slices.Delete(slices.Clone(all), i, i+1), all[i])
			}
			continue
		}
		c.add(k, Tokens{IDs: make([]uint32, n)})
		if size(n) <= limit {
			if i >= 0 {
				all = slices.Delete(all, i, i+1)
			}
			all = append(all, kept{k, n})
		}
		total := int64(0)
		for _, o := range all {
			total += size(o.n)
		}
		for ; total > limit; all = all[1:] {
			total -= size(all[0].n)
		}
		if c.bytes != total || len(c.entries) != len(all) {
			t.Fatalf("step %d: %d bytes in %d entries, want %d in %d", step, c.bytes, len(c.entries), total, len(all))
		}
	}
}

func TestCacheOff(t *testing.T) {
	c := newCache(0)
	c.add(key{1, 1}, Tokens{Count: 1})
	if _, ok := c.find(key{1, 1}); ok || c.bytes != 0 {
		t.Errorf("a cache of 0 bytes holds %d", c.bytes)
	}
}

// chatOf is a conversation of about so many bytes.
func chatOf(bytes int) []byte {
	var b strings.Builder
	b.WriteString(`{"model":"m","stream":true,"max_tokens":100,"messages":[{"role":"system","content":"You are \"terse\"."}`)
	for b.Len() < bytes-200 {
		b.WriteString(`,{"role":"user","content":"`)
		b.WriteString(strings.Repeat("It was a dark and stormy night. ", min(64, (bytes-b.Len()-120)/32+1)))
		b.WriteString(`"}`)
	}
	b.WriteString(`]}`)
	return []byte(b.String())
}

func BenchmarkRead(b *testing.B) {
	body := chatOf(32 << 10)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, ok := read(body, true); !ok {
			b.Fatal("unreadable")
		}
	}
}

func BenchmarkAnswered(b *testing.B) {
	for _, most := range []uint32{128_000, math.MaxUint32} {
		ids := make([]uint32, 8192)
		for i := range ids {
			ids[i] = uint32(uint64(i*2654435761) % uint64(most))
		}
		body, err := json.Marshal(map[string]any{"count": len(ids), "tokens": ids})
		if err != nil {
			b.Fatal(err)
		}
		b.Run(fmt.Sprintf("below=%d", most), func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				if got, err := answered(toTokenize, body, &reading{prompts: 1}); err != nil || len(got.IDs) != len(ids) {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkKey(b *testing.B) {
	body := chatOf(32 << 10)
	t := fixed()
	p := Prompt{"m", "default", "m", true, body}
	r, _ := read(body, true)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		t.keyOf(&p, &r, 0)
	}
}
