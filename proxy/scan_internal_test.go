package proxy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"
)

// bodies that fuzzing starts from; together they reach every branch of scan and of the edits.
var scanSeeds = []string{
	`{}`, ` {"model" : "m" , "messages":[{"role":"user","content":"hi"}]} `, `[1,2]`, `"x"`, `12`, `nul`, ``, `{`, `{"a":}`, `{"a":1,}`,
	`{"model":"a","model":"b\u00e9\n\ud83d\ude00\ud800"}`, `{"mod\u0065l":"\u006d","model":null}`, `{"m\"odel":1}`,
	`{"stream":true,"stream_options":{"include_usage":false,"x":[1,{"y":"z"}],"include_usage" : null }}`,
	`{"stream":true,"stream_options":{ },"nvext":{"a":[1]},"n":3,"nvext":null}`, `{"nvext":1 , "stream":true,"stream_options":null}`,
	`{"prompt":["a","b\\"],"input":[[1,2],[3]],"n":1e5}`, `{"prompt":[1,2,-0.5E+3]}`, `{"n":01}`, `{"n":-}`, `{"n":1.}`, `{"n":1e}`,
	`{"messages":[{"type":"x","content":[{"type":"text","text":"é"},{"type":"image_url","image_url":{"url":"data:"}},{"file":null}]}]}`,
	`{"tools":[{"type":"function"}],"tools":[],"functions":[1]}`, "{\"a\":\"\x01\"}", "{\"a\":\"\xff\"}", `{"a":"\x"}`, `{"a":"\u12g4"}`, "{\"a\":\"\xff\\n and then nothing but ASCII\"}", `{"model":"\ud800\udfff\udbff\udc00\ud800\ue000\u07ff\u0800"}`, `{"a":"\`,
	"{\"a\":\"0123456789abcdef0123456789abcdef\u00e9 and so on and so on\\\"\"}", "{\"a\":tru}", "{\"a\":true}\x00", `{"a" 1}`, `{"a":1 "b":2}`, `{"a":[1 2]}`,
	`{"a":` + strings.Repeat("[", 511) + strings.Repeat("]", 511) + `}`, `{"a":` + strings.Repeat("[", 512) + strings.Repeat("]", 512) + `}`,
	`{"messages":` + strings.Repeat("[", 511) + `"x"` + strings.Repeat("]", 511) + `}`, `{"messages":` + strings.Repeat("[", 512) + strings.Repeat("]", 512) + `}`,
}

// FuzzScan compares scan with encoding/json, which decodes all that scan only looks at.
func FuzzScan(f *testing.F) {
	for _, s := range scanSeeds {
		f.Add([]byte(s))
	}
	f.Add(chatBody(700, `a\nb`))
	f.Fuzz(func(t *testing.T, body []byte) {
		var want map[string]json.RawMessage
		valid := utf8.Valid(body) && json.Valid(body) && nesting(body) <= maxDepth
		isObject := valid && json.Unmarshal(body, &want) == nil && want != nil
		got, err := scan(body)
		if (err == nil) != isObject {
			t.Fatalf("scan(%q): error %v, want one: %v", body, err, !isObject)
		}
		if notObject := err != nil && strings.Contains(err.Message, "must be a JSON object"); notObject != (valid && !isObject) {
			t.Fatalf("scan(%q): %v, but valid: %v", body, err, valid)
		}
		if err != nil {
			return
		}
		checkKinds(t, body, &got, want)
		checkTallies(t, body, &got, want)
		checkEdits(t, body, &got)
		skimmed, err := skim(body)
		if err != nil {
			t.Fatalf("skim(%q): %v, but scan finds nothing wrong", body, err)
		}
		for _, s := range []*scanned{&got, &skimmed} { // skim need not know how long a text is
			for _, t := range []*tally{&s.chat, &s.prompts, &s.inputs, &s.system} {
				t.bytes = min(t.bytes, 1)
			}
		}
		if !reflect.DeepEqual(skimmed, got) {
			t.Errorf("skim(%q): %+v, want %+v", body, skimmed, got)
		}
	})
}

// nesting is how deep arrays and objects lie in each other, in text that is valid JSON.
func nesting(body []byte) (deepest int) {
	depth, quoted := 0, false
	for i := 0; i < len(body); i++ {
		switch ch := body[i]; {
		case quoted && ch == '\\':
			i++
		case ch == '"':
			quoted = !quoted
		case quoted:
		case ch == '{' || ch == '[':
			depth++
			deepest = max(deepest, depth)
		case ch == '}' || ch == ']':
			depth--
		}
	}
	return deepest
}

func checkKinds(t *testing.T, body []byte, got *scanned, want map[string]json.RawMessage) {
	t.Helper()
	for key, k := range map[string]kind{
		"model": got.modelKind, "stream": got.stream, "stream_options": got.streamOptions, "n": got.n, "messages": got.messages,
		"prompt": got.prompt, "prompt_embeds": got.promptEmbeds, "input": got.input, "nvext": got.nvext,
	} {
		wanted := absent
		if raw := want[key]; raw != nil {
			wanted = kindOf(raw[0])
		}
		if k != wanted {
			t.Errorf("scan(%q): %s is %q, want %q", body, key, k, wanted)
		}
	}
	if got.n == numeric && string(got.nText) != string(want["n"]) {
		t.Errorf("scan(%q): n is %q, want %q", body, got.nText, want["n"])
	}
	if got.modelKind == str {
		var model string
		if err := json.Unmarshal(want["model"], &model); err != nil {
			t.Fatal(err)
		}
		if s := got.model.string(); s != model || got.model.size() != len(model) {
			t.Errorf("scan(%q): model is %q of %d bytes, want %q of %d", body, s, got.model.size(), model, len(model))
		}
		if at := got.modelSpan; string(body[at.from:at.to]) != string(want["model"]) {
			t.Errorf("scan(%q): model lies at %q, want %q", body, body[at.from:at.to], want["model"])
		}
	}
	var options map[string]json.RawMessage
	if json.Unmarshal(want["stream_options"], &options) == nil && got.includeUsage != (string(options["include_usage"]) == "true") {
		t.Errorf("scan(%q): includeUsage is %v", body, got.includeUsage)
	}
	if body[got.end] != '}' || len(bytes.TrimSpace(body[got.end+1:])) > 0 {
		t.Errorf("scan(%q): the body ends at %d", body, got.end)
	}
}

// checkTallies counts the text by decoding it.
func checkTallies(t *testing.T, body []byte, got *scanned, want map[string]json.RawMessage) {
	t.Helper()
	var chat tally
	if raw := want["messages"]; raw != nil && raw[0] == '[' {
		var messages []json.RawMessage
		if err := json.Unmarshal(raw, &messages); err != nil {
			t.Fatal(err)
		}
		chat.messages = len(messages)
		slowText(t, json.NewDecoder(bytes.NewReader(raw)), &chat)
	}
	if got.chat != chat {
		t.Errorf("scan(%q): messages are %+v, want %+v", body, got.chat, chat)
	}
	for key, have := range map[string]tally{"prompt": got.prompts, "input": got.inputs} {
		var wanted tally
		slowPrompt(want[key], 1, &wanted)
		if have != wanted {
			t.Errorf("scan(%q): %s is %+v, want %+v", body, key, have, wanted)
		}
	}
}

func slowText(t *testing.T, dec *json.Decoder, to *tally) {
	next := func() json.Token {
		tok, err := dec.Token()
		if err != nil {
			t.Fatal(err)
		}
		return tok
	}
	switch tok := next().(type) {
	case string:
		to.bytes += len(tok)
	case json.Delim:
		for dec.More() {
			if tok == '[' {
				slowText(t, dec, to)
				continue
			}
			var skipped any
			switch next() {
			case "type":
				if err := dec.Decode(&skipped); err != nil {
					skipped = nil // numbers beyond float64 are legal and of no interest
				}
			case "image_url", "input_audio", "audio_url", "video_url", "file", "image_embeds", "audio_embeds":
				var medium json.RawMessage
				if err := dec.Decode(&medium); err != nil {
					t.Fatal(err)
				}
				if string(medium) != "null" {
					to.media++
				}
			default:
				slowText(t, dec, to)
			}
		}
		next() // the closing one
	}
}

func slowPrompt(raw json.RawMessage, depth int, to *tally) {
	var s string
	var list []json.RawMessage
	switch {
	case len(raw) == 0:
	case raw[0] == '"' && json.Unmarshal(raw, &s) == nil:
		to.bytes += len(s)
		if s != "" {
			to.items++
		}
	case kindOf(raw[0]) == numeric:
		to.ids++
	case raw[0] == '[' && depth <= 2 && json.Unmarshal(raw, &list) == nil:
		if depth == 2 {
			to.lists++
		}
		for _, e := range list {
			slowPrompt(e, depth+1, to)
		}
	}
}

// judged scans and checks a body as the route does, and returns the message of the refusal.
func judged(ep int, body string) (*scanned, string) {
	s, bad := scan([]byte(body))
	if bad == nil {
		bad = s.check(&endpoints[ep])
	}
	if bad == nil {
		return &s, ""
	}
	return &s, fmt.Sprintf("%d %s", bad.Status, bad.Message)
}

const (
	chatRoute = iota
	completionsRoute
	embeddingsRoute
)

func TestMinimalValidation(t *testing.T) {
	const v = "400 Validation: "
	const streamBool, nRange = v + "stream must be a boolean", v + "n must be an integer from 1 to 128"
	const wantMessages = v + "messages must be an array with at least one message"
	const onlyStream = v + "stream_options is only allowed when stream is true"
	for _, tt := range []struct {
		ep         int
		body, want string
	}{
		{chatRoute, ``, v + "the request body is not valid JSON (near byte 0)"},
		{chatRoute, `{"messages":[`, v + "the request body is not valid JSON (near byte 13)"},
		{chatRoute, `{"a":1}x`, v + "the request body is not valid JSON (near byte 7)"},
		{chatRoute, `[] []`, v + "the request body is not valid JSON (near byte 3)"},
		{chatRoute, `[]`, v + "the request body must be a JSON object"},
		{chatRoute, `null`, v + "the request body must be a JSON object"},
		{chatRoute, `"{}"`, v + "the request body must be a JSON object"},
		{chatRoute, "{\"messages\":[\"a\xff\"]}", v + "the request body is not valid JSON (near byte 14)"},
		{chatRoute, "{\"messages\":[\"a\nb\"]}", v + "the request body is not valid JSON (near byte 15)"},
		{chatRoute, strings.Repeat("[", 600), v + "the request body is nested deeper than 512 levels (near byte 512)"},
		{chatRoute, `{"messages":` + strings.Repeat("[", 600), v + "the request body is nested deeper than 512 levels (near byte 523)"},

		{chatRoute, `{"model":"m","messages":[1]}`, ""},
		{chatRoute, `{"messages":[1]}`, ""}, // which model it is, the catalog decides
		{chatRoute, `{"model":null,"messages":[1]}`, ""},
		{chatRoute, `{"model":"","messages":[1]}`, v + "model must not be empty"},
		{chatRoute, `{"model":5,"messages":[1]}`, v + "model must be a string"},
		{chatRoute, `{"model":["m"],"messages":[1]}`, v + "model must be a string"},
		{chatRoute, `{"model":"m","model":7,"messages":[1]}`, v + "model must be a string"},
		{embeddingsRoute, `{"model":false,"input":"x"}`, v + "model must be a string"},

		{chatRoute, `{"model":"m"}`, v + "messages is required"},
		{chatRoute, `{"messages":null}`, v + "messages is required"},
		{chatRoute, `{"messages":[]}`, wantMessages},
		{chatRoute, `{"messages":{}}`, wantMessages},
		{chatRoute, `{"messages":"hi"}`, wantMessages},
		{chatRoute, `{"messages":[1],"messages":[]}`, wantMessages}, // the last one counts
		{chatRoute, `{"m\u0065ssages":[{}]}`, ""},

		{completionsRoute, `{"model":"m"}`, v + "prompt is required"},
		{completionsRoute, `{"prompt":null}`, v + "prompt is required"},
		{completionsRoute, `{"prompt":""}`, v + "prompt must not be empty"},
		{completionsRoute, `{"prompt":[]}`, v + "prompt must not be empty"},
		{completionsRoute, `{"prompt":[[]]}`, v + "prompt must not be empty"},
		{completionsRoute, `{"prompt":true}`, v + "prompt must be a string, an array of strings, or an array of token IDs"},
		{completionsRoute, `{"prompt":"x"}`, ""},
		{completionsRoute, `{"prompt":["x","y"]}`, ""},
		{completionsRoute, `{"prompt":[1,2]}`, ""},
		{completionsRoute, `{"prompt":[[1],[2]]}`, ""},
		{completionsRoute, `{"prompt":"x","input":""}`, ""}, // a key of another route
		{completionsRoute, `{"prompt_embeds":"AAAA"}`, ""},
		{completionsRoute, `{"prompt_embeds":null}`, v + "prompt is required"},

		{embeddingsRoute, `{"model":"m"}`, v + "input is required"},
		{embeddingsRoute, `{"input":null}`, v + "input is required"},
		{embeddingsRoute, `{"input":""}`, ""},
		{embeddingsRoute, `{"input":[1],"stream":1,"stream_options":1}`, ""}, // not keys of this route

		{chatRoute, `{"messages":[1],"stream":null}`, ""},
		{chatRoute, `{"messages":[1],"stream":false}`, ""},
		{chatRoute, `{"messages":[1],"stream":"true"}`, streamBool},
		{chatRoute, `{"messages":[1],"stream":1}`, streamBool},
		{completionsRoute, `{"prompt":"x","stream":[]}`, streamBool},
		{chatRoute, `{"messages":[1],"stream_options":{}}`, onlyStream},
		{chatRoute, `{"messages":[1],"stream":false,"stream_options":{}}`, onlyStream},
		{completionsRoute, `{"prompt":"x","stream_options":{}}`, onlyStream},
		{chatRoute, `{"messages":[1],"stream_options":null}`, ""},
		{chatRoute, `{"messages":[1],"stream":true,"stream_options":{}}`, ""},
		{chatRoute, `{"messages":[1],"stream":true,"stream_options":[]}`, v + "stream_options must be an object"},

		{chatRoute, `{"messages":[1],"n":0}`, nRange},
		{chatRoute, `{"messages":[1],"n":1}`, ""},
		{chatRoute, `{"messages":[1],"n":128}`, ""},
		{chatRoute, `{"messages":[1],"n":129}`, nRange},
		{chatRoute, `{"messages":[1],"n":-1}`, nRange},
		{chatRoute, `{"messages":[1],"n":1.5}`, nRange},
		{chatRoute, `{"messages":[1],"n":"1"}`, nRange},
		{chatRoute, `{"messages":[1],"n":5,"n":true}`, nRange},
		{chatRoute, `{"messages":[1],"n":99999999999999999999}`, nRange},
		{chatRoute, `{"messages":[1],"n":null}`, ""},
		{embeddingsRoute, `{"input":"x","n":0}`, nRange},
	} {
		if _, got := judged(tt.ep, tt.body); got != tt.want {
			t.Errorf("%s of %.80q\n got %q\nwant %q", endpoints[tt.ep].label, tt.body, got, tt.want)
		}
	}
}

func TestPromptTokens(t *testing.T) {
	for _, tt := range []struct {
		name  string
		ep    int
		body  string
		want  uint64
		exact bool
	}{
		{"one message", chatRoute, `{"messages":[{"role":"user","content":"12345678"}]}`, 3 + 4 + 3, false}, // 4+8 bytes
		{"two messages", chatRoute, `{"messages":[{"role":"user","content":"1234"},{"role":"user","content":"1234"}]}`, 4 + 8 + 3, false},
		{"rounded up", chatRoute, `{"messages":[{"role":"user","content":"1"}]}`, 2 + 4 + 3, false},
		{"decoded length", chatRoute, `{"messages":[{"role":"user","content":"\u00e9\n\ud83d\ude00é"}]}`, 4 + 4 + 3, false}, // 4+2+1+4+2 bytes
		{"parts", chatRoute, `{"messages":[{"role":"user","content":[{"type":"text","text":"1234"},{"type":"text","text":"5678"}]}]}`, 3 + 4 + 3, false},
		{
			"media", chatRoute, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}},` +
				`{"type":"input_audio","input_audio":{"data":"AAAA"}},{"type":"file","file":{"file_id":"f"}},{"type":"image_url","image_url":"http://i"},{"image_url":null}]}]}`,
			1 + 4*225 + 4 + 3, false,
		},
		{"arguments of tool calls", chatRoute, `{"messages":[{"role":"assistant","content":null,"tool_calls":[{"type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]}]}`, 5 + 4 + 3, false}, // 9+1+7 bytes
		{"tools", chatRoute, `{"messages":[{"role":"user"}],"tools":[{"type":"function"}]}`, 7 + 4 + 3, false},                                                                                            // 4+23 bytes, as written
		{"functions", chatRoute, `{"messages":[{"role":"user"}],"functions":[{"name":"functions"}]}`, 7 + 4 + 3, false},
		{"no tools", chatRoute, `{"messages":[{"role":"user"}],"tools":[ ],"functions":null}`, 1 + 4 + 3, false},
		{"tools given twice", chatRoute, `{"messages":[{"role":"user"}],"tools":[1234567],"tools":null}`, 1 + 4 + 3, false},
		{"messages given twice", chatRoute, `{"messages":[{"role":"user"},{"role":"user"}],"messages":[{"role":"user"}]}`, 1 + 4 + 3, false},
		{"keys of other routes do not count", chatRoute, `{"messages":[{"role":"user"}],"prompt":[1,2,3,4],"input":"12345678"}`, 1 + 4 + 3, false},
		{"nothing but a message", chatRoute, `{"messages":[{}]}`, 7, false},

		{"a prompt", completionsRoute, `{"prompt":"123456789"}`, 3, false},
		{"prompts", completionsRoute, `{"prompt":["1234","5678"]}`, 2, false},
		{"token IDs", completionsRoute, `{"prompt":[11,22,33]}`, 3, true},
		{"prompts of token IDs", completionsRoute, `{"prompt":[[11,22],[33]]}`, 3, true},
		{"token IDs and text", completionsRoute, `{"prompt":[11,"1234"]}`, 2, false},
		{"keys of other routes do not hide it", completionsRoute, `{"prompt":[1,2,3,4,5],"input":"x","messages":[{"role":"user"}],"tools":[1234567]}`, 5, true},
		{"embeddings of a prompt", completionsRoute, `{"prompt_embeds":"AAAAAAAA"}`, 1, false},
		{"n is no factor", completionsRoute, `{"prompt":"12345678","n":4}`, 2, false},

		{"an input", embeddingsRoute, `{"input":"12345678"}`, 2, false},
		{"inputs of token IDs", embeddingsRoute, `{"input":[[1,2],[3,4]],"prompt":"x"}`, 4, true},
		{"an input given twice", embeddingsRoute, `{"input":[1,2,3],"input":[1]}`, 1, true},
		{"a prompt given twice", completionsRoute, `{"prompt":"12345678","prompt":"1"}`, 1, false},
		{"an empty input", embeddingsRoute, `{"input":""}`, 1, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s, bad := judged(tt.ep, tt.body)
			if bad != "" {
				t.Fatal(bad)
			}
			if got := s.promptTokens(); got != tt.want || s.exactTokens() != tt.exact {
				t.Errorf("promptTokens() of %s = %d, exact %v; want %d, %v", tt.body, got, s.exactTokens(), tt.want, tt.exact)
			}
		})
	}
}

func TestScanAllocatesNothing(t *testing.T) {
	body := chatBody(32<<10, `plain \"and\" é `)
	if n := testing.AllocsPerRun(20, func() {
		if _, err := scan(body); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("scan allocates %v times", n)
	}
}
