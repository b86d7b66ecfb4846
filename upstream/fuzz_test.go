package upstream_test

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"spillway/upstream"
)

// canned is a connection on which data comes, at most step bytes at a time.
type canned struct {
	net.Conn // nil: nothing else is called
	data     []byte
	step     int
}

func (c *canned) Read(p []byte) (int, error) {
	if len(c.data) == 0 {
		return 0, io.EOF
	}
	n := copy(p, c.data[:min(len(c.data), c.step)])
	c.data = c.data[n:]
	return n, nil
}

func (c *canned) Close() error { return nil }

// slowly is the obvious way: what net/http makes of an answer.
func slowly(method string, data []byte) (*http.Response, []byte, error) {
	br := bufio.NewReader(bytes.NewReader(data))
	for {
		resp, err := http.ReadResponse(br, &http.Request{Method: method})
		if err != nil {
			return nil, nil, err
		}
		if resp.StatusCode >= 200 {
			body, err := io.ReadAll(resp.Body)
			return resp, body, err
		}
	}
}

// FuzzAnswer feeds arbitrary bytes as a worker's answer: no panic, no unbounded memory, the
// same answer whatever pieces it comes in and as net/http's, and no connection kept that
// net/http would not keep.
func FuzzAnswer(f *testing.F) {
	const ok = "HTTP/1.1 200 OK\r\n"
	for _, s := range []string{
		plain, "HTTP/1.1 100 Continue\r\n\r\n" + plain, ok + "\r\nuntil close", "HTTP/1.1 204 No Content\r\n\r\n",
		ok + "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n3;x=y\r\n!!!\r\n0\r\nSum: 1\r\n\r\n",
		ok + "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
		ok + "Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc", ok + "Connection: close\r\nContent-Length: 1\r\n\r\na",
		ok + "A: b\r\n c\r\n\r\n", "HTTP/1.0 200\r\n\r\n", "HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",
	} {
		f.Add([]byte(s), uint8(1), false)
		f.Add([]byte(s), uint8(255), true)
	}
	f.Fuzz(func(t *testing.T, data []byte, step uint8, head bool) {
		const limit = 1 << 10
		method := "POST"
		if head {
			method = "HEAD"
		}
		nc := &canned{data: data, step: 1 + int(step)}
		c, resp, err := upstream.Receive(method, nc, upstream.Config{MaxHeaderBytes: limit})
		defer func() { c.Close() }() // there is a client whatever the error
		if err != nil {
			if k := kind(err); k != "header" && k != "framing" && k != "reset" {
				t.Errorf("Do = %v, an error of no class", err)
			}
			if c.Idle() > 0 {
				t.Errorf("connection kept after %v", err)
			}
			return
		}
		var body []byte
		for err == nil {
			var part []byte
			part, err = resp.Next()
			body = append(body, part...)
			if n := resp.BufferBytes(); n > 32<<10 {
				t.Fatalf("%d bytes of buffer", n)
			}
			if len(part) == 0 && err == nil {
				t.Fatal("Next returned nothing and no error")
			}
		}
		resp.Close()
		kept := c.Idle() > 0
		if err != io.EOF {
			if k := kind(err); k != "framing" && k != "truncated" {
				t.Errorf("Next = %v, an error of no class", err)
			}
			if kept {
				t.Errorf("connection kept after %v", err)
			}
			return
		}
		want, wantBody, err := slowly(method, data)
		if err != nil {
			if kept && !strings.Contains(err.Error(), "too much non-data") {
				t.Errorf("connection kept, net/http: %v", err)
			}
			return
		}
		if resp.Status != want.StatusCode || !bytes.Equal(body, wantBody) {
			t.Errorf("got %d %q\nnet/http has %d %q", resp.Status, body, want.StatusCode, wantBody)
		}
		for name := range want.Header {
			if got, want := resp.Header(name), want.Header.Get(name); got != want {
				t.Errorf("Header(%s) = %q, net/http has %q", name, got, want)
			}
		}
		if kept && want.Close {
			t.Error("connection kept, net/http would close it")
		}
	})
}
