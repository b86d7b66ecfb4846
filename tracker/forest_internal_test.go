package tracker

import "testing"

// TestSpareNodes: what is kept of prompts that have ended is bounded, in nodes and in blocks.
func TestSpareNodes(t *testing.T) {
	var f forest
	var ends []*node
	for i := range 4 * maxSpareNodes {
		run := make([]uint64, 1+i%3*maxSpareRun) // every third is short enough
		for j := range run {
			run[j] = uint64(i)<<32 | uint64(j)
		}
		end, _ := f.add(run, 7)
		ends = append(ends, end)
	}
	for _, end := range ends {
		f.remove(end, 7)
	}
	if len(f.spare) != maxSpareNodes {
		t.Errorf("%d nodes are kept, want %d", len(f.spare), maxSpareNodes)
	}
	for _, n := range f.spare {
		if cap(n.run) > maxSpareRun {
			t.Errorf("a run with room for %d blocks is kept, want at most %d", cap(n.run), maxSpareRun)
		}
	}
}
