// Package upstream talks HTTP/1.1 to one worker over its own keep-alive pool. An exchange
// runs in the caller's goroutine: no goroutine per connection, one write for head and body,
// response bytes handed out from the buffer that received them.
package upstream

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"sync"
	"time"
)

// What can go wrong in an exchange. Every error of Do, Read and Next is one of these, or the
// context's (errors.Is with context.Canceled, context.DeadlineExceeded or the cause), or
// os.ErrDeadlineExceeded when a deadline set by the caller passed.
var (
	// ErrDial: no connection, TLS included, could be made. The worker has seen nothing.
	ErrDial = errors.New("cannot connect")
	// ErrReset: the worker closed or reset the connection before a whole response head.
	ErrReset = errors.New("connection lost before the response head")
	// ErrHeader: the response head is malformed or larger than allowed.
	ErrHeader = errors.New("bad response head")
	// ErrFraming: where the body ends cannot be known: bad or contradicting lengths, an
	// unknown transfer coding, a bad chunk.
	ErrFraming = errors.New("bad response framing")
	// ErrTruncated: the connection ended inside the body.
	ErrTruncated = errors.New("response body cut short")
	// ErrRequest: the request cannot be put on the wire; nothing was sent.
	ErrRequest = errors.New("bad request")
	// ErrClosed: the response was read after its Close.
	ErrClosed = errors.New("upstream: response is closed")
)

// Config bounds a Client. A zero field takes its default.
type Config struct {
	DialTimeout    time.Duration // for TCP and TLS together; default 2 s
	MaxIdle        int           // idle connections kept; default 256
	IdleTimeout    time.Duration // age at which an idle connection is closed; default 4 s
	MaxHeaderBytes int           // largest response head; default 1 MiB
	TLS            *tls.Config   // for https endpoints, or nil for the system's roots
}

func (c Config) withDefaults() Config {
	if c.DialTimeout <= 0 {
		c.DialTimeout = 2 * time.Second
	}
	if c.MaxIdle <= 0 {
		c.MaxIdle = 256
	}
	if c.IdleTimeout <= 0 {
		c.IdleTimeout = 4 * time.Second
	}
	if c.MaxHeaderBytes <= 0 {
		c.MaxHeaderBytes = 1 << 20
	}
	return c
}

// Client talks to one worker. It is safe for concurrent use.
type Client struct {
	cfg  Config
	addr string      // host:port to dial
	host string      // Host header
	base string      // put before every request path; no slash at its end
	tls  *tls.Config // nil for http

	mu     sync.Mutex // guards the fields below; no I/O is done while it is held
	idle   []*conn    // by the time they became idle, oldest first
	sweep  *time.Timer
	armed  bool // sweep will fire
	closed bool

	streams watched
}

// New returns a Client for the worker at endpoint, an http or https URL whose path, if any,
// is put before each request's. Nothing is dialled yet.
func New(endpoint *url.URL, cfg Config) (*Client, error) {
	c := &Client{cfg: cfg.withDefaults(), host: endpoint.Host, base: strings.TrimSuffix(endpoint.EscapedPath(), "/")}
	port := endpoint.Port()
	switch endpoint.Scheme {
	case "http":
		if port == "" {
			port = "80"
		}
	case "https":
		if port == "" {
			port = "443"
		}
		c.tls = &tls.Config{MinVersion: tls.VersionTLS12}
		if cfg.TLS != nil {
			c.tls = cfg.TLS.Clone()
		}
		c.tls.NextProtos = []string{"http/1.1"}
		if c.tls.ServerName == "" {
			c.tls.ServerName = endpoint.Hostname()
		}
	default:
		return nil, fmt.Errorf("upstream: endpoint %s: scheme is neither http nor https", endpoint.Redacted())
	}
	switch {
	case endpoint.Hostname() == "":
		return nil, fmt.Errorf("upstream: endpoint %s: no host", endpoint.Redacted())
	case endpoint.User != nil || endpoint.RawQuery != "" || endpoint.Fragment != "":
		return nil, fmt.Errorf("upstream: endpoint %s: only scheme, host, port and path are allowed", endpoint.Redacted())
	}
	c.addr = net.JoinHostPort(endpoint.Hostname(), port)
	return c, nil
}

// Do sends req and returns as soon as the response head is there; the caller must Close the
// response. An answer that comes before the worker has read the whole body is returned like
// any other. A reused connection that turns out to be dead before any response byte is
// replaced, once, by a fresh one, unless req.Once. When ctx ends, now or while the body is read, the
// connection is closed at once. The request must not change before the response is closed.
//
// Errors: ErrRequest, ErrDial, ErrReset, ErrHeader, ErrFraming, the context's, or
// os.ErrDeadlineExceeded when req.HeadDeadline passed. After an error nothing is left open.
func (c *Client) Do(ctx context.Context, req *Request) (*Response, error) {
	resp := new(Response)
	if err := c.DoInto(ctx, req, resp); err != nil {
		return nil, err
	}
	return resp, nil
}

// DoInto is Do with the caller's memory for the response: a new one, or one that is closed. After an
// error resp is as good as new.
func (c *Client) DoInto(ctx context.Context, req *Request, resp *Response) error {
	if err := req.check(); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return ended(ctx)
	}
	cn := c.take()
	for {
		reused := cn != nil
		if !reused {
			var err error
			if cn, err = c.dial(ctx, req.HeadDeadline); err != nil {
				return err
			}
		}
		*resp = Response{conn: cn, ctx: ctx, reused: reused}
		err := resp.exchange(req)
		switch {
		case err == nil, !reused:
			return err
		case err == errStale: // it does not count: the worker has seen nothing
			cn = c.take()
		case resp.lost && !req.Once:
			cn = nil
		default:
			return err
		}
	}
}

// Close closes the idle connections now and the others when their exchange ends. Do still
// works afterwards, each time on a connection of its own.
func (c *Client) Close() {
	c.mu.Lock()
	idle := c.idle
	c.idle, c.closed, c.armed = nil, true, false
	if c.sweep != nil {
		c.sweep.Stop()
	}
	c.mu.Unlock()
	closeAll(idle)
}

// ended is the error for an exchange whose context is over.
func ended(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	if err == cause {
		return fmt.Errorf("upstream: exchange given up: %w", err)
	}
	return fmt.Errorf("upstream: exchange given up: %w: %w", err, cause)
}
