package monitor

import (
	"bytes"
	"strconv"
)

// scanner reads the wanted series of one page in the Prometheus text format. A page has
// hundreds of histogram lines of which a handful matter, so a line is cut and its name
// looked at; only a wanted line is decoded, and an unwanted one allocates nothing.
type scanner struct {
	rest      []byte
	name      func([]byte) metric // what a name means to the engine; none if nothing
	malformed int                 // wanted lines that could not be decoded
	truncated bool                // the page ended inside a line, which was left out
}

// metric is one wanted name of an engine's page.
type metric uint8

// none is a name that is not wanted.
const none metric = 0

// series is one wanted line. It aliases the page.
type series struct {
	metric metric
	labels []byte // what follows the opening brace up to the closing one; checked
	value  float64
}

// next returns the next wanted series, or false at the end of the page.
func (s *scanner) next() (series, bool) {
	for {
		end := bytes.IndexByte(s.rest, '\n')
		if end < 0 {
			// OpenMetrics ends in a line that needs no line feed.
			s.truncated = len(s.rest) > 0 && string(s.rest) != "# EOF"
			s.rest = nil
			return series{}, false
		}
		line := skipBlanks(s.rest[:end])
		s.rest = s.rest[end+1:]
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		cut := 0
		for cut < len(line) && isNameByte(line[cut]) {
			cut++
		}
		m := s.name(line[:cut])
		if m == none {
			continue
		}
		labels, value, ok := decode(skipBlanks(line[cut:]))
		if !ok {
			s.malformed++
			continue
		}
		return series{m, labels, value}, true
	}
}

// decode reads what follows a name: labels, if any, and the value. A timestamp or an
// exemplar after the value is not looked at.
func decode(line []byte) (labels []byte, value float64, ok bool) {
	if len(line) > 0 && line[0] == '{' {
		line = line[1:]
		rest := line
		for {
			rest = skipBlanks(rest)
			if len(rest) > 0 && rest[0] == '}' {
				break
			}
			if _, _, rest, ok = cutLabel(rest); !ok {
				return nil, 0, false
			}
		}
		labels = line[:len(line)-len(rest)+1]
		line = skipBlanks(rest[1:])
	}
	if end := bytes.IndexAny(line, " \t"); end >= 0 {
		line = line[:end]
	}
	if bytes.ContainsAny(line, "pP_") { // Go's own notations, which the format does not have
		return nil, 0, false
	}
	value, err := strconv.ParseFloat(string(line), 64)
	return labels, value, err == nil
}

// cutLabel cuts one name="value" and the comma after it. The value is still escaped. There is
// no need for a comma before the closing brace, which is left in rest.
func cutLabel(s []byte) (name, value, rest []byte, ok bool) {
	eq := bytes.IndexByte(s, '=')
	if eq < 0 {
		return nil, nil, nil, false
	}
	name = bytes.TrimRight(s[:eq], " \t")
	s = skipBlanks(s[eq+1:])
	if !isLabelName(name) || len(s) == 0 || s[0] != '"' {
		return nil, nil, nil, false
	}
	s = s[1:]
	end := 0
	for ; ; end++ {
		if end == len(s) {
			return nil, nil, nil, false
		}
		if s[end] == '"' {
			break
		}
		if s[end] != '\\' {
			continue
		}
		end++
		if end == len(s) || s[end] != '\\' && s[end] != '"' && s[end] != 'n' {
			return nil, nil, nil, false
		}
	}
	value = s[:end]
	rest = skipBlanks(s[end+1:])
	switch {
	case len(rest) == 0:
		return nil, nil, nil, false
	case rest[0] == ',':
		return name, value, rest[1:], true
	case rest[0] == '}':
		return name, value, rest, true
	}
	return nil, nil, nil, false
}

// isNameByte tells whether c may stand in the name of a metric.
func isNameByte(c byte) bool {
	return 'a' <= c && c <= 'z' || c == '_' || c == ':' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
}

// isLabelName tells whether name is what the format allows there: an unquoted brace or comma
// in it would mean that the line is not what it seems.
func isLabelName(name []byte) bool {
	for i, c := range name {
		letter := c == '_' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return len(name) > 0
}

// label is the value of the named label, or false if the series has none of that name. It
// allocates only if the value holds an escape.
func (s series) label(name string) ([]byte, bool) {
	rest := skipBlanks(s.labels)
	for len(rest) > 0 && rest[0] != '}' {
		n, v, after, ok := cutLabel(rest)
		if !ok {
			return nil, false // cannot be: decode has walked here before
		}
		if string(n) == name {
			return unescape(v), true
		}
		rest = skipBlanks(after)
	}
	return nil, false
}

func unescape(v []byte) []byte {
	if bytes.IndexByte(v, '\\') < 0 {
		return v
	}
	plain := make([]byte, 0, len(v))
	for i := 0; i < len(v); i++ {
		c := v[i]
		if c == '\\' {
			i++
			if c = v[i]; c == 'n' {
				c = '\n'
			}
		}
		plain = append(plain, c)
	}
	return plain
}

func skipBlanks(s []byte) []byte {
	for len(s) > 0 && (s[0] == ' ' || s[0] == '\t') {
		s = s[1:]
	}
	return s
}
