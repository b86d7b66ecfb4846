package sim

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"

	"spillway/sim/engine"
)

// flushBytes is when a stream that has much to say at once writes in between.
const flushBytes = 64 << 10

// stream writes the choices of a call as server-sent events, one event per token, without
// encoding JSON: an event is a head that all share, the token and a tail.
type stream struct {
	call  *call
	rw    http.ResponseWriter
	flush func() error
	buf   []byte

	head       []byte // of every event, up to the choices
	before     string // between a choice's index and its text
	after      string // between the text and the finish reason
	role       string // first event of a chat's choice, after its index
	continuous bool   // usage in every event

	hit  *hit // of a fault, or nil
	left int  // tokens until it strikes; never 0 if it does not
}

func (c *call) newStream(rw http.ResponseWriter, f format) (*stream, error) {
	id, err := json.Marshal(c.id)
	if err != nil {
		return nil, fmt.Errorf("sim: encode an ID: %w", err)
	}
	model, err := json.Marshal(c.worker.server.cfg.Model)
	if err != nil {
		return nil, fmt.Errorf("sim: encode a model's name: %w", err)
	}
	s := &stream{call: c, rw: rw, left: -1}
	if h, ok := rw.(*hit); ok {
		s.rw, s.hit, s.left = h.ResponseWriter, h, h.fault.after()
	}
	s.flush = http.NewResponseController(s.rw).Flush
	s.head = fmt.Appendf(nil, `data: {"id":%s,"object":"%s","created":%d,"model":%s,"choices":[`, id, f.object(true), c.created, model)
	if f == chatFormat {
		s.role = `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`
		s.before, s.after = `,"delta":{"content":"`, `"},"logprobs":null,"finish_reason":`
	} else {
		s.before, s.after = `,"text":"`, `","logprobs":null,"finish_reason":`
	}
	return s, nil
}

// stream answers with events until all choices have ended, or returns errCut, or
// errEnded because of a fault.
func (c *call) stream(rw http.ResponseWriter, r *http.Request, opts *streamOptions, f format) error {
	s, err := c.newStream(rw, f)
	if err != nil {
		return err
	}
	withUsage := opts != nil && opts.IncludeUsage
	s.continuous = withUsage && opts.ContinuousUsageStats
	rw.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	if err := s.relayAll(r.Context()); err != nil {
		return err
	}
	if withUsage {
		u, err := json.Marshal(c.usage())
		if err != nil {
			return fmt.Errorf("sim: encode usage: %w", err)
		}
		s.buf = append(append(append(append(s.buf, s.head...), `],"usage":`...), u...), "}\n\n"...)
	}
	if s.hit != nil && s.hit.fault.kind.name == eof && s.hit.fault.after() < 0 {
		return s.write()
	}
	s.buf = append(s.buf, "data: [DONE]\n\n"...)
	if err := s.write(); err != nil {
		return err
	}
	c.whole = true
	return nil
}

// relayAll relays until all choices have ended.
func (s *stream) relayAll(ctx context.Context) error {
	if err := s.flush(); err != nil { // the head goes out before the first token, as vLLM's does
		return fmt.Errorf("%w: %w", errCut, err)
	}
	if s.left == 0 {
		if err := s.hit.strike(); err != nil {
			return err
		}
	}
	for open := len(s.call.choices); open > 0; {
		select {
		case <-s.call.bell:
		case <-ctx.Done():
			return errCut
		}
		var err error
		if open, err = s.relay(); err != nil {
			return err
		}
	}
	return nil
}

// relay writes what is new and returns how many choices have not ended. The events of the
// last ones stay in the buffer for what follows them.
func (s *stream) relay() (open int, err error) {
	for _, ch := range s.call.choices {
		generated, reason := ch.state()
		if reason == 0 {
			open++
		}
		if ch.ended {
			continue
		}
		if ch.told == 0 && (generated > 0 || reason != 0) && s.role != "" {
			s.buf = strconv.AppendInt(append(append(s.buf, s.head...), `{"index":`...), int64(ch.index), 10)
			s.buf = append(s.buf, s.role...)
			s.endEvent(ch)
		}
		for ch.told < generated {
			last := ch.told == generated-1
			ch.told++
			s.event(ch, true, reason, last && reason != 0)
			if len(s.buf) >= flushBytes {
				if err := s.write(); err != nil {
					return open, err
				}
			}
			ch.ended = last && reason != 0
			if s.left--; s.left == 0 {
				if err := s.strike(); err != nil {
					return open, err
				}
			}
		}
		if reason != 0 && !ch.ended { // the end came after the last token
			s.event(ch, false, reason, true)
			ch.ended = true
		}
	}
	if open > 0 {
		err = s.write()
	}
	return open, err
}

// strike lets the fault act after what has been said.
func (s *stream) strike() error {
	if err := s.write(); err != nil {
		return err
	}
	return s.hit.strike()
}

// event appends the event of token ch.told, or of no token.
func (s *stream) event(ch *choice, token bool, reason engine.Reason, last bool) {
	s.buf = append(append(s.buf, s.head...), `{"index":`...)
	s.buf = strconv.AppendInt(s.buf, int64(ch.index), 10)
	s.buf = append(s.buf, s.before...)
	if token {
		s.buf = ch.text.appendWord(s.buf, ch.told-1)
	}
	s.buf = append(s.buf, s.after...)
	if last {
		s.buf = append(append(append(s.buf, '"'), ch.finishReason(reason)...), `","stop_reason":null}]`...)
	} else {
		s.buf = append(s.buf, `null}]`...)
	}
	s.endEvent(ch)
}

// endEvent closes an event. Continuous usage is that of the event's choice, as in vLLM.
func (s *stream) endEvent(ch *choice) {
	if s.continuous {
		s.buf = strconv.AppendInt(append(s.buf, `,"usage":{"prompt_tokens":`...), int64(ch.prompt), 10)
		s.buf = strconv.AppendInt(append(s.buf, `,"total_tokens":`...), int64(ch.prompt+ch.told), 10)
		s.buf = strconv.AppendInt(append(s.buf, `,"completion_tokens":`...), int64(ch.told), 10)
		s.buf = append(s.buf, '}')
	}
	s.buf = append(s.buf, "}\n\n"...)
}

// write sends the buffer. Then its tokens are with the client.
func (s *stream) write() error {
	if len(s.buf) == 0 {
		return nil
	}
	if _, err := s.rw.Write(s.buf); err != nil {
		return fmt.Errorf("%w: %w", errCut, err)
	}
	if err := s.flush(); err != nil {
		return fmt.Errorf("%w: %w", errCut, err)
	}
	s.buf = s.buf[:0]
	for _, ch := range s.call.choices {
		ch.had = ch.told
	}
	return nil
}
