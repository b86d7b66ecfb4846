package jsonhttp

import (
	"encoding/json"
	"net/http"
	"strconv"
	"unicode/utf8"

	"spillway/httperr"
)

var jsonType = []string{"application/json"}

// Send writes an answer that has a body.
func Send(w http.ResponseWriter, status int, body []byte) {
	h := w.Header()
	h["Content-Type"] = jsonType
	h["Content-Length"] = []string{strconv.Itoa(len(body))}
	w.WriteHeader(status)
	_, _ = w.Write(body) // a client that has left hears nothing
}

// OK is the body of an answer that has nothing else to say.
var OK = []byte(`{"status":"ok"}`)

// AppendError appends the body of a failure.
func AppendError(b []byte, err *httperr.Error) []byte {
	b = AppendText(append(b, `{"error":`...), err.Message)
	if err.Details != nil {
		if details, failed := json.Marshal(err.Details); failed == nil { // it is a struct of our own
			b = append(append(b, `,"details":`...), details...)
		}
	}
	return append(b, '}')
}

// AppendText appends a JSON string, with as few escapes as JSON allows. Bytes that are not UTF-8
// become U+FFFD.
func AppendText(b []byte, s string) []byte {
	const digits = "0123456789abcdef"
	b = append(b, '"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b = append(b, '\\', byte(r))
		case r >= ' ':
			b = utf8.AppendRune(b, r)
		case r == '\n':
			b = append(b, `\n`...)
		case r == '\r':
			b = append(b, `\r`...)
		case r == '\t':
			b = append(b, `\t`...)
		case r == '\b':
			b = append(b, `\b`...)
		case r == '\f':
			b = append(b, `\f`...)
		default:
			b = append(b, '\\', 'u', '0', '0', digits[r>>4], digits[r&15])
		}
	}
	return append(b, '"')
}

// AppendUint appends what precedes a number, and the number.
func AppendUint(b []byte, before string, v uint64) []byte {
	return strconv.AppendUint(append(b, before...), v, 10)
}

// Teller remembers the status of an answer.
type Teller struct {
	http.ResponseWriter
	Status int // 200 if none was written
}

// Tell is a Teller of w.
func Tell(w http.ResponseWriter) *Teller { return &Teller{w, http.StatusOK} }

// WriteHeader implements http.ResponseWriter.
func (t *Teller) WriteHeader(status int) {
	t.Status = status
	t.ResponseWriter.WriteHeader(status)
}
