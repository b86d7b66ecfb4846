package proxy

import (
	"strconv"

	"spillway/httperr"
)

// kind is what sort of JSON value a key has, by its first byte.
type kind byte

const (
	absent  kind = 0
	null    kind = 'n'
	str     kind = '"'
	array   kind = '['
	object  kind = '{'
	yes     kind = 't'
	no      kind = 'f'
	numeric kind = '0'
)

func kindOf(ch byte) kind {
	if ch == '-' || ch >= '0' && ch <= '9' {
		return numeric
	}
	return kind(ch)
}

// given tells whether a value is there: null is how some clients spell "not set".
func (k kind) given() bool { return k != absent && k != null }

// span is where a value lies in the body; the zero span is nowhere.
type span struct{ from, to int }

// scanned is what the front end reads of a request body. The bytes are forwarded as they are.
type scanned struct {
	model         text
	modelKind     kind
	modelSpan     span // quotes included
	stream        kind
	streamOptions kind
	optionsSpan   span
	includeUsage  bool
	n             kind
	nText         []byte
	messages      kind
	prompt        kind // of completions
	promptEmbeds  kind
	input         kind // of embeddings
	nvext         kind
	end           int // of the closing brace of the body

	chat  tally // in messages
	tools tally
	plain tally // in prompt or input
}

// tally counts what of a prompt becomes tokens.
type tally struct {
	items int // messages, or prompts
	bytes int // of text, decoded
	ids   int // token IDs given as numbers
	media int // images, sounds and files
}

// scan reads the keys that the front end needs and checks the syntax of all the rest. The error
// is malformed JSON or a body that is no object; fields are judged by check.
func scan(body []byte) (scanned, *httperr.Error) {
	var s scanned
	c := cursor{b: body}
	if ch := c.peek(); ch != '{' {
		if c.skip(0) != nil || c.peek() != 0 || c.i < len(body) {
			return s, malformed(&c)
		}
		return s, httperr.Invalid("the request body must be a JSON object")
	}
	err := c.object(func(key text) error { return s.member(&c, key) })
	s.end = c.i - 1
	if err != nil {
		return s, malformed(&c)
	}
	if c.space(); c.i < len(body) {
		return s, malformed(&c)
	}
	return s, nil
}

func malformed(c *cursor) *httperr.Error {
	return httperr.Invalid("the request body is not valid JSON (near byte %d)", c.i)
}

// member reads one top-level member. Where a key is repeated the last one counts.
func (s *scanned) member(c *cursor, key text) error {
	k, from := kindOf(c.peek()), c.i
	switch {
	case key.is("model"):
		s.modelKind, s.model = k, text{}
		if k == str {
			var err error
			s.model, err = c.str()
			s.modelSpan = span{from, c.i}
			return err
		}
	case key.is("messages"):
		s.messages, s.chat = k, tally{}
		if k == array {
			return s.chat.conversation(c)
		}
	case key.is("prompt"):
		s.prompt, s.plain = k, tally{}
		return s.plain.prompts(c, 1)
	case key.is("input"):
		s.input, s.plain = k, tally{}
		return s.plain.prompts(c, 1)
	case key.is("tools"), key.is("functions"):
		err := c.skip(1)
		s.tools = tally{bytes: c.i - from}
		return err
	case key.is("stream"):
		s.stream = k
	case key.is("n"):
		s.n = k
		if k == numeric {
			var err error
			s.nText, err = c.number()
			return err
		}
	case key.is("prompt_embeds"):
		s.promptEmbeds = k
	case key.is("nvext"):
		s.nvext = k
	case key.is("stream_options"):
		return s.options(c, k)
	}
	return c.skip(1)
}

func (s *scanned) options(c *cursor, k kind) error {
	from := c.i
	s.streamOptions, s.includeUsage = k, false
	var err error
	if k == object {
		err = c.object(func(key text) error {
			if key.is("include_usage") {
				s.includeUsage = c.peek() == byte(yes)
			}
			return c.skip(2)
		})
	} else {
		err = c.skip(1)
	}
	s.optionsSpan = span{from, c.i}
	return err
}

// conversation counts the messages of a chat and the text in them.
func (t *tally) conversation(c *cursor) error {
	return c.array(func() error {
		t.items++
		return t.value(c, 3)
	})
}

// value counts the text of any value; media are counted, their bytes are not.
func (t *tally) value(c *cursor, depth int) error {
	if depth > maxDepth {
		return errJSON
	}
	switch c.peek() {
	case byte(str):
		s, err := c.str()
		t.bytes += s.size
		return err
	case byte(object):
		return c.object(func(key text) error {
			switch {
			case key.is("type"):
				return c.skip(depth + 1)
			case key.is("image_url"), key.is("input_audio"), key.is("audio_url"), key.is("video_url"), key.is("file"):
				t.media++
				return c.skip(depth + 1)
			}
			return t.value(c, depth+1)
		})
	case byte(array):
		return c.array(func() error { return t.value(c, depth+1) })
	}
	return c.skip(depth)
}

// prompts counts a prompt: text, token IDs, or a list of either.
func (t *tally) prompts(c *cursor, depth int) error {
	switch ch := c.peek(); {
	case ch == byte(str):
		s, err := c.str()
		if s.size > 0 {
			t.items++
		}
		t.bytes += s.size
		return err
	case kindOf(ch) == numeric:
		_, err := c.number()
		t.ids++
		return err
	case ch == byte(array) && depth <= 2:
		return c.array(func() error { return t.prompts(c, depth+1) })
	}
	return c.skip(depth)
}

// What a prompt costs beyond its text, in tokens.
const (
	tokensPerMessage = 4
	tokensPerChat    = 3
	tokensPerMedium  = 225 // an image of 640x360
	bytesPerToken    = 4
)

// promptTokens estimates how many tokens the worker will count.
func (s *scanned) promptTokens() uint64 {
	text := s.chat.bytes + s.tools.bytes + s.plain.bytes
	total := (text+bytesPerToken-1)/bytesPerToken + s.plain.ids + s.chat.media*tokensPerMedium
	if s.messages == array {
		total += s.chat.items*tokensPerMessage + tokensPerChat
	}
	return uint64(max(total, 1))
}

// exactTokens tells whether promptTokens was counted, not estimated.
func (s *scanned) exactTokens() bool {
	return s.plain.ids > 0 && s.chat.bytes+s.tools.bytes+s.plain.bytes == 0
}

// check applies the rules that every request must meet.
func (s *scanned) check(ep *endpoint) *httperr.Error {
	switch {
	case s.modelKind.given() && s.modelKind != str:
		return httperr.Invalid("model must be a string")
	case s.modelKind == str && s.model.size == 0:
		return httperr.Invalid("model must not be empty")
	case ep.streams && s.stream.given() && s.stream != yes && s.stream != no:
		return httperr.Invalid("stream must be a boolean")
	case ep.streams && s.streamOptions.given() && s.stream != yes:
		return httperr.Invalid("stream_options is only allowed when stream is true")
	case s.streamOptions.given() && s.streamOptions != object:
		return httperr.Invalid("stream_options must be an object")
	}
	if s.n.given() {
		if n, err := strconv.ParseInt(string(s.nText), 10, 64); s.n != numeric || err != nil || n < 1 || n > 128 {
			return httperr.Invalid("n must be an integer from 1 to 128")
		}
	}
	return ep.check(s)
}

func checkChat(s *scanned) *httperr.Error {
	switch {
	case !s.messages.given():
		return httperr.Invalid("messages is required")
	case s.messages != array || s.chat.items == 0:
		return httperr.Invalid("messages must be an array with at least one message")
	}
	return nil
}

func checkCompletions(s *scanned) *httperr.Error {
	switch {
	case s.promptEmbeds.given():
		return nil
	case !s.prompt.given():
		return httperr.Invalid("prompt is required")
	case s.prompt != str && s.prompt != array:
		return httperr.Invalid("prompt must be a string, an array of strings, or an array of token IDs")
	case s.plain.items+s.plain.ids == 0:
		return httperr.Invalid("prompt must not be empty")
	}
	return nil
}

func checkEmbeddings(s *scanned) *httperr.Error {
	if !s.input.given() {
		return httperr.Invalid("input is required")
	}
	return nil
}
