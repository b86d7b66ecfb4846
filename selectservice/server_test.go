package selectservice_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"spillway/busy"
	"spillway/kvhash"
	"spillway/kvindex"
	"spillway/router"
	"spillway/selectservice"
	"spillway/tracker"
	"spillway/worker"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		client.CloseIdleConnections()
		os.Exit(code)
	}))
}

// client keeps as many connections as tests have requests at once.
var client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 128}}

// patience bounds each wait for what must happen.
const patience = time.Minute

// running is a server that serves.
type running struct {
	t      *testing.T
	url    string
	server *selectservice.Server
	index  *kvindex.Partitions
	stop   func() error // ends it
}

func config() selectservice.Config {
	cfg := selectservice.DefaultConfig()
	cfg.Host, cfg.Port = "127.0.0.1", 0
	return cfg
}

// start starts a server with KV events off.
func start(t *testing.T, cfg selectservice.Config) *running {
	t.Helper()
	return startWith(t, cfg, router.DefaultConfig(), selectservice.Link{})
}

func startWith(t *testing.T, cfg selectservice.Config, rc router.Config, link selectservice.Link) *running {
	t.Helper()
	rc.Mode = router.KV
	models, err := worker.NewCatalog(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	index := kvindex.NewPartitions(kvindex.DefaultConfig())
	setup := selectservice.Setup{
		Router: router.New(rc, busy.DefaultConfig(), models, rand.New(rand.NewPCG(1, 2))), Index: index,
		MaxPartitions: kvindex.DefaultMaxPartitions, Cost: rc.Cost, Events: link.Listen != nil,
		Dump: func(w io.Writer) error { _, err := w.Write([]byte("{}")); return err },
	}
	s := selectservice.New(cfg, setup, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	s.Join(link)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx, ln) }()
	stop := sync.OnceValue(func() error { cancel(); return <-ended })
	t.Cleanup(func() {
		client.CloseIdleConnections()
		if err := stop(); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return &running{t, "http://" + ln.Addr().String(), s, index, stop}
}

// call makes a request; body is sent as JSON unless it is "".
func (r *running) call(ctx context.Context, method, path, body string) (int, string, error) {
	req, err := http.NewRequestWithContext(ctx, method, r.url+path, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	return res.StatusCode, string(text), err
}

// do makes a request that must be answered with that status.
func (r *running) do(method, path, body string, status int) string {
	r.t.Helper()
	got, text, err := r.call(r.t.Context(), method, path, body)
	if err != nil || got != status {
		r.t.Fatalf("%s %s %.200s = %d %s, %v; want %d", method, path, body, got, text, err, status)
	}
	return text
}

// holds makes a GET and tells what of want its answer lacks.
func (r *running) lacks(path, want string) string {
	r.t.Helper()
	var have, w any
	if err := errors.Join(json.Unmarshal([]byte(r.do("GET", path, "", 200)), &have), json.Unmarshal([]byte(want), &w)); err != nil {
		r.t.Fatal(err)
	}
	return lacks(have, w)
}

// empty checks that nothing is booked.
func (r *running) empty() {
	r.t.Helper()
	text := r.do("GET", "/loads", "", 200)
	for _, n := range []string{`"potential_prefill_tokens":`, `"potential_decode_blocks":`, `"active_requests":`, `"pending_count":`} {
		if strings.Count(text, n) != strings.Count(text, n+"0") {
			r.t.Errorf("%s is not 0 everywhere: %s", n, text)
			return
		}
	}
}

// listeners stand in for those of KV events.
type listeners struct {
	mu     sync.Mutex
	at     map[worker.Rank]string
	refuse worker.Rank
	ended  int // calls of Unlisten for workers that had some
}

func (l *listeners) link() selectservice.Link {
	return selectservice.Link{
		Listen: func(_ *kvindex.Partition, r worker.Rank, endpoint, replay string) error {
			l.mu.Lock()
			defer l.mu.Unlock()
			if r == l.refuse {
				return errors.New("refused")
			}
			if _, ok := l.at[r]; ok {
				return fmt.Errorf("%v is listened to", r)
			}
			l.at[r] = endpoint + " " + replay
			return nil
		},
		Unlisten: func(id worker.ID) {
			l.mu.Lock()
			defer l.mu.Unlock()
			had := len(l.at)
			for r := range l.at {
				if r.Worker == id {
					delete(l.at, r)
				}
			}
			if len(l.at) < had {
				l.ended++
			}
		},
	}
}

// TestListeners checks what becomes of listeners and of known blocks when a worker is changed.
func TestListeners(t *testing.T) {
	l := &listeners{at: map[worker.Rank]string{}, refuse: worker.Rank{Worker: 9, DP: 1}}
	s := startWith(t, config(), router.DefaultConfig(), l.link())
	base := `{"worker_id":1,"endpoint":"http://w","block_size":4,"data_parallel_start_rank":2,"data_parallel_size":2,` +
		`"kv_events_endpoints":{"2":"tcp://a:1","3":"tcp://a:2"},"replay_endpoint":"tcp://a:11"`
	check := func(what string, want map[worker.Rank]string, ended, blocks int) {
		t.Helper()
		l.mu.Lock()
		defer l.mu.Unlock()
		if fmt.Sprint(l.at) != fmt.Sprint(want) || l.ended != ended {
			t.Errorf("%s: listeners %v, ended %d; want %v, %d", what, l.at, l.ended, want, ended)
		}
		if p := s.index.Partition(worker.Partition{Model: "default", Tenant: "default"}); p.Index.Entries() != blocks {
			t.Errorf("%s: %d blocks, want %d", what, p.Index.Entries(), blocks)
		}
	}
	store := func() {
		p := s.index.Partition(worker.Partition{Model: "default", Tenant: "default"})
		p.Index.Store(worker.Rank{Worker: 1, DP: 2}, 0, kvindex.Parent{}, []uint64{1, 2}, []uint64{3, 4})
	}
	both := map[worker.Rank]string{{Worker: 1, DP: 2}: "tcp://a:1 tcp://a:11", {Worker: 1, DP: 3}: "tcp://a:2 tcp://a:12"}
	s.do("POST", "/workers", base+`}`, 201)
	store()
	check("registered", both, 0, 2)
	s.do("POST", "/workers", base+`}`, 201)
	check("registered again", both, 0, 2)
	s.do("PATCH", "/workers/1", `{"endpoint":"http://v","taints":["x"],"max_num_batched_tokens":5}`, 200)
	check("another endpoint", both, 0, 2)
	s.do("PATCH", "/workers/1", `{"replay_endpoints":{"3":"tcp://b:1"}}`, 200)
	check("another replay", map[worker.Rank]string{{Worker: 1, DP: 2}: "tcp://a:1 tcp://a:11", {Worker: 1, DP: 3}: "tcp://a:2 tcp://b:1"}, 1, 0)
	store()
	s.do("PATCH", "/workers/1", `{"data_parallel_size":1}`, 200)
	check("other ranks", map[worker.Rank]string{{Worker: 1, DP: 2}: "tcp://a:1 tcp://a:11", {Worker: 1, DP: 3}: "tcp://a:2 tcp://b:1"}, 2, 0)
	store()
	s.do("PATCH", "/workers/1", `{"kv_events_endpoints":{"2":"a:1"}}`, 200)
	check("a bad endpoint", nil, 3, 0)
	if why := s.lacks("/workers", `[{"lifecycle":"incomplete","not_schedulable_reasons":["reconciliation failed: invalid kv_events endpoint for worker 1 dp_rank 2: invalid ZMQ endpoint \"a:1\": missing scheme"]}]`); why != "" {
		t.Error(why)
	}
	s.do("PATCH", "/workers/1", `{"kv_events_endpoints":{"7":"tcp://a:1"}}`, 200)
	if why := s.lacks("/workers", `[{"not_schedulable_reasons":["kv_events endpoint is required for dp_rank 2"]}]`); why != "" {
		t.Error(why)
	}
	s.do("PATCH", "/workers/1", `{"kv_events_endpoints":{},"kv_events_endpoint":"tcp://c:1"}`, 200)
	check("the one endpoint", map[worker.Rank]string{{Worker: 1, DP: 2}: "tcp://c:1 tcp://a:11"}, 3, 0)
	store()
	s.do("DELETE", "/workers/1", "", 200)
	check("deleted", nil, 4, 0)
	s.do("POST", "/workers", `{"worker_id":9,"endpoint":"http://w","block_size":4,"data_parallel_size":2,"kv_events_endpoints":{"0":"tcp://a:1","1":"tcp://a:2"}}`, 201)
	check("one refused", nil, 5, 0)
}

// TestReadyGate checks that requests wait for recovery, but for those that ask about the process.
func TestReadyGate(t *testing.T) {
	recovered := make(chan struct{})
	s := startWith(t, config(), router.DefaultConfig(), selectservice.Link{Recovered: recovered})
	s.do("GET", "/health", "", 200)
	if text := s.do("GET", "/ready", "", 503); text != `{"ready":false,"schedulable_workers":0,"workers":[]}` {
		t.Errorf("GET /ready = %s", text)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if status, text, err := s.call(ctx, "GET", "/workers", ""); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("GET /workers during recovery = %d %s, %v; want no answer", status, text, err)
	}
	got := make(chan string, 1)
	go func() {
		status, _, err := s.call(context.Background(), "POST", "/workers", `{"worker_id":1,"endpoint":"http://w","block_size":4}`)
		got <- fmt.Sprint(status, err)
	}()
	s.do("GET", "/ready", "", 503)
	close(recovered)
	if g := <-got; g != "201 <nil>" {
		t.Errorf("after recovery the registration is answered %s", g)
	}
	s.do("GET", "/ready", "", 200)
}

// TestAPIKey checks which routes ask for it.
func TestAPIKey(t *testing.T) {
	cfg := config()
	cfg.APIKey = "secret"
	s := start(t, cfg)
	for path, want := range map[string]int{"/health": 200, "/ready": 503, "/metrics": 200, "/openapi.json": 200, "/workers": 401, "/loads": 401, "/dump": 401, "/nope": 404} {
		s.do("GET", path, "", want)
	}
}

// TestBurst has 64 ask at once for 8 equal workers, and give back.
func TestBurst(t *testing.T) {
	s := start(t, config())
	for id := range 8 {
		s.do("POST", "/workers", fmt.Sprintf(`{"worker_id":%d,"endpoint":"http://w%d","block_size":4}`, id, id), 201)
	}
	for range 3 {
		var all sync.WaitGroup
		var mu sync.Mutex
		by := map[string]int{}
		for i := range 64 {
			all.Go(func() {
				_, text, err := s.call(context.Background(), "POST", "/select_and_reserve", fmt.Sprintf(`{"token_ids":[%d,2,3,4,5],"reservation_id":"r%d"}`, i, i))
				var sel struct {
					Worker uint64 `json:"worker_id"`
				}
				if err := errors.Join(err, json.Unmarshal([]byte(text), &sel)); err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				by[fmt.Sprint(sel.Worker)]++
			})
		}
		all.Wait()
		for id, n := range by {
			if n != 8 {
				t.Errorf("worker %s has %d, want 8: %v", id, n, by)
			}
		}
		for i := range 64 {
			all.Go(func() {
				for _, call := range slices.Repeat([]string{"DELETE"}, 1+i%2) {
					if status, text, err := s.call(context.Background(), call, fmt.Sprint("/reservations/r", i), ""); status != 200 || err != nil {
						t.Error(status, text, err)
					}
				}
			})
		}
		all.Wait()
		s.empty()
	}
}

// TestOneIDForAll checks that of many bookings under one ID, in two partitions, one is made.
func TestOneIDForAll(t *testing.T) {
	s := start(t, config())
	for id, model := range []string{"a", "b"} {
		s.do("POST", "/workers", fmt.Sprintf(`{"worker_id":%d,"model_name":%q,"endpoint":"http://w","block_size":4}`, id, model), 201)
	}
	for range 20 {
		var all sync.WaitGroup
		var mu sync.Mutex
		got := map[int]int{}
		for i := range 16 {
			all.Go(func() {
				path, body := "/select_and_reserve", `{"model_name":"%s","token_ids":[1,2,3,4],"reservation_id":"r"}`
				if i%4 == 3 {
					path, body = "/reservations", `{"model_name":"%s","worker_id":`+fmt.Sprint(i%2)+`,"token_ids":[1],"reservation_id":"r"}`
				}
				status, _, err := s.call(context.Background(), "POST", path, fmt.Sprintf(body, []string{"a", "b"}[i%2]))
				if err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				got[status]++
			})
		}
		all.Wait()
		if got[200]+got[201] != 1 || got[409] != 15 {
			t.Fatalf("statuses %v, want one of 200 or 201 and fifteen 409", got)
		}
		s.do("DELETE", "/reservations/r", "", 200)
		s.empty()
	}
}

// TestClientGone checks that a client that leaves while it is being answered leaves nothing behind.
func TestClientGone(t *testing.T) {
	s := start(t, config())
	s.do("POST", "/workers", `{"worker_id":1,"endpoint":"http://w","block_size":4}`, 201)
	left, leave := context.WithCancel(t.Context())
	leave()
	req := httptest.NewRequestWithContext(left, "POST", "/select_and_reserve", strings.NewReader(`{"token_ids":[1,2,3,4],"reservation_id":"r"}`))
	req.Header.Set("Content-Type", "application/json")
	answer := httptest.NewRecorder()
	if s.server.ServeHTTP(answer, req); answer.Code != 499 {
		t.Errorf("one that has left is answered %d %s, want 499", answer.Code, answer.Body)
	}
	s.empty()
	var all sync.WaitGroup
	for i := range 100 {
		all.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i)*50*time.Microsecond)
			defer cancel()
			if status, _, err := s.call(ctx, "POST", "/select_and_reserve", fmt.Sprintf(`{"token_ids":[1,2,3,4],"reservation_id":"r%d"}`, i)); err == nil && status == 200 {
				s.do("DELETE", fmt.Sprint("/reservations/r", i), "", 200)
			}
		})
	}
	all.Wait()
	// An answer that was handed over stands, whether or not it arrived.
	for i := range 100 {
		s.do("DELETE", fmt.Sprint("/reservations/r", i), "", 200)
	}
	s.empty()
}

// TestPublished checks what replicas hear of, in order.
func TestPublished(t *testing.T) {
	var mu sync.Mutex
	var events []string
	tell := func(kind string) func(worker.Partition, uint32, string, worker.Rank) {
		return func(p worker.Partition, blockSize uint32, id string, r worker.Rank) {
			mu.Lock()
			defer mu.Unlock()
			events = append(events, fmt.Sprint(kind, " ", p, " ", blockSize, " ", id, " ", r))
		}
	}
	s := startWith(t, config(), router.DefaultConfig(), selectservice.Link{
		Added: func(p worker.Partition, blockSize uint32, b selectservice.Booking) {
			mu.Lock()
			defer mu.Unlock()
			expected := "-"
			if b.ExpectedOutputTokens != nil {
				expected = fmt.Sprint(*b.ExpectedOutputTokens)
			}
			events = append(events, fmt.Sprintf("add %v %d %s %v %v %d %d %v %s %s", p, blockSize, b.ID, b.Rank, b.Hashes != nil, len(b.Hashes), b.PrefillTokens, b.TracksPrefill, expected, b.LoRA))
		},
		PrefillDone: tell("done"), Freed: tell("free"),
	})
	s.do("POST", "/workers", `{"worker_id":1,"endpoint":"http://w","block_size":4}`, 201)
	s.do("POST", "/select", `{"token_ids":[1,2,3,4,5]}`, 200)
	s.do("POST", "/select_and_reserve", `{"token_ids":[1,2,3,4,5],"reservation_id":"a","expected_output_tokens":7,"lora_name":"l"}`, 200)
	s.do("POST", "/select_and_reserve", `{"token_ids":[1,2,3,4,5],"reservation_id":"a"}`, 409)
	s.do("POST", "/reservations", `{"worker_id":1,"sequence_hashes":[],"isl_tokens":0,"reservation_id":"b"}`, 201)
	s.do("POST", "/reservations", `{"worker_id":1,"dp_rank":3,"sequence_hashes":[],"isl_tokens":0,"reservation_id":"c"}`, 404)
	s.do("POST", "/reservations/a/output_block", `{}`, 200)
	s.do("POST", "/reservations/a/prefill_complete", "", 200)
	s.do("POST", "/reservations/a/prefill_complete", "", 200)
	s.do("POST", "/reservations/x/prefill_complete", "", 404)
	s.do("DELETE", "/reservations/a", "", 200)
	s.do("DELETE", "/reservations/a", "", 200)
	s.do("DELETE", "/workers/1", "", 200)
	want := []string{
		"add {default default} 4 a {1 0} true 1 5 true 7 l", "add {default default} 4 b {1 0} true 0 0 false - ",
		"done {default default} 4 a {1 0}", "done {default default} 4 a {1 0}", "free {default default} 4 a {1 0}",
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(events, want) {
		t.Errorf("events\n%s\nwant\n%s", strings.Join(events, "\n"), strings.Join(want, "\n"))
	}
}

// TestReplicatedBookings checks what may be done with a booking that a replica has made.
func TestReplicatedBookings(t *testing.T) {
	s := start(t, config())
	s.do("POST", "/workers", `{"worker_id":1,"endpoint":"http://w","block_size":4}`, 201)
	s.do("POST", "/workers", `{"worker_id":2,"model_name":"n","endpoint":"http://w","block_size":4}`, 201)
	books, blockSize, _, known := s.server.Books(worker.Partition{Model: "n", Tenant: "default"})
	if !known || blockSize != 4 {
		t.Fatalf("Books = %d, %v", blockSize, known)
	}
	if _, _, _, known := s.server.Books(worker.Partition{Model: "o", Tenant: "default"}); known {
		t.Error("a partition that nobody has made has books")
	}
	add := func(id string) {
		t.Helper()
		r := tracker.Reservation{ID: id, Rank: worker.Rank{Worker: 2}, Hashes: []uint64{1}, PrefillTokens: 4, Expires: true}
		if _, _, err := books.Adopt(r, time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	add("r")
	s.do("POST", "/select_and_reserve", `{"model_name":"n","token_ids":[1],"reservation_id":"r"}`, 409)
	s.do("POST", "/reservations/r/prefill_complete", "", 200)
	s.do("POST", "/reservations/r/output_block", "{}", 200)
	s.do("DELETE", "/reservations/r", "", 200)
	s.empty()
	// Replicas are not held to one ID in one partition. What this process has booked goes first.
	s.do("POST", "/select_and_reserve", `{"token_ids":[1],"reservation_id":"r"}`, 200)
	add("r")
	s.do("DELETE", "/reservations/r", "", 200)
	if why := s.lacks("/loads", `[{"loads":[{"active_requests":0}]},{"loads":[{"active_requests":1}]}]`); why != "" {
		t.Error(why)
	}
	s.do("DELETE", "/reservations/r", "", 200)
	s.empty()
}

// TestManyRanks checks that a worker may have as many ranks as is said, and no more.
func TestManyRanks(t *testing.T) {
	s := start(t, config())
	register := func(ranks int) string {
		return s.do("POST", "/workers", fmt.Sprintf(`{"worker_id":1,"endpoint":"http://w","block_size":4,"data_parallel_size":%d}`, ranks), 201)
	}
	if text := register(65536); !strings.Contains(text, `"lifecycle":"schedulable"`) {
		t.Errorf("with 65,536 ranks: %s", text)
	}
	s.do("POST", "/reservations", `{"worker_id":1,"dp_rank":65535,"sequence_hashes":[1],"isl_tokens":4,"reservation_id":"last"}`, 201)
	if text := s.do("POST", "/select", `{"token_ids":[1,2,3,4],"pinned_worker":{"worker_id":1,"dp_rank":65535}}`, 200); strings.Count(text, `":0`) < 65536 || !strings.Contains(text, `"dp_rank":65535,`) {
		t.Errorf("POST /select = %.500s", text)
	}
	s.do("DELETE", "/reservations/last", "", 200)
	beyond := false // what an engine may say of itself
	for range 10 {
		dp, err := strconv.Atoi(between(s.do("POST", "/select", `{"token_ids":[1,2,3,4]}`, 200), `"dp_rank":`, ","))
		beyond = beyond || dp >= worker.MaxReportedRanks
		if err != nil {
			t.Fatal(err)
		}
	}
	if !beyond {
		t.Error("of 65,536 equal ranks none of the last 61,440 is chosen in ten times")
	}
	if text := register(65537); !strings.Contains(text, `"not_schedulable_reasons":["data_parallel range is invalid`) {
		t.Errorf("with 65,537 ranks: %s", text)
	}
}

// TestOverlapByRank checks that an answer tells what each rank of the worker has, and of no other.
func TestOverlapByRank(t *testing.T) {
	s := start(t, config())
	s.do("POST", "/workers", `{"worker_id":1,"endpoint":"http://w","block_size":4,"data_parallel_start_rank":2,"data_parallel_size":3}`, 201)
	p := s.index.Partition(worker.Partition{Model: "default", Tenant: "default"})
	local := kvhash.AppendBlocks(nil, []uint32{1, 2, 3, 4, 5, 6, 7, 8}, kvhash.Options{BlockSize: 4})
	for dp, blocks := range map[uint32]int{0: 1, 3: 2, 4: 1, 9: 1} {
		if got := p.Index.Store(worker.Rank{Worker: 1, DP: dp}, worker.Device, kvindex.Parent{}, kvhash.AppendSequences(nil, local[:blocks]), local[:blocks]); got != kvindex.Stored {
			t.Fatal(got)
		}
	}
	if text := s.do("POST", "/select", `{"token_ids":[1,2,3,4,5,6,7,8,9]}`, 200); !strings.Contains(text, `"dp_rank":3,`) || !strings.Contains(text, `"dp":{"2":0,"3":8,"4":4}`) {
		t.Errorf("POST /select = %s", text)
	}
}

// TestMaxWorkers checks the bound of the catalog.
func TestMaxWorkers(t *testing.T) {
	cfg := config()
	cfg.MaxWorkers = 3
	s := start(t, cfg)
	for id := 1; id <= 3; id++ {
		s.do("POST", "/workers", fmt.Sprintf(`{"worker_id":%d,"endpoint":"http://w","block_size":4}`, id), 201)
	}
	s.do("POST", "/workers", `{"worker_id":4}`, 409)
	s.do("DELETE", "/workers/3", "", 200)
	s.do("DELETE", "/workers/1", "", 200)
	s.do("POST", "/workers", `{"worker_id":4}`, 201)
	if why := s.lacks("/workers", `[{"worker_id":1},{"worker_id":2},{"worker_id":4}]`); why != "" {
		t.Error(why)
	}
	s.do("POST", "/workers", `{"worker_id":1,"endpoint":"http://w","block_size":4}`, 201)
	s.do("POST", "/workers", `{"worker_id":5}`, 409)
}

// between is what is in s between the first of before and what follows that.
func between(s, before, after string) string {
	_, s, _ = strings.Cut(s, before)
	s, _, _ = strings.Cut(s, after)
	return s
}
