// Package jsonhttp is what our JSON services have in common on the wire: bodies of requests become
// Go values, the first thing that is wrong with one decides the answer, and answers are written.
package jsonhttp

import (
	"fmt"
	"math"
	"net/http"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"

	"spillway/httperr"
)

// Decoder reads one JSON value from the left. The first thing that is wrong decides the answer:
// 400 where the bytes are not JSON, 422 where they are and mean nothing here. What follows the
// value is not looked at. encoding/json differs in all of this: it takes field names in any letter
// case, the last of repeated fields, null for absent, and any bytes for text.
type Decoder struct {
	b       []byte
	i       int
	scratch []byte // of strings that have escapes
}

// Field is one field of a body that a route knows, to be read into an R.
type Field[R any] struct {
	name     string
	required bool
	read     func(d *Decoder, name string, r *R) *httperr.Error
}

// Reset has d read body from its first byte.
func (d *Decoder) Reset(body []byte) { d.b, d.i = body, 0 }

// Read is the number of bytes that were read.
func (d *Decoder) Read() int { return d.i }

func (d *Decoder) notJSON(what string) *httperr.Error {
	if d.i >= len(d.b) {
		return httperr.New(http.StatusBadRequest, "the body ends too early: "+what)
	}
	return httperr.New(http.StatusBadRequest, fmt.Sprintf("the body is not JSON at byte %d: %s", d.i, what))
}

func wrong(field, format string, args ...any) *httperr.Error {
	return httperr.New(http.StatusUnprocessableEntity, field+": "+fmt.Sprintf(format, args...))
}

// peek skips white space and returns the next byte, or 0 at the end.
func (d *Decoder) peek() byte {
	for d.i < len(d.b) {
		switch c := d.b[d.i]; c {
		case ' ', '\n', '\t', '\r':
			d.i++
		default:
			return c
		}
	}
	return 0
}

// Object reads an object with the given fields, at most 32, into r. A field that r does not know
// is passed over; one that comes twice is an error.
func Object[R any](d *Decoder, fields []Field[R], r *R) *httperr.Error {
	if c := d.peek(); c != '{' {
		return d.mismatch("the body", "an object")
	}
	d.i++
	var seen uint32
	for first := true; ; first = false {
		switch c := d.peek(); {
		case c == '}':
			d.i++
			for n := range fields {
				if f := &fields[n]; f.required && seen&(1<<n) == 0 {
					return wrong(f.name, "the field is missing")
				}
			}
			return nil
		case first:
		case c != ',':
			return d.notJSON("a comma or a closing brace is missing")
		default:
			d.i++
			d.peek()
		}
		if err := member(d, fields, &seen, r); err != nil {
			return err
		}
	}
}

// member reads a name and its value.
func member[R any](d *Decoder, fields []Field[R], seen *uint32, r *R) *httperr.Error {
	if d.i >= len(d.b) || d.b[d.i] != '"' {
		return d.notJSON("a field name is missing")
	}
	name, err := d.text()
	if err != nil {
		return err
	}
	known := -1
	for n := range fields {
		if fields[n].name == string(name) {
			known = n
			if *seen&(1<<n) != 0 {
				return wrong(fields[n].name, "the field is given twice")
			}
			*seen |= 1 << n
		}
	}
	if d.peek() != ':' {
		return d.notJSON("a colon is missing")
	}
	d.i++
	d.peek()
	if known < 0 {
		return d.skip()
	}
	return fields[known].read(d, fields[known].name, r)
}

// mismatch is for a value that is not of the kind wanted: it must still be JSON as far as it says
// what kind it is.
func (d *Decoder) mismatch(field, want string) *httperr.Error {
	got := ""
	switch c := d.peek(); {
	case c == '{':
		got = "an object"
	case c == '[':
		got = "an array"
	case c == '"':
		if _, err := d.text(); err != nil {
			return err
		}
		got = "a string"
	case c == '-' || c >= '0' && c <= '9':
		number, err := d.number()
		if err != nil {
			return err
		}
		if got = "a number"; len(number) <= 32 {
			got = string(number)
		}
	default:
		word, err := d.word()
		if err != nil {
			return err
		}
		got = word
	}
	return wrong(field, "%s instead of %s", got, want)
}

// word reads null, true or false.
func (d *Decoder) word() (string, *httperr.Error) {
	for _, w := range [...]string{"null", "true", "false"} {
		if d.i >= len(d.b) || d.b[d.i] != w[0] {
			continue
		}
		for n := range len(w) {
			if d.i >= len(d.b) || d.b[d.i] != w[n] {
				return "", d.notJSON("not a word of JSON")
			}
			d.i++
		}
		return w, nil
	}
	return "", d.notJSON("a value is missing")
}

// number reads a number and returns its text. Numbers beyond a float64 are refused.
func (d *Decoder) number() ([]byte, *httperr.Error) {
	text, whole, err := d.digits()
	if err == nil && (!whole || len(text) > 300) {
		if v, _ := strconv.ParseFloat(string(text), 64); math.IsInf(v, 0) {
			return nil, d.notJSON("a number is out of range")
		}
	}
	return text, err
}

// digits reads the text of a number; whole tells that it has neither fraction nor exponent.
func (d *Decoder) digits() (text []byte, whole bool, err *httperr.Error) {
	from := d.i
	run := func() bool {
		at := d.i
		for d.i < len(d.b) && d.b[d.i] >= '0' && d.b[d.i] <= '9' {
			d.i++
		}
		return d.i > at
	}
	if d.i < len(d.b) && d.b[d.i] == '-' {
		d.i++
	}
	zero := d.i < len(d.b) && d.b[d.i] == '0'
	if zero {
		if d.i++; d.i < len(d.b) && d.b[d.i] >= '0' && d.b[d.i] <= '9' {
			return nil, false, d.notJSON("a number begins with a zero")
		}
	} else if !run() {
		return nil, false, d.notJSON("a digit is missing")
	}
	whole = true
	if d.i < len(d.b) && d.b[d.i] == '.' {
		whole = false
		if d.i++; !run() {
			return nil, false, d.notJSON("a digit is missing")
		}
	}
	if d.i < len(d.b) && (d.b[d.i] == 'e' || d.b[d.i] == 'E') {
		whole = false
		if d.i++; d.i < len(d.b) && (d.b[d.i] == '+' || d.b[d.i] == '-') {
			d.i++
		}
		if !run() {
			return nil, false, d.notJSON("a digit is missing")
		}
	}
	return d.b[from:d.i], whole, nil
}

// text reads a string, which must be valid UTF-8. The result is good until the next call.
func (d *Decoder) text() ([]byte, *httperr.Error) {
	d.i++
	from := d.i
	for d.i < len(d.b) {
		switch c := d.b[d.i]; {
		case c == '"':
			s := d.b[from:d.i]
			if !utf8.Valid(s) {
				return nil, d.notJSON("a string is not UTF-8")
			}
			d.i++
			return s, nil
		case c == '\\':
			return d.escaped(from)
		case c < ' ':
			return nil, d.notJSON("a control character in a string")
		}
		d.i++
	}
	return nil, d.notJSON("a string does not end")
}

// escaped goes on with a string that began at from and has its first escape here.
func (d *Decoder) escaped(from int) ([]byte, *httperr.Error) {
	d.scratch = append(d.scratch[:0], d.b[from:d.i]...)
	for d.i < len(d.b) {
		switch c := d.b[d.i]; {
		case c == '"':
			if !utf8.Valid(d.scratch) {
				return nil, d.notJSON("a string is not UTF-8")
			}
			d.i++
			return d.scratch, nil
		case c == '\\':
			r, err := d.escape()
			if err != nil {
				return nil, err
			}
			d.scratch = utf8.AppendRune(d.scratch, r)
		case c < ' ':
			return nil, d.notJSON("a control character in a string")
		default:
			d.scratch = append(d.scratch, c)
			d.i++
		}
	}
	return nil, d.notJSON("a string does not end")
}

var plain = [256]rune{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// escape reads an escape sequence; one half of a pair alone means no character.
func (d *Decoder) escape() (rune, *httperr.Error) {
	first, isRune, err := d.unit()
	if err != nil || isRune || !utf16.IsSurrogate(first) {
		return first, err
	}
	if d.i+1 < len(d.b) && d.b[d.i] == '\\' && d.b[d.i+1] == 'u' {
		second, _, err := d.unit()
		if err != nil {
			return 0, err
		}
		if r := utf16.DecodeRune(first, second); r != utf8.RuneError {
			return r, nil
		}
	}
	return 0, d.notJSON("half of a surrogate pair")
}

// unit reads one escape sequence: a character or, from \u, a UTF-16 unit.
func (d *Decoder) unit() (r rune, isRune bool, err *httperr.Error) {
	d.i++
	if d.i >= len(d.b) {
		return 0, false, d.notJSON("a string does not end")
	}
	c := d.b[d.i]
	if c != 'u' {
		if plain[c] == 0 {
			return 0, false, d.notJSON("an unknown escape")
		}
		d.i++
		return plain[c], true, nil
	}
	for range 4 {
		d.i++
		if d.i >= len(d.b) {
			return 0, false, d.notJSON("a string does not end")
		}
		v := hexDigit(d.b[d.i])
		if v < 0 {
			return 0, false, d.notJSON("not a hexadecimal digit")
		}
		r = r<<4 | v
	}
	d.i++
	return r, false, nil
}

func hexDigit(c byte) rune {
	switch {
	case c >= '0' && c <= '9':
		return rune(c - '0')
	case c >= 'a' && c <= 'f':
		return rune(c-'a') + 10
	case c >= 'A' && c <= 'F':
		return rune(c-'A') + 10
	}
	return -1
}
