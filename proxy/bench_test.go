package proxy_test

import (
	"bufio"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"spillway/router"
	"spillway/worker"
)

// minimal is a worker that does as little as one can: it reads bodies of that length and answers with
// bytes that are ready.
func minimal(b *testing.B, answer []byte, length int) *script {
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
func exchange(b *testing.B, f *front, body, last string) { exchangeEach(b, f, body, last, nil) }

// exchangeEach is exchange with a change made to the request before it is sent, if there is one to make.
func exchangeEach(b *testing.B, f *front, body, last string, change func(request []byte)) {
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
		if change != nil {
			change(request)
		}
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
	s := minimal(b, []byte(answer(200, jsonHeader, reply)), len(benchBody("")))
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
	s := minimal(b, []byte(answer(200, jsonHeader, reply)), len(benchBody("")))
	exchange(b, &front{addr: s.ln.Addr().String()}, benchBody(""), reply)
}

// BenchmarkRouting is BenchmarkUnary by the size of the prompt, in round-robin and by KV cache: of a prompt
// that is known, of a new one each time, and by load alone.
func BenchmarkRouting(b *testing.B) {
	for _, size := range []int{1 << 10, 32 << 10} {
		body := fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":"00000000%s"}]}`, strings.Repeat("What is a spillway? ", size/20))
		for _, way := range []string{"round-robin", "known", "new", "load-aware"} {
			b.Run(fmt.Sprintf("bytes=%d/%s", size, way), func(b *testing.B) {
				cfg := router.DefaultConfig()
				var change func([]byte)
				switch way {
				case "known":
					cfg.Mode = router.KV
				case "new":
					cfg.Mode = router.KV
					n := 0
					change = func(request []byte) {
						n++
						at := len(request) - len(body) + strings.Index(body, "00000000")
						copy(request[at:], fmt.Sprintf("%08d", n))
					}
				case "load-aware":
					cfg.Cost.LoadAware = true
				}
				s := minimal(b, []byte(answer(200, jsonHeader, reply)), len(body))
				var all []worker.Worker
				for i := range 4 {
					all = append(all, served(fmt.Sprint("w", i), s))
				}
				exchangeEach(b, begin(b, setup{router: cfg}, all...), body, reply, change)
			})
		}
	}
}
