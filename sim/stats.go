package sim

import (
	"net/http"
	"time"

	"spillway/sim/engine"
)

// figures is one level of GET /sim/stats: a rank, a worker or all of the process.
type figures struct {
	StepLateness latenessFigures `json:"step_lateness_ms"`
	Running      int             `json:"running"` // with a sequence slot
	Waiting      int             `json:"waiting"`
	UsedBlocks   int             `json:"used_blocks"`   // that requests refer to
	CachedBlocks int             `json:"cached_blocks"` // that can be reused or evicted
	TotalBlocks  int             `json:"total_blocks"`

	Steps                 uint64 `json:"steps"`
	PrefillTokensComputed uint64 `json:"prefill_tokens_computed"`
	PrefillTokensCached   uint64 `json:"prefill_tokens_cached"`
	TokensGenerated       uint64 `json:"tokens_generated"`
	// Generated and not yet written when the client was found to have left, or after that.
	TokensAfterClientLeft uint64 `json:"tokens_after_client_left"`
	// All tokens of sequences whose answer the client did not get whole.
	TokensNeverDelivered uint64 `json:"tokens_never_delivered"`
	Preemptions          uint64 `json:"preemptions"`
	Finished             uint64 `json:"finished_requests"`    // sequences
	Aborted              uint64 `json:"aborted_requests"`     // sequences stopped before their end
	Undelivered          uint64 `json:"undelivered_requests"` // sequences; those that ended before they could be stopped included
}

// latenessFigures says how long after its deadline a decode step was executed.
type latenessFigures struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

func figuresOf(s *snapshot) figures {
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	e := s.engine
	return figures{
		StepLateness: latenessFigures{ms(s.late.quantile(0.5)), ms(s.late.quantile(0.99)), ms(s.late.longest)},
		Running:      e.Running(), Waiting: e.Waiting,
		UsedBlocks: e.UsedBlocks, CachedBlocks: e.CachedBlocks, TotalBlocks: s.blocks,
		Steps: e.Steps, PrefillTokensComputed: e.PrefillTokens, PrefillTokensCached: e.CachedTokens,
		TokensGenerated:       e.GeneratedTokens,
		TokensAfterClientLeft: s.tally.afterLeaving, TokensNeverDelivered: s.tally.undelivered,
		Preemptions: e.Preemptions, Finished: e.Finished, Aborted: e.Aborted, Undelivered: s.tally.cut,
	}
}

// snapshot is all that a rank, or several, can tell at one moment.
type snapshot struct {
	engine engine.Stats
	tally  tally
	late   lateness
	blocks int
}

func (r *rank) snapshot() *snapshot {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &snapshot{r.eng.Stats(), r.tally, r.late, r.worker.server.cfg.KVBlocks}
}

func (s *snapshot) merge(o *snapshot) {
	a, b := &s.engine, &o.engine
	a.Waiting += b.Waiting
	a.Prefilling += b.Prefilling
	a.Decoding += b.Decoding
	a.UsedBlocks += b.UsedBlocks
	a.CachedBlocks += b.CachedBlocks
	a.PrefillTokens += b.PrefillTokens
	a.CachedTokens += b.CachedTokens
	a.GeneratedTokens += b.GeneratedTokens
	a.Steps += b.Steps
	a.Preemptions += b.Preemptions
	a.Finished += b.Finished
	a.Aborted += b.Aborted
	s.tally.afterLeaving += o.tally.afterLeaving
	s.tally.undelivered += o.tally.undelivered
	s.tally.cut += o.tally.cut
	s.late.merge(&o.late)
	s.blocks += o.blocks
}

// stats serves GET /sim/stats, the same on every worker of the process.
func (s *Server) stats(rw http.ResponseWriter, _ *http.Request) error {
	type rankStats struct {
		DPRank int `json:"dp_rank"`
		figures
	}
	type workerStats struct {
		Worker int `json:"worker"`
		Port   int `json:"port"`
		figures
		Ranks []rankStats `json:"ranks"`
	}
	all := &snapshot{}
	workers := make([]workerStats, len(s.workers))
	for i, w := range s.workers {
		sum := &snapshot{}
		workers[i] = workerStats{Worker: i, Port: w.port}
		for _, r := range w.ranks {
			snap := r.snapshot()
			workers[i].Ranks = append(workers[i].Ranks, rankStats{r.dp, figuresOf(snap)})
			sum.merge(snap)
		}
		workers[i].figures = figuresOf(sum)
		all.merge(sum)
	}
	return writeJSON(rw, http.StatusOK, struct {
		figures
		Workers []workerStats `json:"workers"`
	}{figuresOf(all), workers})
}
