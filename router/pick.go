package router

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"spillway/busy"
	"spillway/tracker"
	"spillway/worker"
)

// pickedLocked books q on the worker in slots that the mode picks, on the rank with the fewest requests, or
// on the next one if that has no room; tracker.ErrBusy if none has.
func (p *Partition) pickedLocked(slots []int32, q *Query, marked bool, now time.Time) (Selection, error) {
	for len(slots) > 0 {
		i := p.pickLocked(slots)
		c := &p.slots[slots[i]]
		sel, err := p.bookLocked(c, q, marked, now)
		if !errors.Is(err, tracker.ErrBusy) {
			if err == nil && q.Worker == nil {
				p.last = c.id
			}
			return sel, err
		}
		// The pinned rank is busy, or a report came in since the snapshot: look at the rest.
		p.fit = append(p.fit[:0], slots...)
		slots = slices.Delete(p.fit, i, i+1)
	}
	return Selection{}, tracker.ErrBusy
}

// pickLocked returns the index in fit, which is not empty, of the slot to try.
func (p *Partition) pickLocked(fit []int32) int {
	switch p.mode {
	case Random:
		return p.rng.IntN(len(fit))
	case PowerOfTwo:
		i := p.rng.IntN(len(fit))
		if len(fit) == 1 {
			return i
		}
		j := (i + 1 + p.rng.IntN(len(fit)-1)) % len(fit) // another one; which comes first is random
		if p.requests(fit[j]) < p.requests(fit[i]) {
			return j
		}
		return i
	case LeastLoaded:
		best, least, ties := 0, int64(0), 0
		for i, s := range fit {
			switch n := p.requests(s); {
			case ties == 0 || n < least:
				best, least, ties = i, n, 1
			case n == least:
				if ties++; p.rng.IntN(ties) == 0 {
					best = i
				}
			}
		}
		return best
	}
	// Round-robin goes by ID, not by a count: the set of free workers changes between requests.
	i, found := slices.BinarySearchFunc(fit, p.last, func(s int32, last worker.ID) int {
		return cmp.Compare(p.slots[s].id, last)
	})
	if found {
		i++
	}
	return i % len(fit)
}

func (p *Partition) requests(slot int32) int64 { return p.slots[slot].book.Requests() }

// bookLocked books q on a rank of the worker, tracker.ErrBusy if none is to spare.
func (p *Partition) bookLocked(c *candidate, q *Query, marked bool, now time.Time) (Selection, error) {
	p.rooms = p.Busy.FreeRanks(c.id, p.rooms[:0])
	c.multi = c.multi || len(p.rooms) > 1
	rooms := p.rooms
	if q.DP != nil {
		rooms = pinnedRoom(rooms, *q.DP, marked)
	}
	for len(rooms) > 0 {
		i := p.lightestLocked(c, rooms, now)
		sel, err := p.reserveLocked(c, q, rooms[i], now)
		if !errors.Is(err, tracker.ErrBusy) {
			return sel, err
		}
		rooms[i] = rooms[len(rooms)-1] // it was filled since FreeRanks looked
		rooms = rooms[:len(rooms)-1]
	}
	return Selection{}, tracker.ErrBusy
}

// pinnedRoom returns of rooms the one that a pin to a rank may use, in their place.
func pinnedRoom(rooms []busy.Room, dp uint32, marked bool) []busy.Room {
	for _, r := range rooms {
		if r.DP == dp || r.DP == worker.AnyDP {
			return append(rooms[:0], r)
		}
	}
	if marked && len(rooms) > 0 { // the worker is routable, and only a mark keeps the rank from us
		return append(rooms[:0], busy.Room{DP: dp, MaxDecodeBlocks: busy.Unlimited, MaxPrefillTokens: busy.Unlimited})
	}
	return nil
}

// lightestLocked returns the index of the rank with the fewest requests, ties broken at random.
// Ranks that only the engine reports come last: they may be left over from its former life.
func (p *Partition) lightestLocked(c *candidate, rooms []busy.Room, now time.Time) int {
	best, least, ties := 0, uint64(math.MaxUint64), 0
	for i, room := range rooms {
		n := p.Tracker.Load(worker.Rank{Worker: c.id, DP: room.DP}, now).Requests
		if c.worker.DPSize > 0 && room.DP != worker.AnyDP && !declares(c.worker, room.DP) {
			n += 1 << 63
		}
		switch {
		case n < least:
			best, least, ties = i, n, 1
		case n == least:
			if ties++; p.rng.IntN(ties) == 0 {
				best = i
			}
		}
	}
	return best
}

// reserveLocked books q in a room of the worker, tracker.ErrBusy if it is full.
func (p *Partition) reserveLocked(c *candidate, q *Query, room busy.Room, now time.Time) (Selection, error) {
	sel := Selection{
		Worker: c.worker, Rank: worker.Rank{Worker: c.id, DP: room.DP},
		MultiRank: c.multi && room.DP != worker.AnyDP,
		BlockSize: p.Busy.BlockSize(c.id),
	}
	r := tracker.Reservation{ID: q.Reservation, Rank: sel.Rank, PrefillTokens: q.PromptTokens}
	if !q.NoDecode {
		r.DecodeBlocks = q.PromptTokens / uint64(sel.BlockSize)
	}
	sel.Booked, sel.DecodeBlocks = r.Rank, r.DecodeBlocks
	limit := tracker.Limit{PrefillTokens: room.MaxPrefillTokens, DecodeBlocks: room.MaxDecodeBlocks}
	err := p.Tracker.Reserve(r, limit, now)
	if errors.Is(err, tracker.ErrUnknownRank) && p.Tracker.AddRank(r.Rank, now) { // the engine reports it, nobody declared it
		err = p.Tracker.Reserve(r, limit, now)
	}
	switch {
	case errors.Is(err, tracker.ErrBusy):
		return Selection{}, err
	case err != nil:
		return Selection{}, fmt.Errorf("router: reserve: %w", err)
	}
	p.Busy.Refresh(c.id, now)
	if room.DP == worker.AnyDP && q.DP != nil { // booked for the worker as a whole, but the client's word goes to the engine
		sel.Rank.DP, sel.MultiRank = *q.DP, c.worker.DPSize > 1
	}
	return sel, nil
}
