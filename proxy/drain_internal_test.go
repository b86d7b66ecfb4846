package proxy

import (
	"log/slog"
	"testing"
	"testing/synctest"
	"time"
)

// TestDrainTime checks how long each stage of a drain lasts: the delay in any case, then until the
// last request has ended, but no longer than the timeout.
func TestDrainTime(t *testing.T) {
	const delay, timeout = 3 * time.Second, 7 * time.Second
	for _, tt := range []struct {
		name     string
		requests int
		last     time.Duration // after SIGTERM, 0 is never
		want     time.Duration
	}{
		{"nothing runs", 0, 0, delay},
		{"ended in the delay", 2, time.Second, delay},
		{"ended in the drain", 2, 5 * time.Second, 5 * time.Second},
		{"not ended", 2, 0, delay + timeout},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &Server{drained: make(chan struct{}, 1), waitOver: make(chan struct{}), log: slog.New(slog.DiscardHandler), cfg: Config{DrainDelay: delay, DrainTimeout: timeout}}
				for range tt.requests {
					if !s.admitting() {
						t.Fatal("refused before the drain")
					}
					if tt.last > 0 {
						go func() { time.Sleep(tt.last); s.leave() }()
					}
				}
				begun := time.Now()
				s.drain()
				if got := time.Since(begun); got != tt.want {
					t.Errorf("drained after %v, want %v", got, tt.want)
				}
			})
		})
	}
}
