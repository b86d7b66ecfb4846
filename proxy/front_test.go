package proxy_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"spillway/busy"
	"spillway/kvindex"
	"spillway/proxy"
	"spillway/router"
	"spillway/tracker"
	"spillway/worker"
)

// setup is what a test changes of the default front end.
type setup struct {
	proxy   func(*proxy.Config)
	busy    busy.Config // the zero value is the default
	router  router.Config
	models  []string // known without workers
	aliases map[string]string
	log     *slog.Logger
	host    string              // to listen on; "" is this machine alone
	before  func(*proxy.Server) // is called before workers join
	beside  bool                // other tests run at the same time: who left a goroutine is found out by the caller
}

// modeVariable names the mode of the router where a test does not choose one. make test runs all of them
// in round-robin and in kv; in the latter requests are not plain either, so that net/http serves them.
const modeVariable = "SPILLWAY_TEST_ROUTER_MODE"

func usualMode() router.Mode {
	if mode := router.Mode(os.Getenv(modeVariable)); mode != "" {
		return mode
	}
	return router.RoundRobin
}

// front is a running front end and a client of it.
type front struct {
	t        testing.TB
	url      string
	addr     string
	adminURL string // "" without an admin address
	routes   *router.Router
	server   *proxy.Server
	client   *http.Client
	stop     context.CancelFunc // as SIGTERM does
	ended    chan error         // what Run returned
}

// served makes a worker record that serves model m under a name.
func served(name string, s *script, models ...string) worker.Worker {
	if len(models) == 0 {
		models = []string{"m"}
	}
	return worker.Worker{ID: worker.DefaultID(name), Name: name, Endpoint: s.url(), Models: models}
}

// fronts counts the front ends of the present test. The first to begin is the last to end and
// looks for what any of them has left.
var fronts atomic.Int32

// begin runs a front end over workers until the test ends. Then it must be gone without a
// trace: no load booked, nothing counted as waiting, no connection to a worker, no goroutine.
func begin(t testing.TB, with setup, workers ...worker.Worker) *front {
	t.Helper()
	before := goleak.IgnoreCurrent()
	cfg := proxy.DefaultConfig()
	if with.proxy != nil {
		with.proxy(&cfg)
	}
	if with.busy == (busy.Config{}) {
		with.busy = busy.DefaultConfig()
	}
	if with.router == (router.Config{}) {
		with.router = router.DefaultConfig()
		with.router.Mode = usualMode()
	}
	if with.log == nil {
		with.log = slog.New(slog.DiscardHandler)
	}
	catalog, err := worker.NewCatalog(with.models, with.aliases)
	if err != nil {
		t.Fatal(err)
	}
	f := &front{t: t, ended: make(chan error, 1)}
	f.routes = router.New(with.router, with.busy, catalog, rand.New(rand.NewPCG(1, 2)))
	if f.server, err = proxy.New(cfg, f.routes, prometheus.NewRegistry(), with.log); err != nil {
		t.Fatal(err)
	}
	f.server.IndexBy(kvindex.NewPartitions(kvindex.DefaultConfig()))
	if with.before != nil {
		with.before(f.server)
	}
	for _, w := range workers {
		f.register(w)
	}
	if with.host == "" {
		with.host = "127.0.0.1"
	}
	ln, err := net.Listen("tcp4", with.host+":0")
	if err != nil {
		t.Fatal(err)
	}
	f.addr = strings.Replace(ln.Addr().String(), "0.0.0.0", "127.0.0.1", 1)
	f.url = "http://" + f.addr
	f.client = &http.Client{Transport: &http.Transport{DisableCompression: true}, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}
	ctx, stop := context.WithCancel(context.Background())
	f.stop = stop
	var admin net.Listener
	if cfg.AdminAddr != "" {
		if admin, err = net.Listen("tcp", cfg.AdminAddr); err != nil {
			t.Fatal(err)
		}
		f.adminURL = "http://" + admin.Addr().String()
	}
	go func() { f.ended <- f.server.Run(ctx, ln, admin) }()
	if !with.beside {
		fronts.Add(1)
	}
	t.Cleanup(func() {
		f.client.CloseIdleConnections()
		stop()
		f.over()
		f.client.CloseIdleConnections()
		f.settled()
		if !with.beside && fronts.Add(-1) == 0 {
			goleak.VerifyNone(t, before) // a connection to a worker would keep its goroutine there
		}
	})
	return f
}

// over waits until Run has returned, which must be without an error.
func (f *front) over() {
	f.t.Helper()
	select {
	case err := <-f.ended:
		if err != nil {
			f.t.Errorf("Run: %v", err)
		}
		f.ended <- nil // for the next one who asks
	case <-time.After(patience):
		f.t.Fatal("Run has not returned")
	}
}

func (f *front) register(w worker.Worker) worker.ID {
	f.t.Helper()
	w, err := w.Normalize()
	if err != nil {
		f.t.Fatal(err)
	}
	if err := f.server.Join(&w); err != nil {
		f.t.Fatal(err)
	}
	return w.ID
}

// settled checks that nothing is booked and nothing waits.
func (f *front) settled() {
	f.t.Helper()
	for _, what := range f.unsettled() {
		f.t.Errorf("after all has ended: %s, want 0", what)
	}
}

// unsettled lists what is booked or waits.
func (f *front) unsettled() (left []string) {
	f.routes.Partitions("", func(p *router.Partition) {
		for rank, load := range p.Tracker.Loads(time.Now()) {
			if load != (tracker.Load{}) {
				left = append(left, fmt.Sprintf("load of worker %v, rank %d = %+v", rank.Worker, rank.DP, load))
			}
		}
	})
	for line := range strings.Lines(f.metrics()) {
		line = strings.TrimSpace(line)
		for _, name := range []string{
			"dynamo_queued_requests", "dynamo_frontend_active_requests", "dynamo_frontend_stage_requests",
			"spillway_slots_inflight", "spillway_slot_leaks_total", "spillway_body_memory_bytes",
		} {
			if strings.HasPrefix(line, name) && !strings.HasSuffix(line, " 0") {
				left = append(left, line)
			}
		}
	}
	return left
}

// metrics is the page of /metrics, taken without the listener.
func (f *front) metrics() string {
	rec := httptest.NewRecorder()
	h := f.server.AdminHandler()
	if h == nil {
		h = f.server.Handler()
	}
	h.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	return rec.Body.String()
}

// metric is the value of one series as it stands on the page, "" if it is not there.
func (f *front) metric(series string) string {
	for line := range strings.Lines(f.metrics()) {
		if v, ok := strings.CutPrefix(line, series+" "); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// inOrder has requests try the workers of these names one after the other, as those in round-robin go by
// their IDs: in mode kv each but the first holds more blocks than the one before, until free.
func (f *front) inOrder(names ...string) (free func()) {
	p := f.partition("m")
	for _, w := range f.routes.Catalog().Workers() {
		if i := slices.Index(names, w.Name); i > 0 && usualMode() == router.KV {
			if err := p.Reserve(tracker.Reservation{ID: w.Name, Rank: worker.Rank{Worker: w.ID}, DecodeBlocks: uint64(50 * i)}, now()); err != nil {
				f.t.Fatal(err)
			}
		}
	}
	free = func() {
		for _, name := range names {
			p.Free(name, now())
		}
	}
	f.t.Cleanup(free)
	return free
}

// partition is where requests for a model are decided.
func (f *front) partition(model string) *router.Partition {
	var found *router.Partition
	f.routes.Partitions(model, func(p *router.Partition) { found = p })
	return found
}

// list is the busy list of model m.
func (f *front) list() *busy.List { return f.partition("m").Busy }

// states are the workers of model m by name.
func (f *front) states() string {
	var all []string
	for _, st := range f.list().Workers(time.Now()) {
		all = append(all, fmt.Sprintf("%s:%s", st.Name, st.State))
	}
	return strings.Join(all, " ")
}

// got is one answer to a client.
type got struct {
	status int
	header http.Header
	body   string
	err    error // of reading the body
}

// send does one request with the given headers, as "Name: value".
func (f *front) send(method, path, body string, headers ...string) got {
	f.t.Helper()
	req, err := http.NewRequestWithContext(f.t.Context(), method, f.url+path, strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		if value == "" {
			req.Header.Del(name)
			continue
		}
		req.Header.Set(name, value)
	}
	return f.do(req)
}

func (f *front) do(req *http.Request) got {
	f.t.Helper()
	if usualMode() == router.KV && req.URL.Scheme == "http" {
		req.Header.Set("Upgrade", "none")
	}
	resp, err := f.client.Do(req)
	if err != nil {
		f.t.Fatalf("%s %s: %v", req.Method, req.URL, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if resp.Close { // net/http has taken the header out
		resp.Header.Set("Connection", "close")
	}
	return got{resp.StatusCode, resp.Header, string(b), err}
}

func (f *front) chat(body string, headers ...string) got {
	f.t.Helper()
	return f.send(http.MethodPost, "/v1/chat/completions", body, headers...)
}

// is compares an answer with what it should be, headers as "Name: value" or "Name: " for none.
func (g got) is(t testing.TB, what string, status int, body string, headers ...string) {
	t.Helper()
	if g.status != status || g.body != body || g.err != nil {
		t.Errorf("%s = %d %q, %v\nwant %d %q", what, g.status, g.body, g.err, status, body)
	}
	for _, h := range headers {
		name, want, _ := strings.Cut(h, ": ")
		if v := strings.Join(g.header.Values(name), "|"); v != want {
			t.Errorf("%s: header %s = %q, want %q", what, name, v, want)
		}
	}
}

// flat is an error body.
func flat(status int, kind, message string) string {
	return fmt.Sprintf(`{"message":%q,"type":%q,"code":%d}`, message, kind, status)
}

const busyBody = `{"message":"Service temporarily unavailable: All workers are busy, please retry later","type":"service_unavailable","code":503}`

// lines collects what is logged.
type lines struct {
	mu  sync.Mutex
	buf strings.Builder
}

// Write implements io.Writer.
func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func (l *lines) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// raw is a client connection without a client.
type raw struct {
	net.Conn
	br *bufio.Reader
}

func (f *front) dial() *raw {
	f.t.Helper()
	nc, err := net.Dial("tcp", f.addr)
	if err != nil {
		f.t.Fatal(err)
	}
	_ = nc.SetDeadline(time.Now().Add(patience))
	f.t.Cleanup(func() { _ = nc.Close() })
	return &raw{nc, bufio.NewReader(nc)}
}

// post sends a request for a chat by hand.
func (c *raw) post(body string) {
	more := ""
	if usualMode() == router.KV {
		more = "Upgrade: none\r\n"
	}
	_, _ = fmt.Fprintf(c, "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", more, len(body), body)
}

// head reads the status line and the headers.
func (c *raw) head() (status string, header string) {
	status, _ = c.br.ReadString('\n')
	var all strings.Builder
	for {
		line, err := c.br.ReadString('\n')
		if err != nil || line == "\r\n" {
			return strings.TrimSpace(status), all.String()
		}
		all.WriteString(line)
	}
}

// chunk reads one chunk of a chunked body: what the front end flushed at once. The last one is
// empty; an error is a connection that broke.
func (c *raw) chunk() (string, error) {
	var size int
	if _, err := fmt.Fscanf(c.br, "%x\r\n", &size); err != nil {
		return "", fmt.Errorf("chunk size: %w", err)
	}
	data := make([]byte, size+2)
	_, err := io.ReadFull(c.br, data)
	return string(data[:size]), err
}

// eventually waits until ok, which is asked again and again.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

func now() time.Time { return time.Now() }
