package upstream_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"spillway/upstream"
)

// The benchmarks compare three clients of one in-process worker that does as little as
// possible: bare sockets (the floor: no pool, no parsing, no cancellation), this package and
// http.Transport. cpu-ns/op is the time of all threads, the worker's share included.

var benchHeaders = http.Header{
	"Content-Type": {"application/json"}, "Accept": {"text/event-stream"}, "Accept-Encoding": {"identity"},
	"User-Agent": {"openai-python/1.0"}, "X-Forwarded-For": {"192.0.2.1"}, "X-Request-Id": {"9f3b2c1e-0000-4000-8000-000000000000"},
}

func BenchmarkUnary(b *testing.B) {
	const answer = "HTTP/1.1 200 OK\r\nDate: Mon, 01 Jan 2026 00:00:00 GMT\r\nServer: uvicorn\r\n" +
		"Content-Type: application/json\r\nContent-Length: 600\r\n\r\n"
	for _, size := range []int{1 << 10, 32 << 10} {
		benchClients(b, fmt.Sprintf("body=%d", size), size, []string{answer + strings.Repeat("x", 600)}, 600)
	}
}

// BenchmarkStream: with a write per chunk the worker's writes cost most, and a slower reader
// finds more chunks merged; with 16 chunks per write all readers see about the same.
func BenchmarkStream(b *testing.B) {
	event := "data: " + strings.Repeat("x", 212) + "\n\n"
	chunk := fmt.Sprintf("%x\r\n%s\r\n", len(event), event)
	for _, merged := range []int{1, 16} {
		writes := []string{"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"}
		for range 256 / merged {
			writes = append(writes, strings.Repeat(chunk, merged))
		}
		benchClients(b, fmt.Sprintf("chunks=256/per-write=%d", merged), 1<<10, append(writes, "0\r\n\r\n"), 256*len(event))
	}
}

func benchClients(b *testing.B, name string, size int, writes []string, want int) {
	body := bytes.Repeat([]byte("p"), size)
	w := newWorker(b, func(p *peer) { benchWorker(p.Conn, size, writes) })
	for _, client := range []struct {
		name string
		make func(b *testing.B, w *worker) (do func(body []byte) int, done func())
	}{{"bare", bareClient(len(strings.Join(writes, "")))}, {"upstream", upstreamClient}, {"transport", transportClient}} {
		b.Run(name+"/"+client.name, func(b *testing.B) {
			do, done := client.make(b, w)
			defer done()
			b.ReportAllocs()
			start := cpuTime()
			for b.Loop() {
				if got := do(body); got != want && client.name != "bare" {
					b.Fatalf("%d body bytes, want %d", got, want)
				}
			}
			b.ReportMetric(float64(cpuTime()-start)/float64(b.N), "cpu-ns/op")
		})
	}
}

func cpuTime() int64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return u.Utime.Nano() + u.Stime.Nano()
}

// benchWorker answers each request, whose body has size bytes, with writes.
func benchWorker(nc net.Conn, size int, writes []string) {
	_ = nc.(*net.TCPConn).SetDeadline(time.Time{})
	answer := make([][]byte, len(writes))
	for i, s := range writes {
		answer[i] = []byte(s)
	}
	buf := make([]byte, 64<<10)
	for {
		n, end := 0, -1
		for end < 0 || n < end+4+size {
			m, err := nc.Read(buf[n:])
			if err != nil {
				return
			}
			if n += m; end < 0 {
				end = bytes.Index(buf[:n], []byte("\r\n\r\n"))
			}
		}
		for _, part := range answer {
			if _, err := nc.Write(part); err != nil {
				return
			}
		}
	}
}

// bareClient knows how many bytes an answer has.
func bareClient(length int) func(b *testing.B, w *worker) (func([]byte) int, func()) {
	return func(b *testing.B, w *worker) (func([]byte) int, func()) {
		nc, err := net.Dial("tcp", w.Addr().String())
		if err != nil {
			b.Fatal(err)
		}
		req := []byte("POST / HTTP/1.1\r\n" + strings.Repeat("x", 240) + "\r\n\r\n")
		head, buf := len(req), make([]byte, 16<<10)
		return func(body []byte) int {
			req = append(req[:head], body...)
			if _, err := nc.Write(req); err != nil {
				b.Fatal(err)
			}
			for n := 0; n < length; {
				m, err := nc.Read(buf)
				if err != nil {
					b.Fatal(err)
				}
				n += m
			}
			return length
		}, func() { nc.Close() }
	}
}

func upstreamClient(b *testing.B, w *worker) (func([]byte) int, func()) {
	c := w.client(b, upstream.Config{})
	var head []byte
	return func(body []byte) int {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		head = head[:0]
		for name, values := range benchHeaders {
			head = upstream.AppendHeader(head, name, values[0])
		}
		resp, err := c.Do(ctx, &upstream.Request{Method: "POST", Path: "/v1/completions", Head: head, Body: body})
		if err != nil {
			b.Fatal(err)
		}
		defer resp.Close()
		n := 0
		for {
			part, err := resp.Next()
			if err == io.EOF {
				return n
			}
			if err != nil {
				b.Fatal(err)
			}
			n += len(part)
		}
	}, c.Close
}

func transportClient(b *testing.B, w *worker) (func([]byte) int, func()) {
	tr := &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true, WriteBufferSize: 64 << 10}
	url, buf := "http://"+w.Addr().String()+"/v1/completions", make([]byte, 16<<10)
	return func(body []byte) int {
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
		if err != nil {
			b.Fatal(err)
		}
		req.Header = benchHeaders
		resp, err := tr.RoundTrip(req)
		if err != nil {
			b.Fatal(err)
		}
		defer resp.Body.Close()
		n := 0
		for {
			m, err := resp.Body.Read(buf)
			if n += m; err == io.EOF {
				return n
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	}, tr.CloseIdleConnections
}
