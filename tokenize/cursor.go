package tokenize

import (
	"bytes"
	"encoding/json"
)

// cursor walks over JSON text in place and decodes nothing. It looks for where values end and not
// whether they are well formed: bodies have been checked before, and of an answer only what is taken
// from it matters. Whatever the text, it stays within it.
type cursor struct {
	b []byte
	i int
}

// next passes over white space and returns the byte after it, or 0 at the end.
func (c *cursor) next() byte {
	for c.i < len(c.b) {
		switch ch := c.b[c.i]; ch {
		case ' ', '\n', '\r', '\t':
			c.i++
		default:
			return ch
		}
	}
	return 0
}

// take passes over ch, and white space before it, if it comes next.
func (c *cursor) take(ch byte) bool {
	if c.next() != ch {
		return false
	}
	c.i++
	return true
}

// str passes over a string that comes next and returns what is between its quotes.
func (c *cursor) str() (raw []byte, ok bool) {
	if !c.take('"') {
		return nil, false
	}
	from := c.i
	for {
		n := bytes.IndexByte(c.b[c.i:], '"') // 32 bytes at a time
		if n < 0 {
			return nil, false
		}
		end := c.i + n
		c.i = end + 1
		at := end // of the first of the backslashes before the quote
		for at > from && c.b[at-1] == '\\' {
			at--
		}
		if (end-at)%2 == 0 {
			return c.b[from:end], true
		}
	}
}

// name is str for a key, and the colon after it. It is decoded if it has escapes.
func (c *cursor) name() (key []byte, ok bool) {
	from := c.i
	if key, ok = c.str(); !ok || !c.take(':') {
		return nil, false
	}
	if bytes.IndexByte(key, '\\') >= 0 {
		var s string
		if json.Unmarshal(bytes.TrimRight(bytes.TrimSpace(c.b[from:c.i]), ": \n\r\t"), &s) != nil {
			return nil, false
		}
		key = []byte(s)
	}
	return key, true
}

// skip passes over any value.
func (c *cursor) skip() bool {
	for open := 0; ; {
		switch ch := c.next(); ch {
		case 0:
			return false
		case '"':
			if _, ok := c.str(); !ok {
				return false
			}
		case '{', '[':
			c.i++
			open++
			continue
		case '}', ']':
			if open == 0 {
				return false
			}
			c.i++
			open--
		case ',', ':':
			if open == 0 {
				return false
			}
			c.i++
			continue
		default:
			c.scalar()
		}
		if open == 0 {
			return true
		}
	}
}

// scalar passes over a number or a literal, of which there is one byte at least.
func (c *cursor) scalar() {
	for c.i++; c.i < len(c.b); c.i++ {
		switch c.b[c.i] {
		case ',', ':', '}', ']', '{', '[', '"', ' ', '\n', '\r', '\t':
			return
		}
	}
}

// object calls member for each key of an object that comes next; member must pass over the value.
func (c *cursor) object(member func(key []byte) bool) bool {
	if !c.take('{') {
		return false
	}
	if c.take('}') {
		return true
	}
	for {
		key, ok := c.name()
		if !ok || !member(key) {
			return false
		}
		if !c.take(',') {
			return c.take('}')
		}
	}
}

// array calls element for each element of an array that comes next; element must pass over it.
func (c *cursor) array(element func() bool) bool {
	if !c.take('[') {
		return false
	}
	if c.take(']') {
		return true
	}
	for {
		if !element() {
			return false
		}
		if !c.take(',') {
			return c.take(']')
		}
	}
}
