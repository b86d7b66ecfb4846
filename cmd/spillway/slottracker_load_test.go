package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// leanConn is a connection of a client that costs as little as it may, since it shares the processors with
// what it measures.
type leanConn struct {
	conn net.Conn
	in   *bufio.Reader
	out  []byte
}

// dialLean opens so many. They are closed when the test ends.
func dialLean(t *testing.T, url string, n int) []*leanConn {
	t.Helper()
	all := make([]*leanConn, n)
	for i := range all {
		conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		all[i] = &leanConn{conn: conn, in: bufio.NewReaderSize(conn, 64<<10)}
	}
	return all
}

var errAnswer = errors.New("not an answer of a slot tracker")

// post makes one call; the body is what parts make together. Any status of success will do.
func (c *leanConn) post(path string, parts ...string) error {
	size := 0
	for _, p := range parts {
		size += len(p)
	}
	c.out = append(append(append(c.out[:0], "POST "...), path...), " HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: "...)
	c.out = append(strconv.AppendInt(c.out, int64(size), 10), "\r\n\r\n"...)
	for _, p := range parts {
		c.out = append(c.out, p...)
	}
	return c.exchange()
}

func (c *leanConn) health() error { return c.send("GET", "/health") }

// send makes a call without a body.
func (c *leanConn) send(method, path string) error {
	c.out = append(append(append(append(c.out[:0], method...), ' '), path...), " HTTP/1.1\r\nHost: t\r\n\r\n"...)
	return c.exchange()
}

var lengthHeader = []byte("Content-Length: ")

func (c *leanConn) exchange() error {
	if _, err := c.conn.Write(c.out); err != nil {
		return err
	}
	line, err := c.in.ReadSlice('\n')
	if err != nil {
		return err
	}
	if !bytes.HasPrefix(line, []byte("HTTP/1.1 20")) {
		return fmt.Errorf("%w: %s", errAnswer, bytes.TrimSpace(line))
	}
	size := 0
	for len(line) > 2 {
		if line, err = c.in.ReadSlice('\n'); err != nil {
			return err
		}
		if text, ok := bytes.CutPrefix(line, lengthHeader); ok {
			for _, digit := range bytes.TrimSpace(text) {
				size = 10*size + int(digit-'0')
			}
		}
	}
	_, err = c.in.Discard(size)
	return err
}

// drive has every connection make calls until the time is over, or so many were made in all if n is
// not 0. call is given the number of the call. It returns how long each took.
func drive(t *testing.T, conns []*leanConn, during time.Duration, n int64, call func(c *leanConn, i int64) error) latencies {
	t.Helper()
	var next atomic.Int64
	var clients sync.WaitGroup
	lists := make([]latencies, len(conns))
	until := time.Now().Add(during)
	for k, c := range conns {
		clients.Go(func() {
			for now := time.Now(); ; {
				i := next.Add(1) - 1
				if n > 0 && i >= n || n == 0 && now.After(until) {
					return
				}
				if err := call(c, i); err != nil {
					t.Error(err)
					return
				}
				end := time.Now()
				lists[k] = append(lists[k], end.Sub(now))
				now = end
			}
		})
	}
	clients.Wait()
	var all latencies
	for _, l := range lists {
		all = append(all, l...)
	}
	return all
}

// promptText is the hashes of a prompt of so many blocks, the first half of which all prompts share.
func promptText(blocks int, own int64) string {
	var b []byte
	for i := range int64(blocks) {
		h := (i + 1) * 0x1e3779b97f4a7c15
		if i >= int64(blocks)/2 {
			h ^= (own + 1) * 0x2545f4914f6cdd1d
		}
		b = append(strconv.AppendInt(b, h, 10), ',')
	}
	return strings.TrimSuffix(string(b), ",")
}

// fillRanks registers workers of up to eight ranks, and books active requests on each rank.
func fillRanks(t *testing.T, c *leanConn, ranks, active, blocks int) {
	t.Helper()
	for w := range (ranks + 7) / 8 {
		if err := c.post("/register", fmt.Sprintf(`{"worker_id":%d,"model_name":"m","block_size":16,"dp_start":0,"dp_size":%d}`, w, min(8, ranks-8*w))); err != nil {
			t.Fatal(err)
		}
	}
	for i := range ranks * active {
		at := i % ranks
		err := c.post("/add", fmt.Sprintf(`{"model_name":"m","request_id":"a%d","worker_id":%d,"dp_rank":%d,"new_isl_tokens":9,"sequence_hashes":[`, i, at/8, at%8), promptText(blocks, int64(i)), "]}")
		if err != nil {
			t.Fatal(err)
		}
	}
}

// processorTime is what a process has computed.
func processorTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Skip("needs /proc: ", err)
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	const user, system, ticks = 11, 12, 100 // a second
	u, err := strconv.ParseInt(fields[user], 10, 64)
	s, err2 := strconv.ParseInt(fields[system], 10, 64)
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u+s) * time.Second / ticks
}
