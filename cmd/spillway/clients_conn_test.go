package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// guest is a client that writes HTTP by hand, so that it can misbehave.
type guest struct {
	*net.TCPConn
	br *bufio.Reader
}

// call connects a guest. Its receive buffer is small, so that a slow one is felt soon. All of its
// waits end soon after ctx does.
func call(ctx context.Context, addr string) (*guest, error) {
	c, err := (&net.Dialer{Timeout: patience}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	tcp := c.(*net.TCPConn)
	if err := tcp.SetReadBuffer(4 << 10); err != nil {
		return nil, err
	}
	return &guest{TCPConn: tcp, br: bufio.NewReaderSize(tcp, 512)}, tcp.SetDeadline(time.Now().Add(4 * patience))
}

// ask writes a chat request and keeps the connection.
func (g *guest) ask(id, body string) error {
	_, err := io.WriteString(g, chatRequest(id, body))
	return err
}

// chatRequest is the bytes of a chat request with an ID.
func chatRequest(id, body string) string {
	return chatHead + "X-Request-Id: " + id + "\r\nContent-Length: " + strconv.Itoa(len(body)) + "\r\n\r\n" + body
}

const chatHead = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

// answer reads one answer whole.
func (g *guest) answer() (*http.Response, string, error) {
	resp, err := http.ReadResponse(g.br, nil)
	if err != nil {
		return nil, "", fmt.Errorf("head of the answer: %w", err)
	}
	body, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	return resp, string(body), err
}

// is reads one answer and checks its status and that its body holds a text.
func (g *guest) is(status int, part string) error {
	resp, body, err := g.answer()
	if err != nil || resp.StatusCode != status || !strings.Contains(body, part) {
		return fmt.Errorf("answer %v %.300q, %w; want %d with %q", resp, body, err, status, part)
	}
	return nil
}

// leave is how a client leaves whose process was killed or whose network is gone: by a reset.
func (g *guest) leave() {
	_ = g.SetLinger(0) // an error means that the connection is gone
	_ = g.Close()
}

// pause waits unless ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// connections counts the connections of clients that the server at addr has open, as the kernel
// tells. Those that only the kernel still knows, as after a close, are not counted.
func connections(t *testing.T, addr string) int {
	t.Helper()
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	number, err := strconv.Atoi(port)
	if err != nil {
		t.Fatal(err)
	}
	local, n := fmt.Sprintf(":%04X", number), 0
	for _, file := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		table, err := os.ReadFile(file)
		if err != nil {
			t.Skipf("connections cannot be counted here: %v", err)
		}
		for line := range strings.Lines(string(table)) {
			f := strings.Fields(line)
			const listens, waits = "0A", "06"
			if len(f) > 9 && strings.HasSuffix(f[1], local) && f[3] != listens && f[3] != waits && f[9] != "0" {
				n++
			}
		}
	}
	return n
}
