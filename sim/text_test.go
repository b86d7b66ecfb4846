package sim_test

import (
	"encoding/json"
	"strings"
	"testing"

	"spillway/sim"
)

func TestChatUnary(t *testing.T) {
	url := serve(t, fast())[0]
	code, data := post(t, url+"/v1/chat/completions", chatBody(""), "X-Request-Id", `my "id"`)
	r := decode[reply](t, data)
	if code != 200 || r.ID != `chatcmpl-my "id"` || r.Object != "chat.completion" || len(r.Choices) != 1 {
		t.Fatalf("got %d %s", code, data)
	}
	c := r.Choices[0]
	if c.Message.Role != "assistant" || len(c.Message.Content) != 20*4 || *c.Finish != "length" {
		t.Errorf("choice = %+v, want 20 tokens of 4 bytes", c)
	}
	// 22 bytes are 6 tokens, 4 for the message and 3 to generate.
	if *r.Usage != (usage{Prompt: 13, Output: 20, Total: 33}) {
		t.Errorf("usage = %+v", r.Usage)
	}
}

func TestChatStream(t *testing.T) {
	url := serve(t, fast())[0]
	_, unary := post(t, url+"/v1/chat/completions", chatBody(""))
	_, data := post(t, url+"/v1/chat/completions", chatBody(`,"stream":true,"stream_options":{"include_usage":true}`))
	evs := events(t, data)
	if len(evs) != 1+20+1 {
		t.Fatalf("got %d events, want role, 20 tokens, usage: %s", len(evs), data)
	}
	if d := evs[0].Choices[0].Delta; d.Role != "assistant" || d.Content != "" {
		t.Errorf("first event = %+v, want the role alone", d)
	}
	var text strings.Builder
	for i, ev := range evs[1:21] {
		c := ev.Choices[0]
		text.WriteString(c.Delta.Content)
		if len(c.Delta.Content) != 4 || (c.Finish != nil) != (i == 19) || ev.Usage != nil {
			t.Errorf("event %d = %+v", i+1, ev)
		}
	}
	if want := decode[reply](t, unary).Choices[0].Message.Content; text.String() != want {
		t.Errorf("text = %q, want that of the unary answer, %q", text.String(), want)
	}
	last := evs[21]
	if len(last.Choices) != 0 || *last.Usage != (usage{Prompt: 13, Output: 20, Total: 33}) {
		t.Errorf("last event = %+v", last)
	}
}

func TestContinuousUsage(t *testing.T) {
	url := serve(t, fast())[0]
	_, data := post(t, url+"/v1/chat/completions",
		chatBody(`,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}`))
	evs := events(t, data)
	for i, ev := range evs[:21] {
		if ev.Usage == nil || ev.Usage.Output != i || ev.Usage.Prompt != 13 || ev.Usage.Total != 13+i {
			t.Errorf("event %d: usage %+v", i, ev.Usage)
		}
	}
}

func TestDefaultLengths(t *testing.T) {
	url := serve(t, fast())[0]
	for _, tt := range []struct {
		path, body, finish string
		tokens             int
	}{
		{"chat/completions", `{"messages":[{"role":"user","content":"x"}]}`, "stop", 256},
		{"chat/completions", `{"messages":[{"role":"user","content":"x"}],"ignore_eos":true}`, "length", 256},
		{"chat/completions", `{"messages":[{"role":"user","content":"x"}],"max_tokens":9,"max_completion_tokens":5}`, "length", 5},
		{"completions", `{"prompt":"x"}`, "length", 16},
		{"completions", `{"prompt":"x","max_tokens":3,"stop":["\n","END"]}`, "length", 3},
	} {
		_, data := post(t, url+"/v1/"+tt.path, tt.body)
		r := decode[reply](t, data)
		if r.Usage == nil || r.Usage.Output != tt.tokens || *r.Choices[0].Finish != tt.finish {
			t.Errorf("%s %s = %s, want %d tokens, %s", tt.path, tt.body, data, tt.tokens, tt.finish)
		}
	}
}

func TestCompletionsOfSeveralPrompts(t *testing.T) {
	url := serve(t, fast())[0]
	for _, stream := range []bool{false, true} {
		texts := map[int]string{}
		var u *usage
		body := `{"prompt":["same words","other words"],"n":2,"max_tokens":10`
		if stream {
			_, data := post(t, url+"/v1/completions", body+`,"stream":true,"stream_options":{"include_usage":true}}`)
			for _, ev := range events(t, data) {
				for _, c := range ev.Choices {
					texts[c.Index] += c.Text
				}
				u = ev.Usage
			}
		} else {
			_, data := post(t, url+"/v1/completions", body+`}`)
			r := decode[reply](t, data)
			for _, c := range r.Choices {
				texts[c.Index] = c.Text
			}
			u = r.Usage
		}
		seen := map[string]bool{}
		for i := range 4 {
			if len(texts[i]) != 40 || seen[texts[i]] {
				t.Errorf("stream %v: text %d = %q, want 40 bytes of its own", stream, i, texts[i])
			}
			seen[texts[i]] = true
		}
		if len(texts) != 4 || u == nil || u.Prompt != 3+3 || u.Output != 40 || u.Total != 46 {
			t.Errorf("stream %v: %d texts, usage %+v", stream, len(texts), u)
		}
	}
}

// A conversation that goes on finds prompt and answer of its last turn in the cache.
func TestCachedTokensOfAConversation(t *testing.T) {
	url := serve(t, fast())[0]
	first := `{"role":"user","content":"` + strings.Repeat("word", 100) + `"}`
	_, data := post(t, url+"/v1/chat/completions", `{"max_tokens":64,"messages":[`+first+`]}`)
	r := decode[reply](t, data)
	if r.Usage.Prompt != 107 || r.Usage.Details.Cached != 0 {
		t.Fatalf("first turn: usage %+v", r.Usage)
	}
	next := first + `,{"role":"assistant","content":"` + r.Choices[0].Message.Content + `"},{"role":"user","content":"go on"}`
	_, data = post(t, url+"/v1/chat/completions", `{"max_tokens":1,"messages":[`+next+`]}`)
	// 107 + 63 tokens are stored, the 64th is not: 10 blocks of 16.
	if u := decode[reply](t, data).Usage; u.Prompt != 107+64+1+6+3 || u.Details.Cached != 160 {
		t.Errorf("second turn: usage %+v, want 181 tokens, 160 of them cached", u)
	}
	// What the next one could find, told without a trace of having asked.
	for text, want := range map[string]string{
		strings.Repeat("word", 100): `{"most":6,"workers":[{"worker":0,"ranks":[6]}]}`,
		strings.Repeat("else", 100): `{"most":0,"workers":[{"worker":0,"ranks":[0]}]}`,
		"":                          `{"most":0,"workers":[{"worker":0,"ranks":[0]}]}`,
	} {
		hashes, err := json.Marshal(sim.PrefixHashes(text, true, 16))
		if err != nil {
			t.Fatal(err)
		}
		if _, data = post(t, url+"/sim/prefix", `{"block_size":16,"hashes":`+string(hashes)+`}`); strings.TrimSpace(string(data)) != want {
			t.Errorf("/sim/prefix says %s, want %s", data, want)
		}
	}
	for _, bad := range []string{`{}`, `{"block_size":4,"hashes":[]}`, `{"block_size":16,"hashes":[-1]}`, `[`} {
		if code, data := post(t, url+"/sim/prefix", bad); code != 400 {
			t.Errorf("/sim/prefix of %s: %d %s, want 400", bad, code, data)
		}
	}
	if s := statsOf(t, url); s.Cached != 160 || s.Computed != 107+181-160 {
		t.Errorf("stats = %+v", s)
	}
}

func TestTokenIDsAsPrompt(t *testing.T) {
	url := serve(t, fast())[0]
	var tok struct {
		Count, MaxModelLen int
		Tokens             []uint32
	}
	_, data := post(t, url+"/tokenize", `{"prompt":"`+strings.Repeat("abcdefgh", 20)+`"}`)
	tok = decode[struct {
		Count, MaxModelLen int
		Tokens             []uint32
	}](t, data)
	if tok.Count != 40 || len(tok.Tokens) != 40 || tok.Tokens[0] != tok.Tokens[2] || tok.Tokens[0] == tok.Tokens[1] {
		t.Fatalf("tokens = %s", data)
	}
	post(t, url+"/v1/completions", `{"max_tokens":1,"prompt":"`+strings.Repeat("abcdefgh", 20)+`"}`)
	ids := strings.ReplaceAll(strings.Trim(string(data[strings.Index(string(data), "["):]), "}"), `,"token_strs":null`, "")
	_, data = post(t, url+"/v1/completions", `{"max_tokens":1,"prompt":`+ids+`}`)
	if u := decode[reply](t, data).Usage; u == nil || u.Prompt != 40 || u.Details.Cached != 32 {
		t.Errorf("prompt of token IDs: %s, want 32 cached tokens", data)
	}
}
