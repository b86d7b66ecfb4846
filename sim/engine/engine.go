// Package engine is the physics of one simulated inference rank: when each token of each
// request is there, and what the KV memory holds meanwhile. It does no I/O, starts no
// goroutine and reads no clock; the same calls give the same events, so it runs under a server
// in real time and under a test in virtual time.
//
// The rules:
//
//   - Requests wait in order of priority (lower first), then arrival. The first of them takes a
//     sequence slot and blocks for its whole prompt as soon as both can be had; nothing
//     overtakes it. Blocks are found in the prefix cache, else blank, else evicted from the
//     cache, least recently used first.
//   - Requests with a slot are running. They are prefilled one at a time in the order in which
//     they got their slots, at a fixed rate over the tokens that the cache does not hold. As
//     in vLLM at least the last token of a prompt is computed, so a cached prompt still costs
//     its last block. The end of the prefill is the first token.
//   - From then on a request decodes: it takes part in every step that starts later. A step
//     lasts longer the more sequences are in it, and starts exactly when the last one ended. A
//     step whose sequences are all gone is dropped.
//   - The token that a step makes needs room for the one before it. A sequence takes that
//     block when the step starts. If there is none, the running sequence that would be last in
//     the queue is preempted, be it prefilling or the one that asks: it gives everything
//     back, keeps its place by priority and arrival, and prefills prompt and output so far.
//   - Complete blocks whose content was computed stay in the cache when they are given back, a
//     sequence's last block to be evicted first.
package engine

import (
	"container/heap"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Errors that Submit returns.
var (
	ErrDuplicate   = errors.New("engine: a request with this ID is in the engine")
	ErrEmptyPrompt = errors.New("engine: the prompt is empty")
	ErrNeverFits   = errors.New("engine: the prompt needs more KV blocks than the rank has")
)

// Request is one prompt and what the model will say to it.
type Request struct {
	ID uint64 // unique among the requests in the engine
	// Prompt is kept until the request ends and must not be changed meanwhile.
	Prompt []uint32
	// Output is what will be generated, kept like Prompt. Its length is the output length;
	// empty means that only the prompt is computed, as for an embedding. The tokens matter to
	// the prefix cache alone: whoever does not care may share one slice of zeros.
	Output   []uint32
	Priority int // as vLLM's: lower goes first
}

// Engine is one rank. It is not safe for concurrent use. Times given to its methods should not
// decrease; an earlier one counts as the latest so far.
type Engine struct {
	cfg     Config
	origin  time.Time // internal times are nanoseconds since
	clock   int64     // the latest time seen
	seqs    map[uint64]*sequence
	queue   queue
	arrived uint64
	retry   bool // the head of the queue may get in now

	running []*sequence // holders of a slot, in the order in which they got it
	pool    pool
	prefill prefill
	step    step

	pending []Event
	stats   Stats // counters only
	bytes   []byte
	scan    []*sequence
}

// prefill is the queue of admitted prompts; the first is being computed while on.
type prefill struct {
	order         []*sequence
	on            bool
	started, ends int64
}

// step is the decode step under way while on.
type step struct {
	members  []*sequence // those that left meanwhile have inStep false
	live     int         // members that did not leave
	decoding int         // sequences that decode, members or not
	on       bool
	stalled  bool  // a prefill holds the step up; it then has left to go
	left     int64 // valid while stalled
	ends     int64 // valid while not stalled
	lengths  []int64
}

// New makes an idle rank with empty memory. start is time zero of its calculations; to keep
// them exact it should be near the times given later.
func New(cfg Config, start time.Time) (*Engine, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	e := &Engine{cfg: cfg, origin: start, seqs: make(map[uint64]*sequence), pool: newPool(cfg.KVBlocks)}
	if cfg.CacheEvents {
		e.pool.journal = &journal{}
	}
	e.step.lengths = make([]int64, cfg.MaxNumSeqs+1)
	for n := range e.step.lengths {
		e.step.lengths[n] = int64(cfg.Step(n))
	}
	return e, nil
}

// Submit puts a request into the queue. It returns ErrDuplicate, ErrEmptyPrompt or
// ErrNeverFits, and then nothing has changed but the time.
func (e *Engine) Submit(req Request, now time.Time) error {
	t := e.catchUp(now)
	switch {
	case e.seqs[req.ID] != nil:
		return fmt.Errorf("%w: %d", ErrDuplicate, req.ID)
	case len(req.Prompt) == 0:
		return ErrEmptyPrompt
	case e.blocksFor(len(req.Prompt)) > e.cfg.KVBlocks:
		return fmt.Errorf("%w: %d of %d", ErrNeverFits, e.blocksFor(len(req.Prompt)), e.cfg.KVBlocks)
	}
	s := &sequence{
		id: req.ID, prompt: req.Prompt, output: req.Output, priority: req.Priority,
		arrival: e.arrived, cached: -1,
		hashes: make([]uint64, 0, (len(req.Prompt)+len(req.Output))/e.cfg.BlockSize),
	}
	e.arrived++
	e.seqs[s.id] = s
	heap.Push(&e.queue, s)
	if s.place == 0 {
		e.retry = true // behind a head that waits there is nothing to try
	}
	e.settle(t)
	return nil
}

// Abort takes a request out wherever it is, and gives its slot and blocks back. It returns the
// number of tokens generated for it and whether it was there; if not, it has finished or was
// never submitted. Events from before the abort may still come out of the next Advance.
func (e *Engine) Abort(id uint64, now time.Time) (generated int, found bool) {
	t := e.catchUp(now)
	s := e.seqs[id]
	if s == nil {
		return 0, false
	}
	e.leave(s, t)
	s.phase = ended
	delete(e.seqs, id)
	e.stats.Aborted++
	e.settle(t)
	return s.generated, true
}

// Next is when Advance has to be called next, or false if nothing will happen by itself.
func (e *Engine) Next() (time.Time, bool) {
	if len(e.pending) > 0 {
		return e.pending[0].At, true
	}
	due, ok := e.due()
	return e.time(due), ok
}

// Advance lets time pass up to now, appends what happened to dst in order of time and returns
// it. However late it is called, the events and their times are the same.
func (e *Engine) Advance(now time.Time, dst []Event) []Event {
	e.catchUp(now)
	dst = append(dst, e.pending...)
	e.pending = e.pending[:0]
	return dst
}

// Stats tells the present state and the sums so far.
func (e *Engine) Stats() Stats {
	st := e.stats
	st.Waiting = len(e.queue)
	st.Decoding = e.step.decoding
	st.Prefilling = len(e.running) - e.step.decoding
	st.UsedBlocks = e.pool.used()
	st.CachedBlocks = e.pool.idle
	return st
}

// catchUp does what is due up to now and returns now as an internal time.
func (e *Engine) catchUp(now time.Time) int64 {
	t := max(int64(now.Sub(e.origin)), e.clock)
	for {
		due, ok := e.due()
		if !ok || due > t {
			break
		}
		// On a tie the prefill goes first: its sequence then decodes from the next step on.
		if e.prefill.on && e.prefill.ends == due {
			e.endPrefill(due)
		} else {
			e.endStep(due)
		}
		e.settle(due)
	}
	e.clock = t
	return t
}

func (e *Engine) due() (int64, bool) {
	stepDue := e.step.on && !e.step.stalled
	switch {
	case e.prefill.on && stepDue:
		return min(e.prefill.ends, e.step.ends), true
	case e.prefill.on:
		return e.prefill.ends, true
	case stepDue:
		return e.step.ends, true
	}
	return 0, false
}

// settle starts whatever can start at t, after anything has ended or arrived.
func (e *Engine) settle(t int64) {
	e.startPrefill(t)
	e.startStep(t)
	e.admit()
	e.startPrefill(t)
	e.stall(t)
}

// admit gives slots and blocks to the head of the queue until it has to wait.
func (e *Engine) admit() {
	if !e.retry {
		return
	}
	e.retry = false
	for len(e.queue) > 0 && len(e.running) < e.cfg.MaxNumSeqs {
		s := e.queue[0]
		if !e.allocate(s) {
			return
		}
		heap.Pop(&e.queue)
		s.phase = prefilling
		e.running = append(e.running, s)
		e.prefill.order = append(e.prefill.order, s)
	}
}

// allocate gives s blocks for its prompt and output so far, or nothing and false.
func (e *Engine) allocate(s *sequence) bool {
	s.prefillTokens = s.tokens()
	complete := s.prefillTokens / e.cfg.BlockSize
	e.bytes = s.hash(complete, e.cfg.BlockSize, e.bytes)
	hits, idle := 0, 0
	for _, hash := range s.hashes[:e.reusable(s)] {
		i, ok := e.pool.named[hash]
		if !ok {
			break
		}
		s.blocks = append(s.blocks, i)
		hits++
		if e.pool.blocks[i].refs == 0 {
			idle++
		}
	}
	need := e.blocksFor(s.prefillTokens)
	if need-hits > e.pool.available()-idle {
		s.blocks = s.blocks[:0]
		return false
	}
	for _, i := range s.blocks {
		e.pool.ref(i)
	}
	for n := hits; n < need; n++ {
		i, _ := e.pool.take()
		if n < complete {
			e.pool.name(i, s.hashes[n])
		}
		s.blocks = append(s.blocks, i)
	}
	return true
}

// reusable is how many leading blocks of s may come from the cache: complete ones without the
// last token, which is always computed.
func (e *Engine) reusable(s *sequence) int { return (s.prefillTokens - 1) / e.cfg.BlockSize }

// leave takes s out of the queue, the prefill, the step and the memory.
func (e *Engine) leave(s *sequence, t int64) {
	switch s.phase {
	case waiting:
		if s.place == 0 {
			e.retry = true
		}
		heap.Remove(&e.queue, s.place)
		return
	case prefilling:
		e.dropPrefill(s, t)
	case decoding:
		e.dropStep(s)
	}
	at := slices.Index(e.running, s)
	e.running = slices.Delete(e.running, at, at+1)
	// From the end, so that the block which needs most before it is evicted first.
	for _, i := range slices.Backward(s.blocks) {
		e.pool.unref(i)
	}
	s.blocks = s.blocks[:0]
	e.retry = true
}

func (e *Engine) finish(s *sequence, why Reason, t int64) {
	e.leave(s, t)
	s.phase = ended
	delete(e.seqs, s.id)
	e.stats.Finished++
	e.emit(Event{ID: s.id, Kind: Finished, Reason: why, Generated: s.generated, CachedTokens: s.cached}, t)
}

func (e *Engine) emit(ev Event, t int64) {
	ev.At = e.time(t)
	e.pending = append(e.pending, ev)
}

func (e *Engine) blocksFor(tokens int) int {
	return (tokens + e.cfg.BlockSize - 1) / e.cfg.BlockSize
}

func (e *Engine) time(t int64) time.Time { return e.origin.Add(time.Duration(t)) }
