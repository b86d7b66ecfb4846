package proxy

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"spillway/proxy/sockio"
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
	return newClientConn(nc, l.writeTimeout), nil
}

// clientConn is a connection whose writes fail with os.ErrDeadlineExceeded when the client does not
// take them in time. A deadline is a timer of the runtime, and a stream writes for every event: one
// of which no more than an eighth has passed is left as it is. It reads and writes by sockio.
type clientConn struct {
	net.Conn
	raw          syscall.RawConn // of Conn; nil if that is no socket
	writeTimeout time.Duration

	readMu sync.Mutex // held by Read; guards what follows
	read   func(fd uintptr) bool
	in     []byte
	got    int
	inErr  error

	writeMu sync.Mutex // held by Write; guards what follows
	write   func(fd uintptr) bool
	out     []byte // still to be written
	outErr  error

	mu    sync.Mutex // guards the fields below
	until time.Time  // write deadline that is set, unless asked
	asked bool       // another one was asked for, which counts until it is taken off
}

func newClientConn(nc net.Conn, writeTimeout time.Duration) *clientConn {
	c := &clientConn{Conn: nc, writeTimeout: writeTimeout}
	if socket, ok := nc.(syscall.Conn); ok {
		if raw, err := socket.SyscallConn(); err == nil {
			c.raw, c.read, c.write = raw, c.readOnce, c.writeAll
		}
	}
	return c
}

// Read is net.Conn's.
func (c *clientConn) Read(p []byte) (int, error) {
	if c.raw == nil || len(p) == 0 {
		return c.Conn.Read(p)
	}
	c.readMu.Lock()
	defer c.readMu.Unlock()
	c.in, c.got, c.inErr = p, 0, nil
	err := c.raw.Read(c.read)
	c.in = nil
	if err == nil {
		err = c.inErr
	}
	return c.got, c.named("read", err)
}

func (c *clientConn) readOnce(fd uintptr) bool {
	for {
		n, err := sockio.Read(fd, c.in)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			return false
		case err != nil:
			c.inErr = os.NewSyscallError("read", err)
		case n == 0:
			c.inErr = io.EOF
		default:
			c.got = n
		}
		return true
	}
}

// Write fails with os.ErrDeadlineExceeded when it takes longer than writeTimeout, or up to an eighth
// less than that.
func (c *clientConn) Write(p []byte) (int, error) { return c.writeTimed(p, time.Now()) }

func (c *clientConn) writeTimed(p []byte, now time.Time) (int, error) {
	if err := c.arm(now); err != nil {
		return 0, err
	}
	if c.raw == nil {
		return c.Conn.Write(p)
	}
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	c.out, c.outErr = p, nil
	err := c.raw.Write(c.write)
	if err == nil {
		err = c.outErr
	}
	n := len(p) - len(c.out)
	c.out = nil
	return n, c.named("write", err)
}

func (c *clientConn) writeAll(fd uintptr) bool {
	for len(c.out) > 0 {
		n, err := sockio.Write(fd, c.out)
		switch {
		case err == nil:
			c.out = c.out[n:]
		case err == syscall.EAGAIN:
			return false
		case err != syscall.EINTR:
			c.outErr = os.NewSyscallError("write", err)
			return true
		}
	}
	return true
}

// named is err as Read and Write of the runtime's own would tell it: net/http goes by the Op.
func (c *clientConn) named(op string, err error) error {
	if err == nil || err == io.EOF {
		return err
	}
	var raw *net.OpError // of raw.Read or raw.Write
	if errors.As(err, &raw) {
		err = raw.Err
	}
	return &net.OpError{Op: op, Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
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
