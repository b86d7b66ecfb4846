package proxy

import (
	"testing"
	"time"
)

// TestRefusalsAllow lets one refusal a second through, and counts the others.
func TestRefusalsAllow(t *testing.T) {
	t0 := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	var one, other refusals
	for i, tt := range []struct {
		of   *refusals
		at   time.Duration
		want uint64
		ok   bool
	}{
		{&one, 0, 0, true},
		{&one, 0, 0, false},
		{&one, 999 * time.Millisecond, 0, false},
		{&other, 999 * time.Millisecond, 0, true}, // of another model
		{&one, time.Second, 2, true},
		{&one, 1500 * time.Millisecond, 0, false},
		{&one, 2 * time.Second, 1, true},
		{&one, time.Hour, 0, true},
	} {
		if got, ok := tt.of.allow(t0.Add(tt.at)); got != tt.want || ok != tt.ok {
			t.Errorf("step %d at %v: allow = %d, %v, want %d, %v", i, tt.at, got, ok, tt.want, tt.ok)
		}
	}
}

func TestTraceID(t *testing.T) {
	const id = "0af7651916cd43dd8448eb211c80319c"
	for v, want := range map[string]string{
		"00-" + id + "-b7ad6b7169203331-01":      id,
		"01-" + id + "-b7ad6b7169203331-01-more": id, // a later version
		"":                                       "",
		"00-1-2-01":                              "",
		"00-00000000000000000000000000000000-b7ad6b7169203331-01":  "",
		"00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01":  "",
		"00-0af7651916cd43dd8448eb211c80319\n-b7ad6b7169203331-01": "",
		"00x" + id + "-b7ad6b7169203331-01":                        "",
	} {
		if got := traceID(v); got != want {
			t.Errorf("traceID(%q) = %q, want %q", v, got, want)
		}
	}
}
