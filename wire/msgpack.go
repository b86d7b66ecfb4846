package wire

import (
	"errors"
	"fmt"

	"github.com/tinylib/msgp/msgp"
)

var errTrailing = errors.New("bytes after the end")

// readMap reads b, which has to be one map with strings for keys and nothing after it. read is
// called for each of the known keys with its index and the bytes from the value on, and returns
// what follows the value. Of the known keys the first required ones have to be there, and none
// may come twice, since it would then mean two things. Other keys are skipped.
func readMap(b []byte, known []string, required int, read func(key int, b []byte) ([]byte, error)) error {
	n, b, err := msgp.ReadMapHeaderBytes(b)
	if err != nil {
		return err
	}
	var seen uint
	for ; n > 0; n-- {
		var name []byte
		if name, b, err = msgp.ReadStringZC(b); err != nil {
			return fmt.Errorf("a key: %w", err)
		}
		key := index(known, name)
		if key < 0 {
			if b, err = skip(b); err != nil {
				return fmt.Errorf("value of %.40q: %w", name, err)
			}
			continue
		}
		if seen&(1<<key) != 0 {
			return fmt.Errorf("%s comes twice", name)
		}
		seen |= 1 << key
		if b, err = read(key, b); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	for key := range required {
		if seen&(1<<key) == 0 {
			return fmt.Errorf("%s is missing", known[key])
		}
	}
	if len(b) > 0 {
		return errTrailing
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
