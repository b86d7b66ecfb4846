package upstream

import (
	"context"
	"net"
)

// Receive reads the answer to method from nc, as if a request had been sent on it. If the
// connection can be used again, it is idle in the returned client after the response's Close.
func Receive(method string, nc net.Conn, cfg Config) (*Client, *Response, error) {
	c := &Client{cfg: cfg.withDefaults()}
	r := &Response{conn: &conn{client: c, nc: nc, sock: nc}, ctx: context.Background()}
	if err := r.receive(method); err != nil {
		r.end(false)
		return c, nil, err
	}
	return c, r, nil
}

// Watched returns the number of connections that are looked at for an end that went unnoticed.
func (c *Client) Watched() int {
	c.streams.mu.Lock()
	defer c.streams.mu.Unlock()
	return len(c.streams.conns)
}

// BufferBytes is the memory that the response holds for reading.
func (r *Response) BufferBytes() int { return cap(r.in.buf) }
