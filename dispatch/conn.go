package dispatch

import (
	"context"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"spillway/sockio"
)

// quietConn is a connection to Redis whose calls do not tell the scheduler; see sockio. One goroutine may
// read while another one writes.
type quietConn struct {
	net.Conn
	raw         syscall.RawConn
	read, write transfer
}

// transfer is one call of Read or Write, for a function that is made once.
type transfer struct {
	step func(fd uintptr) bool
	p    []byte
	n    int
	err  error
}

// dialQuietly is for redis.Options without TLS.
func dialQuietly(ctx context.Context, network, addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: 5 * time.Second, KeepAlive: 5 * time.Minute} // as go-redis has it
	c, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return c, nil
	}
	q := &quietConn{Conn: c}
	if q.raw, err = tcp.SyscallConn(); err != nil {
		_ = c.Close()
		return nil, err
	}
	q.read.step, q.write.step = q.readOnce, q.writeOnce
	return q, nil
}

// Read implements net.Conn.
func (q *quietConn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	return q.read.do(p, q.raw.Read)
}

// Write implements net.Conn.
func (q *quietConn) Write(p []byte) (int, error) { return q.write.do(p, q.raw.Write) }

func (t *transfer) do(p []byte, call func(func(fd uintptr) bool) error) (int, error) {
	t.p, t.n, t.err = p, 0, nil
	err := call(t.step)
	t.p = nil
	if err == nil {
		err = t.err
	}
	return t.n, err
}

func (q *quietConn) readOnce(fd uintptr) bool {
	t := &q.read
	for {
		n, err := sockio.Read(fd, t.p)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			return false
		case err != nil:
			t.err = os.NewSyscallError("read", err)
		case n == 0:
			t.err = io.EOF
		default:
			t.n = n
		}
		return true
	}
}

func (q *quietConn) writeOnce(fd uintptr) bool {
	t := &q.write
	for t.n < len(t.p) {
		n, err := sockio.Write(fd, t.p[t.n:])
		switch {
		case err == nil:
			t.n += n
		case err == syscall.EINTR:
		case err == syscall.EAGAIN:
			return false
		default:
			t.err = os.NewSyscallError("write", err)
			return true
		}
	}
	return true
}
