package tracker_test

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"spillway/tracker"
	"spillway/worker"
)

// prompts branch, nest and repeat; some are not chained.
var prompts = [][]uint64{
	nil, {1, 2, 3, 4}, {1, 2, 3, 5}, {1, 2, 6}, {1, 7}, {8, 9, 10}, {8, 9, 11}, {12}, {1, 2}, {1, 9, 3, 4}, {5, 5}, {2, 3, 4},
}

// machine drives a tracker and the slow one through the same random steps.
type machine struct {
	tracker *tracker.Tracker
	model   *books
	bookOf  map[worker.ID]*tracker.Book
	now     time.Time
	boards  [2]tracker.Board
}

var (
	ids     = rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f", "g", "h"})
	workers = rapid.Map(rapid.IntRange(1, 3), func(i int) worker.ID { return worker.ID(i) })
	ranks   = rapid.SampledFrom([]uint32{0, 0, 0, 1, 1, 2, 3, worker.AnyDP})
	amount  = rapid.Uint64Range(0, 300)
	few     = rapid.Uint64Range(0, 4)
	weight  = rapid.SampledFrom([]float64{0, 0.1, 0.25, 0.3333, 0.5, 0.7, 1})
	maybe   = rapid.Bool()
)

// TestAgreesWithModel compares a tracker with the slow one after each of many random steps.
// After everything has been freed, every load is exactly zero.
func TestAgreesWithModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := tracker.Config{ExpireAfter: 10 * time.Second, CheckEvery: 4 * time.Second}
		m := &machine{tracker.New(cfg), newBooks(cfg), map[worker.ID]*tracker.Book{}, start, [2]tracker.Board{}}
		t.Repeat(map[string]func(*rapid.T){
			"register": m.register, "unregister": m.unregister, "add rank": m.addRank,
			"reserve": m.reserve, "reserve more": m.reserve, "adopt": m.adopt,
			"prefill done": m.prefillDone, "grow": m.grow, "free": m.free, "expire": m.expire,
			"wait": func(t *rapid.T) {
				m.now = m.now.Add(time.Duration(rapid.IntRange(0, 3000).Draw(t, "ms")) * time.Millisecond)
			},
			"": m.agree,
		})
		for _, h := range slices.Clone(m.model.open) {
			m.tracker.Free(h.ID, m.now)
			m.model.free(h.ID, m.now)
		}
		m.agree(t)
		for r, load := range m.tracker.Loads(m.now) {
			if load != (tracker.Load{}) {
				t.Fatalf("load of %+v after all is freed = %+v, want none", r, load)
			}
		}
	})
}

func (m *machine) register(t *rapid.T) {
	w := worker.Worker{
		ID: workers.Draw(t, "worker"), DPSize: rapid.Uint32Range(0, 3).Draw(t, "size"),
		RankRouting: rapid.SampledFrom([]worker.RankRouting{worker.RankBySpillway, worker.RankBySpillway, worker.RankBySpillway, worker.RankByEngine}).Draw(t, "routing"),
	}
	if w.DPSize > 0 {
		w.DPStart = rapid.Uint32Range(0, 2).Draw(t, "start")
	}
	m.bookOf[w.ID] = m.tracker.Register(&w, m.now)
	m.model.register(w, m.now)
}

func (m *machine) unregister(t *rapid.T) {
	id := workers.Draw(t, "worker")
	m.tracker.Unregister(id)
	for r := range maps.Clone(m.model.ranks) {
		if r.Worker == id {
			m.model.drop(r)
		}
	}
	delete(m.bookOf, id)
}

func (m *machine) addRank(t *rapid.T) {
	r := rank(workers.Draw(t, "worker"), rapid.Uint32Range(0, 3).Draw(t, "dp"))
	if got, want := m.tracker.AddRank(r, m.now), m.bookOf[r.Worker] != nil; got != want {
		t.Fatalf("AddRank(%+v) = %v, want %v", r, got, want)
	} else if got {
		m.model.add(r, m.now)
	}
}

func drawReservation(t *rapid.T) tracker.Reservation {
	r := tracker.Reservation{
		ID: ids.Draw(t, "id"), Rank: rank(workers.Draw(t, "worker"), ranks.Draw(t, "dp")),
		Hashes: rapid.SampledFrom(prompts).Draw(t, "hashes"), DecodeBlocks: few.Draw(t, "blocks"),
		PrefillTokens: amount.Draw(t, "prefill"), Expires: maybe.Draw(t, "expires"),
	}
	if maybe.Draw(t, "timed") {
		r.PrefillTime = new(time.Duration(rapid.IntRange(0, 9).Draw(t, "seconds")) * time.Second)
	}
	return r
}

func (m *machine) reserve(t *rapid.T) {
	r, limit := drawReservation(t), tracker.NoLimit
	if maybe.Draw(t, "limited") {
		limit = tracker.Limit{PrefillTokens: amount.Draw(t, "prefill limit"), DecodeBlocks: few.Draw(t, "decode limit")}
	}
	got := m.tracker.Reserve(r, limit, m.now)
	if want := m.model.reserve(r, limit, m.now); !errors.Is(got, want) {
		t.Fatalf("Reserve(%+v, %+v) = %v, want %v", r, limit, got, want)
	}
}

func (m *machine) adopt(t *rapid.T) {
	r := drawReservation(t)
	_, got, err := m.tracker.Adopt(r, m.now)
	if want, wantErr := m.model.adopt(r, m.now); got != want || !errors.Is(err, wantErr) {
		t.Fatalf("Adopt(%+v) = %v, %v, want %v, %v", r, got, err, want, wantErr)
	}
}

func (m *machine) prefillDone(t *rapid.T) {
	id, want := ids.Draw(t, "id"), tracker.Unknown
	_, got := m.tracker.PrefillDone(id, m.now)
	if h := m.model.find(id); h != nil {
		if want = tracker.Unchanged; h.prefill {
			want = tracker.Changed
			m.model.done(h, m.now)
		}
	}
	if got != want {
		t.Fatalf("PrefillDone(%s) = %v, want %v", id, got, want)
	}
}

func (m *machine) grow(t *rapid.T) {
	id, blocks, want := ids.Draw(t, "id"), few.Draw(t, "blocks"), tracker.Unknown
	var decay *float64
	if maybe.Draw(t, "decays") {
		decay = new(weight.Draw(t, "weight"))
	}
	_, got := m.tracker.Grow(id, blocks, decay, m.now)
	if h := m.model.find(id); h != nil {
		if want = tracker.Unchanged; blocks > 0 || decay != nil {
			want = tracker.Changed
		}
		m.model.grow(h, blocks, decay)
	}
	if got != want {
		t.Fatalf("Grow(%s, %d) = %v, want %v", id, blocks, got, want)
	}
}

func (m *machine) free(t *rapid.T) {
	id := ids.Draw(t, "id")
	if _, got := m.tracker.Free(id, m.now); got != m.model.free(id, m.now) {
		t.Fatalf("Free(%s) = %v, want %v", id, got, !got)
	}
}

func (m *machine) expire(t *rapid.T) {
	var got, want []string
	for _, e := range m.tracker.Expire(m.now) {
		got = append(got, e.ID)
	}
	for r := range m.model.ranks {
		want = append(want, m.model.expire(r, m.now)...)
	}
	slices.Sort(got)
	if slices.Sort(want); !slices.Equal(got, want) {
		t.Fatalf("Expire() = %v, want %v", got, want)
	}
}

func (m *machine) agree(t *rapid.T) {
	if got, want := m.tracker.Loads(m.now), m.model.loads(m.now); !maps.Equal(got, want) {
		t.Fatalf("Loads() = %s, want %s", fmt.Sprint(got), fmt.Sprint(want))
	}
	query := rapid.SampledFrom(prompts).Draw(t, "query")
	for _, p := range m.tracker.Project(query, m.now, nil) {
		if got, want := p.AdditionalBlocks, uint64(len(query)-m.model.overlap(p.Rank, query)); got != want {
			t.Fatalf("Project(%v) on %+v adds %d blocks, want %d", query, p.Rank, got, want)
		}
	}
	if maybe.Draw(t, "read the board") {
		m.agreeOnBoard(t, query)
	}
	distinct := map[string]bool{}
	for _, h := range m.model.open {
		for i := range h.Hashes {
			distinct[fmt.Sprint(h.Hashes[:i+1])] = true
		}
	}
	if got := m.tracker.StoredBlocks(); got != len(distinct) {
		t.Fatalf("blocks stored = %d, want %d: each that is held, once", got, len(distinct))
	}
	for id, b := range m.bookOf {
		var want int64
		for _, h := range m.model.open {
			if h.Rank.Worker == id {
				want++
			}
		}
		if got := b.Requests(); got != want {
			t.Fatalf("Requests() of worker %v = %d, want %d", id, got, want)
		}
	}
}

func (m *machine) agreeOnBoard(t *rapid.T, query []uint64) {
	b := &m.boards[rapid.SampledFrom([]int{0, 0, 0, 0, 1}).Draw(t, "board")]
	before := slices.Clone(b.Ranks)
	moved := m.tracker.Read(query, m.now, b)
	if !moved && !slices.Equal(b.Ranks, before) {
		t.Fatalf("Read = false, but Ranks went from %v to %v", before, b.Ranks)
	}
	want := slices.SortedFunc(maps.Keys(m.model.ranks), func(a, b worker.Rank) int {
		return cmp.Or(cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.DP, b.DP))
	})
	if !slices.Equal(b.Ranks, want) || len(b.Loads) != len(want) || len(b.Held) != len(want) {
		t.Fatalf("Ranks = %v with %d loads, want %v", b.Ranks, len(b.Loads), want)
	}
	for i, r := range b.Ranks {
		l := m.model.load(r, m.now)
		want := tracker.Figures{PrefillTokens: float64(l.PrefillTokens), DecodeBlocks: float64(l.DecodeBlocks), Requests: float64(l.Requests)}
		if b.Loads[i] != want {
			t.Fatalf("Loads of %+v = %+v, want %+v", r, b.Loads[i], want)
		}
		if held := uint32(m.model.overlap(r, query)); b.Held[i] != held {
			t.Fatalf("Held(%v) of %+v = %d, want %d", query, r, b.Held[i], held)
		}
	}
}
