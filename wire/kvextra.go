package wire

import (
	"bytes"
	"math"
	"strconv"
)

// saltTag marks a cache salt among the extra keys of a block.
const saltTag = "dynamo-cache-salt:"

// finishStore finds out what the lists of a store say, which depends on its other fields. payload
// is what the list's places are in.
func (b *KVBatch) finishStore(payload []byte, e *kvRaw, f *kvFields) bool {
	e.media.from = int32(len(b.media))
	if f.extraKeys > 0 {
		c := cursor{b: payload, at: f.extraKeys}
		if !b.readExtraKeys(&c, e, f.mediaInfo == 0) {
			return false
		}
	}
	if f.mediaInfo > 0 {
		c := cursor{b: payload, at: f.mediaInfo}
		if !b.readMediaInfo(&c) {
			return false
		}
	}
	e.media.to = int32(len(b.media))
	return true
}

// readExtraKeys reads what has gone into the hash of each block beside its tokens: a list per
// block of names of adapters, salts, and objects with or without their place. The salt is that of
// the first block, if no field gives one; media are taken if no other list has them.
func (b *KVBatch) readExtraKeys(c *cursor, e *kvRaw, media bool) bool {
	blocks, ok := c.array()
	if !ok {
		return false
	}
	salted := e.salt.len() > 0
	for block := range blocks {
		if c.null() {
			continue
		}
		keys, ok := c.array()
		if !ok {
			return false
		}
		adapter := e.lora.len() > 0 // its name is among the keys, and might look like a salt
		for ; keys > 0; keys-- {
			text, bare, ok := readExtraKey(c)
			if !ok {
				return false
			}
			if media {
				b.addMedia(text, block)
			}
			switch {
			case !bare || block > 0 || salted:
			case adapter && bytes.Equal(text, e.lora.of(c.b)):
				adapter = false
			default:
				salt, tagged := bytes.CutPrefix(text, []byte(saltTag))
				if salted = tagged && len(salt) > 0; salted {
					e.salt = span{int32(c.at - len(salt)), int32(c.at)}
				}
			}
		}
	}
	return true
}

// readExtraKey passes a key and returns its text: the key itself, if it is bare, or the first of a
// pair. Others have none.
func readExtraKey(c *cursor) (text []byte, bare, ok bool) {
	if c.isText() {
		text, ok = c.text()
		return text, true, ok
	}
	first := *c
	if c.isArray() {
		if n, ok := first.array(); ok && n > 0 && first.isText() {
			text, _ = first.text()
		}
	}
	return text, false, c.skip(levels - 2)
}

// addMedia takes text for an object if it is a digest of 64 hex digits. The first 16 name it.
func (b *KVBatch) addMedia(text []byte, block int) {
	const digits, used = 64, 16
	if len(text) != digits {
		return
	}
	for _, x := range text {
		if !(x >= '0' && x <= '9' || x >= 'a' && x <= 'f' || x >= 'A' && x <= 'F') {
			return
		}
	}
	hash, err := strconv.ParseUint(string(text[:used]), 16, 64)
	if err == nil {
		b.media = append(b.media, kvMedia{hash: hash, block: uint32(block & math.MaxUint32)})
	}
}

// readMediaInfo reads a list with an entry per block: nil, or {"mm_objects": [{"mm_hash": ...}]}.
func (b *KVBatch) readMediaInfo(c *cursor) bool {
	blocks, ok := c.array()
	if !ok {
		return false
	}
	for block := range blocks {
		if c.null() {
			continue
		}
		objects, ok := enter(c, "mm_objects")
		if !ok {
			return false
		}
		end := *c
		if objects > 0 {
			c.at = objects
			n, ok := c.array()
			if !ok {
				return false
			}
			for ; n > 0; n-- {
				at, ok := enter(c, "mm_hash")
				if !ok || at == 0 {
					return false
				}
				value := cursor{b: c.b, at: at}
				hash, _, ok := value.integer()
				if !ok {
					return false
				}
				b.media = append(b.media, kvMedia{hash: hash, block: uint32(block & math.MaxUint32)})
			}
		}
		*c = end
	}
	return true
}

// enter passes a struct, a map or an array, and tells where the value of name begins, which is the
// first of an array; 0 if it is not there.
func enter(c *cursor, name string) (at int, ok bool) {
	if c.isArray() {
		n, ok := c.array()
		if n > 0 {
			at = c.at
		}
		return at, ok && c.skipAll(n, levels)
	}
	n, ok := c.mapping()
	for ; ok && n > 0; n-- {
		var key []byte
		if key, ok = c.text(); !ok {
			return 0, false
		}
		if string(key) == name {
			at = c.at
		}
		ok = c.skip(levels)
	}
	return at, ok
}
