package proxy

import (
	"context"
	"net"
	"strconv"
	"sync"
	"time"
)

// clientKey is the key of a connection's clientConn in the contexts of its requests.
type clientKey struct{}

// withClient remembers the connection that HTTP is spoken on, unless that is TLS, and has the requests
// on it end when its client leaves.
func withClient(ctx context.Context, nc net.Conn) context.Context {
	c, ok := nc.(*clientConn)
	if !ok {
		return ctx
	}
	if c.requests == nil {
		c.requests = newClientContext(ctx)
	}
	return context.WithValue(c.requests, clientKey{}, c)
}

// clientOf is the connection that a request has come on, nil if that is not known.
func clientOf(ctx context.Context) *clientConn {
	c, _ := ctx.Value(clientKey{}).(*clientConn)
	return c
}

// chunks is the connection of a client whose answer goes out in chunks, nil if it does not: net/http
// uses them with HTTP/1.1 where the length is not given.
func (x *exchange) chunks() *clientConn {
	if !x.req.ProtoAtLeast(1, 1) || x.w.Header()["Content-Length"] != nil {
		return nil
	}
	return x.client
}

// frames are buffers for chunks on their way out; larger ones than keptFrame, in bytes, are not kept.
var frames = sync.Pool{New: func() any { b := make([]byte, 0, 1<<10); return &b }}

const keptFrame = 32 << 10

// writeChunk writes p as one chunk, in one write. The returned number is of p's bytes that may have
// been written. After an error the connection is closed, as net/http would close it: the client may have
// a part of the chunk, and take what comes next, be it the last chunk or another answer, for the rest.
func (c *clientConn) writeChunk(p []byte, now time.Time) (int, error) {
	frame := frames.Get().(*[]byte)
	b := strconv.AppendUint((*frame)[:0], uint64(len(p)), 16)
	b = append(b, "\r\n"...)
	b = append(b, p...)
	b = append(b, "\r\n"...)
	n, err := c.writeTimed(b, now)
	if err != nil {
		_ = c.Close()
	}
	if *frame = b; cap(b) <= keptFrame {
		frames.Put(frame)
	}
	return min(n, len(p)), err
}
