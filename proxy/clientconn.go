package proxy

import (
	"net"
	"sync"
	"time"
)

// clientListener bounds how long each write to a client may take.
type clientListener struct {
	net.Listener
	writeTimeout time.Duration
}

// Accept waits for the next client.
func (l clientListener) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &clientConn{Conn: nc, writeTimeout: l.writeTimeout}, nil
}

// clientConn is a connection whose writes fail with os.ErrDeadlineExceeded when the client does not
// take them in time. A deadline is a timer of the runtime, and a stream writes for every event: one
// of which no more than an eighth has passed is left as it is.
type clientConn struct {
	net.Conn
	writeTimeout time.Duration

	mu    sync.Mutex // guards the fields below
	until time.Time  // write deadline that is set, unless asked
	asked bool       // another one was asked for, which counts until it is taken off
}

// Write fails with os.ErrDeadlineExceeded when it takes longer than writeTimeout, or up to an eighth
// less than that.
func (c *clientConn) Write(p []byte) (int, error) {
	if err := c.arm(time.Now()); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

func (c *clientConn) arm(now time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.asked || c.until.Sub(now) >= c.writeTimeout-c.writeTimeout/8 {
		return nil
	}
	c.until = now.Add(c.writeTimeout)
	return c.Conn.SetWriteDeadline(c.until)
}

// SetWriteDeadline has t count instead of writeTimeout, until it is zero. net/http asks for that
// after every request.
func (c *clientConn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.asked && t.IsZero() {
		return nil
	}
	c.asked, c.until = !t.IsZero(), time.Time{}
	return c.Conn.SetWriteDeadline(t)
}

// SetDeadline sets both deadlines.
func (c *clientConn) SetDeadline(t time.Time) error {
	if err := c.SetReadDeadline(t); err != nil {
		return err
	}
	return c.SetWriteDeadline(t)
}

// CloseWrite tells the client that nothing more comes, where that can be told. net/http does so when
// it has answered without having read all that the client sends.
func (c *clientConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}
