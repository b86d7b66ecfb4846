package sim

import (
	"sync"
	"time"

	"spillway/sim/engine"
	"spillway/wire"
)

// Bounds of what waits for a publisher. It never waits for anybody, so there is little.
const (
	maxFeedBatches = 1 << 16
	maxFeedBlocks  = 1 << 20
)

// feed is what a rank has told of its prefix cache, on its way to the rank's publisher.
type feed struct {
	filled chan struct{} // capacity 1: something waits

	mu      sync.Mutex // guards the fields below; a rank's lock may be held
	waiting []kvBatch
	blocks  int    // in waiting
	next    uint64 // sequence number
	dropped uint64 // batches that found no room; of those that one slow subscriber loses in a row, the first
}

// kvBatch is the events of one moment.
type kvBatch struct {
	sequence uint64
	at       time.Time
	events   []wire.KVPublished
}

func newFeed() *feed { return &feed{filled: make(chan struct{}, 1)} }

// put adds events, of which it keeps copies. It never waits: a batch that finds no room is dropped
// and leaves a hole in the sequence, as one does that vLLM fails to send.
func (f *feed) put(now time.Time, events []engine.CacheEvent, blockSize int) {
	b := kvBatch{at: now, events: make([]wire.KVPublished, len(events))}
	blocks, tokens := 0, 0
	for _, e := range events {
		blocks += len(e.Hashes)
		tokens += len(e.Tokens)
	}
	hashes, ids := make([]uint64, 0, blocks), make([]uint32, 0, tokens)
	for i, e := range events {
		hashes, ids = append(hashes, e.Hashes...), append(ids, e.Tokens...)
		b.events[i] = wire.KVPublished{
			Kind: kvKind(e.Kind), Parent: e.Parent, HasParent: e.HasParent, BlockSize: uint32(blockSize),
			Hashes: hashes[len(hashes)-len(e.Hashes):], Tokens: ids[len(ids)-len(e.Tokens):],
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	b.sequence = f.next
	f.next++
	if len(f.waiting) == maxFeedBatches || f.blocks+blocks > maxFeedBlocks && len(f.waiting) > 0 {
		f.dropped++
		return
	}
	f.waiting = append(f.waiting, b)
	f.blocks += blocks
	select {
	case f.filled <- struct{}{}:
	default:
	}
}

func kvKind(k engine.CacheKind) wire.KVKind {
	switch k {
	case engine.Stored:
		return wire.KVStore
	case engine.Evicted:
		return wire.KVRemove
	}
	return wire.KVClear
}

// take returns what waits.
func (f *feed) take() []kvBatch {
	f.mu.Lock()
	defer f.mu.Unlock()
	batches := f.waiting
	f.waiting, f.blocks = nil, 0
	return batches
}

// lost counts a batch that a subscriber was too slow for.
func (f *feed) lost() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dropped++
}

// told is the sequence number of the last batch, or nil if there was none, and how many of them
// were dropped.
func (f *feed) told() (last *uint64, dropped uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.next > 0 {
		last = new(f.next - 1)
	}
	return last, f.dropped
}
