package engine

import "slices"

// startPrefill begins the next prompt if none is being computed. What the cache holds is
// decided here and not at admission: prompts before this one are computed by now.
func (e *Engine) startPrefill(t int64) {
	p := &e.prefill
	if p.on || len(p.order) == 0 {
		return
	}
	s := p.order[0]
	hits := 0
	for hits < e.reusable(s) && e.pool.blocks[s.blocks[hits]].computed {
		hits++
	}
	s.prefillCached = hits * e.cfg.BlockSize
	e.stats.CachedTokens += uint64(s.prefillCached)
	if s.cached < 0 {
		s.cached = s.prefillCached
		e.stats.QueryTokens += uint64(s.prefillTokens)
		e.stats.HitTokens += uint64(s.prefillCached)
	}
	p.on, p.started = true, t
	p.ends = t + int64(e.cfg.Prefill(s.prefillTokens-s.prefillCached))
}

// endPrefill makes the first token of the prompt that is due, or the next one of a sequence
// that was preempted.
func (e *Engine) endPrefill(t int64) {
	s := e.prefill.order[0]
	e.prefill.order = slices.Delete(e.prefill.order, 0, 1)
	e.prefill.on = false
	e.computed(s, s.prefillTokens)
	s.phase = decoding
	e.step.decoding++
	kind := Token
	if s.generated == 0 {
		kind = FirstToken
		e.stats.PromptTokens += uint64(len(s.prompt))
	}
	if len(s.output) > 0 {
		e.generate(s, kind, t)
	}
	if s.generated == len(s.output) {
		e.finish(s, Complete, t)
	}
}

// dropPrefill ends the prefill of s before its time. What was computed stays computed.
func (e *Engine) dropPrefill(s *sequence, t int64) {
	p := &e.prefill
	at := slices.Index(p.order, s)
	if at == 0 && p.on {
		p.on = false
		done := int(float64(t-p.started) / e.cfg.nanosPerToken())
		e.computed(s, min(s.prefillCached+done, s.prefillTokens))
	}
	p.order = slices.Delete(p.order, at, at+1)
}

// computed counts the work of the prefill of s up to its first tokens tokens, and makes their
// complete blocks reusable.
func (e *Engine) computed(s *sequence, tokens int) {
	e.stats.PrefillTokens += uint64(tokens - s.prefillCached)
	for n := range tokens / e.cfg.BlockSize {
		// A block whose name was taken at admission may have it now.
		e.pool.name(s.blocks[n], s.hashes[n])
		e.pool.blocks[s.blocks[n]].computed = true
		e.nowReusable(s, n)
	}
}
