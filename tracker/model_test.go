package tracker_test

import (
	"fmt"
	"slices"
	"time"

	"spillway/tracker"
	"spillway/worker"
)

// books is a slow, obvious tracker: a list of what is booked, added up whenever asked.
type books struct {
	cfg   tracker.Config
	ranks map[worker.Rank]*modelRank
	open  []*held // in the order of booking
}

type modelRank struct {
	checked time.Time
	anchor  time.Time
	less    map[string]uint64 // billionths that a prompt block weighs less than 1, by its prefix
}

type held struct {
	tracker.Reservation
	booked  time.Time
	prefill bool
	private []uint64 // as less, by block
}

const billion = 1_000_000_000

func newBooks(cfg tracker.Config) *books {
	return &books{cfg: cfg, ranks: map[worker.Rank]*modelRank{}}
}

func (m *books) find(id string) *held {
	if i := slices.IndexFunc(m.open, func(h *held) bool { return h.ID == id }); i >= 0 {
		return m.open[i]
	}
	return nil
}

func (m *books) on(r worker.Rank) (all []*held) {
	for _, h := range m.open {
		if h.Rank == r {
			all = append(all, h)
		}
	}
	return all
}

func (m *books) prefills(r worker.Rank) (all []*held) {
	for _, h := range m.on(r) {
		if h.prefill {
			all = append(all, h)
		}
	}
	return all
}

// prefixes counts, by prefix, the reservations of a rank that hold the block at its end.
func (m *books) prefixes(r worker.Rank) map[string]int {
	all := map[string]int{}
	for _, h := range m.on(r) {
		for i := range h.Hashes {
			all[fmt.Sprint(h.Hashes[:i+1])]++
		}
	}
	return all
}

func (m *books) load(r worker.Rank, now time.Time) (l tracker.Load) {
	rank := m.ranks[r]
	l.Requests = uint64(len(m.on(r)))
	units := uint64(0)
	for p := range m.prefixes(r) {
		units += billion - rank.less[p]
	}
	for _, h := range m.on(r) {
		for _, less := range h.private {
			units += billion - less
		}
	}
	l.DecodeBlocks = (units + billion/2) / billion
	open, timed := m.prefills(r), true
	for _, h := range open {
		l.PrefillTokens += h.PrefillTokens
		timed = timed && h.PrefillTime != nil
	}
	if len(open) == 0 || open[0].PrefillTime == nil {
		return l
	}
	front, done := open[0], open[0].PrefillTokens
	if d := uint64(*front.PrefillTime); d > 0 {
		done = front.PrefillTokens * uint64(now.Sub(rank.anchor)) / d
	}
	if !timed {
		done = min(done, front.PrefillTokens)
	}
	l.PrefillTokens -= min(done, l.PrefillTokens)
	return l
}

func (m *books) loads(now time.Time) map[worker.Rank]tracker.Load {
	all := map[worker.Rank]tracker.Load{}
	for r := range m.ranks {
		all[r] = m.load(r, now)
	}
	return all
}

// overlap is how many blocks of a prompt one reservation of the rank holds, from the start.
func (m *books) overlap(r worker.Rank, prompt []uint64) (longest int) {
	for _, h := range m.on(r) {
		n := 0
		for n < len(prompt) && n < len(h.Hashes) && prompt[n] == h.Hashes[n] {
			n++
		}
		longest = max(longest, n)
	}
	return longest
}

func (m *books) expire(r worker.Rank, now time.Time) (gone []string) {
	rank := m.ranks[r]
	if now.Sub(rank.checked) < m.cfg.CheckEvery {
		return nil
	}
	rank.checked = now
	for _, h := range m.on(r) {
		if h.Expires && now.Sub(h.booked) > m.cfg.ExpireAfter {
			m.free(h.ID, now)
			gone = append(gone, h.ID)
		}
	}
	return gone
}

func (m *books) reserve(r tracker.Reservation, limit tracker.Limit, now time.Time) error {
	switch {
	case m.ranks[r.Rank] == nil:
		return tracker.ErrUnknownRank
	case m.find(r.ID) != nil:
		return tracker.ErrDuplicate
	}
	m.expire(r.Rank, now)
	if l := m.load(r.Rank, now); l.PrefillTokens > limit.PrefillTokens || l.DecodeBlocks > limit.DecodeBlocks {
		return tracker.ErrBusy
	}
	h := &held{r, now, r.PrefillTokens > 0, make([]uint64, r.DecodeBlocks)}
	if h.prefill && len(m.prefills(r.Rank)) == 0 {
		m.ranks[r.Rank].anchor = now
	}
	m.open = append(m.open, h)
	return nil
}

func (m *books) adopt(r tracker.Reservation, now time.Time) (moved bool, err error) {
	old := m.find(r.ID)
	switch {
	case m.ranks[r.Rank] == nil:
		return false, tracker.ErrUnknownRank
	case old != nil && old.Rank == r.Rank:
		return false, tracker.ErrDuplicate
	case old != nil:
		m.free(r.ID, now)
	}
	return old != nil, m.reserve(r, tracker.NoLimit, now)
}

func (m *books) done(h *held, now time.Time) {
	rank, open := m.ranks[h.Rank], m.prefills(h.Rank)
	switch {
	case open[0] == h:
		rank.anchor = now
	case h.PrefillTime != nil:
		rank.anchor = rank.anchor.Add(*h.PrefillTime)
		if rank.anchor.After(now) {
			rank.anchor = now
		}
	}
	h.prefill = false
}

func (m *books) grow(h *held, blocks uint64, weight *float64) {
	h.private = append(h.private, make([]uint64, blocks)...)
	if weight == nil {
		return
	}
	less := billion - uint64(*weight*billion+0.5)
	for i := range h.private {
		h.private[i] = less
	}
	owners := m.prefixes(h.Rank)
	for i := len(h.Hashes); i > 0; i-- {
		p := fmt.Sprint(h.Hashes[:i])
		if owners[p] > 1 {
			break
		}
		m.ranks[h.Rank].less[p] = less
	}
}

func (m *books) free(id string, now time.Time) bool {
	h := m.find(id)
	if h == nil {
		return false
	}
	if h.prefill {
		m.done(h, now)
	}
	m.open = slices.DeleteFunc(m.open, func(o *held) bool { return o == h })
	left, rank := m.prefixes(h.Rank), m.ranks[h.Rank]
	for p := range rank.less {
		if left[p] == 0 {
			delete(rank.less, p)
		}
	}
	return true
}

func (m *books) add(r worker.Rank, now time.Time) {
	if m.ranks[r] == nil {
		m.ranks[r] = &modelRank{checked: now, less: map[string]uint64{}}
	}
}

func (m *books) register(w worker.Worker, now time.Time) {
	for r := range m.ranks {
		stays := r.DP != worker.AnyDP
		switch {
		case w.RankRouting == worker.RankByEngine:
			stays = !stays
		case w.DPSize > 0:
			stays = r.DP >= w.DPStart && r.DP < w.DPStart+w.DPSize
		}
		if r.Worker == w.ID && !stays {
			m.drop(r)
		}
	}
	switch {
	case w.RankRouting == worker.RankByEngine:
		m.add(rank(w.ID, worker.AnyDP), now)
	case w.DPSize == 0:
		m.add(rank(w.ID, 0), now)
	}
	for i := range w.DPSize {
		if w.RankRouting != worker.RankByEngine {
			m.add(rank(w.ID, w.DPStart+i), now)
		}
	}
}

func (m *books) drop(r worker.Rank) {
	delete(m.ranks, r)
	m.open = slices.DeleteFunc(m.open, func(h *held) bool { return h.Rank == r })
}
