package proxy

import (
	"testing"
	"time"
)

func TestRatesWait(t *testing.T) {
	at := func(seconds int) time.Time { return time.Unix(1_754_000_000+int64(seconds), 0) }
	type events struct{ second, freed, shed int }
	for _, tt := range []struct {
		name   string
		events []events
		now    int
		want   float64 // seconds before spreading
	}{
		{"nothing has happened", nil, 0, 24},
		{"nothing was freed", []events{{0, 0, 50}}, 0, 24},
		{"far more was freed than refused", []events{{0, 600, 1}}, 0, 1},
		{"as much", []events{{0, 60, 60}}, 0, 1},
		{"a fifth of what was asked for", []events{{0, 10, 20}, {30, 10, 80}}, 59, 5},
		{"freed, but nobody was refused yet", []events{{0, 1, 0}}, 0, 1},
		{"one in a minute against a crowd", []events{{0, 1, 10000}}, 0, 24},
		{"a minute later it is forgotten", []events{{0, 100, 500}}, 60, 24},
		{"just before that it is not", []events{{0, 100, 500}}, 59, 5},
		{"a second is used again a minute later", []events{{0, 1000, 0}, {60, 10, 70}}, 60, 7},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var r rates
			for _, e := range tt.events {
				for range e.freed {
					r.free(at(e.second))
				}
				for range e.shed {
					r.shed(at(e.second))
				}
			}
			seen := map[time.Duration]bool{}
			for range 200 {
				got := r.wait(at(tt.now))
				if s := got.Seconds(); s < tt.want || s > tt.want*1.25 || s < 1 || s > 30 {
					t.Fatalf("wait() = %v, want %v s to a quarter more", got, tt.want)
				}
				seen[got.Round(10*time.Millisecond)] = true
			}
			if len(seen) < 10 {
				t.Errorf("200 clients are sent back at %d moments", len(seen))
			}
		})
	}
}
