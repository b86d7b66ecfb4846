package proxy

import (
	"testing"

	"spillway/httperr"
)

func TestReadEvents(t *testing.T) {
	for _, tt := range []struct {
		name    string
		read    func([]byte) chunk
		payload string
		want    chunk
	}{
		{"start", readMessage, `{"type":"message_start","message":{"id":"m","content":[],"usage":{"input_tokens":25,"cache_read_input_tokens":100,"cache_creation_input_tokens":5,"output_tokens":1}}}`,
			chunk{usage: usage{known: true, prompt: 130, cachedKnown: true, cached: 100, completion: 1}}},
		{"block start", readMessage, `{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}`, chunk{}},
		{"text", readMessage, `{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hello"}}`, chunk{tokens: 1}},
		{"text, other order", readMessage, `{"delta":{"text":"Hello","type":"text_delta"},"type":"content_block_delta"}`, chunk{tokens: 1}},
		{"no text", readMessage, `{"type":"content_block_delta","delta":{"type":"text_delta","text":""}}`, chunk{}},
		{"thought", readMessage, `{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"Hm"}}`, chunk{tokens: 1}},
		{"tool", readMessage, `{"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{"}}`, chunk{tokens: 1}},
		{"signature", readMessage, `{"type":"content_block_delta","delta":{"type":"signature_delta","signature":"x"}}`, chunk{}},
		{"end", readMessage, `{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":15}}`,
			chunk{usage: usage{known: true, completion: 15}}},
		{"stop", readMessage, `{"type":"message_stop"}`, chunk{done: true}},
		{"ping", readMessage, `{"type": "ping"}`, chunk{}},
		{"overloaded", readMessage, `{"type":"error","error":{"type":"overloaded_error","message":"x"}}`, chunk{failed: true, code: 529}},
		{"rate limit", readMessage, `{"type":"error","error":{"type":"rate_limit_error","message":"x"}}`, chunk{failed: true, code: 429}},
		{"another error", readMessage, `{"type":"error","error":{"type":"api_error","message":"x"}}`, chunk{failed: true}},
		{"an error with a code", readMessage, `{"error":{"code":503}}`, chunk{failed: true, code: 503}},
		{"no terminator of theirs", readMessage, `[DONE]`, chunk{}},
		{"nothing", readMessage, ``, chunk{}},

		{"created", readResponse, `{"type":"response.created","response":{"id":"r","error":null,"usage":null}}`, chunk{}},
		{"text", readResponse, `{"type":"response.output_text.delta","item_id":"i","delta":"Hello"}`, chunk{tokens: 1}},
		{"arguments", readResponse, `{"type":"response.function_call_arguments.delta","delta":"{"}`, chunk{tokens: 1}},
		{"no text", readResponse, `{"type":"response.output_text.delta","delta":""}`, chunk{}},
		{"text done", readResponse, `{"type":"response.output_text.done","text":"Hello"}`, chunk{}},
		{"completed", readResponse, `{"type":"response.completed","response":{"usage":{"input_tokens":10,"input_tokens_details":{"cached_tokens":4},"output_tokens":3,"total_tokens":13}}}`,
			chunk{done: true, usage: usage{known: true, prompt: 10, cachedKnown: true, cached: 4, completion: 3}}},
		{"incomplete", readResponse, `{"type":"response.incomplete","response":{"incomplete_details":{"reason":"max_output_tokens"}}}`, chunk{done: true}},
		{"failed", readResponse, `{"type":"response.failed","response":{"error":{"code":"server_error"}}}`, chunk{done: true, failed: true}},
		{"error", readResponse, `{"type":"error","code":"x","message":"y"}`, chunk{failed: true}},
	} {
		if got := tt.read([]byte(tt.payload)); got != tt.want {
			t.Errorf("%s: reading %s = %+v\nwant %+v", tt.name, tt.payload, got, tt.want)
		}
	}
}

func FuzzReadEvent(f *testing.F) {
	f.Add([]byte(`{"type":"message_start","message":{"usage":{"input_tokens":25}}}`))
	f.Add([]byte(`{"type":"error","error":{"type":"overloaded_error","code":5}}`))
	f.Add([]byte(`{"delta":{"text":"\ud800"},"type":"x"}`))
	f.Fuzz(func(t *testing.T, payload []byte) {
		for _, d := range []dialect{openAI, responses, anthropic} {
			if ch := d.read(payload); ch.tokens < 0 || ch.code != 0 && !ch.failed {
				t.Errorf("dialect %d reads %q as %+v", d, payload, ch)
			}
		}
	})
}

func TestBroken(t *testing.T) {
	e := &httperr.Error{Status: 504, Cause: httperr.ResponseTimeout, Message: `took "long"`}
	for d, want := range map[dialect]string{
		openAI:    `data: {"error":{"message":"took \"long\"","type":"gateway_timeout","code":504}}` + "\n\ndata: [DONE]\n\n",
		responses: "event: error\n" + `data: {"type":"error","error":{"message":"took \"long\"","type":"gateway_timeout","code":504}}` + "\n\n",
		anthropic: "event: error\n" + `data: {"type":"error","error":{"type":"api_error","message":"took \"long\""}}` + "\n\n",
	} {
		if got := string(d.broken(e)); got != want {
			t.Errorf("dialect %d: broken = %q\nwant %q", d, got, want)
		}
	}
}

func TestPromptsOfOtherDialects(t *testing.T) {
	for _, tt := range []struct {
		ep   int
		body string
		want uint64 // tokens
	}{
		{3, `{"input":"12345678"}`, 2},
		{3, `{"input":"12345678","instructions":"1234"}`, 3},
		{3, `{"input":[{"role":"user","content":"1234"}]}`, 4 + 3 + 2}, // the role is text too
		{3, `{"input":[{"role":"user","content":[{"type":"input_text","text":"1234"},{"type":"input_image","image_url":"data:aaaaaaaa"}]}]}`, 4 + 3 + 2 + 225},
		{3, `{"input":"1234","tools":[{"a":"b"}]}`, 4},
		{4, `{"messages":[{"role":"user","content":"1234"}],"system":"12345678"}`, 4 + 3 + 4},
		{4, `{"messages":[{"role":"user","content":"1234"}],"system":[{"type":"text","text":"12345678"}]}`, 4 + 3 + 4},
		{4, `{"messages":[{"role":"user","content":[{"type":"image","source":{"type":"base64","data":"aaaaaaaaaaaaaaaaaaaaaaaa"}}]}]}`, 4 + 3 + 1 + 225},
		{4, `{"messages":[{"role":"user","content":[{"type":"tool_use","input":{"source":"12345678"}}]}]}`, 4 + 3 + 3},
		{0, `{"messages":[{"role":"user","content":"1234"}],"system":"not read by chat"}`, 4 + 3 + 2},
	} {
		s, bad := scan([]byte(tt.body))
		if bad != nil {
			t.Fatal(bad)
		}
		if bad := s.check(&endpoints[tt.ep]); bad != nil {
			t.Fatal(bad)
		}
		if got := s.promptTokens(); got != tt.want {
			t.Errorf("%s of %s: %d tokens, want %d", tt.body, endpoints[tt.ep].label, got, tt.want)
		}
	}
}
