package replica

import (
	"sync"

	"spillway/wire"
)

const (
	maxBytes   = 256 << 20 // of what they refer to: hashes and texts
	batchSize  = 256       // events that are taken out together
	sparesKept = 4         // empty batches kept for later: what a queue needs that is never far behind
)

// queue hands events from any goroutine to one that takes them out in the same order. It never
// makes a sender wait: what finds it full is refused.
type queue struct {
	maxEvents, maxBytes int
	filled              chan struct{} // has a token if there may be something to take

	mu      sync.Mutex            // guards the fields below; nothing is called while it is held
	batches [][]wire.ReplicaEvent // none is empty; all but the last are full
	spares  [][]wire.ReplicaEvent
	events  int // put and not yet done with
	bytes   int // of those
	closed  bool
}

func newQueue(maxEvents int) *queue {
	return &queue{maxEvents: maxEvents, maxBytes: maxBytes, filled: make(chan struct{}, 1)}
}

// refusal is why a queue did not take an event.
type refusal uint8

const (
	taken refusal = iota
	full
	closed
)

// put adds an event, or tells why not.
func (q *queue) put(e *wire.ReplicaEvent) refusal {
	bytes := weight(e)
	q.mu.Lock()
	if q.closed || q.events >= q.maxEvents || q.bytes+bytes > q.maxBytes {
		why := full
		if q.closed {
			why = closed
		}
		q.mu.Unlock()
		return why
	}
	q.events++
	q.bytes += bytes
	last := len(q.batches) - 1
	if last < 0 || len(q.batches[last]) == batchSize {
		q.batches = append(q.batches, q.spareLocked())
		last++
	}
	q.batches[last] = append(q.batches[last], *e)
	q.mu.Unlock()
	select {
	case q.filled <- struct{}{}:
	default: // there is a token
	}
	return taken
}

func (q *queue) spareLocked() []wire.ReplicaEvent {
	if n := len(q.spares); n > 0 {
		b := q.spares[n-1]
		q.spares = q.spares[:n-1]
		return b
	}
	return make([]wire.ReplicaEvent, 0, batchSize)
}

// take takes out the oldest events; nil if there are none. They count as waiting until done is
// called with them.
func (q *queue) take() []wire.ReplicaEvent {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.batches) == 0 {
		return nil
	}
	b := q.batches[0]
	q.batches[0] = nil
	q.batches = q.batches[1:]
	return b
}

// done makes room for others. The batch must not be used any more.
func (q *queue) done(batch []wire.ReplicaEvent) {
	bytes := 0
	for i := range batch {
		bytes += weight(&batch[i])
	}
	events := len(batch)
	clear(batch) // lets go of hashes and texts
	q.mu.Lock()
	defer q.mu.Unlock()
	q.events -= events
	q.bytes -= bytes
	if len(q.spares) < sparesKept {
		q.spares = append(q.spares, batch[:0])
	}
}

// close refuses all further events and lets go of those that wait, of which it returns the number.
// What was taken out and is not yet done with is among them.
func (q *queue) close() (lost int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	lost = q.events
	q.closed = true
	q.batches, q.spares, q.events, q.bytes = nil, nil, 0, 0
	return lost
}

// depth is the number of events that wait.
func (q *queue) depth() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.events
}

// weight is how many bytes an event refers to, about.
func weight(e *wire.ReplicaEvent) int {
	return len(e.Model) + len(e.Tenant) + len(e.Reservation) + len(e.LoRA) + 8*len(e.Promise.Hashes)
}
