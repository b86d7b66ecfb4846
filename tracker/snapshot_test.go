package tracker_test

import (
	"errors"
	"fmt"
	"maps"
	"testing"
	"time"

	"spillway/tracker"
	"spillway/worker"
)

// TestRestore books in a new tracker what stands in another: the loads are the same, and each
// reservation expires when it would have.
func TestRestore(t *testing.T) {
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	cfg := tracker.Config{ExpireAfter: 100 * time.Second}
	make2 := func(now time.Time) *tracker.Tracker {
		tr := tracker.New(cfg)
		tr.Register(&worker.Worker{ID: 1, DPSize: 2}, now)
		return tr
	}
	old := make2(start)
	for i, p := range prompts {
		r := tracker.Reservation{ID: fmt.Sprint(i), Rank: rank(1, uint32(i%2)), Hashes: p, DecodeBlocks: 2, PrefillTokens: 7, Expires: i%3 > 0}
		if i == 4 {
			r.PrefillTime = new(time.Hour)
		}
		if err := old.Reserve(r, tracker.NoLimit, at(i)); err != nil {
			t.Fatal(err)
		}
	}
	old.PrefillDone("3", at(20))
	old.Grow("5", 3, new(0.5), at(21))
	old.Free("2", at(22))
	old.Expire(at(103)) // takes 1

	now, list := at(1000), old.Standing(at(103))
	fresh := make2(now)
	for _, s := range list {
		if err := fresh.Restore(s, now); err != nil {
			t.Fatalf("Restore(%+v) = %v", s, err)
		}
	}
	for _, s := range list {
		if s.Decay != nil {
			fresh.Grow(s.ID, 0, s.Decay, now)
		}
		if err := fresh.Restore(s, now); !errors.Is(err, tracker.ErrDuplicate) {
			t.Errorf("Restore again = %v, want ErrDuplicate", err)
		}
	}
	if got, want := fresh.Loads(now), old.Loads(at(103)); !maps.Equal(got, want) {
		t.Errorf("loads = %v, want %v", got, want)
	}
	if got, want := len(fresh.Expire(now.Add(3*time.Second))), len(old.Expire(at(106))); got != want || want == 0 {
		t.Errorf("expired 3 s later = %d, want %d", got, want)
	}
	s := tracker.Standing{Reservation: tracker.Reservation{ID: "x", Rank: rank(1, 0), Expires: true}, Age: 101 * time.Second}
	if err := fresh.Restore(s, now); !errors.Is(err, tracker.ErrExpired) {
		t.Errorf("Restore of an old one = %v, want ErrExpired", err)
	}
	s.Rank.DP = 2
	if err := fresh.Restore(s, now); !errors.Is(err, tracker.ErrUnknownRank) {
		t.Errorf("Restore on another rank = %v, want ErrUnknownRank", err)
	}
}
