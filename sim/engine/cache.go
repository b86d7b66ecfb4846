package engine

import (
	"slices"
	"time"
)

// CacheKind says what a CacheEvent tells.
type CacheKind uint8

// The kinds of cache events.
const (
	Stored  CacheKind = iota + 1 // blocks became reusable, each after the one before it
	Evicted                      // a block is reusable no more
	Cleared                      // no block is
)

// CacheEvent is a change of what the prefix cache holds.
type CacheEvent struct {
	Kind      CacheKind
	Hashes    []uint64 // of the blocks; each is chained to that of the block before it
	Parent    uint64   // valid with HasParent: the reusable block before the first of Stored
	HasParent bool
	Tokens    []uint32 // of all blocks of Stored
}

// journal notes changes of the cache. What a block stands after is noted before it, so that whoever
// reads along always knows the parent: a block that becomes reusable while the one before it is not
// waits. That happens when a prompt that is not computed yet has taken the name of the one before,
// and somebody else generates the same text. The nil journal notes nothing.
type journal struct {
	entries []entry
	hashes  []uint64
	tokens  []uint32
	late    []lateBlock
}

// entry is a CacheEvent whose hashes and tokens end where those of the journal were then.
type entry struct {
	kind           CacheKind
	parent         uint64
	hasParent      bool
	hashes, tokens int
}

type lateBlock struct {
	hash, parent uint64
	tokens       []uint32
}

// CacheEvents appends what has happened to the cache since the last call to dst and returns it, in
// order of time, if Config.CacheEvents is set. The slices in it are valid until the next call of any
// method. Submit, Abort, Advance and ClearCache may all change the cache.
func (e *Engine) CacheEvents(dst []CacheEvent) []CacheEvent {
	j := e.pool.journal
	if j == nil {
		return dst
	}
	hashes, tokens := 0, 0
	for _, n := range j.entries {
		dst = append(dst, CacheEvent{
			Kind: n.kind, Parent: n.parent, HasParent: n.hasParent,
			Hashes: j.hashes[hashes:n.hashes:n.hashes], Tokens: j.tokens[tokens:n.tokens:n.tokens],
		})
		hashes, tokens = n.hashes, n.tokens
	}
	j.entries, j.hashes, j.tokens = j.entries[:0], j.hashes[:0], j.tokens[:0]
	return dst
}

// Cached calls yield for each block that CacheEvents has told to be reusable, in no order, with its
// hash and that of the block before it, if there is one.
func (e *Engine) Cached(yield func(hash, parent uint64, hasParent bool)) {
	for hash, i := range e.pool.named {
		if b := &e.pool.blocks[i]; b.noted {
			yield(hash, b.parent, b.hasParent)
		}
	}
}

// PrefixHashes appends to dst what CachedPrefix looks for: the hashes of the blocks of a prompt that may
// come from the cache, which are the complete ones without the last token.
func PrefixHashes(dst []uint64, prompt []uint32, blockSize int) []uint64 {
	s := sequence{prompt: prompt, hashes: dst[:0]}
	s.hash((len(prompt)-1)/blockSize, blockSize, nil)
	return s.hashes
}

// CachedPrefix is how many leading blocks a request submitted now would find in the prefix cache, were
// it admitted at once: those that are computed or about to be for a request before it.
func (e *Engine) CachedPrefix(hashes []uint64) int {
	for n, hash := range hashes {
		if _, ok := e.pool.named[hash]; !ok {
			return n
		}
	}
	return len(hashes)
}

// ClearCache forgets all reusable blocks, if no request holds any block; else it changes nothing
// and returns false, as vLLM does.
func (e *Engine) ClearCache(now time.Time) bool {
	e.catchUp(now)
	if e.pool.used() > 0 {
		return false
	}
	e.pool.clear()
	return true
}

// nowReusable notes that block n of s, computed now, can be found by others. s has the tokens.
func (e *Engine) nowReusable(s *sequence, n int) {
	j, i := e.pool.journal, s.blocks[n]
	b := &e.pool.blocks[i]
	if j == nil || !b.named || b.noted {
		return
	}
	if b.hasParent = n > 0; b.hasParent {
		b.parent = s.hashes[n-1]
	}
	if !e.pool.follows(b) {
		j.late = append(j.late, lateBlock{b.hash, b.parent, s.appendTokens(nil, n*e.cfg.BlockSize, (n+1)*e.cfg.BlockSize)})
		return
	}
	b.noted = true
	j.tokens = s.appendTokens(j.tokens, n*e.cfg.BlockSize, (n+1)*e.cfg.BlockSize)
	j.stored(b)
	if len(j.late) > 0 {
		e.pool.noteLate()
	}
}

// follows tells whether the block before b is reusable and noted, or there is none.
func (p *pool) follows(b *block) bool {
	if !b.hasParent {
		return true
	}
	i, ok := p.named[b.parent]
	return ok && p.blocks[i].noted
}

// noteLate notes blocks whose turn has come, and drops those that are gone.
func (p *pool) noteLate() {
	j := p.journal
	for again := true; again; {
		again = false
		j.late = slices.DeleteFunc(j.late, func(l lateBlock) bool {
			i, ok := p.named[l.hash]
			if !ok || p.blocks[i].noted || !p.blocks[i].computed {
				return true
			}
			b := &p.blocks[i]
			if !p.follows(b) {
				return false
			}
			b.noted = true
			j.tokens = append(j.tokens, l.tokens...)
			j.stored(b)
			again = true
			return true
		})
	}
}

// stored notes a block whose tokens have been appended. It extends the last event if it follows it.
func (j *journal) stored(b *block) {
	j.hashes = append(j.hashes, b.hash)
	if n := len(j.entries); n > 0 && b.hasParent && j.entries[n-1].kind == Stored && j.hashes[j.entries[n-1].hashes-1] == b.parent {
		j.entries[n-1].hashes, j.entries[n-1].tokens = len(j.hashes), len(j.tokens)
		return
	}
	j.entries = append(j.entries, entry{Stored, b.parent, b.hasParent, len(j.hashes), len(j.tokens)})
}

// evicted notes that a block has lost its content.
func (j *journal) evicted(b *block) {
	if j == nil || !b.noted {
		return
	}
	j.hashes = append(j.hashes, b.hash)
	j.entries = append(j.entries, entry{kind: Evicted, hashes: len(j.hashes), tokens: len(j.tokens)})
}

// clear makes all idle blocks blank.
func (p *pool) clear() {
	for i := p.oldest; i != none; i = p.oldest {
		p.unlink(i)
		delete(p.named, p.blocks[i].hash)
		p.blocks[i] = block{prev: none, next: none}
		p.blank = append(p.blank, i)
	}
	if j := p.journal; j != nil {
		j.late = nil
		j.entries = append(j.entries, entry{kind: Cleared, hashes: len(j.hashes), tokens: len(j.tokens)})
	}
}
