package upstream

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// maxFields bounds what a head of many tiny lines costs to keep.
const maxFields = 1024

// field is one header line. The strings share the memory of the whole head.
type field struct{ name, value string }

// head is a parsed response head.
type head struct {
	status  int
	minor   int   // of the protocol: HTTP/1.minor
	length  int64 // Content-Length, or -1
	chunked bool
	close   bool // Connection: close
	fields  []field
	few     [8]field // what fields is in at first
}

// parse reads a head from its status line to the empty line. It returns ErrHeader, or
// ErrFraming if the head's lines on the body's length are unusable. It is strict: lines end
// in CRLF, are not folded and hold no control characters.
func (h *head) parse(text string) error {
	line, text, _ := strings.Cut(text, "\r\n")
	if err := h.parseStatus(line); err != nil {
		return err
	}
	h.length, h.chunked, h.close = -1, false, false
	h.fields = h.few[:0]
	for {
		line, text, _ = strings.Cut(text, "\r\n")
		if line == "" {
			return nil
		}
		name, value, ok := splitLine(line)
		if !ok {
			return fmt.Errorf("%w: header line %.64q", ErrHeader, line)
		}
		if len(h.fields) == maxFields {
			return fmt.Errorf("%w: more than %d lines", ErrHeader, maxFields)
		}
		h.fields = append(h.fields, field{name, value})
		if err := h.frame(name, value); err != nil {
			return err
		}
	}
}

func (h *head) parseStatus(line string) error {
	const shape = "HTTP/1.x 200"
	ok := len(line) >= len(shape) && line[:7] == "HTTP/1." && (line[7] == '0' || line[7] == '1') && line[8] == ' ' &&
		(len(line) == len(shape) || line[len(shape)] == ' ') && printable(line)
	if ok {
		h.minor = int(line[7] - '0')
		h.status = 0
		for _, c := range []byte(line[9:len(shape)]) {
			ok = ok && '0' <= c && c <= '9'
			h.status = 10*h.status + int(c-'0')
		}
	}
	if !ok || h.status < 100 {
		return fmt.Errorf("%w: status line %.64q", ErrHeader, line)
	}
	return nil
}

// frame notes what a line says about the body and the connection.
func (h *head) frame(name, value string) error {
	switch {
	case len(name) == len("content-length") && strings.EqualFold(name, "content-length"):
		n, err := strconv.ParseUint(value, 10, 63)
		if err != nil {
			return fmt.Errorf("%w: Content-Length %.32q", ErrFraming, value)
		}
		if h.length >= 0 && h.length != int64(n) {
			return fmt.Errorf("%w: Content-Length %d and %d", ErrFraming, h.length, n)
		}
		h.length = int64(n)
	case len(name) == len("transfer-encoding") && strings.EqualFold(name, "transfer-encoding"):
		if h.chunked || h.minor == 0 || !strings.EqualFold(value, "chunked") {
			return fmt.Errorf("%w: Transfer-Encoding %.32q", ErrFraming, value)
		}
		h.chunked = true
	case len(name) == len("connection") && strings.EqualFold(name, "connection"):
		for option := range strings.SplitSeq(value, ",") {
			h.close = h.close || strings.EqualFold(strings.Trim(option, " \t"), "close")
		}
	}
	return nil
}

// body returns how the body of this answer to method ends, and whether the connection can be
// used again after it. Both Transfer-Encoding and Content-Length: the chunks are read, as
// RFC 9112 6.3 has it, and the connection is not trusted any further.
func (h *head) body(method string) (b body, keep bool) {
	keep = h.minor == 1 && !h.close
	switch {
	case h.status == 204:
		return body{framing: noBody}, keep && !h.chunked && h.length <= 0
	case h.status == 304, method == "HEAD":
		return body{framing: noBody}, keep && !(h.chunked && h.length >= 0)
	case h.chunked:
		return body{framing: byChunks}, keep && h.length < 0
	case h.length == 0:
		return body{framing: noBody}, keep
	case h.length > 0:
		return body{framing: byLength, left: h.length}, keep
	default:
		return body{framing: untilClose, left: math.MaxInt64}, false
	}
}

// splitLine splits a header or trailer line; ok is false if it is malformed.
func splitLine(line string) (name, value string, ok bool) {
	name, value, ok = strings.Cut(line, ":")
	value = strings.Trim(value, " \t")
	return name, value, ok && token(name) && printable(value)
}

// token reports whether s is a token of RFC 9110: a method or a header name.
func token(s string) bool {
	for i := range len(s) {
		c := s[i]
		if c|0x20 >= 'a' && c|0x20 <= 'z' || c >= '0' && c <= '9' || c == '-' {
			continue
		}
		if strings.IndexByte("!#$%&'*+.^_`|~", c) < 0 {
			return false
		}
	}
	return s != ""
}

// printable reports whether s has no control character but tabs.
func printable(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < ' ' && c != '\t' || c == 0x7f {
			return false
		}
	}
	return true
}
