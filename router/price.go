package router

import (
	"math"

	"spillway/kvindex"
	"spillway/tracker"
	"spillway/worker"
)

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
	var at *runAt
	for i := range all {
		m := &all[i]
		if at == nil || at.n == 0 || at.id != m.Rank.Worker { // the index often tells of a worker's ranks one after the other
			at = s.byID.place(m.Rank.Worker)
		}
		seat := at.first + int32(m.Rank.DP-at.from)
		switch {
		case at.gaps:
			if seat = s.find(m.Rank, at.run); seat < 0 {
				continue
			}
		case m.Rank.DP-at.from >= uint32(at.n): // 0 for a worker that is not known
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

// price fills in the costs of all candidates and finds the lowest.
func (s *scheduler) price(q *Query, x *pricing) {
	s.lowest = nobody()
	i := 0
	for _, st := range s.stretches {
		from, to := int(st.first), int(st.first+st.n)
		costs := s.costs[i : i+int(st.n)]
		if x.rare {
			for j := range costs {
				costs[j] = s.terms(q, x, st.first+int32(j), st.factor).Cost
				s.lowest.add(i+j, costs[j])
			}
		} else if m := x.quick(costs, s.board.Loads[from:to], s.board.Held[from:to], s.credit[from:to], st.factor); m.cost < s.lowest.cost || s.lowest.first < 0 && m.first >= 0 {
			s.lowest = minimum{m.cost, i + m.first, m.ties}
		} else if m.cost == s.lowest.cost {
			s.lowest.ties += m.ties
		}
		i += len(costs)
	}
}

// quick is the cost of terms for many ranks, but for a shared cache, for workers that only decode
// and for more cached than the prompt has. It returns the lowest. Products are rounded on their own,
// so that both come to the same number where machines can multiply and add at once.
func (x *pricing) quick(costs []float64, loads []tracker.Figures, held []uint32, credits []float64, factor float64) minimum {
	scale, weight, isl, blocks, block := x.Scale, x.Requests, float64(x.isl), int64(x.blocks), x.block
	if !x.TrackPrefill {
		scale = 0
	}
	inverse := 0.0
	if x.tokens&(x.tokens-1) == 0 {
		inverse = 1 / block // of a power of two: to multiply by it is the same, and quicker
	}
	whole := float64(blocks)
	loads, held, credits = loads[:len(costs)], held[:len(costs)], credits[:len(costs)]
	least := nobody()
	for i := range costs {
		l := &loads[i]
		raw := l.PrefillTokens + isl
		if inverse > 0 {
			raw *= inverse
		} else {
			raw /= block
		}
		decode := l.DecodeBlocks + whole
		if held[i] != 0 { // few do
			decode = l.DecodeBlocks + float64(blocks-int64(held[i]))
		}
		if left := raw - credits[i]; left > 0 {
			decode += float64(scale * left)
		}
		cost := factor * (decode + float64(weight*l.Requests))
		costs[i] = cost
		if cost <= least.cost {
			least.add(i, cost)
		}
	}
	return least
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
