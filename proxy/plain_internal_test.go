package proxy

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"spillway/busy"
	"spillway/router"
	"spillway/worker"
)

var chatRoutes = []plainRoute{{"/v1/chat/completions", url.URL{Path: "/v1/chat/completions"}}, {"/v1/embeddings", url.URL{Path: "/v1/embeddings"}}}

const plainChat = "POST /v1/chat/completions HTTP/1.1\r\nHost: gate:8000\r\n"

func TestPlainHead(t *testing.T) {
	for _, tt := range []struct {
		name, head string
		plain      bool
	}{
		{"a usual one", plainChat + "Content-Length: 2\r\nContent-Type: application/json\r\n\r\n{}", true},
		{"another route", "POST /v1/embeddings HTTP/1.1\r\nHost: [::1]:80\r\ncontent-length:0\r\n\r\n", true},
		{"one that is kept", plainChat + "Connection: Keep-Alive\r\nContent-Length: 2\r\n\r\n", true},
		{"a field that comes twice", plainChat + "X-A: 1\r\nContent-Length: 2\r\nx-a: \t2 \r\nX-A:\r\n\r\n", true},
		{"an empty one", "", false},
		{"a head that is not whole", plainChat + "Content-Length: 2\r\n", false},
		{"another method", "GET /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", false},
		{"a method that begins alike", "POSTAL /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", false},
		{"an unknown path", "POST /v1/embedding HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", false},
		{"a query", "POST /v1/embeddings?a HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", false},
		{"an older version", "POST /v1/embeddings HTTP/1.0\r\nHost: a\r\nContent-Length: 0\r\n\r\n", false},
		{"a space too many", "POST  /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", false},
		{"no length", plainChat + "\r\n", false},
		{"a length with a sign", plainChat + "Content-Length: +2\r\n\r\n", false},
		{"an empty length", plainChat + "Content-Length:\r\n\r\n", false},
		{"an immense length", plainChat + "Content-Length: 1000000000000000\r\n\r\n", false},
		{"two lengths", plainChat + "Content-Length: 2\r\nContent-Length: 2\r\n\r\n", false},
		{"chunks", plainChat + "Transfer-Encoding: chunked\r\n\r\n", false},
		{"chunks and a length", plainChat + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", false},
		{"one that waits for leave", plainChat + "Content-Length: 2\r\nExpect: 100-continue\r\n\r\n", false},
		{"one that is to be the last", plainChat + "Content-Length: 2\r\nConnection: close\r\n\r\n", false},
		{"hop-by-hop fields", plainChat + "Content-Length: 2\r\nConnection: keep-alive, x-a\r\n\r\n", false},
		{"another protocol", plainChat + "Content-Length: 2\r\nUpgrade: h2c\r\n\r\n", false},
		{"no host", "POST /v1/embeddings HTTP/1.1\r\nContent-Length: 0\r\n\r\n", false},
		{"two hosts", plainChat + "Host: gate:8000\r\nContent-Length: 2\r\n\r\n", false},
		{"a dubious host", "POST /v1/embeddings HTTP/1.1\r\nHost: a/b\r\nContent-Length: 0\r\n\r\n", false},
		{"a line that goes on", plainChat + "Content-Length: 2\r\nX-A: 1\r\n 2\r\n\r\n", false},
		{"a space before the colon", plainChat + "Content-Length : 2\r\n\r\n", false},
		{"no colon", plainChat + "Content-Length: 2\r\nX\r\n\r\n", false},
		{"no name", plainChat + "Content-Length: 2\r\n: x\r\n\r\n", false},
		{"a bare line feed", plainChat + "Content-Length: 2\r\nX-A: 1\nX-B: 2\r\n\r\n", false},
		{"a bare carriage return", plainChat + "Content-Length: 2\r\nX-A: 1\rX-B: 2\r\n\r\n", false},
		{"a zero byte", plainChat + "Content-Length: 2\r\nX-A: \x00\r\n\r\n", false},
		{"bytes beyond ASCII", plainChat + "Content-Length: 2\r\nX-A: \xc3\xa4\r\n\r\n", false},
		{"too many fields", plainChat + "Content-Length: 2\r\n" + strings.Repeat("X-A: 1\r\n", maxPlainFields) + "\r\n", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if plain := samePlain(t, []byte(tt.head)); plain != tt.plain {
				t.Errorf("plain = %v, want %v", plain, tt.plain)
			}
		})
	}
}

// samePlain reads a head, and fails unless net/http reads the same.
func samePlain(t *testing.T, b []byte) (plain bool) {
	t.Helper()
	var h plainHead
	n := h.read(b, chatRoutes)
	if n == 0 {
		return false
	}
	rest := bytes.NewReader(b)
	br := bufio.NewReader(rest)
	r, err := http.ReadRequest(br)
	if err != nil {
		t.Fatalf("%q is plain; net/http says %v", b[:n], err)
	}
	if used := len(b) - rest.Len() - br.Buffered(); used != n {
		t.Errorf("%q: %d bytes, net/http uses %d", b, n, used)
	}
	if r.Method != http.MethodPost || r.Proto != "HTTP/1.1" || r.RequestURI != h.route.path || *r.URL != h.route.url ||
		r.Host != h.host || r.ContentLength != h.length || r.Close || len(r.TransferEncoding) > 0 {
		t.Errorf("%q: route %q, host %q, length %d; net/http: %+v", b[:n], h.route.path, h.host, h.length, r)
	}
	if !maps.EqualFunc(h.fields, r.Header, func(a, b []string) bool { return strings.Join(a, "\n") == strings.Join(b, "\n") }) {
		t.Errorf("%q: fields %v, net/http: %v", b[:n], h.fields, r.Header)
	}
	return true
}

// FuzzPlainHead has net/http read whatever is taken for plain: it must find the same request, and its end
// at the same place, or a client could have two readers see different requests.
func FuzzPlainHead(f *testing.F) {
	f.Add([]byte(plainChat + "Content-Length: 2\r\nContent-Type: application/json\r\n\r\n{}"))
	f.Add([]byte(plainChat + "Connection: keep-alive\r\nContent-Length: 10\r\nX-A: 1\r\nx-a:2\r\n\r\n"))
	f.Add([]byte(plainChat + "Content-Length: 2\r\nX-A: 1\n\r\nContent-Length: 3\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) { samePlain(t, b) })
}

// handlerServer is a server that answers chats with h.
func handlerServer(t *testing.T, h echo.HandlerFunc) *Server {
	t.Helper()
	catalog, err := worker.NewCatalog([]string{"m"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(DefaultConfig(), router.New(router.DefaultConfig(), busy.DefaultConfig(), catalog, rand.New(rand.NewPCG(1, 2))), prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	s.public = echo.New()
	s.public.POST("/v1/chat/completions", h)
	return s
}

// running serves s until the test ends, and returns its address.
func running(t *testing.T, s *Server) string {
	t.Helper()
	before := goleak.IgnoreCurrent()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx, ln, nil) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
		goleak.VerifyNone(t, before)
	})
	return ln.Addr().String()
}

// asks says what is to be said on a connection of its own, in pieces, and returns all that comes back.
func asks(t *testing.T, addr string, pieces ...string) string {
	t.Helper()
	nc, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	_ = nc.SetDeadline(time.Now().Add(time.Minute))
	var all bytes.Buffer
	for _, piece := range pieces {
		if _, err := io.WriteString(nc, piece); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := io.Copy(&all, nc); err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Fatal(err)
	}
	return all.String()
}

// undated is an answer without what is of the moment.
func undated(answer string) string {
	lines := strings.SplitAfter(answer, "\r\n")
	kept := lines[:0]
	for _, line := range lines {
		if !strings.HasPrefix(line, "Date: ") {
			kept = append(kept, line)
		}
	}
	return strings.Join(kept, "")
}

// TestPlainAnswers compares the bytes of answers to plain requests with those that net/http makes of the
// same handlers.
func TestPlainAnswers(t *testing.T) {
	type step func(w http.ResponseWriter, r *http.Request)
	header := func(name string, values ...string) step {
		return func(w http.ResponseWriter, _ *http.Request) { w.Header()[name] = values }
	}
	status := func(code int) step { return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) } }
	write := func(s string) step {
		return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, s) }
	}
	flush := func(w http.ResponseWriter, _ *http.Request) { _ = http.NewResponseController(w).Flush() }
	read := func(n int64) step {
		return func(_ http.ResponseWriter, r *http.Request) { _, _ = io.CopyN(io.Discard, r.Body, n) }
	}
	readAll := func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) }
	abort := func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }
	jsonType := header("Content-Type", "application/json")
	large := strings.Repeat("0123456789", 5000)
	for _, tt := range []struct {
		name  string
		steps []step
		body  string // of the request; "" is {}
	}{
		{"with a length", []step{readAll, jsonType, header("Content-Length", "2"), status(200), write("{}"), flush}, ""},
		{"large", []step{readAll, jsonType, header("Content-Length", "50000"), write(large), flush}, ""},
		{"large, in pieces", []step{readAll, jsonType, header("Content-Length", "50000"), write(large[:7000]), write(large[7000:]), flush}, ""},
		{"in chunks", []step{readAll, header("Content-Type", "text/event-stream"), status(200), write("data: a\n\n"), flush, write("data: b\n\n"), flush}, ""},
		{"one chunk", []step{readAll, jsonType, write("{}"), flush}, ""},
		{"an error", []step{readAll, jsonType, header("X-B", "2"), header("X-A", "1", "3"), header("Content-Length", "2"), status(503), write("{}")}, ""},
		{"of a status without a name", []step{readAll, header("Content-Length", "0"), status(529)}, ""},
		{"nothing", []step{readAll}, ""},
		{"nothing, flushed", []step{readAll, flush}, ""},
		{"no content", []step{readAll, jsonType, header("Content-Length", "0"), status(204), flush}, ""},
		{"no content, but some", []step{readAll, jsonType, status(204), write("x"), flush}, ""},
		{"not modified", []step{readAll, jsonType, header("Content-Length", "7"), status(304), flush}, ""},
		{"of an unknown type", []step{readAll, write("<html>"), flush}, ""},
		{"of an unknown type, but coded", []step{readAll, header("Content-Encoding", "br"), write("<html>"), flush}, ""},
		{"a value of two lines", []step{readAll, header("X-A", "1\r\nX-B: 2"), header("Content-Length", "0"), status(200)}, ""},
		{"the last one", []step{readAll, header("Connection", "close"), header("Content-Length", "0"), status(200)}, ""},
		{"two statuses", []step{readAll, header("Content-Length", "0"), status(200), status(500)}, ""},
		{"longer than it says", []step{readAll, header("Content-Length", "2"), write("{"), write("}}"), write("}"), flush}, ""},
		{"shorter than it says", []step{readAll, header("Content-Length", "9"), write("{}"), flush}, ""},
		{"broken off", []step{readAll, write("{"), flush, abort}, ""},
		{"broken off before it began", []step{readAll, abort}, ""},
		{"to a body that was not read", []step{header("Content-Length", "0"), status(401)}, ""},
		{"to a body that was read in part", []step{read(1), header("Content-Length", "0"), status(401)}, ""},
		{"to a large body", []step{readAll, header("Content-Length", "0"), status(200)}, large},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := handlerServer(t, func(c echo.Context) error {
				for _, do := range tt.steps {
					do(c.Response().Writer, c.Request())
				}
				return nil
			})
			addr := running(t, s)
			body := tt.body
			if body == "" {
				body = "{}"
			}
			// The second request tells whether the first one left the connection as it should be, and ends it.
			once := func(more string) string {
				head := fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n%sContent-Length: ", more)
				return asks(t, addr, fmt.Sprintf("%s%d\r\n\r\n%s", head, len(body), body), "GET /none HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
			}
			plain, other := undated(once("")), undated(once("Upgrade: none\r\n"))
			if plain != other {
				t.Errorf("answer:\n%.600s\nof net/http:\n%.600s", plain, other)
			}
		})
	}
}

// TestPlainTalk has clients say what they should not, or more than one request at a time.
func TestPlainTalk(t *testing.T) {
	s := handlerServer(t, func(c echo.Context) error {
		b, err := io.ReadAll(c.Request().Body)
		if err != nil {
			c.Response().Header()["Connection"] = []string{"close"}
			return c.String(http.StatusBadRequest, err.Error())
		}
		if string(b) == "panic" {
			panic("as it was told to")
		}
		return c.String(http.StatusOK, string(b)+" of "+c.Request().Header.Get("X-A"))
	})
	addr := running(t, s)
	ask := func(a, body string) string {
		return fmt.Sprintf("POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-A: %s\r\nContent-Length: %d\r\n\r\n%s", a, len(body), body)
	}
	const last = "GET /none HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
	large := strings.Repeat("x", 3*plainBuffer)
	for _, tt := range []struct {
		name   string
		pieces []string
		want   []string // in this order
	}{
		{"one after the other in one piece", []string{ask("1", "a") + ask("2", "b") + ask("3", "") + last}, []string{"a of 1", "b of 2", " of 3", "404 Not Found"}},
		{"a large one among them", []string{ask("1", "a") + ask("2", large) + ask("3", "c") + last}, []string{"a of 1", "xx of 2", "c of 3", "404 Not Found"}},
		{"a head in two pieces", []string{ask("1", "a") + "POST /v1/ch", ask("2", "b")[len("POST /v1/ch"):] + ask("3", "c") + last}, []string{"a of 1", "b of 2", "c of 3", "404 Not Found"}},
		{"another route between two", []string{ask("1", "a") + "GET /none HTTP/1.1\r\nHost: a\r\n\r\n" + ask("2", "b") + last}, []string{"a of 1", "404", "b of 2", "404"}},
		{"a long head", []string{ask(large, "a") + last}, []string{"a of " + large, "404 Not Found"}},
		{"chunks", []string{"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n" + last}, []string{"a of ", "404 Not Found"}},
		{"rubbish", []string{ask("1", "a") + "\x16\x03\x01\r\n\r\n"}, []string{"a of 1", "HTTP/1.1 400 Bad Request"}},
		{"line ends after bodies", []string{ask("1", "a") + "\r\n", ask("2", "b") + "\n\r" + ask("3", "c") + "\r\n\r\n" + last}, []string{"a of 1", "b of 2", "c of 3", "404 Not Found"}},
		{"too many line ends", []string{ask("1", "a") + "\r\n\r\n\n" + ask("2", "b")}, []string{"a of 1", "HTTP/1.1 400 Bad Request"}},
		{"line ends before the first one", []string{"\r\n" + ask("1", "a")}, []string{"HTTP/1.1 400 Bad Request"}},
		{"a panic", []string{ask("1", "a") + ask("2", "panic") + last}, []string{"a of 1"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := asks(t, addr, tt.pieces...)
			rest := got
			for _, want := range tt.want {
				_, after, found := strings.Cut(rest, want)
				if !found {
					t.Fatalf("%q is not in %.300q of %.1000q", want, rest, got)
				}
				rest = after
			}
			if n := strings.Count(got, "HTTP/1.1 "); n != len(tt.want) {
				t.Errorf("%d answers, want %d: %.1000q", n, len(tt.want), got)
			}
		})
	}
}

// TestPlainBodyCutShort has a client leave in the middle of a body.
func TestPlainBodyCutShort(t *testing.T) {
	seen := make(chan error, 1)
	s := handlerServer(t, func(c echo.Context) error {
		_, err := io.ReadAll(c.Request().Body)
		seen <- err
		return c.NoContent(http.StatusBadRequest)
	})
	nc, err := net.Dial("tcp", running(t, s))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(nc, plainChat+"Content-Length: 9\r\n\r\n{"); err != nil {
		t.Fatal(err)
	}
	_ = nc.(*net.TCPConn).CloseWrite()
	if err := <-seen; !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the body ends with %v, want %v", err, io.ErrUnexpectedEOF)
	}
	_ = nc.SetDeadline(time.Now().Add(time.Minute))
	got, err := io.ReadAll(nc)
	if _ = nc.Close(); err != nil || !strings.HasPrefix(string(got), "HTTP/1.1 400 ") || !strings.Contains(string(got), "Connection: close\r\n") {
		t.Errorf("%q, %v; want a 400, and the end", got, err)
	}
}

// TestPlainIdle has clients that ask for nothing, or for nothing more.
func TestPlainIdle(t *testing.T) {
	s := handlerServer(t, func(c echo.Context) error { return c.NoContent(http.StatusOK) })
	s.cfg.ClientIdleTimeout = 50 * time.Millisecond
	nc, err := net.Dial("tcp", running(t, s))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	_ = nc.SetDeadline(time.Now().Add(headTimeout * 9 / 10)) // so long the first request may take
	_, _ = io.WriteString(nc, plainChat+"Content-Length: 0\r\n\r\n")
	got, err := io.ReadAll(nc)
	if err != nil || !strings.HasPrefix(string(got), "HTTP/1.1 200 OK\r\n") || strings.Contains(string(got), "Connection") {
		t.Errorf("%q, %v; want an answer, and a connection that is closed later", got, err)
	}
}

// TestPlainUnread has a client send a body that is not read: it gets its answer, and then a proper end.
func TestPlainUnread(t *testing.T) {
	s := handlerServer(t, func(c echo.Context) error { return c.NoContent(http.StatusUnauthorized) })
	nc, err := net.Dial("tcp", running(t, s))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	_ = nc.SetDeadline(time.Now().Add(time.Minute))
	_, _ = io.WriteString(nc, plainChat+"Content-Length: 50000\r\n\r\n"+strings.Repeat("x", 50000)) // the kernel takes that much
	got, err := io.ReadAll(nc)
	if err != nil || !strings.HasPrefix(string(got), "HTTP/1.1 401 ") || !strings.Contains(string(got), "Connection: close\r\n") {
		t.Errorf("%q, %v; want an answer that tells of the end", got, err)
	}
}

// TestPlainUnreadSlowly has clients take their time with a body that is not read: one for longer than a
// large body would be waited for, one until the server stops, and one that has been given up already.
func TestPlainUnreadSlowly(t *testing.T) {
	s := handlerServer(t, func(c echo.Context) error {
		if c.Request().Header.Get("X-A") != "" {
			_ = http.NewResponseController(c.Response().Writer).SetReadDeadline(time.Now())
			_, _ = io.ReadAll(c.Request().Body)
		}
		return c.NoContent(http.StatusUnauthorized)
	})
	s.cfg.ClientReadTimeout = time.Hour
	stay := outliving(t)
	addr := running(t, s)
	begin := func(more string) net.Conn {
		nc := stay(addr)
		_, _ = io.WriteString(nc, plainChat+more+"Content-Length: 50000\r\n\r\nx")
		if got, err := io.ReadAll(nc); err != nil || !strings.HasPrefix(string(got), "HTTP/1.1 401 ") {
			t.Fatalf("%q, %v; want an answer", got, err)
		}
		return nc
	}
	ends := func(nc net.Conn) {
		for {
			if _, err := io.WriteString(nc, "x"); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatal("the connection is not closed")
			} else if err != nil {
				return
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
	slow, givenUp := begin(""), begin("X-A: 1\r\n")
	begin("")
	time.Sleep(2 * lingers) // or the connection could be closed a moment later
	for range 4 {
		if _, err := io.WriteString(slow, strings.Repeat("x", 12000)); err != nil {
			t.Fatalf("%v, want to be listened to", err)
		}
	}
	_, _ = io.WriteString(slow, strings.Repeat("x", 1999))
	ends(slow)
	ends(givenUp)
}

// TestPlainAtOnce has many clients send and receive at a time: what belongs to one must not be seen by another.
func TestPlainAtOnce(t *testing.T) {
	s := handlerServer(t, func(c echo.Context) error {
		r := c.Request()
		b := make([]byte, r.ContentLength)
		for n := 0; n < len(b); n += 100 {
			if _, err := io.ReadFull(r.Body, b[n:min(n+100, len(b))]); err != nil {
				return err
			}
			runtime.Gosched()
		}
		if len(b)%2 == 0 { // in chunks
			_, _ = c.Response().Write(b[:len(b)/2])
			c.Response().Flush()
			b = b[len(b)/2:]
		}
		_, err := c.Response().Write(append(b, r.Header.Get("X-A")...))
		return err
	})
	url := "http://" + running(t, s) + "/v1/chat/completions"
	var clients sync.WaitGroup
	for i := range 8 {
		clients.Go(func() {
			client := http.Client{Transport: &http.Transport{}}
			defer client.CloseIdleConnections()
			for j := range 50 {
				body := strings.Repeat(fmt.Sprintf("%d-%d,", i, j), 1+37*j) // some are longer than plainBuffer
				r, _ := http.NewRequest(http.MethodPost, url, strings.NewReader(body))
				r.Header.Set("X-A", fmt.Sprint(i, j))
				resp, err := client.Do(r)
				if err != nil {
					t.Error(err)
					return
				}
				got, err := io.ReadAll(resp.Body)
				if want := body + fmt.Sprint(i, j); string(got) != want || err != nil {
					t.Errorf("client %d, request %d: %.60q..., %d bytes, %v; want %.60q..., %d bytes", i, j, got, len(got), err, want, len(want))
					return
				}
			}
		})
	}
	clients.Wait()
}

// TestPlainKept has a connection be kept while the server stops: nobody waits for what its client may say.
func TestPlainKept(t *testing.T) {
	for _, said := range []string{"", plainChat + "Content-Length: 0\r\n\r\n"} {
		t.Run(fmt.Sprint(said != ""), func(t *testing.T) {
			s := handlerServer(t, func(c echo.Context) error { return c.NoContent(http.StatusOK) })
			s.cfg.ClientIdleTimeout = time.Hour
			stay := outliving(t)
			nc := stay(running(t, s))
			_, _ = io.WriteString(nc, said)
			if said != "" {
				if _, err := nc.Read(make([]byte, 1)); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// outliving dials servers that are made after it: the connections are closed when those have stopped.
func outliving(t *testing.T) func(addr string) net.Conn {
	t.Helper()
	var all []net.Conn
	t.Cleanup(func() {
		for _, nc := range all {
			_ = nc.Close()
		}
	})
	return func(addr string) net.Conn {
		nc, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		_ = nc.SetDeadline(time.Now().Add(time.Minute))
		all = append(all, nc)
		return nc
	}
}

func TestDateNow(t *testing.T) {
	lastDate.Store(&date{1, "then"})
	before := time.Now().Truncate(time.Second)
	if at, err := http.ParseTime(dateNow()); err != nil || at.Before(before) || at.After(time.Now()) {
		t.Errorf("%v, %v; want what is now", at, err)
	}
}

// TestPlainStopping has the server stop before an answer, and between an answer and the wait for the next
// request.
func TestPlainStopping(t *testing.T) {
	for _, before := range []bool{false, true} {
		t.Run(fmt.Sprint(before), func(t *testing.T) {
			var s *Server
			s = handlerServer(t, func(c echo.Context) error {
				if before {
					s.enter(stopping)
				}
				c.Response().Header()["Content-Length"] = []string{"0"}
				c.Response().WriteHeader(http.StatusOK)
				c.Response().Flush()
				s.enter(stopping)
				return nil
			})
			got := asks(t, running(t, s), plainChat+"Content-Length: 0\r\n\r\n")
			if !strings.HasPrefix(got, "HTTP/1.1 200 OK\r\n") || strings.Contains(got, "Connection: close\r\n") != before {
				t.Errorf("%q, want an answer that tells of the end: %v", got, before)
			}
		})
	}
}

// fewFiles is a listener that fails for a while, and then for good.
type fewFiles struct {
	net.Listener
	errs chan error
}

func (l fewFiles) Accept() (net.Conn, error) { return nil, <-l.errs }

// TestPlainAccept has the listener fail.
func TestPlainAccept(t *testing.T) {
	s := handlerServer(t, func(echo.Context) error { return nil })
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := fewFiles{ln, make(chan error, 3)}
	l.errs <- &net.OpError{Op: "accept", Err: syscall.EMFILE}
	l.errs <- &net.OpError{Op: "accept", Err: syscall.ECONNABORTED}
	l.errs <- io.ErrClosedPipe
	if err := s.Run(t.Context(), l, nil); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("Run = %v, want %v: the errors before it pass", err, io.ErrClosedPipe)
	}
}

func BenchmarkPlainHead(b *testing.B) {
	head := []byte(plainChat + "User-Agent: OpenAI/Go 1.12.0\r\nAccept: application/json\r\nAuthorization: Bearer sk-0123456789abcdef\r\nContent-Type: application/json\r\nContent-Length: 1024\r\n\r\n")
	var h plainHead
	b.ReportAllocs()
	for b.Loop() {
		if h.read(head, chatRoutes) == 0 {
			b.Fatal("not plain")
		}
	}
}
