package wire

// Bounds of a saltTable.
const (
	maxSalted    = 1 << 20  // blocks
	maxSaltBytes = 64 << 20 // of all their salts
)

// saltTable knows the cache salts of the blocks that have one, by rank. Engines name the salt of a
// prompt with its first blocks only; those after them are known by their parents. Its zero value
// is empty.
type saltTable struct {
	ranks  map[uint32]map[uint64]string // by the engine's hash; "" is ambiguous, which stays
	blocks int
	bytes  int
}

// of finds the salt of a store, which is own or that of its parent. A parent that is not known
// counts as one without: it would look the same. It returns false if two salts claim the parent.
func (t *saltTable) of(dp uint32, e *kvRaw, own []byte) (salt string, ok bool) {
	if len(own) > 0 {
		return string(own), true
	}
	if known := t.ranks[dp]; len(known) > 0 && e.hasParent {
		salt, claimed := known[e.parent]
		return salt, !claimed || salt != ""
	}
	return "", true
}

// store notes the salt of blocks, or that they have none. It returns for how many there is no room.
func (t *saltTable) store(dp uint32, salt string, hashes []uint64) (full int) {
	known := t.ranks[dp]
	if salt == "" && len(known) == 0 {
		return 0
	}
	for _, h := range hashes {
		was, ok := known[h]
		switch {
		case ok && was != salt:
			known[h] = ""
			t.bytes -= len(was)
		case ok || salt == "":
		case t.blocks >= maxSalted || t.bytes+len(salt) > maxSaltBytes:
			full++
		default:
			if known == nil {
				known = t.add(dp)
			}
			known[h] = salt
			t.blocks++
			t.bytes += len(salt)
		}
	}
	return full
}

// add makes a rank known.
func (t *saltTable) add(dp uint32) map[uint64]string {
	if t.ranks == nil {
		t.ranks = map[uint32]map[uint64]string{}
	}
	t.ranks[dp] = map[uint64]string{}
	return t.ranks[dp]
}

// remove forgets blocks of a rank, but not that they are ambiguous.
func (t *saltTable) remove(dp uint32, hashes []uint64) {
	known := t.ranks[dp]
	if len(known) == 0 {
		return
	}
	for _, h := range hashes {
		if salt := known[h]; salt != "" {
			delete(known, h)
			t.blocks--
			t.bytes -= len(salt)
		}
	}
	if len(known) == 0 {
		delete(t.ranks, dp)
	}
}

// clear forgets all blocks of a rank.
func (t *saltTable) clear(dp uint32) {
	for _, salt := range t.ranks[dp] {
		t.blocks--
		t.bytes -= len(salt)
	}
	delete(t.ranks, dp)
}
