package router_test

import (
	"errors"
	"testing"
	"time"

	"spillway/router"
	"spillway/tracker"
	"spillway/worker"
)

// TestDecay: a reservation that another replica made, with an expected time, makes a rank busy
// and lets it be free again by time alone.
func TestDecay(t *testing.T) {
	for _, tt := range []struct {
		name  string
		ratio float64 // the load at which a busy rank is free again, as a share of the limit
		free  time.Duration
	}{{"at the limit", 1, 6 * time.Second}, {"at the release ratio", 0.5, 8 * time.Second}} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := limits(nil, new(uint64(400)))
			cfg.BusyReleaseRatio = tt.ratio
			f := newRig(t, router.RoundRobin, cfg, record(t, 1, 1))
			r := tracker.Reservation{
				ID: "theirs", Rank: worker.Rank{Worker: 1}, PrefillTokens: 1000, PrefillTime: new(10 * time.Second), Expires: true,
			}
			if _, _, err := f.p.Tracker.Adopt(r, start); err != nil {
				t.Fatal(err)
			}
			f.p.Busy.Refresh(1, start)
			for i, at := range []time.Duration{0, tt.free - 1, tt.free} {
				want := router.ErrOverloaded
				if at == tt.free {
					want = nil
				}
				_, err := f.p.Select(router.Query{Reservation: string(rune('a' + i)), PromptTokens: 16}, start.Add(at))
				if !errors.Is(err, want) {
					t.Errorf("Select after %v = %v, want %v", at, err, want)
				}
			}
		})
	}
}
