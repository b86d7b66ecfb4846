package monitor

// cursor is where a listener is in the sequence of one publisher of KV events, whose batches count
// from 0 or, with some, from 1. It is pure. The zero cursor has heard of nothing.
//
// For each batch that comes live, arrive is called first; then, if it finds a gap and there is
// somebody to ask, apply for each batch of the answer; and at the end apply for the live one,
// unless arrive said that it is to be skipped.
type cursor struct {
	applied, live sequence
}

// sequence is the number of a batch, if there was one.
type sequence struct {
	number uint64
	known  bool
}

// arrival is what a batch that came live means.
type arrival struct {
	restarted bool   // the publisher is a new process: what the old one told is void, before all else
	begins    bool   // the first batch heard of is the first that its process sent: what others know is of an older one, or comes again
	skip      bool   // a replay has brought the batch
	from      uint64 // with missing: the first batch of the gap
	missing   uint64 // batches between the last one applied and this one
}

// arrive notes that batch s came live. Numbers of one publisher only ever grow, so one that does
// not is that of a new process.
func (c *cursor) arrive(s uint64) (a arrival) {
	if c.live.known && s <= c.live.number {
		a.restarted = true
		c.applied = sequence{}
	}
	a.begins = !c.live.known && !c.applied.known && s == 0
	c.live = sequence{s, true}
	if c.applied.known && s <= c.applied.number {
		a.skip = true
		return a
	}
	a.from = c.expected()
	a.missing = s - a.from
	return a
}

// expected is the batch after the last one applied.
func (c *cursor) expected() uint64 {
	if !c.applied.known {
		return 0
	}
	return c.applied.number + 1
}

// apply is called before batch s is applied. It tells whether it is to be, and how many before it
// are lost for good: a gap is asked for once.
func (c *cursor) apply(s uint64) (ok bool, lost uint64) {
	if c.applied.known && s <= c.applied.number {
		return false, 0
	}
	if c.applied.known || s != 1 { // whoever begins with 1 counts from there, and 0 is no loss
		lost = s - c.expected()
	}
	c.applied = sequence{s, true}
	return true, lost
}
