package proxy_test

import (
	"bufio"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"
)

// minimal is a worker that does as little as one can: it reads by length and answers with
// bytes that are ready.
func minimal(b *testing.B, answer []byte) *script {
	length := len(benchBody(""))
	return newScript(b, func(c *conn, _ received) { // the first request came through net/http
		for {
			if _, err := c.Write(answer); err != nil {
				break
			}
			for line := ""; line != "\r\n"; {
				raw, err := c.br.ReadSlice('\n')
				if err != nil {
					c.end = true
					return
				}
				line = string(raw)
			}
			if _, err := c.br.Discard(length); err != nil {
				break
			}
		}
		c.end = true
	})
}

// benchBody is a chat of about 1 kB.
func benchBody(kind string) string {
	return fmt.Sprintf(`{"model":"m","stream":%-5s,"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":%q}],"max_tokens":64}`,
		map[string]string{"": "false", "stream": "true"}[kind], strings.Repeat("What is a spillway? ", 44))
}

// exchange sends requests over one connection of a minimal client, which reads each answer up
// to its last bytes.
func exchange(b *testing.B, f *front, body, last string) {
	c, err := net.Dial("tcp", f.addr)
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	request := []byte(fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body))
	br := bufio.NewReaderSize(c, 64<<10)
	buf := make([]byte, 64<<10)
	b.ReportAllocs()
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		if _, err := c.Write(request); err != nil {
			b.Fatal(err)
		}
		for tail := ""; !strings.HasSuffix(tail, last); {
			n, err := br.Read(buf)
			if err != nil {
				b.Fatalf("after %q: %v", tail, err)
			}
			tail += string(buf[max(0, n-len(last)):n])
			tail = tail[max(0, len(tail)-len(last)):]
		}
	}
}

// BenchmarkUnary is one chat of 1 kB and its answer through a Server; client, worker and
// kernel are in the figure.
func BenchmarkUnary(b *testing.B) {
	s := minimal(b, []byte(answer(200, jsonHeader, reply)))
	f := begin(b, setup{}, served("w", s))
	exchange(b, f, benchBody(""), reply)
}

// BenchmarkStream is a chat whose answer comes in 64 chunks, each in a write of its own.
func BenchmarkStream(b *testing.B) {
	s := newScript(b, func(c *conn, _ received) {
		c.say(streamHead)
		event := []byte(chunk(hello))
		for range 64 {
			if _, err := c.Write(event); err != nil {
				return
			}
		}
		c.say(chunk(ended+done) + chunk(""))
	})
	f := begin(b, setup{}, served("w", s))
	exchange(b, f, benchBody("stream"), "\r\n0\r\n\r\n")
}

// BenchmarkRefusal is the 503 of a front end whose only worker is busy.
func BenchmarkRefusal(b *testing.B) {
	s := newScript(b, func(*conn, received) { b.Error("a refused request reached the worker") })
	w := served("w", s)
	f := begin(b, setup{busy: decodeLimit()}, w)
	f.report(w.ID, 100)
	exchange(b, f, benchBody(""), busyBody)
}

// BenchmarkDirect is BenchmarkUnary without a front end: what client, worker and kernel cost.
func BenchmarkDirect(b *testing.B) {
	s := minimal(b, []byte(answer(200, jsonHeader, reply)))
	exchange(b, &front{addr: s.ln.Addr().String()}, benchBody(""), reply)
}
