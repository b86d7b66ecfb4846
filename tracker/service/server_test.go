package service_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"spillway/httperr"
	"spillway/tracker"
	"spillway/tracker/service"
	"spillway/worker"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		http.DefaultClient.CloseIdleConnections()
		os.Exit(code)
	}))
}

func config() service.Config {
	cfg := service.DefaultConfig()
	cfg.Host, cfg.Port = "127.0.0.1", 0
	return cfg
}

// running is a server on a free port.
type running struct {
	t      testing.TB
	server *service.Server
	url    string
	stop   func() error // ends it and waits; once
}

func start(t testing.TB, cfg service.Config) *running {
	t.Helper()
	s, err := service.New(cfg, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx, ln) }()
	stop := sync.OnceValue(func() error {
		http.DefaultClient.CloseIdleConnections()
		cancel()
		return <-ended
	})
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Errorf("Run = %v", err)
		}
	})
	return &running{t, s, "http://" + ln.Addr().String(), stop}
}

// post expects a status and returns the body.
func (r *running) post(path, body string, want int) string {
	r.t.Helper()
	return r.do(http.MethodPost, path, body, "", want)
}

func (r *running) do(method, path, body, token string, want int) string {
	r.t.Helper()
	req, err := http.NewRequest(method, r.url+path, strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if token != "" {
		req.Header.Set("Authorization", token)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != want {
		r.t.Fatalf("%s %s %s = %d %s, %v, want %d", method, path, body, res.StatusCode, text, err, want)
	}
	return string(text)
}

const (
	oneWorker = `{"worker_id":1,"model_name":"m","block_size":16,"dp_start":0,"dp_size":1}`
	oneAdd    = `{"model_name":"m","request_id":"%s","worker_id":1,"dp_rank":0,"sequence_hashes":[%s],"new_isl_tokens":8}`
)

// TestState stops a server and starts another with its file: workers and requests are as before.
func TestState(t *testing.T) {
	cfg := config()
	cfg.StateFile = filepath.Join(t.TempDir(), "slots.json")
	first := start(t, cfg)
	first.post("/register", oneWorker, 201)
	first.post("/register", strings.Replace(oneWorker, `"m"`, `"other \"model\"","tenant_id":"t"`, 1), 201)
	first.post("/add", fmt.Sprintf(oneAdd, "a", "1,2,-3"), 201)
	first.post("/add", fmt.Sprintf(oneAdd, "b", "1,2,4"), 201)
	first.post("/prefill_complete", `{"model_name":"m","request_id":"a"}`, 200)
	first.post("/output_block", `{"model_name":"m","request_id":"b","decay_fraction":0.5}`, 200)
	workers, loads := first.do("GET", "/workers", "", "", 200), first.do("GET", "/loads", "", "", 200)
	if want := `"active_prefill_tokens":8,"active_decode_blocks":4}`; !strings.Contains(loads, want) {
		t.Fatalf("loads = %s, want %s", loads, want)
	}
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	second := start(t, cfg)
	if got := second.do("GET", "/workers", "", "", 200); got != workers {
		t.Errorf("workers = %s, want %s", got, workers)
	}
	if got := second.do("GET", "/loads", "", "", 200); got != loads {
		t.Errorf("loads = %s, want %s", got, loads)
	}
	second.post("/add", fmt.Sprintf(oneAdd, "a", ""), 409)
	second.post("/free", `{"model_name":"m","request_id":"a"}`, 200)
	second.post("/free", `{"model_name":"m","request_id":"b"}`, 200)
	if got := second.do("GET", "/loads?model_name=m", "", "", 200); !strings.Contains(got, `tokens":0,"active_decode_blocks":0}`) {
		t.Errorf("loads after all is freed = %s, want none", got)
	}
	if err := second.stop(); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(cfg.StateFile + ".*"); len(left) > 0 {
		t.Errorf("left beside the state file: %v", left)
	}
	if err := os.WriteFile(cfg.StateFile, []byte(`{"version":9}`), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := service.New(cfg, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Run(t.Context(), ln); err == nil || !strings.Contains(err.Error(), "version 9") {
		t.Errorf("Run with a file of another version = %v, want an error that names it", err)
	}
}

// TestStateAges: requests have aged while no process ran, expire when they would have, and are
// counted when their workers have gone too.
func TestStateAges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config()
		cfg.ExpireAfterSecs, cfg.StateInterval = 100, 0
		cfg.StateFile = filepath.Join(t.TempDir(), "slots.json")
		request := func(id string, dp, age int, more string) string {
			return fmt.Sprintf(`{"request_id":%q,"worker_id":1,"dp_rank":%d,"sequence_hashes":[%d],"age_nanoseconds":%d%s}`, id, dp, age, time.Duration(age)*time.Second, more)
		}
		text := fmt.Sprintf(`{"version":1,"written_at":%q,"partitions":[{"model_name":"m","tenant_id":"default","block_size":16,
			"workers":[{"worker_id":1,"dp_start":0,"dp_size":2}],"requests":[%s,%s,%s,%s]}]}`,
			time.Now().Add(-20*time.Second).Format(time.RFC3339Nano),
			request("gone", 0, 81, ""), request("soon", 0, 30, ""), request("later", 0, 10, ""),
			request("timed", 1, 0, `,"prefill_tokens":1000,"prefill_nanoseconds":2000000000`))
		if err := os.WriteFile(cfg.StateFile, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := service.New(cfg, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.Run(ctx, make(quiet)) }()
		defer func() {
			cancel()
			if err := <-ended; err != nil {
				t.Errorf("Run = %v", err)
			}
		}()
		began := time.Now()
		shows := func(seconds int, method, path, body, want string) {
			t.Helper()
			time.Sleep(time.Duration(seconds)*time.Second - time.Since(began))
			synctest.Wait()
			req := httptest.NewRequest(method, path, strings.NewReader(body))
			req.Header.Set("Content-Type", "application/json")
			w := httptest.NewRecorder()
			if s.ServeHTTP(w, req); !strings.Contains(w.Body.String(), want) {
				t.Errorf("%d s: %s %s = %d %s, want %s", seconds, method, path, w.Code, w.Body, want)
			}
		}
		loads := func(seconds, blocks, tokens, timed int) {
			t.Helper()
			shows(seconds, "GET", "/loads", "", fmt.Sprintf(`"dp_rank":0,"active_prefill_tokens":0,"active_decode_blocks":%d}`, blocks))
			shows(seconds, "GET", "/loads", "", fmt.Sprintf(`"dp_rank":1,"active_prefill_tokens":%d,"active_decode_blocks":%d}`, tokens, timed))
		}
		loads(0, 2, 1000, 1) // the first was too old
		loads(1, 2, 500, 1)
		loads(59, 2, 0, 1)
		loads(61, 1, 0, 1) // 20 s before, 30 s, and a minute since
		loads(121, 0, 0, 0)
		shows(121, "POST", "/unregister", `{"model_name":"m","worker_id":1}`, "ok")
		shows(121, "GET", "/metrics", "", "\nspillway_tracker_expired_requests_total 3\n")
	})
}

// TestStateFileCannotBeWritten: a process that would forget all at its end does not begin.
func TestStateFileCannotBeWritten(t *testing.T) {
	cfg := config()
	cfg.StateFile = filepath.Join(t.TempDir(), "nowhere", "slots.json")
	s, err := service.New(cfg, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := s.Run(ctx, ln); !errors.Is(err, fs.ErrNotExist) || ctx.Err() != nil {
		t.Errorf("Run = %v, and %v; want an error at once", err, ctx.Err())
	}
}

func TestAPIKey(t *testing.T) {
	cfg := config()
	cfg.APIKey = "k1"
	s := start(t, cfg)
	for _, tt := range []struct {
		path, token string
		want        int
	}{
		{"/health", "", 200}, {"/ready", "", 200}, {"/metrics", "", 200}, {"/loads", "", 401}, {"/workers", "Bearer k2", 401},
		{"/peers", "Basic k1", 401}, {"/loads", "Bearer k1", 200}, {"/loads", "bearer  k1", 200}, {"/nothing", "", 404},
	} {
		s.do("GET", tt.path, "", tt.token, tt.want)
	}
	s.do("POST", "/register", "{", "", 401)
	s.do("POST", "/register", "{", "Bearer k1", 400)
}

// quiet is a listener to which nobody connects.
type quiet chan struct{}

func (q quiet) Accept() (net.Conn, error) { <-q; return nil, net.ErrClosed }
func (q quiet) Close() error              { close(q); return nil }
func (q quiet) Addr() net.Addr            { return &net.TCPAddr{} }

// TestExpiry is the timeline of the specification, by the server's own ticks.
func TestExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config()
		cfg.ExpireAfterSecs = 10
		s, err := service.New(cfg, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- s.Run(ctx, make(quiet)) }()
		began := time.Now()
		at := func(seconds float64, path, body string, want int) {
			t.Helper()
			time.Sleep(time.Duration(seconds*float64(time.Second)) - time.Since(began))
			synctest.Wait()
			req := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
			req.Header.Set("Content-Type", "application/json")
			w := httptest.NewRecorder()
			if s.ServeHTTP(w, req); w.Code != want {
				t.Fatalf("%v s: %s %s = %d %s, want %d", seconds, path, body, w.Code, w.Body, want)
			}
		}
		loads := func(seconds float64, first, second int) {
			t.Helper()
			time.Sleep(time.Duration(seconds*float64(time.Second)) - time.Since(began))
			synctest.Wait()
			w := httptest.NewRecorder()
			s.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/loads", nil))
			want := fmt.Sprintf(`"worker_id":1,"dp_rank":0,"active_prefill_tokens":%d,"active_decode_blocks":%d}`, 0, first) + "|" +
				fmt.Sprintf(`"worker_id":2,"dp_rank":0,"active_prefill_tokens":%d,"active_decode_blocks":%d}`, 0, second)
			for _, part := range strings.Split(want, "|") {
				if !strings.Contains(w.Body.String(), part) {
					t.Fatalf("%v s: loads = %s, want %d and %d blocks", seconds, w.Body, first, second)
				}
			}
		}
		add := func(id string, worker int, hashes string) string {
			return fmt.Sprintf(`{"model_name":"m","request_id":%q,"worker_id":%d,"dp_rank":0,"sequence_hashes":[%s]}`, id, worker, hashes)
		}
		at(0, "/register", oneWorker, 201)
		at(0, "/register", strings.Replace(oneWorker, ":1,", ":2,", 1), 201)
		at(1, "/add", add("r1", 1, "1,2"), 201)
		at(1, "/add", add("q1", 2, "1,2"), 201)
		at(20, "/add", add("r2", 1, "1,3"), 201)
		loads(20, 3, 2)
		at(32, "/add", add("r1", 1, "5"), 409)
		loads(32, 3, 2)
		at(32, "/add", add("r3", 1, "9"), 201)
		loads(32, 1, 2)
		at(32, "/free", `{"model_name":"m","request_id":"r1"}`, 200)
		at(32, "/prefill_complete", `{"model_name":"m","request_id":"r2"}`, 404)
		at(32, "/add", add("r1", 1, "9,10"), 201)
		loads(58, 2, 2)
		loads(61.5, 2, 0)
		loads(119, 2, 0)
		loads(121.5, 0, 0)
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run = %v", err)
		}
	})
}

// TestLink: peers are told of changes and of completions and of nothing else, X18.
func TestLink(t *testing.T) {
	cfg := config()
	s, err := service.New(cfg, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	var told []string
	var published [][]uint64 // read when all is over
	s.Join(service.Link{
		Added: func(p worker.Partition, size uint32, r tracker.Reservation) {
			published = append(published, r.Hashes)
			told = append(told, fmt.Sprint("add ", p, size, r.ID, r.Rank, r.Hashes, r.PrefillTokens))
		},
		PrefillDone: func(p worker.Partition, size uint32, id string, r worker.Rank) {
			told = append(told, fmt.Sprint("done ", p, size, id, r))
		},
		Freed: func(p worker.Partition, size uint32, id string, r worker.Rank) {
			told = append(told, fmt.Sprint("free ", p, size, id, r))
		},
		RegisterPeer: func(_ context.Context, e string) (bool, error) {
			switch e {
			case "bad":
				return false, httperr.New(400, "no endpoint")
			case "broken":
				return false, errors.New("secret")
			}
			return e == "new", nil
		},
		DeregisterPeer: func(_ context.Context, e string) error {
			if e == "new" {
				return nil
			}
			return httperr.New(404, "no such peer")
		},
		Peers: func() []string { return []string{"a", `b"`} },
	})
	do := func(method, path, body string, status int, answer string) {
		t.Helper()
		req := httptest.NewRequest(method, path, strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		if s.ServeHTTP(w, req); w.Code != status || answer != "" && w.Body.String() != answer {
			t.Errorf("%s %s %s = %d %s, want %d %s", method, path, body, w.Code, w.Body, status, answer)
		}
	}
	named := func(id string) string { return `{"model_name":"m","request_id":"` + id + `"}` }
	do("POST", "/register", oneWorker, 201, "")
	do("POST", "/add", fmt.Sprintf(oneAdd, "l1", "101,-22"), 201, "")
	do("POST", "/add", fmt.Sprintf(oneAdd, "l2", ""), 201, "")
	do("POST", "/add", fmt.Sprintf(oneAdd, "l2", ""), 409, "")
	do("POST", "/prefill_complete", named("l1"), 200, "")
	do("POST", "/prefill_complete", named("l1"), 200, "")
	do("POST", "/prefill_complete", named("x"), 404, "")
	do("POST", "/free", named("x"), 200, "")
	do("POST", "/free", named("l1"), 200, "")
	do("POST", "/free", named("l1"), 200, "")
	do("POST", "/output_block", named("l2"), 200, "")
	do("POST", "/free", named("l2"), 200, "")
	do("POST", "/potential_loads", `{"model_name":"m","sequence_hashes":[7,8,9,10]}`, 200, "")
	want := []string{
		"add {m default}16l1{1 0} [101 18446744073709551594]8", "add {m default}16l2{1 0} []8",
		"done {m default}16l1{1 0}", "done {m default}16l1{1 0}", "free {m default}16l1{1 0}", "free {m default}16l2{1 0}",
	}
	if got := fmt.Sprint(published[0]); got != "[101 18446744073709551594]" {
		t.Errorf("hashes read later = %s, want those of the first request", got)
	}
	squeeze := strings.NewReplacer(" ", "")
	if squeeze.Replace(strings.Join(told, "\n")) != squeeze.Replace(strings.Join(want, "\n")) {
		t.Errorf("peers were told\n%s\nwant\n%s", strings.Join(told, "\n"), strings.Join(want, "\n"))
	}
	do("POST", "/register_peer", `{"url":"new"}`, 201, `{"status":"ok"}`)
	do("POST", "/register_peer", `{"url":"old"}`, 200, `{"status":"ok"}`)
	do("POST", "/register_peer", `{"url":"bad"}`, 400, `{"error":"no endpoint"}`)
	do("POST", "/register_peer", `{"url":"broken"}`, 500, `{"error":"Internal server error"}`)
	do("POST", "/deregister_peer", `{"url":"new"}`, 200, `{"status":"ok"}`)
	do("POST", "/deregister_peer", `{"url":"other"}`, 404, "")
	do("GET", "/peers", "", 200, `["a","b\""]`)
}
