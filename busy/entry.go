package busy

import (
	"math"
	"slices"
	"time"

	"spillway/worker"
)

const (
	defaultBlockSize = 16 // tokens
	maxMissing       = 3  // pages in a row
)

// entry is what a List knows of one worker.
type entry struct {
	id    worker.ID
	w     *worker.Worker
	slot  int
	ranks []*rank // by DP, declared or observed; never empty: an undeclared, silent worker has one

	probed, healthy bool
	draining        bool
	circuitOpen     bool
	sampled         bool // a sample was ever stored
	inhibitedUntil  time.Time
	mark            mark // for all ranks

	busy, routable bool
	allMarked      bool      // every rank is marked
	due            time.Time // when the verdict may change by itself; zero: never
	toBusy, toFree uint64
	dropped        uint64 // samples for which there was no room
}

// rank is what a List knows of one rank.
type rank struct {
	dp       uint32 // the engine's label; entry.number is what others call it
	declared bool
	seen     bool // in the page that is being taken in
	missing  int  // successive pages without it
	wasFresh bool // a sample that is held was fresh once
	records  [numSources]record
	mark     mark

	held   Checks // limits it is over, hysteresis included
	over   Checks // held, and whether silence counts as load
	checks Checks // over and marks: the verdict

	basis roomBasis
	room  Room
}

// declare takes over the worker's record and the ranks that it declares.
func (e *entry) declare(w *worker.Worker) {
	e.w = w
	for _, r := range e.ranks {
		r.declared = false
	}
	for i := range min(w.DPSize, worker.MaxDPSize) {
		e.rank(w.DPStart + i).declared = true
	}
	// Ranks of a former declaration that are still reported stay until they are not, but not
	// beyond what one worker may have.
	for i := len(e.ranks) - 1; i >= 0 && len(e.ranks) > e.most(); i-- {
		if !e.ranks[i].declared {
			e.ranks = slices.Delete(e.ranks, i, i+1)
		}
	}
	e.prune()
}

// most is how many ranks the worker may have.
func (e *entry) most() int { return max(int(e.w.DPSize), worker.MaxReportedRanks) }

// single reports whether the worker is one rank with no number of its own.
func (e *entry) single() bool { return e.w.DPSize == 0 && len(e.ranks) == 1 }

func (e *entry) engineRouted() bool { return e.w.RankRouting == worker.RankByEngine }

// sharers is the number of ranks over which a booking of this worker is spread.
func (e *entry) sharers() int {
	if e.engineRouted() {
		return len(e.ranks)
	}
	return 1
}

// number is the rank number under which load is booked.
func (e *entry) number(r *rank) uint32 {
	if e.single() {
		return 0
	}
	return r.dp
}

func byDP(r *rank, dp uint32) int {
	switch {
	case r.dp < dp:
		return -1
	case r.dp > dp:
		return 1
	}
	return 0
}

// find returns the rank with that label, or nil.
func (e *entry) find(dp uint32) *rank {
	if i, ok := slices.BinarySearchFunc(e.ranks, dp, byDP); ok {
		return e.ranks[i]
	}
	return nil
}

// rank returns the rank with that label, made if needed.
func (e *entry) rank(dp uint32) *rank {
	i, ok := slices.BinarySearchFunc(e.ranks, dp, byDP)
	if !ok {
		e.ranks = slices.Insert(e.ranks, i, &rank{dp: dp})
	}
	return e.ranks[i]
}

// observe stores a sample and returns its rank, or nil if it was not stored.
func (e *entry) observe(s *Sample, now time.Time, staleAfter time.Duration) *rank {
	r := e.find(s.Rank.DP)
	if s.empty() {
		return r
	}
	if s.Rank.DP == worker.AnyDP {
		e.dropped++
		return nil
	}
	if r == nil && e.single() && !e.ranks[0].observed() {
		r = e.ranks[0] // the first sample names the rank
		r.dp = s.Rank.DP
	}
	if r == nil {
		if len(e.ranks) >= e.most() {
			e.dropped++
			return nil
		}
		r = e.rank(s.Rank.DP)
	}
	r.records[s.Source].merge(s)
	e.sampled = true
	if now.Sub(s.TakenAt) <= staleAfter {
		r.wasFresh = true
	}
	r.mark.sample(s.TakenAt)
	e.mark.sample(s.TakenAt)
	return r
}

// relabel renames the rank of a single-rank worker whose page shows one other label.
func (e *entry) relabel(page []Sample) {
	if !e.single() || len(page) == 0 {
		return
	}
	for i := range page {
		if page[i].Rank.DP != page[0].Rank.DP {
			return
		}
	}
	if page[0].Rank.DP != worker.AnyDP {
		e.ranks[0].dp = page[0].Rank.DP
	}
}

// countMissing ends a page: ranks that were absent for too long lose their records, unless
// an event told of them lately.
func (e *entry) countMissing(now time.Time, staleAfter time.Duration) {
	for _, r := range e.ranks {
		if r.seen {
			r.seen, r.missing = false, 0
			continue
		}
		if r.missing = min(r.missing+1, maxMissing); r.missing < maxMissing {
			continue
		}
		r.records[Scrape] = record{}
		if r.records[Event].stale(now, staleAfter) {
			r.records[Event] = record{}
		}
		r.wasFresh = r.wasFresh && r.observed()
	}
}

// restarted forgets what the engine said. What other routers have promised stays: it ends
// with their requests.
func (e *entry) restarted() {
	for _, r := range e.ranks {
		r.records[Scrape] = record{}
		r.records[Event].keep(decodeBlocks, prefillTokens)
		r.wasFresh = false
	}
}

// prune drops the ranks that are neither declared nor observed. One rank always stays: the
// one of a worker that declares none, with what is held against it.
func (e *entry) prune() {
	if e.w.DPSize == 0 && len(e.ranks) == 1 {
		return
	}
	e.ranks = slices.DeleteFunc(e.ranks, func(r *rank) bool { return !r.declared && !r.observed() })
	if len(e.ranks) == 0 {
		e.ranks = append(e.ranks, &rank{})
	}
}

func (r *rank) observed() bool { return r.records[Scrape].held() || r.records[Event].held() }

// newest is when the latest sample was taken, or zero if there is none.
func (r *rank) newest() time.Time {
	t := r.records[Scrape].takenAt
	if e := r.records[Event].takenAt; e.After(t) {
		t = e
	}
	return t
}

// first returns a field from the first source that has it, the event plane before the page.
func (r *rank) first(f field) (uint64, bool) {
	for _, s := range [...]Source{Event, Scrape} {
		if rec := &r.records[s]; rec.known(f) {
			return rec.counts[f], true
		}
	}
	return 0, false
}

// capacity is first for fields where 0 means unknown; configured comes before all sources.
func (r *rank) capacity(f field, configured uint64) uint64 {
	if configured > 0 {
		return configured
	}
	if v := r.records[Event].counts[f]; v > 0 {
		return v
	}
	return r.records[Scrape].counts[f]
}

func (e *entry) totalBlocks(r *rank) uint64 { return r.capacity(totalBlocks, e.w.KVTotalBlocks) }

func (e *entry) maxBatchedTokens(r *rank) uint64 {
	return r.capacity(batchedTokens, e.w.MaxNumBatchedTokens)
}

func (e *entry) blockSize() uint32 {
	if e.w.BlockSize > 0 {
		return e.w.BlockSize
	}
	for _, r := range e.ranks {
		if v := r.capacity(blockSize, 0); v > 0 && v <= math.MaxUint32 {
			return uint32(v)
		}
	}
	return defaultBlockSize
}
