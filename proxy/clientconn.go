package proxy

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// clientListener makes a clientConn of every connection that has a socket.
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
	sock, ok := nc.(socket)
	if !ok {
		return timedConn{nc, l.writeTimeout}, nil
	}
	raw, err := sock.SyscallConn()
	if err != nil { // it is closed already, which its first Read will tell
		return timedConn{nc, l.writeTimeout}, nil
	}
	c := &clientConn{socket: sock, raw: raw, writeTimeout: l.writeTimeout}
	c.readOnce, c.writeOnce = c.tryRead, c.tryWrite
	return c, nil
}

// timedConn gives each write its time.
type timedConn struct {
	net.Conn
	writeTimeout time.Duration
}

// Write fails with os.ErrDeadlineExceeded when the client takes too long.
func (c timedConn) Write(p []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(c.writeTimeout)); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

// socket is a connection of the operating system.
type socket interface {
	net.Conn
	syscall.Conn
	CloseWrite() error
}

// clientConn is a connection whose deadlines cost nothing unless it has to wait: net/http sets
// several for each request, and most reads and writes are done at once. A read deadline counts only
// for a Read that has to wait, and a Write that has to wait gets writeTimeout.
type clientConn struct {
	socket
	raw          syscall.RawConn
	writeTimeout time.Duration

	// Functions for the runtime, made once, and what they work on.
	readOnce, writeOnce func(fd uintptr) bool
	reading             sync.Mutex // guards the next two over a Read
	in                  []byte
	got                 int
	inErr               error
	writing             sync.Mutex // guards the next three over a Write
	out                 []byte
	sent                int
	outErr              error
	late                bool // the present write has a deadline

	mu      sync.Mutex // guards the fields below; taken after reading
	wanted  time.Time  // read deadline asked for
	armed   time.Time  // read deadline set on the socket
	waiting bool       // a Read waits, or is about to: the deadline has to be armed
}

// Read reads what there is, or waits for it.
func (c *clientConn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	c.reading.Lock()
	defer c.reading.Unlock()
	if err := c.unarm(); err != nil {
		return 0, err
	}
	c.in = p
	err := c.raw.Read(c.readOnce)
	c.in = nil
	c.mu.Lock()
	c.waiting = false
	c.mu.Unlock()
	switch {
	case err != nil: // closed, or the deadline has passed
		return 0, err
	case c.inErr != nil:
		return 0, &net.OpError{Op: "read", Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: os.NewSyscallError("read", c.inErr)}
	case c.got == 0:
		return 0, io.EOF
	}
	return c.got, nil
}

// tryRead reads once. Before the runtime waits for more it arms the deadline.
func (c *clientConn) tryRead(fd uintptr) bool {
	for {
		c.got, c.inErr = syscall.Read(int(fd), c.in)
		switch c.inErr {
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
			c.inErr = c.await()
			return c.inErr != nil
		}
		return true
	}
}

// await arms the deadline for a Read that has to wait.
func (c *clientConn) await() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting = true
	return c.armLocked()
}

// unarm sees to it that no deadline which nobody asks for any more makes the next read fail.
func (c *clientConn) unarm() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.armed.IsZero() {
		return nil
	}
	return c.armLocked()
}

func (c *clientConn) armLocked() error {
	if c.armed.Equal(c.wanted) {
		return nil
	}
	c.armed = c.wanted
	return c.socket.SetReadDeadline(c.wanted)
}

// SetReadDeadline sets the time after which a Read that has to wait fails, one that waits already
// included; zero is never.
func (c *clientConn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wanted = t
	if c.waiting {
		return c.armLocked()
	}
	return nil
}

// SetDeadline sets the read deadline, and the write deadline until a Write has had to wait.
func (c *clientConn) SetDeadline(t time.Time) error {
	if err := c.SetReadDeadline(t); err != nil {
		return err
	}
	return c.SetWriteDeadline(t)
}

// Write writes all of p, or fails with os.ErrDeadlineExceeded when the client takes too long.
func (c *clientConn) Write(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	c.writing.Lock()
	defer c.writing.Unlock()
	c.out, c.sent, c.outErr, c.late = p, 0, nil, false
	err := c.raw.Write(c.writeOnce)
	c.out = nil
	if err == nil && c.outErr != nil {
		err = &net.OpError{Op: "write", Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: os.NewSyscallError("write", c.outErr)}
	}
	if c.late && err == nil {
		err = c.socket.SetWriteDeadline(time.Time{})
	}
	return c.sent, err
}

// tryWrite writes what the socket takes. It reports true when that was all, or nothing more can be
// written; otherwise the runtime waits until there is room, at most writeTimeout from the first time.
func (c *clientConn) tryWrite(fd uintptr) bool {
	for c.sent < len(c.out) {
		n, err := syscall.Write(int(fd), c.out[c.sent:])
		switch err {
		case nil:
			c.sent += n
		case syscall.EINTR:
		case syscall.EAGAIN:
			if !c.late {
				c.late = true
				c.outErr = c.socket.SetWriteDeadline(time.Now().Add(c.writeTimeout))
			}
			return c.outErr != nil
		default:
			c.outErr = err
			return true
		}
	}
	return true
}
