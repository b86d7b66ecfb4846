package tracker

import (
	"cmp"
	"slices"
	"time"

	"spillway/worker"
)

// Load is what a rank has been promised; zero for an unknown one.
func (t *Tracker) Load(r worker.Rank, now time.Time) Load {
	t.lock()
	defer t.mu.Unlock()
	if rank := t.rankLocked(r); rank != nil {
		return rank.load(now)
	}
	return Load{}
}

// Promised is Load as the busy rule asks for it.
func (t *Tracker) Promised(r worker.Rank, now time.Time) (decodeBlocks, prefillTokens uint64) {
	l := t.Load(r, now)
	return l.DecodeBlocks, l.PrefillTokens
}

// PrefillFalls is when the prefill tokens of a rank will have gone down to tokens, if nothing is
// booked or given back before; false means that they will not by themselves.
func (t *Tracker) PrefillFalls(r worker.Rank, tokens uint64) (time.Time, bool) {
	t.lock()
	defer t.mu.Unlock()
	if rank := t.rankLocked(r); rank != nil {
		return rank.prefills.fallsTo(tokens)
	}
	return time.Time{}, false
}

// PrefillRemaining is how long the open prefills of a rank are still expected to take; false if
// one of them has no expected time, or the rank is unknown.
func (t *Tracker) PrefillRemaining(r worker.Rank, now time.Time) (time.Duration, bool) {
	t.lock()
	defer t.mu.Unlock()
	if rank := t.rankLocked(r); rank != nil {
		return rank.prefills.remaining(now)
	}
	return 0, false
}

// RankLoad is the load of one rank of a worker.
type RankLoad struct {
	DP uint32
	Load
}

// Ranks appends to dst the loads of the ranks of one worker, by DP; nothing for an unknown one.
func (t *Tracker) Ranks(id worker.ID, now time.Time, dst []RankLoad) []RankLoad {
	from := len(dst)
	t.lock()
	if b := t.books[id]; b != nil {
		for dp, r := range b.ranks {
			dst = append(dst, RankLoad{dp, r.load(now)})
		}
	}
	t.mu.Unlock()
	slices.SortFunc(dst[from:], func(a, b RankLoad) int { return cmp.Compare(a.DP, b.DP) })
	return dst
}

// Loads are the loads of all ranks that are known, in no order.
func (t *Tracker) Loads(now time.Time) map[worker.Rank]Load {
	list := t.Project(nil, now, nil)
	all := make(map[worker.Rank]Load, len(list))
	for _, p := range list {
		all[p.Rank] = p.Load
	}
	return all
}

// Projection is what one more prompt would find on a rank.
type Projection struct {
	worker.Rank
	Load                    // without the prompt
	AdditionalBlocks uint64 // blocks of the prompt that the rank does not hold yet
}

// Potential is the load with the prompt booked, prefill being the tokens it adds.
func (p Projection) Potential(prefill uint64) (decodeBlocks, prefillTokens uint64) {
	return saturated(p.DecodeBlocks, p.AdditionalBlocks), saturated(p.PrefillTokens, prefill)
}

const (
	portion  = 256 // ranks that a read looks at without letting changes in between
	restarts = 3   // of a read over ranks that come and go meanwhile, before it holds them
)

// Project appends to dst, in no order, every rank that is known, with its load and what the prompt
// with these sequence hashes would add to its blocks. What is told of one rank is of one moment.
func (t *Tracker) Project(hashes []uint64, now time.Time, dst []Projection) []Projection {
	from := len(dst)
	t.lock()
	defer t.mu.Unlock()
	dst = slices.Grow(dst, len(t.slots))
	var room [16]step
	steps := room[:0]
	moves, restarted := t.moves, 0
	for slot := 0; slot < len(t.slots); slot += portion {
		steps = t.prompts.match(hashes, steps[:0])
		dst = t.portionLocked(slot, steps, uint64(len(hashes)), now, dst)
		if slot+portion >= len(t.slots) || restarted == restarts {
			continue
		}
		if t.breathe(); moves != t.moves { // a rank may have moved to where it is met again
			moves, restarted = t.moves, restarted+1
			slot, dst = -portion, dst[:from]
		}
	}
	return dst
}

// portionLocked is Project for the slots from first.
func (t *Tracker) portionLocked(first int, steps []step, blocks uint64, now time.Time, dst []Projection) []Projection {
	var overlap [portion]uint64
	end := min(first+portion, len(t.slots))
	for _, s := range steps { // the deeper ones come last
		i, _ := s.search(uint32(first))
		for _, h := range s.holders[i:] {
			if int(h.slot) >= end {
				break
			}
			overlap[int(h.slot)-first] = s.depth
		}
	}
	for i, r := range t.slots[first:end] {
		if r != nil {
			dst = append(dst, Projection{r.Rank, r.load(now), blocks - overlap[i]})
		}
	}
	return dst
}
