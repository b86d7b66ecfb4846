package main

import (
	"runtime"
	"testing"
)

// TestOneProcessor is about this process, so it does not run beside others.
func TestOneProcessor(t *testing.T) {
	was := runtime.GOMAXPROCS(0)
	defer runtime.GOMAXPROCS(was)
	t.Setenv("GOMAXPROCS", "7")
	undo := useOneProcessor()
	if n := runtime.GOMAXPROCS(0); n != was {
		t.Errorf("%d processors though GOMAXPROCS is set, want %d", n, was)
	}
	undo()
	t.Setenv("GOMAXPROCS", "")
	undo = useOneProcessor()
	if n := runtime.GOMAXPROCS(0); n != 1 {
		t.Errorf("%d processors, want one", n)
	}
	if undo(); runtime.NumCPU() > 1 && runtime.GOMAXPROCS(0) == 1 {
		t.Error("one processor after the end")
	}
}
