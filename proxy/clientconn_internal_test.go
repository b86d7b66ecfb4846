package proxy

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"
)

// clientPair is a connection as the server has it and the client's end of it.
func clientPair(t *testing.T, writeTimeout time.Duration) (server *clientConn, client *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	nc, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if err := nc.(*net.TCPConn).SetReadBuffer(64 << 10); err != nil { // or it would grow to hold any test's bytes
		t.Fatal(err)
	}
	accepted, err := clientListener{ln, new(clients), writeTimeout}.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nc.Close(); _ = accepted.Close() })
	return accepted.(*clientConn), nc.(*net.TCPConn)
}

// stuck is more than sockets hold.
var stuck = bytes.Repeat([]byte("x"), 16<<20)

func TestClientConnWriteTimeout(t *testing.T) {
	const timeout = time.Second
	server, client := clientPair(t, timeout)
	for range 2 {
		done := make(chan error, 1)
		go func() { _, err := io.CopyN(io.Discard, client, int64(len(stuck))); done <- err }()
		if n, err := server.Write(stuck); n != len(stuck) || err != nil {
			t.Fatalf("Write = %d, %v to a client that reads, want all", n, err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		time.Sleep(timeout) // by now the deadline of that write is over, which must not fail the next
	}
	begun := time.Now()
	n, err := server.Write(stuck)
	if took := time.Since(begun); n == len(stuck) || !errors.Is(err, os.ErrDeadlineExceeded) || took < timeout {
		t.Errorf("Write = %d, %v after %v to a client that does not read, want a deadline after 1 s", n, err, took)
	}
}

// A deadline is not moved for each write, but none has less than seven eighths of its time.
func TestClientConnMovesDeadline(t *testing.T) {
	const timeout = 8 * time.Second
	server, _ := clientPair(t, timeout)
	start := time.Now()
	for _, tt := range []struct{ at, until time.Duration }{
		{0, 8 * time.Second}, {time.Second, 8 * time.Second}, {time.Second + 1, 9*time.Second + 1},
		{2 * time.Second, 9*time.Second + 1}, {time.Minute, time.Minute + timeout},
	} {
		if err := server.arm(start.Add(tt.at)); err != nil {
			t.Fatal(err)
		}
		if got := server.until.Sub(start); got != tt.until {
			t.Errorf("a write at %v may last until %v, want %v", tt.at, got, tt.until)
		}
	}
}

// What net/http, or TLS when it says goodbye, asks for counts until it is taken off.
func TestClientConnAskedDeadline(t *testing.T) {
	server, client := clientPair(t, time.Second)
	set := func(set func(time.Time) error, at time.Time) {
		t.Helper()
		if err := set(at); err != nil {
			t.Fatal(err)
		}
	}
	write := func(p []byte, want error) {
		t.Helper()
		if _, err := server.Write(p); !errors.Is(err, want) {
			t.Fatalf("Write = %v, want %v", err, want)
		}
	}
	past := time.Unix(1, 0)
	write([]byte("x"), nil)
	set(server.SetWriteDeadline, past)
	write([]byte("x"), os.ErrDeadlineExceeded)
	set(server.SetWriteDeadline, time.Time{})
	write([]byte("x"), nil)

	set(server.SetDeadline, past)
	write([]byte("x"), os.ErrDeadlineExceeded)
	if _, err := server.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Read = %v, want a deadline", err)
	}
	set(server.SetDeadline, time.Time{})

	write([]byte("x"), nil)
	set(server.SetWriteDeadline, time.Time{}) // as net/http does after a request: the bound is to stay
	write(stuck, os.ErrDeadlineExceeded)

	if err := server.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, client); err != nil {
		t.Errorf("the client reads until %v, want an end", err)
	}
}

// TestClientConnTells: ends and faults look as the runtime's own connections tell them.
func TestClientConnTells(t *testing.T) {
	server, client := clientPair(t, time.Second)
	if n, err := server.Read(nil); n != 0 || err != nil {
		t.Errorf("Read of nothing = %d, %v, want 0", n, err)
	}
	if _, err := client.Write([]byte("0123456789")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 10)
	if _, err := io.ReadFull(server, got); string(got) != "0123456789" || err != nil {
		t.Errorf("the server reads %q, %v", got, err)
	}
	if err := client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if n, err := server.Read(got); n != 0 || err != io.EOF { //nolint:errorlint // as callers compare
		t.Errorf("Read = %d, %v at the end, want EOF", n, err)
	}
	_ = client.SetLinger(0)
	_ = client.Close() // a reset
	failed := func(op string, call func([]byte) (int, error), want error) {
		t.Helper()
		_, err := call(got)
		for end := time.Now().Add(time.Minute); err == nil && time.Now().Before(end); {
			_, err = call(got)
		}
		var oe *net.OpError
		if !errors.As(err, &oe) || oe.Op != op || !errors.Is(err, want) {
			t.Errorf("%s = %#v, want a net.OpError of that name, %v", op, err, want)
		}
	}
	failed("write", server.Write, syscall.EPIPE)
	_ = server.Close()
	failed("read", server.Read, net.ErrClosed)
	failed("write", server.Write, net.ErrClosed)
}

// A read deadline is set only where the one that is set comes too late, or would come at once.
func TestClientConnLeavesReadDeadline(t *testing.T) {
	server, _ := clientPair(t, time.Second)
	start := time.Now()
	at := func(d time.Duration) time.Time { return start.Add(d) }
	past, never := time.Unix(1, 0), time.Time{}
	for i, tt := range []struct{ due, set time.Time }{
		{never, never}, {at(time.Hour), at(time.Hour)}, {never, at(time.Hour)}, {at(2 * time.Hour), at(time.Hour)},
		{at(time.Minute), at(time.Minute)}, {at(time.Hour), at(time.Minute)}, {past, past}, {at(time.Second), at(time.Second)}, {past, past},
	} {
		if err := server.SetReadDeadline(tt.due); err != nil {
			t.Fatal(err)
		}
		if server.due != tt.due || server.set != tt.set {
			t.Errorf("%d: due %v and set %v, want %v and %v", i, server.due, server.set, tt.due, tt.set)
		}
	}
	if err := server.SetReadDeadline(never); err != nil {
		t.Fatal(err)
	}
	if !server.due.IsZero() || server.set.Before(at(spare)) {
		t.Errorf("due %v and set %v after a deadline in the past, want none, and at least %v", server.due, server.set, at(spare))
	}
}

// TestClientConnReadDeadline: a Read ends at the deadline that counts, whatever is set.
func TestClientConnReadDeadline(t *testing.T) {
	server, client := clientPair(t, time.Second)
	set := func(at time.Time) {
		t.Helper()
		if err := server.SetReadDeadline(at); err != nil {
			t.Error(err)
		}
	}
	var buf [1]byte
	read := func(want error) {
		t.Helper()
		if n, err := server.Read(buf[:]); !errors.Is(err, want) || n != 0 && want != nil {
			t.Errorf("Read = %d, %v, want %v", n, err, want)
		}
	}
	soon := time.Now().Add(20 * time.Millisecond)
	set(soon)
	read(os.ErrDeadlineExceeded)
	if time.Now().Before(soon) {
		t.Error("Read has not waited for its deadline")
	}

	later := time.Now().Add(100 * time.Millisecond)
	set(time.Now().Add(20 * time.Millisecond))
	set(later) // it stays at the earlier one
	read(os.ErrDeadlineExceeded)
	if time.Now().Before(later) {
		t.Error("Read has not waited for the later deadline")
	}

	set(time.Now().Add(20 * time.Millisecond))
	set(time.Time{})
	done := make(chan struct{})
	go func() { defer close(done); read(nil) }()
	for moved := false; !moved; time.Sleep(time.Millisecond) { // until the deadline has passed
		server.mu.Lock()
		moved = server.set.IsZero()
		server.mu.Unlock()
	}
	if _, err := client.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	<-done

	go func() { set(time.Unix(1, 0)) }() // as net/http wakes a Read
	read(os.ErrDeadlineExceeded)
	set(time.Time{})
	if _, err := client.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	read(nil)
}

// TestCutChunkIsTheLast: what follows a chunk of which the client has only a part would pass for the
// rest of it.
func TestCutChunkIsTheLast(t *testing.T) {
	server, client := clientPair(t, time.Second) // enough to copy the chunk on a busy machine
	if n, err := server.writeChunk(stuck, time.Now()); n == len(stuck) || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("writeChunk = %d, %v to a client that does not read, want a deadline", n, err)
	}
	read := make(chan int64)
	go func() { n, _ := io.Copy(io.Discard, client); read <- n }()
	if n, err := server.Write([]byte("0\r\n\r\n")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Write = %d, %v after a chunk that was cut short, want %v", n, err, net.ErrClosed)
	}
	_ = server.Close()
	if n := <-read; n == 0 || n >= int64(len(stuck)) {
		t.Errorf("the client reads %d bytes, want a part of the chunk", n)
	}
}
