package sim_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	chatPrompt  = `{"messages":[{"role":"user","content":"Tell me of the sea."}],"tools":[{"type":"function"}],"max_tokens":1}`
	textPrompt  = `{"prompt":"Tell me of the sea.","max_tokens":1}`
	textPrompts = `{"prompt":["Tell me of the sea.","And of the sky."],"max_tokens":1}`
)

type renderedPrompt struct {
	IDs []uint32 `json:"token_ids"`
}

// TestTokensAreThoseOfTheRequest: all routes that tell tokens tell those that the engine counts.
func TestTokensAreThoseOfTheRequest(t *testing.T) {
	cfg := fast()
	cfg.RenderRoutes = true
	url := serve(t, cfg)[0]
	tokenized := func(body string) []uint32 {
		_, data := post(t, url+"/tokenize", body)
		return decode[struct{ Tokens []uint32 }](t, data).Tokens
	}
	counted := func(route, body string) int {
		_, data := post(t, url+route, body)
		return decode[reply](t, data).Usage.Prompt
	}
	_, data := post(t, url+"/v1/chat/completions/render", chatPrompt)
	chat := decode[renderedPrompt](t, data).IDs
	if want := tokenized(chatPrompt); len(chat) != counted("/v1/chat/completions", chatPrompt) || !slices.Equal(chat, want) {
		t.Errorf("a chat is rendered %v, tokenised %v", chat, want)
	}
	_, data = post(t, url+"/v1/completions/render", textPrompt)
	text := decode[[]renderedPrompt](t, data)
	if want := tokenized(textPrompt); len(text) != 1 || len(text[0].IDs) != counted("/v1/completions", textPrompt) || !slices.Equal(text[0].IDs, want) {
		t.Errorf("a completion is rendered %v, tokenised %v", text, want)
	}
	_, data = post(t, url+"/v1/completions/render", textPrompts)
	if two := decode[[]renderedPrompt](t, data); len(two) != 2 || len(two[0].IDs)+len(two[1].IDs) != counted("/v1/completions", textPrompts) || !slices.Equal(two[0].IDs, text[0].IDs) {
		t.Errorf("two prompts are rendered %v", two)
	}
	for _, route := range []string{"/v1/chat/completions/render", "/v1/completions/render"} {
		if code, data := post(t, url+route, `{}`); code != 400 {
			t.Errorf("%s of nothing = %d %s, want 400", route, code, data)
		}
		if code, data := post(t, url+route, `{"model":"other","prompt":"x","messages":[]}`); code != 404 {
			t.Errorf("%s of another model = %d %s, want 404", route, code, data)
		}
		if code, _ := post(t, serve(t, fast())[0]+route, `{}`); code != 404 {
			t.Errorf("%s without render-routes = %d, want 404", route, code)
		}
	}
}

// TestTokenizerFaults: they hit the routes that tell tokens and nothing else.
func TestTokenizerFaults(t *testing.T) {
	cfg := fast()
	cfg.RenderRoutes = true
	url := serve(t, cfg)[0]
	routes := map[string]string{"/tokenize": chatPrompt, "/v1/chat/completions/render": chatPrompt, "/v1/completions/render": textPrompt}
	length := func(data []byte) int { return strings.Count(string(data), ",") }
	whole := map[string]int{}
	for route, body := range routes {
		_, data := post(t, url+route, body)
		whole[route] = length(data)
	}
	for _, tt := range []struct {
		fault string
		check func(route string, code int, data []byte, took time.Duration) bool
	}{
		{`{"fault":"tokenizer-off"}`, func(_ string, code int, _ []byte, _ time.Duration) bool { return code == 404 }},
		{`{"fault":"tokenizer-fail"}`, func(_ string, code int, _ []byte, _ time.Duration) bool { return code == 500 }},
		{`{"fault":"tokenizer-fail","code":429}`, func(_ string, code int, _ []byte, _ time.Duration) bool { return code == 429 }},
		{`{"fault":"tokenizer-slow","delay_ms":60}`, func(route string, code int, data []byte, took time.Duration) bool {
			return code == 200 && took >= 60*time.Millisecond && length(data) == whole[route]
		}},
		{`{"fault":"tokenizer-lie","extra_tokens":7}`, func(route string, code int, data []byte, _ time.Duration) bool {
			return code == 200 && length(data) == whole[route]+7
		}},
	} {
		set(t, url, tt.fault)
		for route, body := range routes {
			began := time.Now()
			code, data := post(t, url+route, body)
			if took := time.Since(began); !tt.check(route, code, data, took) {
				t.Errorf("%s: %s = %d %.200s after %v", tt.fault, route, code, data, took)
			}
		}
		for _, route := range []string{"/v1/chat/completions", "/v1/completions"} {
			if code, data := post(t, url+route, strings.Replace(chatPrompt, "{", `{"prompt":"x",`, 1)); code != 200 || strings.Contains(string(data), "lie") {
				t.Errorf("%s: %s = %d %s, want 200", tt.fault, route, code, data)
			}
		}
		if hits := faultsOf(t, url)[0][0].Hits; hits != len(routes) {
			t.Errorf("%s: %d hits, want %d", tt.fault, hits, len(routes))
		}
		unset(t, url, "")
	}
	set(t, url, `{"fault":"tokenizer-off","share":0.5}`)
	got := ""
	for range 6 {
		code, _ := post(t, url+"/tokenize", chatPrompt)
		got += fmt.Sprint(code, " ")
	}
	if got != "200 404 200 404 200 404 " {
		t.Errorf("a share of 0.5 answers %s", got)
	}
}
