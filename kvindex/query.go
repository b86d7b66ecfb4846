package kvindex

import (
	"math/bits"
	"slices"
	"sync/atomic"

	"spillway/kvhash"
	"spillway/worker"
)

// scratch is what a query works on.
type scratch struct {
	seqs []uint64 // sequence hashes, as far as they were needed
	hits []hit    // in step with Matches.Ranks
	row  []uint64 // holders of a block that has more than a word tells

	// Those who hold all blocks so far are in list, in order, or in set as bits.
	dense bool
	list  []uint32
	set   []uint64
	same  holders // who held the last block that was read; all who are left are of them
	near  int     // the cell of the last block in the shard that is being read, or -1

	touched uint64 // of no meaning, like a source's

	found []uint64 // bits of those in hits; all 0 between queries
}

// hit is the match of one seat on the device.
type hit struct{ seat, blocks uint32 }

// Query finds how much of a prompt, given by the hashes of its blocks, each rank holds, in all
// tiers, and leaves it in m. The time it takes depends on how much matches.
func (x *Index) Query(local []uint64, m *Matches) { x.query(local, nil, m, true) }

// QueryChained is Query for who has the sequence hashes too.
func (x *Index) QueryChained(local, seqs []uint64, m *Matches) { x.query(local, seqs, m, true) }

// QueryDevice is Query for the device alone: Host and Disk are 0 in all matches.
func (x *Index) QueryDevice(local []uint64, m *Matches) { x.query(local, nil, m, false) }

func (x *Index) query(local, seqs []uint64, m *Matches, lower bool) {
	for range patience {
		reused := x.seats.reused.Load()
		x.queryOnce(local, seqs, m, lower)
		if x.seats.reused.Load() == reused {
			return // each seat belonged to one rank all the while
		}
	}
	x.arrivals.RLock() // ranks come and go; none can come now
	defer x.arrivals.RUnlock()
	x.queryOnce(local, seqs, m, lower)
}

func (x *Index) queryOnce(local, seqs []uint64, m *Matches, lower bool) {
	m.Ranks, m.hits = m.Ranks[:0], m.hits[:0]
	if len(local) == 0 {
		return
	}
	m.device(x.device, local, seqs)
	p := x.seats.plan.Load() // after the seats were read, so that it has them all
	m.Ranks = slices.Grow(m.Ranks, len(m.hits))[:len(m.hits)]
	for i, h := range m.hits {
		r := &p.ranks[h.seat]
		m.Ranks[i] = Match{Rank: worker.Rank{Worker: worker.ID(r.worker.Load()), DP: r.dp.Load()}, Device: int(h.blocks)}
	}
	if lower {
		m.lower(x, p, local)
	}
}

// device finds who holds the longest prefix, block by block until nobody is left. seqs are the sequence
// hashes, or nil if they are to be computed.
func (m *Matches) device(b *blocks, local, seqs []uint64) {
	m.seqs = append(m.seqs[:0], local[0])
	s := b.shard(b.first(local[0]))
	var held holders
	held, m.near, m.row = s.read(local[0], -1, m.row)
	if held == 0 {
		return
	}
	m.start(held)
	m.same = held
	for i := 1; i < len(local); {
		if i+stretch > len(m.seqs) && len(m.seqs) < len(local) {
			m.lookAhead(b, local, seqs)
		}
		if i%stretch == 0 {
			s, m.near = b.shard(b.first(m.seqs[i])), -1
		}
		end := min((i/stretch+1)*stretch, len(m.seqs))
		if i += m.pass(s, m.seqs[i:end]); i == end {
			continue
		}
		held, m.near, m.row = s.read(m.seqs[i], m.near, m.row)
		if m.same = held; !m.keep(held, i) {
			return
		}
		i++
	}
	m.drop(len(local))
}

// lookAhead computes the next sequence hashes, as many as there are but no more than a stretch,
// and looks at where their blocks are, so that what is not in the processor's cache comes
// meanwhile. Those of one stretch are side by side.
func (m *Matches) lookAhead(b *blocks, local, seqs []uint64) {
	n := len(m.seqs)
	end := min(len(local), n+min(n, stretch))
	if seqs != nil {
		m.seqs = append(m.seqs, seqs[n:end]...)
	} else {
		seq := m.seqs[n-1]
		for _, l := range local[n:end] {
			seq = kvhash.Next(seq, l)
			m.seqs = append(m.seqs, seq)
		}
	}
	if begin := (n + stretch - 1) / stretch * stretch; begin < end {
		m.touched += b.touch(m.seqs[begin], b.first(m.seqs[begin]))
	}
}

// pass returns how many of the next blocks, which are in one shard, all of those hold who have
// held all before. If a writer comes between it is 0; read will tell more.
func (m *Matches) pass(s *shard, seqs []uint64) (n int) {
	v, t := s.version.Load(), s.table.Load()
	if v&1 != 0 || t == nil {
		return 0
	}
	near := m.near
	for _, seq := range seqs {
		at := t.after(near, seq)
		if at < 0 {
			break
		}
		held := holders(t.cells[at].holders.Load())
		if held.inline() > 0 {
			if held != m.same {
				break
			}
		} else if !held.dense() || !m.within(s.rows.words(held.size(), held.row())) {
			break
		}
		near = at
		n++
	}
	if s.version.Load() != v {
		return 0
	}
	m.near = near
	return n
}

// within tells whether a row of bits has all who hold all blocks so far.
func (m *Matches) within(row []atomic.Uint64) bool {
	if !m.dense {
		for _, s := range m.list {
			if i := int(s / 64); i >= len(row) || row[i].Load()&(1<<(s%64)) == 0 {
				return false
			}
		}
		return true
	}
	if len(row) < len(m.set) {
		return false
	}
	var missing uint64
	for i, w := range m.set {
		missing |= w &^ row[i].Load()
	}
	return missing == 0
}

// start makes all of held those who hold all so far.
func (m *Matches) start(held holders) {
	m.list = m.list[:0]
	if m.dense = held.inline() == 0 && held.dense(); m.dense {
		m.set = append(m.set[:0], m.row...)
		return
	}
	for i := range held.inline() {
		m.list = append(m.list, held.seat(i))
	}
	if held.inline() == 0 {
		for i := range held.count() {
			m.list = append(m.list, listed(m.row, i))
		}
	}
}

// listed is the i-th seat of a row that is a list.
func listed(row []uint64, i int) uint32 { return uint32(row[i/2] >> (32 * (i % 2))) }

func (m *Matches) hit(seat uint32, blocks int) { m.hits = append(m.hits, hit{seat, uint32(blocks)}) }

// drop ends the match of all who are left.
func (m *Matches) drop(blocks int) {
	if !m.dense {
		for _, s := range m.list {
			m.hit(s, blocks)
		}
		return
	}
	n := len(m.hits)
	for _, w := range m.set {
		n += bits.OnesCount64(w)
	}
	hits := slices.Grow(m.hits, n-len(m.hits))
	for i, w := range m.set {
		for ; w != 0; w &= w - 1 {
			hits = append(hits, hit{uint32(i*64 + bits.TrailingZeros64(w)), uint32(blocks)})
		}
	}
	m.hits = hits
}

// keep lets only those go on who hold the next block too; for the others the match ends. It tells
// whether somebody is left.
func (m *Matches) keep(held holders, blocks int) bool {
	switch {
	case held == 0:
		m.drop(blocks)
		return false
	case m.dense && held.inline() == 0 && held.dense():
		return m.intersect(blocks)
	case m.dense:
		m.choose(held, blocks)
	case held.inline() == 0 && held.dense():
		left := m.list[:0]
		for _, s := range m.list {
			if i := int(s / 64); i < len(m.row) && m.row[i]&(1<<(s%64)) != 0 {
				left = append(left, s)
			} else {
				m.hit(s, blocks)
			}
		}
		m.list = left
	default:
		m.merge(held, blocks)
	}
	return len(m.list) > 0
}

// intersect is keep for a set and a row of bits.
func (m *Matches) intersect(blocks int) bool {
	left := 0
	for i, w := range m.set {
		var row uint64
		if i < len(m.row) {
			row = m.row[i]
		}
		for gone := w &^ row; gone != 0; gone &= gone - 1 {
			m.hit(uint32(i*64+bits.TrailingZeros64(gone)), blocks)
		}
		m.set[i] = w & row
		left += bits.OnesCount64(w & row)
	}
	if 2*left < len(m.set) { // a list is shorter
		m.list = m.list[:0]
		for i, w := range m.set {
			for ; w != 0; w &= w - 1 {
				m.list = append(m.list, uint32(i*64+bits.TrailingZeros64(w)))
			}
		}
		m.dense = false
	}
	return left > 0
}

// choose is keep for a set and holders that are listed.
func (m *Matches) choose(held holders, blocks int) {
	m.list = m.list[:0]
	take := func(s uint32) {
		if i := int(s / 64); i < len(m.set) && m.set[i]&(1<<(s%64)) != 0 {
			m.list = append(m.list, s)
			m.set[i] &^= 1 << (s % 64)
		}
	}
	if n := held.inline(); n > 0 {
		for i := range n {
			take(held.seat(i))
		}
	} else {
		for i := range held.count() {
			take(listed(m.row, i))
		}
	}
	m.drop(blocks)
	m.dense = false
}

// merge is keep for a list and holders that are listed. Both are in order.
func (m *Matches) merge(held holders, blocks int) {
	n := held.inline()
	few := n > 0
	if !few {
		n = held.count()
	}
	left, i := m.list[:0], 0
	for _, s := range m.list {
		for ; i < n; i++ {
			if few && held.seat(i) >= s || !few && listed(m.row, i) >= s {
				break
			}
		}
		if i < n && (few && held.seat(i) == s || !few && listed(m.row, i) == s) {
			left = append(left, s)
		} else {
			m.hit(s, blocks)
		}
	}
	m.list = left
}

// lower extends the matches by what lower tiers hold, and adds those of ranks whose first block
// is only there.
func (m *Matches) lower(x *Index, p *plan, local []uint64) {
	for i, h := range m.hits {
		if p.lower[h.seat].Load() != 0 {
			m.walk(x.device, p.sources[h.seat].Load(), &m.Ranks[i], local)
		}
	}
	var roots [worker.Tiers]bool
	for t := worker.HostPinned; t < worker.Tiers; t++ {
		roots[t] = !x.roots[t].empty(local[0])
	}
	if roots == [worker.Tiers]bool{} {
		return
	}
	m.found = fit(m.found, len(p.sources))
	for _, h := range m.hits {
		m.found[h.seat/64] |= 1 << (h.seat % 64)
	}
	for t := worker.HostPinned; t < worker.Tiers; t++ {
		if !roots[t] {
			continue
		}
		var held holders
		root := x.roots[t].shard(x.roots[t].first(local[0]))
		if held, _, m.row = root.read(local[0], -1, m.row); held == 0 {
			continue
		}
		m.start(held)
		if m.dense { // as a list
			m.dense = false
			for i, w := range m.set {
				for ; w != 0; w &= w - 1 {
					m.list = append(m.list, uint32(i*64+bits.TrailingZeros64(w)))
				}
			}
		}
		for _, seat := range m.list {
			if int(seat) >= len(p.sources) || m.found[seat/64]&(1<<(seat%64)) != 0 {
				continue // it has come after we got the plan, or has a match already
			}
			m.found[seat/64] |= 1 << (seat % 64)
			m.hit(seat, 0)
			s := p.sources[seat].Load()
			if s == nil {
				continue
			}
			match := Match{Rank: s.rank}
			if m.walk(x.device, s, &match, local); match.Host+match.Disk > 0 {
				m.Ranks = append(m.Ranks, match)
			}
		}
	}
	for _, h := range m.hits {
		m.found[h.seat/64] = 0
	}
}

// fit returns a set of n bits, all 0. s is one that is too short, or all 0.
func fit(s []uint64, n int) []uint64 {
	if n = (n + 63) / 64; n > len(s) {
		return make([]uint64, n)
	}
	return s
}

// walk extends a match by the lower tiers of its rank, each from where the one before it ends.
func (m *Matches) walk(b *blocks, s *source, match *Match, local []uint64) {
	if s == nil {
		return
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	pos, last := match.Device, Parent{}
	if pos > 0 {
		engine, ok := s.aliases.newest(m.seqs[pos-1], b.first(m.seqs[(pos-1)/stretch*stretch]))
		if !ok {
			return // removed meanwhile
		}
		last = After(engine)
	}
	for t := worker.HostPinned; t < worker.Tiers; t++ {
		e := s.lower[t]
		for e != nil && pos < len(local) {
			next, ok := e.next(last, local[pos])
			if !ok {
				break
			}
			last = After(next)
			pos++
			if t == worker.HostPinned {
				match.Host++
			} else {
				match.Disk++
			}
		}
	}
}
