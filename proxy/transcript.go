package proxy

import (
	"bytes"
	"encoding/binary"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/zeebo/xxh3"

	"spillway/kvhash"
)

// transcript goes once more through what makes the prompt of a body, which scan has found valid, and
// adds the text to a hash: all that tallies have counted, and nothing else.
type transcript struct {
	cursor
	text *kvhash.Text
}

// write adds the prompt to text. It needs check to have passed.
func (s *scanned) write(body []byte, text *kvhash.Text) {
	t := transcript{cursor{b: body, skim: true}, text}
	for _, p := range s.parts {
		switch {
		case p.span == span{}:
		case p.asWritten:
			text.Add(body[p.from:p.to])
		default:
			t.i = p.from
			_ = t.value(1) // it was read before without an error
		}
	}
}

// value adds the text of any value, as tally.value counts it.
func (t *transcript) value(depth int) error {
	switch ch := t.peek(); ch {
	case byte(str):
		s, err := t.cursor.value()
		t.string(s.raw)
		return err
	case byte(array):
		return t.array(func() error { return t.value(depth + 1) })
	case byte(object):
	default:
		return t.skip(depth)
	}
	return t.object(func(key text) error {
		switch {
		case key.is("type"):
			return t.skip(depth + 1)
		case medium(key) || key.is("source") && t.peek() == byte(object):
			given := kindOf(t.peek()).given()
			from := t.i
			err := t.skip(depth + 1)
			if given {
				t.medium(t.b[from:t.i])
			}
			return err
		}
		return t.value(depth + 1)
	})
}

// string adds what a literal means.
func (t *transcript) string(raw []byte) {
	for {
		n := bytes.IndexByte(raw, '\\')
		if n < 0 {
			t.text.Add(raw)
			return
		}
		t.text.Add(raw[:n])
		var room [utf8.UTFMax]byte
		meant, used := unescape(room[:0], raw[n:])
		t.text.Add(meant)
		raw = raw[n+used:]
	}
}

// unescape appends what one escape sequence means to dst. used is its length, all of b if it is none,
// which cannot be.
func unescape(dst, b []byte) (meant []byte, used int) {
	used, _ = escape(b)
	switch {
	case used == 0:
		return dst, len(b)
	case used > 2:
		r, _ := hex4(b[2:])
		if used == 12 {
			low, _ := hex4(b[8:])
			r = utf16.DecodeRune(r, low)
		}
		return utf8.AppendRune(dst, r), used // U+FFFD of a lone surrogate
	}
	ch := b[1]
	switch ch {
	case 'b':
		ch = '\b'
	case 'f':
		ch = '\f'
	case 'n':
		ch = '\n'
	case 'r':
		ch = '\r'
	case 't':
		ch = '\t'
	}
	return append(dst, ch), used
}

// medium adds as many bytes for an image, a sound or a file as it counts for in text. They are other
// ones for another medium.
func (t *transcript) medium(raw []byte) {
	var stand [tokensPerMedium * bytesPerToken]byte
	h := xxh3.Hash(raw)
	for i := 0; i < len(stand); i += 4 {
		binary.LittleEndian.PutUint32(stand[i:], uint32(h>>(i%8*8)))
	}
	t.text.Add(stand[:])
}

// appendIDs appends the token IDs of a prompt that consists of numbers, in one list or in a list within
// it: the first ones, so that dst has no more than most. It reports false if one of all can be none.
func (s *scanned) appendIDs(dst []uint32, body []byte, most int) (ids []uint32, ok bool) {
	c := cursor{b: body, i: s.promptsSpan.from}
	ok = true
	var list func() error
	list = func() error {
		if c.peek() == byte(array) {
			return c.array(list)
		}
		digits, err := c.number()
		id, bad := strconv.ParseUint(string(digits), 10, 32)
		ok = ok && bad == nil
		if len(dst) < most {
			dst = append(dst, uint32(id))
		}
		return err
	}
	err := list()
	return dst, ok && err == nil
}
