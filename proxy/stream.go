package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"spillway/httperr"
	"spillway/upstream"
)

// stream is the relay of one SSE answer.
type stream struct {
	x         *exchange
	resp      *upstream.Response
	split     splitter
	pending   []byte      // bytes of events that are not complete, or of several reads
	scratch   []byte      // for data that spans lines
	begun     bool        // an event has come
	committed bool        // the head is out
	direct    *clientConn // takes further chunks past net/http; nil before the first, or if none may
	done      bool        // [DONE], or what stands for it, has passed
	failed    bool        // the worker sent an error object
	code      int         // of that error, 0 if it gave none
	blocks    uint64      // KV blocks of prompt and output so far
	seen      [4]uint64
	ended     [4]uint64 // choices by index
	spoken    uint64    // completion tokens that usage has told so far
	headAt    time.Time // when the head came
	wrote     time.Time // when the client was last sent something; at first headAt
}

// stream relays events as the bytes that came: one write and one flush for all that arrived
// together. Nothing is sent before the first complete event, so until then the request can
// still go elsewhere.
func (x *exchange) stream(resp *upstream.Response) error {
	st := &stream{x: x, resp: resp}
	st.blocks = ceilDiv(x.query.PromptTokens, uint64(x.sel.BlockSize))
	if x.s.cfg.PreCommitPeek > 0 || x.s.cfg.SSEKeepAliveInterval > 0 {
		st.headAt = time.Now()
		st.wrote = st.headAt
	}
	if x.s.cfg.CommitOn == "head" {
		st.commit()
		_ = x.flush() // the next write tells
	}
	var failed error
	err := st.listen(func(part []byte) bool {
		failed = st.feed(part)
		return failed == nil && !st.done
	})
	switch {
	case errors.Is(failed, errEventTooLarge):
		return st.over(failed)
	case failed != nil:
		return failed
	case err != nil:
		return st.over(err)
	}
	st.drain()
	return nil
}

// listen hands what the worker sends to feed until that wants no more. While the worker sends
// nothing, the client may have to be sent something.
func (st *stream) listen(feed func(part []byte) bool) error {
	for {
		until := st.wake()
		err := st.x.each(st.resp, until, feed)
		if err == nil || until.IsZero() || !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		now := time.Now()
		if st.x.passed(now) {
			return err
		}
		if err := st.woken(now); err != nil {
			return err
		}
	}
}

// wake is when something is to be done although nothing comes; zero is never.
func (st *stream) wake() time.Time {
	var at time.Time
	if d := st.x.s.cfg.PreCommitPeek; d > 0 && !st.committed {
		at = st.headAt.Add(d)
	}
	if d := st.x.s.cfg.SSEKeepAliveInterval; d > 0 {
		at = earlier(at, st.wrote.Add(d))
	}
	return at
}

var keepAlive = []byte(":\n\n")

// woken does what wake has put off until now.
func (st *stream) woken(now time.Time) error {
	x := st.x
	if d := x.s.cfg.PreCommitPeek; d > 0 && !st.committed && !now.Before(st.headAt.Add(d)) {
		x.armWrite()
		st.commit()
		_ = x.flush() // the next write tells
	}
	if d := x.s.cfg.SSEKeepAliveInterval; d > 0 && !now.Before(st.wrote.Add(d)) {
		return st.write(keepAlive)
	}
	return nil
}

// feed relays the events that part completes and keeps the rest.
func (st *stream) feed(part []byte) error {
	buf := part
	carried := len(st.pending)
	if carried > 0 {
		st.pending = append(st.pending, part...)
		buf = st.pending
	}
	from, at, seen := 0, 0, carried // of the next write, of the next event, of what split knows
	for !st.done {
		n := st.split.next(buf[seen:])
		if n < 0 {
			break
		}
		event := buf[at : seen+n]
		if len(event) > maxEvent {
			if err := st.write(buf[from:at]); err != nil {
				return err
			}
			return errEventTooLarge
		}
		at, seen = seen+n, seen+n
		keep, err := st.event(event)
		if err != nil {
			return err
		}
		if !keep {
			if err := st.write(buf[from : at-len(event)]); err != nil {
				return err
			}
			from = at
		}
	}
	if err := st.write(buf[from:at]); err != nil {
		return err
	}
	if st.split.event > maxEvent {
		return errEventTooLarge
	}
	rest := buf[at:]
	if carried > 0 {
		if at > 0 { // else it is where it should be, however long it has become
			st.pending = st.pending[:copy(st.pending, rest)]
		}
	} else if len(rest) > 0 {
		st.pending = append(st.pending, rest...)
	}
	return nil
}

// event takes note of one complete event; keep is false if the client is not to see it.
func (st *stream) event(event []byte) (keep bool, err error) {
	x := st.x
	first := !st.begun
	st.begun = true
	payload, scratch, ok := data(event, st.scratch)
	st.scratch = scratch
	if !ok {
		return true, nil // a comment
	}
	ch := x.ep.dialect.read(payload)
	switch {
	case ch.done && !ch.failed:
		st.done = true
	case ch.failed:
		st.done, st.failed, st.code = ch.done, true, ch.code
		if first && !st.committed {
			return false, st.refused(payload)
		}
		x.out.failure = httperr.New(plausible(ch.code), "")
		if x.out.failure.Status >= 500 && x.out.failure.Cause != httperr.Overload {
			x.verdict = failed
		}
	}
	for i := range ch.index {
		st.seen[i] |= ch.index[i]
		st.ended[i] |= ch.ended[i]
	}
	st.tokens(&ch)
	return !x.addUsage || !ch.usage.known || ch.choices != 0, nil
}

// tokens books what the event says has been generated.
func (st *stream) tokens(ch *chunk) {
	x := st.x
	n := uint64(ch.tokens)
	if ch.usage.known {
		x.out.usage = x.out.usage.then(ch.usage)
		if ch.choices == 0 { // the final count replaces what was estimated event by event
			x.out.tokens = ch.usage.completion
			return
		}
		n = ch.usage.completion - min(st.spoken, ch.usage.completion)
		st.spoken = ch.usage.completion
	}
	if ch.tokens == 0 && n == 0 {
		return
	}
	now := time.Now()
	if x.out.firstToken.IsZero() {
		x.received(now)
		x.prefillDone(now)
		if x.permit.try { // it has shown enough; the rest of its answer may take minutes
			x.permit.settle(succeeded, now)
		}
	}
	x.generated(n, now)
	x.out.tokens += n
	if x.s.trackOutput {
		if blocks := ceilDiv(x.query.PromptTokens+x.out.tokens, uint64(x.sel.BlockSize)); blocks > st.blocks {
			st.blocks = blocks // one report per event, however many boundaries it crossed
			x.slot.part.Grow(x.slot.id, 1, x.decay(), now)
		}
	}
}

// decay is what is left of the output that the client expects, as a part of it, or nil if it expects nothing:
// the nearer its end, the less a request's blocks are in the way of others.
func (x *exchange) decay() *float64 {
	if x.expected == 0 {
		return nil
	}
	x.remaining = max(0, 1-float64(x.out.tokens)/float64(x.expected))
	return &x.remaining
}

func ceilDiv(a, b uint64) uint64 { return (a + b - 1) / b }

// refused turns an error that comes before anything else into an answer of its own.
func (st *stream) refused(payload []byte) error {
	status := plausible(st.code)
	if status == 429 || status >= 499 {
		return st.x.declined(status, 0, ofLoad(status, false, payload), payload)
	}
	e := httperr.New(status, "The worker refused the request")
	e.Detail = fmt.Errorf("worker %s sent an error first: %.200q", st.x.sel.Worker.Name, payload)
	return &failure{answer: e}
}

func plausible(code int) int {
	if code >= 400 && code <= 599 {
		return code
	}
	return http.StatusInternalServerError
}

func (st *stream) commit() {
	x := st.x
	x.copyHeaders(st.resp)
	h := x.w.Header()
	h["Cache-Control"] = noCache
	h["X-Accel-Buffering"] = noBuffering
	x.out.status = st.resp.Status
	x.w.WriteHeader(st.resp.Status)
	st.committed = true
	if st.resp.Sent() { // nobody will need the body any more, and the answer may take minutes
		x.body, x.forward = nil, nil
		x.forget()
		x.memory.release()
	}
}

var (
	noCache     = []string{"no-cache"}
	noBuffering = []string{"no"}
)

// write sends complete events to the client.
func (st *stream) write(events []byte) error {
	if len(events) == 0 {
		return nil
	}
	x := st.x
	if !st.committed {
		st.commit()
	}
	st.wrote = time.Now()
	n, err := st.send(events, st.wrote)
	x.out.written += int64(n)
	if err != nil {
		x.gone = true
		return context.Canceled
	}
	return nil
}

// send writes and flushes. The first events go out with the head that net/http writes, the others
// straight to the connection where the head promised chunks: net/http would copy them twice, and write
// what does not fit its buffers in pieces.
func (st *stream) send(events []byte, now time.Time) (int, error) {
	if st.direct != nil {
		return st.direct.writeChunk(events, now)
	}
	x := st.x
	x.armWrite()
	n, err := x.w.Writer.Write(events) // echo's wrapper only counts
	if err == nil {
		err = x.flush()
	}
	if err == nil { // now nothing is left in net/http's buffers
		st.direct = x.chunks()
	}
	return n, err
}

// over ends the stream where the worker's answer did, cleanly or not.
func (st *stream) over(err error) error {
	x := st.x
	if ctxErr := x.ctx.Err(); ctxErr != nil {
		if x.stopped() && st.committed {
			return st.breakOff(notReady())
		}
		return ctxErr
	}
	if x.gone {
		return context.Canceled
	}
	clean := errors.Is(err, io.EOF) && blank(st.pending)
	switch {
	case st.failed && clean:
		return nil // the client has been told already
	case !st.failed && clean && allEnded(&st.seen, &st.ended):
		x.verdict = succeeded
		st.learn()
		return st.write(append(st.pending, doneEvent...))
	case errors.Is(err, io.EOF):
		err = fmt.Errorf("the stream ended before its answer: %w", io.ErrUnexpectedEOF)
	}
	lost := x.lost(err, true)
	switch e := x.told(lost); {
	case !st.committed:
		return lost
	case st.failed: // the client has been told already
		return nil
	case e.Cause == httperr.ResponseTimeout:
		return st.breakOff(e)
	}
	return st.breakOff(&httperr.Error{
		Status: 500, Cause: httperr.Internal, Message: "The worker broke off the stream",
		Detail: fmt.Errorf("worker %s: %w", x.sel.Worker.Name, err),
	})
}

var doneEvent = []byte("data: [DONE]\n\n")

// breakOff tells a client in the middle of a stream that there will be no more.
func (st *stream) breakOff(e *httperr.Error) error {
	st.x.out.failure = e
	if err := st.write(st.x.ep.dialect.broken(e)); err != nil {
		st.x.s.log.Debug("client left a broken stream", "request_id", st.x.id)
	}
	return nil
}

func blank(b []byte) bool {
	for _, ch := range b {
		if ch != '\n' && ch != '\r' {
			return false
		}
	}
	return true
}

// learn takes in the usage of a stream that has ended.
func (st *stream) learn() { st.x.learn(st.x.out.usage) }

// maxDrain bounds what is read and thrown away after [DONE] to keep the connection, in bytes.
const maxDrain = 64 << 10

// drainTime bounds the wait for it: the client's answer ends only after that.
const drainTime = 250 * time.Millisecond

// drain reads what follows [DONE], so that the connection can be used again.
func (st *stream) drain() {
	st.learn()
	if !st.failed {
		st.x.verdict = succeeded
	}
	st.x.release()
	if st.resp.Complete() {
		return
	}
	if st.resp.SetReadDeadline(time.Now().Add(drainTime)) != nil {
		return
	}
	for left := maxDrain; left > 0; {
		part, err := st.resp.Next()
		if err != nil {
			return
		}
		left -= len(part)
		if st.split.cr && part[0] == '\n' { // it belongs to the end of [DONE]
			if st.write(part[:1]) != nil {
				return
			}
		}
		st.split.cr = false
	}
}
