package monitor

import (
	"sync"
	"sync/atomic"
)

const (
	maxKVBatches = 65_536  // that wait for one listener
	maxKVQueued  = 1 << 30 // bytes of payload that wait for all listeners together
)

// kvBatch is one message of a publisher of KV events, not decoded.
type kvBatch struct {
	seq     uint64
	payload []byte
	reached chan<- struct{} // if not nil, this is no batch but a mark, to be told of
	news    kvNews          // if not 0, this is no batch but something to know before the next
}

func (b *kvBatch) isBatch() bool { return b.reached == nil && b.news == 0 }

// kvQueue hands batches from the goroutine that receives to the one that applies them. The
// newest are dropped when there is no room, which a listener then sees as a gap.
type kvQueue struct {
	filled chan struct{} // has a token if there may be something to take
	queued *atomic.Int64 // bytes that wait for all listeners

	mu      sync.Mutex // guards the fields below; nothing is called while it is held
	batches []kvBatch  // put and not taken
	waiting int        // put and not yet done with, marks included
	closed  bool
}

func newKVQueue(queued *atomic.Int64) *kvQueue {
	return &kvQueue{filled: make(chan struct{}, 1), queued: queued}
}

// put adds a batch. It tells whether there was room; there always is for what is no batch, unless
// the queue is closed.
func (q *kvQueue) put(b kvBatch) bool {
	size := int64(len(b.payload))
	if q.queued.Add(size) > maxKVQueued && b.isBatch() {
		q.queued.Add(-size)
		return false
	}
	q.mu.Lock()
	if q.closed || q.waiting >= maxKVBatches && b.isBatch() {
		q.mu.Unlock()
		q.queued.Add(-size)
		return false
	}
	q.batches = append(q.batches, b)
	q.waiting++
	q.mu.Unlock()
	select {
	case q.filled <- struct{}{}:
	default: // there is a token
	}
	return true
}

// take takes out all batches, oldest first, and leaves room, which must be empty, in their place.
func (q *kvQueue) take(room []kvBatch) []kvBatch {
	q.mu.Lock()
	defer q.mu.Unlock()
	all := q.batches
	q.batches = room
	return all
}

// done makes room for another batch in place of b, and lets go of its payload.
func (q *kvQueue) done(b *kvBatch) {
	q.queued.Add(-int64(len(b.payload)))
	*b = kvBatch{}
	q.mu.Lock()
	q.waiting--
	q.mu.Unlock()
}

// close refuses all further batches and drops those that wait, but for marks, which it returns.
func (q *kvQueue) close() (marks []kvBatch) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	for _, b := range q.batches {
		q.queued.Add(-int64(len(b.payload)))
		if b.reached != nil {
			marks = append(marks, b)
		}
	}
	q.batches = nil
	return marks
}

// depth is the number of batches that wait or are being applied.
func (q *kvQueue) depth() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.waiting
}
