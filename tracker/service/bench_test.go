package service_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"spillway/tracker/service"
)

// client is one connection that is kept.
type client struct {
	conn net.Conn
	in   *bufio.Reader
}

func dial(b *testing.B, url string) *client {
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		b.Fatal(err)
	}
	return &client{conn, bufio.NewReader(conn)}
}

func (c *client) post(path, body string) error {
	_, err := fmt.Fprintf(c.conn, "POST %s HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", path, len(body), body)
	if err != nil {
		return err
	}
	res, err := http.ReadResponse(c.in, nil)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, res.Body)
	if res.StatusCode >= 300 {
		return fmt.Errorf("%s: %s", path, res.Status)
	}
	return err
}

// cpu is the time that this process has computed, clients included.
func cpu() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkHTTP is the load of the figures in the specification: 64 ranks, prompts of 128 blocks
// half of which all share, on 1 or 16 connections. The CPU time is that of server and clients.
func BenchmarkHTTP(b *testing.B) {
	hashes := func(own int) string {
		var s strings.Builder
		for i := range 128 {
			if i > 0 {
				s.WriteByte(',')
			}
			if i < 64 {
				fmt.Fprint(&s, int64(i+1)*0x1e3779b97f4a7c15)
			} else {
				fmt.Fprint(&s, int64(own+1)*int64(i)*0x1e3779b97f4a7c15)
			}
		}
		return s.String()
	}
	for _, conns := range []int{1, 16} {
		b.Run(fmt.Sprintf("potential_loads/connections=%d", conns), func(b *testing.B) {
			body := fmt.Sprintf(`{"model_name":"m","sequence_hashes":[%s],"new_isl_tokens":2048}`, hashes(9999))
			drive(b, conns, hashes, func(c *client, _ int64) error { return c.post("/potential_loads", body) })
		})
		b.Run(fmt.Sprintf("add+complete+free/connections=%d", conns), func(b *testing.B) {
			prompt := hashes(9999)
			drive(b, conns, hashes, func(c *client, n int64) error {
				named := fmt.Sprintf(`{"model_name":"m","request_id":"r%d"}`, n)
				add := fmt.Sprintf(`{"model_name":"m","request_id":"r%d","worker_id":%d,"dp_rank":%d,"sequence_hashes":[%s],"new_isl_tokens":2048}`, n, n%8, n/8%8, prompt)
				if err := c.post("/add", add); err != nil {
					return err
				}
				if err := c.post("/prefill_complete", named); err != nil {
					return err
				}
				return c.post("/free", named)
			})
		})
	}
}

func drive(b *testing.B, conns int, hashes func(int) string, op func(c *client, n int64) error) {
	s := start(b, config())
	fill(s, hashes)
	clients := make(chan *client, conns)
	for range conns {
		clients <- dial(b, s.url)
	}
	var n atomic.Int64
	before := cpu()
	b.SetParallelism((conns + 1) / 2) // of two cores
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			c := <-clients
			if err := op(c, n.Add(1)); err != nil {
				b.Error(err)
			}
			clients <- c
		}
	})
	b.StopTimer()
	b.ReportMetric(float64((cpu()-before).Microseconds())/float64(b.N), "cpu-us/op")
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "op/s")
	for range conns {
		_ = (<-clients).conn.Close()
	}
}

// fill books eight requests on each of 64 ranks.
func fill(s *running, hashes func(int) string) {
	for w := range 8 {
		s.post("/register", fmt.Sprintf(`{"worker_id":%d,"model_name":"m","block_size":16,"dp_start":0,"dp_size":8}`, w), 201)
	}
	for i := range 512 {
		s.post("/add", fmt.Sprintf(`{"model_name":"m","request_id":"a%d","worker_id":%d,"dp_rank":%d,"sequence_hashes":[%s],"new_isl_tokens":9}`, i, i%8, i/8%8, hashes(i)), 201)
	}
}

// BenchmarkDecode reads a body of /add with 128 hashes.
func BenchmarkDecode(b *testing.B) {
	body := []byte(`{"model_name":"m","request_id":"r","worker_id":1,"dp_rank":0,"new_isl_tokens":2048,"sequence_hashes":[` +
		strings.TrimSuffix(strings.Repeat("-1234567890123456789,", 128), ",") + `]}`)
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		if status, _ := service.Decode(body); status != 0 {
			b.Fatal(status)
		}
	}
}
