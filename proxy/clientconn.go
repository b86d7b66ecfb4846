package proxy

import (
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"spillway/sockio"
)

// clientListener bounds how long each write to a client may take.
type clientListener struct {
	net.Listener
	clients      *clients // whom it accepts
	writeTimeout time.Duration
}

// Accept waits for the next client.
func (l clientListener) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := newClientConn(nc, l.writeTimeout)
	l.clients.add(c)
	return c, nil
}

// clientConn is a connection whose writes fail with os.ErrDeadlineExceeded when the client does not
// take them in time. It reads and writes by sockio.
//
// A deadline is a timer of the runtime. A stream writes for every event: a write deadline of which no
// more than an eighth has passed is left as it is. net/http sets eight read deadlines for a request:
// one that comes sooner than asked for is left too, and moved by the Read that it wakes.
type clientConn struct {
	net.Conn
	raw          syscall.RawConn // of Conn; nil if that is no socket
	writeTimeout time.Duration
	clients      *clients       // it is one of; set by add
	requests     *clientContext // nil with TLS
	presence     presence
	turn         atomic.Int32 // whose it is
	ahead        []byte       // read already, for the next Reads

	// Of the one Read that is going on, and of the one Write: net/http and TLS see to it that there
	// is no second one.
	read, write func(fd uintptr) bool
	in          []byte
	got         int
	inErr       error
	out         []byte // still to be written
	outErr      error

	mu    sync.Mutex // guards the fields below
	until time.Time  // write deadline that is set, unless asked
	asked bool       // another one was asked for, which counts until it is taken off
	due   time.Time  // read deadline that counts; zero is none
	set   time.Time  // the one that is set: not later than due, and zero only if due is
}

// spare is how far off a read deadline is set in place of one that has woken a Read. It is as long as
// net/http gives a client for the head of its next request, so that it need not be moved for that.
const spare = headTimeout

// longAgo is later than what stands for a deadline in the past.
var longAgo = time.Unix(1<<30, 0)

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
	if len(c.ahead) > 0 {
		n := copy(p, c.ahead)
		if c.ahead = c.ahead[n:]; len(c.ahead) == 0 {
			c.ahead = nil // or its memory would stay as long as the connection
		}
		return n, nil
	}
	if c.raw == nil || len(p) == 0 {
		return c.Conn.Read(p)
	}
	if c.presence.spares(len(p)) {
		return 0, nil
	}
	defer c.presence.read()
	for {
		c.in, c.got, c.inErr = p, 0, nil
		err := c.raw.Read(c.read)
		c.in = nil
		switch {
		case err != nil && isTimeout(err) && c.early():
		case err == nil && (c.inErr == nil || c.inErr == io.EOF):
			return c.got, c.inErr
		default:
			return 0, c.named("read", err, c.inErr)
		}
	}
}

// isTimeout is what errors.Is would tell of an error of a RawConn, quickly: each request ends one Read
// of net/http's by a deadline.
func isTimeout(err error) bool {
	oe, ok := err.(*net.OpError)
	return ok && oe.Timeout()
}

// early tells whether the deadline that has passed came before its time, and sets the one that counts.
func (c *clientConn) early() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.due.IsZero() && !time.Now().Before(c.due) {
		return false
	}
	c.set = c.due
	return c.Conn.SetReadDeadline(c.set) == nil
}

// SetReadDeadline is net.Conn's.
func (c *clientConn) SetReadDeadline(t time.Time) error {
	if c.raw == nil {
		return c.Conn.SetReadDeadline(t)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.due = t
	switch {
	case c.presence.spared() && t.Before(longAgo) && !t.IsZero(): // there is no Read to wake
		return nil
	case !t.IsZero() && (c.set.IsZero() || t.Before(c.set)):
		c.set = t
	case c.set.Before(longAgo) && !c.set.IsZero(): // it was to wake a Read, and would wake the next one too
		c.set = earlier(time.Now().Add(spare), t)
	default:
		return nil
	}
	return c.Conn.SetReadDeadline(c.set)
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
			c.inErr = err
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
	c.out, c.outErr = p, nil
	err := c.raw.Write(c.write)
	n := len(p) - len(c.out)
	c.out = nil
	if err == nil && c.outErr == nil {
		return n, nil
	}
	return n, c.named("write", err, c.outErr)
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
			c.outErr = err
			return true
		}
	}
	return true
}

// named makes one error of a RawConn's or else of a system call's, as Read and Write of the runtime's
// own would tell it: net/http goes by the Op.
func (c *clientConn) named(op string, raw, call error) error {
	if oe, ok := raw.(*net.OpError); ok {
		oe.Op = op
		return oe
	} else if raw != nil {
		return raw
	}
	return &net.OpError{Op: op, Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: os.NewSyscallError(op, call)}
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

// Close ends the connection, and the context of its requests.
func (c *clientConn) Close() error {
	c.clients.remove(c)
	if c.requests != nil {
		c.requests.close()
	}
	return c.Conn.Close()
}

// CloseWrite tells the client that nothing more comes, where that can be told. net/http does so when
// it has answered without having read all that the client sends.
func (c *clientConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}
