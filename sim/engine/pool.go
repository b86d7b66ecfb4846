package engine

// pool is the KV memory of one rank: blocks that sequences refer to, blocks that nobody refers
// to but whose content can be reused (idle), and blank ones. A named block can be found by the
// hash of its content and all before it. Content is computed after the block is named, so two
// prompts admitted together share their prefix: prefill is first come first served, and the
// second finds the content when its turn comes. An idle block is always named and computed.
//
// Equal 64-bit hashes are taken for equal content.
type pool struct {
	blocks  []block
	blank   []int32          // a stack
	named   map[uint64]int32 // by hash
	idle    int              // length of the list of idle blocks
	oldest  int32            // first of that list, next to be evicted, or none
	newest  int32            // last of it, or none
	journal *journal         // of reusable blocks, or nil
}

type block struct {
	hash       uint64
	parent     uint64 // name of the block before it, valid with hasParent; known once the block is computed
	refs       int32
	prev, next int32 // neighbours in the list of idle blocks
	named      bool
	computed   bool
	hasParent  bool
	noted      bool // the journal has told that it is reusable
}

const none = int32(-1)

func newPool(blocks int) pool {
	p := pool{
		blocks: make([]block, blocks),
		blank:  make([]int32, blocks),
		named:  make(map[uint64]int32),
		oldest: none,
		newest: none,
	}
	for i := range p.blank {
		p.blank[i] = int32(blocks - 1 - i)
	}
	return p
}

// available is how many blocks take can give.
func (p *pool) available() int { return len(p.blank) + p.idle }

// used is how many blocks sequences refer to.
func (p *pool) used() int { return len(p.blocks) - p.available() }

// take gives a block with one reference and no content: a blank one, else the least recently
// used idle one, which is forgotten.
func (p *pool) take() (int32, bool) {
	i := p.oldest
	switch {
	case len(p.blank) > 0:
		i = p.blank[len(p.blank)-1]
		p.blank = p.blank[:len(p.blank)-1]
	case i != none:
		p.unlink(i)
		delete(p.named, p.blocks[i].hash)
		p.journal.evicted(&p.blocks[i])
	default:
		return none, false
	}
	p.blocks[i] = block{refs: 1, prev: none, next: none}
	return i, true
}

// ref adds a reference to a named block.
func (p *pool) ref(i int32) {
	if p.blocks[i].refs == 0 {
		p.unlink(i)
	}
	p.blocks[i].refs++
}

// unref takes a reference back. The last one leaves a block with reusable content idle as the
// most recently used, and makes any other blank.
func (p *pool) unref(i int32) {
	b := &p.blocks[i]
	b.refs--
	if b.refs > 0 {
		return
	}
	if b.named && b.computed {
		b.prev, b.next = p.newest, none
		if p.newest == none {
			p.oldest = i
		} else {
			p.blocks[p.newest].next = i
		}
		p.newest = i
		p.idle++
		return
	}
	if b.named {
		delete(p.named, b.hash)
		b.named = false
	}
	p.blank = append(p.blank, i)
}

// name makes a block findable. If another block already has the name, this one stays nameless:
// a duplicate, blank again when it is given back.
func (p *pool) name(i int32, hash uint64) {
	b := &p.blocks[i]
	if b.named {
		return
	}
	if _, taken := p.named[hash]; taken {
		return
	}
	b.hash, b.named = hash, true
	p.named[hash] = i
}

func (p *pool) unlink(i int32) {
	b := &p.blocks[i]
	if b.prev == none {
		p.oldest = b.next
	} else {
		p.blocks[b.prev].next = b.next
	}
	if b.next == none {
		p.newest = b.prev
	} else {
		p.blocks[b.next].prev = b.prev
	}
	b.prev, b.next = none, none
	p.idle--
}
