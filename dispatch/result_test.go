package dispatch

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

// plainResult is a result as encoding/json writes it.
type plainResult struct {
	ID           string            `json:"id"`
	StatusCode   int               `json:"status_code,omitempty"`
	Payload      string            `json:"payload"`
	ErrorCode    string            `json:"error_code,omitempty"`
	ErrorMessage string            `json:"error_message,omitempty"`
	Encoding     string            `json:"payload_encoding,omitempty"`
	Metadata     map[string]string `json:"metadata,omitempty"`
	Token        string            `json:"request_token,omitempty"`
	Attempts     int               `json:"attempts,omitempty"`
	QueueID      string            `json:"queue_id,omitempty"`
	EnqueuedAt   int64             `json:"enqueued_at,omitempty"`
	CompletedAt  int64             `json:"completed_at,omitempty"`
	Dropped      string            `json:"dropped_reason,omitempty"`
	Usage        json.RawMessage   `json:"usage,omitempty"`
}

// FuzzResult compares results, byte for byte, with what encoding/json makes of them.
func FuzzResult(f *testing.F) {
	f.Add("id", []byte("{\"a\":\"<&>\\u00fc \u2028\u2029\"}\n\t\r\b\f\x00\x1f\x7f\\"), "", 200, "user", "why")
	f.Add("\xff\"", []byte{0xff, 0xfe}, "DEADLINE_EXCEEDED", 0, "", "")
	f.Add("", []byte{}, "CANCELLED", 0, "\xe2\x80", "\xe2\x80\xa8x")
	f.Add("x", []byte(`{"usage":{"prompt_tokens":3}}`), "", 201, "", "")
	f.Fuzz(func(t *testing.T, id string, body []byte, code string, status int, user, dropped string) {
		now := time.UnixMilli(1764044000123)
		m := &message{id: id, token: "t", created: 17, metadata: map[string]string{"userid": user, "a": id}}
		q := &Queue{ID: "q<" + user}
		r, want := failed(code, string(body)), plainResult{ID: id, ErrorCode: code, ErrorMessage: string(body)}
		want.Payload = r.Payload
		if status > 0 {
			r = answered(status, body)
			want = plainResult{ID: id, StatusCode: status, Payload: string(body), Usage: r.usage}
			if !utf8.Valid(body) {
				want.Payload, want.Encoding = base64.StdEncoding.EncodeToString(body), "base64"
			}
		}
		want.Metadata, want.Token, want.Attempts, want.QueueID, want.EnqueuedAt, want.CompletedAt, want.Dropped = m.metadata, "t", 2, q.ID, 17000, now.UnixMilli(), dropped
		got := string(r.append(nil, m, q, 2, dropped, true, now))
		if !json.Valid([]byte(got)) {
			t.Fatalf("no JSON: %s", got)
		}
		if len(r.usage) > 0 { // it stays as it came
			want.Usage, got = nil, strings.Replace(got, `,"usage":`+string(r.usage), "", 1)
		}
		if w := string(marshal(want)); got != w {
			t.Fatalf("result\n%s\nwant\n%s", got, w)
		}
	})
}

func TestUsage(t *testing.T) {
	for body, want := range map[string]string{
		`{"usage":{"prompt_tokens":3,"completion_tokens":2}}`:                                  `{"prompt_tokens":3,"completion_tokens":2}`,
		`{"text":"\"usage\":1","usage": {"prompt_tokens":-3,"completion_tokens":1e99} ,"a":1}`: `{"prompt_tokens":-3,"completion_tokens":1e99}`,
		`{"usage":null}`: "", `{"a":{"usage":{}}}`: "", `["usage"]`: "", `{"usage":{"a":tru}}`: "", `{"usage":`: "",
	} {
		if got := string(answered(200, []byte(body)).usage); got != want {
			t.Errorf("usage of %s is %s, want %s", body, got, want)
		}
	}
	var c counts
	c.used([]byte(`{"prompt_tokens":-3,"completion_tokens":1e99}`))
	c.used([]byte(`{"prompt_tokens":5,"completion_tokens":"7"}`))
	if in, out := c.tokensIn.Load(), c.tokensOut.Load(); in != 5 || out < 1<<40 {
		t.Errorf("%d and %d tokens", in, out)
	}
}
