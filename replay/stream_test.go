package replay_test

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"spillway/replay"
)

func TestStream(t *testing.T) {
	for _, tt := range []struct {
		name   string
		pieces []string
		want   replay.Stream
	}{
		{"role only", []string{`data: {"choices":[{"delta":{"role":"assistant","content":""}}]}` + "\n\n"}, replay.Stream{}},
		{"chat", []string{`data: {"choices":[{"delta":{"content":"a"}}]}` + "\n\n"}, replay.Stream{Contents: 1}},
		{"completions", []string{`data: {"choices":[{"text":"a"}]}` + "\n\n"}, replay.Stream{Contents: 1}},
		{"space after colon", []string{`data: {"choices": [{"delta": {"content": "a"}}]}` + "\n"}, replay.Stream{Contents: 1}},
		{"reasoning", []string{`data: {"choices":[{"delta":{"content":null,"reasoning_content":"a"}}]}` + "\n"}, replay.Stream{Contents: 1}},
		{"null content", []string{`data: {"choices":[{"delta":{"content":null}}]}` + "\n"}, replay.Stream{}},
		{"text that looks like JSON", []string{`data: {"choices":[{"delta":{"role":"\"content\":\"x\"","content":""}}]}` + "\n"}, replay.Stream{}},
		{"comment", []string{": content\":\"x\n\n"}, replay.Stream{}},
		{"two in one piece", []string{chunk + chunk}, replay.Stream{Contents: 2, Gaps: []time.Duration{0}}},
		{"split", []string{chunk[:20], chunk[20:] + chunk[:5], chunk[5:]},
			replay.Stream{Contents: 2, Gaps: []time.Duration{time.Millisecond}}},
		{"CRLF", []string{"data: [DONE]\r\n\r\n"}, replay.Stream{Done: true}},
		{"no space", []string{"data:[DONE]\n"}, replay.Stream{Done: true}},
		{"after done", []string{"data: [DONE]\n" + chunk}, replay.Stream{Done: true}},
		{"error", []string{`data: {"error":{"code":500}}` + "\n"}, replay.Stream{Failed: true}},
		{"older error", []string{`data: {"object":"error","code":500}` + "\n"}, replay.Stream{Failed: true}},
		{"named error", []string{"event: error\n"}, replay.Stream{Failed: true}},
		{"other event", []string{"event: errors\n"}, replay.Stream{}},
		{"usage", []string{`data: {"usage":{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}` + "\n"},
			replay.Stream{HasUsage: true, Prompt: 9, Output: 3, Cached: 4}},
		{"usage null", []string{`data: {"choices":[{"delta":{"content":"a"}}],"usage":null}` + "\n"}, replay.Stream{Contents: 1}},
		{"no details", []string{`data: {"usage":{"prompt_tokens":9,"prompt_tokens_details":null}}` + "\n"}, replay.Stream{HasUsage: true, Prompt: 9}},
		{"endless line", []string{strings.Repeat("x", 2<<20), "\ndata: [DONE]\n"}, replay.Stream{Malformed: true}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := replay.FeedStream(tt.pieces...); !reflect.DeepEqual(got, tt.want) {
				t.Errorf("FeedStream = %+v, want %+v", got, tt.want)
			}
		})
	}
}

// However a stream is cut into pieces, it means the same.
func FuzzStream(f *testing.F) {
	f.Add(chunk+chunk+"data: [DONE]\n\n", uint(30))
	f.Add("event: error\r\ndata: {\"usage\":{\"prompt_tokens\":1}}\r\n\r\n", uint(1))
	f.Fuzz(func(t *testing.T, text string, at uint) {
		n := int(at % uint(len(text)+1))
		whole, cut := replay.FeedStream(text), replay.FeedStream(text[:n], text[n:])
		whole.Gaps, cut.Gaps = nil, nil // the pieces arrive at other times
		if !reflect.DeepEqual(whole, cut) {
			t.Errorf("%q whole is %+v, cut at %d %+v", text, whole, n, cut)
		}
	})
}

func BenchmarkStream(b *testing.B) {
	piece := `data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"sim-model",` +
		`"choices":[{"index":0,"delta":{"content":"word"},"logprobs":null,"finish_reason":null}]}` + "\n\n"
	pieces := make([]string, 1000)
	for i := range pieces {
		pieces[i] = piece
	}
	b.ReportAllocs()
	for b.Loop() {
		replay.FeedStream(pieces...)
	}
}
