package router

import (
	"math"
	"math/bits"
	"slices"
	"sort"

	"spillway/worker"
)

// run is seats side by side.
type run struct{ first, n int32 }

// seatLocked makes what depends on who is registered.
func (p *Partition) seatLocked() {
	s := &p.scheduler
	s.all = nil
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
		s.byID.put(c.id, s.runs[slot], ranks)
	}
}

// lineUpLocked makes candidates of the ranks of the workers in slots, which are by worker ID.
func (p *Partition) lineUpLocked(slots []int32, q *Query) {
	s := &p.scheduler
	if !q.restricted() && len(q.Exclude) == 0 && len(q.Preferred) == 0 {
		// Then slots are those of a snapshot, which nobody changes: the same make the same candidates.
		if len(slots) > 0 && len(slots) == len(s.all) && &slots[0] == &s.all[0] {
			return
		}
		s.all = slots
	} else {
		s.all = nil
	}
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

// runs are runs by worker, for a look at thousands of them in one decision: a table of open
// addressing, at most half full.
type runs struct {
	at    []runAt
	shift uint // what is left of a hash is a place in at
}

type runAt struct {
	id worker.ID
	run
	from uint32 // DP of the first
	gaps bool   // the DPs do not follow each other
}

func newRuns(n int) runs {
	width := bits.Len(uint(2 * n))
	return runs{make([]runAt, 1<<width), uint(64 - width)}
}

// place is where id is, or would be put.
func (t *runs) place(id worker.ID) *runAt {
	i := uint64(id) * 0x9E3779B97F4A7C15 >> t.shift
	for t.at[i].n > 0 && t.at[i].id != id {
		i = (i + 1) & uint64(len(t.at)-1)
	}
	return &t.at[i]
}

// put adds the run of a worker, unless that is empty. ranks are by seat.
func (t *runs) put(id worker.ID, r run, ranks []worker.Rank) {
	if r.n == 0 {
		return
	}
	from, to := ranks[r.first].DP, ranks[r.first+r.n-1].DP
	*t.place(id) = runAt{id, r, from, to-from != uint32(r.n-1)}
}
