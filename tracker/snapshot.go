package tracker

import "time"

// Standing is a live reservation in the form in which it can be booked again after a restart.
type Standing struct {
	Reservation               // as it is now: no prefill tokens after PrefillDone, output among the DecodeBlocks
	Age         time.Duration // since it was booked
	Decay       *float64      // the weight last given to its blocks, or nil
}

// Standing lists the live reservations, those of a rank in the order of booking. One that ends and
// is booked again meanwhile may be listed twice.
func (t *Tracker) Standing(now time.Time) []Standing {
	t.lock()
	defer t.mu.Unlock()
	var all []Standing
	for slot := 0; slot < len(t.slots); slot++ {
		r := t.slots[slot]
		if r == nil || r.requests == 0 {
			continue
		}
		for _, l := range []*bookings{&r.lasting, &r.expiring} {
			for b := l.front; b != nil; b = b.links[inBooks].next {
				all = append(all, b.standing(now))
			}
		}
		t.breathe()
	}
	return all
}

func (b *booking) standing(now time.Time) Standing {
	s := Standing{Age: now.Sub(b.booked), Reservation: Reservation{
		ID: b.id, Rank: b.rank.Rank, DecodeBlocks: b.private, Expires: b.expires,
	}}
	if b.last != nil {
		s.Hashes = b.last.path()
	}
	if b.open {
		s.PrefillTokens = b.prefillTokens
		if b.timed {
			s.PrefillTime = new(b.prefillTime)
		}
	}
	if b.decayed {
		s.Decay = new(float64(whole-b.less) / whole)
	}
	return s
}

// Restore books again what Standing has listed, with its age; prefills that fall begin anew. It
// returns ErrUnknownRank, ErrDuplicate, or ErrExpired if it is too old; then nothing has changed.
// Decay is for the caller to give by Grow after the last one is booked, since it depends on who
// shares blocks. Loads are what they were, but for blocks that were decayed before others came to
// share them, or after those that shared them had gone: their weights are not in the list.
func (t *Tracker) Restore(s Standing, now time.Time) error {
	t.lock()
	defer t.mu.Unlock()
	rank := t.rankLocked(s.Rank)
	switch {
	case rank == nil:
		return ErrUnknownRank
	case t.bookings.m[s.ID] != nil:
		return ErrDuplicate
	case s.Expires && s.Age > t.cfg.ExpireAfter:
		return ErrExpired
	}
	b := t.bookLocked(s.Reservation, rank, now)
	b.booked = now.Add(-max(s.Age, 0))
	return nil
}
