package main

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"spillway/kvhash"
	"spillway/wire"
	"spillway/worker"
)

var selectMeasure = flag.Bool("selectservice.measure", false, "run TestSelectionCost, which measures times: for a quiet machine")

// TestSelectionCost prints requests a second over keep-alive connections, and the server's processor
// time for each, beside the goals: 100 workers, each of which has a part of every prompt, with 4
// bookings each. The generator (leanConn) runs on the same processors. It judges nothing.
//
//	go test -run '^TestSelectionCost$' -v ./cmd/spillway -selectservice.measure
func TestSelectionCost(t *testing.T) {
	if !*selectMeasure {
		t.Skip("measures times; -selectservice.measure runs it")
	}
	const workers, blockSize, conns = 100, 16, 16
	tokens := make([]uint32, 8192)
	for i := range tokens {
		tokens[i] = uint32(i*2654435761 + 12345)
	}
	locals := kvhash.AppendBlocks(nil, tokens, kvhash.Options{BlockSize: blockSize})
	seqs := kvhash.AppendSequences(nil, locals)
	peer := serveDump(t, workers, blockSize, locals, seqs)
	s := startSelector(t, "--indexer-peers", peer, "--log-level", "error")
	for id := range workers {
		s.post("/workers", fmt.Sprintf(`{"worker_id":%d,"model_name":"m","endpoint":"http://w%d:1","block_size":%d,"kv_events_endpoint":"tcp://127.0.0.1:1"}`, id, id, blockSize), 201)
	}
	for i := range 4 * workers {
		s.post("/select_and_reserve", fmt.Sprintf(`{"model_name":"m","token_ids":[%d,%s]}`, i, numbers(tokens[:64])), 200)
	}
	lean := dialLean(t, s.url, conns)
	hashes := func(n int) string {
		return `,"block_hashes":[` + signed(locals[:n]) + `],"sequence_hashes":[` + signed(seqs[:n]) + `],"isl_tokens":` + strconv.Itoa(n*blockSize)
	}
	ask := func(path, prompt string) func(*leanConn, int64) error {
		return func(c *leanConn, _ int64) error { return c.post(path, `{"model_name":"m"`, prompt, `}`) }
	}
	life := func(prompt string) func(*leanConn, int64) error {
		return func(c *leanConn, i int64) error {
			id := "l" + strconv.FormatInt(i, 10)
			return errors.Join(
				c.post("/select_and_reserve", `{"model_name":"m","reservation_id":"`, id, `"`, prompt, `}`),
				c.post("/reservations/"+id+"/prefill_complete"),
				c.send("DELETE", "/reservations/"+id),
			)
		}
	}
	fmt.Println("| call | workers | prompt | requests/s | p50 µs | p99 µs | server's CPU µs/request | goal/s | ratio |")
	for _, row := range []struct {
		name, prompt string
		calls        int
		goal         float64
		call         func(*leanConn, int64) error
	}{
		{"select", "64 block hashes", 1, 10000, ask("/select", hashes(64))},
		{"select", "512 block hashes", 1, 0, ask("/select", hashes(512))},
		{"select", "8192 token IDs", 1, 3000, ask("/select", `,"token_ids":[`+numbers(tokens)+`]`)},
		{"select_and_reserve, prefill_complete, free", "64 block hashes", 3, 0, life(hashes(64))},
		{"overlap_scores", "64 block hashes", 1, 0, ask("/overlap_scores", hashes(64))},
	} {
		drive(t, lean, measureWindow/3, 0, row.call) // warms up
		to := spending{}
		slotTracker{running: s.running, url: s.url}.spend(lean, &to, measureWindow, 0, row.calls, row.call)
		fmt.Printf("| %s | %d | %s %s\n", row.name, workers, row.prompt, to.figures(row.goal))
	}
}

// numbers are token IDs as JSON has them.
func numbers(all []uint32) string {
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(all), " ", ","), "[]")
}

// signed are hashes as JSON has them.
func signed(all []uint64) string {
	var b []byte
	for i, h := range all {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, int64(h), 10)
	}
	return string(b)
}

// serveDump plays a peer whose index has a prompt on each worker, as far as its number tells: all of
// it on the last one.
func serveDump(t *testing.T, workers, blockSize int, locals, seqs []uint64) string {
	t.Helper()
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		d := wire.NewDumpWriter(w)
		d.Partition(worker.Partition{Model: "m", Tenant: "default"}, uint32(blockSize))
		for id := range workers {
			n := len(locals) * (id + 1) / workers
			d.Store(&wire.KVEvent{Kind: wire.KVStore, Rank: worker.Rank{Worker: worker.ID(id)}, Engine: seqs[:n], Local: locals[:n]})
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = srv.Serve(ln) }()
	t.Cleanup(func() { _ = srv.Close() })
	return "http://" + ln.Addr().String()
}
