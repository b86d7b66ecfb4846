package jsonhttp

import (
	"fmt"
	"io"
	"net/http"
	"strings"

	"spillway/httperr"
)

// Param is a parameter of a query: *To is set if it is there.
type Param struct {
	Name string
	To   **string
}

// Query reads a query in the form of HTML forms. Unlike net/url it takes any bytes. Parameters that
// are not wanted are passed over; one that comes twice is an error.
func Query(query string, wanted ...Param) *httperr.Error {
	for query != "" {
		var pair string
		pair, query, _ = strings.Cut(query, "&")
		key, value, _ := strings.Cut(pair, "=")
		key = unescape(key)
		for _, p := range wanted {
			if p.Name != key {
				continue
			}
			if *p.To != nil {
				return httperr.New(http.StatusBadRequest, key+": the parameter is given twice")
			}
			*p.To = new(unescape(value))
		}
	}
	return nil
}

// unescape decodes + and %XX; an escape that is none stands for itself.
func unescape(s string) string {
	if !strings.ContainsAny(s, "+%") {
		return strings.ToValidUTF8(s, "\uFFFD")
	}
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '+':
			b = append(b, ' ')
		case c == '%' && i+2 < len(s) && hexDigit(s[i+1]) >= 0 && hexDigit(s[i+2]) >= 0:
			b = append(b, byte(hexDigit(s[i+1])<<4|hexDigit(s[i+2])))
			i += 2
		default:
			b = append(b, c)
		}
	}
	return strings.ToValidUTF8(string(b), "\uFFFD")
}

// ReadBody reads the body of r into b[:0], up to most bytes.
func ReadBody(b []byte, r *http.Request, most int) ([]byte, *httperr.Error) {
	b = b[:0]
	if r.ContentLength > int64(most) {
		return b, tooLarge(most)
	}
	for {
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
		n, err := r.Body.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		switch {
		case len(b) > most:
			return b, tooLarge(most)
		case err == io.EOF:
			return b, nil
		case err != nil:
			return b, httperr.New(http.StatusBadRequest, "the body could not be read to its end")
		}
	}
}

func tooLarge(most int) *httperr.Error {
	return httperr.New(http.StatusRequestEntityTooLarge, fmt.Sprintf("the body is longer than %d bytes", most))
}

// IsJSON tells whether a Content-Type is that of JSON: application/json, or application with the
// suffix json, in any letter case, with parameters that have values.
func IsJSON(header string) bool {
	kind, params, _ := strings.Cut(header, ";")
	main, sub, ok := strings.Cut(strings.TrimRight(kind, " \t"), "/")
	if !ok || !strings.EqualFold(main, "application") || !isToken(sub) {
		return false
	}
	if at := strings.LastIndexByte(sub, '+'); at >= 0 {
		sub = sub[at+1:]
	}
	if !strings.EqualFold(sub, "json") {
		return false
	}
	for params = strings.Trim(params, " \t"); params != ""; {
		var rest string
		key, value, ok := strings.Cut(params, "=")
		if !ok || !isToken(key) {
			return false
		}
		if strings.HasPrefix(value, `"`) {
			end := strings.IndexByte(value[1:], '"')
			if end < 0 {
				return false
			}
			rest = strings.TrimLeft(value[end+2:], " \t")
			if rest != "" && rest[0] != ';' {
				return false
			}
			rest = strings.TrimPrefix(rest, ";")
		} else {
			value, rest, _ = strings.Cut(value, ";")
			if !isToken(strings.TrimRight(value, " \t")) {
				return false
			}
		}
		params = strings.TrimLeft(rest, " \t")
	}
	return true
}

func isToken(s string) bool {
	for i := range len(s) {
		c := s[i]
		if c <= ' ' || c >= 0x7f || strings.IndexByte(`()<>@,;:\"/[]?={}`, c) >= 0 {
			return false
		}
	}
	return s != ""
}
