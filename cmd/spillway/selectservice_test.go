package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"
)

// selector is a process of spillway select-service.
type selector struct {
	*running
	url string
}

func startSelector(t *testing.T, args ...string) *selector {
	t.Helper()
	p := start(t, nil, append([]string{"select-service", "--port", "0", "--host", "127.0.0.1"}, args...)...)
	return &selector{p, p.await(`Selection service: (\S+)\n`)}
}

// call makes a request and returns the status and the body. No body is said by "".
func (s *selector) call(method, path, body string) (int, string) {
	s.t.Helper()
	req, err := http.NewRequest(method, s.url+path, strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	return s.send(req)
}

// selecting keeps as many connections as tests have requests at once.
var selecting = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 128}}

func (s *selector) send(req *http.Request) (int, string) {
	s.t.Helper()
	resp, err := selecting.Do(req)
	if err != nil {
		s.t.Error(err) // not Fatal, for goroutines call it too
		return 0, ""
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Error(err)
	}
	return resp.StatusCode, string(text)
}

// ask makes a request that must be answered with that status, and returns the body.
func (s *selector) ask(method, path, body string, status int) string {
	s.t.Helper()
	got, text := s.call(method, path, body)
	if got != status {
		s.t.Fatalf("%s %s %.300s = %d %s, want %d", method, path, body, got, text, status)
	}
	return text
}

func (s *selector) post(path, body string, status int) string {
	s.t.Helper()
	return s.ask(http.MethodPost, path, body, status)
}

// read is ask for what answers with JSON.
func read[T any](t *testing.T, text string) (v T) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return v
}

// loadOf is one rank of GET /loads.
type loadOf struct {
	Worker   uint64 `json:"worker_id"`
	DP       uint32 `json:"dp_rank"`
	Prefill  uint64 `json:"potential_prefill_tokens"`
	Blocks   uint64 `json:"potential_decode_blocks"`
	Requests uint64 `json:"active_requests"`
}

// partitionLoads is one partition of it.
type partitionLoads struct {
	Model   string   `json:"model_name"`
	Tenant  string   `json:"tenant_id"`
	Loads   []loadOf `json:"loads"`
	Pending int      `json:"pending_count"`
	Tokens  int      `json:"pending_isl_tokens"`
}

func (s *selector) loads() []partitionLoads {
	s.t.Helper()
	return read[[]partitionLoads](s.t, s.ask(http.MethodGet, "/loads", "", 200))
}

// register makes all ranks of simulated workers known, worker i as i+1.
func (s *selector) register(sim *simulated) {
	s.t.Helper()
	for i, url := range sim.urls {
		ranks := make([]string, sim.dp)
		for dp := range ranks {
			events, _ := sim.ports(i, dp)
			ranks[dp] = fmt.Sprintf(`"%d":"tcp://127.0.0.1:%d"`, dp, events)
		}
		_, replay := sim.ports(i, 0)
		s.post("/workers", fmt.Sprintf(`{"worker_id":%d,"model_name":"sim-model","endpoint":%q,"block_size":%d,"data_parallel_size":%d,
			"kv_events_endpoints":{%s},"replay_endpoint":"tcp://127.0.0.1:%d"}`,
			i+1, url, sim.block, sim.dp, strings.Join(ranks, ","), replay), 201)
	}
}

// TestReplayViaSelectService has a load go the whole way: the service is asked, knows of caches by
// their own events, and in the end its books are empty.
func TestReplayViaSelectService(t *testing.T) {
	sim := startSimulated(t, 2, 2, 16)
	s := startSelector(t)
	s.register(sim)
	replay := start(t, nil, "replay", "--via", "select-service", "--url", s.url, "--rate", "200", "--requests", "60", "--isl", "200", "--osl", "5", "--json", "-")
	if code := replay.exit(); code != 0 {
		t.Fatalf("replay ends with code %d", code)
	}
	rep := read[struct {
		Completed, Failed, Shed int
		Lifecycle               struct {
			Selected  int
			Freed     int
			Failed    int
			Prefilled int `json:"prefill_completed"`
		}
		Workers []struct{ Name string }
	}](t, replay.stdout.String())
	if l := rep.Lifecycle; rep.Completed != 60 || l.Selected != 60 || l.Freed != 60 || l.Prefilled != 60 || l.Failed != 0 || len(rep.Workers) != 2 {
		t.Errorf("of 60 requests: %+v", rep)
	}
	s.booksAreEmpty()
	s.signal(syscall.SIGTERM)
	if code := s.exit(); code != 0 {
		t.Errorf("the service ends with code %d", code)
	}
}
