package service

import (
	"cmp"
	"net/http"
	"strings"

	"spillway/httperr"
	"spillway/worker"
)

// filter is what the query of a list asks for; nil lets all through.
type filter struct{ model, tenant *string }

func comparePartitions(a, b worker.Partition) int {
	return cmp.Or(strings.Compare(a.Model, b.Model), strings.Compare(a.Tenant, b.Tenant))
}

// parseFilter reads a query in the form of HTML forms. Unlike net/url it takes any bytes.
func parseFilter(query string) (f filter, err *httperr.Error) {
	for query != "" {
		var pair string
		pair, query, _ = strings.Cut(query, "&")
		key, value, _ := strings.Cut(pair, "=")
		var to **string
		switch unescape(key) {
		case "model_name":
			to = &f.model
		case "tenant_id":
			to = &f.tenant
		default:
			continue
		}
		if *to != nil {
			return f, httperr.New(http.StatusBadRequest, unescape(key)+": the parameter is given twice")
		}
		*to = new(unescape(value))
	}
	return f, nil
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

// isJSON tells whether a Content-Type is that of JSON: application/json, or application with the
// suffix json, in any letter case, with parameters that have values.
func isJSON(header string) bool {
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
