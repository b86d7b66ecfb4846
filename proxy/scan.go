package proxy

import (
	"errors"
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

// requestType tells streams (1) from the rest (0), as in requestTypes.
func (s *scanned) requestType() int {
	if s.stream == yes {
		return 1
	}
	return 0
}

// requestTypes are the values of the label request_type.
var requestTypes = [2]string{"unary", "stream"}

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
	usageSpan     span // of the value of include_usage
	optionsEmpty  bool // stream_options is {}
	n             kind
	nText         []byte
	messages      kind
	prompt        kind // of completions
	promptEmbeds  kind
	input         kind // of embeddings
	nvext         kind
	saltKind      kind
	salt          text // cache_salt
	saltSpan      span
	end           int // of the closing brace of the body

	// Where what a prompt is made of lies; nowhere if that counts for nothing.
	chatSpan, promptsSpan, inputsSpan    span
	systemSpan, toolsSpan, functionsSpan span

	chat      tally // in messages
	tools     tally
	functions tally // the older spelling of tools
	prompts   tally
	inputs    tally
	system    tally // instructions beside the conversation: of responses and messages
	reads     tally // of the above, what the route makes a prompt of; set by check

	parts [4]part // of the body, of which reads is the sum, in the order in which a model sees them; set by check
}

// part is a part of a prompt.
type part struct {
	span
	asWritten bool // it goes before the model much as it is written, keys included
}

// tally counts what of a body becomes tokens.
type tally struct {
	messages int
	items    int // prompts that are text
	lists    int // prompts that are lists of token IDs within a list
	bytes    int // of text, decoded
	ids      int // token IDs given as numbers
	media    int // images, sounds and files
}

// scan reads the keys that the front end needs and checks the syntax of all the rest. The error
// is malformed JSON or a body that is no object; fields are judged by check.
func scan(body []byte) (scanned, *httperr.Error) { return read(cursor{b: body}) }

// skim is scan without a look into strings that are neither keys nor the model: what is wrong in
// them stays unseen, and tallies count their bytes as they are written. It is for requests that are
// refused whatever they say.
func skim(body []byte) (scanned, *httperr.Error) { return read(cursor{b: body, skim: true}) }

func read(c cursor) (scanned, *httperr.Error) {
	var s scanned
	if ch := c.peek(); ch != '{' {
		if err := c.skip(0); err != nil || c.peek() != 0 || c.i < len(c.b) {
			return s, malformed(&c, err)
		}
		return s, httperr.Invalid("the request body must be a JSON object")
	}
	err := c.object(func(key text) error { return s.member(&c, key) })
	s.end = c.i - 1
	if err != nil {
		return s, malformed(&c, err)
	}
	if c.space(); c.i < len(c.b) {
		return s, malformed(&c, errJSON)
	}
	return s, nil
}

func malformed(c *cursor, err error) *httperr.Error {
	if errors.Is(err, errDeep) {
		return httperr.Invalid("the request body is nested deeper than %d levels (near byte %d)", maxDepth, c.i)
	}
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
		s.messages, s.chat, s.chatSpan = k, tally{}, span{}
		if k == array {
			err := s.chat.conversation(c)
			s.chatSpan = span{from, c.i}
			return err
		}
	case key.is("prompt"):
		s.prompt, s.prompts = k, tally{}
		err := s.prompts.prompt(c, 1)
		s.promptsSpan = span{from, c.i}
		return err
	case key.is("input"):
		s.input, s.inputs = k, tally{}
		err := s.inputs.prompt(c, 1)
		s.inputsSpan = span{from, c.i}
		return err
	case key.is("instructions"), key.is("system"):
		s.system = tally{}
		err := s.system.value(c, 1)
		s.systemSpan = span{from, c.i}
		return err
	case key.is("tools"):
		err := s.tools.schemas(c, k)
		s.toolsSpan = s.tools.span(from, c.i)
		return err
	case key.is("functions"):
		err := s.functions.schemas(c, k)
		s.functionsSpan = s.functions.span(from, c.i)
		return err
	case key.is("cache_salt"):
		s.saltKind, s.salt = k, text{}
		var err error
		if k == str {
			s.salt, err = c.str()
		} else {
			err = c.skip(1)
		}
		s.saltSpan = span{from, c.i}
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
	s.streamOptions, s.includeUsage, s.usageSpan, s.optionsEmpty = k, false, span{}, true
	var err error
	if k == object {
		err = c.object(func(key text) error {
			s.optionsEmpty = false
			if !key.is("include_usage") {
				return c.skip(2)
			}
			s.includeUsage = c.peek() == byte(yes)
			at := c.i
			err := c.skip(2)
			s.usageSpan = span{at, c.i}
			return err
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
		t.messages++
		return t.value(c, 2)
	})
}

// value counts the text of any value; media are counted, their bytes are not. depth is as in
// cursor.skip.
func (t *tally) value(c *cursor, depth int) error {
	switch ch := c.peek(); {
	case ch == byte(str):
		s, err := c.value()
		t.bytes += s.size()
		return err
	case ch != byte(object) && ch != byte(array):
		return c.skip(depth)
	case depth >= maxDepth:
		return errDeep
	case ch == byte(array):
		return c.array(func() error { return t.value(c, depth+1) })
	}
	return c.object(func(key text) error {
		switch {
		case key.is("type"):
			return c.skip(depth + 1)
		case medium(key) || key.is("source") && c.peek() == byte(object): // the latter in messages
			if kindOf(c.peek()).given() {
				t.media++
			}
			return c.skip(depth + 1)
		}
		return t.value(c, depth+1)
	})
}

// medium tells whether a key of a content part holds something other than text.
func medium(key text) bool {
	if n := key.size(); n < len("file") || n > len("image_embeds") {
		return false // most keys
	}
	return key.is("image_url") || key.is("input_audio") || key.is("audio_url") || key.is("video_url") ||
		key.is("file") || key.is("file_data") || key.is("image_embeds") || key.is("audio_embeds")
}

// schemas counts tool definitions: they are put before the model much as they are written.
func (t *tally) schemas(c *cursor, k kind) error {
	from := c.i
	*t = tally{}
	if k != array {
		return c.skip(1)
	}
	tools := 0
	err := c.array(func() error { tools++; return c.skip(2) })
	if tools > 0 {
		t.bytes = c.i - from
	}
	return err
}

// span is where schemas lie that count.
func (t *tally) span(from, to int) span {
	if t.bytes == 0 {
		return span{}
	}
	return span{from, to}
}

// prompt counts text, token IDs, or a list of either.
func (t *tally) prompt(c *cursor, depth int) error {
	switch ch := c.peek(); {
	case ch == byte(str):
		s, err := c.value()
		if s.size() > 0 {
			t.items++
		}
		t.bytes += s.size()
		return err
	case kindOf(ch) == numeric:
		_, err := c.number()
		t.ids++
		return err
	case ch == byte(array) && depth <= 2:
		if depth == 2 {
			t.lists++
		}
		return c.array(func() error { return t.prompt(c, depth+1) })
	case ch == byte(object): // an item of a conversation
		t.messages++
		return t.value(c, depth)
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

// promptTokens estimates how many tokens the worker will count. It needs check to have passed.
func (s *scanned) promptTokens() uint64 {
	t := &s.reads
	total := (t.bytes+bytesPerToken-1)/bytesPerToken + t.ids + t.media*tokensPerMedium + t.messages*tokensPerMessage
	if t.messages > 0 {
		total += tokensPerChat
	}
	return uint64(max(total, 1))
}

// exactTokens tells whether promptTokens was counted, not estimated.
func (s *scanned) exactTokens() bool { return s.reads.ids > 0 && s.reads.bytes == 0 }

// several tells whether there is more than one prompt: of completions and embeddings, in one list.
func (s *scanned) several() bool { return s.reads.items+s.reads.lists > 1 }

// check applies the rules that every request must meet, and notes which text is the prompt: only
// what the route reads, so that no key beside it can make a request look smaller or larger.
func (s *scanned) check(ep *endpoint) *httperr.Error {
	switch {
	case s.modelKind.given() && s.modelKind != str:
		return httperr.Invalid("model must be a string")
	case s.modelKind == str && s.model.size() == 0:
		return httperr.Invalid("model must not be empty")
	case ep.dialect != openAI: // the worker judges
	case ep.streams && s.stream.given() && s.stream != yes && s.stream != no:
		return httperr.Invalid("stream must be a boolean")
	case ep.streams && s.streamOptions.given() && s.stream != yes:
		return httperr.Invalid("stream_options is only allowed when stream is true")
	case ep.streams && s.streamOptions.given() && s.streamOptions != object:
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
	case s.messages != array || s.chat.messages == 0:
		return httperr.Invalid("messages must be an array with at least one message")
	}
	s.reads = s.chat
	s.reads.bytes += s.tools.bytes + s.functions.bytes
	s.parts = [...]part{{s.toolsSpan, true}, {s.functionsSpan, true}, {}, {s.chatSpan, false}}
	return nil
}

func checkCompletions(s *scanned) *httperr.Error {
	s.reads, s.parts = s.prompts, [...]part{{s.promptsSpan, false}, {}, {}, {}}
	switch {
	case s.promptEmbeds.given():
		return nil
	case !s.prompt.given():
		return httperr.Invalid("prompt is required")
	case s.prompt != str && s.prompt != array:
		return httperr.Invalid("prompt must be a string, an array of strings, or an array of token IDs")
	case s.prompts.items+s.prompts.ids == 0:
		return httperr.Invalid("prompt must not be empty")
	}
	return nil
}

func checkEmbeddings(s *scanned) *httperr.Error {
	s.reads, s.parts = s.inputs, [...]part{{s.inputsSpan, false}, {}, {}, {}}
	if !s.input.given() {
		return httperr.Invalid("input is required")
	}
	return nil
}

func checkResponses(s *scanned) *httperr.Error {
	if !s.input.given() {
		return httperr.Invalid("input is required")
	}
	s.reads = s.inputs
	s.reads.bytes += s.system.bytes + s.tools.bytes
	s.reads.media += s.system.media
	s.parts = [...]part{{s.toolsSpan, true}, {s.systemSpan, false}, {s.inputsSpan, false}, {}}
	return nil
}

func checkMessages(s *scanned) *httperr.Error {
	if bad := checkChat(s); bad != nil {
		return bad
	}
	s.reads.bytes += s.system.bytes
	s.reads.media += s.system.media
	s.parts[2] = part{s.systemSpan, false}
	return nil
}
