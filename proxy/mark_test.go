package proxy_test

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"spillway/busy"
	"spillway/worker"
)

// TestMarkHolds checks for how long a worker that refused is left alone although its next sample
// says that it has room: as it asked, but no longer than marks last.
func TestMarkHolds(t *testing.T) {
	for _, tt := range []struct {
		name, headers string
		hold          time.Duration
	}{
		{"without a time", "", time.Second},
		{"0", "Retry-After: 0\r\n", time.Second},
		{"7 seconds", "Retry-After: 7\r\n", 7 * time.Second},
		{"an hour", "Retry-After: 3600\r\n", 10 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := served("w", newScript(t, saying(answer(429, tt.headers, ""))))
			f := begin(t, setup{busy: decodeLimit()}, w)
			before := time.Now()
			if g := f.chat(chatBody); g.status != 503 {
				t.Fatalf("chat = %d %s, want 503", g.status, g.body)
			}
			after := time.Now()
			marked := func(at time.Time) bool {
				f.list().Observe(busy.Sample{
					Rank: worker.Rank{Worker: w.ID}, TakenAt: at, KVUsedBlocks: new(uint64(10)), KVTotalBlocks: new(uint64(100)),
				}, at)
				return len(f.list().Snapshot().Marked) == 1
			}
			if at := before.Add(tt.hold - time.Millisecond); !marked(at) {
				t.Errorf("not marked any more %v before its time is over", time.Until(at))
			}
			if !marked(after) { // of now, and so of no use later
				t.Error("not marked after the refusal")
			}
			if marked(after.Add(tt.hold)) {
				t.Errorf("still marked after %v and a sample that shows room", tt.hold)
			}
		})
	}
}

// TestMarkOfRank checks that the refusal of one rank leaves the others of its worker free.
func TestMarkOfRank(t *testing.T) {
	var refused atomic.Value
	refused.Store("")
	s := newScript(t, func(c *conn, r received) {
		if rank := r.header.Get("X-Data-Parallel-Rank"); refused.CompareAndSwap("", rank) {
			c.say(answer(429, "", ""))
			return
		}
		c.say(answer(200, jsonHeader, reply))
	})
	w := served("w", s)
	w.DPSize = 2
	f := begin(t, setup{busy: decodeLimit()}, w)
	g := f.chat(chatBody)
	g.is(t, "chat", 503, busyBody, "X-Spillway-Reason: worker-overloaded")
	first := g.header.Get("X-Spillway-Dp-Rank")
	if first == "" || first != refused.Load() {
		t.Fatalf("refused by rank %q, the worker was sent %q", first, refused.Load())
	}
	for range 4 {
		g := f.chat(chatBody)
		if rank := g.header.Get("X-Spillway-Dp-Rank"); g.status != 200 || rank == first || !strings.Contains("01", rank) {
			t.Errorf("the next chat = %d by rank %q, want 200 by the one that is not %s", g.status, rank, first)
		}
	}
	if got := f.states(); got != "w:unknown" {
		t.Errorf("afterwards %s, want a worker that is not busy", got)
	}
}
