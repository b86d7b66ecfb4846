package engine_test

import (
	"slices"
	"testing"

	"spillway/sim/engine"
)

// tight is base with few blocks, each of 4 tokens.
func tight(blocks int) engine.Config {
	cfg := base()
	cfg.KVBlocks = blocks
	return cfg
}

func TestHeadWaitsForBlocksAndNothingOvertakes(t *testing.T) {
	e := must(engine.New(tight(10), start))
	submit(t, e, 0,
		request(1, 24, 3), // 6 blocks, a 7th for its output
		request(2, 20, 1), // 5 blocks: has to wait for 1
		request(3, 4, 1))  // would fit at once
	if st := e.Stats(); st.Prefilling != 1 || st.Waiting != 2 || st.UsedBlocks != 6 {
		t.Fatalf("Stats() = %+v, want 1 prefilling with 6 blocks, 2 waiting", st)
	}
	check(t, history(t, e),
		"24 1 FirstToken 1", "34 1 Token 2", "44 1 Token 3", "44 1 Finished 3",
		"64 2 FirstToken 1", "64 2 Finished 1", "68 3 FirstToken 1", "68 3 Finished 1")
}

func TestHeadWaitsForSlot(t *testing.T) {
	cfg := base()
	cfg.MaxNumSeqs = 1
	e := must(engine.New(cfg, start))
	submit(t, e, 0, request(1, 4, 2), request(2, 4, 1))
	check(t, history(t, e), "4 1 FirstToken 1", "14 1 Token 2", "14 1 Finished 2", "18 2 FirstToken 1", "18 2 Finished 1")
}

func TestPriorityThenArrival(t *testing.T) {
	cfg := base()
	cfg.MaxNumSeqs = 1
	e := must(engine.New(cfg, start))
	submit(t, e, 0, request(1, 4, 1))
	for id, priority := range []int{2: 1, 3: 0, 4: -5, 5: 0, 6: 1} {
		if id > 1 {
			r := request(uint64(id), 4, 1)
			r.Priority = priority
			submit(t, e, 1, r)
		}
	}
	var order []uint64
	for due, ok := e.Next(); ok; due, ok = e.Next() {
		for _, ev := range e.Advance(due, nil) {
			if ev.Kind == engine.Finished {
				order = append(order, ev.ID)
			}
		}
	}
	if want := []uint64{1, 4, 3, 5, 2, 6}; !slices.Equal(order, want) {
		t.Errorf("order = %v, want %v", order, want)
	}
}

func TestPrefixReuse(t *testing.T) {
	for _, tt := range []struct {
		name          string
		first, second []uint32
		output        []uint32 // of the first
		want          int      // tokens that the second finds
	}{
		{"nothing in common", prompt(1, 12), prompt(2, 12), prompt(9, 1), 0},
		{"the same, last block recomputed", prompt(1, 12), prompt(1, 12), prompt(9, 1), 8},
		{"the same with a partial block", prompt(1, 14), prompt(1, 14), prompt(9, 1), 12},
		{"a longer one", prompt(1, 12), prompt(1, 40), prompt(9, 1), 12},
		{"a shorter one", prompt(1, 40), prompt(1, 10), prompt(9, 1), 8},
		{"one token differs in the first block", prompt(1, 12), append([]uint32{7}, prompt(1, 12)[1:]...), prompt(9, 1), 0},
		// 12 and 5 tokens: the last output token is never stored, so 16 are.
		{"prompt and output", prompt(1, 12), slices.Concat(prompt(1, 12), prompt(9, 5), prompt(8, 9)), prompt(9, 5), 16},
		{"prompt and all but one block of output", prompt(1, 12), slices.Concat(prompt(1, 12), prompt(9, 4), prompt(8, 9)), prompt(9, 4), 12},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := must(engine.New(base(), start))
			submit(t, e, 0, engine.Request{ID: 1, Prompt: tt.first, Output: tt.output})
			history(t, e)
			foreseen := 4 * e.CachedPrefix(engine.PrefixHashes(nil, tt.second, 4))
			submit(t, e, 1000, engine.Request{ID: 2, Prompt: tt.second, Output: prompt(7, 1)})
			due, _ := e.Next()
			evs := e.Advance(due, nil)
			if foreseen != tt.want {
				t.Errorf("CachedPrefix() = %d, want %d", foreseen, tt.want)
			}
			if got := evs[0].CachedTokens; got != tt.want {
				t.Errorf("cached tokens = %d, want %d", got, tt.want)
			}
			if want := at(1000 + float64(len(tt.second)-tt.want)); !evs[0].At.Equal(want) {
				t.Errorf("first token at %v, want %v", evs[0].At, want)
			}
			st := e.Stats()
			if st.PrefillTokens+st.CachedTokens != st.PromptTokens || st.HitTokens != uint64(tt.want) {
				t.Errorf("Stats() = %+v", st)
			}
		})
	}
}

// Prompts admitted together share what the first of them will have computed.
func TestPrefixSharedBeforeItIsComputed(t *testing.T) {
	e := must(engine.New(tight(7), start))
	a := engine.Request{ID: 1, Prompt: prompt(1, 17), Output: prompt(9, 1)}
	b := a
	b.ID = 2
	submit(t, e, 0, a, b)
	if st := e.Stats(); st.UsedBlocks != 6 || st.Prefilling != 2 {
		t.Fatalf("Stats() = %+v, want 4 shared and 2 own blocks", st)
	}
	check(t, history(t, e), "17 1 FirstToken 1", "17 1 Finished 1", "18 2 FirstToken 1", "18 2 Finished 1")
}

// If the first goes before it is done, the second computes what is missing.
func TestAbortOfTheOneThatComputesForBoth(t *testing.T) {
	e := must(engine.New(base(), start))
	a := engine.Request{ID: 1, Prompt: prompt(1, 17), Output: prompt(9, 1)}
	b := a
	b.ID = 2
	submit(t, e, 0, a, b)
	if _, found := e.Abort(1, at(9)); !found { // 2 blocks and a token are done
		t.Fatal("Abort(1) found nothing")
	}
	check(t, history(t, e), "18 2 FirstToken 1", "18 2 Finished 1")
	if st := e.Stats(); st.PrefillTokens != 9+9 || st.CachedTokens != 8 || st.Aborted != 1 {
		t.Errorf("Stats() = %+v, want 18 tokens computed, 8 cached", st)
	}
}

func TestEvictionTakesTheLeastRecentlyUsed(t *testing.T) {
	e := must(engine.New(tight(6), start))
	run := func(id uint64, p []uint32) (cached int) {
		t.Helper()
		submit(t, e, float64(1000*id), engine.Request{ID: id, Prompt: p, Output: prompt(9, 1)})
		due, _ := e.Next()
		return e.Advance(due, nil)[0].CachedTokens
	}
	a, b, c := prompt(1, 8), prompt(2, 8), prompt(3, 12) // 2, 2 and 3 blocks
	run(1, a)
	run(2, b)
	run(3, append(slices.Clone(a), 1)) // uses a again: b is now the oldest
	if st := e.Stats(); st.CachedBlocks != 4 {
		t.Fatalf("Stats() = %+v, want 4 cached blocks", st)
	}
	run(4, c) // takes 2 blank blocks and the last block of b
	if got := run(5, append(slices.Clone(b), 1)); got != 4 {
		t.Errorf("of b %d tokens are left, want 4", got)
	}
	// Room for b came from its first block (held), then a from its end.
	if got := run(6, append(slices.Clone(a), 1)); got != 0 {
		t.Errorf("of a %d tokens are left, want 0", got)
	}
}

func TestPreemptionTakesTheNewestOfTheLowestPriority(t *testing.T) {
	e := must(engine.New(tight(6), start))
	reqs := []engine.Request{request(1, 8, 8), request(2, 8, 4), request(3, 8, 4)}
	reqs[1].Priority = 1
	submit(t, e, 0, reqs[0], reqs[1])
	submit(t, e, 0.5, reqs[2])
	// All 6 blocks are taken at admission. 1 needs a third one at 8: the newest of the lowest
	// priority is 2 and not 3, though 2 is next to be prefilled. When 3 has gone 2 gets in
	// again, but needs a third block at 58 where 1 holds 4. Its 2 blocks stay in the cache, so
	// its last token alone is computed when 1 has gone.
	check(t, history(t, e),
		"8 1 FirstToken 1", "8 2 Preempted 0", "16 3 FirstToken 1",
		"18 1 Token 2", "28 1 Token 3", "28 3 Token 2", "38 1 Token 4", "38 3 Token 3",
		"48 1 Token 5", "48 3 Token 4", "48 3 Finished 4",
		"56 2 FirstToken 1", "58 1 Token 6", "58 2 Preempted 1", "68 1 Token 7",
		"78 1 Token 8", "78 1 Finished 8", "79 2 Token 2", "89 2 Token 3", "99 2 Token 4", "99 2 Finished 4")
}

func TestPreemptedRestartsFromPromptAndOutput(t *testing.T) {
	e := must(engine.New(tight(4), start))
	submit(t, e, 0, request(1, 4, 12), request(2, 4, 6))
	got := history(t, e)
	// Both hold 2 blocks from the first token on. At 44 the prompt and output of 1 are 9 tokens,
	// which needs a third block, and 2 has to go. 1 evicts the rest of it for its fourth, so
	// that 2 computes all its 8 tokens again when 1 is done.
	check(t, got,
		"4 1 FirstToken 1", "8 2 FirstToken 1", "14 1 Token 2", "24 1 Token 3", "24 2 Token 2",
		"34 1 Token 4", "34 2 Token 3", "44 1 Token 5", "44 2 Token 4", "44 2 Preempted 4",
		"54 1 Token 6", "64 1 Token 7", "74 1 Token 8", "84 1 Token 9", "94 1 Token 10",
		"104 1 Token 11", "114 1 Token 12", "114 1 Finished 12",
		"122 2 Token 5", "132 2 Token 6", "132 2 Finished 6")
	if st := e.Stats(); st.Preemptions != 1 || st.GeneratedTokens != 18 || st.PrefillTokens != 4+4+8 {
		t.Errorf("Stats() = %+v, want 1 preemption, 18 tokens, 16 computed", st)
	}
}

func TestPoolFullEndsTheSequence(t *testing.T) {
	e := must(engine.New(tight(2), start))
	submit(t, e, 0, request(1, 6, 100), request(2, 8, 100))
	var got []engine.Event
	for due, ok := e.Next(); ok; due, ok = e.Next() {
		for _, ev := range e.Advance(due, nil) {
			if ev.Kind == engine.Finished {
				got = append(got, ev)
			}
		}
	}
	if len(got) != 2 || got[0].Generated != 3 || got[1].Generated != 1 ||
		got[0].Reason != engine.PoolFull || got[1].Reason != engine.PoolFull {
		t.Errorf("finished: %+v, want 3 tokens and 1 token, PoolFull", got)
	}
}

func TestAbort(t *testing.T) {
	cfg := tight(4)
	cfg.MaxNumSeqs = 2
	e := must(engine.New(cfg, start))
	submit(t, e, 0, request(1, 4, 100), request(2, 4, 100), request(3, 4, 1), request(4, 4, 1))
	for _, tt := range []struct {
		ms    float64
		id    uint64
		want  int
		found bool
	}{
		{15, 3, 0, true}, // waiting
		{30, 1, 3, true}, // decoding, in the middle of a step
		{30, 1, 0, false},
		{30, 99, 0, false},
	} {
		got, found := e.Abort(tt.id, at(tt.ms))
		if got != tt.want || found != tt.found {
			t.Errorf("Abort(%d) at %v ms = %d, %v, want %d, %v", tt.id, tt.ms, got, found, tt.want, tt.found)
		}
	}
	e.Abort(2, at(31))
	if _, ok := e.Next(); !ok {
		t.Fatal("Next() = false with request 4 admitted")
	}
	history(t, e)
	if st := e.Stats(); st.Aborted != 3 || st.Finished != 1 || st.UsedBlocks != 0 {
		t.Errorf("Stats() = %+v, want 3 aborted, 1 finished", st)
	}
}

// What a restart finds is work saved but no second look-up, as in vLLM's counters.
func TestRestartCountsOnceAsQuery(t *testing.T) {
	e := must(engine.New(tight(5), start))
	submit(t, e, 0, request(1, 8, 8), request(2, 12, 2))
	// 1 needs a third block at 8, when the prefill of 2 begins: it begins again when 1 is done.
	got := history(t, e)
	st := e.Stats()
	if st.Preemptions == 0 {
		t.Fatalf("no preemption in %q", got)
	}
	if st.QueryTokens != 8+12 || st.HitTokens != 0 || st.PromptTokens != 8+12 || st.Finished != 2 {
		t.Errorf("Stats() = %+v, want 20 tokens looked up, none found", st)
	}
	e = must(engine.New(tight(5), start))
	submit(t, e, 0, request(1, 4, 9), request(2, 12, 3))
	// 2 has its first token at 16 and needs a fourth block; preempted then, it finds its prompt.
	got = history(t, e)
	if st = e.Stats(); st.Preemptions == 0 || st.CachedTokens == 0 {
		t.Fatalf("no preemption, or nothing found after it: %+v, %q", st, got)
	}
	if st.QueryTokens != 4+12 || st.HitTokens != 0 {
		t.Errorf("Stats() = %+v, want 16 tokens looked up, none found", st)
	}
}
