package wire

import (
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"
)

var errTrailing = errors.New("bytes after the end")

// shape is what a struct looks like on the wire: a map with strings for keys.
type shape struct {
	names      []string
	required   uint // bit i: names[i] has to be there
	positional int  // a struct may come as an array of up to so many values, those of the first names; 0: it may not
}

// readMap reads b, which has to be one map and nothing after it. Of the known keys the first
// required ones have to be there. All else is as shape.read does it.
func readMap(b []byte, known []string, required int, read func(key int, b []byte) ([]byte, error)) error {
	s := shape{names: known, required: 1<<required - 1}
	rest, err := s.read(b, read)
	if err == nil && len(rest) > 0 {
		err = errTrailing
	}
	return err
}

// read reads the struct that b begins with and returns what follows it. The function read is
// called for each value that has a name with the name's index and the bytes from the value on,
// and returns what follows the value. No name may come twice, since it would then mean two
// things. Keys that are not known are skipped.
func (s *shape) read(b []byte, read func(key int, b []byte) ([]byte, error)) ([]byte, error) {
	if s.positional > 0 && msgp.NextType(b) == msgp.ArrayType {
		return s.readArray(b, read)
	}
	n, b, err := msgp.ReadMapHeaderBytes(b)
	if err != nil {
		return nil, err
	}
	var seen uint
	for ; n > 0; n-- {
		var name []byte
		if name, b, err = msgp.ReadStringZC(b); err != nil {
			return nil, fmt.Errorf("a key: %w", err)
		}
		key := index(s.names, name)
		if key < 0 {
			if b, err = skip(b); err != nil {
				return nil, fmt.Errorf("value of %.40q: %w", name, err)
			}
			continue
		}
		if seen&(1<<key) != 0 {
			return nil, fmt.Errorf("%s comes twice", name)
		}
		seen |= 1 << key
		if b, err = read(key, b); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return b, s.missing(seen)
}

// readArray reads a struct without its keys.
func (s *shape) readArray(b []byte, read func(key int, b []byte) ([]byte, error)) ([]byte, error) {
	n, b, err := msgp.ReadArrayHeaderBytes(b)
	if err != nil {
		return nil, err
	}
	if uint64(n) > uint64(s.positional) {
		return nil, fmt.Errorf("%d values instead of %d", n, s.positional)
	}
	for key := range int(n) {
		if b, err = read(key, b); err != nil {
			return nil, fmt.Errorf("%s: %w", s.names[key], err)
		}
	}
	return b, s.missing(1<<n - 1)
}

// missing reports the first of the required names that has not been seen.
func (s *shape) missing(seen uint) error {
	for key, name := range s.names {
		if s.required&^seen&(1<<key) != 0 {
			return fmt.Errorf("%s is missing", name)
		}
	}
	return nil
}

func index(known []string, name []byte) int {
	for i, k := range known {
		if string(name) == k {
			return i
		}
	}
	return -1
}

// readString reads text, which has to be UTF-8, into a string of its own.
func readString(b []byte) (string, []byte, error) {
	text, rest, err := msgp.ReadStringZC(b)
	if err == nil && !utf8.Valid(text) {
		err = errors.New("text that is not UTF-8")
	}
	return string(text), rest, err
}

// readOptional reads a number, or nil where there is none.
func readOptional(b []byte) (*uint64, []byte, error) {
	if msgp.IsNil(b) {
		return nil, b[1:], nil
	}
	n, rest, err := msgp.ReadUint64Bytes(b)
	if err != nil {
		return nil, b, err
	}
	return &n, rest, nil
}

// skip returns what follows the value that b begins with. It goes without recursion, so that
// no nesting can exhaust the stack, and gives up as soon as a container announces more values
// than there are bytes left.
func skip(b []byte) ([]byte, error) {
	for values := uint64(1); values > 0; values-- {
		var n uint32
		var err error
		switch msgp.NextType(b) {
		case msgp.MapType:
			n, b, err = msgp.ReadMapHeaderBytes(b)
			values += 2 * uint64(n)
		case msgp.ArrayType:
			n, b, err = msgp.ReadArrayHeaderBytes(b)
			values += uint64(n)
		default:
			b, err = msgp.Skip(b)
		}
		if err != nil {
			return nil, err
		}
		if values-1 > uint64(len(b)) {
			return nil, msgp.ErrShortBytes
		}
	}
	return b, nil
}
