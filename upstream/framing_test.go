package upstream_test

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"testing"

	"spillway/upstream"
)

func TestFraming(t *testing.T) {
	const ok = "HTTP/1.1 200 OK\r\n"
	const chunked = ok + "Transfer-Encoding: chunked\r\n\r\n"
	for _, tt := range []struct {
		name   string
		method string // POST if empty
		answer string
		hangup bool // the worker closes after the answer
		whole  bool // only sent in one piece
		status int
		body   string
		err    string
		reused bool // by the next exchange
	}{
		{name: "length", answer: ok + "Content-Length: 5\r\n\r\nhello", status: 200, body: "hello", reused: true},
		{name: "length zero", answer: ok + "Content-Length: 0\r\n\r\n", status: 200, reused: true},
		{name: "length twice the same", answer: ok + "Content-Length: 2\r\ncontent-length: 2\r\n\r\nhi", status: 200, body: "hi", reused: true},
		{name: "lengths that differ", answer: ok + "Content-Length: 2\r\nContent-Length: 3\r\n\r\nhi!", err: "framing"},
		{name: "length list", answer: ok + "Content-Length: 2, 2\r\n\r\nhi", err: "framing"},
		{name: "length negative", answer: ok + "Content-Length: -1\r\n\r\n", err: "framing"},
		{name: "length with a plus", answer: ok + "Content-Length: +2\r\n\r\nhi", err: "framing"},
		{name: "length empty", answer: ok + "Content-Length:\r\n\r\n", err: "framing"},
		{name: "length too big", answer: ok + "Content-Length: 9223372036854775808\r\n\r\n", err: "framing"},
		{name: "length, cut short", answer: ok + "Content-Length: 5\r\n\r\nhel", hangup: true, status: 200, body: "hel", err: "truncated"},
		{name: "length, and more", answer: ok + "Content-Length: 2\r\n\r\nhi!", whole: true, status: 200, body: "hi"},
		{name: "chunks", answer: chunked + "5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n", status: 200, body: "hello world", reused: true},
		{name: "no chunks", answer: chunked + "0\r\n\r\n", status: 200, reused: true},
		{name: "chunk sizes in hex, padded", answer: chunked + "0A\r\n0123456789\r\n00c \t\r\nabcdefghijkl\r\n000\r\n\r\n", status: 200, body: "0123456789abcdefghijkl", reused: true},
		{name: "chunk extensions", answer: chunked + "2;a=b;c=\"d\"\r\nhi\r\n1 ; x\r\n!\r\n0;last\r\n\r\n", status: 200, body: "hi!", reused: true},
		{name: "trailers", answer: chunked + "2\r\nhi\r\n0\r\nX-Sum: 1\r\nX-More: 2\r\n\r\n", status: 200, body: "hi", reused: true},
		{name: "chunks, and more", answer: chunked + "2\r\nhi\r\n0\r\n\r\nHTTP/1.1 200", whole: true, status: 200, body: "hi"},
		{name: "chunk cut short", answer: chunked + "5\r\nhel", hangup: true, status: 200, body: "hel", err: "truncated"},
		{name: "no last chunk", answer: chunked + "2\r\nhi\r\n", hangup: true, status: 200, body: "hi", err: "truncated"},
		{name: "no end of trailers", answer: chunked + "2\r\nhi\r\n0\r\n", hangup: true, status: 200, body: "hi", err: "truncated"},
		{name: "chunk size not hex", answer: chunked + "2\r\nhi\r\nxyz\r\n", status: 200, body: "hi", err: "framing"},
		{name: "chunk size missing", answer: chunked + "2\r\nhi\r\n\r\n", status: 200, body: "hi", err: "framing"},
		{name: "chunk size signed", answer: chunked + "+2\r\nhi\r\n", status: 200, err: "framing"},
		{name: "chunk size prefixed", answer: chunked + "0x2\r\nhi\r\n", status: 200, err: "framing"},
		{name: "chunk size indented", answer: chunked + " 2\r\nhi\r\n", status: 200, err: "framing"},
		{name: "chunk size too big", answer: chunked + "1000000000000000\r\nhi", status: 200, err: "framing"},
		{name: "chunk line too long", answer: chunked + "2;" + strings.Repeat("x", 5000) + "\r\nhi\r\n", whole: true, status: 200, err: "framing"},
		{name: "chunk line without end", answer: chunked + strings.Repeat("0", 5000), whole: true, status: 200, err: "framing"},
		{name: "chunk line ended by LF", answer: chunked + "2\nhi\r\n0\r\n\r\n", status: 200, err: "framing"},
		{name: "chunk line with a bare CR", answer: chunked + "2;a\rb\r\nhi\r\n0\r\n\r\n", status: 200, err: "framing"},
		{name: "chunk longer than said", answer: chunked + "2\r\nhi!\r\n0\r\n\r\n", status: 200, body: "hi", err: "framing"},
		{name: "chunk ended by LF", answer: chunked + "2\r\nhi\n0\r\n\r\n", status: 200, body: "hi", err: "framing"},
		{name: "chunk ended by X LF", answer: chunked + "2\r\nhiX\n0\r\n\r\n", status: 200, body: "hi", err: "framing"},
		{name: "chunk ended by CR", answer: chunked + "2\r\nhi\r0\r\n\r\n", status: 200, body: "hi", err: "framing"},
		{name: "trailer malformed", answer: chunked + "0\r\nX Y\r\n\r\n", status: 200, err: "framing"},
		{name: "trailers too big", answer: chunked + "0\r\n" + strings.Repeat("X: "+strings.Repeat("y", 1000)+"\r\n", 70), whole: true, status: 200, err: "framing"},
		{name: "both lengths and chunks", answer: ok + "Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", status: 200, body: "hi"},
		{name: "coding unknown", answer: ok + "Transfer-Encoding: gzip, chunked\r\n\r\n", err: "framing"},
		{name: "coding twice", answer: ok + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", err: "framing"},
		{name: "coding in any case", answer: ok + "TRANSFER-ENCODING: Chunked\r\n\r\n0\r\n\r\n", status: 200, reused: true},
		{name: "chunks in HTTP/1.0", answer: "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", err: "framing"},
		{name: "until close", answer: ok + "\r\nhello", hangup: true, status: 200, body: "hello"},
		{name: "HTTP/1.0", answer: "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", status: 200, body: "hi"},
		{name: "asked to close", answer: ok + "Connection: x, Close\r\nContent-Length: 2\r\n\r\nhi", status: 200, body: "hi"},
		{name: "asked to close and to keep", answer: ok + "Connection: close\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nhi", status: 200, body: "hi"},
		{name: "asked to keep", answer: ok + "Connection: keep-alive\r\nContent-Length: 2\r\n\r\nhi", status: 200, body: "hi", reused: true},
		{name: "204", answer: "HTTP/1.1 204 No Content\r\n\r\n", status: 204, reused: true},
		{name: "204 with a length", answer: "HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\n", status: 204},
		{name: "304 with a length", answer: "HTTP/1.1 304 Not Modified\r\nContent-Length: 2\r\n\r\n", status: 304, reused: true},
		{name: "HEAD", method: "HEAD", answer: ok + "Content-Length: 2\r\n\r\n", status: 200, reused: true},
		{name: "HEAD, chunked", method: "HEAD", answer: chunked, status: 200, reused: true},
		{name: "no reason phrase", answer: "HTTP/1.1 429\r\nContent-Length: 0\r\n\r\n", status: 429, reused: true},
		{name: "interim answers", answer: "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + plain, status: 200, body: "ok", reused: true},
		{name: "interim answers without end", answer: strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 20), err: "header"},
		{name: "101", answer: "HTTP/1.1 101 Switching Protocols\r\n\r\n", err: "header"},
		{name: "folded line", answer: ok + "X: a\r\n b\r\nContent-Length: 0\r\n\r\n", err: "header"},
		{name: "space before the colon", answer: ok + "Content-Length : 2\r\n\r\nhi", err: "header"},
		{name: "no colon", answer: ok + "Content-Length 2\r\n\r\nhi", err: "header"},
		{name: "no name", answer: ok + ": 2\r\n\r\nhi", err: "header"},
		{name: "NUL in a value", answer: ok + "X: a\x00b\r\n\r\n", err: "header"},
		{name: "bare CR in a value", answer: ok + "X: a\rY: b\r\n\r\n", err: "header"},
		{name: "bare LF in a head", answer: ok + "X: a\nY: b\r\n\r\n", err: "header"},
		{name: "not HTTP", answer: "SSH-2.0-OpenSSH\r\n", err: "header"},
		{name: "HTTP/2", answer: "HTTP/2 200 OK\r\n\r\n", err: "header"},
		{name: "HTTP/1.2", answer: "HTTP/1.2 200 OK\r\n\r\n", err: "header"},
		{name: "status of four digits", answer: "HTTP/1.1 2000 OK\r\n\r\n", err: "header"},
		{name: "status of two digits", answer: "HTTP/1.1 20 OK\r\n\r\n", err: "header"},
		{name: "status below 100", answer: "HTTP/1.1 099 OK\r\n\r\n", err: "header"},
		{name: "status not a number", answer: "HTTP/1.1 2x0 OK\r\n\r\n", err: "header"},
		{name: "head of exactly the limit", answer: headOf(maxHead) + "hi", status: 200, body: "hi", whole: true, reused: true},
		{name: "head over the limit", answer: headOf(maxHead+1) + "hi", whole: true, err: "header"},
		{name: "head without end", answer: headOf(2 * maxHead)[:2*maxHead-4], whole: true, err: "header"},
		{name: "head of too many lines", answer: ok + strings.Repeat("a:\r\n", 2000) + "\r\n", whole: true, err: "header"},
		{name: "nothing", hangup: true, err: "reset"},
		{name: "half a head", answer: ok + "Content-Le", hangup: true, err: "reset"},
	} {
		for _, pieces := range []bool{false, true} {
			if pieces && tt.whole {
				continue
			}
			t.Run(fmt.Sprintf("%s/pieces=%v", tt.name, pieces), func(t *testing.T) {
				w := newWorker(t, func(p *peer) {
					for first := p.id == 0; ; first = false {
						if _, ok := p.request(); !ok {
							return
						}
						if !first {
							p.say(plain)
							continue
						}
						if pieces {
							for i := range len(tt.answer) {
								p.say(tt.answer[i : i+1])
							}
						} else {
							p.say(tt.answer)
						}
						if tt.hangup {
							return
						}
					}
				})
				c := w.client(t, upstream.Config{MaxHeaderBytes: maxHead})
				req := post("prompt")
				if tt.method != "" {
					req = &upstream.Request{Method: tt.method, Path: "/"}
				}
				status, body, reused, err := exchange(t.Context(), c, req)
				wantErr := tt.err
				if wantErr == "" {
					wantErr = "none"
				}
				if status != tt.status || body != tt.body || kind(err) != wantErr || reused {
					t.Errorf("exchange = %d %q, reused %v, %v; want %d %q, %s", status, body, reused, err, tt.status, tt.body, wantErr)
				}
				if got := mustExchange(t, c, post("again")); got != tt.reused {
					t.Errorf("next exchange reused the connection: %v, want %v", got, tt.reused)
				}
			})
		}
	}
}

const maxHead = 40 << 10

// headOf returns a head of n bytes for a body of two.
func headOf(n int) string {
	const before, after = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX: ", "\r\n\r\n"
	return before + strings.Repeat("x", n-len(before)-len(after)) + after
}

func TestHeaders(t *testing.T) {
	w := newWorker(t, answering("HTTP/1.1 200 OK\r\nX-b: 1\r\nx-B:\t two \r\nEMPTY:\r\nContent-Length: 2\r\n\r\nok"))
	resp, err := w.client(t, upstream.Config{}).Do(t.Context(), post(""))
	if err != nil {
		t.Fatal(err)
	}
	var got strings.Builder
	for name, value := range resp.Headers() {
		fmt.Fprintf(&got, "%s=%s;", name, value)
	}
	resp.Close()
	if want := "X-b=1;x-B=two;EMPTY=;Content-Length=2;"; got.String() != want {
		t.Errorf("Headers() = %q, want %q", &got, want)
	}
	for name, want := range map[string]string{"x-b": "1", "empty": "", "content-length": "2", "absent": ""} {
		if got := resp.Header(name); got != want {
			t.Errorf("Header(%q) = %q, want %q", name, got, want)
		}
	}
	if resp.ContentLength != 2 {
		t.Errorf("ContentLength = %d, want 2", resp.ContentLength)
	}
}

func TestNextBringsAllThatCame(t *testing.T) {
	var events, wire strings.Builder
	for i := range 20 {
		event := fmt.Sprintf("data: {\"token\":%d}\n\n", i)
		events.WriteString(event)
		fmt.Fprintf(&wire, "%x\r\n%s\r\n", len(event), event)
	}
	w := newWorker(t, answering("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"+wire.String()+"0\r\n\r\n"))
	resp, err := w.client(t, upstream.Config{}).Do(t.Context(), post(""))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Close()
	got, err := resp.Next()
	if string(got) != events.String() || err != nil {
		t.Errorf("Next() = %q, %v, want all events that one write sent", got, err)
	}
	if !resp.Complete() {
		t.Error("Complete() = false, want true: the last chunk has come, too")
	}
	if got, err := resp.Next(); got != nil || err == nil || kind(err) != "other" {
		t.Errorf("Next() at the end = %q, %v, want io.EOF", got, err)
	}
}

func TestContentLength(t *testing.T) {
	for answer, want := range map[string]int64{
		plain:                     2,
		"HTTP/1.1 200 OK\r\n\r\n": -1,
		"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n": -1,
	} {
		w := newWorker(t, answering(answer))
		resp, err := w.client(t, upstream.Config{}).Do(t.Context(), post(""))
		if err != nil {
			t.Fatal(err)
		}
		if resp.ContentLength != want {
			t.Errorf("ContentLength of %q = %d, want %d", answer, resp.ContentLength, want)
		}
		resp.Close()
	}
}

func TestBigReadStopsAtTheEnd(t *testing.T) {
	body := strings.Repeat("x", 100<<10)
	nc := &canned{data: []byte("HTTP/1.1 200 OK\r\nContent-Length: 102400\r\n\r\n" + body + plain), step: 30 << 10}
	c, resp, err := upstream.Receive("POST", nc, upstream.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	got := make([]byte, 1<<20)
	n, err := io.ReadFull(resp, got)
	if string(got[:n]) != body || err != io.ErrUnexpectedEOF {
		t.Errorf("ReadFull = %d bytes, %v, want %d and no more", n, err, len(body))
	}
	resp.Close()
}

func TestBigHeadDoesNotKeepItsBuffer(t *testing.T) {
	nc := &canned{data: []byte(headOf(128<<10) + "hi"), step: 128 << 10}
	c, resp, err := upstream.Receive("POST", nc, upstream.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	defer resp.Close()
	if body, err := resp.Next(); string(body) != "hi" || err != nil {
		t.Errorf("Next = %q, %v", body, err)
	}
	if n := resp.BufferBytes(); n > 16<<10 {
		t.Errorf("%d bytes of buffer in the body, want at most 16 KiB", n)
	}
}

// TestBigReadsOfChunks: a large chunk is read past the buffer, and whatever follows it is taken for what it
// is, in whatever pieces all of it comes and is read.
func TestBigReadsOfChunks(t *testing.T) {
	var text strings.Builder
	for i := 0; text.Len() < 200_000; i++ {
		fmt.Fprintf(&text, "%d,", i)
	}
	body := text.String()
	chunked := func(sizes ...int) string {
		all, rest := "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", body
		for _, n := range sizes {
			all += fmt.Sprintf("%x\r\n%s\r\n", n, rest[:n])
			rest = rest[n:]
		}
		return all
	}
	for _, tt := range []struct {
		name   string
		answer string
		hangup bool
		whole  int // bytes of the body
		err    string
	}{
		{name: "one", answer: chunked(150_000) + "0\r\n\r\n", whole: 150_000},
		{name: "large and small", answer: chunked(50_000, 3, 20_000, 16_383, 16_384, 16_385, 1, 40_000) + "0\r\nX-Sum: 1\r\n\r\n", whole: 159_156},
		{name: "longer than said", answer: chunked(100_000)[:100_000] + strings.Repeat("x", 200) + "\r\n0\r\n\r\n", err: "framing"},
		{name: "cut short", answer: chunked(100_000)[:90_000], hangup: true, err: "truncated"},
	} {
		for _, size := range []int{16 << 10, 17_001, 1 << 20} {
			for _, piece := range []int{1000, 16_500, 1 << 20} {
				t.Run(fmt.Sprintf("%s/read=%d/piece=%d", tt.name, size, piece), func(t *testing.T) {
					w := newWorker(t, func(p *peer) {
						for {
							if _, ok := p.request(); !ok {
								return
							}
							for rest := tt.answer; rest != ""; rest = rest[min(piece, len(rest)):] {
								p.say(rest[:min(piece, len(rest))])
							}
							if tt.hangup {
								return
							}
						}
					})
					c := w.client(t, upstream.Config{})
					for i := range 2 {
						resp, err := c.Do(t.Context(), post("x"))
						if err != nil {
							t.Fatal(err)
						}
						var got []byte
						buf := make([]byte, size)
						for err == nil {
							var n int
							n, err = resp.Read(buf)
							got = append(got, buf[:n]...)
						}
						if err == io.EOF {
							err = nil
						}
						if want := cmp.Or(tt.err, "none"); kind(err) != want {
							t.Errorf("exchange %d: %v, want %s", i, err, want)
						}
						if tt.err == "" && (string(got) != body[:tt.whole] || resp.Reused() != (i > 0)) {
							t.Errorf("exchange %d: %d bytes, reused %v, want %d", i, len(got), resp.Reused(), tt.whole)
						}
						_ = resp.Close()
					}
				})
			}
		}
	}
}
