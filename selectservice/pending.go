package selectservice

import (
	"container/list"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"spillway/httperr"
	"spillway/router"
	"spillway/tracker"
	"spillway/worker"
)

// pending keeps selections that were made and not booked, so that they can be by their ID alone.
// The oldest ones go first when there are too many.
type pending struct {
	ttl        time.Duration
	maxEntries int
	maxBytes   int

	mu    sync.Mutex // guards the fields below
	byKey map[pendingKey]*list.Element
	order list.List // of *selected, oldest first
	bytes int
}

type pendingKey struct {
	partition worker.Partition
	id        string
}

// selected is a selection in all that booking it asks for. It is read-only.
type selected struct {
	key      pendingKey
	rank     worker.Rank
	seqs     []uint64
	prefill  uint64 // tokens to book, 0 if prefill is not tracked
	expected *uint32
	lora     string
	made     time.Time
}

func (e *selected) size() int {
	return 8*len(e.seqs) + len(e.key.id) + len(e.key.partition.Model) + len(e.key.partition.Tenant) + len(e.lora)
}

func newPending(cfg Config) *pending {
	return &pending{
		ttl: time.Duration(cfg.CacheTTLSecs) * time.Second, maxEntries: cfg.CacheMaxEntries, maxBytes: cfg.CacheMaxBytes,
		byKey: map[pendingKey]*list.Element{},
	}
}

// pendingOf is what is kept of a selection.
func (s *Server) pendingOf(x *exchange, p *partition, sel router.Selection) *selected {
	e := &selected{
		key: pendingKey{p.key, *x.selectionID}, rank: sel.Booked, seqs: slices.Clone(x.hashed.seqs),
		expected: x.expected, lora: x.prompt.lora,
	}
	if sel.TracksPrefill {
		e.prefill = sel.EffectivePrefillTokens
	}
	return e
}

// put keeps e in place of an older one of its ID.
func (c *pending) put(e *selected, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e.made = now
	c.dropLocked(c.byKey[e.key])
	c.sweepLocked(now)
	c.byKey[e.key] = c.order.PushBack(e)
	c.bytes += e.size()
	for c.order.Len() > c.maxEntries || c.bytes > c.maxBytes {
		c.dropLocked(c.order.Front())
	}
}

// peek returns the selection of an ID, or nil.
func (c *pending) peek(key pendingKey, now time.Time) *selected {
	c.mu.Lock()
	defer c.mu.Unlock()
	if at := c.byKey[key]; at != nil && now.Sub(at.Value.(*selected).made) <= c.ttl {
		return at.Value.(*selected)
	}
	return nil
}

// consume forgets e, unless a newer one has its ID.
func (c *pending) consume(e *selected) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if at := c.byKey[e.key]; at != nil && at.Value.(*selected) == e {
		c.dropLocked(at)
	}
}

// discard forgets the selection of an ID.
func (c *pending) discard(key pendingKey) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dropLocked(c.byKey[key])
}

// sweep forgets those whose time is over.
func (c *pending) sweep(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sweepLocked(now)
}

func (c *pending) sweepLocked(now time.Time) {
	for at := c.order.Front(); at != nil && now.Sub(at.Value.(*selected).made) > c.ttl; at = c.order.Front() {
		c.dropLocked(at)
	}
}

func (c *pending) dropLocked(at *list.Element) {
	if at == nil {
		return
	}
	e := c.order.Remove(at).(*selected)
	delete(c.byKey, e.key)
	c.bytes -= e.size()
}

// held is how many selections are kept, and the memory that they take.
func (c *pending) held() (entries, bytes int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.order.Len(), c.bytes
}

// replay books a selection that was made before. It is kept for another try if that fails.
func (s *Server) replay(x *exchange, id string, now time.Time) (int, *httperr.Error) {
	e := s.pending.peek(pendingKey{x.partition(), id}, now)
	if e == nil {
		return 0, httperr.New(http.StatusNotFound, fmt.Sprintf("no pending selection %.256s for %s (it was never made here, was booked, or is too old)",
			id, s.catalog.name(x.partition())))
	}
	p, failed := s.catalog.usable(x.partition())
	if failed != nil {
		return 0, failed
	}
	x.expected, x.prompt.lora = e.expected, e.lora
	status, failed := s.reserve(x, p, tracker.Reservation{ID: id, Rank: e.rank, Hashes: e.seqs, PrefillTokens: e.prefill, Expires: true}, now)
	if failed == nil {
		s.pending.consume(e)
	}
	return status, failed
}
