package sim_test

import (
	"encoding/json"
	"testing"

	"spillway/sim"
)

// Any JSON value is refused, or makes prompts of which none is empty.
func FuzzPrompts(f *testing.F) {
	for _, seed := range []string{`"text"`, `["a","b"]`, `[1,2]`, `[[1],[2,3]]`, `[ "a" ]`, `[]`, `null`, `[null]`, `[[]]`, `{}`, `7`, `[4294967296]`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var raw json.RawMessage
		if json.Unmarshal(data, &raw) != nil {
			return // never comes so far
		}
		prompts, err := sim.ParsePrompts(raw)
		if (err == nil) != (len(prompts) > 0) {
			t.Fatalf("ParsePrompts(%q) = %v, %v", raw, prompts, err)
		}
		for _, p := range prompts {
			if len(p) == 0 {
				t.Fatalf("ParsePrompts(%q) has an empty prompt", raw)
			}
		}
	})
}

// Any body is refused, or makes the same tokens each time.
func FuzzChat(f *testing.F) {
	for _, seed := range []string{
		`{"messages":[{"role":"user","content":"x"}]}`,
		`{"messages":[{"role":"user","content":[{"type":"text","text":"x"},{"type":"image_url","image_url":{"url":"u"}}]}],"tools":[{}]}`,
		`{"messages":[{"role":"assistant","content":null,"tool_calls":[{}]}],"add_generation_prompt":false,"continue_final_message":true}`,
		`{"messages":[{"role":"user","content":[7]}]}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		a, errA := sim.ChatTokens(data)
		b, errB := sim.ChatTokens(data)
		if (errA == nil) != (errB == nil) || len(a) != len(b) || errA == nil && len(a) < 3 {
			t.Fatalf("ChatTokens(%q) = %d tokens, %v, then %d, %v", data, len(a), errA, len(b), errB)
		}
	})
}
