package tracker

import (
	"time"

	"spillway/worker"
)

// Expired is a reservation that was booked too long ago.
type Expired struct {
	ID   string
	Rank worker.Rank
}

// checkLocked tells whether a rank may be looked at for what has expired, and notes that it is.
func (t *Tracker) checkLocked(r *rankBook, now time.Time) bool {
	if now.Sub(r.checked) < t.cfg.CheckEvery {
		return false
	}
	r.checked = now
	return true
}

// expireLocked frees what is older than the limit on a rank and appends it to dst.
func (t *Tracker) expireLocked(r *rankBook, now time.Time, dst []Expired) []Expired {
	for b := r.expiring.front; b != nil && now.Sub(b.booked) > t.cfg.ExpireAfter; b = r.expiring.front {
		dst = append(dst, Expired{b.id, r.Rank})
		t.freeLocked(b, now)
		t.expired++
	}
	return dst
}

// Expire frees reservations that can expire and are older than Config.ExpireAfter, on those ranks
// that have not been looked at within Config.CheckEvery, and returns them. Reserve and Adopt do the
// same for their rank alone.
func (t *Tracker) Expire(now time.Time) []Expired {
	var gone []Expired
	t.lock()
	defer t.mu.Unlock()
	for slot := 0; slot < len(t.slots); slot++ { // a rank that moves has just been made
		if r := t.slots[slot]; r != nil && t.checkLocked(r, now) {
			gone = t.expireLocked(r, now, gone)
		}
		if slot%portion == portion-1 {
			t.breathe()
		}
	}
	return gone
}

// ExpiredTotal is how many reservations have expired.
func (t *Tracker) ExpiredTotal() uint64 {
	t.lock()
	defer t.mu.Unlock()
	return t.expired
}

// Idle lists the reservations that have made no progress since the given time: candidates for a
// leak, if their request has ended too. Those that expire by themselves are not among them.
func (t *Tracker) Idle(since time.Time) []string {
	t.lock()
	defer t.mu.Unlock()
	var ids []string
	for id, b := range t.bookings.m {
		if !b.expires && b.progress.Before(since) {
			ids = append(ids, id)
		}
	}
	return ids
}

// Held tells whether a rank has a reservation that has made no progress since the given time.
func (t *Tracker) Held(r worker.Rank, since time.Time) bool {
	t.lock()
	defer t.mu.Unlock()
	rank := t.rankLocked(r)
	if rank == nil {
		return false
	}
	for _, l := range []*bookings{&rank.lasting, &rank.expiring} {
		for b := l.front; b != nil; b = b.links[inBooks].next {
			if b.progress.Before(since) {
				return true
			}
		}
	}
	return false
}
