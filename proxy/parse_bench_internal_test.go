package proxy

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

// chatBody is a chat request of about size bytes: some turns, a tool, and sampling parameters.
func chatBody(size int, text string) []byte {
	var b strings.Builder
	b.WriteString(`{"model":"Qwen/Qwen3-0.6B","temperature":0.7,"max_tokens":256,"stream":true,"stream_options":{"include_usage":true},"messages":[`)
	b.WriteString(`{"role":"system","content":"You are a helpful assistant."}`)
	const turns = 8
	for i := range turns {
		fmt.Fprintf(&b, `,{"role":%q,"content":"`, [...]string{"user", "assistant"}[i%2])
		for n := 0; n < (size-b.Len()-400)/(turns-i); n += len(text) {
			b.WriteString(text)
		}
		b.WriteString(`"}`)
	}
	b.WriteString(`],"tools":[{"type":"function","function":{"name":"weather","description":"Tells the weather.","parameters":` +
		`{"type":"object","properties":{"city":{"type":"string"},"unit":{"type":"string","enum":["c","f"]}},"required":["city"]}}}]}`)
	return []byte(b.String())
}

func BenchmarkScan(b *testing.B) {
	plain := "The quick brown fox jumps over the lazy dog and wonders why. "
	for _, bb := range []struct {
		name string
		body []byte
	}{
		{"size=1k", chatBody(1<<10, plain)},
		{"size=32k", chatBody(32<<10, plain)},
		{"size=32k/text=escapes", chatBody(32<<10, `func f() {\n\tprint(\"hi \u00e9\")\n}\n`)},
		{"size=32k/text=wide", chatBody(32<<10, "Über die Brücke läuft 狐狸。")},
	} {
		b.Run(bb.name, func(b *testing.B) {
			b.SetBytes(int64(len(bb.body)))
			b.ReportAllocs()
			for b.Loop() {
				s, err := scan(bb.body)
				if err != nil || s.promptTokens() == 0 {
					b.Fatal(err)
				}
			}
		})
		b.Run(bb.name+"/skim", func(b *testing.B) { // of requests that are refused
			b.SetBytes(int64(len(bb.body)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := skim(bb.body); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(bb.name+"/by=encoding-json", func(b *testing.B) { // what scan is measured against
			b.SetBytes(int64(len(bb.body)))
			b.ReportAllocs()
			for b.Loop() {
				var fields map[string]json.RawMessage
				if err := json.Unmarshal(bb.body, &fields); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

const benchEvent = `data: {"id":"chatcmpl-8f14e45fceea167a5a36dedd4bea2543","object":"chat.completion.chunk","created":1754000000,` +
	`"model":"Qwen/Qwen3-0.6B","choices":[{"index":0,"delta":{"content":" world"},"logprobs":null,"finish_reason":null}],"usage":null}` + "\n\n"

func BenchmarkEvent(b *testing.B) {
	event := []byte(benchEvent)
	var split splitter
	var scratch []byte
	b.SetBytes(int64(len(event)))
	b.ReportAllocs()
	for b.Loop() {
		if n := split.next(event); n != len(event) {
			b.Fatalf("next() = %d, want %d", n, len(event))
		}
		payload, grown, _ := data(event, scratch)
		scratch = grown
		if ch := readChunk(payload); ch.tokens != 1 {
			b.Fatalf("readChunk() = %+v", ch)
		}
	}
}
