package wire

import (
	"encoding/binary"
	"math"
)

// cursor reads MessagePack in place, for messages that come too often for the functions of msgp.
// Its methods return false for a value of another type, and for one that the bytes end amid; where
// the cursor then stands is not said. It takes no header on trust: a container has at least a byte
// for each value that it announces.
type cursor struct {
	b  []byte
	at int
}

// peek is the first byte of the next value, or one that begins none.
func (c *cursor) peek() byte {
	if c.at >= len(c.b) {
		return 0xc1
	}
	return c.b[c.at]
}

// null passes a nil, if that is what comes next.
func (c *cursor) null() bool {
	if c.peek() != 0xc0 {
		return false
	}
	c.at++
	return true
}

// isArray tells whether an array comes next.
func (c *cursor) isArray() bool {
	t := c.peek()
	return t>>4 == 0x9 || t == 0xdc || t == 0xdd
}

// isMap tells whether a map comes next.
func (c *cursor) isMap() bool {
	t := c.peek()
	return t>>4 == 0x8 || t == 0xde || t == 0xdf
}

// isText tells whether a string comes next.
func (c *cursor) isText() bool {
	t := c.peek()
	return t>>5 == 0b101 || t >= 0xd9 && t <= 0xdb
}

// array passes the header of an array of n values.
func (c *cursor) array() (n int, ok bool) {
	t := c.peek()
	switch {
	case t>>4 == 0x9:
		n, ok = int(t&0xf), true
		c.at++
	case t == 0xdc:
		n, ok = c.length(2)
	case t == 0xdd:
		n, ok = c.length(4)
	}
	return n, ok && n <= len(c.b)-c.at
}

// mapping passes the header of a map of n pairs.
func (c *cursor) mapping() (n int, ok bool) {
	t := c.peek()
	switch {
	case t>>4 == 0x8:
		n, ok = int(t&0xf), true
		c.at++
	case t == 0xde:
		n, ok = c.length(2)
	case t == 0xdf:
		n, ok = c.length(4)
	}
	return n, ok && 2*n <= len(c.b)-c.at
}

// length passes a type and a length of size bytes.
func (c *cursor) length(size int) (int, bool) {
	if len(c.b)-c.at < 1+size {
		return 0, false
	}
	v := 0
	for _, x := range c.b[c.at+1 : c.at+1+size] {
		v = v<<8 | int(x)
	}
	c.at += 1 + size
	return v, true
}

// take passes n bytes and returns them.
func (c *cursor) take(n int) ([]byte, bool) {
	if n > len(c.b)-c.at {
		return nil, false
	}
	b := c.b[c.at : c.at+n : c.at+n]
	c.at += n
	return b, true
}

// text passes a string.
func (c *cursor) text() (s []byte, ok bool) {
	n, t := 0, c.peek()
	switch {
	case t>>5 == 0b101:
		n, ok = int(t&0x1f), true
		c.at++
	case t >= 0xd9 && t <= 0xdb:
		n, ok = c.length(1 << (t - 0xd9))
	}
	if !ok {
		return nil, false
	}
	return c.take(n)
}

// binary passes a byte string.
func (c *cursor) binary() ([]byte, bool) {
	t := c.peek()
	if t < 0xc4 || t > 0xc6 {
		return nil, false
	}
	n, ok := c.length(1 << (t - 0xc4))
	if !ok {
		return nil, false
	}
	return c.take(n)
}

// integer passes an integer of any width and returns its 64 bits, two's complement.
func (c *cursor) integer() (bits uint64, negative, ok bool) {
	t := c.peek()
	switch {
	case t <= 0x7f:
		c.at++
		return uint64(t), false, true
	case t >= 0xe0:
		c.at++
		return uint64(int64(int8(t))), true, true
	case t < 0xcc || t > 0xd3:
		return 0, false, false
	}
	width := 1 << (t & 3)
	b, ok := c.take(1 + width)
	if !ok {
		return 0, false, false
	}
	for _, x := range b[1:] {
		bits = bits<<8 | uint64(x)
	}
	if t >= 0xd0 {
		bits = uint64(int64(bits<<(64-8*width)) >> (64 - 8*width))
		negative = int64(bits) < 0
	}
	return bits, negative, true
}

// uint32 passes an integer from 0 to 2^32-1.
func (c *cursor) uint32() (uint32, bool) {
	v, negative, ok := c.integer()
	return uint32(v & math.MaxUint32), ok && !negative && v <= math.MaxUint32
}

// number passes a number and returns it as a float.
func (c *cursor) number() (float64, bool) {
	switch c.peek() {
	case 0xca:
		b, ok := c.take(5)
		if !ok {
			return 0, false
		}
		return float64(math.Float32frombits(binary.BigEndian.Uint32(b[1:]))), true
	case 0xcb:
		b, ok := c.take(9)
		if !ok {
			return 0, false
		}
		return math.Float64frombits(binary.BigEndian.Uint64(b[1:])), true
	}
	bits, negative, ok := c.integer()
	if negative {
		return float64(int64(bits)), ok
	}
	return float64(bits), ok
}

// skip passes any value that nests at most levels deep; a value that holds none has 0.
func (c *cursor) skip(levels int) bool {
	t := c.peek()
	switch {
	case t <= 0x7f || t >= 0xe0 || t == 0xc0 || t == 0xc2 || t == 0xc3:
		c.at++
		return true
	case c.isText():
		_, ok := c.text()
		return ok
	case c.isArray():
		n, ok := c.array()
		return ok && c.skipAll(n, levels-1)
	case c.isMap():
		n, ok := c.mapping()
		return ok && c.skipAll(2*n, levels-1)
	case t >= 0xc4 && t <= 0xc6:
		_, ok := c.binary()
		return ok
	case t >= 0xc7 && t <= 0xc9: // extensions: a length, a type, the data
		n, ok := c.length(1 << (t - 0xc7))
		if ok {
			_, ok = c.take(1 + n)
		}
		return ok
	case t >= 0xd4 && t <= 0xd8:
		_, ok := c.take(2 + 1<<(t-0xd4))
		return ok
	case t == 0xca || t == 0xcb:
		_, ok := c.number()
		return ok
	case t != 0xc1:
		_, _, ok := c.integer()
		return ok
	}
	return false
}

func (c *cursor) skipAll(n, levels int) bool {
	if levels < 0 {
		return false
	}
	for ; n > 0; n-- {
		if !c.skip(levels) {
			return false
		}
	}
	return true
}
