package replay

import (
	"slices"
	"sync"
	"time"
)

// maxNames bounds how many workers, reasons or kinds of failure are told apart; they come from the
// wire. The rest is counted as "other".
const maxNames = 4096

// islBounds are the upper ends, in prompt tokens, of the groups that TTFT is broken down by. Above
// the last is one more group.
var islBounds = [...]int{1024, 4096, 16384, 65536}

// tally adds up results as they come. It is safe for concurrent use.
type tally struct {
	limitTTFT TTFTLimit
	limitITL  time.Duration // 0 is no objective

	mu sync.Mutex // guards all below
	sums
}

// sums is what a tally has counted.
type sums struct {
	firstDue, lastDue time.Time // of those offered
	lastEnd           time.Time // of those that completed
	offered, notSent  int
	completed, left   int
	cutOff            int
	shedBy, failedBy  map[string]int
	workers           map[string]int // answers by worker, shed ones not among them

	ttft, itl, lag Histogram
	ttftByISL      [len(islBounds) + 1]Histogram

	good                   tokens  // of requests that met the objectives
	all                    tokens  // of completed ones
	cachedTokens           int     // of completed ones
	missedTTFT, missedITL  int     // of completed ones
	withoutUsage, tooShort int     // of completed ones
	oracle                 *Oracle // nil if nobody is asked
}

// tokens counts requests and their tokens.
type tokens struct{ requests, prompt, output int }

func (t *tokens) add(u usage) {
	t.requests++
	t.prompt += u.PromptTokens
	t.output += u.CompletionTokens
}

func newTally(cfg Config) *tally {
	limit, _ := ParseTTFT(cfg.SLOTTFT) // Validate has seen it
	t := &tally{limitTTFT: limit, limitITL: cfg.SLOITL, sums: sums{
		shedBy: map[string]int{}, failedBy: map[string]int{}, workers: map[string]int{},
	}}
	if cfg.OracleURL != "" {
		t.oracle = &Oracle{}
	}
	return t
}

// offer counts a request that has become due. Requests come in order of due.
func (t *tally) offer(due time.Time, sent bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.offered == 0 {
		t.firstDue = due
	}
	t.lastDue = due
	t.offered++
	if !sent {
		t.notSent++
	}
}

// add counts the result of a request that was offered and sent. It keeps nothing of s.
func (t *tally) add(req *Request, due time.Time, res result, s *stream) {
	p99 := time.Duration(0)
	if res.outcome == completed && t.limitITL > 0 {
		sorted := slices.Clone(s.gaps) // outside the lock
		slices.Sort(sorted)
		p99 = percentileOf(sorted, 99)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if res.sent {
		t.lag.Add(res.lag)
	}
	if res.worker != "" && res.outcome != shed {
		count(t.workers, res.worker)
	}
	switch res.outcome {
	case completed:
		t.complete(req, due, res, s, p99)
	case shed:
		count(t.shedBy, res.detail)
	case failed:
		count(t.failedBy, res.detail)
	case left:
		t.left++
	case cutOff:
		t.cutOff++
	}
}

func (t *tally) complete(req *Request, due time.Time, res result, s *stream, gapP99 time.Duration) {
	end := res.end
	t.completed++
	if t.oracle != nil {
		t.oracle.add(res.best, s)
	}
	if end.After(t.lastEnd) {
		t.lastEnd = end
	}
	use := s.usage
	if !s.hasUsage {
		t.withoutUsage++
		use = usage{PromptTokens: req.ISLTokens, CompletionTokens: len(s.gaps)}
		if !s.first.IsZero() {
			use.CompletionTokens++
		}
	}
	if use.CompletionTokens < req.OSLTokens {
		t.tooShort++
	}
	t.all.add(use)
	t.cachedTokens += use.Details.CachedTokens
	for _, gap := range s.gaps {
		t.itl.Add(gap)
	}
	first := end // without any content the end is the first that the client saw
	if !s.first.IsZero() {
		first = s.first
	}
	ttft := first.Sub(due)
	t.ttft.Add(ttft)
	t.ttftByISL[islGroup(req.ISLTokens)].Add(ttft)

	limit, has := t.limitTTFT.Limit(req.ISLTokens)
	late := has && ttft > limit
	slow := t.limitITL > 0 && gapP99 > t.limitITL
	if late {
		t.missedTTFT++
	}
	if slow {
		t.missedITL++
	}
	if !late && !slow {
		t.good.add(use)
	}
}

func islGroup(isl int) int {
	i, _ := slices.BinarySearch(islBounds[:], isl)
	return i
}

func count(by map[string]int, name string) {
	if _, known := by[name]; !known && len(by) >= maxNames {
		name = "other"
	}
	by[name]++
}
