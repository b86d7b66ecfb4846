package proxy

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"spillway/sockio"
)

// clients are the connections of clients. Those whose request is being served are looked at now and
// then, to find clients that have left.
//
// net/http does so by a Read beside the handler, from when the body has been read. Short requests pay
// for that: a goroutine, a read that finds nothing, and a deadline in the past to end it. presence
// spares them the Read, which then finds nothing at once, and look takes its place.
type clients struct {
	mu    sync.Mutex // guards the field below; no I/O is done while it is held
	conns map[*clientConn]struct{}

	// Scratch of look. It goes round ten times a second, and what that leaves to the garbage collector
	// adds up to as much as the streams themselves.
	round []*clientConn
	left  bool
	peek  func(fd uintptr) // sets left
}

// lookEvery is the time between two rounds of look. A client that has left is noticed within twice
// that; a request that takes less is never looked at.
const lookEvery = 100 * time.Millisecond

func (l *clients) add(c *clientConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conns == nil {
		l.conns = map[*clientConn]struct{}{}
	}
	l.conns[c] = struct{}{}
	c.clients = l
}

func (l *clients) remove(c *clientConn) {
	l.mu.Lock()
	delete(l.conns, c)
	l.mu.Unlock()
}

// look ends the contexts of clients that have left, as net/http would, among those whose request has
// been served since the last round. Like net/http it cannot tell those that have only stopped sending,
// and notices nobody who has sent more than the request. One goroutine calls it.
func (l *clients) look() {
	if l.peek == nil {
		l.peek = func(fd uintptr) { l.left = sockio.Ended(fd) }
	}
	l.mu.Lock()
	for c := range l.conns {
		if c.presence.due() {
			l.round = append(l.round, c)
		}
	}
	l.mu.Unlock()
	for _, c := range l.round {
		l.left = false
		if err := c.raw.Control(l.peek); l.left || err != nil {
			c.requests.end()
		}
	}
	clear(l.round) // it would keep connections in memory
	l.round = l.round[:0]
}

// presence is whether the client of a request is still there, as far as that is asked for. The zero
// value is that of a connection without a request.
type presence struct {
	watch atomic.Int32 // net/http's, one of the below
	turns atomic.Int32 // rounds of look until the client is looked at; 0: nobody wants to know
}

const (
	unknown  int32 = iota
	spared         // the next Read of one byte is net/http's, and finds nothing
	watching       // a Read of one byte is going on
)

// serving notes that the request on c has come whole: until served the client is looked after.
func (c *clientConn) serving() {
	if c == nil || c.raw == nil {
		return
	}
	if c.turn.Load() == elsewhere {
		c.presence.watch.CompareAndSwap(unknown, spared) // or net/http has been quick and reads already
	}
	c.presence.turns.Store(2)
}

// served ends what serving has begun.
func (c *clientConn) served() {
	if c != nil {
		c.presence.turns.Store(0)
	}
}

// due tells, once in a round, whether the client is to be looked at.
func (p *presence) due() bool {
	n := p.turns.Load()
	if n > 1 {
		p.turns.CompareAndSwap(n, n-1)
	}
	return n == 1
}

// spares tells whether a Read of so many bytes is to find nothing. Otherwise it begins, and read
// ends it.
func (p *presence) spares(bytes int) bool {
	if bytes != 1 { // no watch
		if p.spared() {
			p.watch.Store(unknown)
		}
		return false
	}
	for {
		switch {
		case p.watch.CompareAndSwap(spared, unknown):
			return true
		case p.watch.CompareAndSwap(unknown, watching):
			return false
		}
	}
}

func (p *presence) read() { p.watch.CompareAndSwap(watching, unknown) }

// spared tells whether a Read is to be spared.
func (p *presence) spared() bool { return p.watch.Load() == spared }

// clientContext is the context of all requests on one connection: it ends when the client leaves, the
// server stops or the connection is closed. Unlike context.AfterFunc, its own costs no memory.
type clientContext struct {
	context.Context
	end  context.CancelFunc // of Context
	stop func() bool        // ended is to be called
	undo func() bool        // what AfterFunc returns

	mu sync.Mutex // guards f; nothing is called while it is held
	f  func()     // to be called at the end, or nil
}

func newClientContext(parent context.Context) *clientContext {
	c := &clientContext{}
	c.Context, c.end = context.WithCancel(parent)
	c.stop = context.AfterFunc(c.Context, c.ended)
	c.undo = func() bool { return c.take() != nil }
	return c
}

// AfterFunc is context.AfterFunc for this context.
func (c *clientContext) AfterFunc(f func()) (stop func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.f != nil || c.Err() != nil { // a second one, which a request has no use for, or it is late
		return context.AfterFunc(c.Context, f)
	}
	c.f = f
	return c.undo
}

// take takes back what was to be called, nil if there is nothing.
func (c *clientContext) take() func() {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.f
	c.f = nil
	return f
}

func (c *clientContext) ended() {
	if f := c.take(); f != nil {
		f()
	}
}

// close ends the context. Nobody is called in the goroutine of the caller, who may be waited for.
func (c *clientContext) close() {
	c.stop()
	c.end()
	if f := c.take(); f != nil {
		go f()
	}
}
