package router_test

import (
	"errors"
	"testing"
	"time"

	"spillway/router"
	"spillway/tracker"
	"spillway/worker"
)

// TestLearned: what another process has booked counts as one's own does, and ends by itself.
func TestLearned(t *testing.T) {
	f := newRig(t, router.RoundRobin, limits(nil, new(uint64(100))), record(t, 1, 1))
	if got := f.r.Partition(f.p.Key); got != f.p {
		t.Fatalf("Partition(%+v) = %p, want %p", f.p.Key, got, f.p)
	}
	if got := f.r.Partition(worker.Partition{Model: "M", Tenant: "other"}); got != nil {
		t.Fatalf("Partition of a tenant without workers = %p, want nil", got)
	}
	learned := tracker.Reservation{ID: "theirs", Rank: worker.Rank{Worker: 1}, PrefillTokens: 101, Expires: true}
	if _, _, err := f.p.Tracker.Adopt(learned, start); err != nil {
		t.Fatal(err)
	}
	f.p.Busy.Refresh(1, start)
	limit := tracker.DefaultConfig().ExpireAfter
	for _, tt := range []struct {
		after time.Duration
		want  error
	}{{0, router.ErrOverloaded}, {limit, router.ErrOverloaded}, {limit + time.Minute, nil}} {
		now := start.Add(tt.after)
		f.p.Expire(now)
		if _, err := f.p.Select(router.Query{Reservation: "ours", PromptTokens: 1}, now); !errors.Is(err, tt.want) {
			t.Errorf("after %v: Select = %v, want %v", tt.after, err, tt.want)
		}
	}
	rank, ok := f.p.PrefillDone("ours", start)
	if freed, also := f.p.Free("ours", start); rank.Worker != 1 || freed != rank || !ok || !also {
		t.Errorf("PrefillDone, Free = %+v %v, %+v %v, want worker 1", rank, ok, freed, also)
	}
	if _, ok := f.p.Free("ours", start); ok {
		t.Error("Free again = true, want false")
	}
	f.checkEmpty()
}
