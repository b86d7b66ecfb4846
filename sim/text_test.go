package sim_test

import (
	"strings"
	"testing"
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
