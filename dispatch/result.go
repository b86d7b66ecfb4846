package dispatch

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"time"
	"unicode/utf8"
)

// The error codes of results without an HTTP answer.
const (
	codeDeadline   = "DEADLINE_EXCEEDED"
	codeCancelled  = "CANCELLED"
	codeDropped    = "GATE_DROPPED"
	codeInvalid    = "INVALID_REQUEST"
	codeAttempts   = "ATTEMPTS_EXHAUSTED"
	codeDeliveries = "DELIVERY_LIMIT_EXCEEDED"
)

// result is what a consumer pops off its list. The first five fields are those of llm-d, the rest is
// ours and can be switched off.
type result struct {
	ID           string `json:"id"`
	StatusCode   int    `json:"status_code,omitempty"` // of an HTTP answer, even of an error; then there is no ErrorCode
	Payload      string `json:"payload"`
	ErrorCode    string `json:"error_code,omitempty"`
	ErrorMessage string `json:"error_message,omitempty"`
	Encoding     string `json:"payload_encoding,omitempty"` // base64, or "" for text
	*extras
	usage json.RawMessage // of an answer that tells it
}

type extras struct {
	Metadata    map[string]string `json:"metadata,omitempty"`
	Token       string            `json:"request_token,omitempty"`
	Attempts    int               `json:"attempts,omitempty"` // requests that were sent
	QueueID     string            `json:"queue_id,omitempty"`
	EnqueuedAt  int64             `json:"enqueued_at,omitempty"`  // Unix milliseconds
	CompletedAt int64             `json:"completed_at,omitempty"` // Unix milliseconds
	Dropped     string            `json:"dropped_reason,omitempty"`
	Usage       json.RawMessage   `json:"usage,omitempty"`
}

// failed is a result without an HTTP answer.
func failed(code, message string) result {
	return result{Payload: string(marshal(struct {
		Error string `json:"error"`
	}{message})), ErrorCode: code, ErrorMessage: message}
}

// answered is a result of an HTTP answer.
func answered(status int, body []byte) result {
	if utf8.Valid(body) {
		r := result{StatusCode: status, Payload: string(body)}
		if status/100 == 2 && bytes.Contains(body, []byte(`"usage"`)) {
			var of struct {
				Usage json.RawMessage `json:"usage"`
			}
			if json.Unmarshal(body, &of) == nil && string(of.Usage) != "null" {
				r.usage = of.Usage
			}
		}
		return r
	}
	return result{StatusCode: status, Payload: base64.StdEncoding.EncodeToString(body), Encoding: "base64"}
}

// of completes a result for its message and encodes it.
func (r result) of(m *message, queue *Queue, sent int, dropped string, withExtras bool, now time.Time) []byte {
	r.ID = m.id
	if withExtras {
		r.extras = &extras{
			Metadata: m.metadata, Token: m.token, Attempts: sent, QueueID: queue.ID, EnqueuedAt: m.created * 1000,
			CompletedAt: now.UnixMilli(), Dropped: dropped, Usage: r.usage,
		}
	}
	return marshal(r)
}
