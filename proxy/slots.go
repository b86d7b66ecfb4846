package proxy

import (
	"context"
	"sync"
	"time"

	"spillway/router"
)

// slot is one reservation of a request that is still there. It is part of its exchange.
type slot struct {
	id         string
	part       *router.Partition
	prefill    bool      // the prefill is not known to be done
	releaseAt  time.Time // when it is taken to be done all the same
	prev, next *slot     // guarded by slots.mu; nil when not in the list
}

// slots lists the live reservations, so that prefill load can be released on time and a
// reservation that nobody holds any more can be told from one that is merely old.
type slots struct {
	mu   sync.Mutex
	head slot // of a ring
}

func (l *slots) init() { l.head.prev, l.head.next = &l.head, &l.head }

func (l *slots) add(s *slot) {
	l.mu.Lock()
	s.prev, s.next = l.head.prev, &l.head
	s.prev.next, s.next.prev = s, s
	l.mu.Unlock()
}

// prefillDone marks the prefill of s as done; it reports whether it was not before.
func (l *slots) prefillDone(s *slot) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := s.prefill
	s.prefill = false
	return was
}

// remove takes s off the list. It reports false if it is not on it.
func (l *slots) remove(s *slot) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if s.next == nil {
		return false
	}
	s.prev.next, s.next.prev = s.next, s.prev
	s.prev, s.next = nil, nil
	return true
}

type reservation struct {
	id   string
	part *router.Partition
}

// due appends the reservations whose prefill is to be released at now.
func (l *slots) due(now time.Time, dst []reservation) []reservation {
	l.mu.Lock()
	defer l.mu.Unlock()
	for s := l.head.next; s != &l.head; s = s.next {
		if s.prefill && !s.releaseAt.IsZero() && !now.Before(s.releaseAt) {
			s.prefill = false
			dst = append(dst, reservation{s.id, s.part})
		}
	}
	return dst
}

func (l *slots) ids() map[string]bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	ids := map[string]bool{}
	for s := l.head.next; s != &l.head; s = s.next {
		ids[s.id] = true
	}
	return ids
}

const (
	releaseEvery = 50 * time.Millisecond // resolution of predicted prefill ends; the shortest prediction is 200 ms
	sweepEvery   = 30 * time.Second
	followEvery  = time.Second // for what workers have told meanwhile of their blocks, and for what has expired
)

// tick releases predicted prefill, lets waiting requests go, lets circuits become half-open, sends
// canaries and looks for clients that have left and for leaks until ctx ends.
func (s *Server) tick(ctx context.Context) {
	t := time.NewTicker(releaseEvery)
	defer t.Stop()
	var due []reservation
	sweep := time.Now().Add(sweepEvery)
	var canaries sync.WaitGroup
	defer canaries.Wait()
	look := time.Now()
	follow := look.Add(followEvery)
	leavers := look
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-t.C:
			due = s.slots.due(now, due[:0])
			for _, r := range due {
				s.endPrefill(r.part, r.id, now)
			}
			clear(due)
			s.peers.Range(func(_, p any) bool {
				p.(*peer).circuit.refresh(now)
				return true
			})
			if s.cfg.CanaryAfter > 0 && now.After(look) {
				s.canaries(ctx, now, &canaries)
				look = now.Add(canaryEvery(s.cfg.CanaryAfter))
			}
			if now.After(follow) {
				s.workers.follow()
				s.caches.expire(now)
				s.router.Partitions("", func(p *router.Partition) { p.Expire(now) })
				follow = now.Add(followEvery)
			}
			if !now.Before(leavers) {
				s.clients.look()
				leavers = now.Add(lookEvery)
			}
			if now.After(sweep) {
				s.sweep(now)
				s.forgetGone()
				sweep = now.Add(sweepEvery)
			}
			s.letAllGo("", now)
		}
	}
}

// sweep frees reservations that have made no progress for SlotMaxAge and whose request is gone.
// There should be none: each is a bug, counted and logged.
func (s *Server) sweep(now time.Time) {
	var idle []reservation
	s.router.Partitions("", func(p *router.Partition) {
		for _, id := range p.Tracker.Idle(now.Add(-s.cfg.SlotMaxAge)) {
			idle = append(idle, reservation{id, p})
		}
	})
	if len(idle) == 0 {
		return
	}
	live := s.slots.ids()
	for _, r := range idle {
		if !live[r.id] {
			s.free(r.part, r.id, now)
			s.metrics.leaks.Add(1)
			s.log.Error("a reservation had leaked", "model", r.part.Key.Model, "reservation", r.id)
		}
	}
}

// expect sets when the prefill of s is taken to be done; the zero time is never.
func (l *slots) expect(s *slot, at time.Time) {
	l.mu.Lock()
	s.releaseAt = at
	l.mu.Unlock()
}
