package wire

import (
	"slices"

	"spillway/kvhash"
	"spillway/worker"
)

// KVKind is what happened to blocks.
type KVKind uint8

// What can happen to blocks.
const (
	KVStore  KVKind = iota + 1 // they are there, each after the one before it
	KVRemove                   // they are there no more
	KVClear                    // none of the rank is there any more, in any tier
)

// KVKinds are all kinds.
var KVKinds = []KVKind{KVStore, KVRemove, KVClear}

// String is the kind as dumps and metrics name it.
func (k KVKind) String() string {
	switch k {
	case KVStore:
		return "stored"
	case KVRemove:
		return "removed"
	case KVClear:
		return "cleared"
	}
	return "unknown"
}

// KVEvent tells an index what has happened to blocks of one rank.
type KVEvent struct {
	Kind      KVKind
	Rank      worker.Rank
	Tier      worker.Tier // of a store and a remove
	HasParent bool        // of a store: the first block comes after Parent, else it begins a prompt
	Parent    uint64      // the engine's hash of a block
	Engine    []uint64    // of a store and a remove: the engine's hashes of the blocks
	Local     []uint64    // of a store: our hashes of the tokens of the same blocks
}

// KVNormalizer makes of the batches of one listener, in their order, what an index can use: it
// leaves out what does not tell of the rank's own blocks of main attention, finds the cache salt
// of blocks whose events leave that to their parents, and hashes tokens. It is not safe for
// concurrent use.
type KVNormalizer struct {
	Counts KVCounts // since NewKVNormalizer; read only

	rank      worker.Rank // that the listener is registered for
	blockSize uint32
	groups    map[kvGroup]kvAttention
	salts     saltTable
	zero      map[uint32]bool // ranks that may hold a block of hash 0
	zeroFull  bool            // as may all others: there was no room to note which
	out       KVEvent
	local     []uint64
	media     [][]uint64
	hashes    []uint64 // what media refers to
	twice     repeats
	lora      string // of the last store that had blocks
	salt      string // of the store at hand
}

// kvGroup is a group of layers of a rank, all of one kind of attention.
type kvGroup struct{ dp, group uint32 }

// Bounds of what a KVNormalizer keeps. What finds no room counts as KVTableFull.
const (
	maxKVGroups = 4096
	maxKVRanks  = 4096
)

// NewKVNormalizer makes the normalizer of a listener for rank, with blocks of blockSize tokens.
func NewKVNormalizer(rank worker.Rank, blockSize uint32) *KVNormalizer {
	n := &KVNormalizer{rank: rank, blockSize: blockSize}
	n.Reset()
	return n
}

// Reset forgets what earlier batches have told, but not the counts, as if the engine were new.
func (n *KVNormalizer) Reset() {
	n.groups = map[kvGroup]kvAttention{}
	n.salts = saltTable{}
	n.zero = map[uint32]bool{}
	n.zeroFull = false
}

// Each calls apply with what b does to the index, event by event. What apply is given is valid
// until it returns.
func (n *KVNormalizer) Each(b *KVBatch, apply func(*KVEvent)) {
	n.Counts[KVMalformed] += uint64(b.Malformed)
	n.Counts[KVUnknownEvent] += uint64(b.Unknown)
	n.Counts[KVBadRank] += uint64(b.BadRanks)
	rank := n.rank
	if b.HasRank {
		rank.DP = b.Rank
	}
	for i := range b.events {
		e := &b.events[i]
		n.out = KVEvent{Rank: rank}
		out := &n.out
		if why, keep := n.filter(b, e, rank.DP); !keep {
			n.Counts[why]++
			continue
		}
		switch e.tag {
		case kvCleared:
			out.Kind = KVClear
			delete(n.zero, rank.DP)
		case kvRemoved:
			out.Kind, out.Tier, out.Engine = KVRemove, e.medium.tier(), b.hashes[e.hashes.from:e.hashes.to]
		case kvStored:
			if !n.convert(b, e, out) {
				n.Counts[KVSelfReference]++
				continue
			}
		}
		apply(out)
	}
	n.release()
}

// release lets go memory that only unusually large batches need.
func (n *KVNormalizer) release() {
	if cap(n.local) > maxKVIdle {
		n.local = nil
	}
	if cap(n.media) > maxKVIdle || cap(n.hashes) > maxKVIdle {
		n.media, n.hashes = nil, nil
	}
	if cap(n.twice.slots) > maxKVIdle {
		n.twice.slots = nil
	}
}

// filter tells whether an event of a rank is about blocks that count, or why not. It learns from
// stores and finds the salt of e.
func (n *KVNormalizer) filter(b *KVBatch, e *kvRaw, dp uint32) (why KVReason, keep bool) {
	switch {
	case e.owner == ownedBySecondTier:
		return KVSecondTier, false
	case e.owner == ownedByUnknown:
		return KVUnknownOwner, false
	case e.tag == kvIgnored:
		return KVIgnoredEvent, false
	case e.tag == kvCleared:
		n.salts.clear(dp)
		return 0, true
	case e.remote:
		return KVNotLocal, false
	case e.medium == onUnknown:
		return KVUnknownMedium, false
	case e.medium == onDisk || e.medium == onExternal:
		n.salt = string(e.salt.of(b.payload))
		return 0, true // these neither read nor write what is known of groups and salts
	}
	if why, keep := n.filterGroup(e, dp); !keep {
		return why, false
	}
	hashes := b.hashes[e.hashes.from:e.hashes.to]
	if e.tag == kvRemoved {
		n.salts.remove(dp, hashes)
		return 0, true
	}
	var ok bool
	if n.salt, ok = n.salts.of(dp, e, e.salt.of(b.payload)); !ok {
		return KVAmbiguousNamespace, false
	}
	n.Counts[KVTableFull] += uint64(n.salts.store(dp, n.salt, hashes))
	return 0, true
}

// filterGroup tells whether an event is about main attention, or why not. Only stores teach what
// kind a group is of; a remove tells its group alone.
func (n *KVNormalizer) filterGroup(e *kvRaw, dp uint32) (why KVReason, keep bool) {
	key := kvGroup{dp, e.group}
	if e.attention != unsaidAttention {
		if e.tag == kvStored && e.hasGroup {
			n.learn(key, e.attention)
		}
		switch e.attention {
		case mainAttention:
			return 0, true
		case otherAttention:
			return KVOtherAttention, false
		}
		return KVUnknownAttention, false
	}
	if !e.hasGroup {
		return 0, true
	}
	switch n.groups[key] {
	case mainAttention:
		return 0, true
	case otherAttention:
		return KVOtherGroup, false
	case unknownAttention:
		return KVUnknownAttention, false
	}
	return KVUnknownGroup, e.group == 0
}

// learn notes of what kind a group is.
func (n *KVNormalizer) learn(key kvGroup, a kvAttention) {
	was, known := n.groups[key]
	switch {
	case was == a:
	case known || len(n.groups) < maxKVGroups:
		n.groups[key] = a
	default:
		n.Counts[KVTableFull]++
	}
}

// tier is where the index has the blocks of a known medium.
func (m kvMedium) tier() worker.Tier {
	return [...]worker.Tier{onDevice: worker.Device, onHost: worker.HostPinned, onDisk: worker.Disk, onExternal: worker.External}[m]
}

// convert makes a store of e, or returns false if e names a block twice.
func (n *KVNormalizer) convert(b *KVBatch, e *kvRaw, out *KVEvent) bool {
	engine := b.hashes[e.hashes.from:e.hashes.to]
	if n.twice.in(engine, e.parent, e.hasParent) {
		return false
	}
	out.Kind, out.Tier = KVStore, e.medium.tier()
	out.Parent, out.HasParent = e.parent, e.hasParent && !n.stray(e, out.Rank.DP)
	tokens := b.tokens[e.tokens.from:e.tokens.to]
	o := kvhash.Options{BlockSize: int(n.blockSize), Eagle: e.pairs}
	kept := 0
	switch {
	case len(engine) == 0:
	case e.blockSize == 0 && len(tokens) == 0:
		n.Counts[KVPlaceholder]++
	case e.blockSize != n.blockSize:
		n.Counts[KVBlockSize]++
	default:
		if kept = min(len(engine), o.Blocks(len(tokens))); kept < len(engine) {
			n.Counts[KVShortTokens]++
		}
	}
	out.Engine, n.local = engine[:kept], n.local[:0]
	if kept > 0 {
		o.LoRA, o.Salt = n.loraName(e.lora.of(b.payload)), n.salt
		o.Multimodal = n.mediaOf(b.media[e.media.from:e.media.to], kept)
		need := kept * o.BlockSize
		if o.Eagle {
			need++
		}
		n.local = kvhash.AppendBlocks(n.local, tokens[:need], o)
	}
	out.Local = n.local
	n.noteZero(out)
	return true
}

// loraName is lora as a string. Most events are of the adapter that the last one was of.
func (n *KVNormalizer) loraName(lora []byte) string {
	if string(lora) != n.lora {
		n.lora = string(lora)
	}
	return n.lora
}

// mediaOf arranges the objects of the first blocks by block.
func (n *KVNormalizer) mediaOf(media []kvMedia, blocks int) [][]uint64 {
	if len(media) == 0 {
		return nil
	}
	n.hashes, n.media = slices.Grow(n.hashes[:0], len(media)), n.media[:0]
	for _, m := range media {
		n.hashes = append(n.hashes, m.hash)
	}
	for i := 0; i < len(media) && int(media[i].block) < blocks; {
		for len(n.media) < int(media[i].block) {
			n.media = append(n.media, nil)
		}
		from := i
		for i < len(media) && media[i].block == media[from].block {
			i++
		}
		n.media = append(n.media, n.hashes[from:i])
	}
	return n.media
}

// stray tells whether e has a parent of 0 that can only mean none: one encoder writes 0 for it.
// Whether a rank that has had a block of that hash still does is for the index to know.
func (n *KVNormalizer) stray(e *kvRaw, dp uint32) bool {
	return e.parent == 0 && !n.zeroFull && !n.zero[dp]
}

// noteZero notes that a rank has a block of hash 0.
func (n *KVNormalizer) noteZero(e *KVEvent) {
	for _, h := range e.Engine {
		if h != 0 {
			continue
		}
		if len(n.zero) < maxKVRanks {
			n.zero[e.Rank.DP] = true
		} else {
			n.zeroFull = true
		}
		return
	}
}
