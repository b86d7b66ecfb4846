package monitor_test

import (
	"math"
	"slices"
	"testing"
	"time"

	"spillway/monitor"
)

// TestKVNewConnection has an engine that has published batches 0 to 3 go, and one come in its place: itself, or
// another one, whose batches store other blocks, those of a number 50 higher. Which it is decides what is known
// then, whether or not anything is published afterwards.
func TestKVNewConnection(t *testing.T) {
	ring := func(shift uint64, seqs ...uint64) map[uint64][]byte {
		all := map[uint64][]byte{}
		for _, s := range seqs {
			all[s] = batchOf(s+shift, 1)
		}
		return all
	}
	garbage := func(uint64) [][][]byte { return [][][]byte{{[]byte("what?")}} }
	ofAnother := func(uint64) [][][]byte {
		return [][][]byte{newReply(0, batchOf(50, 3)), newReply(3, batchOf(53, 3)), newReply(math.MaxUint64, nil)}
	}
	for _, tt := range []struct {
		name      string
		ring      map[uint64][]byte       // of the second engine
		answer    func(uint64) [][][]byte // instead of it
		live      []uint64                // of batches that store other blocks
		held      []uint64
		publisher string
	}{
		{"another, further than the first", ring(50, 0, 1, 2, 3, 4, 5), nil, nil, []uint64{50, 51, 52, 53, 54, 55}, "anew"},
		{"another, and on it goes", ring(50, 0, 1, 2, 3, 4, 5, 6), nil, []uint64{6, 7}, []uint64{50, 51, 52, 53, 54, 55, 56, 57}, "anew"},
		{"another, as far as the first", ring(50, 0, 1, 2, 3), nil, nil, []uint64{50, 51, 52, 53}, "anew"},
		{"another, not as far", ring(50, 0, 1), nil, nil, []uint64{50, 51}, "anew"},
		{"another, that has told nothing", nil, nil, nil, []uint64{}, "anew"},
		{"another, that begins to tell", ring(50, 0), nil, []uint64{0, 1}, []uint64{50, 51}, "anew"},
		{"another, that remembers little", ring(50, 8, 9), nil, nil, []uint64{58, 59}, "anew"},
		{"the same", ring(0, 0, 1, 2, 3), nil, nil, []uint64{0, 1, 2, 3}, "same"},
		{"the same, further", ring(0, 2, 3, 4, 5), nil, nil, []uint64{0, 1, 2, 3, 4, 5}, "same"},
		{"the same, and on it goes", ring(0, 3, 4), nil, []uint64{5}, []uint64{0, 1, 2, 3, 4, 55}, "same"},
		{"who does not answer", nil, garbage, []uint64{4}, []uint64{0, 1, 2, 3, 54}, "unknown"},
		{"who answers for another rank", nil, ofAnother, []uint64{4}, []uint64{0, 1, 2, 3, 54}, "unknown"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := newKVEngine(t, "tcp://127.0.0.1:*", false)
			e.ring = ring(0, 0)
			e.serve()
			r := hearing(t, e, patientKV())
			e.live(1, 0, 1, 2, 3)
			r.applied(3)
			r.await(monitor.KVActive) // so that its end shows
			e.stop()
			r.await(monitor.KVPending)
			second := newKVEngine(t, e.endpoint, false)
			second.replay, second.answer = e.replay, tt.answer
			if tt.ring != nil {
				second.ring = tt.ring
			}
			second.serve()
			second.subscribed()
			for _, seq := range tt.live {
				second.mu.Lock()
				second.ring[seq] = batchOf(seq+50, 1)
				second.mu.Unlock()
				second.publish(seq, batchOf(seq+50, 1))
			}
			eventually(t, "it is known who is there", func() bool { return r.metric("spillway_kv_link_checks_total", tt.publisher) > 0 })
			eventually(t, "the index is as it should be", func() bool { return slices.Equal(r.held(kvRank), tt.held) })
			restarts := 0.0
			if tt.publisher == "anew" {
				restarts = 1
			}
			if got := r.metric("spillway_kv_restarts_total"); got != restarts {
				t.Errorf("%v restarts are seen, want %v", got, restarts)
			}
			r.stop()
		})
	}
}

// A listener that got no answer asks again.
func TestKVNewConnectionAskedAgain(t *testing.T) {
	e := newKVEngine(t, "tcp://127.0.0.1:*", false)
	e.serve()
	r := hearing(t, e, patientKV())
	e.live(1, 0, 1, 2)
	r.applied(2)
	r.await(monitor.KVActive) // so that its end shows
	e.stop()
	r.await(monitor.KVPending)
	second := newKVEngine(t, e.endpoint, false)
	second.replay = e.replay
	second.answer = func(from uint64) [][][]byte {
		if len(second.asked) == 1 { // the lock is held
			return [][][]byte{{[]byte("what?")}}
		}
		return [][][]byte{newReply(from, batchOf(50+from, 1)), newReply(math.MaxUint64, nil)}
	}
	second.serve()
	eventually(t, "the index holds but what the new engine has told", func() bool { return slices.Equal(r.held(kvRank), []uint64{50}) })
	if got := second.requests(); !slices.Equal(got, []uint64{2, 2, 0}) {
		t.Errorf("asked from %v, want from 2, from there again, and from the beginning", got)
	}
	r.stop()
}

// Where no engine can be asked, a worker that began anew is known by its start time, for one: all that was
// known is dropped with the next connection, or, if that was there first, at once; while a connection
// goes on, nothing is.
func TestKVRestartIsTold(t *testing.T) {
	for _, tt := range []struct {
		name          string
		before, after bool // when it is told: before there is a new connection, or after
		held          []uint64
		restarts      float64
	}{
		{"nobody tells", false, false, []uint64{0, 1, 59, 60}, 0},
		{"before it is heard", true, false, []uint64{59, 60}, 1},
		{"after it was heard", false, true, []uint64{60}, 1},
		{"twice", true, true, []uint64{59, 60}, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := newKVEngine(t, "tcp://127.0.0.1:*", false)
			r := hearing(t, e, patientKV())
			e.live(1, 0)
			r.applied(0)
			r.k.Restarted(kvRank.Worker + 1) // who is not there
			if tt.before {
				r.k.Restarted(kvRank.Worker)
			}
			e.live(1, 1)
			r.applied(1)
			if got := r.held(kvRank); !slices.Equal(got, []uint64{0, 1}) {
				t.Errorf("on a connection that goes on %v is known, want 0 and 1", got)
			}
			r.await(monitor.KVActive) // so that its end shows
			e.stop()
			r.await(monitor.KVPending)
			second := newKVEngine(t, e.endpoint, false)
			second.subscribed()
			second.publish(9, batchOf(59, 1))
			r.applied(9)
			if tt.after {
				r.k.Restarted(kvRank.Worker)
			}
			second.publish(10, batchOf(60, 1))
			r.applied(10)
			if got := r.held(kvRank); !slices.Equal(got, tt.held) {
				t.Errorf("known is %v, want %v", got, tt.held)
			}
			if got := r.metric("spillway_kv_restarts_total"); got != tt.restarts {
				t.Errorf("%v restarts are seen, want %v", got, tt.restarts)
			}
			r.stop()
		})
	}
}

// A batch that was missed on a new connection, and after which none comes, is asked for after a silence.
func TestKVSilenceAfterConnection(t *testing.T) {
	e := newKVEngine(t, "tcp://127.0.0.1:*", false)
	e.serve()
	cfg := patientKV()
	cfg.LinkSilence = 100 * time.Millisecond
	r := hearing(t, e, cfg)
	e.live(1, 0)
	r.applied(0)
	r.await(monitor.KVActive) // so that its end shows
	e.stop()
	r.await(monitor.KVPending)
	second := newKVEngine(t, e.endpoint, false)
	second.replay = e.replay
	second.answer = func(from uint64) (all [][][]byte) {
		for seq := from; seq < uint64(len(second.asked)); seq++ { // one more each time; the lock is held
			all = append(all, newReply(seq, batchOf(seq, 1)))
		}
		return append(all, newReply(math.MaxUint64, nil))
	}
	second.serve()
	r.applied(1)
	if got := second.requests(); !slices.Equal(got, []uint64{0, 1}) {
		t.Errorf("asked from %v, want from 0 and 1", got)
	}
	r.stop()
}

// A publisher is not asked while its listener is paused, though it was to be asked once more after a silence:
// what it would tell is not to be applied.
func TestKVPausedIsNotAsked(t *testing.T) {
	e := newKVEngine(t, "tcp://127.0.0.1:*", false)
	e.serve()
	cfg := patientKV()
	cfg.LinkSilence = 10 * time.Millisecond
	r := hearing(t, e, cfg)
	e.live(1, 0)
	r.applied(0)
	r.await(monitor.KVActive) // so that its end shows
	e.stop()
	r.await(monitor.KVPending)
	second := newKVEngine(t, e.endpoint, false)
	second.replay = e.replay
	paused := make(chan error, 1)
	second.answer = func(uint64) [][][]byte {
		if len(second.asked) == 1 { // the lock is held
			paused <- r.k.Pause(kvRank)
			return [][][]byte{newReply(0, batchOf(0, 1)), newReply(math.MaxUint64, nil)}
		}
		return [][][]byte{newReply(1, batchOf(1, 1)), newReply(math.MaxUint64, nil)}
	}
	second.serve()
	if err := <-paused; err != nil {
		t.Fatal(err)
	}
	time.Sleep(30 * cfg.LinkSilence) // no bound: what must not happen gets the time to
	if got := second.requests(); !slices.Equal(got, []uint64{0}) || !slices.Equal(r.held(kvRank), []uint64{0}) {
		t.Errorf("while it is paused it was asked from %v, want from 0 before that alone, and batches %v are known, want 0", got, r.held(kvRank))
	}
	if err := r.k.Resume(kvRank); err != nil {
		t.Fatal(err)
	}
	r.applied(1) // that is a new connection
	r.stop()
}
