package dispatch_test

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"spillway/dispatch"
)

// scripted is a gateway that reads a request and answers with bytes, by the request's number from 1.
// After "" it closes the connection, as after an answer that ends with "CLOSE".
func scripted(t *testing.T, says func(n int) string) (url string, asked *atomic.Int64) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	asked = new(atomic.Int64)
	var wg sync.WaitGroup
	var open sync.Map
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			open.Store(c, true)
			wg.Go(func() {
				defer c.Close()
				in := bufio.NewReader(c)
				for {
					req, err := http.ReadRequest(in)
					if err != nil {
						return
					}
					_, _ = io.Copy(io.Discard, req.Body)
					text, end := strings.CutSuffix(says(int(asked.Add(1))), "CLOSE")
					if _, err := io.WriteString(c, text); err != nil || end || text == "" {
						return
					}
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		open.Range(func(c, _ any) bool { _ = c.(net.Conn).Close(); return true })
		wg.Wait()
	})
	return "http://" + ln.Addr().String(), asked
}

// TestAnswers has answers of all shapes.
func TestAnswers(t *testing.T) {
	const ok = "HTTP/1.1 200 OK\r\n"
	for _, tt := range []struct {
		name, answer string
		status       int
		body         string
	}{
		{"length", ok + "Content-Length: 5\r\n\r\nhello", 200, "hello"},
		{"chunks", ok + "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n", 200, "hello world"},
		{"interim answers", "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + ok + "Content-Length: 2\r\n\r\nhi", 200, "hi"},
		{"HTTP/1.0", "HTTP/1.0 200 OK\r\n\r\nup to the endCLOSE", 200, "up to the end"},
		{"redirect", "HTTP/1.1 307 Elsewhere\r\nLocation: /v1/other\r\nContent-Length: 5\r\n\r\nthere", 307, "there"},
		{"nothing", "HTTP/1.1 204 No Content\r\n\r\n", 204, ""},
		{"large", ok + "Content-Length: 300000\r\n\r\n" + strings.Repeat("x", 300000), 200, strings.Repeat("x", 300000)},
		{"large, in chunks", ok + "Transfer-Encoding: chunked\r\n\r\n" + strings.Repeat("4e20\r\n"+strings.Repeat("y", 20000)+"\r\n", 15) + "0\r\n\r\n", 200, strings.Repeat("y", 300000)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := startRedis(t)
			url, asked := scripted(t, func(int) string { return tt.answer })
			begin(t, r, setup{}, queueDoc{"queue_name": "q", "igw_base_url": url})
			r.fill("q", 20)
			for _, got := range r.results("result-list", 20) {
				if got.StatusCode != tt.status || *got.Payload != tt.body || got.Attempts != 1 {
					t.Errorf("status %d, %d attempts, payload %.60q", got.StatusCode, got.Attempts, *got.Payload)
				}
			}
			if n := asked.Load(); n != 20 {
				t.Errorf("asked %d times, want 20", n)
			}
		})
	}
}

// TestTooLong has an answer of more bytes than are taken, and one of just as many.
func TestTooLong(t *testing.T) {
	r := startRedis(t)
	g := newGateway(t, func(w http.ResponseWriter, _ *http.Request, body string) { _, _ = io.WriteString(w, body) })
	begin(t, r, setup{cfg: func(c *dispatch.Config) { c.MaxResponseBytes = 100 }}, simple(g))
	for n, want := range map[int]string{100: "", 101: "INVALID_REQUEST"} {
		r.enqueue("q", fmt.Sprint(n), `{"a":"`+strings.Repeat("x", n-8)+`"}`)
		if got := r.results("result-list", 1)[0]; got.ErrorCode != want {
			t.Errorf("an answer of %d bytes: %+v, want code %q", n, got, want)
		}
	}
}

// TestDies has a gateway that dies of a message each time, on a connection that has served others. It is
// asked once for each attempt, and attempts have an end.
func TestDies(t *testing.T) {
	r := startRedis(t)
	url, asked := scripted(t, func(n int) string {
		if n <= 2 {
			return "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
		}
		return ""
	})
	d := begin(t, r, setup{cfg: func(c *dispatch.Config) { c.Concurrency, c.MaxAttempts = 1, 1 }}, queueDoc{"queue_name": "q", "igw_base_url": url})
	r.fill("q", 2)
	r.results("result-list", 2)
	r.enqueue("q", "dies", prompt)
	if got := r.results("result-list", 1)[0]; got.ErrorCode != "ATTEMPTS_EXHAUSTED" || asked.Load() != 3 {
		t.Errorf("result %+v after the gateway was asked %d times, want ATTEMPTS_EXHAUSTED after 3", got, asked.Load())
	}
	if n := d.metric("overload_trips_total", "unreachable"); n != 0 {
		t.Errorf("%v trips: the gateway could be reached", n)
	}
}

// TestRequestLine has URLs and endpoints of all sorts.
func TestRequestLine(t *testing.T) {
	r := startRedis(t)
	var seen atomic.Value
	g := newGateway(t, func(w http.ResponseWriter, req *http.Request, _ string) {
		seen.Store(fmt.Sprintf("%v %s %s", req.Host == req.Context().Value(http.LocalAddrContextKey).(net.Addr).String(), req.RequestURI, req.Header.Get("Authorization")))
	})
	host := strings.TrimPrefix(g.URL, "http://")
	begin(t, r, setup{},
		queueDoc{"queue_name": "plain", "igw_base_url": g.URL},
		queueDoc{"queue_name": "path", "igw_base_url": g.URL + "/under/a%20b//?x=1#y", "request_path_url": "/v2?z=1"},
		queueDoc{"queue_name": "user", "igw_base_url": "http://me:secret@" + host + "/"},
		queueDoc{"queue_name": "astray", "igw_base_url": g.URL + "//elsewhere.test"},
	)
	for _, tt := range []struct {
		queue, endpoint, authorization string
		want                           string // "" for INVALID_REQUEST
	}{
		{"plain", "", "", "true /v1/completions "},
		{"plain", "/v1/chat/completions", "Bearer x", "true /v1/chat/completions Bearer x"},
		{"plain", "/a%2Fb/ü?q=ä&r=1 2", "", ""},
		{"plain", "/a%2Fb?q=1#frag", "", "true /a%2Fb?q=1 "},
		{"plain", "/ü", "", "true /%C3%BC "},
		{"plain", "//elsewhere.test/v1", "", ""},
		{"plain", "http://elsewhere.test/v1", "", ""},
		{"plain", "/a/../../v1", "", ""},
		{"path", "", "", "true /under/a%20b/v2?z=1 "},
		{"path", "/v3", "", "true /under/a%20b/v3 "},
		{"user", "", "", "true /v1/completions Basic bWU6c2VjcmV0"},
		{"user", "", "Bearer x", "true /v1/completions Bearer x"},
		{"astray", "", "", "true //elsewhere.test/v1/completions "},
	} {
		seen.Store("")
		r.enqueue(tt.queue, "a", prompt, func(s *dispatch.Submission) {
			s.Endpoint = tt.endpoint
			if tt.authorization != "" {
				s.Headers = map[string]string{"authorization": tt.authorization}
			}
		})
		got := r.results("result-list", 1)[0]
		if got := seen.Load(); got != tt.want {
			t.Errorf("%s%s: asked for %q, want %q", tt.queue, tt.endpoint, got, tt.want)
		}
		if (got.ErrorCode == "INVALID_REQUEST") != (tt.want == "") {
			t.Errorf("%s%s: result %+v", tt.queue, tt.endpoint, got)
		}
	}
}

// TestHeaders has headers that messages may set, and others.
func TestHeaders(t *testing.T) {
	r := startRedis(t)
	g := newGateway(t, nil)
	q := simple(g)
	q["inference_objective"] = "batch"
	begin(t, r, setup{}, q)
	r.enqueue("q", "a", prompt, func(s *dispatch.Submission) {
		s.Headers = map[string]string{
			"x-gateway-inference-objective": "mine", "CONTENT-type": "application/json; charset=utf-8", "user-agent": "me", "accept-encoding": "br",
			"content-length": "3", "transfer-encoding": "chunked", "connection": "close", "host": "elsewhere", "x-request-id": "own",
			"x-spillway-lane": "interactive", "x-LLM-d-inference-fairness-id": "somebody else",
		}
		s.Metadata = map[string]string{"userid": "u-42", "traceparent": "00-1-2-01", "baggage": "bad\nvalue"}
	})
	got := r.results("result-list", 1)[0]
	if got.StatusCode != 200 {
		t.Fatalf("result %+v", got)
	}
	for name, want := range map[string]string{
		"X-Gateway-Inference-Objective": "mine", "X-Llm-D-Inference-Objective": "batch", "Content-Type": "application/json; charset=utf-8", "User-Agent": "me",
		"Accept-Encoding": "identity", "Content-Length": fmt.Sprint(len(prompt)), "Connection": "", "X-Request-Id": "own", "Idempotency-Key": "a:" + got.Token, "X-Spillway-Lane": "batch",
		"X-Llm-D-Inference-Fairness-Id": "u-42", "Traceparent": "00-1-2-01", "Baggage": "",
	} {
		if all := g.heads[0].Values(name); strings.Join(all, "|") != want {
			t.Errorf("%s: %q, want %q", name, all, want)
		}
	}
	r.enqueue("q", "b", prompt, func(s *dispatch.Submission) {
		s.Headers = map[string]string{"x-a": "b\r\nX-Spillway-Lane: interactive"}
	})
	if got := r.results("result-list", 1)[0]; got.ErrorCode != "INVALID_REQUEST" {
		t.Errorf("result %+v of a header with a line end", got)
	}
}

// TestTLS has a gateway that asks for a certificate, and one whose certificate nobody has signed.
func TestTLS(t *testing.T) {
	dir := t.TempDir()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "dispatcher"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	file := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		writeFile(t, path, string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})))
		return path
	}
	var peer atomic.Value
	g := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := ""
		if len(r.TLS.PeerCertificates) > 0 {
			name = r.TLS.PeerCertificates[0].Subject.CommonName
		}
		peer.Store(r.Proto + " " + name)
		body, _ := io.ReadAll(r.Body)
		_, _ = w.Write(body)
	}))
	clients := x509.NewCertPool()
	clients.AddCert(cert)
	g.TLS = &tls.Config{ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: clients}
	g.Config.ErrorLog = log.New(io.Discard, "", 0)
	g.StartTLS()
	t.Cleanup(g.Close)
	ca, ours, ourKey := file("ca", "CERTIFICATE", g.Certificate().Raw), file("cert", "CERTIFICATE", der), file("key", "PRIVATE KEY", secret)
	large := `{"a":"` + strings.Repeat("x", 200000) + `"}`
	for _, tt := range []struct {
		name string
		cfg  func(*dispatch.Config)
		want string // "" for a gateway that is not trusted
	}{
		{"authority", func(c *dispatch.Config) { c.TLSCA = ca }, "HTTP/1.1 "},
		{"client certificate", func(c *dispatch.Config) { c.TLSCA, c.TLSCert, c.TLSKey = ca, ours, ourKey }, "HTTP/1.1 dispatcher"},
		{"any", func(c *dispatch.Config) { c.TLSInsecure = true }, "HTTP/1.1 "},
		{"not trusted", func(*dispatch.Config) {}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := startRedis(t)
			peer.Store("")
			d := begin(t, r, setup{cfg: tt.cfg}, queueDoc{"queue_name": "q", "igw_base_url": g.URL})
			for i := range 5 {
				r.enqueue("q", fmt.Sprint(i), large)
			}
			if tt.want == "" {
				eventually(t, "the gateway counts as one that cannot be reached", func() bool { return d.metric("overload_trips_total", "unreachable") > 0 })
			} else {
				for _, got := range r.results("result-list", 5) {
					if got.StatusCode != 200 || *got.Payload != large {
						t.Errorf("status %d, %d bytes", got.StatusCode, len(*got.Payload))
					}
				}
			}
			if got := peer.Load(); got != tt.want {
				t.Errorf("the gateway saw %q, want %q", got, tt.want)
			}
		})
	}
}

// TestProxy has a dispatcher in whose environment there is a proxy for one of its gateways.
func TestProxy(t *testing.T) {
	r := startRedis(t)
	proxy := newGateway(t, func(w http.ResponseWriter, req *http.Request, body string) {
		if req.URL.Path == "/under/slow" {
			<-req.Context().Done()
			return
		}
		_, _ = fmt.Fprintf(w, "%s %s", req.RequestURI, req.Header.Get("X-Spillway-Lane"))
	})
	g := newGateway(t, nil)
	cfg := config(t, r, setup{cfg: func(c *dispatch.Config) { quick(c); c.RequestTimeout, c.MaxAttempts = time.Second, 1 }},
		simple(g), queueDoc{"queue_name": "far", "igw_base_url": "http://gateway.test/under"})
	c := startChild(t, order{Config: cfg}, "HTTP_PROXY="+proxy.URL, "http_proxy="+proxy.URL, "NO_PROXY=", "no_proxy=")
	r.enqueue("q", "near", prompt)
	if got := r.results("result-list", 1)[0]; got.StatusCode != 200 || len(g.sent()) != 1 {
		t.Errorf("result %+v: a gateway on this machine has no proxy", got)
	}
	r.enqueue("far", "far", prompt)
	if got := r.results("result-list", 1)[0]; *got.Payload != "http://gateway.test/under/v1/completions batch" {
		t.Errorf("result %+v, want one by the proxy", got)
	}
	r.enqueue("far", "slow", prompt, func(s *dispatch.Submission) { s.Endpoint = "/slow" })
	if got := r.results("result-list", 1)[0]; got.ErrorCode != "ATTEMPTS_EXHAUSTED" {
		t.Errorf("result %+v, want an attempt that took too long to be counted", got)
	}
	c.end(t)
}
