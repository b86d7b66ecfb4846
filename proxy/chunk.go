package proxy

import "strconv"

// usage is what a worker says a request has cost, in tokens. Known tells that it said so.
type usage struct {
	known bool
	// cachedKnown is that cached was told, be it 0.
	cachedKnown bool
	prompt      uint64
	cached      uint64 // part of prompt
	completion  uint64
}

// chunk is what the front end learns from one data event of a stream, or from a unary body.
type chunk struct {
	done    bool  // it is [DONE]
	tokens  int   // choices with generated content
	finish  int   // choices that ended
	choices int   // entries of choices; -1 if there is no such array
	usage   usage // zero where there is none
	failed  bool  // it tells of an error
	code    int   // of the error, 0 if there is none
	index   [4]uint64
	ended   [4]uint64 // bit sets by choice index: seen, and ended
}

// readChunk reads the payload of a data event. What it does not understand it ignores: judging
// answers is the client's business.
func readChunk(payload []byte) chunk {
	ch := chunk{choices: -1}
	if string(payload) == "[DONE]" {
		ch.done = true
		return ch
	}
	c := cursor{b: payload}
	_ = c.object(func(key text) error {
		next := c.peek()
		switch {
		case next == byte(array) && key.is("choices"):
			ch.choices = 0
			return c.array(func() error { return ch.choice(&c) })
		case next == byte(object) && key.is("usage"):
			return ch.usage.read(&c)
		case next == byte(object) && key.is("error"):
			ch.failed = true
			return ch.readError(&c)
		case next == byte(str) && key.is("error"):
			s, err := c.str()
			ch.failed = s.size() > 0 // as clients take it
			return err
		}
		return c.skip(1)
	})
	return ch
}

func (ch *chunk) choice(c *cursor) error {
	ch.choices++
	if c.peek() != byte(object) {
		return c.skip(2)
	}
	token, ended, index := false, false, uint64(0)
	err := c.object(func(key text) error {
		next := c.peek()
		switch {
		case next == byte(object) && (key.is("delta") || key.is("message")):
			return c.object(func(key text) error {
				filled, err := payload(c, key)
				token = token || filled
				return err
			})
		case next == byte(str) && key.is("text"):
			s, err := c.str()
			token = token || s.size() > 0
			return err
		case key.is("finish_reason"):
			ended = next == byte(str)
		case kindOf(next) == numeric && key.is("index"):
			n, err := c.number()
			index, _ = strconv.ParseUint(string(n), 10, 64)
			return err
		}
		return c.skip(3)
	})
	if token {
		ch.tokens++
	}
	if ended {
		ch.finish++
	}
	if index < 256 {
		ch.index[index/64] |= 1 << (index % 64)
		if ended {
			ch.ended[index/64] |= 1 << (index % 64)
		}
	}
	return err
}

// payload passes over one member of a delta and tells whether it holds generated content: a
// role alone is none.
func payload(c *cursor, key text) (filled bool, err error) {
	switch next := c.peek(); {
	case next == byte(str) && (key.is("content") || key.is("reasoning_content") || key.is("reasoning")):
		s, err := c.str()
		return s.size() > 0, err
	case next == byte(array) && key.is("tool_calls"):
		err := c.array(func() error {
			filled = true
			return c.skip(5)
		})
		return filled, err
	}
	return false, c.skip(4)
}

// read reads a usage object, by OpenAI's names or by Anthropic's, which tells cached tokens beside
// the others and not as a part of them.
func (u *usage) read(c *cursor) error {
	u.known = true
	var prompt, read, written uint64
	defer func() {
		u.prompt = prompt + read + written
		u.cached += read
	}()
	return c.object(func(key text) error {
		next := c.peek()
		switch {
		case kindOf(next) == numeric && (key.is("prompt_tokens") || key.is("input_tokens")):
			return count(c, &prompt)
		case kindOf(next) == numeric && (key.is("completion_tokens") || key.is("output_tokens")):
			return count(c, &u.completion)
		case kindOf(next) == numeric && key.is("cache_read_input_tokens"):
			u.cachedKnown = true
			return count(c, &read)
		case kindOf(next) == numeric && key.is("cache_creation_input_tokens"):
			return count(c, &written)
		case next == byte(object) && (key.is("prompt_tokens_details") || key.is("input_tokens_details")):
			return c.object(func(key text) error {
				if kindOf(c.peek()) == numeric && key.is("cached_tokens") {
					u.cachedKnown = true
					return count(c, &u.cached)
				}
				return c.skip(3)
			})
		}
		return c.skip(2)
	})
}

// then is what is known once more has been said. Anthropic's API tells the prompt at the start of a
// stream, and may leave it out at the end.
func (u usage) then(more usage) usage {
	if more.prompt == 0 {
		more.prompt, more.cached, more.cachedKnown = u.prompt, u.cached, u.cachedKnown
	}
	return more
}

func count(c *cursor, to *uint64) error {
	n, err := c.number()
	*to, _ = strconv.ParseUint(string(n), 10, 64)
	return err
}

func (ch *chunk) readError(c *cursor) error {
	return c.object(func(key text) error {
		if key.is("code") && kindOf(c.peek()) == numeric {
			n, err := c.number()
			ch.code, _ = strconv.Atoi(string(n))
			return err
		}
		return c.skip(2)
	})
}
