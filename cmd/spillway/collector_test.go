package main

import (
	"runtime"
	"runtime/metrics"
	"testing"
	"time"
)

// TestEaseCollector checks that a small heap is collected rarely, that a large one may no more than
// double, and that all is as before in the end.
func TestEaseCollector(t *testing.T) {
	t.Setenv("GOGC", "")
	t.Setenv("GOMEMLIMIT", "")
	percent := func() uint64 {
		s := []metrics.Sample{{Name: "/gc/gogc:percent"}}
		metrics.Read(s)
		return s[0].Value.Uint64()
	}
	becomes := func(what string, ok func(uint64) bool) {
		t.Helper()
		for until := time.Now().Add(patience); !ok(percent()); time.Sleep(time.Millisecond) {
			if time.Now().After(until) {
				t.Fatalf("%s: GOGC is %d", what, percent())
			}
			runtime.GC()
		}
	}
	undo := easeCollector()
	defer undo()
	becomes("a small heap", func(p uint64) bool { return p > 100 && p <= mostPercent })
	large := make([]byte, 2*garbage)
	becomes("a large heap", func(p uint64) bool { return p == 100 })
	runtime.KeepAlive(large)
	large = nil
	becomes("a small heap again", func(p uint64) bool { return p > 100 })
	undo()
	becomes("the end", func(p uint64) bool { return p == 100 })
	runtime.GC()
	if p := percent(); p != 100 {
		t.Errorf("GOGC is %d after the end", p)
	}

	t.Setenv("GOGC", "100")
	easeCollector()()
	runtime.GC()
	if p := percent(); p != 100 {
		t.Errorf("GOGC is %d though it was set", p)
	}
}
