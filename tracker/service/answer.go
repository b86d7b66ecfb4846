package service

import (
	"net/http"
	"strconv"
	"unicode/utf8"

	"spillway/httperr"
)

var jsonType = []string{"application/json"}

// send writes an answer that has a body.
func send(w http.ResponseWriter, status int, body []byte) {
	h := w.Header()
	h["Content-Type"] = jsonType
	h["Content-Length"] = []string{strconv.Itoa(len(body))}
	w.WriteHeader(status)
	_, _ = w.Write(body) // a client that has left hears nothing
}

var ok = []byte(`{"status":"ok"}`)

// appendError appends the body of a failure.
func appendError(b []byte, err *httperr.Error) []byte {
	return append(appendText(append(b, `{"error":`...), err.Message), '}')
}

// appendText appends a JSON string, with as few escapes as JSON allows. Bytes that are not UTF-8
// become U+FFFD.
func appendText(b []byte, s string) []byte {
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

func appendField(b []byte, name string, v uint64) []byte {
	return strconv.AppendUint(append(b, name...), v, 10)
}
