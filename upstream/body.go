package upstream

import (
	"fmt"
	"io"
)

const (
	maxChunkLine = 4 << 10  // size and extensions of one chunk, or one trailer line
	maxTrailer   = 64 << 10 // all trailer lines of a body
)

// framing is how the end of a body is known.
type framing uint8

const (
	noBody     framing = iota // 204, 304 and answers to HEAD
	byLength                  // Content-Length
	byChunks                  // Transfer-Encoding: chunked
	untilClose                // neither
)

// chunkPart is what comes next in a chunked body.
type chunkPart uint8

const (
	chunkSize    chunkPart = iota // the line with the size
	chunkData                     // left bytes of data
	chunkDataEnd                  // the CRLF after them
	chunkTrailer                  // lines up to an empty one
)

// body takes the body's bytes out of what was received.
type body struct {
	framing framing
	part    chunkPart
	left    int64 // bytes missing of the body (byLength) or of the chunk (chunkData)
	trailer int   // bytes of trailer lines seen
}

// next takes all body bytes that in holds; they are valid until in is filled again. io.EOF
// comes with the last ones, ErrFraming with those before the fault. No error means more
// input is needed.
func (b *body) next(in *input) ([]byte, error) {
	switch b.framing {
	case byLength:
		n := int(min(b.left, int64(in.w-in.r)))
		data := in.buf[in.r : in.r+n]
		in.r += n
		b.left -= int64(n)
		if b.left == 0 {
			return data, io.EOF
		}
		return data, nil
	case byChunks:
		return b.dechunk(in)
	case untilClose:
		data := in.buf[in.r:in.w]
		in.r = in.w
		return data, nil
	default:
		return nil, io.EOF
	}
}

// dechunk moves the data of all chunks together, in place: data only ever moves towards the
// front, over chunk lines that are used up. A single chunk does not move.
func (b *body) dechunk(in *input) ([]byte, error) {
	start, end := 0, 0
	for in.r < in.w {
		switch b.part {
		case chunkData:
			n := int(min(b.left, int64(in.w-in.r)))
			if start == end {
				start, end = in.r, in.r+n
			} else {
				end += copy(in.buf[end:], in.buf[in.r:in.r+n])
			}
			in.r += n
			if b.left -= int64(n); b.left == 0 {
				b.part = chunkDataEnd
			}
		case chunkDataEnd:
			if in.buf[in.r] != '\r' || in.w-in.r > 1 && in.buf[in.r+1] != '\n' {
				return in.buf[start:end], fmt.Errorf("%w: no CRLF after chunk data", ErrFraming)
			}
			if in.w-in.r == 1 {
				return in.buf[start:end], nil
			}
			in.r += 2
			b.part = chunkSize
		default:
			line, ok, err := in.line(maxChunkLine)
			if ok {
				err = b.takeLine(line)
			}
			if !ok || err != nil {
				return in.buf[start:end], err
			}
		}
	}
	return in.buf[start:end], nil
}

// takeLine uses a chunk line or a trailer line; io.EOF is the end of the body.
func (b *body) takeLine(line []byte) error {
	if b.part == chunkTrailer {
		if len(line) == 0 {
			return io.EOF
		}
		if b.trailer += len(line) + len(crlf); b.trailer > maxTrailer {
			return fmt.Errorf("%w: trailer of more than %d bytes", ErrFraming, maxTrailer)
		}
		if _, _, ok := splitLine(string(line)); !ok {
			return fmt.Errorf("%w: trailer line %.64q", ErrFraming, line)
		}
		return nil
	}
	size, err := parseChunkSize(line)
	if err != nil {
		return err
	}
	b.left, b.part = size, chunkData
	if size == 0 {
		b.part = chunkTrailer
	}
	return nil
}

// parseChunkSize reads the hexadecimal number before white space, extensions or the end.
func parseChunkSize(line []byte) (int64, error) {
	var size int64
	i := 0
	for ; i < len(line); i++ {
		c := line[i]
		var digit byte
		switch {
		case '0' <= c && c <= '9':
			digit = c - '0'
		case 'a' <= c && c <= 'f':
			digit = c - 'a' + 10
		case 'A' <= c && c <= 'F':
			digit = c - 'A' + 10
		default:
			digit = 16
		}
		if digit == 16 {
			break
		}
		if i == 15 { // 60 bits are enough, and cannot overflow
			return 0, fmt.Errorf("%w: chunk size of more than 15 digits", ErrFraming)
		}
		size = size<<4 | int64(digit)
	}
	rest := i
	for rest < len(line) && (line[rest] == ' ' || line[rest] == '\t') {
		rest++
	}
	if i == 0 || rest < len(line) && line[rest] != ';' {
		return 0, fmt.Errorf("%w: chunk size %.32q", ErrFraming, line)
	}
	return size, nil
}
