package tokenize

import "unsafe"

// cache keeps what is known of prompts, up to a number of bytes, and drops what was not asked for the
// longest. It is not safe for concurrent use.
type cache struct {
	limit   int64 // bytes; 0 keeps nothing
	bytes   int64
	entries map[key]*entry
	newest  entry // the head of a ring: newest.older is the newest, newest.newer the oldest
}

// entry is one prompt.
type entry struct {
	key          key
	tokens       Tokens
	newer, older *entry
}

// entryBytes is what an entry takes beside its IDs, with its place in the map.
const entryBytes = int64(unsafe.Sizeof(entry{})) + 2*int64(unsafe.Sizeof(key{})+unsafe.Sizeof(uintptr(0)))

func (e *entry) size() int64 { return entryBytes + int64(cap(e.tokens.IDs))*4 }

func newCache(limit int64) cache { return cache{limit: limit, entries: map[key]*entry{}} }

// find returns what is known of a prompt, and notes that it was asked for.
func (c *cache) find(k key) (Tokens, bool) {
	e := c.entries[k]
	if e == nil {
		return Tokens{}, false
	}
	e.unlink()
	c.link(e)
	return e.tokens, true
}

// add keeps what is known of a prompt, in the place of what was. What would fill the cache by itself
// is not kept.
func (c *cache) add(k key, tokens Tokens) {
	e := &entry{key: k, tokens: tokens}
	if e.size() > c.limit {
		return
	}
	if old := c.entries[k]; old != nil {
		c.drop(old)
	}
	c.entries[k] = e
	c.link(e)
	for c.bytes += e.size(); c.bytes > c.limit; {
		c.drop(c.newest.newer)
	}
}

func (c *cache) drop(e *entry) {
	e.unlink()
	delete(c.entries, e.key)
	c.bytes -= e.size()
}

func (c *cache) link(e *entry) {
	head := &c.newest
	if head.older == nil {
		head.older, head.newer = head, head
	}
	e.newer, e.older = head, head.older
	e.older.newer = e
	head.older = e
}

func (e *entry) unlink() { e.newer.older, e.older.newer = e.older, e.newer }
