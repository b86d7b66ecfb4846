package upstream

import (
	"bytes"
	"fmt"
	"io"
	"sync"
)

// readBytes is the size of the buffer that an open response holds.
const readBytes = 16 << 10

var (
	crlf    = []byte("\r\n")
	headEnd = []byte("\r\n\r\n")

	readBuffers = sync.Pool{New: func() any { return new([readBytes]byte) }}
)

// input is the bytes received and not yet used: buf[r:w]. It has a buffer only between the
// first fill and release.
type input struct {
	buf    []byte
	pooled *[readBytes]byte // what buf is, unless a large head made it grow
	r, w   int
}

// fill reads once from src, making room first. What was handed out before is overwritten.
func (in *input) fill(src io.Reader) error {
	in.makeRoom()
	n, err := src.Read(in.buf[in.w:])
	if n > 0 {
		in.w += n
		return nil
	}
	if err == nil {
		return io.ErrNoProgress
	}
	return err
}

// makeRoom sees to it that there is room behind w. Only a head grows the buffer: a body is
// always used up but for a piece of a chunk line.
func (in *input) makeRoom() {
	rest := in.buf[in.r:in.w]
	switch {
	case in.pooled == nil && len(rest) <= readBytes/2:
		in.pooled = readBuffers.Get().(*[readBytes]byte)
		in.buf = in.pooled[:]
	case in.r == 0 && in.w == len(in.buf):
		grown := make([]byte, 2*len(in.buf))
		copy(grown, rest)
		in.recycle()
		in.buf = grown
		return
	case in.r < in.w && in.w < len(in.buf):
		return
	}
	in.r, in.w = 0, copy(in.buf, rest)
}

func (in *input) recycle() {
	if in.pooled != nil {
		readBuffers.Put(in.pooled)
		in.pooled = nil
	}
}

// idle gives the buffer back if there is nothing in it: a stream waits most of its time.
func (in *input) idle() {
	if in.r == in.w && in.pooled != nil {
		in.release()
	}
}

// release gives the buffer back.
func (in *input) release() {
	in.recycle()
	*in = input{}
}

// line takes the next line, without its CRLF, if all of it is there. A line of more than max
// bytes, or one with another line end in it, is ErrFraming.
func (in *input) line(max int) (line []byte, ok bool, err error) {
	rest := in.buf[in.r:in.w]
	end := bytes.IndexByte(rest, '\n')
	switch {
	case end > max, end < 0 && len(rest) > max:
		return nil, false, fmt.Errorf("%w: line of more than %d bytes", ErrFraming, max)
	case end < 0:
		return nil, false, nil
	case end == 0 || bytes.IndexByte(rest[:end], '\r') != end-1:
		return nil, false, fmt.Errorf("%w: line is not ended by CRLF", ErrFraming)
	}
	in.r += end + 1
	return rest[:end-1], true, nil
}
