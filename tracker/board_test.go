package tracker_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"spillway/tracker"
	"spillway/worker"
)

// TestBoardHeld: what many ranks hold of a prompt, each to a depth of its own and in branches, is
// told as by Project, from read to read.
func TestBoardHeld(t *testing.T) {
	const ranks = 60
	rng := rand.New(rand.NewPCG(1, 1))
	tr := tracker.New(tracker.DefaultConfig())
	for i := range ranks {
		tr.Register(&worker.Worker{ID: worker.ID(i * 7 % ranks), DPSize: 1}, start)
	}
	// prompts branch off one long chain.
	chain := func() []uint64 {
		n, at := rng.IntN(12), rng.IntN(12)
		all := make([]uint64, n)
		for i := range all {
			if all[i] = uint64(i); i >= at {
				all[i] += uint64(100 * (1 + rng.IntN(3)))
			}
		}
		return all
	}
	var board tracker.Board
	var ids []string
	deep := 0
	for step := range 3000 {
		if len(ids) > 100 {
			i := rng.IntN(len(ids))
			tr.Free(ids[i], start)
			ids[i] = ids[len(ids)-1]
			ids = ids[:len(ids)-1]
		}
		ids = append(ids, fmt.Sprint(step))
		r := tracker.Reservation{ID: ids[len(ids)-1], Rank: rank(worker.ID(rng.IntN(ranks)), 0), Hashes: chain()}
		if err := tr.Reserve(r, tracker.NoLimit, start); err != nil {
			t.Fatal(err)
		}
		query := chain()
		tr.Read(query, start, &board)
		for _, p := range tr.Project(query, start, nil) {
			seat := int(p.Rank.Worker) // all IDs from 0 are taken
			if got, want := uint64(board.Held[seat]), uint64(len(query))-p.AdditionalBlocks; got != want || board.Ranks[seat] != p.Rank {
				t.Fatalf("step %d: Held(%v) of %+v = %d, want %d of %+v", step, query, board.Ranks[seat], got, want, p.Rank)
			} else if want > 3 {
				deep++
			}
		}
	}
	if deep < 1000 {
		t.Errorf("only %d ranks held more than 3 blocks: this tests little", deep)
	}
}
