package wire

import (
	"encoding/binary"
	"math"
	"slices"
)

// levels is how deep the value of an event's field may nest.
const levels = maxKVNesting - 3

// kvFields are the fields of an event that take more than one look, and where lists begin that
// can be read only when the others are known.
type kvFields struct {
	extraKeys int  // where the list begins, or 0 if there is none
	mediaInfo int  // likewise
	metadata  span // the salt that it brings
	seen      uint // bit i: the i-th of the names below
}

// The names of fields that may come but once, since they are gathered in the batch or required.
const (
	seenHashes = 1 << iota
	seenTokens
	seenBlockSize
)

// readEvent reads one event. After false the cursor may be anywhere.
func (b *KVBatch) readEvent(c *cursor) (e kvRaw, ok bool) {
	var f kvFields
	if c.isMap() {
		ok = b.readNamed(c, &e, &f)
	} else {
		ok = b.readPositional(c, &e, &f)
	}
	if !ok || e.tag != kvStored {
		return e, ok
	}
	if e.salt.len() == 0 {
		e.salt = f.metadata
	}
	return e, b.finishStore(c.b, &e, &f)
}

// readNamed reads an event with names for its values. The type says which of them it has.
func (b *KVBatch) readNamed(c *cursor, e *kvRaw, f *kvFields) bool {
	n, ok := c.mapping()
	if !ok {
		return false
	}
	if e.tag, ok = findTag(*c, n); !ok {
		return false
	}
	for ; n > 0; n-- {
		key, ok := c.text()
		if ok {
			ok = b.readField(c, key, e, f)
		}
		if !ok {
			return false
		}
	}
	switch e.tag {
	case kvStored:
		return f.seen == seenHashes|seenTokens|seenBlockSize
	case kvRemoved:
		return f.seen == seenHashes
	}
	return true
}

// findTag looks for the type among n pairs; it is always the first in what engines send.
func findTag(c cursor, n int) (kvTag, bool) {
	for ; n > 0; n-- {
		key, ok := c.text()
		if !ok {
			return 0, false
		}
		if string(key) == "type" {
			name, ok := c.text()
			return tagOf(name), ok
		}
		if !c.skip(levels) {
			return 0, false
		}
	}
	return 0, false
}

// readField reads the value of one name. A name that events of its type do not have means nothing.
func (b *KVBatch) readField(c *cursor, key []byte, e *kvRaw, f *kvFields) bool {
	if string(key) == "ownership" {
		return readOwner(c, e)
	}
	if e.tag != kvStored && e.tag != kvRemoved {
		return c.skip(levels)
	}
	switch string(key) {
	case "block_hashes":
		return f.once(seenHashes) && b.readHashes(c, e)
	case "medium":
		return readMedium(c, e)
	case "locality":
		return readLocality(c, e)
	case "group_idx":
		return readGroup(c, e)
	case "kv_cache_spec_kind":
		return readAttention(c, e)
	case "kv_cache_spec_sliding_window":
		_, _, ok := optionalUint32(c)
		return ok
	}
	if e.tag == kvStored {
		return b.readStoreField(c, key, e, f)
	}
	return c.skip(levels)
}

// readStoreField reads the value of a name that only stores have.
func (b *KVBatch) readStoreField(c *cursor, key []byte, e *kvRaw, f *kvFields) (ok bool) {
	switch string(key) {
	case "parent_block_hash":
		return readParent(c, e)
	case "token_ids":
		return f.once(seenTokens) && b.readTokens(c, e)
	case "block_size":
		return f.once(seenBlockSize) && readBlockSize(c, e)
	case "lora_name":
		e.lora, ok = textSpan(c)
		return ok
	case "cache_salt":
		e.salt, ok = textSpan(c)
		return ok
	case "extra_keys":
		return optionalList(c, &f.extraKeys)
	case "block_mm_infos":
		return optionalList(c, &f.mediaInfo)
	case "metadata":
		if c.null() {
			return true
		}
		return readMetadata(c, f)
	}
	return c.skip(levels)
}

// once tells whether a name comes for the first time.
func (f *kvFields) once(bit uint) bool {
	again := f.seen&bit != 0
	f.seen |= bit
	return !again
}

// readPositional reads an event whose values are told by their places.
func (b *KVBatch) readPositional(c *cursor, e *kvRaw, f *kvFields) bool {
	n, ok := c.array()
	if !ok || n == 0 {
		return false
	}
	name, ok := c.text()
	if !ok {
		return false
	}
	n--
	switch e.tag = tagOf(name); e.tag {
	case kvStored:
		return b.readStorePlaces(c, n, e, f)
	case kvRemoved:
		if n < 1 || !b.readHashes(c, e) {
			return false
		}
		if n--; n == 0 {
			return true
		}
		return readMedium(c, e) && readTail(c, n-1, e, nil)
	case kvCleared:
		if n == 0 {
			return true
		}
		return readOwner(c, e) && c.skipAll(n-1, levels)
	}
	return c.skipAll(n, levels)
}

// readStorePlaces reads the n places of a store that follow its tag.
func (b *KVBatch) readStorePlaces(c *cursor, n int, e *kvRaw, f *kvFields) (ok bool) {
	const required = 4
	if n < required || !b.readHashes(c, e) || !readParent(c, e) || !b.readTokens(c, e) || !readBlockSize(c, e) {
		return false
	}
	for place := required; place < n; place++ {
		switch place {
		case 4: // the number of an adapter says nothing about what it is
			ok = c.skip(levels)
		case 5:
			ok = readMedium(c, e)
		case 6:
			if c.isMap() {
				ok = readMetadata(c, f)
			} else {
				e.lora, ok = textSpan(c)
			}
		case 7:
			ok = optionalList(c, &f.extraKeys)
		default:
			return readTail(c, n-place, e, &f.mediaInfo)
		}
		if !ok {
			return false
		}
	}
	return true
}

// readMetadata reads SGLang's map of what a request brought.
func readMetadata(c *cursor, f *kvFields) bool {
	n, ok := c.mapping()
	for ; ok && n > 0; n-- {
		var key []byte
		if key, ok = c.text(); !ok {
			return false
		}
		if string(key) == "cache_salt" {
			f.metadata, ok = textSpan(c)
		} else {
			ok = c.skip(levels - 1)
		}
	}
	return ok
}

// readHashes reads the engine's hashes of an event's blocks.
func (b *KVBatch) readHashes(c *cursor, e *kvRaw) bool {
	n, ok := c.array()
	if !ok {
		return false
	}
	e.hashes.from = int32(len(b.hashes))
	b.hashes = slices.Grow(b.hashes, n)
	for ; n > 0; n-- {
		if at := c.at; c.peek() == 0xcf && len(c.b)-at >= 9 { // nearly all
			b.hashes = append(b.hashes, binary.BigEndian.Uint64(c.b[at+1:]))
			c.at = at + 9
			continue
		}
		h, ok := readHash(c)
		if !ok {
			return false
		}
		b.hashes = append(b.hashes, h)
	}
	e.hashes.to = int32(len(b.hashes))
	return true
}

// readHash reads an engine's hash: 64 bits as a number with or without sign, or the digest whose
// last eight bytes these are.
func readHash(c *cursor) (uint64, bool) {
	if h, _, ok := c.integer(); ok {
		return h, true
	}
	digest, ok := c.binary()
	if !ok || len(digest) == 0 {
		return 0, false
	}
	h := uint64(0)
	for _, x := range digest[max(0, len(digest)-8):] {
		h = h<<8 | uint64(x)
	}
	return h, true
}

func readParent(c *cursor, e *kvRaw) (ok bool) {
	if c.null() {
		return true
	}
	e.parent, ok = readHash(c)
	e.hasParent = ok
	return ok
}

func readBlockSize(c *cursor, e *kvRaw) bool {
	v, negative, ok := c.integer()
	e.blockSize = uint32(min(v, math.MaxUint32)) // no partition has blocks of so many tokens
	return ok && !negative
}

// readTokens reads token IDs: numbers, or the pairs of neighbours that a model sees which drafts
// with EAGLE.
func (b *KVBatch) readTokens(c *cursor, e *kvRaw) bool {
	n, ok := c.array()
	if !ok {
		return false
	}
	e.tokens.from = int32(len(b.tokens))
	b.tokens = slices.Grow(b.tokens, n+1)
	if e.pairs = c.isArray() && n > 0; e.pairs {
		b.tokens, ok = appendPairs(b.tokens, c, n)
	} else {
		b.tokens, ok = appendTokens(b.tokens, c, n)
	}
	e.tokens.to = int32(len(b.tokens))
	return ok
}

// appendTokens reads n numbers, for which dst has room. Most of the time that decoding takes is spent
// here: token IDs of a large vocabulary come in two and four bytes, in an order that no processor
// can predict. So the width is reckoned with and not branched on, and the type of the number after
// the next is looked up in both places where it may be before it is known in which.
func appendTokens(dst []uint32, c *cursor, n int) ([]uint32, bool) {
	const (
		two  = 0xcd // the type of numbers of two bytes; that of four is the next
		most = 10   // bytes of two numbers
	)
	b, at := c.b, c.at
	out := dst[len(dst) : len(dst)+n]
	i := 0
	for i < n && len(b)-at >= most {
		wide := uint(b[at]) - two // 1 for four bytes
		if wide > 1 {
			c.at = at
			v, ok := c.uint32()
			if !ok {
				return dst, false
			}
			out[i], at, i = v, c.at, i+1
			continue
		}
		out[i] = binary.BigEndian.Uint32(b[at+1:]) >> (16 - 16*wide)
		next := (uint(b[at+3])&^-wide | uint(b[at+5])&-wide) - two
		at, i = at+3+int(2*wide), i+1
		if next <= 1 && i < n {
			out[i] = binary.BigEndian.Uint32(b[at+1:]) >> (16 - 16*next)
			at, i = at+3+int(2*next), i+1
		}
	}
	c.at = at
	for ; i < n; i++ { // the end of the payload is near
		v, ok := c.uint32()
		if !ok {
			return dst, false
		}
		out[i] = v
	}
	return dst[:len(dst)+n], true
}

// appendPairs reads n pairs (a,b), (b,c), (c,d) as a, b, c, d.
func appendPairs(dst []uint32, c *cursor, n int) ([]uint32, bool) {
	last := uint32(0)
	for ; n > 0; n-- {
		if two, ok := c.array(); !ok || two != 2 {
			return dst, false
		}
		first, ok := c.uint32()
		if !ok {
			return dst, false
		}
		if last, ok = c.uint32(); !ok {
			return dst, false
		}
		dst = append(dst, first)
	}
	return append(dst, last), true
}

func optionalText(c *cursor) ([]byte, bool) {
	if c.null() {
		return nil, true
	}
	return c.text()
}

// textSpan passes a string, or a nil, which counts as empty, and tells where it is.
func textSpan(c *cursor) (span, bool) {
	text, ok := optionalText(c)
	return span{int32(c.at - len(text)), int32(c.at)}, ok
}

func optionalUint32(c *cursor) (v uint32, has, ok bool) {
	if c.null() {
		return 0, false, true
	}
	v, ok = c.uint32()
	return v, ok, ok
}

// optionalList passes a list and tells where it begins, or a nil.
func optionalList(c *cursor, begin *int) bool {
	*begin = 0
	if c.null() {
		return true
	}
	*begin = c.at
	return c.isArray() && c.skip(levels)
}

func readGroup(c *cursor, e *kvRaw) (ok bool) {
	e.group, e.hasGroup, ok = optionalUint32(c)
	return ok
}
