package engine_test

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"spillway/sim/engine"
)

// heldBlock is what a reader of cache events knows of a block.
type heldBlock struct {
	parent    uint64
	hasParent bool
	tokens    []uint32
}

// replica is a prefix cache by its events alone.
type replica struct {
	size    int
	held    map[uint64]heldBlock
	cleared int
	evicted int
}

// read applies what e tells, and then e has to hold just that.
func (r *replica) read(t interface{ Fatalf(string, ...any) }, e *engine.Engine) {
	for _, ev := range e.CacheEvents(nil) {
		switch ev.Kind {
		case engine.Stored:
			if len(ev.Hashes) == 0 || len(ev.Tokens) != r.size*len(ev.Hashes) {
				t.Fatalf("%d blocks with %d tokens", len(ev.Hashes), len(ev.Tokens))
			}
			parent, has := ev.Parent, ev.HasParent
			for i, h := range ev.Hashes {
				if _, ok := r.held[h]; ok {
					t.Fatalf("block %x is stored twice", h)
				}
				if _, ok := r.held[parent]; has && !ok {
					t.Fatalf("block %x is stored after %x, which is not", h, parent)
				}
				r.held[h] = heldBlock{parent, has, slices.Clone(ev.Tokens[i*r.size : (i+1)*r.size])}
				parent, has = h, true
			}
		case engine.Evicted:
			for _, h := range ev.Hashes {
				if _, ok := r.held[h]; !ok {
					t.Fatalf("block %x is evicted and not there", h)
				}
				delete(r.held, h)
				r.evicted++
			}
		case engine.Cleared:
			clear(r.held)
			r.cleared++
		}
	}
	n := 0
	e.Cached(func(hash, parent uint64, hasParent bool) {
		n++
		if b, ok := r.held[hash]; !ok || b.hasParent != hasParent || hasParent && b.parent != parent {
			t.Fatalf("the cache has block %x after %x, %v; events tell of %+v, %v", hash, parent, hasParent, b, ok)
		}
	})
	if n != len(r.held) {
		t.Fatalf("the cache has %d blocks, events tell of %d", n, len(r.held))
	}
}

func TestCacheEvents(t *testing.T) {
	cfg := base()
	cfg.BlockSize, cfg.KVBlocks, cfg.CacheEvents = 4, 4, true
	e := must(engine.New(cfg, start))
	r := replica{size: 4, held: map[uint64]heldBlock{}}
	run := func(req engine.Request) {
		t.Helper()
		submit(t, e, 0, req)
		for {
			due, ok := e.Next()
			if !ok {
				break
			}
			e.Advance(due, nil)
			r.read(t, e)
		}
	}
	run(engine.Request{ID: 1, Prompt: prompt(1, 9), Output: prompt(2, 4)}) // 13 tokens, the last not in memory
	if len(r.held) != 3 {
		t.Errorf("%d blocks, want 3", len(r.held))
	}
	for _, b := range r.held {
		if _, after := r.held[b.parent]; !b.hasParent && !slices.Equal(b.tokens, prompt(1, 9)[:4]) || b.hasParent && !after {
			t.Errorf("block %+v", b)
		}
	}
	run(engine.Request{ID: 2, Prompt: prompt(3, 13), Output: prompt(4, 1)}) // needs all four
	if len(r.held) != 3 || r.evicted != 3 {
		t.Errorf("%d blocks, %d evicted, want 3 and 3", len(r.held), r.evicted)
	}
	submit(t, e, 1e6, engine.Request{ID: 3, Prompt: prompt(3, 5), Output: prompt(4, 9)})
	if e.ClearCache(at(1e6)) {
		t.Error("ClearCache() = true while a request holds blocks")
	}
	r.read(t, e)
	if _, found := e.Abort(3, at(1e6)); !found || !e.ClearCache(at(1e6)) || !e.ClearCache(at(1e6)) {
		t.Error("ClearCache() = false with nothing held")
	}
	r.read(t, e)
	if len(r.held) != 0 || r.cleared != 2 || e.Stats().CachedBlocks != 0 {
		t.Errorf("%d blocks, %d clears, %d cached; want 0, 2, 0", len(r.held), r.cleared, e.Stats().CachedBlocks)
	}
	if err := e.Check(); err != nil {
		t.Error(err)
	}
	run(engine.Request{ID: 4, Prompt: prompt(1, 9), Output: prompt(2, 1)})
	if len(r.held) != 2 || e.Stats().CachedBlocks != 2 {
		t.Errorf("%d blocks after a clear, want 2", len(r.held))
	}
}

// TestCacheEventsAreOff: nothing piles up where nobody reads.
func TestCacheEventsAreOff(t *testing.T) {
	e := must(engine.New(base(), start))
	submit(t, e, 0, engine.Request{ID: 1, Prompt: prompt(1, 100), Output: prompt(2, 1)})
	e.Advance(at(1e6), nil)
	if got := e.CacheEvents(nil); len(got) > 0 || e.Stats().CachedBlocks == 0 {
		t.Errorf("%d events, %d blocks", len(got), e.Stats().CachedBlocks)
	}
}

// TestRandomCallsTellTheCache: whatever is done to an engine, events and cache agree, and no block
// is told of before the one that it follows. Few different tokens and little memory make requests
// take each other's names for blocks.
func TestRandomCallsTellTheCache(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := engine.Config{
			PrefillTokensPerSecond: rapid.Float64Range(100, 1e4).Draw(t, "rate"),
			ITL:                    10 * time.Millisecond,
			MaxNumSeqs:             rapid.IntRange(1, 5).Draw(t, "seqs"),
			BlockSize:              rapid.IntRange(1, 4).Draw(t, "block"),
			KVBlocks:               rapid.IntRange(4, 24).Draw(t, "blocks"),
			Speed:                  1,
			CacheEvents:            true,
		}
		now := start
		e := must(engine.New(cfg, now))
		r := replica{size: cfg.BlockSize, held: map[uint64]heldBlock{}}
		id := uint64(0)
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) {
				r.read(t, e)
				if err := e.Check(); err != nil {
					t.Fatal(err)
				}
			},
			"submit": func(t *rapid.T) {
				id++
				prompt := rapid.SliceOfN(rapid.Uint32Range(0, 1), 1, 20).Draw(t, "prompt")
				if rapid.Bool().Draw(t, "plain") {
					clear(prompt) // so that what one generates is another's prompt
				}
				out := rapid.IntRange(0, 30).Draw(t, "output")
				_ = e.Submit(engine.Request{ID: id, Prompt: prompt, Output: make([]uint32, out),
					Priority: rapid.IntRange(-1, 1).Draw(t, "priority")}, now) // it may be too long
			},
			"abort": func(t *rapid.T) { e.Abort(uint64(rapid.IntRange(1, int(id)+1).Draw(t, "id")), now) },
			"clear": func(t *rapid.T) {
				used := e.Stats().UsedBlocks
				if done := e.ClearCache(now); done && e.Stats().CachedBlocks > 0 || !done && used == 0 {
					t.Fatalf("ClearCache() = %v with %d used, then %d cached", done, used, e.Stats().CachedBlocks)
				}
			},
			"advance": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(0, 100_000_000).Draw(t, "ns")))
				e.Advance(now, nil)
			},
		})
	})
}

// TestBlockAfterOneThatIsNotComputed: a prompt has the name of a block and is not computed yet, while
// another request generates the same text, and more. What that stores is told of later, or never.
func TestBlockAfterOneThatIsNotComputed(t *testing.T) {
	for _, aborted := range []bool{false, true} {
		cfg := base()
		cfg.BlockSize, cfg.KVBlocks, cfg.CacheEvents = 2, 1000, true
		cfg.PrefillTokensPerSecond = 100
		e := must(engine.New(cfg, start))
		r := replica{size: 2, held: map[uint64]heldBlock{}}
		text := prompt(1, 30)
		submit(t, e, 0, engine.Request{ID: 1, Prompt: text[:2], Output: text[2:]})
		var now time.Time
		step := func() bool {
			due, ok := e.Next()
			if ok {
				now = due
				e.Advance(now, nil)
				r.read(t, e)
			}
			return ok
		}
		for e.Stats().Decoding == 0 {
			step()
		}
		// One with a long prompt before it, so that the other's waits; ten tokens of that are text's.
		if err := e.Submit(engine.Request{ID: 2, Prompt: prompt(9, 500), Output: prompt(2, 1)}, now); err != nil {
			t.Fatal(err)
		}
		if err := e.Submit(engine.Request{ID: 3, Prompt: text[:10], Output: prompt(2, 1)}, now); err != nil {
			t.Fatal(err)
		}
		for e.Stats().Decoding > 0 {
			step()
		}
		// The first block and none of those from the sixth on, which the first request has stored.
		if len(r.held) != 1 {
			t.Fatalf("%d blocks while the second to fifth are not computed, want 1", len(r.held))
		}
		want := 14 + 250
		if aborted {
			e.Abort(3, now)
			want = 1 + 250
		}
		for step() {
		}
		if len(r.held) != want {
			t.Errorf("aborted %v: %d blocks at the end, want %d", aborted, len(r.held), want)
		}
	}
}
