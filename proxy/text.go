package proxy

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"math/bits"
	"slices"
	"unicode/utf8"
)

// text is a string literal that was passed over. It has no more fields because the compiler
// keeps structs of up to four words in registers, and there is one for every key.
type text struct {
	raw   []byte // between the quotes
	saved int    // bytes that decoding saves: every escape is longer than what it means
}

// size is the length once decoded, in bytes.
func (t text) size() int { return len(t.raw) - t.saved }

// is tells whether the string is s. Keys that are written with escapes are decoded, so that
// "model" means the same to us as to the worker.
func (t text) is(s string) bool {
	if t.saved == 0 {
		return string(t.raw) == s
	}
	return t.size() == len(s) && t.string() == s
}

// str passes over a string literal.
func (c *cursor) str() (text, error) {
	if !c.take('"') {
		return text{}, errJSON
	}
	b, start := c.b, c.i
	end := start // of what has been looked at
	saved := 0
	high := false // there may be bytes above 0x7f
	for {
		n, wide := run(b[end:])
		end += n
		high = high || wide
		if end < len(b) && b[end] == '"' {
			break
		}
		used, size := escape(b[end:])
		if used == 0 { // a control character, a bad escape, or the end
			c.i = end
			return text{}, errJSON
		}
		end += used
		saved += used - size
	}
	t := text{b[start:end], saved}
	if high && !utf8.Valid(t.raw) {
		return text{}, errJSON
	}
	c.i = end + 1
	return t, nil
}

// value is str for a string that is no key. Where only its end is wanted, it looks for quotes alone,
// which the processor does 32 bytes at a time.
func (c *cursor) value() (text, error) {
	if !c.skim {
		return c.str()
	}
	if !c.take('"') {
		return text{}, errJSON
	}
	start := c.i
	for {
		n := bytes.IndexByte(c.b[c.i:], '"')
		if n < 0 {
			return text{}, errJSON
		}
		end := c.i + n
		c.i = end + 1
		from := end // of the backslashes before the quote
		for from > start && c.b[from-1] == '\\' {
			from--
		}
		if (end-from)%2 == 0 {
			return text{raw: c.b[start:end]}, nil
		}
	}
}

// Words of eight bytes, for looking at that many at once.
const (
	ones = 0x0101010101010101 // times a byte: that byte in all eight places
	tops = 0x8080808080808080
)

// marks sets the top bit of every byte of x that is a quote, a backslash or a control character.
// It may be set for bytes above 0x7f too, and above a byte that is marked rightly: the lowest mark
// on an ASCII byte is right.
func marks(x uint64) uint64 {
	// Flipping bit 1 makes 0x20 of a quote and leaves control characters below that, and nothing
	// else comes there.
	return ((x ^ 0x02*ones) - 0x21*ones) | ((x ^ '\\'*ones) - ones)
}

// run is how many bytes of b come before a quote, a backslash or a control character. high is
// true if one of them is above 0x7f; it may also be if only one of the next seven is.
func run(b []byte) (n int, high bool) {
	var seen uint64
	for len(b)-n >= 8 {
		x := binary.LittleEndian.Uint64(b[n:])
		seen |= x
		if stop := marks(x) &^ x & tops; stop != 0 {
			return n + bits.TrailingZeros64(stop)/8, seen&tops != 0
		}
		if n += 8; n == 24 { // not a key or a short value
			n += plain(b[n:])
		}
	}
	for ; n < len(b); n++ {
		ch := b[n]
		if ch == '"' || ch == '\\' || ch < ' ' {
			break
		}
		seen |= uint64(ch)
	}
	return n, seen&tops != 0
}

// plain is a number of bytes at the start of b, a multiple of 32, that are ASCII and none that
// run looks for: prompts are long, and most are that.
func plain(b []byte) int {
	rest := b
	for len(rest) >= 32 {
		w, x := binary.LittleEndian.Uint64(rest), binary.LittleEndian.Uint64(rest[8:])
		y, z := binary.LittleEndian.Uint64(rest[16:]), binary.LittleEndian.Uint64(rest[24:])
		if (marks(w)|marks(x)|marks(y)|marks(z)|w|x|y|z)&tops != 0 { // which one does not matter here
			break
		}
		rest = rest[32:]
	}
	return len(b) - len(rest)
}

// escape reads one escape sequence: bytes used, 0 if it is none, and the size of what it means
// in UTF-8.
func escape(b []byte) (used, size int) {
	if len(b) < 2 || b[0] != '\\' {
		return 0, 0
	}
	switch b[1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return 2, 1
	case 'u':
		return escapeU(b)
	}
	return 0, 0
}

func escapeU(b []byte) (used, size int) {
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

// string decodes the literal. It allocates; the hot path compares with is.
func (t text) string() string {
	if t.saved == 0 {
		return string(t.raw)
	}
	var s string
	if err := json.Unmarshal(slices.Concat([]byte{'"'}, t.raw, []byte{'"'}), &s); err != nil {
		return string(t.raw) // cannot be: str has checked the literal
	}
	return s
}
