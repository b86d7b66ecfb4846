package upstream_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"spillway/upstream"
)

const chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

// each reads a body by Each until it ends, or until f returns false.
func each(r *upstream.Response, f func(data string) bool) (body string, err error) {
	err = r.Each(func(data []byte) bool {
		body += string(data)
		return f == nil || f(string(data))
	})
	return body, err
}

func TestEach(t *testing.T) {
	long := strings.Repeat("0123456789abcdef", 4096) // several buffers
	for _, tt := range []struct{ name, answer, want string }{
		{"length", "HTTP/1.1 200 OK\r\nContent-Length: 65536\r\n\r\n" + long, long},
		{"chunks", chunked + "10000\r\n" + long + "\r\n3\r\nend\r\n0\r\n\r\n", long + "end"},
		{"no body", "HTTP/1.1 204 No Content\r\n\r\n", ""},
		{"until close", "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + long, long},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorker(t, func(p *peer) {
				if _, ok := p.request(); ok {
					p.say(tt.answer)
				}
			})
			resp, err := w.client(t, upstream.Config{}).Do(t.Context(), post("{}"))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Close()
			_ = resp.SetReadDeadline(time.Now().Add(patience))
			if got, err := each(resp, nil); got != tt.want || err != io.EOF {
				t.Errorf("Each = %d bytes, %v, want %d, EOF", len(got), err, len(tt.want))
			}
		})
	}
}

// TestEachStopsAndGoesOn: after f has had enough, Next, Each and a deadline go on where it stopped.
func TestEachStopsAndGoesOn(t *testing.T) {
	next := make(chan string)
	w := newWorker(t, func(p *peer) {
		for {
			if _, ok := p.request(); !ok {
				return
			}
			for text := range next {
				p.say(text)
				if text == "" {
					break
				}
			}
		}
	})
	c := w.client(t, upstream.Config{})
	go func() { next <- chunked + "1\r\na\r\n" }()
	resp, err := c.Do(t.Context(), post("{}"))
	if err != nil {
		t.Fatal(err)
	}
	stop := func(string) bool { return false }
	if got, err := each(resp, stop); got != "a" || err != nil {
		t.Errorf("Each = %q, %v, want a, nil", got, err)
	}
	next <- "1\r\nb\r\n"
	if got, err := resp.Next(); string(got) != "b" || err != nil {
		t.Errorf("Next = %q, %v, want b, nil", got, err)
	}
	if err := resp.SetReadDeadline(time.Now().Add(time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if got, err := each(resp, nil); got != "" || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Each = %q, %v, want a deadline exceeded", got, err)
	}
	if err := resp.SetReadDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	go func() { next <- "1\r\nc\r\n0\r\n\r\n"; next <- "" }()
	if got, err := each(resp, stop); got != "c" || err != nil {
		t.Errorf("Each = %q, %v, want c, nil", got, err)
	}
	if got, err := each(resp, nil); got != "" || err != io.EOF {
		t.Errorf("Each = %q, %v, want EOF", got, err)
	}
	if resp.Close(); c.Idle() != 1 {
		t.Errorf("%d idle connections, want 1", c.Idle())
	}
	if got, err := each(resp, nil); got != "" || !errors.Is(err, upstream.ErrClosed) {
		t.Errorf("Each after Close = %q, %v, want ErrClosed", got, err)
	}
}

// TestEachSeesAnEndThatCameWithData: the socket tells of data and of the end behind it once. Here both
// have come while f was busy, so that one read takes the data and nothing tells of the end.
func TestEachSeesAnEndThatCameWithData(t *testing.T) {
	for name, end := range map[string]func(nc *net.TCPConn) error{
		"closed":      (*net.TCPConn).Close,
		"half closed": (*net.TCPConn).CloseWrite,
		"reset": func(nc *net.TCPConn) error {
			_ = nc.SetLinger(0)
			return nc.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			busy, over := make(chan bool), make(chan bool)
			w := newWorker(t, func(p *peer) {
				if _, ok := p.request(); !ok {
					return
				}
				p.say(chunked)
				<-busy
				p.say("1\r\na\r\n")
				<-busy
				p.say("1\r\nb\r\n")
				_ = end(p.Conn.(*net.TCPConn))
				close(over)
				p.gone()
			})
			resp, err := w.client(t, upstream.Config{}).Do(t.Context(), post("{}"))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Close()
			_ = resp.SetReadDeadline(time.Now().Add(patience))
			busy <- true
			got, err := each(resp, func(data string) bool {
				if data == "a" {
					busy <- true
					<-over
				}
				return true
			})
			if got != "ab" && name != "reset" || !errors.Is(err, upstream.ErrTruncated) {
				t.Errorf("Each = %q, %v, want ab, ErrTruncated", got, err)
			}
		})
	}
}

// TestEachSeesWhatComesBeforeItWaits: data that come while f is busy are told by no second edge.
func TestEachSeesWhatComesBeforeItWaits(t *testing.T) {
	turn := make(chan bool)
	const rounds = 100
	w := newWorker(t, func(p *peer) {
		if _, ok := p.request(); !ok {
			return
		}
		p.say(chunked)
		for range rounds {
			p.say("1\r\na\r\n")
			<-turn
			p.say("1\r\nb\r\n")
			turn <- true
			<-turn
		}
		p.say("0\r\n\r\n")
	})
	resp, err := w.client(t, upstream.Config{}).Do(t.Context(), post("{}"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Close()
	_ = resp.SetReadDeadline(time.Now().Add(patience))
	got, err := each(resp, func(data string) bool {
		if turn <- true; data == "a" {
			<-turn
		}
		return true
	})
	if got != strings.Repeat("ab", rounds) || err != io.EOF {
		t.Errorf("Each = %q, %v, want ab %d times, EOF", got, err, rounds)
	}
}

// TestCancelDuringEach: the worker hears at once of a client that has left, though f is still busy.
func TestCancelDuringEach(t *testing.T) {
	said, gone := make(chan bool), make(chan error, 1)
	w := newWorker(t, func(p *peer) {
		if _, ok := p.request(); !ok {
			return
		}
		p.say(chunked)
		<-said
		p.say("1\r\na\r\n")
		_, err := io.Copy(io.Discard, p.br)
		gone <- err
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	resp, err := w.client(t, upstream.Config{}).Do(ctx, post("{}"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Close()
	close(said)
	got, err := each(resp, func(string) bool {
		cancel()
		if err := <-gone; err != nil && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the worker has not heard of it: %v", err)
		}
		return true
	})
	if got != "a" || !errors.Is(err, ctx.Err()) || ctx.Err() == nil {
		t.Errorf("Each = %q, %v, want a, %v", got, err, ctx.Err())
	}
}

// TestEachPanics: a panic of f, which its caller may survive, leaves nothing behind.
func TestEachPanics(t *testing.T) {
	said := make(chan bool)
	w := newWorker(t, func(p *peer) {
		if _, ok := p.request(); !ok {
			return
		}
		p.say(chunked)
		<-said
		p.say("1\r\na\r\n")
		p.gone()
	})
	c := w.client(t, upstream.Config{})
	resp, err := c.Do(t.Context(), post("{}"))
	if err != nil {
		t.Fatal(err)
	}
	close(said)
	func() {
		defer func() {
			if p := recover(); p != "f" {
				t.Errorf("Each panics with %v, want f's value", p)
			}
		}()
		_, err := each(resp, func(string) bool { panic("f") })
		t.Errorf("Each = %v, want a panic", err)
	}()
	_ = resp.Close()
	if n := c.Watched(); n != 0 {
		t.Errorf("%d connections are looked at, want 0", n)
	}
}
