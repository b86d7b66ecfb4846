package main

import (
	"strings"
	"syscall"
	"testing"

	"spillway/router"
)

// manyIdle is how many connections a front end must be able to hold that do nothing.
const manyIdle = 10_000

// roomFor skips the test unless this process, and so those it starts, may have so many files open.
// Go raises the soft limit to the hard one by itself.
func roomFor(t *testing.T, files uint64) {
	t.Helper()
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if limit.Max < files {
		t.Skipf("the limit of open files is %d, this needs %d", limit.Max, files)
	}
}

// TestIdleConnections checks that others are served beside 10,000 connections which do nothing,
// that all of these can still be used, and that nothing of them stays.
func TestIdleConnections(t *testing.T) { inModes(t, testIdleConnections) }

func testIdleConnections(t *testing.T, mode router.Mode) {
	roomFor(t, manyIdle+500)
	chooses := modeFlags(t, mode, 1)
	sim := start(t, nil, append([]string{"sim", "--port", "0", "--speed", "10"}, chooses[2:]...)...) // the mode is none of its
	front := start(t, nil, append([]string{"frontend", "--http-port", "0", "--http-host", "127.0.0.1", "--workers", sim.await(`--workers: (\S+)\n`)}, chooses...)...)
	url := front.await(`Front end: (\S+)\n`)
	addr := strings.TrimPrefix(url, "http://")
	eventually(t, "the worker can be sent to", func() bool { status, _ := fetch(t, url+"/ready"); return status == 200 })

	idle, err := gather(t.Context(), addr, manyIdle, false)
	defer idle.disperse()
	if err != nil {
		t.Fatal(err)
	}
	if n := connections(t, addr); n < manyIdle {
		t.Errorf("the front end has %d connections, want %d that are idle", n, manyIdle)
	}
	for range 20 {
		if resp := post(t, url+"/v1/chat/completions", shortChat); resp.StatusCode != 200 || !strings.HasSuffix(text(t, resp), "data: [DONE]\n\n") {
			t.Errorf("a client beside them: %s, want 200 and the whole answer", resp.Status)
		}
	}
	for i := 0; i < manyIdle; i += manyIdle / 20 {
		if err := asked(idle.guests[i]); err != nil {
			t.Errorf("connection %d after its pause: %v", i, err)
		}
	}
	idle.disperse()
	eventually(t, "all are gone", func() bool { return connections(t, addr) <= 2 }) // of fetch and post
	front.signal(syscall.SIGTERM)
	if code := front.exit(); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
}

// asked has a connection serve two short requests.
func asked(g *guest) error {
	body := strings.Replace(guestShort, guestModel, "sim-model", 1)
	for _, id := range []string{"a", "b"} {
		if err := g.ask(id, body); err != nil {
			return err
		}
		if err := g.is(200, `"chat.completion"`); err != nil {
			return err
		}
	}
	return nil
}
