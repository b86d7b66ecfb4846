package proxy

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"
)

// clientPair is a connection as the server has it and the client's end of it.
func clientPair(t *testing.T, writeTimeout time.Duration) (server net.Conn, client *net.TCPConn) {
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
	server, err = clientListener{ln, writeTimeout}.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := server.(*clientConn); !ok {
		t.Fatalf("Accept = %T, want a clientConn", server)
	}
	t.Cleanup(func() { _ = nc.Close(); _ = server.Close() })
	return server, nc.(*net.TCPConn)
}

// reading starts a Read and returns where its error will be.
func reading(c net.Conn) <-chan error {
	done := make(chan error, 1)
	go func() { _, err := c.Read(make([]byte, 1)); done <- err }()
	return done
}

// waits polls until a Read of c waits for the client.
func waits(t *testing.T, c net.Conn) {
	t.Helper()
	for until := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		cc := c.(*clientConn)
		cc.mu.Lock()
		waiting := cc.waiting
		cc.mu.Unlock()
		if waiting {
			return
		}
		if time.Now().After(until) {
			t.Fatal("no Read waits")
		}
	}
}

func TestClientConnReadDeadline(t *testing.T) {
	server, client := clientPair(t, time.Minute)
	set := func(at time.Time) {
		t.Helper()
		if err := server.SetReadDeadline(at); err != nil {
			t.Fatal(err)
		}
	}
	got := func(want error) {
		t.Helper()
		if _, err := server.Read(make([]byte, 8)); !errors.Is(err, want) {
			t.Fatalf("Read = %v, want %v", err, want)
		}
	}
	past := time.Unix(1, 0)

	done := reading(server)
	waits(t, server)
	set(past) // as net/http ends its watch for a client that leaves
	if err := <-done; !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a waiting Read = %v, want a deadline", err)
	}
	got(os.ErrDeadlineExceeded) // it is still set
	set(time.Time{})
	if _, err := client.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	got(nil)

	set(time.Now().Add(time.Millisecond))
	got(os.ErrDeadlineExceeded) // it came while Read waited

	set(past) // passes while nobody waits
	set(time.Now().Add(time.Minute))
	done = reading(server)
	waits(t, server)
	if _, err := client.Write([]byte("y")); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("Read = %v, though its deadline has not passed", err)
	}
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	got(io.EOF)
}

func TestClientConnWriteTimeout(t *testing.T) {
	server, client := clientPair(t, time.Second)
	big := bytes.Repeat([]byte("x"), 16<<20) // more than sockets hold
	for range 2 {                            // the first, which succeeds late, leaves no deadline to the next
		done := make(chan error, 1)
		go func() { _, err := io.CopyN(io.Discard, client, int64(len(big))); done <- err }()
		if n, err := server.Write(big); n != len(big) || err != nil {
			t.Fatalf("Write = %d, %v to a client that reads, want all", n, err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second) // what a deadline left over would have passed by
	}
	begun := time.Now()
	n, err := server.Write(big)
	if took := time.Since(begun); n == len(big) || !errors.Is(err, os.ErrDeadlineExceeded) || took < time.Second {
		t.Errorf("Write = %d, %v after %v to a client that does not read, want a deadline after 1 s", n, err, took)
	}
}
