package dispatch

import (
	"bytes"
	"encoding/base64"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/tidwall/gjson"
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

// result is what a consumer pops off its list.
type result struct {
	StatusCode   int // of an HTTP answer, even of an error; then there is no ErrorCode
	Payload      string
	ErrorCode    string
	ErrorMessage string
	body         []byte // instead of Payload, of an answer
	usage        []byte // of an answer that tells it
}

// failed is a result without an HTTP answer.
func failed(code, message string) result {
	return result{Payload: string(marshal(struct {
		Error string `json:"error"`
	}{message})), ErrorCode: code, ErrorMessage: message}
}

// answered is a result of an HTTP answer.
func answered(status int, body []byte) result {
	r := result{StatusCode: status, body: body}
	if status/100 == 2 && bytes.Contains(body, []byte(`"usage"`)) {
		if u := gjson.GetBytes(body, "usage"); u.Exists() && u.Type != gjson.Null && gjson.Valid(u.Raw) {
			r.usage = []byte(u.Raw)
		}
	}
	return r
}

// append completes a result for its message and appends it to b as JSON. The first fields are those of
// llm-d, the rest is ours and can be switched off.
func (r *result) append(b []byte, m *message, queue *Queue, sent int, dropped string, withExtras bool, now time.Time) []byte {
	text := func(name, value string) {
		if value != "" {
			b = appendText(append(b, name...), value)
		}
	}
	number := func(name string, value int64) {
		if value != 0 {
			b = strconv.AppendInt(append(b, name...), value, 10)
		}
	}
	b = appendText(append(b, `{"id":`...), m.id)
	number(`,"status_code":`, int64(r.StatusCode))
	b = append(b, `,"payload":`...)
	whole := utf8.Valid(r.body)
	switch {
	case !whole:
		b = append(base64.StdEncoding.AppendEncode(append(b, '"'), r.body), '"')
	case r.body != nil:
		b = appendText(b, r.body)
	default:
		b = appendText(b, r.Payload)
	}
	text(`,"error_code":`, r.ErrorCode)
	text(`,"error_message":`, r.ErrorMessage)
	if !whole {
		b = append(b, `,"payload_encoding":"base64"`...)
	}
	if withExtras {
		if len(m.metadata) > 0 {
			b = append(append(b, `,"metadata":`...), marshal(m.metadata)...)
		}
		text(`,"request_token":`, m.token)
		number(`,"attempts":`, int64(sent)) // requests that were sent
		text(`,"queue_id":`, queue.ID)
		number(`,"enqueued_at":`, m.created*1000) // Unix milliseconds
		number(`,"completed_at":`, now.UnixMilli())
		text(`,"dropped_reason":`, dropped)
		if len(r.usage) > 0 {
			b = append(append(b, `,"usage":`...), r.usage...)
		}
	}
	return append(b, '}')
}

// appendText appends text as JSON, as encoding/json does without escapes for HTML.
func appendText[T string | []byte](b []byte, text T) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	from := 0
	for i := 0; i < len(text); {
		c := text[i]
		if c >= ' ' && c != '"' && c != '\\' && c < utf8.RuneSelf {
			i++
			continue
		}
		size := 1
		if c >= utf8.RuneSelf {
			var r rune
			if r, size = utf8.DecodeRuneInString(string(text[i:min(len(text), i+utf8.UTFMax)])); r != '\u2028' && r != '\u2029' && (r != utf8.RuneError || size > 1) {
				i += size
				continue
			}
			b = append(b, text[from:i]...)
			switch r {
			case utf8.RuneError:
				b = append(b, `\ufffd`...)
			default:
				b = append(b, '\\', 'u', '2', '0', '2', hex[r&15])
			}
		} else {
			b = append(append(b, text[from:i]...), '\\')
			switch c {
			case '"', '\\':
				b = append(b, c)
			case '\n':
				b = append(b, 'n')
			case '\r':
				b = append(b, 'r')
			case '\t':
				b = append(b, 't')
			case '\b':
				b = append(b, 'b')
			case '\f':
				b = append(b, 'f')
			default:
				b = append(b, 'u', '0', '0', hex[c>>4], hex[c&15])
			}
		}
		i += size
		from = i
	}
	return append(append(b, text[from:]...), '"')
}
