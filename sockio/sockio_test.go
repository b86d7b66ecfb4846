package sockio_test

import (
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"spillway/sockio"
)

// pair is one end as a RawConn, and the other.
func pair(t *testing.T) (syscall.RawConn, *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	ours, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = ours.Close(), theirs.Close() })
	raw, err := ours.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	return raw, theirs.(*net.TCPConn)
}

func TestWritten(t *testing.T) {
	long := strings.Repeat("0123456789", 1000)
	for _, tt := range []struct {
		name  string
		write func(fd uintptr) (int, error)
		want  string
	}{
		{"Write", func(fd uintptr) (int, error) { return sockio.Write(fd, []byte(long)) }, long},
		{"Writev", func(fd uintptr) (int, error) { return sockio.Writev(fd, []byte("head"), []byte(long)) }, "head" + long},
		{"Writev without a body", func(fd uintptr) (int, error) { return sockio.Writev(fd, []byte("head"), nil) }, "head"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			raw, peer := pair(t)
			var n int
			var err error
			if e := raw.Write(func(fd uintptr) bool { n, err = tt.write(fd); return true }); e != nil {
				t.Fatal(e)
			}
			got := make([]byte, len(tt.want))
			if n != len(tt.want) || err != nil {
				t.Fatalf("%d, %v, want %d", n, err, len(tt.want))
			}
			if _, e := io.ReadFull(peer, got); e != nil || string(got) != tt.want {
				t.Errorf("the peer reads %.20q..., %v, want %.20q...", got, e, tt.want)
			}
		})
	}
}

func TestRead(t *testing.T) {
	raw, peer := pair(t)
	buf := make([]byte, 8)
	// read waits until a read finds something, and tells how many found nothing.
	read := func() (got string, vain int, err error) {
		if e := raw.Read(func(fd uintptr) bool {
			var n int
			if n, err = sockio.Read(fd, buf); err == syscall.EAGAIN {
				vain++
				return false
			}
			got = string(buf[:n])
			return true
		}); e != nil {
			t.Fatal(e)
		}
		return got, vain, err
	}
	if err := raw.Control(func(fd uintptr) {
		if _, err := sockio.Read(fd, buf); err != syscall.EAGAIN {
			t.Errorf("Read = %v where nothing is, want EAGAIN", err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = peer.Write([]byte("0123456789")) }()
	for _, want := range []string{"01234567", "89"} {
		if got, _, err := read(); got != want || err != nil {
			t.Errorf("Read = %q, %v, want %q", got, err, want)
		}
	}
	_ = peer.CloseWrite()
	if got, _, err := read(); got != "" || err != nil {
		t.Errorf("Read = %q, %v, want the end", got, err)
	}
	_ = peer.Close()
	var first, second error
	if err := raw.Control(func(fd uintptr) {
		_, first = sockio.Write(fd, []byte("x")) // is answered by a reset
		_, second = sockio.Write(fd, []byte("x"))
	}); err != nil {
		t.Fatal(err)
	}
	if first != nil || second != syscall.EPIPE && second != syscall.ECONNRESET {
		t.Errorf("writes to a closed peer: %v, %v, want nil, then EPIPE or ECONNRESET", first, second)
	}
}

func TestEnded(t *testing.T) {
	raw, peer := pair(t)
	check := func(when string, want bool) {
		t.Helper()
		got := !want
		for end := time.Now().Add(time.Minute); got != want && time.Now().Before(end); time.Sleep(time.Millisecond) {
			if err := raw.Control(func(fd uintptr) { got = sockio.Ended(fd) }); err != nil {
				t.Fatal(err)
			}
		}
		if got != want {
			t.Errorf("Ended = %v %s, want %v", got, when, want)
		}
	}
	check("while nothing comes", false)
	if _, err := peer.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := peer.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(10 * time.Millisecond) // for both to have come
	check("with a byte to be read before the end", false)
	var b [1]byte
	if err := raw.Read(func(fd uintptr) bool { n, _ := sockio.Read(fd, b[:]); return n == 1 }); err != nil || b[0] != 'x' {
		t.Fatalf("read %q, %v, want the byte", b, err)
	}
	check("at the end", true)

	raw, peer = pair(t)
	_ = peer.SetLinger(0)
	_ = peer.Close()
	check("after a reset", true)
}
