package main

import (
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// slotTracker is a process of spillway slot-tracker.
type slotTracker struct {
	*running
	url string
}

func startSlotTracker(t *testing.T, args ...string) slotTracker {
	t.Helper()
	p := start(t, nil, append([]string{"slot-tracker", "--host", "127.0.0.1", "--port", "0"}, args...)...)
	return slotTracker{p, p.await(`Slot tracker: (\S+)\n`)}
}

// post sends a body and returns status and answer.
func (s slotTracker) post(path, body string) (int, string) {
	s.t.Helper()
	res, err := http.Post(s.url+path, "application/json", strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return res.StatusCode, string(text)
}

func (s slotTracker) must(path, body string, want int) {
	s.t.Helper()
	if got, text := s.post(path, body); got != want {
		s.t.Fatalf("POST %s %s = %d %s, want %d", path, body, got, text, want)
	}
}

const (
	trackedWorker  = `{"worker_id":7,"model_name":"m","block_size":16,"dp_start":0,"dp_size":1}`
	trackedRequest = `{"model_name":"m","request_id":"r1","worker_id":7,"dp_rank":0,"sequence_hashes":[1,-2,3],"new_isl_tokens":8}`
)

// TestSlotTrackerRemembers: a stop and a start with the same state file change nothing.
func TestSlotTrackerRemembers(t *testing.T) {
	file := filepath.Join(t.TempDir(), "slots.json")
	s := startSlotTracker(t, "--state-file", file)
	s.must("/register", trackedWorker, 201)
	s.must("/add", trackedRequest, 201)
	_, before := fetch(t, s.url+"/loads")
	s.signal(syscall.SIGTERM)
	if code := s.exit(); code != 0 {
		t.Fatalf("exit code = %d, want 0\n%s", code, s.stderr.String())
	}
	s = startSlotTracker(t, "--state-file", file)
	if _, after := fetch(t, s.url+"/loads"); after != before || !strings.Contains(after, `"active_decode_blocks":3`) {
		t.Errorf("loads after a restart = %s, want %s", after, before)
	}
}

// TestSlotTrackersTellEachOther books on one process and frees on the other. The second hears of
// the first when it is told to, at run time.
func TestSlotTrackersTellEachOther(t *testing.T) {
	dir := t.TempDir()
	one, two := "ipc://"+filepath.Join(dir, "1"), "ipc://"+filepath.Join(dir, "2")
	a := startSlotTracker(t, "--replica-sync-bind", one, "--replica-sync-peers", two)
	b := startSlotTracker(t, "--replica-sync-bind", two, "--replica-sync-advertise", two)
	for _, s := range []slotTracker{a, b} {
		s.must("/register", trackedWorker, 201)
	}
	b.must("/register_peer", `{"url":"`+one+`"}`, 201)
	b.must("/register_peer", `{"url":"`+one+`"}`, 200)
	b.must("/register_peer", `{"url":"`+two+`"}`, 400)
	b.must("/register_peer", `{"url":"nothing"}`, 400)
	b.must("/deregister_peer", `{"url":"tcp://127.0.0.1:1"}`, 404)
	if _, got := fetch(t, b.url+"/peers"); got != `["`+one+`"]` {
		t.Errorf("peers = %s, want %s alone", got, one)
	}
	const held, none = `"active_prefill_tokens":8,"active_decode_blocks":3}`, `"active_prefill_tokens":0,"active_decode_blocks":0}`
	shows := func(s slotTracker, want string) func() bool {
		return func() bool {
			_, loads := fetch(t, s.url+"/loads")
			return strings.Contains(loads, want)
		}
	}
	const first = `{"model_name":"m","request_id":"r0","worker_id":7,"dp_rank":0,"sequence_hashes":[9],"new_isl_tokens":5}`
	eventually(t, "b hears a", func() bool { // what is published before they are connected is lost
		a.must("/free", `{"model_name":"m","request_id":"r0"}`, 200)
		a.must("/add", first, 201)
		return shows(b, `"active_prefill_tokens":5,"active_decode_blocks":1}`)()
	})
	a.must("/free", `{"model_name":"m","request_id":"r0"}`, 200)
	a.must("/add", trackedRequest, 201)
	eventually(t, "b hears of what a books", shows(b, held)) // which is so only after all that came before
	b.must("/add", trackedRequest, 409)
	eventually(t, "a hears of what b frees", func() bool {
		_, _ = b.post("/add", trackedRequest)
		b.must("/free", `{"model_name":"m","request_id":"r1"}`, 200)
		return shows(a, none)()
	})
	b.must("/deregister_peer", `{"url":"`+one+`"}`, 200)
	if code := start(t, nil, "slot-tracker", "--port", "0", "--replica-sync-peers", "tcp://127.0.0.1:1").exit(); code != 2 {
		t.Errorf("exit code with peers and nothing to bind = %d, want 2", code)
	}
}
