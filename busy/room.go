package busy

import (
	"math"

	"spillway/worker"
)

// Unlimited is the limit of a Room to which no check applies.
const Unlimited = math.MaxUint64

// Room is a rank that may be chosen, with the greatest load at which it is still not over a
// limit. A load is over exactly if it is greater than the number given here; the request that
// is about to be booked is not counted.
type Room struct {
	DP               uint32
	MaxDecodeBlocks  uint64
	MaxPrefillTokens uint64
}

// Limits turns the fractions into counts: the greatest numbers of promised blocks and tokens
// that Check does not call over. A capacity of 0 is unknown. ranks is the number of ranks that
// share the load evenly, 1 if it is the rank's own.
func (t Thresholds) Limits(totalBlocks, maxBatchedTokens uint64, ranks int) (decodeBlocks, prefillTokens uint64) {
	decodeBlocks, prefillTokens = Unlimited, Unlimited
	n := float64(max(ranks, 1))
	if t.DecodeFrac != nil && totalBlocks > 0 {
		limit, total := *t.DecodeFrac, float64(totalBlocks)
		decodeBlocks = greatest(limit*total*n, func(a uint64) bool { return float64(a)/n/total > limit })
	}
	if t.PrefillTokens != nil {
		limit := float64(*t.PrefillTokens)
		prefillTokens = greatest(limit*n, func(p uint64) bool { return float64(p)/n > limit })
	}
	if t.PrefillFrac != nil && maxBatchedTokens > 0 {
		limit, budget := *t.PrefillFrac, float64(maxBatchedTokens)
		byFrac := greatest(limit*budget*n, func(p uint64) bool { return float64(p)/n/budget > limit })
		prefillTokens = min(prefillTokens, byFrac)
	}
	return decodeBlocks, prefillTokens
}

// greatest returns the greatest v that is not over, or Unlimited if none is over. over must be
// monotone, as rounded division is, and false for 0. guess is close to the answer.
func greatest(guess float64, over func(uint64) bool) uint64 {
	if !over(math.MaxUint64) {
		return Unlimited
	}
	// Invariant from here: low is not over, high is.
	low, high := uint64(0), uint64(math.MaxUint64)
	start := uint64(0)
	if guess >= 1<<63 {
		start = 1 << 63
	} else if guess > 0 {
		start = uint64(guess)
	}
	if over(start) {
		high = start
		for step := uint64(1); high > step; step *= 2 {
			if v := high - step; !over(v) {
				low = v
				break
			} else {
				high = v
			}
		}
	} else {
		low = start
		for step := uint64(1); high-low > step; step *= 2 {
			if v := low + step; over(v) {
				high = v
				break
			} else {
				low = v
			}
		}
	}
	for high-low > 1 {
		if mid := low + (high-low)/2; over(mid) {
			high = mid
		} else {
			low = mid
		}
	}
	return low
}

// FreeRanks appends to dst the ranks of a worker that may be chosen: those that are not busy.
// It appends nothing if the worker is unknown, not routable or busy. Without thresholds all
// ranks may be chosen, marked ones only if there are no others. Where the engine picks the
// rank there is one Room, for worker.AnyDP, and its limits are for the whole worker.
func (l *List) FreeRanks(id worker.ID, dst []Room) []Room {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.workers[id]
	if e == nil || !e.routable || e.busy {
		return dst
	}
	set := l.thresholds.Any()
	if e.engineRouted() {
		if !set {
			return append(dst, Room{worker.AnyDP, Unlimited, Unlimited})
		}
		return append(dst, l.sharedRoomLocked(e))
	}
	for _, r := range e.ranks {
		if set && r.checks.Busy() || !set && e.marked(r) && !e.allMarked {
			continue
		}
		dst = append(dst, l.roomLocked(e, r))
	}
	return dst
}

// sharedRoomLocked is the room of a worker that spreads its load itself: that of its free rank
// with the highest limits. The present load is within them, because that rank is free.
func (l *List) sharedRoomLocked(e *entry) Room {
	var best Room
	for _, r := range e.ranks {
		if r.checks.Busy() {
			continue
		}
		room := l.roomLocked(e, r)
		if room.MaxDecodeBlocks > best.MaxDecodeBlocks ||
			room.MaxDecodeBlocks == best.MaxDecodeBlocks && room.MaxPrefillTokens > best.MaxPrefillTokens {
			best = room
		}
	}
	best.DP = worker.AnyDP
	return best
}

// roomLocked returns the limits of a rank, computed anew only if what they rest on changed.
func (l *List) roomLocked(e *entry, r *rank) Room {
	basis := roomBasis{e.totalBlocks(r), e.maxBatchedTokens(r), e.sharers(), l.generation}
	if r.basis != basis {
		r.basis = basis
		r.room.MaxDecodeBlocks, r.room.MaxPrefillTokens =
			l.thresholds.Limits(basis.totalBlocks, basis.maxBatchedTokens, basis.sharers)
	}
	r.room.DP = e.number(r)
	return r.room
}

// roomBasis is what the limits of a rank were computed from.
type roomBasis struct {
	totalBlocks, maxBatchedTokens uint64
	sharers                       int
	generation                    uint64 // of the thresholds; never 0 once there is a List
}
