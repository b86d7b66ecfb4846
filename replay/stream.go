package replay

import (
	"bytes"
	"encoding/json"
	"time"
)

const (
	maxEventLine = 1 << 20  // bytes of one line of an event stream
	maxEvents    = 4 << 20  // content events of one stream
	readSize     = 16 << 10 // bytes taken from a connection at a time
)

// usage is what an endpoint says about the tokens of one request.
type usage struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
	Details          struct {
		CachedTokens int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// stream follows the event stream of one answer as it arrives in pieces. It scans events for the
// few things that matter and decodes only the one with the usage, since it sees thousands a second.
// All events of one piece arrived at one time: gaps of 0 between them are real to a client.
type stream struct {
	first time.Time       // arrival of the first content; zero if none has come
	last  time.Time       // arrival of the latest content
	gaps  []time.Duration // between content events, one fewer than there were

	done      bool // [DONE] has come
	failed    bool // an error event has come
	malformed bool // a line or the stream was too long; nothing more is read
	usage     usage
	hasUsage  bool

	carry []byte // an unfinished line
}

// reset readies s for another answer, keeping its memory.
func (s *stream) reset() {
	*s = stream{gaps: s.gaps[:0], carry: s.carry[:0]}
}

// feed takes the next bytes of the stream, which arrived at now.
func (s *stream) feed(p []byte, now time.Time) {
	for !s.malformed {
		i := bytes.IndexByte(p, '\n')
		if i < 0 {
			break
		}
		line := p[:i]
		p = p[i+1:]
		if len(s.carry) > 0 {
			s.carry = append(s.carry, line...)
			line = s.carry
		}
		s.line(line, now)
		s.carry = s.carry[:0]
	}
	if s.carry = append(s.carry, p...); len(s.carry) > maxEventLine {
		s.malformed = true
	}
}

func (s *stream) line(line []byte, now time.Time) {
	if s.done {
		return
	}
	if value, ok := bytes.CutPrefix(line, []byte("event:")); ok {
		s.failed = s.failed || string(bytes.TrimSpace(value)) == "error"
		return
	}
	data, ok := bytes.CutPrefix(line, []byte("data:"))
	if !ok {
		return
	}
	data = bytes.TrimSpace(data)
	switch {
	case string(data) == "[DONE]":
		s.done = true
	case bytes.HasPrefix(data, []byte(`{"error"`)), bytes.Contains(data, []byte(`"object":"error"`)):
		s.failed = true
	default:
		if hasText(data) {
			s.content(now)
		}
		s.noteUsage(data)
	}
}

func (s *stream) content(now time.Time) {
	if s.first.IsZero() {
		s.first = now
	} else if len(s.gaps) < maxEvents {
		s.gaps = append(s.gaps, now.Sub(s.last))
	} else {
		s.malformed = true
	}
	s.last = now
}

// hasText says whether a chunk carries a token: a content or text that is not empty. In text that
// itself looks like JSON the quotes are escaped, so that a key cannot be found there.
func hasText(data []byte) bool {
	return hasValue(data, []byte(`content":`)) || // reasoning_content too
		hasValue(data, []byte(`"text":`)) || hasValue(data, []byte(`"reasoning":`))
}

// hasValue says whether key is somewhere in data with a string that is not empty.
func hasValue(data, key []byte) bool {
	for {
		i := bytes.Index(data, key)
		if i < 0 {
			return false
		}
		data = bytes.TrimLeft(data[i+len(key):], " ")
		if len(data) > 1 && data[0] == '"' && data[1] != '"' {
			return true
		}
	}
}

func (s *stream) noteUsage(data []byte) {
	_, rest, ok := bytes.Cut(data, []byte(`"usage":`))
	if !ok {
		return
	}
	if rest = bytes.TrimLeft(rest, " "); len(rest) == 0 || rest[0] != '{' {
		return // null, in all chunks but the last of some servers
	}
	var chunk struct {
		Usage *usage `json:"usage"`
	}
	if json.Unmarshal(data, &chunk) == nil && chunk.Usage != nil {
		s.usage, s.hasUsage = *chunk.Usage, true
	}
}
