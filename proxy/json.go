package proxy

import "errors"

// What cursor methods return; where it happened is cursor.i.
var (
	errJSON = errors.New("malformed JSON")
	errDeep = errors.New("JSON nested too deeply")
)

// maxDepth bounds the nesting of arrays and objects that is accepted.
const maxDepth = 512

// cursor walks JSON text in place: it validates all that it passes over and decodes nothing. It
// accepts what RFC 8259 does, as long as strings are valid UTF-8.
type cursor struct {
	b    []byte
	i    int
	skim bool // what is in string values does not matter: see cursor.value
}

// space passes over white space.
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

// peek returns the next byte that is not white space, or 0 at the end. Most often that is the
// next byte, which is tried first so that the test is inlined.
func (c *cursor) peek() byte {
	if c.i < len(c.b) && c.b[c.i] > ' ' {
		return c.b[c.i]
	}
	return c.peekOn()
}

func (c *cursor) peekOn() byte {
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

// skip passes over any value. depth is how many arrays and objects are open around it.
func (c *cursor) skip(depth int) error {
	switch ch := c.peek(); {
	case ch == '"':
		_, err := c.value()
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
				return errDeep
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
