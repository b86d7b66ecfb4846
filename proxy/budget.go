package proxy

import (
	"sync"
	"sync/atomic"
)

// budget bounds the memory of all request bodies in flight. It is safe for concurrent use, and a
// body of a few KiB costs it two atomic additions.
type budget struct {
	limit int64        // bytes
	held  atomic.Int64 // bytes claimed and not yet returned; above limit only while a claim is refused
}

// claim takes n bytes. It refuses them if less than spare would then be free; nothing is taken then.
func (b *budget) claim(n, spare int) bool {
	if b.held.Add(int64(n)) <= b.limit-int64(spare) {
		return true
	}
	b.release(n)
	return false
}

func (b *budget) release(n int) { b.held.Add(-int64(n)) }

// The sizes of the parts that a body is read into, in bytes: it moves to the next size when it
// has filled one, and is a chain of the largest from then on. So what is claimed is in proportion
// to what came, and not to what a client says will come.
const (
	smallPart = 4 << 10
	midPart   = 16 << 10
	largePart = 64 << 10
)

// parts reuses parts by size.
var parts [3]sync.Pool

// plenty is the share of the budget, one in so many, up to which announcements are believed.
const plenty = 4

func partClass(size int) int {
	switch {
	case size <= smallPart:
		return 0
	case size <= midPart:
		return 1
	}
	return 2
}

// bodyMemory is what one request holds of the budget. It belongs to one goroutine; its zero value
// with a budget is empty. Release returns all of it.
type bodyMemory struct {
	budget  *budget
	claimed int
	chain   []*[]byte // parts in use; all but the last are full
	one     [1]*[]byte
}

// more claims n bytes that are no part, as copies of the body are.
func (m *bodyMemory) more(n int) bool {
	ok := m.budget.claim(n, 0)
	if ok {
		m.claimed += n
	}
	return ok
}

// begin returns an empty part for a body of which size bytes are announced, or nil if there is no
// memory for it. A size that is not positive is unknown. Where memory is plentiful an announcement is
// believed up to largePart, which saves a read and moving what came into a larger part.
func (m *bodyMemory) begin(size int64) []byte {
	first := smallPart
	switch { // one byte more than the body, so that its end is met without growing
	case size >= midPart && size < largePart && m.budget.held.Load() < m.budget.limit/plenty:
		first = largePart
	case size >= smallPart:
		first = midPart
	}
	if !m.add(first) {
		return nil
	}
	return (*m.chain[0])[:0]
}

// add puts a part at the end of the chain. No body may grow beyond what it leaves to others: so a
// few that take all they can get do not keep out those which need little.
func (m *bodyMemory) add(size int) bool {
	if !m.budget.claim(size, max(m.claimed, size)) {
		return false
	}
	m.claimed += size
	if m.chain == nil {
		m.chain = m.one[:0]
	}
	p, ok := parts[partClass(size)].Get().(*[]byte)
	if !ok {
		b := make([]byte, size)
		p = &b
	}
	m.chain = append(m.chain, p)
	return true
}

// grow returns where a body goes on that has filled its last part, or nil if there is no memory
// for it. What the part returned holds already is a piece of the body that was moved into it.
func (m *bodyMemory) grow() []byte {
	last := *m.chain[len(m.chain)-1]
	if len(last) == largePart {
		if !m.add(largePart) {
			return nil
		}
		return (*m.chain[len(m.chain)-1])[:0]
	}
	if !m.add(4 * len(last)) {
		return nil
	}
	next := append((*m.chain[1])[:0], last...)
	m.drop(m.chain[:1])
	m.chain = append(m.chain[:0], m.chain[1])
	return next
}

// whole returns the body, last being how much of the last part it fills, or nil if there is no
// memory to put it together.
func (m *bodyMemory) whole(last int) []byte {
	n := len(m.chain) - 1
	if n == 0 {
		return (*m.chain[0])[:last]
	}
	size := n*largePart + last
	if !m.more(size) {
		return nil
	}
	b := make([]byte, 0, size)
	for _, p := range m.chain[:n] {
		b = append(b, *p...)
	}
	b = append(b, (*m.chain[n])[:last]...)
	m.drop(m.chain)
	m.chain = nil
	return b
}

// drop gives parts back to be used again.
func (m *bodyMemory) drop(dropped []*[]byte) {
	for _, p := range dropped {
		m.claimed -= len(*p)
		m.budget.release(len(*p))
		parts[partClass(len(*p))].Put(p)
	}
}

// release gives back everything; the body is gone. It may be called more than once.
func (m *bodyMemory) release() {
	m.drop(m.chain)
	m.chain = nil
	m.budget.release(m.claimed)
	m.claimed = 0
}
