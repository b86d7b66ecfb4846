package proxy

import (
	"fmt"
	"strings"
	"testing"
)

// strictly judges a body by both sets of rules, as a server with --strict-validation does.
func strictly(ep int, body string) string {
	if _, bad := judged(ep, body); bad != "" {
		return bad
	}
	if bad := strict(&endpoints[ep], []byte(body)); bad != nil {
		return fmt.Sprintf("%d %s", bad.Status, bad.Message)
	}
	return ""
}

func chatWith(members string) string {
	return `{"model":"m","messages":[{"role":"user","content":"hi"}],` + members + `}`
}

func completionWith(members string) string { return `{"model":"m","prompt":"hi",` + members + `}` }

// TestStrictRanges tries each bound from both sides.
func TestStrictRanges(t *testing.T) {
	const v = "400 Validation: "
	for _, tt := range []struct {
		key     string
		in, out []string
		refusal string
	}{
		{"temperature", []string{"0", "2", "2.0", "-0", "1e0"}, []string{"-0.01", "2.01", "1e400", "-1e400"}, "temperature must be from 0 to 2"},
		{"top_p", []string{"0.01", "1"}, []string{"0", "-0", "-1", "1.01"}, "top_p must be greater than 0 and at most 1"},
		{"top_k", []string{"-1", "0", "1", "100000", "5.0"}, []string{"-2"}, "top_k must be at least -1"},
		{"top_k", nil, []string{"1.5", "1e400"}, "top_k must be an integer"},
		{"min_p", []string{"0", "1"}, []string{"-0.1", "1.1"}, "min_p must be from 0 to 1"},
		{"frequency_penalty", []string{"-2", "2"}, []string{"-2.1", "2.1"}, "frequency_penalty must be from -2 to 2"},
		{"presence_penalty", []string{"-2", "2"}, []string{"-2.1", "2.1"}, "presence_penalty must be from -2 to 2"},
		{"length_penalty", []string{"-2", "2"}, []string{"-2.1", "2.1"}, "length_penalty must be from -2 to 2"},
		{"repetition_penalty", []string{"0.1", "2"}, []string{"0", "-1", "2.1"}, "repetition_penalty must be greater than 0 and at most 2"},
		{"top_logprobs", []string{"0", "20"}, []string{"-1", "21"}, "top_logprobs must be from 0 to 20"},
		{"top_logprobs", nil, []string{"0.5"}, "top_logprobs must be an integer"},
		{"max_tokens", []string{"1", "100000"}, []string{"0", "-1"}, "max_tokens must be at least 1"},
		{"max_completion_tokens", []string{"1"}, []string{"0", "-5"}, "max_completion_tokens must be at least 1"},
		{"temperature", []string{"null"}, []string{`"1"`, "true", "[]", "{}"}, "temperature must be a number"},
		{"logit_bias", []string{`{"1":-100,"2":100}`, "{}", "null"}, []string{`{"1":-100.5}`, `{"1":100.5}`}, "logit_bias values must be from -100 to 100"},
		{"logit_bias", nil, []string{`[1]`, `{"1":"x"}`, "5"}, "logit_bias must map token IDs to numbers"},
		{"user", []string{`"u"`, `" u "`, "null"}, []string{`""`, `" \t\n"`, "5"}, "user must be a string that is not blank"},
	} {
		for _, value := range tt.in {
			if got := strictly(chatRoute, chatWith(`"`+tt.key+`":`+value)); got != "" {
				t.Errorf("%s: %s is refused: %s", tt.key, value, got)
			}
		}
		for _, value := range tt.out {
			if got := strictly(chatRoute, chatWith(`"`+tt.key+`":`+value)); got != v+tt.refusal {
				t.Errorf("%s: %s\n got %q\nwant %q", tt.key, value, got, v+tt.refusal)
			}
		}
	}
	for _, tt := range []struct{ members, want string }{
		{`"logprobs":0`, ""},
		{`"logprobs":5`, ""},
		{`"logprobs":6`, v + "logprobs must be from 0 to 5"},
		{`"logprobs":-1`, v + "logprobs must be from 0 to 5"},
		{`"best_of":0`, ""},
		{`"best_of":20`, ""},
		{`"best_of":21`, v + "best_of must be from 0 to 20"},
	} {
		if got := strictly(completionsRoute, completionWith(tt.members)); got != tt.want {
			t.Errorf("%s\n got %q\nwant %q", tt.members, got, tt.want)
		}
	}
	if got := strictly(chatRoute, chatWith(`"logprobs":true`)); got != "" {
		t.Errorf("logprobs of a chat is a boolean, but: %s", got)
	}
}

func TestStrictLists(t *testing.T) {
	const v = "400 Validation: "
	const stop = v + "stop must have 1 to 32 entries, none of them empty"
	words := func(n int) string { return "[" + strings.TrimSuffix(strings.Repeat(`"w",`, n), ",") + "]" }
	tools := func(n int) string {
		return "[" + strings.TrimSuffix(strings.Repeat(`{"type":"function","function":{"name":"f"}},`, n), ",") + "]"
	}
	tool := func(name string) string { return `[{"type":"function","function":{"name":"` + name + `"}}]` }
	for _, tt := range []struct{ name, members, want string }{
		{"one stop", `"stop":"x"`, ""},
		{"an empty stop", `"stop":""`, stop},
		{"no stops", `"stop":[]`, stop},
		{"32 stops", `"stop":` + words(32), ""},
		{"33 stops", `"stop":` + words(33), stop},
		{"an empty one among stops", `"stop":["x",""]`, stop},
		{"a stop that is a number", `"stop":5`, v + "stop must be a string or an array of strings"},
		{"stop null", `"stop":null`, ""},

		{"1536 tools", `"tools":` + tools(1536), ""},
		{"1537 tools", `"tools":` + tools(1537), v + "tools must have at most 1536 entries"},
		{"a name of 128 characters", `"tools":` + tool(strings.Repeat("é", 128)), ""},
		{"a name of 129 characters", `"tools":` + tool(strings.Repeat("f", 129)), v + "a function name must have at most 128 characters"},
		{"a custom tool", `"tools":[{"type":"custom","custom":{"name":"f"}}]`, ""},
		{"a tool that is a number", `"tools":[1]`, v + "tools must be an array of tools"},
		{"a function that is a number", `"tools":[{"function":1}]`, v + "function of a tool must be an object"},
		{"a name that is a number", `"tools":[{"function":{"name":1}}]`, v + "name of a function must be a string"},
		{"tools null", `"tools":null`, ""},

		{"n with temperature 0", `"n":2,"temperature":0`, v + "n must be 1 when temperature is 0"},
		{"n with temperature -0.0", `"temperature":-0.0,"n":2`, v + "n must be 1 when temperature is 0"},
		{"n of 1 with temperature 0", `"n":1,"temperature":0`, ""},
		{"n with a little temperature", `"n":2,"temperature":0.01`, ""},
		{"n without a temperature", `"n":128`, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := strictly(chatRoute, chatWith(tt.members)); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestStrictPrompts(t *testing.T) {
	const tooMany = "400 Validation: prompts times n must be at most 128"
	list := func(n int, one string) string {
		return "[ " + strings.TrimSuffix(strings.Repeat(one+" , ", n), " , ") + " ]"
	}
	for _, tt := range []struct{ name, body, want string }{
		{"128 prompts", `{"prompt":` + list(128, `"p"`) + `}`, ""},
		{"129 prompts", `{"prompt":` + list(129, `"p"`) + `}`, tooMany},
		{"64 prompts, n 2", `{"n":2,"prompt":` + list(64, `"p"`) + `}`, ""},
		{"65 prompts, n 2", `{"n":2,"prompt":` + list(65, `"p"`) + `}`, tooMany},
		{"129 prompts of token IDs", `{"prompt":` + list(129, `[1,2]`) + `}`, tooMany},
		{"one prompt of 1000 token IDs", `{"n":128,"prompt":` + list(1000, `1`) + `}`, ""},
		{"one prompt, n 128", `{"n":128,"prompt":"p"}`, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := strictly(completionsRoute, tt.body); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestStrictKeys(t *testing.T) {
	var many, listed []string
	for i := range 25 {
		many = append(many, fmt.Sprintf(`"z%02d":0`, i))
		listed = append(listed, fmt.Sprintf(`"z%02d"`, i))
	}
	long := strings.Repeat("é", 1000)
	for _, tt := range []struct {
		name, body string
		ep         int
		want       string
	}{
		{"legacy functions", chatWith(`"functions":[{"name":"f"}]`), chatRoute, "501 Validation: functions is not supported, use tools"},
		{"legacy function_call", chatWith(`"function_call":"auto"`), chatRoute, "501 Validation: function_call is not supported, use tools"},
		{"legacy functions unset", chatWith(`"functions":null,"function_call":null`), chatRoute, ""},
		{
			"extensions of engines", chatWith(`"cache_salt":"s","stop_token_ids":[1],"detokenize":true,"allowed_token_ids":[1],` +
				`"bad_words_token_ids":[[1]],"logprob_token_ids":[1],"nvext":{},"top_k":1,"min_p":0.1,"length_penalty":1,"repetition_penalty":1`), chatRoute, "",
		},
		{
			"keys of the API", chatWith(`"frequency_penalty":0,"stream":true,"stream_options":{},"tool_choice":"auto","parallel_tool_calls":true,"response_format":{},` +
				`"seed":1,"metadata":{},"store":false,"service_tier":"auto","reasoning_effort":"low","logprobs":true,"modalities":["text"]`), chatRoute, "",
		},
		{"unknown keys", chatWith(`"zeta":1,"alpha":2,"be\"ta":3`), chatRoute, `400 Validation: unknown fields: "alpha", "be\"ta", "zeta"`},
		{"an unknown key that is null", chatWith(`"zeta":null`), chatRoute, `400 Validation: unknown fields: "zeta"`},
		{"keys are told apart by case", chatWith(`"Temperature":1`), chatRoute, `400 Validation: unknown fields: "Temperature"`},
		{"many unknown keys", chatWith(strings.Join(many, ",")), chatRoute, "400 Validation: unknown fields: " + strings.Join(listed[:20], ", ") + " and 5 more"},
		{"a long unknown key", chatWith(`"` + long + `":1`), chatRoute, `400 Validation: unknown fields: "` + long[:64] + `..."`},
		{"a key of another route", `{"prompt":"p","messages":[]}`, completionsRoute, `400 Validation: unknown fields: "messages"`},
		{"completions", completionWith(`"suffix":"s","echo":true,"best_of":1`), completionsRoute, ""},
		{"embeddings", `{"input":"i","dimensions":3,"encoding_format":"float","user":"u"}`, embeddingsRoute, ""},
		{"a key that embeddings do not have", `{"input":"i","temperature":9}`, embeddingsRoute, `400 Validation: unknown fields: "temperature"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := strictly(tt.ep, tt.body); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}
