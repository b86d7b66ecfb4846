package engine_test

import (
	"fmt"
	"testing"

	"spillway/sim/engine"
)

// BenchmarkStep is one decode step with a full batch of 64.
func BenchmarkStep(b *testing.B) {
	cfg := base()
	cfg.MaxNumSeqs, cfg.BlockSize, cfg.KVBlocks = 64, 16, 8192
	b.ReportAllocs()
	zeros := make([]uint32, 1500)
	e := must(engine.New(cfg, start))
	now, id := start, uint64(0)
	var events []engine.Event
	refill := func() {
		for e.Stats().Running() < 64 {
			id++
			if err := e.Submit(engine.Request{ID: id, Prompt: prompt(uint32(id), 64), Output: zeros}, now); err != nil {
				b.Fatal(err)
			}
		}
	}
	for b.Loop() {
		refill()
		for stepped := false; !stepped; {
			now, _ = e.Next()
			events = e.Advance(now, events[:0])
			stepped = events[0].Kind == engine.Step
		}
	}
}

// BenchmarkSubmit is a long prompt that is new, and one that is in the cache.
func BenchmarkSubmit(b *testing.B) {
	for _, reuse := range []bool{false, true} {
		b.Run(fmt.Sprintf("tokens=100000/cached=%v", reuse), func(b *testing.B) {
			cfg := base()
			cfg.BlockSize, cfg.KVBlocks = 16, 8192
			b.ReportAllocs()
			e := must(engine.New(cfg, start))
			p := prompt(1, 100_000)
			now, id := start, uint64(0)
			for b.Loop() {
				id++
				if !reuse {
					p[0]++
				}
				if err := e.Submit(engine.Request{ID: id, Prompt: p}, now); err != nil {
					b.Fatal(err)
				}
				now, _ = e.Next()
				e.Advance(now, nil)
			}
		})
	}
}

// BenchmarkCacheEvents is a prompt of 4096 new tokens from Submit to its only token, without and with
// the journal of the prefix cache.
func BenchmarkCacheEvents(b *testing.B) {
	for _, on := range []bool{false, true} {
		b.Run(fmt.Sprint(on), func(b *testing.B) {
			cfg := base()
			cfg.BlockSize, cfg.KVBlocks, cfg.CacheEvents = 16, 8192, on
			e := must(engine.New(cfg, start))
			now, id := start, uint64(0)
			var events []engine.Event
			var changes []engine.CacheEvent
			text := make([]uint32, 4096)
			b.ReportAllocs()
			for b.Loop() {
				id++
				text[0] = uint32(id)
				if err := e.Submit(engine.Request{ID: id, Prompt: text, Output: text[:1]}, now); err != nil {
					b.Fatal(err)
				}
				for due, ok := e.Next(); ok; due, ok = e.Next() {
					now = due
					events = e.Advance(now, events[:0])
				}
				changes = e.CacheEvents(changes[:0])
			}
		})
	}
}
