package proxy

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"runtime/debug"
	"sync"
	"time"
)

// plainServer serves clients without net/http as long as they say nothing but plain inference requests:
// what net/http does for each of them (a reader, a writer and a context of its own, a goroutine that
// watches the client, header maps that are copied) costs as much CPU as all that Spillway decides. With
// the first request that is not plain the connection goes over to net/http, for good: it is the listener
// of a net/http server.
type plainServer struct {
	net.Listener
	s      *Server
	ctx    context.Context // of all requests
	routes []plainRoute
	rest   chan net.Conn // for net/http
	over   chan struct{} // closed when nobody is accepted any more
	err    error         // why, once over is closed
	talks  sync.WaitGroup
}

// newPlainServer accepts clients from ln at once, until that is closed.
func newPlainServer(ctx context.Context, s *Server, ln net.Listener) *plainServer {
	p := &plainServer{Listener: ln, s: s, ctx: ctx, rest: make(chan net.Conn), over: make(chan struct{})}
	for _, path := range s.inferencePaths() {
		p.routes = append(p.routes, plainRoute{path, url.URL{Path: path}})
	}
	go p.accept()
	return p
}

// Accept waits for the next connection that net/http is to serve.
func (p *plainServer) Accept() (net.Conn, error) {
	select {
	case c := <-p.rest:
		return c, nil
	case <-p.over:
		return nil, p.err
	}
}

// Close ends accepting, if it has not ended.
func (p *plainServer) Close() error {
	if err := p.Listener.Close(); !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// The pauses after an error of Accept that may go by, such as that there are too many connections.
const (
	acceptLeast = 5 * time.Millisecond
	acceptMost  = time.Second
)

func (p *plainServer) accept() {
	defer close(p.over)
	pause := time.Duration(0)
	for {
		nc, err := p.Listener.Accept()
		if passing, ok := err.(interface{ Temporary() bool }); ok && passing.Temporary() {
			pause = min(max(2*pause, acceptLeast), acceptMost)
			p.s.log.Warn("a client could not be accepted", "err", err)
			time.Sleep(pause)
			continue
		} else if err != nil {
			p.err = err
			return
		}
		pause = 0
		p.talks.Go(func() { p.talk(nc.(*clientConn)) })
	}
}

// shutdown ends all connections whose clients ask for nothing, and waits for the others; when ctx ends,
// they are closed too. The listener must be closed, and the server be stopping.
func (p *plainServer) shutdown(ctx context.Context) {
	<-p.over
	p.s.clients.close(clientsTurn)
	done := make(chan struct{})
	go func() { p.talks.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		p.s.clients.close(serversTurn)
		<-done // no connection waits for its client any more: see talk
	}
}

// Whose turn it is on a connection.
const (
	elsewhere   int32 = iota // it is not in the hands of a plainServer
	clientsTurn              // to ask for something
	serversTurn              // to answer
)

// close closes the connections on which it is a certain turn.
func (l *clients) close(which int32) {
	var all []*clientConn
	l.mu.Lock()
	for c := range l.conns {
		if c.turn.Load() == which {
			all = append(all, c)
		}
	}
	l.mu.Unlock()
	for _, c := range all {
		_ = c.Close()
	}
}

// plainTalk is one connection, and the request on it.
type plainTalk struct {
	p       *plainServer
	c       *clientConn
	buf     *[plainBuffer]byte // what was received, and is not used up, is buf[r:w]; nil once all is, or nothing was
	r, w    int
	left    int64 // bytes of the body that have not been read
	cut     bool  // the rest of them will not come
	head    plainHead
	request *http.Request
	url     url.URL
	writer  plainWriter
}

// plainBuffer is how much is read of a client at once, in bytes: a longer head is not plain.
const plainBuffer = 4 << 10

// plainBuffers are those of connections that wait for no request: an answer may take minutes.
var plainBuffers = sync.Pool{New: func() any { return new([plainBuffer]byte) }}

// lingers is how long a client that is still sending has for the answer before the connection is closed.
const lingers = 500 * time.Millisecond

// shortRest is how much of a body that nobody wants, in bytes, is waited for all the same: as net/http does
// for clients that read no answer before they have sent all.
const shortRest = 256 << 10

// talk serves one connection.
func (p *plainServer) talk(c *clientConn) {
	if c.raw == nil { // no socket
		p.handOver(c, nil)
		return
	}
	t := &plainTalk{p: p, c: c}
	t.request = (&http.Request{
		Method: http.MethodPost, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, RemoteAddr: c.RemoteAddr().String(),
	}).WithContext(withClient(p.ctx, c))
	t.writer.t = t
	t.writer.header = make(http.Header, 12)
	for patience := headTimeout; ; patience = p.s.cfg.ClientIdleTimeout {
		c.turn.Store(clientsTurn)
		if stage(p.s.stage.Load()) == stopping || !t.receive(patience) {
			break
		}
		c.turn.Store(serversTurn)
		n := t.head.read(t.buf[t.r:t.w], p.routes)
		if n == 0 {
			p.handOver(c, t.buf[t.r:t.w])
			return
		}
		t.r += n
		if !t.serve() {
			break
		}
	}
	if t.left > 0 && t.writer.err == nil {
		t.linger()
	}
	_ = c.Close()
}

// linger takes in the rest of a body that has its answer, which could be lost otherwise.
func (t *plainTalk) linger() {
	patience := t.p.s.cfg.ClientReadTimeout
	if t.cut || t.left > shortRest || stage(t.p.s.stage.Load()) == stopping {
		patience = lingers
	}
	_ = t.c.CloseWrite()
	_ = t.c.SetReadDeadline(time.Now().Add(patience))
	_, _ = io.Copy(io.Discard, t)
}

// handOver has net/http go on with a connection of which some bytes have been read.
func (p *plainServer) handOver(c *clientConn, read []byte) {
	c.turn.Store(elsewhere)
	c.ahead = read
	select {
	case p.rest <- c:
	case <-p.over:
		_ = c.Close()
	}
}

// maxStray is how many line ends may follow a body, in bytes, uncounted: some clients send one, and net/http
// passes over as many.
const maxStray = 4

// receive waits for what the client says next. It reports false if the client has left, or is silent for
// too long.
func (t *plainTalk) receive(patience time.Duration) bool {
	stray := 0
	if t.head.route != nil { // not the first request
		stray = maxStray
	}
	for {
		for ; stray > 0 && t.r < t.w && (t.buf[t.r] == '\r' || t.buf[t.r] == '\n'); stray-- {
			t.r++
		}
		if t.r < t.w { // it may have said more than one request already
			return true
		}
		if t.c.SetReadDeadline(time.Now().Add(patience)) != nil {
			return false
		}
		if t.buf == nil {
			t.buf = plainBuffers.Get().(*[plainBuffer]byte)
		}
		n, err := t.c.Read(t.buf[:])
		t.r, t.w = 0, n
		if err != nil || n == 0 {
			return false
		}
	}
}

// serve has the request answered whose head has been read. It reports whether another one may follow.
func (t *plainTalk) serve() (goOn bool) {
	t.url, t.left, t.cut = t.head.route.url, t.head.length, false
	r := t.request
	r.URL, r.Header, r.Body = &t.url, t.head.fields, t
	r.Host, r.ContentLength, r.RequestURI = t.head.host, t.head.length, t.head.route.path
	t.writer.reset()
	defer func() {
		if v := recover(); v != nil {
			goOn = false                   // the client is to see that the answer is not whole
			if v != http.ErrAbortHandler { //nolint:errorlint // net/http compares by identity too
				t.p.s.log.Error("panic in a connection", "panic", v, "stack", string(debug.Stack()))
			}
		}
	}()
	t.p.s.public.ServeHTTP(&t.writer, r)
	return t.writer.finish()
}

// Read reads the body.
func (t *plainTalk) Read(p []byte) (n int, err error) {
	if t.left == 0 {
		return 0, io.EOF
	}
	p = p[:min(int64(len(p)), t.left)]
	if t.r < t.w {
		n = copy(p, t.buf[t.r:t.w])
		t.r += n
	} else if n, err = t.c.Read(p); err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	t.cut = err != nil
	if t.left -= int64(n); t.left == 0 {
		if t.r == t.w {
			plainBuffers.Put(t.buf)
			t.buf = nil
		}
		return n, io.EOF
	}
	return n, err
}

// Close leaves what has not been read of the body: only the whole tells where the next request begins.
func (t *plainTalk) Close() error { return nil }

// skip does without the rest of the body, if that has come already.
func (t *plainTalk) skip() bool {
	if int64(t.w-t.r) < t.left {
		return false
	}
	t.r, t.left = t.r+int(t.left), 0
	return true
}
