package router

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"spillway/busy"
	"spillway/tracker"
	"spillway/worker"
)

// scheduler is what a partition in KV mode decides with. Ranks have seats: their places in board,
// by worker, then DP. What is kept by seat are arrays of one length, so that one pass over them
// prices thousands of ranks. Candidates are the ranks that the request at hand may go to, numbered
// in the order of their seats.
type scheduler struct {
	board  tracker.Board
	runs   []run   // the ranks that are served of the worker in each slot of busy.List
	byID   runs    // the same by worker
	slotAt []int32 // by seat: the slot of its worker

	match  []int32   // by seat: 1 + the index of what the rank has of the prompt, 0 if that is nothing
	credit []float64 // by seat: of what it has
	marked []int32   // the seats of which match is not 0

	stretches []stretch // of candidates
	all       []int32   // the slots of which stretches were made, if they are all and none is preferred; else nil
	costs     []float64 // by candidate; not-a-number once it is known to have no room
	lowest    minimum   // of costs
	shares    []float64 // scratch of draw
}

// stretch is candidates side by side, the costs of which have the same factor.
type stretch struct {
	run
	factor float64
}

// cheapestLocked books q on the rank with the lowest cost of the workers in slots, tracker.ErrBusy
// if none has room. With marked, the mark of a pinned rank does not matter. p.fit stays as it is.
func (p *Partition) cheapestLocked(slots []int32, q *Query, marked bool, now time.Time) (Selection, error) {
	s, x := &p.scheduler, p.pricing(q)
	s.unmark()
	if p.Tracker.Read(x.hashes, now, &s.board) {
		p.seatLocked()
	}
	p.lineUpLocked(slots, q)
	s.mark(q, &x)
	s.price(q, &x)
	if q.Explain != nil {
		*q.Explain = s.explain(q, &x, (*q.Explain)[:0])
	}
	for swept := false; ; {
		i := p.chooseLocked(x.Temperature)
		if i < 0 {
			return Selection{}, tracker.ErrBusy
		}
		sel, err := p.takeLocked(s.seat(i), q, &x, marked, now)
		switch {
		case errors.Is(err, errMoreRanks):
			return p.cheapestLocked(slots, q, marked, now)
		case !errors.Is(err, tracker.ErrBusy):
			return sel, err
		}
		s.costs[i] = math.NaN()
		if !swept { // look at all at once rather than choose one busy rank after the other
			p.sweepLocked(q, marked)
			swept = true
		}
		s.lowest = lowest(s.costs)
	}
}

// chooseLocked returns a candidate, or -1 if none is left.
func (p *Partition) chooseLocked(temperature float64) int {
	s := &p.scheduler
	if temperature > 0 {
		s.shares = slices.Grow(s.shares[:0], len(s.costs))[:len(s.costs)]
		return drawAbove(s.lowest, s.costs, s.shares, temperature, p.rng.Float64())
	}
	if m := s.lowest; m.ties > 1 {
		return nth(s.costs, m.cost, p.rng.IntN(m.ties))
	}
	return s.lowest.first
}

// errMoreRanks means that a worker has ranks which were not known.
var errMoreRanks = errors.New("the worker has more ranks than were known")

// takeLocked books the request on a rank, tracker.ErrBusy if that is full.
func (p *Partition) takeLocked(seat int32, q *Query, x *pricing, marked bool, now time.Time) (Selection, error) {
	s := &p.scheduler
	rank, slot := s.board.Ranks[seat], s.slotAt[seat]
	c := &p.slots[slot]
	room, more := p.roomLocked(c, s.runs[slot], rank.DP, marked && q.DP != nil, now)
	switch {
	case more:
		return Selection{}, errMoreRanks
	case room == nil:
		return Selection{}, tracker.ErrBusy
	}
	t := s.terms(q, x, seat, 1)
	sel := Selection{
		Worker: c.worker, Rank: rank, Booked: rank, MultiRank: c.multi && rank.DP != worker.AnyDP,
		BlockSize: p.Busy.BlockSize(c.id), DecodeBlocks: x.blocks,
		EffectivePrefillTokens: t.EffectivePrefillTokens, CachedTokens: t.CachedTokens,
		OverlapBlocks: x.OverlapBlocks(t.Overlap), PotentialBlocks: t.DecodeBlocks, TracksPrefill: x.TrackPrefill,
	}
	if q.NoBooking {
		if t.ActivePrefillTokens > room.MaxPrefillTokens || t.ActiveBlocks > room.MaxDecodeBlocks {
			return Selection{}, tracker.ErrBusy
		}
	} else if err := p.bookTermsLocked(q, x, &t, room, now); err != nil {
		return Selection{}, err
	}
	if rank.DP == worker.AnyDP && q.DP != nil { // booked for the worker as a whole, but the client's word goes to the engine
		sel.Rank.DP, sel.MultiRank = *q.DP, c.worker.DPSize > 1
	}
	return sel, nil
}

// roomLocked is the room on a rank, nil if there is none. It tells of more ranks, which are known
// from now on, if the worker declares none and its engine has reported some.
func (p *Partition) roomLocked(c *candidate, known run, dp uint32, marked bool, now time.Time) (room *busy.Room, more bool) {
	p.rooms = p.Busy.FreeRanks(c.id, p.rooms[:0])
	c.multi = c.multi || len(p.rooms) > 1
	if c.worker.DPSize == 0 && len(p.rooms) > int(known.n) {
		for _, r := range p.rooms {
			rank := worker.Rank{Worker: c.id, DP: r.DP}
			if p.scheduler.find(rank, known) < 0 && p.Tracker.AddRank(rank, now) {
				more = true
			}
		}
	}
	if rooms := pinnedRoom(p.rooms, dp, marked); len(rooms) > 0 {
		room = &rooms[0]
	}
	return room, more
}

// bookTermsLocked books the request on the rank of t.
func (p *Partition) bookTermsLocked(q *Query, x *pricing, t *Terms, room *busy.Room, now time.Time) error {
	r := tracker.Reservation{
		ID: q.Reservation, Rank: t.Rank, Hashes: x.hashes, DecodeBlocks: x.blocks - uint64(len(x.hashes)), Expires: q.Expires,
	}
	if x.TrackPrefill {
		r.PrefillTokens = t.EffectivePrefillTokens
	}
	limit := tracker.Limit{PrefillTokens: room.MaxPrefillTokens, DecodeBlocks: room.MaxDecodeBlocks}
	switch err := p.Tracker.Reserve(r, limit, now); {
	case errors.Is(err, tracker.ErrBusy):
		return err
	case err != nil:
		return fmt.Errorf("router: reserve: %w", err)
	}
	p.Busy.Refresh(t.Rank.Worker, now)
	return nil
}

// sweepLocked takes out all candidates that have no room.
func (p *Partition) sweepLocked(q *Query, marked bool) {
	s := &p.scheduler
	last := int32(-1)
	i := 0
	for _, st := range s.stretches {
		for seat := st.first; seat < st.first+st.n; seat++ {
			if slot := s.slotAt[seat]; slot != last {
				last = slot
				p.rooms = p.Busy.FreeRanks(p.slots[slot].id, p.rooms[:0])
			}
			dp := s.board.Ranks[seat].DP
			has := func(r busy.Room) bool { return r.DP == dp || r.DP == worker.AnyDP }
			if !slices.ContainsFunc(p.rooms, has) && !(marked && q.DP != nil && len(p.rooms) > 0) {
				s.costs[i] = math.NaN()
			}
			i++
		}
	}
}
