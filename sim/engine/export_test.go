package engine

import "fmt"

// Check compares the books of the engine with what its sequences hold.
func (e *Engine) Check() error {
	refs := make([]int32, len(e.pool.blocks))
	for _, s := range e.running {
		if s.phase != prefilling && s.phase != decoding {
			return fmt.Errorf("running sequence %d is in phase %d", s.id, s.phase)
		}
		if e.seqs[s.id] != s {
			return fmt.Errorf("running sequence %d is not known", s.id)
		}
		if got, least := len(s.blocks), e.blocksFor(s.tokens()-1); got < least && s.phase == decoding {
			return fmt.Errorf("sequence %d holds %d blocks, needs %d", s.id, got, least)
		}
		for _, i := range s.blocks {
			refs[i]++
		}
	}
	used, idle := 0, 0
	for i, b := range e.pool.blocks {
		if b.refs != refs[i] {
			return fmt.Errorf("block %d counts %d references, has %d", i, b.refs, refs[i])
		}
		if b.refs > 0 {
			used++
		}
		if b.named && e.pool.named[b.hash] != int32(i) {
			return fmt.Errorf("block %d cannot be found by its name", i)
		}
		if b.refs == 0 && b.named {
			idle++
			if !b.computed {
				return fmt.Errorf("idle block %d was never computed", i)
			}
		}
	}
	listed := 0
	for i := e.pool.oldest; i != none; i = e.pool.blocks[i].next {
		listed++
	}
	switch {
	case used != e.pool.used():
		return fmt.Errorf("used is %d, counted %d", e.pool.used(), used)
	case idle != e.pool.idle || idle != listed:
		return fmt.Errorf("idle is %d, counted %d, listed %d", e.pool.idle, idle, listed)
	case len(e.running) > e.cfg.MaxNumSeqs:
		return fmt.Errorf("%d running", len(e.running))
	case len(e.running)+len(e.queue) != len(e.seqs):
		return fmt.Errorf("%d running and %d waiting of %d", len(e.running), len(e.queue), len(e.seqs))
	}
	for n := range e.queue {
		if n > 0 && e.queue[n].before(e.queue[(n-1)/2]) || e.queue[n].place != n || len(e.queue[n].blocks) > 0 {
			return fmt.Errorf("the queue is out of order at %d", n)
		}
	}
	return nil
}
