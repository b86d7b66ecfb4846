package engine

import "container/heap"

// startStep begins a decode step with all sequences that decode, if none is under way. Each
// first gets the block that its last token needs.
func (e *Engine) startStep(t int64) {
	st := &e.step
	if e.cfg.PrefillStallsDecode && e.prefill.on {
		return
	}
	if st.stalled {
		st.stalled = false
		st.ends = t + st.left
	}
	if st.on || st.decoding == 0 {
		return
	}
	e.scan = append(e.scan[:0], e.running...) // grow changes running
	for _, s := range e.scan {
		if s.phase == decoding && e.grow(s, t) {
			s.inStep = true
			st.live++
			st.members = append(st.members, s)
		}
	}
	clear(e.scan)
	if st.live == 0 {
		e.clearStep()
		return
	}
	st.on = true
	st.ends = t + st.lengths[st.live]
}

// stall holds a step up when a prefill has begun, if the rank works like that.
func (e *Engine) stall(t int64) {
	st := &e.step
	if e.cfg.PrefillStallsDecode && e.prefill.on && st.on && !st.stalled {
		st.stalled = true
		st.left = st.ends - t
	}
}

// endStep gives each sequence of the step its token.
func (e *Engine) endStep(t int64) {
	st := &e.step
	e.stats.Steps++
	e.emit(Event{Kind: Step, Generated: st.live}, t)
	for _, s := range st.members {
		if !s.inStep {
			continue
		}
		s.inStep = false
		st.live--
		e.generate(s, Token, t)
		e.store(s)
		if s.generated == len(s.output) {
			e.finish(s, Complete, t)
		}
	}
	e.clearStep()
}

// generate gives s a token.
func (e *Engine) generate(s *sequence, kind Kind, t int64) {
	s.generated++
	e.stats.GeneratedTokens++
	e.emit(Event{ID: s.id, Kind: kind, Generated: s.generated, CachedTokens: s.cached}, t)
}

// store makes the block that s has filled reusable. The newest token is not in memory yet:
// the next step puts it there.
func (e *Engine) store(s *sequence) {
	stored := s.tokens() - 1
	if stored%e.cfg.BlockSize != 0 {
		return
	}
	n := stored/e.cfg.BlockSize - 1
	e.bytes = s.hash(n+1, e.cfg.BlockSize, e.bytes)
	e.pool.name(s.blocks[n], s.hashes[n])
	e.pool.blocks[s.blocks[n]].computed = true
	e.nowReusable(s, n)
}

// grow gives s room for its newest token. It returns false if s had to end or to be preempted.
func (e *Engine) grow(s *sequence, t int64) bool {
	need := e.blocksFor(s.tokens())
	if need > e.cfg.KVBlocks {
		e.finish(s, PoolFull, t)
		return false
	}
	for len(s.blocks) < need {
		if i, ok := e.pool.take(); ok {
			s.blocks = append(s.blocks, i)
			continue
		}
		last := e.running[0]
		for _, o := range e.running[1:] {
			if last.before(o) {
				last = o
			}
		}
		e.preempt(last, t)
		if last == s {
			return false
		}
	}
	return true
}

// preempt sends a running sequence back to the queue.
func (e *Engine) preempt(s *sequence, t int64) {
	e.leave(s, t)
	s.phase = waiting
	heap.Push(&e.queue, s)
	e.stats.Preemptions++
	e.emit(Event{ID: s.id, Kind: Preempted, Generated: s.generated}, t)
}

// dropStep takes s out of the sequences that decode.
func (e *Engine) dropStep(s *sequence) {
	st := &e.step
	st.decoding--
	if !s.inStep {
		return
	}
	s.inStep = false
	st.live--
	if st.live == 0 && st.on {
		e.clearStep()
	}
}

func (e *Engine) clearStep() {
	st := &e.step
	clear(st.members)
	st.members = st.members[:0]
	st.live, st.on, st.stalled = 0, false, false
}
