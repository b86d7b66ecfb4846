package proxy

import (
	"bytes"
	"encoding/json"
	"strconv"

	"spillway/httperr"
)

// dialect is the API that a route speaks: how its errors and the events of its streams look.
type dialect uint8

const (
	openAI    dialect = iota // chat, completions, embeddings
	responses                // OpenAI's later API
	anthropic                // messages
)

// read tells what Spillway needs to know of the payload of a data event.
func (d dialect) read(payload []byte) chunk {
	switch d {
	case responses:
		return readResponse(payload)
	case anthropic:
		return readMessage(payload)
	}
	return readChunk(payload)
}

// event is one JSON object of the later dialects, in which a type says what the rest means. The
// nested objects that hold usage and errors have other names in each; all are looked for.
type event struct {
	kind    string // of those that matter, else ""
	content bool   // it holds generated content
	usage   usage
	failed  bool // there is an error object
	code    int  // of it, 0 if there is none
	wrong   string
}

// readEvent reads what readChunk does for the other dialects; like that it ignores what it does
// not understand.
func readEvent(payload []byte) event {
	var ev event
	c := cursor{b: payload}
	_ = c.object(func(key text) error {
		next := c.peek()
		switch {
		case next == byte(str) && key.is("type"):
			s, err := c.str()
			ev.kind = s.string()
			return err
		case next == byte(str) && key.is("delta"): // of responses
			s, err := c.str()
			ev.content = s.size() > 0
			return err
		case next == byte(object) && key.is("delta"): // of messages
			return ev.readDelta(&c)
		case next == byte(object) && (key.is("message") || key.is("response")):
			return c.object(func(key text) error {
				if c.peek() == byte(object) && key.is("usage") {
					return ev.usage.read(&c)
				}
				return c.skip(2)
			})
		case next == byte(object) && key.is("usage"):
			return ev.usage.read(&c)
		case next == byte(object) && key.is("error"):
			ev.failed = true
			return ev.readError(&c)
		}
		return c.skip(1)
	})
	return ev
}

func (ev *event) readDelta(c *cursor) error {
	return c.object(func(key text) error {
		if c.peek() == byte(str) && (key.is("text") || key.is("thinking") || key.is("partial_json")) {
			s, err := c.str()
			ev.content = ev.content || s.size() > 0
			return err
		}
		return c.skip(2)
	})
}

func (ev *event) readError(c *cursor) error {
	return c.object(func(key text) error {
		switch next := c.peek(); {
		case kindOf(next) == numeric && key.is("code"):
			n, err := c.number()
			ev.code, _ = strconv.Atoi(string(n))
			return err
		case next == byte(str) && key.is("type"):
			s, err := c.str()
			ev.wrong = s.string()
			return err
		}
		return c.skip(2)
	})
}

// chunk is what all dialects have in common. Usage never comes with content here, so that what
// it says always replaces what was estimated.
func (ev *event) chunk() chunk {
	ch := chunk{usage: ev.usage, failed: ev.failed, code: ev.code}
	if ev.content {
		ch.tokens = 1
	}
	return ch
}

func readResponse(payload []byte) chunk {
	ev := readEvent(payload)
	ch := ev.chunk()
	switch ev.kind {
	case "response.completed", "response.incomplete":
		ch.done = true
	case "response.failed":
		ch.done, ch.failed = true, true
	case "error":
		ch.failed = true
	}
	return ch
}

func readMessage(payload []byte) chunk {
	ev := readEvent(payload)
	ch := ev.chunk()
	switch ev.kind {
	case "message_stop":
		ch.done = true
	case "error":
		ch.failed = true
		if ch.code == 0 {
			ch.code = statusOf(ev.wrong)
		}
	}
	return ch
}

// anthropicTypes are the types of errors by status; others are api_error.
var anthropicTypes = map[int]string{
	400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
	413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error",
}

func anthropicType(status int) string {
	if t, ok := anthropicTypes[status]; ok {
		return t
	}
	return "api_error"
}

// statusOf is the status that a worker would have sent with an error of a type, 0 if it is
// none of the above.
func statusOf(kind string) int {
	if kind == "overloaded_error" {
		return 529
	}
	for status, t := range anthropicTypes {
		if t == kind {
			return status
		}
	}
	return 0
}

// anthropicBody is an error in the envelope of Anthropic's API.
type anthropicBody struct {
	Type  string         `json:"type"`
	Error anthropicError `json:"error"`
}

type anthropicError struct {
	Type    string `json:"type"`
	Message string `json:"message"`
}

// error renders an error body in the dialect.
func (d dialect) error(envelope string, e *httperr.Error) []byte {
	flat := flatBody{e.Message, e.Type(), e.Status, e.Details}
	var v any = flat
	switch {
	case d == anthropic:
		v = anthropicBody{"error", anthropicError{anthropicType(e.Status), e.Message}}
	case envelope == "openai":
		v = map[string]any{"error": flat}
	}
	return rendered(v)
}

// broken renders the events by which a client in the middle of a stream is told that there will
// be no more.
func (d dialect) broken(e *httperr.Error) []byte {
	wrong := flatBody{Message: e.Message, Type: e.Type(), Code: e.Status}
	switch d {
	case anthropic:
		return named(anthropicBody{"error", anthropicError{anthropicType(e.Status), e.Message}})
	case responses: // whose readers look at the type, or at error as those of chats do
		return named(struct {
			Type  string   `json:"type"`
			Error flatBody `json:"error"`
		}{"error", wrong})
	}
	return append(sse("", struct {
		Error flatBody `json:"error"`
	}{wrong}), doneEvent...)
}

func named(v any) []byte { return sse("event: error\n", v) }

func sse(name string, v any) []byte {
	return bytes.Join([][]byte{[]byte(name + "data: "), rendered(v), []byte("\n\n")}, nil)
}

func rendered(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic("proxy: an error body cannot fail to render: " + err.Error())
	}
	return b
}
