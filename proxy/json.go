package proxy

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"slices"
	"unicode/utf8"
)

// errJSON is what cursor methods return; where it happened is cursor.i.
var errJSON = errors.New("malformed JSON")

// maxDepth bounds the nesting of arrays and objects that is accepted.
const maxDepth = 512

// cursor walks JSON text in place: it validates all that it passes over and decodes nothing. It
// accepts what RFC 8259 does, as long as strings are valid UTF-8.
type cursor struct {
	b []byte
	i int
}

func (c *cursor) space() {
	for c.i < len(c.b) {
		switch c.b[c.i] {
		case ' ', '\n', '\r', '\t':
			c.i++
		default:
			return
		}
	}
}

// peek returns the next byte that is not white space, or 0 at the end.
func (c *cursor) peek() byte {
	c.space()
	if c.i < len(c.b) {
		return c.b[c.i]
	}
	return 0
}

// take consumes ch, white space before it included.
func (c *cursor) take(ch byte) bool {
	if c.peek() != ch {
		return false
	}
	c.i++
	return true
}

// text is a string literal that was passed over.
type text struct {
	raw     []byte // between the quotes
	size    int    // bytes once decoded
	escaped bool   // raw holds escapes
}

// is tells whether the string is s. Keys that are written with escapes are decoded, so that
// "model" means the same to us as to the worker.
func (t text) is(s string) bool {
	if !t.escaped {
		return string(t.raw) == s
	}
	return t.size == len(s) && t.string() == s
}

// str passes over a string literal.
func (c *cursor) str() (text, error) {
	if !c.take('"') {
		return text{}, errJSON
	}
	start := c.i
	t := text{}
	quote := bytes.IndexByte(c.b[c.i:], '"')
	if quote < 0 {
		c.i = len(c.b)
		return t, errJSON
	}
	quote += c.i
	for {
		slash := bytes.IndexByte(c.b[c.i:quote], '\\')
		if slash < 0 {
			break
		}
		t.escaped = true
		t.size += slash
		c.i += slash
		used, size := escape(c.b[c.i:])
		if used == 0 {
			return t, errJSON
		}
		c.i += used
		t.size += size
		if c.i > quote { // the escape held the quote that was found
			q := bytes.IndexByte(c.b[c.i:], '"')
			if q < 0 {
				c.i = len(c.b)
				return t, errJSON
			}
			quote = c.i + q
		}
	}
	t.size += quote - c.i
	t.raw = c.b[start:quote]
	c.i = quote + 1
	if control, high := classify(t.raw); control || high && !utf8.Valid(t.raw) {
		c.i = start
		return t, errJSON
	}
	return t, nil
}

// classify tells whether b has bytes below 0x20 and whether it has bytes above 0x7f, eight at
// a time: prompts are long, and most are plain ASCII.
func classify(b []byte) (control, high bool) {
	const ones = 0x0101010101010101
	var low, top uint64
	for len(b) >= 8 {
		x := binary.LittleEndian.Uint64(b)
		low |= (x - 0x20*ones) &^ x // the top bit of a byte below 0x20
		top |= x
		b = b[8:]
	}
	for _, ch := range b {
		low |= (uint64(ch) - 0x20) & 0x80 &^ uint64(ch)
		top |= uint64(ch)
	}
	// Borrows can raise a false alarm above a byte that is itself below 0x20, never without one.
	return low&(0x80*ones) != 0, top&(0x80*ones) != 0
}

// escape reads one escape sequence: bytes used, 0 if it is none, and the size of what it means
// in UTF-8.
func escape(b []byte) (used, size int) {
	if len(b) < 2 {
		return 0, 0
	}
	switch b[1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return 2, 1
	case 'u':
	default:
		return 0, 0
	}
	r, ok := hex4(b[2:])
	switch {
	case !ok:
		return 0, 0
	case r < 0x80:
		return 6, 1
	case r < 0x800:
		return 6, 2
	case r >= 0xd800 && r < 0xdc00 && len(b) >= 12 && b[6] == '\\' && b[7] == 'u':
		if low, ok := hex4(b[8:]); ok && low >= 0xdc00 && low < 0xe000 {
			return 12, 4
		}
	}
	return 6, 3 // lone surrogates become U+FFFD
}

func hex4(b []byte) (r rune, ok bool) {
	if len(b) < 4 {
		return 0, false
	}
	for _, ch := range b[:4] {
		switch {
		case ch >= '0' && ch <= '9':
			ch -= '0'
		case ch >= 'a' && ch <= 'f':
			ch -= 'a' - 10
		case ch >= 'A' && ch <= 'F':
			ch -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | rune(ch)
	}
	return r, true
}

// number passes over a number and returns its text.
func (c *cursor) number() ([]byte, error) {
	start := c.i
	if c.i < len(c.b) && c.b[c.i] == '-' {
		c.i++
	}
	switch {
	case c.i < len(c.b) && c.b[c.i] == '0':
		c.i++
	case c.digits() == 0:
		return nil, errJSON
	}
	if c.i < len(c.b) && c.b[c.i] == '.' {
		c.i++
		if c.digits() == 0 {
			return nil, errJSON
		}
	}
	if c.i < len(c.b) && (c.b[c.i] == 'e' || c.b[c.i] == 'E') {
		c.i++
		if c.i < len(c.b) && (c.b[c.i] == '+' || c.b[c.i] == '-') {
			c.i++
		}
		if c.digits() == 0 {
			return nil, errJSON
		}
	}
	return c.b[start:c.i], nil
}

func (c *cursor) digits() (n int) {
	for c.i < len(c.b) && c.b[c.i] >= '0' && c.b[c.i] <= '9' {
		c.i++
		n++
	}
	return n
}

// literal passes over true, false or null.
func (c *cursor) literal() error {
	for _, word := range [...]string{"true", "false", "null"} {
		if len(c.b)-c.i >= len(word) && string(c.b[c.i:c.i+len(word)]) == word {
			c.i += len(word)
			return nil
		}
	}
	return errJSON
}

// object calls member for each key of an object; member must pass over the value.
func (c *cursor) object(member func(key text) error) error {
	if !c.take('{') {
		return errJSON
	}
	if c.take('}') {
		return nil
	}
	for {
		c.space()
		key, err := c.str()
		if err != nil {
			return err
		}
		if !c.take(':') {
			return errJSON
		}
		c.space()
		if err := member(key); err != nil {
			return err
		}
		if c.take(',') {
			continue
		}
		if c.take('}') {
			return nil
		}
		return errJSON
	}
}

// array calls element for each element of an array; element must pass over it.
func (c *cursor) array(element func() error) error {
	if !c.take('[') {
		return errJSON
	}
	if c.take(']') {
		return nil
	}
	for {
		c.space()
		if err := element(); err != nil {
			return err
		}
		if c.take(',') {
			continue
		}
		if c.take(']') {
			return nil
		}
		return errJSON
	}
}

// skip passes over any value at the given nesting depth.
func (c *cursor) skip(depth int) error {
	switch ch := c.peek(); {
	case ch == '"':
		_, err := c.str()
		return err
	case ch == '-' || ch >= '0' && ch <= '9':
		_, err := c.number()
		return err
	case ch == '{' || ch == '[':
		return c.nested(depth)
	}
	return c.literal()
}

// nested passes over an array or object without recursion or callbacks, for speed.
func (c *cursor) nested(depth int) error {
	var kinds [maxDepth]byte // the closing bytes that are still to come
	open := 0
	for {
		ch := c.peek()
		if ch == '{' || ch == '[' {
			if depth+open >= maxDepth {
				return errJSON
			}
			kinds[open] = ch + 2 // '{'+2 is '}', '['+2 is ']'
			open++
			c.i++
			if c.take(ch + 2) {
				open--
			} else if ch == '{' {
				if err := c.key(); err != nil {
					return err
				}
				continue
			} else {
				continue
			}
		} else if err := c.skip(depth); err != nil { // a scalar: it does not recurse
			return err
		}
		for {
			if open == 0 {
				return nil
			}
			if c.take(',') {
				if kinds[open-1] == '}' {
					if err := c.key(); err != nil {
						return err
					}
				}
				break
			}
			if !c.take(kinds[open-1]) {
				return errJSON
			}
			open--
		}
	}
}

func (c *cursor) key() error {
	c.space()
	if _, err := c.str(); err != nil {
		return err
	}
	if !c.take(':') {
		return errJSON
	}
	return nil
}

// string decodes the literal. It allocates; the hot path compares with is.
func (t text) string() string {
	if !t.escaped {
		return string(t.raw)
	}
	var s string
	if err := json.Unmarshal(slices.Concat([]byte{'"'}, t.raw, []byte{'"'}), &s); err != nil {
		return string(t.raw) // cannot be: str has checked the literal
	}
	return s
}
