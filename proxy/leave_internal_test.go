package proxy

import (
	"context"
	"errors"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// servedPair is clientPair with the context of the requests that come on it.
func servedPair(t *testing.T) (server *clientConn, client *net.TCPConn, ctx context.Context) {
	t.Helper()
	server, client = clientPair(t, time.Second)
	ctx = withClient(t.Context(), server)
	if got := clientOf(ctx); got != server {
		t.Fatalf("clientOf = %p, want %p", got, server)
	}
	return server, client, ctx
}

// TestWatchIsSpared goes through the Reads of net/http in the order in which it may make them.
func TestWatchIsSpared(t *testing.T) {
	server, client, _ := servedPair(t)
	read := func(size, want int, wantErr error) {
		t.Helper()
		if n, err := server.Read(make([]byte, size)); n != want || !errors.Is(err, wantErr) {
			t.Errorf("Read of %d = %d, %v, want %d, %v", size, n, err, want, wantErr)
		}
	}
	send := func(s string) {
		t.Helper()
		if _, err := client.Write([]byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	deadline := func(at time.Time) {
		t.Helper()
		if err := server.SetReadDeadline(at); err != nil {
			t.Fatal(err)
		}
	}
	past, never := time.Unix(1, 0), time.Time{}

	server.serving()
	read(1, 0, nil)
	send("x")
	read(1, 1, nil) // once in a request

	server.serving() // a watch that has not begun when it is to end
	deadline(past)
	if !server.set.IsZero() {
		t.Errorf("a deadline of %v is set, and there is no Read to wake", server.set)
	}
	read(1, 0, nil)
	deadline(never)
	send("next")
	read(4096, 4, nil)

	server.serving() // a watch that never begins, as net/http has a byte already
	send("next")
	read(4096, 4, nil)
	send("x")
	read(1, 1, nil)

	ended := make(chan error) // a watch that has begun before
	go func() {
		_, err := server.Read(make([]byte, 1))
		ended <- err
	}()
	for server.presence.watch.Load() != watching {
		time.Sleep(time.Millisecond)
	}
	server.serving()
	deadline(past)
	if err := <-ended; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the Read was ended by %v, want its deadline", err)
	}
	deadline(never)
	send("x")
	read(1, 1, nil)
}

// TestLook: only the requests of clients that have left end, and not before the second round.
func TestLook(t *testing.T) {
	for _, tt := range []struct {
		name string
		does func(server *clientConn, client *net.TCPConn)
		left bool
	}{
		{"stays", func(*clientConn, *net.TCPConn) {}, false},
		{"closes", func(_ *clientConn, client *net.TCPConn) { _ = client.Close() }, true},
		{"resets", func(_ *clientConn, client *net.TCPConn) { _ = client.SetLinger(0); _ = client.Close() }, true},
		{"stops sending", func(_ *clientConn, client *net.TCPConn) { _ = client.CloseWrite() }, true},
		{"has sent another request", func(_ *clientConn, client *net.TCPConn) { _, _ = client.Write([]byte("x")); _ = client.Close() }, false},
		{"leaves with its answer", func(server *clientConn, client *net.TCPConn) { server.served(); _ = client.Close() }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			server, client, ctx := servedPair(t)
			server.serving()
			tt.does(server, client)
			time.Sleep(10 * time.Millisecond) // for it to have come
			server.clients.look()
			if ctx.Err() != nil {
				t.Error("the context has ended in the first round")
			}
			for end := time.Now().Add(time.Minute); tt.left && ctx.Err() == nil && time.Now().Before(end); time.Sleep(time.Millisecond) {
				server.clients.look()
			}
			server.clients.look()
			if got := ctx.Err() != nil; got != tt.left {
				t.Errorf("the context has ended: %v, want %v", got, tt.left)
			}
			_ = server.Close()
			if ctx.Err() == nil || len(server.clients.conns) != 0 {
				t.Errorf("after Close the context ends in %v and %d connections are kept", ctx.Err(), len(server.clients.conns))
			}
		})
	}
}

// TestClientContextCalls: what AfterFunc was given is called once, however the context ends, unless it
// was taken back.
func TestClientContextCalls(t *testing.T) {
	for _, tt := range []struct {
		name string
		ends func(c *clientContext, parent context.CancelFunc)
	}{
		{"left", func(c *clientContext, _ context.CancelFunc) { c.end() }},
		{"closed", func(c *clientContext, _ context.CancelFunc) { c.close() }},
		{"left and closed", func(c *clientContext, _ context.CancelFunc) { c.end(); c.close() }},
		{"the server stops", func(_ *clientContext, parent context.CancelFunc) { parent() }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				parent, cancel := context.WithCancel(t.Context())
				c := newClientContext(parent)
				var calls [5]atomic.Int32
				after := func(i int) (stop func() bool) { return c.AfterFunc(func() { calls[i].Add(1) }) }
				if stop := after(0); !stop() || stop() {
					t.Error("stop does not tell that it was the first to stop")
				}
				after(1)
				after(2) // beside it
				if !after(3)() {
					t.Error("the third cannot be stopped")
				}
				if synctest.Wait(); calls[1].Load() != 0 {
					t.Error("called before the end")
				}
				tt.ends(c, cancel)
				after(4) // too late
				synctest.Wait()
				for i, want := range []int32{0, 1, 1, 0, 1} {
					if got := calls[i].Load(); got != want {
						t.Errorf("%d was called %d times, want %d", i, got, want)
					}
				}
				stop := after(4)
				if synctest.Wait(); stop() {
					t.Error("what was called can be stopped")
				}
				c.close()
				cancel()
			})
		})
	}
}
