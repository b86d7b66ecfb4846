package proxy

import (
	"bytes"
	"errors"
)

// maxEvent bounds one SSE event in bytes.
const maxEvent = 16 << 20

var errEventTooLarge = errors.New("an event exceeds 16 MiB")

// splitter cuts a byte stream into SSE events. An event ends at a blank line; lines end with LF,
// CRLF or CR. It finds ends only: the bytes are relayed as they came.
type splitter struct {
	line  int  // bytes so far in the unfinished line
	event int  // bytes so far in the unfinished event
	cr    bool // the last byte was a CR that ended a line; an LF now belongs to it
}

// next returns how many bytes of b belong to the current event up to its end, or -1 if b ends
// before it. The state carries over, so b must be what follows the bytes of the last call.
func (s *splitter) next(b []byte) int {
	i := 0
	if s.cr && len(b) > 0 {
		s.cr = false
		if b[0] == '\n' {
			i = 1
		}
	}
	for i < len(b) {
		j := indexEOL(b[i:])
		if j < 0 {
			s.line += len(b) - i
			break
		}
		s.line += j
		i += j + 1
		if b[i-1] == '\r' {
			if i < len(b) && b[i] == '\n' {
				i++
			} else if i == len(b) {
				s.cr = true
			}
		}
		blank := s.line == 0
		s.line = 0
		if blank {
			s.event = 0
			return i
		}
	}
	s.event += len(b)
	return -1
}

// indexEOL is the index of the first LF or CR, or -1. It looks through stretches that grow, so
// that neither a far LF nor a far CR is looked for again at every line: lines are foreign, and the
// time they take must not grow with their square.
func indexEOL(b []byte) int {
	for from, size := 0, 256; from < len(b); from, size = from+size, 2*size {
		stretch := b[from:min(from+size, len(b))]
		lf := bytes.IndexByte(stretch, '\n')
		if lf >= 0 {
			stretch = stretch[:lf]
		}
		if cr := bytes.IndexByte(stretch, '\r'); cr >= 0 {
			return from + cr
		}
		if lf >= 0 {
			return from + lf
		}
	}
	return -1
}

// data returns the payload of an event: its data lines, joined by LF. scratch is used where
// there are several.
func data(event, scratch []byte) (payload, grown []byte, found bool) {
	for len(event) > 0 {
		line := event
		if j := indexEOL(event); j >= 0 {
			line, event = event[:j], event[j+1:]
		} else {
			event = nil
		}
		value, ok := bytes.CutPrefix(line, []byte("data:"))
		if !ok {
			continue
		}
		if len(value) > 0 && value[0] == ' ' {
			value = value[1:]
		}
		if !found {
			payload, found = value, true
			continue
		}
		if len(scratch) == 0 {
			scratch = append(scratch[:0], payload...)
		}
		scratch = append(append(scratch, '\n'), value...)
		payload = scratch
	}
	return payload, scratch[:0], found
}
