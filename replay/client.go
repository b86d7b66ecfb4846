package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
)

// How a client went away; the cause of a request's context.
var (
	errLeft    = errors.New("replay: client left on purpose")
	errTimeout = errors.New("replay: client lost patience")
)

// outcome is how a request ended. Every request sent has exactly one.
type outcome int

const (
	completed outcome = iota // answered to the end, [DONE] seen
	shed                     // refused with 503, 429 or 529
	failed                   // anything else that is not what the client wanted
	left                     // the client went away on purpose before the end
	cutOff                   // in flight when the run was interrupted
)

// result is what one request came to.
type result struct {
	outcome outcome
	detail  string        // why it was shed, or how it failed
	worker  string        // X-Spillway-Worker, or empty
	best    int           // prompt tokens that any worker had cached, -1 if not known
	sent    bool          // it reached a socket, lag is set
	lag     time.Duration // from due to the first byte being handed to the socket
	end     time.Time
}

// client sends requests to one endpoint. It is safe for concurrent use.
type client struct {
	target    *url.URL
	header    http.Header // of every request; read-only
	bodies    bodyMaker
	selector  *selector // nil if target is what answers
	oracle    *oracle   // nil if nobody is asked for the best
	transport *http.Transport
	streams   sync.Pool // of *reading
	timeout   time.Duration
}

// reading is the memory that it takes to read one answer.
type reading struct {
	stream stream
	buf    [readSize]byte
}

func newClient(cfg Config) (*client, error) {
	target, err := url.Parse(cfg.target())
	if err != nil {
		return nil, fmt.Errorf("replay: url: %w", err)
	}
	c := &client{
		target:  target,
		header:  http.Header{"Content-Type": {"application/json"}, "Accept": {"text/event-stream"}, "User-Agent": {"spillway-replay"}},
		bodies:  newBodyMaker(cfg.Model, cfg.Endpoint),
		timeout: cfg.Timeout,
		streams: sync.Pool{New: func() any { return new(reading) }},
		transport: &http.Transport{
			DialContext:         (&net.Dialer{KeepAlive: -1}).DialContext,
			DisableCompression:  true,
			MaxIdleConns:        cfg.MaxInFlight,
			MaxIdleConnsPerHost: cfg.MaxInFlight,
			// Below the 5 s of uvicorn, so that a request rarely meets a connection being closed.
			IdleConnTimeout: 4 * time.Second,
			ReadBufferSize:  readSize,
			WriteBufferSize: 64 << 10,
		},
	}
	if c.oracle, err = newOracle(cfg, c.transport); err != nil {
		return nil, err
	}
	if cfg.Via == viaSelect {
		if cfg.Tokenize == nil {
			return nil, errors.New("replay: via: there is no tokenizer")
		}
		c.selector = &selector{
			base: strings.TrimRight(cfg.URL, "/"), path: cfg.path(), model: cfg.Model, tokenize: cfg.Tokenize,
			chat: cfg.Endpoint == "chat", transport: c.transport,
		}
	}
	return c, nil
}

// close drops idle connections. Nothing may be in flight.
func (c *client) close() { c.transport.CloseIdleConnections() }

// send sends what was built for a request that was due at due, and reads the answer to its end. done is called once with the result and what was read, which it must not keep.
func (c *client) send(ctx context.Context, b built, due time.Time, done func(result, *stream)) {
	ctx, cancel := c.patience(ctx, b.req, due)
	defer cancel()
	r := c.streams.Get().(*reading)
	defer c.streams.Put(r)
	r.stream.reset()

	best := c.oracle.ask(ctx, b.oracle, due)

	// Headers and the begin of the body are written to the socket together right after this hook.
	var mu sync.Mutex // the transport's writer may still run when RoundTrip has returned
	var written time.Time
	traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteHeaders: func() {
		mu.Lock()
		if written.IsZero() { // a worker that was chosen for it is called later
			written = time.Now()
		}
		mu.Unlock()
	}})
	var res result
	if c.selector == nil {
		res = c.exchange(traced, b, r, nil)
	} else {
		var chosen *reservation
		if chosen, res = c.selector.ask(traced, b.question); chosen != nil {
			defer chosen.release(ctx)
			res = c.exchange(traced, b, r, chosen)
		}
	}
	res.end, res.best = time.Now(), best
	mu.Lock()
	res.sent, res.lag = !written.IsZero(), written.Sub(due)
	mu.Unlock()
	done(res, &r.stream)
}

// patience returns the context of a request: it ends when the client leaves or loses patience.
func (c *client) patience(ctx context.Context, req *Request, due time.Time) (context.Context, context.CancelFunc) {
	if req.LeaveAfter > 0 && (c.timeout == 0 || req.LeaveAfter < c.timeout) {
		return context.WithDeadlineCause(ctx, due.Add(req.LeaveAfter), errLeft)
	}
	if c.timeout > 0 {
		return context.WithDeadlineCause(ctx, due.Add(c.timeout), errTimeout)
	}
	return context.WithCancel(ctx)
}

// exchange asks the target or, if there is one, the worker that was chosen.
func (c *client) exchange(ctx context.Context, b built, r *reading, chosen *reservation) result {
	hr := (&http.Request{
		Method: http.MethodPost, URL: c.target, Host: c.target.Host, Header: c.header,
		Body: &onceBody{rest: b.body}, ContentLength: int64(len(b.body)),
		// For a connection that the server closed while idle, before anything was written to it.
		GetBody: func() (io.ReadCloser, error) { return &onceBody{rest: c.bodies.build(b.req)}, nil },
	}).WithContext(ctx)
	first := func() {}
	if chosen != nil {
		hr.URL, hr.Host, hr.Header = chosen.target, chosen.target.Host, c.header.Clone()
		hr.Header.Set("X-Data-Parallel-Rank", chosen.rank)
		first = func() { chosen.firstToken(ctx) }
	}
	resp, err := c.transport.RoundTrip(hr)
	if err != nil {
		return broken(ctx, headFailure(err))
	}
	defer resp.Body.Close()
	res := result{worker: resp.Header.Get("X-Spillway-Worker")}
	if chosen != nil {
		res.worker = strconv.FormatUint(chosen.Worker, 10)
	}
	if resp.StatusCode != http.StatusOK {
		return refusal(resp, res)
	}
	err = r.read(resp.Body, first)
	switch s := &r.stream; {
	case s.failed:
		res.outcome, res.detail = failed, "error event"
	case s.malformed:
		res.outcome, res.detail = failed, "malformed stream"
	case s.done: // complete to a client, whatever became of the connection
	case err != nil:
		end := broken(ctx, "truncated")
		res.outcome, res.detail = end.outcome, end.detail
	default:
		res.outcome, res.detail = failed, "truncated"
	}
	return res
}

// headFailure names an error that came before any answer.
func headFailure(err error) string {
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		return "connect"
	}
	return "no response"
}

// broken is the result of a request that an error ended: the client's own going if it went, else
// the given failure.
func broken(ctx context.Context, failure string) result {
	if ctx.Err() == nil {
		return result{outcome: failed, detail: failure}
	}
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errLeft):
		return result{outcome: left}
	case errors.Is(cause, errTimeout):
		return result{outcome: failed, detail: "timeout"}
	}
	return result{outcome: cutOff}
}

// refusal is the result of an answer other than 200. A little of the body is read so that the
// connection can be used again.
func refusal(resp *http.Response, res result) result {
	_, _ = io.CopyN(io.Discard, resp.Body, 64<<10) // what it says is not needed, nor whether it ends
	res.outcome, res.detail = failed, "status "+strconv.Itoa(resp.StatusCode)
	switch resp.StatusCode {
	case http.StatusServiceUnavailable, http.StatusTooManyRequests, 529:
		res.outcome = shed
		if reason := resp.Header.Get("X-Spillway-Reason"); reason != "" {
			res.detail = reason
		}
	}
	return res
}

// read follows the answer to its end. What comes after [DONE] is read too, so that the connection
// can be used again. first is called once, when there is content.
func (r *reading) read(body io.Reader, first func()) error {
	for {
		n, err := body.Read(r.buf[:])
		if n > 0 {
			r.stream.feed(r.buf[:n], time.Now())
		}
		if first != nil && !r.stream.first.IsZero() {
			first()
			first = nil
		}
		if errors.Is(err, io.EOF) {
			r.stream.feed([]byte("\n"), time.Now()) // the last line may lack its end
			return nil
		}
		if err != nil || r.stream.malformed {
			return err
		}
	}
}
