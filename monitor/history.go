package monitor

import (
	"math"
	"time"

	"spillway/busy"
	"spillway/worker"
)

// history is what earlier pages of a worker said, as far as later ones need it. It belongs to
// one goroutine.
type history struct {
	start    float64
	counters map[uint64]float64
	ranks    map[uint32]*rankHistory // by the engine's label
	server   serverInfo              // what the server told beside its pages
}

type rankHistory struct {
	total   uint64 // KV blocks, for pages that leave them out; 0: never said
	size    uint64 // tokens per block, likewise
	prompts promptLog
}

// startTolerance is how far a process's start time may wander without a restart: some
// exporters derive it from a boot time that follows the clock.
const startTolerance = 1.5 // seconds

// restarted tells whether the worker's process has been started anew between the last page
// and p. It then forgets what earlier pages said.
func (h *history) restarted(p page) bool {
	again := h.start > 0 && p.start > 0 && math.Abs(p.start-h.start) > startTolerance
	for key, was := range h.counters {
		if now, ok := p.counters[key]; ok && now < was {
			again = true
		}
	}
	if again {
		*h = history{}
	}
	if p.start > 0 {
		h.start = p.start
	}
	if len(p.counters) > 0 {
		h.counters = p.counters
	}
	return again
}

// samples makes of a page what the busy list takes: one sample for each rank that has
// anything to say. sent is when the page was asked for.
func (h *history) samples(p page, w *worker.Worker, sent time.Time, estimate bool) []busy.Sample {
	h.keep(p)
	var out []busy.Sample
	for i := range p.ranks {
		r := &p.ranks[i]
		had := h.ranks[r.dp]
		h.inBlocks(r, had, w)
		total := r.total
		if total == 0 || p.truncated && had.total > 0 {
			// Part of a page shows part of the engines, and the division would be wrong.
			total = had.total
		}
		had.total = total
		if w.KVTotalBlocks > 0 {
			total = w.KVTotalBlocks
		}
		s := busy.Sample{
			Rank: worker.Rank{Worker: w.ID, DP: r.dp}, Source: busy.Scrape, TakenAt: sent,
			KVUsageRatio: r.ratio, Running: r.running, Waiting: r.waiting, PrefillTokens: r.prefill,
		}
		if total > 0 {
			s.KVTotalBlocks, s.KVUsedBlocks = &total, r.used
			if used, ok := usedBlocks(r.ratio, total); ok && r.used == nil {
				s.KVUsedBlocks = &used
			}
		}
		if r.blockSize > 0 {
			s.BlockSize = &r.blockSize
		}
		if s.KVUsageRatio == nil && s.KVTotalBlocks == nil && s.Running == nil && s.Waiting == nil && s.PrefillTokens == nil {
			continue
		}
		if m := h.server.batchedTokens; m > 0 {
			s.MaxNumBatchedTokens = &m
		} else if h.server.told {
			s.MaxNumBatchedTokens = r.totalTokens
		}
		if estimate && r.prefill == nil && r.waiting != nil {
			s.PrefillTokens = new(had.prompts.estimate(*r.waiting, r, sent))
		}
		out = append(out, s)
	}
	return out
}

// inBlocks makes blocks of what an engine counts in tokens; where the size of a block is not
// known, a fraction.
func (h *history) inBlocks(r *rankPage, had *rankHistory, w *worker.Worker) {
	if r.blockSize == 0 {
		r.blockSize = max(had.size, h.server.pageSize)
	}
	had.size = r.blockSize
	size := uint64(w.BlockSize)
	if size == 0 {
		size = r.blockSize
	}
	blocks := func(tokens uint64) uint64 { return (tokens + size - 1) / size }
	if size > 0 {
		if r.totalTokens != nil && r.total == 0 {
			r.total = blocks(*r.totalTokens)
		}
		if r.usedTokens != nil && r.used == nil {
			r.used = new(blocks(*r.usedTokens))
		}
	}
	if r.ratio == nil && r.usedTokens != nil && r.totalTokens != nil && *r.totalTokens > 0 {
		r.ratio = new(float64(*r.usedTokens) / float64(*r.totalTokens))
	}
}

// keep makes room for the ranks of p and forgets all others, so that a page with ever new
// labels cannot fill memory.
func (h *history) keep(p page) {
	ranks := make(map[uint32]*rankHistory, len(p.ranks))
	for _, r := range p.ranks {
		if ranks[r.dp] = h.ranks[r.dp]; ranks[r.dp] == nil {
			ranks[r.dp] = &rankHistory{}
		}
	}
	h.ranks = ranks
}

// usedBlocks is the number of blocks that a ratio of total stands for.
func usedBlocks(ratio *float64, total uint64) (uint64, bool) {
	if ratio == nil {
		return 0, false
	}
	used := math.Round(*ratio * float64(total))
	return uint64(min(used, maxCount)), used <= maxCount
}

// promptLog remembers how many prompt tokens were finished over the last minutes.
type promptLog struct{ points []promptPoint }

type promptPoint struct {
	at          time.Time
	sum, number uint64 // tokens, requests: since the process began
}

const (
	promptWindow = 5 * time.Minute
	promptStep   = 10 * time.Second // between remembered points
	promptLeast  = 20               // requests without which there is no mean
)

// estimate is the number of prompt tokens that so many waiting requests have, by the mean of
// the last minutes. Where there is no mean it is 0: the greater of this and the tracker's own
// number is used, so 0 claims nothing.
func (l *promptLog) estimate(waiting uint64, r *rankPage, now time.Time) uint64 {
	if r.promptSum == nil || r.promptCount == nil {
		return 0
	}
	sum, number := *r.promptSum, *r.promptCount
	for len(l.points) > 0 && now.Sub(l.points[0].at) > promptWindow {
		l.points = l.points[1:]
	}
	if n := len(l.points); n == 0 || now.Sub(l.points[n-1].at) >= promptStep {
		l.points = append(l.points, promptPoint{now, sum, number})
	}
	first := l.points[0]
	if number < first.number+promptLeast || sum < first.sum {
		return 0
	}
	tokens := float64(waiting) * float64(sum-first.sum) / float64(number-first.number)
	return uint64(math.Round(min(tokens, maxCount)))
}
