package monitor

import (
	"sync/atomic"
	"testing"
)

// TestKVQueueBounds fills a queue by number, and by bytes of all queues together. What was taken and
// is not done with counts; marks always find room.
func TestKVQueueBounds(t *testing.T) {
	var queued atomic.Int64
	q, other := newKVQueue(&queued), newKVQueue(&queued)
	for range maxKVBatches {
		if !q.put(kvBatch{payload: []byte{1}}) {
			t.Fatal("refused below the bound")
		}
	}
	reached := make(chan struct{}, 1)
	if q.put(kvBatch{payload: []byte{1}}) || !q.put(kvBatch{reached: reached}) {
		t.Error("put at the bound: want a batch refused and a mark taken")
	}
	all := q.take(nil)
	if q.put(kvBatch{}) {
		t.Error("what was taken and is not done with does not count")
	}
	for i := range all {
		q.done(&all[i])
	}
	if q.depth() != 0 || queued.Load() != 0 {
		t.Errorf("depth %d, %d bytes, want 0", q.depth(), queued.Load())
	}
	queued.Store(maxKVQueued - 1)
	if other.put(kvBatch{payload: []byte{1, 2}}) || !other.put(kvBatch{payload: []byte{1}}) {
		t.Error("put at the bound of bytes: want two refused and one taken")
	}
	queued.Add(1) // by somebody who finds no room, and has not taken it back yet
	marked := other.put(kvBatch{reached: reached})
	queued.Add(-1)
	if !marked || len(other.close()) != 1 || queued.Load() != maxKVQueued-1 {
		t.Errorf("close left %d bytes, or lost a mark", queued.Load()-(maxKVQueued-1))
	}
	if other.put(kvBatch{}) || other.put(kvBatch{reached: reached}) || queued.Load() != maxKVQueued-1 {
		t.Error("a closed queue takes something")
	}
}
