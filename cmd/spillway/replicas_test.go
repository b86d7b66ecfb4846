package main

import (
	"context"
	"net/http"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"

	"spillway/proxy"
	"spillway/router"
	"spillway/wire"
	"spillway/worker"
)

// longChat has a prompt of some 10,000 tokens.
const longChat = `{"model":"sim-model","stream":true,"max_tokens":5,"messages":[{"role":"user","content":"`

// TestTwoFrontEnds: what one front end has booked makes another one refuse that shares its fleet,
// until it is given back; one that exchanges nothing hears nothing.
func TestTwoFrontEnds(t *testing.T) { inModes(t, testTwoFrontEnds) }

func testTwoFrontEnds(t *testing.T, mode router.Mode) {
	sim := start(t, nil, "sim", "--port", "0", "--prefill-tokens-per-second", "1000") // ten seconds for longChat
	workers := sim.await(`--workers: (\S+)\n`)
	dir := t.TempDir()
	at := func(name string) string { return "ipc://" + filepath.Join(dir, name) }
	front := func(args ...string) (*running, string) {
		p := start(t, nil, append([]string{"frontend", "--workers", workers, "--http-port", "0", "--http-host", "127.0.0.1",
			"--active-prefill-tokens-threshold", "100", "--scrape-interval", "0", "--router-mode", string(mode)}, args...)...)
		return p, p.await(`Front end: (\S+)\n`)
	}
	first, a := front("--replica-sync-bind", at("a"), "--replica-sync-peers", at("b"))
	_, b := front("--replica-sync-bind", at("b"), "--replica-sync-peers", at("a"), "--replica-sync-advertise", at("b"))
	_, alone := front()
	says := func(url, line string) bool {
		_, page := fetch(t, url+"/metrics")
		return strings.Contains(page, line+"\n")
	}
	for _, url := range []string{a, b, alone} {
		eventually(t, "the worker can be sent to", func() bool { status, _ := fetch(t, url+"/ready"); return status == 200 })
	}
	eventually(t, "b hears a", func() bool {
		if resp := post(t, a+"/v1/chat/completions", shortChat); resp.StatusCode != http.StatusOK {
			t.Fatalf("chat: %s: %s", resp.Status, text(t, resp))
		} else {
			_ = text(t, resp)
		}
		return !says(b, `spillway_replica_outcomes_total{kind="prefill_done",result="changed"} 0`) &&
			!says(b, `spillway_replica_outcomes_total{kind="free",result="changed"} 0`)
	})
	eventually(t, "all is given back", func() bool { return booked(t, b) == "0" })

	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		body := strings.NewReader(longChat + strings.Repeat("four", 10_000) + `"}]}`)
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, a+"/v1/chat/completions", body)
		if err != nil {
			t.Error(err)
			return
		}
		req.Header.Set("Content-Type", "application/json")
		if resp, err := http.DefaultClient.Do(req); err == nil { // it is cancelled, one way or the other
			<-ctx.Done()
			_ = resp.Body.Close()
		}
	}()
	eventually(t, "b has heard of a's request", func() bool { return booked(t, b) == "1" })
	for _, url := range []string{a, b} {
		resp := post(t, url+"/v1/chat/completions", shortChat)
		if reason := resp.Header.Get("X-Spillway-Reason"); resp.StatusCode != http.StatusServiceUnavailable || reason != "overloaded" {
			t.Errorf("while a prompt waits for prefill, a chat is answered %s %q, want 503 overloaded", resp.Status, reason)
		}
	}
	if got := booked(t, alone); got != "0" {
		t.Errorf("a front end that exchanges nothing has %s requests booked, want 0", got)
	}
	leave()
	<-gone
	eventually(t, "b has heard of its end", func() bool { return booked(t, b) == "0" })
	if resp := post(t, b+"/v1/chat/completions", shortChat); resp.StatusCode != http.StatusOK {
		t.Errorf("after it, a chat is answered %s, want 200", resp.Status)
	}
	first.signal(syscall.SIGTERM)
	if code := first.exit(); code != 0 {
		t.Errorf("exit code %d after SIGTERM, want 0", code)
	}
	eventually(t, "b has lost a", func() bool { return says(b, "spillway_replica_peers_connected 0") })
	if resp := post(t, b+"/v1/chat/completions", shortChat); resp.StatusCode != http.StatusOK {
		t.Errorf("without its peer, a chat is answered %s, want 200", resp.Status)
	}
}

// booked is the number of requests that a front end has booked on its only worker.
func booked(t *testing.T, url string) string {
	t.Helper()
	_, page := fetch(t, url+"/metrics")
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, "spillway_slots_inflight{") {
			_, n, _ := strings.Cut(strings.TrimSpace(line), "} ")
			return n
		}
	}
	return "none"
}

// TestReplicaEvent: a booking is told whole, and its blocks are like those of no other.
func TestReplicaEvent(t *testing.T) {
	b := proxy.Booking{
		Stage: proxy.Booked, Partition: worker.Partition{Model: "m", Tenant: "t"}, ID: "r", Rank: worker.Rank{Worker: 7, DP: 1},
		BlockSize: 16, PrefillTokens: 50, DecodeBlocks: 3,
	}
	one, other := replicaEvent(b), replicaEvent(b)
	want := wire.ReplicaEvent{Model: "m", Tenant: "t", BlockSize: 16, Reservation: "r", Rank: worker.Rank{Worker: 7, DP: 1}}
	add := want
	add.Kind, add.Promise = wire.ReplicaAdd, wire.Promise{Hashes: one.Promise.Hashes, TrackPrefill: true, PrefillTokens: 50}
	if !reflect.DeepEqual(one, add) || len(one.Promise.Hashes) != 3 {
		t.Errorf("replicaEvent = %+v, want %+v with three hashes", one, add)
	}
	hashes := append(one.Promise.Hashes, other.Promise.Hashes...)
	if slices.Sort(hashes); len(slices.Compact(hashes)) != 6 {
		t.Errorf("two bookings share hashes: %d", hashes)
	}
	for stage, kind := range map[proxy.BookingStage]wire.ReplicaKind{proxy.PrefillDone: wire.ReplicaPrefillDone, proxy.Freed: wire.ReplicaFree} {
		b.Stage, want.Kind, b.PrefillTokens, b.DecodeBlocks = stage, kind, 0, 0
		if got := replicaEvent(b); !reflect.DeepEqual(got, want) {
			t.Errorf("replicaEvent = %+v, want %+v", got, want)
		}
	}
}

// TestReplicaSettings: an exchange that cannot begin is no front end.
func TestReplicaSettings(t *testing.T) {
	for _, tt := range []struct {
		args string
		code int
		want string
	}{
		{"--replica-sync-peers=tcp://a:1", 2, "replica-sync-peers: needs replica-sync-bind"},
		{"--replica-sync-bind=tcp://127.0.0.1:0 --replica-sync-advertise=tcp://a:1 --replica-sync-peers=tcp://a:1", 2, "replica-sync-peers: tcp://a:1 is replica-sync-advertise"},
		{"--replica-sync-bind=tcp://192.0.2.1:1", 1, "publish at tcp://192.0.2.1:1"},
	} {
		p := start(t, nil, append(strings.Fields("frontend --http-port=0 --http-host=127.0.0.1"), strings.Fields(tt.args)...)...)
		if code := p.exit(); code != tt.code || !strings.Contains(p.stderr.String(), tt.want) {
			t.Errorf("%s: exit code %d, %s; want %d, %s", tt.args, code, &p.stderr, tt.code, tt.want)
		}
	}
}
