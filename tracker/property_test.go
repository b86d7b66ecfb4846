package tracker_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"spillway/tracker"
	"spillway/worker"
)

// books is a slow, obvious tracker: a list of what is booked, added up whenever asked.
type books struct {
	ranks map[worker.Rank]bool
	open  []held
}

type held struct {
	tracker.Reservation
	prefill bool
}

func (m *books) find(id string) int {
	return slices.IndexFunc(m.open, func(h held) bool { return h.ID == id })
}

func (m *books) load(r worker.Rank) (l tracker.Load) {
	for _, h := range m.open {
		if h.Rank == r {
			l.Requests++
			l.DecodeBlocks += h.DecodeBlocks
			if h.prefill {
				l.PrefillTokens += h.PrefillTokens
			}
		}
	}
	return l
}

func (m *books) loads() map[worker.Rank]tracker.Load {
	all := map[worker.Rank]tracker.Load{}
	for r := range m.ranks {
		all[r] = m.load(r)
	}
	return all
}

func (m *books) reserve(r tracker.Reservation, limit tracker.Limit) error {
	switch l := m.load(r.Rank); {
	case !m.ranks[r.Rank]:
		return tracker.ErrUnknownRank
	case m.find(r.ID) >= 0:
		return tracker.ErrDuplicate
	case l.PrefillTokens > limit.PrefillTokens || l.DecodeBlocks > limit.DecodeBlocks:
		return tracker.ErrBusy
	}
	m.open = append(m.open, held{r, true})
	return nil
}

func (m *books) free(id string) bool {
	i := m.find(id)
	if i >= 0 {
		m.open = slices.Delete(m.open, i, i+1)
	}
	return i >= 0
}

func (m *books) register(w worker.Worker) {
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
		m.ranks[rank(w.ID, worker.AnyDP)] = true
	case w.DPSize == 0:
		m.ranks[rank(w.ID, 0)] = true
	}
	for i := range w.DPSize {
		if w.RankRouting != worker.RankByEngine {
			m.ranks[rank(w.ID, w.DPStart+i)] = true
		}
	}
}

func (m *books) drop(r worker.Rank) {
	delete(m.ranks, r)
	m.open = slices.DeleteFunc(m.open, func(h held) bool { return h.Rank == r })
}

// TestAgreesWithModel compares a tracker with the slow one after each of many random steps.
// After everything has been freed, every load is exactly zero.
func TestAgreesWithModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tr, m := tracker.New(), &books{ranks: map[worker.Rank]bool{}}
		bookOf := map[worker.ID]*tracker.Book{}
		ids := rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f"})
		workers := rapid.Map(rapid.IntRange(1, 3), func(i int) worker.ID { return worker.ID(i) })
		ranks := rapid.SampledFrom([]uint32{0, 1, 2, 3, worker.AnyDP})
		amount := rapid.Uint64Range(0, 300)
		t.Repeat(map[string]func(*rapid.T){
			"register": func(t *rapid.T) {
				w := worker.Worker{
					ID: workers.Draw(t, "worker"), DPSize: rapid.Uint32Range(0, 3).Draw(t, "size"),
					RankRouting: rapid.SampledFrom([]worker.RankRouting{worker.RankBySpillway, worker.RankBySpillway, worker.RankByEngine}).Draw(t, "routing"),
				}
				if w.DPSize > 0 {
					w.DPStart = rapid.Uint32Range(0, 2).Draw(t, "start")
				}
				bookOf[w.ID] = tr.Register(&w)
				m.register(w)
			},
			"unregister": func(t *rapid.T) {
				id := workers.Draw(t, "worker")
				tr.Unregister(id)
				for r := range maps.Clone(m.ranks) {
					if r.Worker == id {
						m.drop(r)
					}
				}
				delete(bookOf, id)
			},
			"add rank": func(t *rapid.T) {
				r := rank(workers.Draw(t, "worker"), rapid.Uint32Range(0, 3).Draw(t, "dp"))
				if got, want := tr.AddRank(r), bookOf[r.Worker] != nil; got != want {
					t.Fatalf("AddRank(%+v) = %v, want %v", r, got, want)
				} else if got {
					m.ranks[r] = true
				}
			},
			"reserve": func(t *rapid.T) {
				r := reservation(ids.Draw(t, "id"), rank(workers.Draw(t, "worker"), ranks.Draw(t, "dp")), amount.Draw(t, "prefill"), amount.Draw(t, "blocks"))
				limit := tracker.Limit{PrefillTokens: amount.Draw(t, "prefill limit"), DecodeBlocks: amount.Draw(t, "decode limit")}
				got := tr.Reserve(r, limit, start)
				if want := m.reserve(r, limit); !errors.Is(got, want) {
					t.Fatalf("Reserve(%+v, %+v) = %v, want %v", r, limit, got, want)
				}
			},
			"prefill done": func(t *rapid.T) {
				id := ids.Draw(t, "id")
				_, got := tr.PrefillDone(id, start)
				i := m.find(id)
				if want := i >= 0 && m.open[i].prefill; got != want {
					t.Fatalf("PrefillDone(%s) = %v, want %v", id, got, want)
				}
				if i >= 0 {
					m.open[i].prefill = false
				}
			},
			"grow": func(t *rapid.T) {
				id, blocks := ids.Draw(t, "id"), rapid.Uint64Range(0, 3).Draw(t, "blocks")
				_, got := tr.Grow(id, blocks, start)
				i := m.find(id)
				if want := i >= 0 && blocks > 0; got != want {
					t.Fatalf("Grow(%s, %d) = %v, want %v", id, blocks, got, want)
				}
				if i >= 0 {
					m.open[i].DecodeBlocks += blocks
				}
			},
			"free": func(t *rapid.T) {
				id := ids.Draw(t, "id")
				if _, got := tr.Free(id); got != m.free(id) {
					t.Fatalf("Free(%s) = %v, want %v", id, got, !got)
				}
			},
			"": func(t *rapid.T) { agree(t, tr, m, bookOf) },
		})
		for _, h := range slices.Clone(m.open) {
			tr.Free(h.ID)
			m.free(h.ID)
		}
		agree(t, tr, m, bookOf)
		for r, load := range tr.Loads() {
			if load != (tracker.Load{}) {
				t.Fatalf("load of %+v after all is freed = %+v, want none", r, load)
			}
		}
	})
}

func agree(t *rapid.T, tr *tracker.Tracker, m *books, bookOf map[worker.ID]*tracker.Book) {
	if got, want := tr.Loads(), m.loads(); !maps.Equal(got, want) {
		t.Fatalf("Loads() = %s, want %s", fmt.Sprint(got), fmt.Sprint(want))
	}
	for id, b := range bookOf {
		var want int64
		for _, h := range m.open {
			if h.Rank.Worker == id {
				want++
			}
		}
		if got := b.Requests(); got != want {
			t.Fatalf("Requests() of worker %v = %d, want %d", id, got, want)
		}
	}
}
