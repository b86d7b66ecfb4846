package jsonhttp

import (
	"math"
	"strconv"

	"spillway/httperr"
)

// String is a field of text.
func String[R any](name string, required bool, to func(*R) *string) Field[R] {
	return Field[R]{name, required, func(d *Decoder, name string, r *R) *httperr.Error {
		if d.peek() != '"' {
			return d.mismatch(name, "a string")
		}
		s, err := d.text()
		*to(r) = string(s)
		return err
	}}
}

// Uint32 is a field with an integer from 0 to 2^32-1.
func Uint32[R any](name string, required bool, to func(*R) *uint32) Field[R] {
	return Field[R]{name, required, func(d *Decoder, name string, r *R) *httperr.Error {
		v, err := d.unsigned(name, math.MaxUint32)
		*to(r) = uint32(v)
		return err
	}}
}

// Optional is a field that need not be there, and for which null is the same as its absence.
func Optional[R any](f Field[R]) Field[R] {
	return Field[R]{f.name, false, func(d *Decoder, name string, r *R) *httperr.Error {
		if d.peek() == 'n' {
			_, err := d.word()
			return err
		}
		return f.read(d, name, r)
	}}
}

// Uint64 is a field with an integer from 0 to 2^64-1.
func Uint64[R any](name string, required bool, to func(*R) *uint64) Field[R] {
	return Field[R]{name, required, func(d *Decoder, name string, r *R) (err *httperr.Error) {
		*to(r), err = d.unsigned(name, math.MaxUint64)
		return err
	}}
}

// Share is a field with a number from 0 to 1.
func Share[R any](name string, required bool, to func(*R) **float64) Field[R] {
	return Field[R]{name, required, func(d *Decoder, name string, r *R) *httperr.Error {
		v, err := d.share(name)
		*to(r) = &v
		return err
	}}
}

// Hashes is a field with an array of signed integers of 64 bits, whose bits are hashes. They are
// appended to what is there.
func Hashes[R any](name string, required bool, to func(*R) *[]uint64) Field[R] {
	return Field[R]{name, required, func(d *Decoder, name string, r *R) *httperr.Error {
		return d.hashes(name, to(r))
	}}
}

// Uint32s is a field with an array of integers from 0 to 2^32-1. They are appended to what is there.
func Uint32s[R any](name string, required bool, to func(*R) *[]uint32) Field[R] {
	return Field[R]{name, required, func(d *Decoder, name string, r *R) *httperr.Error {
		all := to(r)
		return d.array(name, func() *httperr.Error {
			v, ok := d.small()
			if !ok {
				return d.mismatch(name+"["+strconv.Itoa(len(*all))+"]", "an integer from 0 to 4294967295")
			}
			*all = append(*all, v)
			return nil
		})
	}}
}

// unsigned reads an integer from 0 to most.
func (d *Decoder) unsigned(field string, most uint64) (uint64, *httperr.Error) {
	c := d.peek()
	if c != '-' && (c < '0' || c > '9') {
		return 0, d.mismatch(field, "a number")
	}
	text, err := d.number()
	if err != nil {
		return 0, err
	}
	v, failed := strconv.ParseUint(string(text), 10, 64)
	if failed != nil || v > most {
		return 0, wrong(field, "%.32s is not an integer from 0 to %d", text, most)
	}
	return v, nil
}

// hashes reads signed integers of 64 bits, whose bits are the hashes.
func (d *Decoder) hashes(name string, to *[]uint64) *httperr.Error {
	return d.array(name, func() *httperr.Error {
		h, ok := d.hash()
		if !ok {
			return d.badHash(name + "[" + strconv.Itoa(len(*to)) + "]")
		}
		*to = append(*to, h)
		return nil
	})
}

// array reads an array, each element of which element reads.
func (d *Decoder) array(name string, element func() *httperr.Error) *httperr.Error {
	if d.peek() != '[' {
		return d.mismatch(name, "an array")
	}
	d.i++
	for first := true; ; first = false {
		switch c := d.peek(); {
		case c == ']' && first:
			d.i++
			return nil
		case first:
		case c == ']':
			d.i++
			return nil
		case c != ',':
			return d.notJSON("a comma or a closing bracket is missing")
		default:
			if d.i++; d.peek() == ']' {
				return d.notJSON("a comma before the closing bracket")
			}
		}
		if err := element(); err != nil {
			return err
		}
	}
}

// small reads an integer of 32 bits. If there is something else here it stays where it is.
func (d *Decoder) small() (uint32, bool) {
	h, ok := uint64(0), false
	if at := d.i; at < len(d.b) && d.b[at] != '-' {
		if h, ok = d.hash(); h > math.MaxUint32 {
			d.i, ok = at, false
		}
	}
	return uint32(h), ok
}

// hash reads an integer of 64 bits. If there is something else here it stays where it is.
func (d *Decoder) hash() (uint64, bool) {
	i := d.i
	negative := i < len(d.b) && d.b[i] == '-'
	if negative {
		i++
	}
	from, v := i, uint64(0)
	for i < len(d.b) && d.b[i] >= '0' && d.b[i] <= '9' && i-from < 19 {
		v = v*10 + uint64(d.b[i]-'0') // 19 digits fit
		i++
	}
	switch {
	case i == from, d.b[from] == '0' && (i > from+1 || negative):
		return 0, false
	case v > 1<<63 || v == 1<<63 && !negative:
		return 0, false
	case i < len(d.b) && (d.b[i] >= '0' && d.b[i] <= '9' || d.b[i] == '.' || d.b[i] == 'e' || d.b[i] == 'E'):
		return 0, false
	}
	d.i = i
	if negative {
		v = -v
	}
	return v, true
}

func (d *Decoder) badHash(field string) *httperr.Error {
	return d.mismatch(field, "an integer of 64 bits with sign")
}

// share reads a number from 0 to 1.
func (d *Decoder) share(field string) (float64, *httperr.Error) {
	c := d.peek()
	if c != '-' && (c < '0' || c > '9') {
		return 0, d.mismatch(field, "a number")
	}
	text, err := d.number()
	if err != nil {
		return 0, err
	}
	v, failed := strconv.ParseFloat(string(text), 64)
	if failed != nil || v < 0 || v > 1 {
		return 0, wrong(field, "%.32s is not from 0 to 1", text)
	}
	return v, nil
}
