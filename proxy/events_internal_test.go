package proxy

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// slowEvents splits a stream line by line. An event ends at an empty line; the payload is that of
// its data lines.
func slowEvents(stream []byte) (events [][]byte, payloads []string) {
	var event []byte
	for len(stream) > 0 {
		line, end := stream, 0
		for i, ch := range stream {
			if ch == '\n' || ch == '\r' {
				line, end = stream[:i], 1
				if ch == '\r' && i+1 < len(stream) && stream[i+1] == '\n' {
					end = 2
				}
				break
			}
		}
		if end == 0 {
			break // not a whole line
		}
		event = append(event, stream[:len(line)+end]...)
		stream = stream[len(line)+end:]
		if len(line) == 0 {
			events = append(events, event)
			payloads = append(payloads, slowPayload(event))
			event = nil
		}
	}
	return events, payloads
}

func slowPayload(event []byte) string {
	var lines []string
	for line := range strings.SplitSeq(strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(string(event)), "\n") {
		if value, ok := strings.CutPrefix(line, "data:"); ok {
			lines = append(lines, strings.TrimPrefix(value, " "))
		}
	}
	if lines == nil {
		return "none"
	}
	return "data " + strings.Join(lines, "\n")
}

// split feeds a stream in reads that end at the given places.
func split(stream []byte, cuts []int) (events [][]byte, payloads []string) {
	var s splitter
	var event, scratch []byte
	from := 0
	for _, to := range append(cuts, len(stream)) {
		part := stream[from:to]
		from = to
		for {
			n := s.next(part)
			if n < 0 {
				event = append(event, part...)
				break
			}
			event = append(event, part[:n]...)
			part = part[n:]
			payload, grown, ok := data(event, scratch)
			scratch = grown
			told := "none"
			if ok {
				told = "data " + string(payload)
			}
			events, payloads = append(events, event), append(payloads, told)
			event = nil
		}
	}
	return events, payloads
}

// settle gives an LF back to the event that its CR ended. A read may end between the two: the
// event is relayed at once then, and the LF comes with the next one.
func settle(events [][]byte) {
	for i := 1; i < len(events); i++ {
		if events[i][0] == '\n' && bytes.HasSuffix(events[i-1], []byte("\r")) {
			events[i-1] = append(events[i-1], '\n')
			events[i] = events[i][1:]
		}
	}
}

// FuzzSplitter cuts a stream into reads of any lengths: the events must be those of the whole.
func FuzzSplitter(f *testing.F) {
	for _, s := range []string{
		"data: a\n\ndata: b\n\n", "data: a\r\n\r\ndata: b\r\n\r\n", "data: a\r\rdata: b\r\r", ":\n\n\ndata:\ndata: x\ndata:  y\n\nrest",
		"data: a\n\r\ndata\r\n\ndata: b\n\r", "\r\n\n\r\r\n\r", "event: x\ndata: {}\nid: 1\nretry: 5\n\n", strings.Repeat("long ", 200) + "\r\n\ndata: z\n\n",
	} {
		f.Add([]byte(s), uint64(1))
	}
	f.Fuzz(func(t *testing.T, stream []byte, seed uint64) {
		var cuts []int
		for rng, at := rand.New(rand.NewPCG(seed, 0)), 0; ; {
			if at += rng.IntN(1 + 1<<rng.IntN(8)); at > len(stream) {
				break
			}
			cuts = append(cuts, at)
		}
		wantEvents, wantPayloads := slowEvents(stream)
		for _, at := range [][]int{nil, cuts, everywhere(len(stream))} {
			events, payloads := split(stream, at)
			if !slices.Equal(payloads, wantPayloads) {
				t.Fatalf("payloads of %q cut at %v = %q, want %q", stream, at, payloads, wantPayloads)
			}
			settle(events)
			if len(events) > 0 && at != nil { // the LF of the last event may be left over
				last := &events[len(events)-1]
				if whole := bytes.TrimSuffix(wantEvents[len(wantEvents)-1], []byte("\n")); bytes.HasSuffix(*last, []byte("\r")) && bytes.Equal(*last, whole) {
					*last = append(*last, wantEvents[len(wantEvents)-1][len(whole):]...)
				}
			}
			if !slices.EqualFunc(events, wantEvents, bytes.Equal) {
				t.Fatalf("events of %q cut at %v = %q, want %q", stream, at, events, wantEvents)
			}
		}
	})
}

func everywhere(n int) (cuts []int) {
	for i := range n {
		cuts = append(cuts, i)
	}
	return cuts
}

func TestSplitterCountsTheUnfinishedEvent(t *testing.T) {
	var s splitter
	part := bytes.Repeat([]byte("x"), 1<<20)
	for i := range 17 {
		if s.next(part) >= 0 {
			t.Fatal("an end where there is none")
		}
		if want := (i + 1) << 20; s.event != want {
			t.Fatalf("after %d MiB: %d bytes counted", i+1, s.event)
		}
		if over := s.event > maxEvent; over != (i == 16) {
			t.Errorf("after %d MiB: over the bound: %v", i+1, over)
		}
	}
	if n := s.next([]byte("\n\nnext")); n != 2 || s.event != 0 {
		t.Errorf("next() = %d with %d bytes counted, want 2 with 0", n, s.event)
	}
}

func TestIndexEOL(t *testing.T) {
	for _, n := range []int{0, 1, 255, 256, 257, 767, 768, 769, 5000} {
		line := strings.Repeat("x", n)
		for _, tt := range []struct {
			b    string
			want int
		}{
			{line, -1}, {line + "\n", n}, {line + "\r", n}, {line + "\r\n", n}, {line + "\n\r", n}, {line + "\r" + line + "\n", n}, {line + "\n" + line + "\r", n},
		} {
			if got := indexEOL([]byte(tt.b)); got != tt.want {
				t.Errorf("indexEOL(%d bytes, then %q) = %d, want %d", n, tt.b[n:min(n+2, len(tt.b))], got, tt.want)
			}
		}
	}
}

func TestData(t *testing.T) {
	for _, tt := range []struct {
		event, want string
		found       bool
	}{
		{"data: x\n\n", "x", true},
		{"data:x\n\n", "x", true},
		{"data:  x\n\n", " x", true}, // one space belongs to the field
		{"data:\n\n", "", true},
		{"data: a\ndata: b\n\n", "a\nb", true},
		{"data:\ndata:\ndata:c\n\n", "\n\nc", true},
		{"data: a\r\nevent: e\r\ndata: b\r\n\r\n", "a\nb", true},
		{"data: a\rdata: b\r\r", "a\nb", true},
		{"\ndata: a\n\n", "a", true}, // the LF of a CR in the last read
		{": comment\n\n", "", false},
		{"event: ping\n\n", "", false},
		{"database: x\n\n", "", false},
		{" data: x\n\n", "", false},
		{"\n", "", false},
	} {
		got, _, found := data([]byte(tt.event), []byte("left over")[:0])
		if string(got) != tt.want || found != tt.found {
			t.Errorf("data(%q) = %q, %v; want %q, %v", tt.event, got, found, tt.want, tt.found)
		}
	}
}

func TestReadChunk(t *testing.T) {
	bit0 := [4]uint64{1}
	for _, tt := range []struct {
		name, payload string
		want          chunk
	}{
		{"end", `[DONE]`, chunk{choices: -1, done: true}},
		{"role only", `{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}`, chunk{choices: 1, index: bit0}},
		{"null content", `{"choices":[{"delta":{"content":null,"tool_calls":null}}]}`, chunk{choices: 1, index: bit0}},
		{"content", `{"choices":[{"index":0,"delta":{"content":"x"}}]}`, chunk{choices: 1, tokens: 1, index: bit0}},
		{"escaped content", `{"choices":[{"index":0,"delta":{"content":"\n"}}]}`, chunk{choices: 1, tokens: 1, index: bit0}},
		{"reasoning", `{"choices":[{"index":0,"delta":{"reasoning":"x"}}]}`, chunk{choices: 1, tokens: 1, index: bit0}},
		{"reasoning_content", `{"choices":[{"index":0,"delta":{"reasoning_content":"x","content":null}}]}`, chunk{choices: 1, tokens: 1, index: bit0}},
		{"tool_calls", `{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":""}}]}}]}`, chunk{choices: 1, tokens: 1, index: bit0}},
		{"no tool_calls", `{"choices":[{"index":0,"delta":{"tool_calls":[]}}]}`, chunk{choices: 1, index: bit0}},
		{"text", `{"choices":[{"index":0,"text":"x","finish_reason":null}]}`, chunk{choices: 1, tokens: 1, index: bit0}},
		{"empty text", `{"choices":[{"index":0,"text":""}]}`, chunk{choices: 1, index: bit0}},
		{"content elsewhere", `{"content":"x","delta":{"content":"x"},"choices":[{"content":"x","logprobs":{"content":[{"token":"x"}]}}]}`, chunk{choices: 1, index: bit0}},
		{"all fields of one choice are one token", `{"choices":[{"delta":{"content":"x","reasoning":"y"},"text":"z"}]}`, chunk{choices: 1, tokens: 1, index: bit0}},
		{
			"several choices", `{"choices":[{"index":3,"delta":{"content":"x"}},{"index":65,"delta":{"content":"y"},"finish_reason":"stop"},{"index":127,"delta":{}}]}`,
			chunk{choices: 3, tokens: 2, finish: 1, index: [4]uint64{1 << 3, 1<<1 | 1<<63}, ended: [4]uint64{0, 1 << 1}},
		},
		{"an index out of bounds", `{"choices":[{"index":256,"text":"x","finish_reason":"stop"},{"index":99999999999999999999}]}`, chunk{choices: 2, tokens: 1, finish: 1}},
		{"the last index", `{"choices":[{"index":255,"text":""}]}`, chunk{choices: 1, index: [4]uint64{3: 1 << 63}}},
		{"finish", `{"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}`, chunk{choices: 1, finish: 1, index: bit0, ended: bit0}},
		{"usage only", `{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5,"total_tokens":12,"prompt_tokens_details":{"cached_tokens":4}}}`,
			chunk{usage: usage{known: true, prompt: 7, cachedKnown: true, cached: 4, completion: 5}}},
		{"usage with choices", `{"choices":[{"delta":{"content":"x"}}],"usage":{"completion_tokens":3,"prompt_tokens_details":null}}`,
			chunk{choices: 1, tokens: 1, index: bit0, usage: usage{known: true, completion: 3}}},
		{"no usage", `{"choices":[],"usage":null}`, chunk{}},
		{"usage that is none", `{"usage":{"completion_tokens":-1,"prompt_tokens":1.5}}`, chunk{choices: -1, usage: usage{known: true}}},
		{"error", `{"error":{"message":"m","type":"t","code":429}}`, chunk{choices: -1, failed: true, code: 429}},
		{"error without a number", `{"error":{"message":"m","code":"rate_limit"}}`, chunk{choices: -1, failed: true}},
		{"error as text", `{"error":"broken"}`, chunk{choices: -1, failed: true}},
		{"no error", `{"error":null,"choices":[]}`, chunk{}},
		{"no error in a text", `{"error":"","choices":[]}`, chunk{}},
		{"escaped keys", `{"ch\u006fices":[{"d\u0065lta":{"\u0063ontent":"x"}}]}`, chunk{choices: 1, tokens: 1, index: bit0}},
		{"a choice that is none", `{"choices":[null,1,{"text":"x"}]}`, chunk{choices: 3, tokens: 1, index: bit0}},
		{"choices that are none", `{"choices":{"delta":{"content":"x"}}}`, chunk{choices: -1}},
		{"cut short", `{"choices":[{"index":0,"delta":{"content":"x"`, chunk{choices: 1, tokens: 1, index: bit0}},
		{"no JSON", `hello`, chunk{choices: -1}},
		{"nothing", ``, chunk{choices: -1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := readChunk([]byte(tt.payload)); got != tt.want {
				t.Errorf("readChunk(%s)\n got %+v\nwant %+v", tt.payload, got, tt.want)
			}
		})
	}
}

func TestEventAllocatesNothing(t *testing.T) {
	event := []byte(benchEvent)
	var s splitter
	if n := testing.AllocsPerRun(20, func() {
		payload, _, _ := data(event[:s.next(event)], nil)
		if ch := readChunk(payload); ch.tokens != 1 {
			t.Fatal(fmt.Sprint(ch))
		}
	}); n > 0 {
		t.Errorf("one event allocates %v times", n)
	}
}

// FuzzReadChunk shows that no payload makes it fail or count more choices than there are bytes.
func FuzzReadChunk(f *testing.F) {
	f.Add([]byte(benchEvent[len("data: "):]))
	f.Add([]byte(`{"choices":[{"index":1,"text":"a","finish_reason":"stop"},{}],"usage":{"prompt_tokens_details":{"cached_tokens":1}},"error":{"code":5}}`))
	f.Fuzz(func(t *testing.T, payload []byte) {
		ch := readChunk(payload)
		if ch.tokens > max(ch.choices, 0) || ch.finish > max(ch.choices, 0) || ch.choices > len(payload) {
			t.Errorf("readChunk(%q) = %+v", payload, ch)
		}
		for i := range ch.ended {
			if ch.ended[i]&^ch.index[i] != 0 {
				t.Errorf("readChunk(%q): ended but not seen: %+v", payload, ch)
			}
		}
	})
}
