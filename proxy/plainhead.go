package proxy

import (
	"bytes"
	"net/http"
	"net/textproto"
	"net/url"
	"strings"
)

// plainRoute is a route of POST that plain requests may ask for.
type plainRoute struct {
	path string
	url  url.URL
}

// maxPlainFields is how many header lines a plain request may have.
const maxPlainFields = 32

// plainHead is the head of a request that needs nothing of HTTP but what every client of an inference
// server uses: POST to a known path in HTTP/1.1, a body whose length is told, a connection that is kept.
// Whatever is rare, dubious or wrong is not plain; net/http knows what to do about it.
type plainHead struct {
	route  *plainRoute
	host   string
	length int64 // of the body, in bytes
	fields http.Header
	values [maxPlainFields]string // of fields that occur once
}

var headEnd = []byte("\r\n\r\n")

// read reads the head at the beginning of b and returns its size in bytes, 0 if it is not whole or not
// plain. The strings of h are of memory of their own.
func (h *plainHead) read(b []byte, routes []plainRoute) int {
	end := bytes.Index(b, headEnd)
	if end < 0 || b[0] != 'P' {
		return 0
	}
	text := string(b[:end+2])
	line, rest, _ := strings.Cut(text, "\r\n")
	path, post := strings.CutPrefix(line, "POST ")
	path, current := strings.CutSuffix(path, " HTTP/1.1")
	if !post || !current {
		return 0
	}
	if h.route = nil; !h.on(path, routes) {
		return 0
	}
	if h.host, h.length = "", -1; h.fields == nil {
		h.fields = make(http.Header, 8)
	}
	clear(h.fields)
	for n := 0; rest != ""; n++ {
		name, value, size := plainLine(rest)
		if size == 0 || n == len(h.values) || !h.take(textproto.CanonicalMIMEHeaderKey(name), value, n) {
			return 0
		}
		rest = rest[size:]
	}
	if h.host == "" || h.length < 0 {
		return 0
	}
	return end + len(headEnd)
}

func (h *plainHead) on(path string, routes []plainRoute) bool {
	for i := range routes {
		if routes[i].path == path {
			h.route = &routes[i]
			return true
		}
	}
	return false
}

// take takes in the nth field. It reports false if the request is not plain.
func (h *plainHead) take(name, value string, n int) bool {
	switch name {
	case "Host":
		if h.host != "" || !plainHost(value) {
			return false
		}
		h.host = value
		return true // it is no other field for net/http either
	case "Content-Length":
		if h.length >= 0 || !h.setLength(value) {
			return false
		}
	case "Connection":
		if !strings.EqualFold(value, "keep-alive") {
			return false
		}
	case "Transfer-Encoding", "Trailer", "Expect", "Upgrade", "Pragma":
		return false
	}
	if more := h.fields[name]; more != nil {
		h.fields[name] = append(more, value)
		return true
	}
	h.values[n] = value
	h.fields[name] = h.values[n : n+1 : n+1]
	return true
}

// setLength reads a Content-Length of at most 15 digits.
func (h *plainHead) setLength(value string) bool {
	if value == "" || len(value) > 15 {
		return false
	}
	h.length = 0
	for i := range len(value) {
		d := value[i] - '0'
		if d > 9 {
			return false
		}
		h.length = 10*h.length + int64(d)
	}
	return true
}

// What a byte may be part of.
const (
	ofName uint8 = 1 << iota
	ofValue
	ofHost
)

var plainBytes = func() (set [256]uint8) {
	for c := byte(' '); c < 0x7f; c++ {
		set[c] |= ofValue
		letter := 'a' <= c|0x20 && c|0x20 <= 'z' || '0' <= c && c <= '9'
		if letter || strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0 {
			set[c] |= ofName
		}
		if letter || strings.IndexByte(".-_:[]", c) >= 0 {
			set[c] |= ofHost
		}
	}
	set['\t'] |= ofValue
	return set
}()

// plainLine reads the header line at the beginning of s; size is its length with the line's end, 0 if it
// is not plain.
func plainLine(s string) (name, value string, size int) {
	i := 0
	for i < len(s) && plainBytes[s[i]]&ofName != 0 {
		i++
	}
	if i == 0 || i == len(s) || s[i] != ':' {
		return "", "", 0
	}
	name = s[:i]
	for i++; s[i] == ' ' || s[i] == '\t'; i++ { // s does not end so
	}
	from := i
	for ; i < len(s) && plainBytes[s[i]]&ofValue != 0; i++ {
	}
	if i+1 >= len(s) || s[i] != '\r' || s[i+1] != '\n' {
		return "", "", 0
	}
	to := i
	for to > from && (s[to-1] == ' ' || s[to-1] == '\t') {
		to--
	}
	return name, s[from:to], i + 2
}

func plainHost(s string) bool {
	for i := range len(s) {
		if plainBytes[s[i]]&ofHost == 0 {
			return false
		}
	}
	return s != ""
}
