package jsonhttp

import (
	"math"
	"net/http"
	"strconv"

	"spillway/httperr"
)

// Custom is a field that read reads, which gets its name for what it has to say.
func Custom[R any](name string, required bool, read func(d *Decoder, name string, r *R) *httperr.Error) Field[R] {
	return Field[R]{name, required, read}
}

// Float is a field with a number.
func Float[R any](name string, required bool, to func(*R) *float64) Field[R] {
	return Custom(name, required, func(d *Decoder, name string, r *R) (err *httperr.Error) {
		*to(r), err = d.Float(name)
		return err
	})
}

// Bool is a field that is true or false.
func Bool[R any](name string, required bool, to func(*R) *bool) Field[R] {
	return Custom(name, required, func(d *Decoder, name string, r *R) *httperr.Error {
		if c := d.peek(); c != 't' && c != 'f' {
			return d.mismatch(name, "a boolean")
		}
		word, err := d.word()
		*to(r) = word == "true"
		return err
	})
}

// Nested is a field with an object that has fields itself, and which make makes.
func Nested[R, S any](name string, required bool, made func(*R) *S, fields []Field[S]) Field[R] {
	return Custom(name, required, func(d *Decoder, name string, r *R) *httperr.Error {
		if failed := d.Nested(name); failed != nil {
			return failed
		}
		return Object(d, fields, made(r))
	})
}

// Strings is a field with an array of strings.
func Strings[R any](name string, required bool, to func(*R) *[]string) Field[R] {
	return Custom(name, required, func(d *Decoder, name string, r *R) *httperr.Error {
		*to(r) = []string{}
		return d.Array(name, func(i int) *httperr.Error {
			s, err := d.Text(name)
			*to(r) = append(*to(r), s)
			return err
		})
	})
}

// Uint64s is a field with an array of integers from 0 to 2^64-1.
func Uint64s[R any](name string, required bool, to func(*R) *[]uint64) Field[R] {
	return Custom(name, required, func(d *Decoder, name string, r *R) *httperr.Error {
		*to(r) = []uint64{}
		return d.Array(name, func(i int) *httperr.Error {
			v, err := d.unsigned(name+"["+strconv.Itoa(i)+"]", math.MaxUint64)
			*to(r) = append(*to(r), v)
			return err
		})
	})
}

// Malformed is the failure of a body that is JSON and means nothing here.
func Malformed(field, format string, args ...any) *httperr.Error {
	return wrong(field, format, args...)
}

// Text reads a string.
func (d *Decoder) Text(field string) (string, *httperr.Error) {
	if d.peek() != '"' {
		return "", d.mismatch(field, "a string")
	}
	s, err := d.text()
	return string(s), err
}

// Uint reads an integer from 0 to most.
func (d *Decoder) Uint(field string, most uint64) (uint64, *httperr.Error) {
	return d.unsigned(field, most)
}

// Float reads a number.
func (d *Decoder) Float(field string) (float64, *httperr.Error) {
	if c := d.peek(); c != '-' && (c < '0' || c > '9') {
		return 0, d.mismatch(field, "a number")
	}
	text, err := d.number()
	if err != nil {
		return 0, err
	}
	v, failed := strconv.ParseFloat(string(text), 64)
	if failed != nil {
		return 0, httperr.New(http.StatusBadRequest, field+": a number is out of range")
	}
	return v, nil
}

// Nested fails unless an object begins here.
func (d *Decoder) Nested(field string) *httperr.Error {
	if d.peek() != '{' {
		return d.mismatch(field, "an object")
	}
	return nil
}

// Null passes over a null, if there is one.
func (d *Decoder) Null() (bool, *httperr.Error) {
	if d.peek() != 'n' {
		return false, nil
	}
	_, err := d.word()
	return err == nil, err
}

// Array reads an array, whose elements element reads.
func (d *Decoder) Array(field string, element func(i int) *httperr.Error) *httperr.Error {
	n := -1
	return d.array(field, func() *httperr.Error {
		n++
		return element(n)
	})
}

// Entries reads an object of any names, whose values value reads. Of a name that comes twice the
// last one counts if value has it so.
func (d *Decoder) Entries(field string, value func(name string) *httperr.Error) *httperr.Error {
	if d.peek() != '{' {
		return d.mismatch(field, "an object")
	}
	d.i++
	for first := true; ; first = false {
		switch c := d.peek(); {
		case c == '}' && first:
			d.i++
			return nil
		case first:
		case c == '}':
			d.i++
			return nil
		case c != ',':
			return d.notJSON("a comma or a closing brace is missing")
		default:
			d.i++
		}
		if d.peek() != '"' {
			return d.notJSON("a field name is missing")
		}
		text, err := d.text()
		if err != nil {
			return err
		}
		name := string(text)
		if d.peek() != ':' {
			return d.notJSON("a colon is missing")
		}
		d.i++
		d.peek()
		if err := value(name); err != nil {
			return err
		}
	}
}
