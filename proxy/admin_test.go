package proxy_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"spillway/busy"
	"spillway/proxy"
	"spillway/router"
	"spillway/worker"
)

// TestBothAddressesDrain checks that operators can look on, and workers be changed, until the last
// request has ended, and that then both addresses are closed.
func TestBothAddressesDrain(t *testing.T) {
	s := newScript(t, func(c *conn, r received) {
		if strings.HasSuffix(r.path, "count_tokens") {
			c.say(answer(200, jsonHeader, `{"input_tokens":12}`))
			return
		}
		c.say(streamHead + chunk(hello))
		if _, err := c.br.Peek(1); err == nil { // a byte that no client sends
			return
		}
		c.end = true
	})
	f := begin(t, setup{proxy: func(c *proxy.Config) { apart(c); withMessages(c); c.DrainTimeout = time.Hour }}, served("w", s))
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(streamBody))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := f.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	f.stop()
	eventually(t, "/health says no", func() bool { return f.send("GET", "/health", "").status == 503 })
	f.chat(chatBody).is(t, "chat", 503, draining)
	f.send("POST", "/v1/messages", messageBody).is(t, "messages", 503, inEnvelope("overloaded_error", "Service is not ready"))
	f.send("POST", "/v1/messages/count_tokens", messageBody).is(t, "counting is no inference", 200, `{"input_tokens":12}`)
	if g := f.operator("GET", "/metrics", ""); g.status != 200 {
		t.Errorf("GET /metrics at the admin address while draining = %d, want 200", g.status)
	}
	if g := f.operator("POST", "/workers", `{"worker_id":5}`); g.status != 201 {
		t.Errorf("POST /workers while draining = %d %s, want 201", g.status, g.body)
	}
	leave() // the last request ends
	_, _ = io.Copy(io.Discard, resp.Body)
	f.over()
	for _, addr := range []string{f.addr, strings.TrimPrefix(f.adminURL, "http://")} {
		if nc, err := net.DialTimeout("tcp", addr, patience); err == nil {
			_ = nc.Close()
			t.Errorf("%s still listens", addr)
		}
	}
}

// TestRunEndsWithAListener checks that a listener that fails ends all of Run, with what is in
// flight cut and nothing left.
func TestRunEndsWithAListener(t *testing.T) {
	for _, broken := range []string{"clients", "admin"} {
		t.Run(broken, func(t *testing.T) {
			defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
			catalog, err := worker.NewCatalog(nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			cfg := proxy.DefaultConfig()
			apart(&cfg)
			routes := router.New(router.DefaultConfig(), busy.DefaultConfig(), catalog, rand.New(rand.NewPCG(1, 2)))
			server, err := proxy.New(cfg, routes, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			doors := map[string]net.Listener{}
			for _, name := range []string{"clients", "admin"} {
				if doors[name], err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
					t.Fatal(err)
				}
			}
			ended := make(chan error, 1)
			go func() { ended <- server.Run(t.Context(), doors["clients"], doors["admin"]) }()
			_ = doors[broken].Close()
			select {
			case err := <-ended:
				if err == nil || !strings.Contains(err.Error(), "serve") {
					t.Errorf("Run = %v, want that serving failed", err)
				}
			case <-time.After(patience):
				t.Fatal("Run goes on with half of its addresses")
			}
			for name, ln := range doors {
				if nc, err := net.DialTimeout("tcp", ln.Addr().String(), patience); err == nil {
					_ = nc.Close()
					t.Errorf("%s still listens", name)
				}
			}
		})
	}
}

// TestUnauthorizedIsLogged checks that a request without the key leaves its record, and no key.
func TestUnauthorizedIsLogged(t *testing.T) {
	log := &lines{}
	f := begin(t, setup{log: log.logger(), proxy: func(c *proxy.Config) { c.APIKey, c.AdminToken = "sesame", "open" }})
	f.chat(chatBody, "Authorization: Bearer guess", "X-Request-Id: r1").is(t, "chat", 401, flat(401, "unauthorized", refusedKey), "X-Request-Id: r1")
	eventually(t, "it is logged", func() bool { return strings.Contains(log.String(), "request_id=r1") })
	for _, want := range []string{"status=401", "error_type=validation"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("logged %s, want %s", log, want)
		}
	}
	for _, secret := range []string{"guess", "sesame", fmt.Sprintf("%q", "open")} {
		if strings.Contains(log.String(), secret) {
			t.Errorf("logged %s, with the secret %s", log, secret)
		}
	}
}
