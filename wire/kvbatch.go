package wire

import (
	"errors"
	"fmt"
	"math"
	"slices"
)

// MaxKVBytes bounds the payload of one batch of KV events.
const MaxKVBytes = 64 << 20

// maxKVNesting is how many containers of a batch may be within each other. Real ones need five.
const maxKVNesting = 16

// maxKVIdle bounds the memory, in values, that a KVBatch keeps for batches that need far less.
const maxKVIdle = 64 << 10

// Why a payload is no batch. The errors of KVBatch.Decode wrap one of them each.
var (
	ErrKVSize  = errors.New("wire: a batch of KV events is too large")
	ErrKVBatch = errors.New("wire: not a batch of KV events")
)

// KVBatch is a message's payload of KV events, decoded. Its zero value is ready for Decode, its
// memory is used again, and KVNormalizer.Each tells what it means. It is not safe for concurrent use.
type KVBatch struct {
	Time    float64 // seconds since 1970 by the engine's clock, or 0
	Rank    uint32  // valid with HasRank: the data-parallel rank that all events are of
	HasRank bool
	// What was left out, though the rest of the batch is good.
	BadRanks  int // 1 if the rank was no number within 0..2^31-1
	Malformed int // events
	Unknown   int // events of unknown types

	payload []byte
	events  []kvRaw
	hashes  []uint64 // of all events
	tokens  []uint32 // of all events
	media   []kvMedia
}

// kvRaw is one event as it came. Its ranges are of the batch's slices.
type kvRaw struct {
	lora, salt span // of the payload; empty is none
	parent     uint64
	hashes     span
	tokens     span
	media      span // sorted by block
	blockSize  uint32
	group      uint32 // valid with hasGroup
	tag        kvTag
	medium     kvMedium
	attention  kvAttention
	owner      kvOwner
	remote     bool // not held by the rank itself, or nobody knows where
	hasParent  bool
	hasGroup   bool
	pairs      bool // tokens came in pairs
}

// span is a range of one of the batch's slices. MaxKVBytes keeps it within an int32.
type span struct{ from, to int32 }

func (s span) len() int { return int(s.to - s.from) }

func (s span) of(b []byte) []byte { return b[s.from:s.to] }

// kvMedia is an object, such as an image, that has a part in a block.
type kvMedia struct {
	hash  uint64
	block uint32 // index in the event
}

// kvTag is the type of an event.
type kvTag uint8

const (
	kvUnknownTag kvTag = iota
	kvStored
	kvRemoved
	kvCleared
	kvIgnored
)

func tagOf(name []byte) kvTag {
	switch string(name) {
	case "BlockStored":
		return kvStored
	case "BlockRemoved":
		return kvRemoved
	case "AllBlocksCleared":
		return kvCleared
	case "Ignored":
		return kvIgnored
	}
	return kvUnknownTag
}

// Decode reads a payload, in whose place the batch then has only what it needs of it: payload must
// stay as it is until the next Decode. Events that are malformed or of an unknown type are counted
// and left out. On an error the batch is empty.
func (b *KVBatch) Decode(payload []byte) error {
	b.reset(len(payload))
	if len(payload) > MaxKVBytes {
		return fmt.Errorf("%w: %d bytes are more than %d", ErrKVSize, len(payload), MaxKVBytes)
	}
	b.payload = payload
	c := cursor{b: payload}
	ok := false
	if c.isMap() {
		ok = b.readMap(&c)
	} else {
		ok = b.readArray(&c)
	}
	if ok && c.at < len(payload) {
		b.reset(0)
		return fmt.Errorf("%w: %w", ErrKVBatch, errTrailing)
	}
	if !ok {
		b.reset(0)
		return fmt.Errorf("%w, by byte %d of %d", ErrKVBatch, min(c.at, len(payload)), len(payload))
	}
	return nil
}

// reset empties the batch, and lets go memory that a message of size bytes can not need.
func (b *KVBatch) reset(size int) {
	*b = KVBatch{events: reuse(b.events, size), hashes: reuse(b.hashes, size), tokens: reuse(b.tokens, size), media: reuse(b.media, size)}
}

// reuse empties s, or drops it if a message of size bytes can not need so much.
func reuse[T any](s []T, size int) []T {
	if cap(s) > maxKVIdle && cap(s) > 2*size {
		return nil
	}
	return s[:0]
}

// readArray reads [time, events, rank, ...], which may lack the rank.
func (b *KVBatch) readArray(c *cursor) bool {
	n, ok := c.array()
	if !ok || n < 2 {
		return false
	}
	if !b.readTime(c) || !b.readEvents(c) {
		return false
	}
	if n == 2 {
		return true
	}
	return b.readRank(c) && c.skipAll(n-3, maxKVNesting-1)
}

// readMap reads a batch with names for its values.
func (b *KVBatch) readMap(c *cursor) bool {
	n, ok := c.mapping()
	if !ok {
		return false
	}
	found := false
	for ; n > 0; n-- {
		key, ok := c.text()
		if !ok {
			return false
		}
		switch string(key) {
		case "ts":
			ok = b.readTime(c)
		case "events":
			ok = !found && b.readEvents(c) // twice would mean two things
			found = true
		case "data_parallel_rank", "dp_rank", "attn_dp_rank":
			ok = b.readRank(c)
		default:
			ok = c.skip(maxKVNesting - 1)
		}
		if !ok {
			return false
		}
	}
	return found
}

// readTime reads the time, which is told and not relied on: whatever else is there counts as none.
func (b *KVBatch) readTime(c *cursor) bool {
	was := *c
	var ok bool
	if b.Time, ok = c.number(); ok && !math.IsNaN(b.Time) && !math.IsInf(b.Time, 0) {
		return true
	}
	b.Time = 0
	*c = was
	return c.skip(maxKVNesting - 1)
}

func (b *KVBatch) readRank(c *cursor) bool {
	if c.null() {
		return true
	}
	was := *c
	if v, negative, ok := c.integer(); ok && !negative && v <= math.MaxInt32 {
		b.Rank, b.HasRank = uint32(v), true
		return true
	}
	*c = was
	b.BadRanks++
	return c.skip(maxKVNesting - 1)
}

func (b *KVBatch) readEvents(c *cursor) bool {
	n, ok := c.array()
	if !ok {
		return false
	}
	const least = 9 // bytes of an event: its tag
	b.events = slices.Grow(b.events, min(n, (len(c.b)-c.at)/least))
	for ; n > 0; n-- {
		was := *c
		hashes, tokens, media := len(b.hashes), len(b.tokens), len(b.media)
		e, ok := b.readEvent(c)
		if ok && e.tag != kvUnknownTag {
			b.events = append(b.events, e)
			continue
		}
		b.hashes, b.tokens, b.media = b.hashes[:hashes], b.tokens[:tokens], b.media[:media]
		if ok {
			b.Unknown++
			continue
		}
		b.Malformed++
		rest, err := skip(was.b[was.at:]) // which takes any nesting
		if err != nil {
			return false
		}
		c.at = len(c.b) - len(rest)
	}
	return true
}
