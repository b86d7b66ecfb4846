package router

import (
	"errors"
	"fmt"
	"time"

	"github.com/zeebo/xxh3"

	"spillway/tracker"
	"spillway/worker"
)

// SessionEffect is what the session of a request did to its selection.
type SessionEffect uint8

// The effects.
const (
	NoSession    SessionEffect = iota // the request is of none, or sessions are off
	SessionNew                        // none of it was known
	SessionKept                       // it stays where it was
	SessionMoved                      // there was no room for it there, or its worker is gone
)

// maxSessions bounds the sessions that one partition remembers, at some 100 bytes each.
const maxSessions = 1 << 17

// maxSessionSecs is a year.
const maxSessionSecs = 365 * 24 * 60 * 60

func checkSessionTTL(secs *uint32) error {
	if secs == nil || *secs >= 1 && *secs <= maxSessionSecs {
		return nil
	}
	return fmt.Errorf("router-session-affinity-ttl-secs: %d is not within 1..%d", *secs, maxSessionSecs)
}

// sessions remembers where sessions were served last. Beyond the bound, and after the time, those go that
// have been idle for longest.
type sessions struct {
	ttl   time.Duration // 0: none is remembered
	limit int
	byKey map[sessionKey]*session
	ring  session // of all, the longest idle one first
}

// sessionKey is a hash, since clients choose the names.
type sessionKey = xxh3.Uint128

type session struct {
	key        sessionKey
	rank       worker.Rank
	used       time.Time
	prev, next *session
}

func newSessions(ttl time.Duration, limit int) *sessions {
	s := &sessions{ttl: ttl, limit: limit, byKey: map[sessionKey]*session{}}
	s.ring.prev, s.ring.next = &s.ring, &s.ring
	return s
}

// rank is where a session was served last.
func (s *sessions) rank(name string, now time.Time) (worker.Rank, bool) {
	s.expire(now)
	one := s.byKey[xxh3.HashString128(name)]
	if one == nil {
		return worker.Rank{}, false
	}
	return one.rank, true
}

// bind remembers where a session is served.
func (s *sessions) bind(name string, rank worker.Rank, now time.Time) {
	s.expire(now)
	key := xxh3.HashString128(name)
	one := s.byKey[key]
	switch {
	case one != nil:
		one.leave()
	case len(s.byKey) >= s.limit:
		one = s.ring.next
		one.leave()
		delete(s.byKey, one.key)
	default:
		one = &session{}
	}
	*one = session{key: key, rank: rank, used: now, prev: s.ring.prev, next: &s.ring}
	one.prev.next, s.ring.prev = one, one
	s.byKey[key] = one
}

// expire forgets those that have been idle for too long.
func (s *sessions) expire(now time.Time) {
	for one := s.ring.next; one != &s.ring && now.Sub(one.used) > s.ttl; one = s.ring.next {
		one.leave()
		delete(s.byKey, one.key)
	}
}

func (one *session) leave() { one.prev.next, one.next.prev = one.next, one.prev }

// inSessionLocked is decideLocked for a request of a session: it goes where that was served last, as long
// as there is room.
func (p *Partition) inSessionLocked(q *Query, now time.Time) (Selection, error) {
	rank, known := p.sessions.rank(q.Session, now)
	var sel Selection
	err := tracker.ErrBusy
	if known && !q.pinned() {
		sel, err = p.resumeLocked(*q, rank, now)
	}
	if errors.Is(err, tracker.ErrBusy) {
		sel, err = p.decideLocked(q, now)
	}
	if err != nil {
		return sel, err
	}
	switch {
	case !known:
		sel.Session = SessionNew
	case rank == sel.Booked:
		sel.Session = SessionKept
	default:
		sel.Session = SessionMoved
	}
	if !q.NoBooking {
		p.sessions.bind(q.Session, sel.Booked, now)
	}
	return sel, nil
}

// resumeLocked books q on a rank, tracker.ErrBusy if that is busy or gone.
func (p *Partition) resumeLocked(q Query, rank worker.Rank, now time.Time) (Selection, error) {
	slot, ok := p.Busy.Slot(rank.Worker)
	if !ok {
		return Selection{}, tracker.ErrBusy
	}
	q.Worker = &rank.Worker
	if declares(p.slots[slot].worker, rank.DP) {
		q.DP = &rank.DP
	}
	return p.placeLocked(p.suitableLocked(p.Busy.Snapshot().FreeSlots, &q, q.Exclude), &q, false, now)
}
