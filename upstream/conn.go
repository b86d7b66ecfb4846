package upstream

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"spillway/sockio"
)

// inlineTLS is the largest body that is encrypted and written by the caller's goroutine. It
// fits the socket buffers of both sides, so that the write cannot wait for the worker.
const inlineTLS = 16 << 10

// lastWrite is how long a request may still be on its way once its answer has been read.
const lastWrite = time.Millisecond

// conn is one connection to the worker. It holds no buffer while it is idle.
type conn struct {
	client    *Client
	nc        net.Conn // what is read and written: sock, or TLS over it
	sock      net.Conn
	raw       syscall.RawConn // of sock
	idleSince time.Time

	// Functions for the runtime, made once per connection, and what they work on.
	abort  func()                // closes sock; run by context.AfterFunc
	writev func(fd uintptr) bool // one non-blocking write of out
	turn   func(fd uintptr) bool // probe, writev, and readin when the answer comes; nil with TLS
	probe  func(fd uintptr) bool // one non-blocking read of a byte
	readin func(fd uintptr) bool // one non-blocking read into in; nil with TLS
	listen func(fd uintptr) bool // reads into in, and hand after each read
	direct func(fd uintptr) bool // one non-blocking read into dst; nil with TLS
	hand   func() bool           // whether to go on reading
	in     *input
	inErr  error
	dst    []byte
	got    int
	out    [2][]byte
	wrote  int
	outErr error
	silent bool
	asked  bool   // turn has written all of out
	onSent func() // the request's Sent, for turn

	unsure atomic.Int32 // rounds of look until it is; 0: no end of the worker's can have gone unnoticed
}

// unsureFor is how many rounds of look a connection is left alone after a read. One that is read
// all the time notices an end by itself.
const unsureFor = 2

// errStale means that an idle connection was found closed, or with something unasked on it; nothing
// was sent.
var errStale = errors.New("upstream: stale connection")

// dial makes a connection to the worker, until the given time if it is not zero. Its errors are
// ErrDial and the context's.
func (c *Client) dial(ctx context.Context, until time.Time) (*conn, error) {
	if latest := time.Now().Add(c.cfg.DialTimeout); until.IsZero() || latest.Before(until) {
		until = latest
	}
	limited, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	var d net.Dialer
	sock, err := d.DialContext(limited, "tcp", c.addr)
	if err != nil {
		return nil, dialError(ctx, c.addr, err)
	}
	raw, err := sock.(*net.TCPConn).SyscallConn()
	if err != nil {
		return nil, errors.Join(dialError(ctx, c.addr, err), sock.Close())
	}
	cn := &conn{client: c, nc: sock, sock: sock, raw: raw}
	if c.tls != nil {
		secure := tls.Client(sock, c.tls)
		if err := secure.HandshakeContext(limited); err != nil {
			_ = sock.Close() // the handshake's error says more
			return nil, dialError(ctx, c.addr, err)
		}
		cn.nc = secure
	}
	cn.abort = func() {
		// A worker that is sending and waits for room is told only by a reset. The kernel makes none
		// by itself if what the worker had sent is read to the end before the socket is closed.
		_ = sock.(*net.TCPConn).SetLinger(0)
		cn.shut() // closing waits for who is reading, whom each lets wait for others
		_ = cn.sock.Close()
	}
	cn.writev = cn.writeOnce
	cn.probe = cn.readOnce
	if c.tls == nil {
		cn.readin, cn.turn, cn.listen, cn.direct = cn.fillOnce, cn.turnOnce, cn.listenOnce, cn.directOnce
	}
	return cn, nil
}

// dialError hides a time-out of ours behind its text: it must not look like the caller's
// context having ended.
func dialError(ctx context.Context, addr string, err error) error {
	if ctx.Err() != nil {
		return ended(ctx)
	}
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("upstream: dial %s: %w: %v", addr, ErrDial, err)
	}
	return fmt.Errorf("upstream: dial %s: %w: %w", addr, ErrDial, err)
}

// close closes a connection that is idle: nothing is on its way that saying goodbye, as TLS
// does, would have to wait for.
func (cn *conn) close() { _ = cn.nc.Close() }

// quiet reports whether an idle connection with TLS is open and nothing has come in: a worker that
// closed it, or that says something unasked, must not be taken for one that answers. Without TLS
// ask finds out.
func (cn *conn) quiet() bool {
	cn.silent = false
	if err := cn.raw.Read(cn.probe); err != nil || !cn.silent {
		return false
	}
	// TLS may hold decrypted or whole records of its own; with a deadline in the past it
	// looks no further than that.
	var b [1]byte
	if err := cn.nc.SetReadDeadline(time.Unix(1, 0)); err != nil {
		return false
	}
	_, err := cn.nc.Read(b[:])
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout() && cn.nc.SetReadDeadline(time.Time{}) == nil
}

func (cn *conn) readOnce(fd uintptr) bool {
	var b [1]byte
	_, err := sockio.Read(fd, b[:])
	cn.silent = err == syscall.EAGAIN
	return true
}

// fill reads once into in, making room first. What was handed out before is overwritten. While
// there is nothing to read, in holds no buffer, but with TLS.
func (cn *conn) fill(in *input) error {
	if cn.readin == nil {
		return in.fill(cn.nc)
	}
	cn.in, cn.inErr = in, nil
	err := cn.raw.Read(cn.readin)
	cn.in = nil
	if err == nil {
		err = cn.inErr
	}
	return err
}

// readTo reads once into p, which is not empty.
func (cn *conn) readTo(p []byte) (n int, err error) {
	if cn.direct == nil {
		return cn.nc.Read(p)
	}
	cn.dst, cn.got, cn.inErr = p, 0, nil
	err = cn.raw.Read(cn.direct)
	cn.dst = nil
	if err == nil {
		err = cn.inErr
	}
	return cn.got, err
}

func (cn *conn) directOnce(fd uintptr) bool {
	for {
		n, err := sockio.Read(fd, cn.dst)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			return false
		case err != nil:
			cn.inErr = os.NewSyscallError("read", err)
		case n == 0:
			cn.inErr = io.EOF
		default:
			cn.got = n
		}
		return true
	}
}

func (cn *conn) fillOnce(fd uintptr) bool {
	in := cn.in
	in.makeRoom()
	for {
		n, err := sockio.Read(fd, in.buf[in.w:])
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			in.idle()
			return false
		case err != nil:
			cn.inErr = os.NewSyscallError("read", err)
		case n == 0:
			cn.inErr = io.EOF
		default:
			in.w += n
		}
		return true
	}
}

// each reads into in and calls hand after each read, until that tells to stop. The worker's data are
// told once, when they come, so a read that has emptied the socket, as one that leaves room in the
// buffer has, needs no second one to see that nothing is left. But an end that came with the data
// was told with them: until look has looked for it, it may have gone unnoticed.
func (cn *conn) each(in *input, hand func() bool) error {
	cn.in, cn.inErr, cn.hand = in, nil, hand
	cn.client.watch(cn)
	defer cn.client.unwatch(cn) // after a panic of hand's too
	err := cn.raw.Read(cn.listen)
	cn.in, cn.hand = nil, nil
	if err == nil {
		err = cn.inErr
	}
	return err
}

func (cn *conn) listenOnce(fd uintptr) bool {
	for {
		if !cn.fillOnce(fd) {
			return false
		}
		emptied := cn.in.w < len(cn.in.buf)
		if cn.inErr != nil || !cn.hand() {
			return true
		}
		if emptied {
			cn.in.idle()
			if cn.unsure.Load() != unsureFor {
				cn.unsure.Store(unsureFor)
			}
			return false
		}
	}
}

// look sees to it that the reader of a connection that has been unsure since the last but one round
// is woken if the worker has ended it: shutting what is shut changes nothing, but is told.
func (cn *conn) look() {
	if n := cn.unsure.Load(); n == 0 || !cn.unsure.CompareAndSwap(n, n-1) || n > 1 {
		return
	}
	ended := false
	_ = cn.raw.Control(func(fd uintptr) { ended = sockio.Ended(fd) }) // or it is closed
	if ended {
		cn.shut()
	}
}

// shut ends both directions at once, whoever is using the connection.
func (cn *conn) shut() {
	_ = cn.raw.Control(func(fd uintptr) { _ = syscall.Shutdown(int(fd), syscall.SHUT_RDWR) })
}

// ask is send on a connection that was idle, which then waits for the first bytes of the answer. It
// is one call of the runtime's and does no read that cannot find anything: the probe has found
// nothing, so whatever comes after it will be told. errStale means that nothing was sent.
func (cn *conn) ask(head *headBuffer, body []byte, in *input) (chan error, error) {
	cn.out[0], cn.out[1] = head.b, body
	cn.wrote, cn.outErr, cn.silent, cn.asked = 0, nil, false, false
	cn.in, cn.inErr = in, nil
	err := cn.raw.Read(cn.turn)
	cn.out, cn.in = [2][]byte{}, nil
	switch {
	case err != nil: // closed by us, or the deadline has passed
	case !cn.silent:
		err = errStale
	case !cn.asked:
		return cn.sent(head, body, cn.outErr)
	default:
		err = cn.inErr
	}
	head.release()
	return nil, err
}

func (cn *conn) turnOnce(fd uintptr) bool {
	if cn.asked {
		return cn.fillOnce(fd)
	}
	if cn.readOnce(fd); !cn.silent {
		return true
	}
	cn.writeOnce(fd)
	if cn.onSent != nil {
		cn.onSent()
	}
	cn.asked = cn.outErr == nil && cn.wrote == len(cn.out[0])+len(cn.out[1])
	return !cn.asked
}

// send writes head and body. What does not fit into the socket at once is written by a
// second goroutine, so that an answer which comes first is seen; its result comes from the
// returned channel, which is nil if all was written. A connection that the worker has shut
// is no error here: it may have answered before.
func (cn *conn) send(head *headBuffer, body []byte) (chan error, error) {
	if cn.nc != cn.sock {
		return cn.sendTLS(head, body)
	}
	cn.out[0], cn.out[1] = head.b, body
	cn.wrote, cn.outErr = 0, nil
	err := cn.raw.Write(cn.writev)
	cn.out = [2][]byte{}
	if err == nil {
		err = cn.outErr
	}
	return cn.sent(head, body, err)
}

// sent deals with what a write has left.
func (cn *conn) sent(head *headBuffer, body []byte, err error) (chan error, error) {
	n := cn.wrote
	switch {
	case err != nil:
		head.release()
		return nil, shutByWorker(err)
	case n == len(head.b)+len(body):
		head.release()
		return nil, nil
	case n < len(head.b):
		return cn.sendRest(head.b[n:], body), nil
	default:
		n -= len(head.b)
		head.release()
		return cn.sendRest(nil, body[n:]), nil
	}
}

func (cn *conn) sendTLS(head *headBuffer, body []byte) (chan error, error) {
	if len(body) > inlineTLS {
		return cn.sendRest(head.b, body), nil
	}
	head.b = append(head.b, body...)
	_, err := cn.nc.Write(head.b)
	head.release()
	return nil, shutByWorker(err)
}

// sendRest starts the goroutine that writes what is left. It ends when all is written or the
// connection is closed, and is joined by Response.end.
func (cn *conn) sendRest(head, body []byte) chan error {
	done := make(chan error, 1)
	go func() {
		rest := net.Buffers{body}
		if len(head) > 0 {
			rest = net.Buffers{head, body}
		}
		_, err := rest.WriteTo(cn.nc)
		done <- err
	}()
	return done
}

// join waits for the goroutine that sends the rest and reports whether the connection is
// whole. If it is not wanted any more, it is closed first. Otherwise the worker has answered
// without an error of ours, most likely because it has read everything: the goroutine, which
// may not have been told yet, gets a moment to find out.
func (cn *conn) join(sending <-chan error, keep bool) bool {
	if !keep || cn.sock.SetWriteDeadline(time.Now().Add(lastWrite)) != nil {
		_ = cn.sock.Close()
		<-sending
		return false
	}
	return <-sending == nil && cn.sock.SetWriteDeadline(time.Time{}) == nil
}

func (cn *conn) writeOnce(fd uintptr) bool {
	for {
		n, err := sockio.Writev(fd, cn.out[0], cn.out[1])
		switch err {
		case nil:
			cn.wrote = n
		case syscall.EINTR:
			continue
		case syscall.EAGAIN: // nothing fits; the rest is everything
		default:
			cn.outErr = err
		}
		return true
	}
}

// shutByWorker drops the errors after which an answer may still be waiting to be read.
func shutByWorker(err error) error {
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
