package router

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"sort"
	"time"

	"spillway/busy"
	"spillway/kvindex"
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
	costs     []float64 // by candidate; not-a-number once it is known to have no room
	weights   []float64 // scratch of draw
}

// run is seats side by side.
type run struct{ first, n int32 }

// runs are runs by worker, for a look at thousands of them in one decision: a table of open
// addressing, at most half full.
type runs struct {
	at    []runAt
	shift uint // what is left of a hash is a place in at
}

type runAt struct {
	id worker.ID
	run
}

func newRuns(n int) runs {
	width := bits.Len(uint(2 * n))
	return runs{make([]runAt, 1<<width), uint(64 - width)}
}

// place is where id is, or would be put.
func (t *runs) place(id worker.ID) *runAt {
	i := uint64(id) * 0x9E3779B97F4A7C15 >> t.shift
	for t.at[i].n > 0 && t.at[i].id != id {
		i = (i + 1) % uint64(len(t.at))
	}
	return &t.at[i]
}

func (t *runs) get(id worker.ID) run { return t.place(id).run }

// put adds the run of a worker, unless that is empty.
func (t *runs) put(id worker.ID, r run) {
	if r.n > 0 {
		*t.place(id) = runAt{id, r}
	}
}

// stretch is candidates side by side, the costs of which have the same factor.
type stretch struct {
	run
	factor float64
}

// pricing is what of a request all its costs depend on. The Query itself is handed on beside it,
// so that neither has to be on the heap.
type pricing struct {
	Weights
	tokens uint32  // in a block
	block  float64 // the same
	isl    uint64
	length float64  // blocks of the prompt, a last one that is not complete included
	hashes []uint64 // blocks that requests share
	blocks uint64   // all that the prompt takes where none is shared
	least  float64  // prefill backlog of the candidate that has the least, if the credit decays
	rare   bool     // something counts that the quick pass leaves out
}

const defaultBlockSize = 16 // tokens

func (p *Partition) pricing(q *Query) pricing {
	w := p.cost.Weights(q.Override)
	x := pricing{
		Weights: w, tokens: q.blockSize(), block: float64(q.blockSize()), isl: q.PromptTokens,
		length: max(math.Ceil(float64(q.PromptTokens)/float64(q.blockSize())), 1),
		rare:   len(q.Shared) > 0 || w.DecodeOnly && !w.TrackPrefill,
	}
	if p.cost.TrackActiveBlocks && !q.NoDecode {
		x.blocks = q.PrivateBlocks + uint64(len(q.SequenceHashes))
		if w.AssumeReuse {
			x.hashes = q.SequenceHashes
		}
	}
	return x
}

func (q *Query) blockSize() uint32 {
	if q.BlockSize == 0 {
		return defaultBlockSize
	}
	return q.BlockSize
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
	}
}

// chooseLocked returns a candidate, or -1 if none is left.
func (p *Partition) chooseLocked(temperature float64) int {
	s := &p.scheduler
	if temperature > 0 {
		s.weights = slices.Grow(s.weights[:0], len(s.costs))[:len(s.costs)]
		return draw(s.costs, s.weights, temperature, p.rng.Float64())
	}
	i, ties := lowest(s.costs)
	if ties > 1 {
		i = nth(s.costs, s.costs[i], p.rng.IntN(ties))
	}
	return i
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

// seatLocked makes what depends on who is registered.
func (p *Partition) seatLocked() {
	s := &p.scheduler
	ranks := s.board.Ranks
	s.byID = newRuns(len(p.slots))
	s.runs, s.slotAt = make([]run, len(p.slots)), make([]int32, len(ranks))
	s.match, s.credit = make([]int32, len(ranks)), make([]float64, len(ranks))
	for slot := range p.slots {
		c := &p.slots[slot]
		if c.worker == nil {
			continue
		}
		from, to := c.worker.DPStart, uint64(c.worker.DPStart)+uint64(c.worker.DPSize)
		switch {
		case c.worker.RankRouting == worker.RankByEngine:
			from, to = worker.AnyDP, worker.AnyDP+1
		case c.worker.DPSize == 0: // it has those that its engine reports
			from, to = 0, worker.AnyDP
		}
		first := sort.Search(len(ranks), func(i int) bool {
			return ranks[i].Worker > c.id || ranks[i].Worker == c.id && ranks[i].DP >= from
		})
		end := first
		for end < len(ranks) && ranks[end].Worker == c.id && uint64(ranks[end].DP) < to {
			s.slotAt[end] = int32(slot)
			end++
		}
		s.runs[slot] = run{int32(first), int32(end - first)}
		s.byID.put(c.id, s.runs[slot])
	}
}

// lineUpLocked makes candidates of the ranks of the workers in slots, which are by worker ID.
func (p *Partition) lineUpLocked(slots []int32, q *Query) {
	s := &p.scheduler
	s.stretches = s.stretches[:0]
	n := 0
	for _, slot := range slots {
		st := stretch{s.runs[slot], 1}
		w := p.slots[slot].worker
		if q.DP != nil && w.RankRouting != worker.RankByEngine {
			seat := s.find(worker.Rank{Worker: w.ID, DP: *q.DP}, st.run)
			if seat < 0 {
				continue
			}
			st.run = run{seat, 1}
		}
		if len(q.Preferred) > 0 && (q.Worker == nil || q.DP == nil) {
			st.factor = attraction(q.Preferred, w.Taints)
		}
		n += int(st.n)
		if last := len(s.stretches) - 1; last >= 0 && s.stretches[last].factor == st.factor && s.stretches[last].first+s.stretches[last].n == st.first {
			s.stretches[last].n += st.n
			continue
		}
		s.stretches = append(s.stretches, st)
	}
	s.costs = slices.Grow(s.costs[:0], n)[:n]
}

// attraction is the factor by which the taints of a worker change its costs.
func attraction(preferred []Preference, taints []string) float64 {
	weight := 0.0
	for _, p := range preferred {
		if slices.Contains(taints, p.Taint) {
			weight += float64(p.Weight)
		}
	}
	return math.Exp(-math.Tanh(weight))
}

// seat is that of a candidate.
func (s *scheduler) seat(candidate int) int32 {
	i := int32(candidate)
	for _, st := range s.stretches {
		if i < st.n {
			return st.first + i
		}
		i -= st.n
	}
	panic("router: there are not that many candidates")
}

// find is the seat of a rank within the run of its worker, or -1.
func (s *scheduler) find(r worker.Rank, in run) int32 {
	seats := s.board.Ranks[in.first : in.first+in.n]
	if len(seats) == 0 {
		return -1
	}
	if i := int(r.DP - seats[0].DP); i < len(seats) && seats[i] == r { // declared ranks have no gaps
		return in.first + int32(i)
	}
	i, ok := slices.BinarySearchFunc(seats, r.DP, func(a worker.Rank, dp uint32) int {
		return int(int64(a.DP) - int64(dp))
	})
	if !ok {
		return -1
	}
	return in.first + int32(i)
}

func (s *scheduler) unmark() {
	for _, seat := range s.marked {
		s.match[seat], s.credit[seat] = 0, 0
	}
	s.marked = s.marked[:0]
}

// mark notes by seat what the ranks have of the prompt. What ranks have that are not known does
// not count, nor what single ranks have of a worker that picks its rank itself.
func (s *scheduler) mark(q *Query, x *pricing) {
	if q.Overlaps == nil {
		return
	}
	all := q.Overlaps.Ranks
	decays := x.CreditDecay > 0 && x.TrackPrefill
	if decays && len(all) > 0 {
		x.least = s.leastPrefill()
	}
	var last worker.ID
	var ranks run // of the worker last
	for i := range all {
		m := &all[i]
		if m.Rank.Worker != last || i == 0 { // the index often tells of a worker's ranks one after the other
			last = m.Rank.Worker
			ranks = s.byID.get(last)
		}
		seat := s.find(m.Rank, ranks)
		if seat < 0 {
			continue
		}
		k := 1.0
		if decays {
			k = x.creditFactor(s.board.Loads[seat].PrefillTokens)
		}
		s.match[seat] = int32(i + 1)
		s.marked = append(s.marked, seat)
		if m.Host|m.Disk == 0 { // nearly all; credit would come to the same
			s.credit[seat] = float64(x.Credit*k) * float64(m.Device)
		} else {
			s.credit[seat] = x.credit(*m, 0, k)
		}
		if uint64(m.Device+m.Host+m.Disk)*uint64(x.tokens) > x.isl && x.CachedTokens(*m, x.tokens) > x.isl {
			x.rare = true
		}
	}
}

// leastPrefill is the least prefill backlog of all candidates.
func (s *scheduler) leastPrefill() float64 {
	least := math.Inf(1)
	for _, st := range s.stretches {
		for i := range s.board.Loads[st.first : st.first+st.n] {
			least = min(least, s.board.Loads[int(st.first)+i].PrefillTokens)
		}
	}
	return least
}

// creditFactor is how much of the credit for its device is left to a rank with that backlog.
func (x *pricing) creditFactor(prefill float64) float64 {
	backlog := max(prefill-x.least, 0) / x.block
	return 1 / (1 + float64(x.CreditDecay*backlog)/x.length)
}

// price fills in the costs of all candidates.
func (s *scheduler) price(q *Query, x *pricing) {
	i := 0
	for _, st := range s.stretches {
		from, to := int(st.first), int(st.first+st.n)
		costs := s.costs[i : i+int(st.n)]
		i += len(costs)
		if !x.rare {
			x.quick(costs, s.board.Loads[from:to], s.board.Held[from:to], s.credit[from:to], st.factor)
			continue
		}
		for j := range costs {
			costs[j] = s.terms(q, x, st.first+int32(j), st.factor).Cost
		}
	}
}

// quick is the cost of terms for many ranks, but for a shared cache, for workers that only decode
// and for more cached than the prompt has. Products are rounded on their own, so that both come to
// the same number where machines can multiply and add at once.
func (x *pricing) quick(costs []float64, loads []tracker.Figures, held []uint32, credits []float64, factor float64) {
	scale, weight, isl, blocks, block := x.Scale, x.Requests, float64(x.isl), int64(x.blocks), x.block
	if !x.TrackPrefill {
		scale = 0
	}
	inverse := 0.0
	if x.tokens&(x.tokens-1) == 0 {
		inverse = 1 / block // of a power of two: to multiply by it is the same, and quicker
	}
	loads, held, credits = loads[:len(costs)], held[:len(costs)], credits[:len(costs)]
	for i := range costs {
		l := &loads[i]
		raw := l.PrefillTokens + isl
		if inverse > 0 {
			raw *= inverse
		} else {
			raw /= block
		}
		cost := l.DecodeBlocks + float64(blocks-int64(held[i]))
		if left := raw - credits[i]; left > 0 {
			cost += float64(scale * left)
		}
		costs[i] = factor * (cost + float64(weight*l.Requests))
	}
}

// terms is how the cost of one rank comes about.
func (s *scheduler) terms(q *Query, x *pricing, seat int32, factor float64) Terms {
	l := &s.board.Loads[seat]
	t := Terms{
		Rank: s.board.Ranks[seat], CreditFactor: 1, Factor: factor,
		ActivePrefillTokens: l.Tokens(), ActiveBlocks: l.Blocks(), ActiveRequests: uint64(l.Requests),
		AdditionalBlocks: x.blocks - uint64(s.board.Held[seat]),
	}
	if i := s.match[seat]; i > 0 {
		t.Overlap = q.Overlaps.Ranks[i-1]
		t.Overlap.Rank = worker.Rank{}
	}
	t.SharedBlocks = Beyond(q.Shared, t.Overlap.Device)
	t.CachedTokens = x.CachedTokens(t.Overlap, x.tokens)
	t.EffectivePrefillTokens = x.isl - min(t.CachedTokens, x.isl)
	if x.TrackPrefill {
		t.RawBlocks = (l.PrefillTokens + float64(max(x.isl, t.CachedTokens))) / x.block
		if x.CreditDecay > 0 && t.Overlap != (kvindex.Match{}) {
			t.CreditFactor = x.creditFactor(l.PrefillTokens)
		}
	}
	t.CreditBlocks = x.credit(t.Overlap, t.SharedBlocks, t.CreditFactor)
	t.Prefill = x.Scale * max(0, t.RawBlocks-t.CreditBlocks)
	t.DecodeBlocks = t.ActiveBlocks + min(t.AdditionalBlocks, math.MaxUint64-t.ActiveBlocks)
	t.Requests = x.Requests * l.Requests
	decode := l.DecodeBlocks + float64(t.AdditionalBlocks)
	cost := decode + t.Prefill
	if x.DecodeOnly && !x.TrackPrefill && x.Credit > 0 {
		cost = max(0, decode-t.CreditBlocks)
	}
	t.Cost = factor * (cost + t.Requests)
	return t
}

// explain appends the terms of all candidates, with the costs that decide.
func (s *scheduler) explain(q *Query, x *pricing, dst []Terms) []Terms {
	i := 0
	for _, st := range s.stretches {
		for seat := st.first; seat < st.first+st.n; seat++ {
			t := s.terms(q, x, seat, st.factor)
			t.Cost = s.costs[i]
			dst = append(dst, t)
			i++
		}
	}
	return dst
}
