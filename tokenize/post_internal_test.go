package tokenize

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// asking is a Tokenizer that asks a real server; without a deadline where its ask is called, so that tests
// count on no speed.
func asking(cfg Config, w Worker) *Tokenizer {
	return New(cfg, func(_ *Prompt, ask func(Worker) bool) { ask(w) }, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
}

func mustRead(t *testing.T, chat bool, text string) (Prompt, reading) {
	t.Helper()
	p := Prompt{Model: "base", Tenant: "default", Served: "served", Chat: chat}
	if chat {
		p.Body = []byte(fmt.Sprintf(`{"model":"alias","messages":[{"role":"user","content":%q}]}`, text))
	} else {
		p.Body = []byte(fmt.Sprintf(`{"model":"alias","prompt":%q}`, text))
	}
	r, ok := read(p.Body, chat)
	if !ok {
		t.Fatalf("read(%s) failed", p.Body)
	}
	return p, r
}

// TestCalls: what is sent, and by which name.
func TestCalls(t *testing.T) {
	for _, tt := range []struct {
		name      string
		url, key  string
		source    string
		chat      bool
		want, at  string
		wantedKey string
	}{
		{"tokenize", "", "secret", "tokenize", true, `{"model":"served","messages":[{"role":"user","content":"x"}]}`, "/base/tokenize", "Bearer secret"},
		{"render", "", "", "render", true, `{"model":"served","messages":[{"role":"user","content":"x"}]}`, "/base/v1/chat/completions/render", ""},
		{"a server beside", "/t/", "secret", "render", false, `{"model":"base","prompt":"x"}`, "/t/v1/completions/render", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			type call struct{ at, body, key, kind string }
			calls := make(chan call, 10)
			srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				calls <- call{r.Method + " " + r.URL.Path, string(body), r.Header.Get("Authorization"), r.Header.Get("Content-Type")}
			}))
			defer srv.Close()
			cfg := DefaultConfig()
			if cfg.Source = tt.source; tt.url != "" {
				cfg.URL = srv.URL + tt.url
			}
			x := asking(cfg, Worker{ID: 1, Endpoint: srv.URL + "/base", APIKey: tt.key})
			defer x.Close()
			p, r := mustRead(t, tt.chat, "x")
			x.ask(t.Context(), &p, &r)
			if got, want := <-calls, (call{"POST " + tt.at, tt.want, tt.wantedKey, "application/json"}); got != want || len(calls) > 0 {
				t.Errorf("asked %q, and %d times more, want %q", got, len(calls), want)
			}
		})
	}
}

// TestOverSockets asks a real server: its connections are used again, and a redirect is not followed.
func TestOverSockets(t *testing.T) {
	var conns, elsewhere atomic.Int32
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) }))
	defer other.Close()
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			Prompt string `json:"prompt"`
		}
		if json.NewDecoder(r.Body).Decode(&body) != nil || r.URL.Path != "/tokenize" {
			http.Error(w, strings.Repeat("not found ", 1000), http.StatusNotFound)
			return
		}
		if body.Prompt == "away" {
			http.Redirect(w, r, other.URL, http.StatusTemporaryRedirect)
			return
		}
		ids := make([]uint32, len(body.Prompt))
		_ = json.NewEncoder(w).Encode(map[string]any{"count": len(ids), "tokens": ids})
	}))
	srv.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			conns.Add(1)
		}
	}
	srv.Start()
	defer srv.Close()
	x := asking(DefaultConfig(), Worker{ID: 1, Endpoint: srv.URL})
	defer x.Close()
	began := time.Now()
	for n := 1; n < 20; n++ {
		p, r := mustRead(t, false, strings.Repeat("x", n*100))
		if got, _ := x.ask(t.Context(), &p, &r); got.Count != uint64(n*100) || len(got.IDs) != n*100 {
			t.Errorf("prompt %d: %d tokens, %d IDs, want %d", n, got.Count, len(got.IDs), n*100)
		}
	}
	p, r := mustRead(t, false, "away")
	if got, _ := x.ask(t.Context(), &p, &r); got.Count != 0 || elsewhere.Load() != 0 {
		t.Errorf("a redirect was followed: %+v", got)
	}
	if n := conns.Load(); n != 1 && time.Since(began) < 3*time.Second { // later it may have been idle for too long
		t.Errorf("%d connections for calls one after another, want 1", n)
	}
}

// TestAnswerLengths: however an answer's end is told, and however long it is, all of it is read up to the
// limit.
func TestAnswerLengths(t *testing.T) {
	l := letters.Get().(*letter)
	defer l.release()
	l.body = append(l.body[:0], `{"prompt":"x"}`...)
	limit := l.limit()
	for _, framing := range []string{"length", "chunks", "close"} {
		for _, n := range []int{0, 1, 3000, 16 << 10, 100_000, 600_000, limit, limit + 1, 2 * limit} {
			t.Run(fmt.Sprintf("%s/%d", framing, n), func(t *testing.T) {
				var text strings.Builder
				for i := 0; text.Len() < n; i++ {
					fmt.Fprint(&text, i, ",")
				}
				answer := text.String()[:n]
				srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					_, _ = io.Copy(io.Discard, r.Body)
					switch framing {
					case "length":
						w.Header().Set("Content-Length", fmt.Sprint(n))
					case "close":
						conn, _, err := http.NewResponseController(w).Hijack()
						if err != nil {
							panic(err)
						}
						_, _ = io.WriteString(conn, "HTTP/1.0 200 OK\r\n\r\n"+answer)
						_ = conn.Close()
						return
					}
					for part := answer; part != ""; part = part[min(len(part), 50_000):] {
						_, _ = io.WriteString(w, part[:min(len(part), 50_000)])
						_ = http.NewResponseController(w).Flush()
					}
				}))
				defer srv.Close()
				var s server
				defer s.disconnect()
				status, err := s.post(t.Context(), &Worker{Endpoint: srv.URL}, "/tokenize", l)
				if want := answer[:min(n, limit+1)]; status != 200 || err != nil || string(l.answer) != want {
					t.Errorf("post = %d, %v, with %d bytes, want %d", status, err, len(l.answer), len(want))
				}
			})
		}
	}
}

// TestMoved: a worker that has another endpoint is asked there, and the connections to the old one end; the
// others do with Close.
func TestMoved(t *testing.T) {
	ended := make(chan string, 10)
	serve := func(name string) *httptest.Server {
		srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"count":3,"tokens":[1,2,3]}`)
		}))
		srv.Config.ConnState = func(_ net.Conn, state http.ConnState) {
			if state == http.StateClosed {
				ended <- name
			}
		}
		srv.Start()
		return srv
	}
	old, other := serve("old"), serve("other")
	defer old.Close()
	defer other.Close()
	w := Worker{ID: 1}
	x := New(Config{Source: "tokenize", MaxBytes: 1 << 20}, func(_ *Prompt, ask func(Worker) bool) { ask(w) }, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	end := func(want string) {
		t.Helper()
		select {
		case got := <-ended:
			if got != want {
				t.Errorf("a connection to the %s server has ended, want one to the %s one", got, want)
			}
		case <-time.After(time.Minute):
			t.Fatalf("no connection has ended, want one to the %s server", want)
		}
	}
	p, r := mustRead(t, true, "x")
	var links []*link
	for _, srv := range []*httptest.Server{old, other} {
		w.Endpoint = srv.URL
		if got, _ := x.ask(t.Context(), &p, &r); got.Count != 3 {
			t.Fatalf("ask = %+v, want 3 tokens", got)
		}
		links = append(links, x.servers.of(1, time.Now()).link.Load())
	}
	if was, is := links[0].client.Idle(), links[1].client.Idle(); was != 0 || is != 1 {
		t.Errorf("%d connections to the old server are kept, %d to the other one, want 0, 1", was, is)
	}
	end("old")
	x.Close()
	end("other")
}
