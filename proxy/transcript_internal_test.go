package proxy

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"spillway/kvhash"
)

// blocksOf hashes the prompt of a body as a route reads it, in blocks of one word, so that every byte
// matters.
func blocksOf(t *testing.T, ep int, body string) []uint64 {
	t.Helper()
	s, refusal := judged(ep, body)
	if refusal != "" {
		t.Fatalf("%s: %s", body, refusal)
	}
	var text kvhash.Text
	text.Reset(kvhash.Options{BlockSize: 1}, 1<<20)
	s.write([]byte(body), &text)
	return slices.Clone(text.Blocks())
}

// inWords hashes a text.
func inWords(text string) []uint64 {
	var t kvhash.Text
	t.Reset(kvhash.Options{BlockSize: 1}, 1<<20)
	t.Add([]byte(text))
	return slices.Clone(t.Blocks())
}

// TestTranscript has what of a body is hashed, and in which order.
func TestTranscript(t *testing.T) {
	const responsesRoute, messagesRoute = 3, 4
	for _, tt := range []struct {
		name, body string
		ep         int
		want       string
	}{
		{"a chat", `{"messages":[{"role":"user","content":"Hi"}]}`, chatRoute, "userHi"},
		{"escapes", `{"messages":[{"content":"\"\\\/\b\f\n\r\t\u0041\u00e9\u20AC\ud83d\ude00\ud800x\udc00"}]}`, chatRoute, "\"\\/\b\f\n\r\tAé€😀\ufffdx\ufffd"},
		{"parts and calls", `{"messages":[{"type":"no","role":"r","content":[{"type":"text","text":"a"},{"x":{"y":["b",1,null,true]}}],"tool_calls":[{"id":"i","type":"function","function":{"name":"f","arguments":"{}"}}]}]}`, chatRoute, "rabif{}"},
		{"tools come first", `{"messages":[{"content":"m"}],"functions":[{"a" : 1}],"tools":[{"type":"f"}],"prompt":"p","system":"s"}`, chatRoute, `[{"type":"f"}][{"a" : 1}]m`},
		{"no tools", `{"messages":[{"content":"m"}],"tools":[],"functions":null}`, chatRoute, "m"},
		{"a key twice", `{"messages":[{"content":"x"}],"messages":[{"content":"m"}]}`, chatRoute, "m"},
		{"a prompt", `{"prompt":"a\nb","tools":[1],"messages":[{"content":"m"}]}`, completionsRoute, "a\nb"},
		{"a list", `{"prompt":["a","b"]}`, completionsRoute, "ab"},
		{"an input", `{"input":"in","instructions":"do","tools":[{}],"functions":[{}]}`, responsesRoute, "[{}]doin"},
		{"items", `{"input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"in"}]}],"instructions":"do"}`, responsesRoute, "douserin"},
		{"messages", `{"messages":[{"content":"m"}],"system":[{"type":"text","text":"s"}],"tools":[{}]}`, messagesRoute, "[{}]sm"},
	} {
		if got, want := blocksOf(t, tt.ep, tt.body), inWords(tt.want); !slices.Equal(got, want) {
			t.Errorf("%s: %s is not hashed as %q", tt.name, tt.body, tt.want)
		}
	}
	medium := func(url string) []uint64 {
		return blocksOf(t, chatRoute, `{"messages":[{"content":[{"type":"image_url","image_url":{"url":"`+url+`"}},{"text":"abcd"}]}]}`)
	}
	if a, b := medium("a"), medium("b"); len(a) != tokensPerMedium+1 || slices.Equal(a[:len(a)-1], b[:len(b)-1]) || a[len(a)-1] != b[len(b)-1] {
		t.Errorf("images are hashed as %d and %d words, want %d, others for another image, and the text alike", len(a), len(b), tokensPerMedium+1)
	}
}

// TestTranscriptAgreesWithTally: what is hashed is as long as what is counted, whatever the body.
func TestTranscriptAgreesWithTally(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var value func(depth int) any
	word := func() string {
		return []string{"", "text", "a\"b\\", "é\n😀", "role", "x", strings.Repeat("long ", 40)}[rng.IntN(7)]
	}
	value = func(depth int) any {
		switch n := rng.IntN(9); {
		case n < 4 || depth > 4:
			return word()
		case n < 6:
			return []any{rng.IntN(9), nil, true, word()}[rng.IntN(4)]
		case n == 6:
			var list []any
			for range rng.IntN(4) {
				list = append(list, value(depth+1))
			}
			return list
		}
		m := map[string]any{}
		for range rng.IntN(4) {
			m[[]string{"type", "text", "content", "image_url", "source", "file", "f"}[rng.IntN(7)]] = value(depth + 1)
		}
		return m
	}
	for range 5000 {
		body := map[string]any{}
		for _, key := range []string{"messages", "tools", "functions", "system", "instructions", "input", "prompt"} {
			if rng.IntN(3) == 0 {
				continue
			}
			body[key] = value(0)
			if rng.IntN(2) == 0 {
				body[key] = []any{value(1), value(1)}
			}
		}
		raw, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		for ep := range endpoints {
			s, refusal := judged(ep, string(raw))
			if refusal != "" || endpoints[ep].label == "completions" && nestedText(body["prompt"], 1) || endpoints[ep].label != "completions" && nestedText(body["input"], 1) {
				continue
			}
			var text kvhash.Text
			text.Reset(kvhash.Options{BlockSize: 4}, 1<<20)
			s.write(raw, &text)
			want := (s.reads.bytes + s.reads.media*tokensPerMedium*bytesPerToken + 3) / 4
			if got := text.Tokens(); got != want {
				t.Fatalf("%s as %s: %d words are hashed, %d counted", raw, endpoints[ep].label, got, want)
			}
		}
	}
}

// nestedText tells whether there is text in lists deeper than any prompt is: it is not counted, and no
// worker takes it.
func nestedText(v any, depth int) bool {
	list, ok := v.([]any)
	if !ok {
		return false
	}
	for _, e := range list {
		if _, deeper := e.([]any); depth >= 2 && deeper || nestedText(e, depth+1) {
			return true
		}
	}
	return false
}

// TestAppendIDs has the prompts that consist of token IDs, and those that do not quite. No more IDs are kept
// than are asked for; those after them are looked at all the same.
func TestAppendIDs(t *testing.T) {
	for _, tt := range []struct {
		prompt string
		want   string
	}{
		{"[1,2,3]", "[1 2 3] true"},
		{" [ [ 0 , 4294967295 ] ] ", "[0 4294967295] true"},
		{"[4294967296]", "false"}, {"[1,-2]", "false"}, {"[1.0]", "false"}, {"[1e2]", "false"}, {"[1,null]", "false"}, {"[1,{}]", "false"},
		{"[1,2,3,4,5]", "[1 2 3 4] true"}, {"[" + strings.Repeat("7,", 1<<20) + "7]", "[7 7 7 7] true"}, {"[1,2,3,4,-5]", "false"},
	} {
		s, bad := scan([]byte(`{"prompt":` + tt.prompt + `}`))
		if bad != nil {
			t.Fatal(bad)
		}
		ids, ok := s.appendIDs(nil, []byte(`{"prompt":`+tt.prompt+`}`), 4)
		got := fmt.Sprint(ids, ok)
		if !ok {
			got = "false"
		}
		if got != tt.want {
			t.Errorf("appendIDs of %.40s = %s, want %s", tt.prompt, got, tt.want)
		}
	}
}
