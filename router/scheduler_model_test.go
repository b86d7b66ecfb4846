package router_test

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"spillway/busy"
	"spillway/kvindex"
	"spillway/router"
	"spillway/tracker"
	"spillway/worker"
)

// fleetModel is a slow, obvious scheduler: who is there, what is booked, and the formulas of the
// specification one after the other.
type fleetModel struct {
	f       *rig
	cfg     router.CostConfig
	workers map[worker.ID]worker.Worker
	booked  map[string]*modelBooking
	next    int
}

type modelBooking struct {
	rank    worker.Rank
	hashes  []uint64
	private uint64
	prefill uint64
}

// candidates are the ranks that q may go to.
func (m *fleetModel) candidates(q *router.Query) (all []worker.Rank) {
	for id, w := range m.workers {
		ok := q.Allowed == nil || slices.Contains(q.Allowed, id)
		for _, taint := range q.Taints {
			ok = ok && slices.Contains(w.Taints, taint)
		}
		if q.Worker != nil && *q.Worker != id || slices.Contains(q.Exclude, id) || !ok {
			continue
		}
		for i := range w.DPSize {
			if q.DP == nil || *q.DP == w.DPStart+i {
				all = append(all, rank(id, w.DPStart+i))
			}
		}
	}
	slices.SortFunc(all, func(a, b worker.Rank) int {
		return cmp.Or(cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.DP, b.DP))
	})
	return all
}

func (m *fleetModel) load(r worker.Rank) (prefill, blocks, requests uint64) {
	held := map[string]bool{}
	for _, b := range m.booked {
		if b.rank != r {
			continue
		}
		requests++
		prefill += b.prefill
		blocks += b.private
		for i := range b.hashes {
			held[fmt.Sprint(b.hashes[:i+1])] = true
		}
	}
	return prefill, blocks + uint64(len(held)), requests
}

func (m *fleetModel) depth(r worker.Rank, hashes []uint64) (longest int) {
	for _, b := range m.booked {
		n := 0
		for b.rank == r && n < len(hashes) && n < len(b.hashes) && b.hashes[n] == hashes[n] {
			n++
		}
		longest = max(longest, n)
	}
	return longest
}

// cost is sections 3 to 7 of the specification for one of the candidates.
func (m *fleetModel) cost(q *router.Query, r worker.Rank, candidates []worker.Rank) (cost float64, effective uint64) {
	c, s, tracking, reuse := m.cfg.OverlapScoreCredit, m.cfg.PrefillLoadScale, m.cfg.TrackPrefillTokens, m.cfg.AssumeKVReuse
	shareWeight := 0.0
	if o := q.Override; o != nil {
		if o.OverlapScoreCredit != nil {
			c = *o.OverlapScoreCredit
		}
		if o.PrefillLoadScale != nil {
			s = *o.PrefillLoadScale
		}
		if o.SharedCacheMultiplier != nil {
			shareWeight = *o.SharedCacheMultiplier
		}
		if o.TrackPrefillTokens != nil {
			tracking = *o.TrackPrefillTokens
		}
		if o.AssumeKVReuse != nil {
			reuse = *o.AssumeKVReuse
		}
	}
	b := float64(q.BlockSize)
	var overlap kvindex.Match
	if q.Overlaps != nil {
		overlap = q.Overlaps.Rank(r)
	}
	dev, host, disk := float64(overlap.Device), float64(overlap.Host), float64(overlap.Disk)
	shared := 0.0
	for _, span := range q.Shared {
		for i := span.From; i < span.To; i++ {
			if i >= overlap.Device {
				shared++
			}
		}
	}
	cached := uint64(math.Round((dev + m.cfg.HostCacheHitWeight*host + m.cfg.DiskCacheHitWeight*disk) * b))
	effective = q.PromptTokens - min(cached, q.PromptTokens)
	p, d, n := m.load(r)
	raw, k := 0.0, 1.0
	if tracking {
		raw = float64(p+effective+cached) / b
		if m.cfg.OverlapScoreCreditDecay > 0 {
			least := p
			for _, o := range candidates {
				op, _, _ := m.load(o)
				least = min(least, op)
			}
			k = 1 / (1 + m.cfg.OverlapScoreCreditDecay*(float64(p-least)/b)/math.Ceil(float64(q.PromptTokens)/b))
		}
	}
	credit := c*k*dev + m.cfg.HostCacheHitWeight*host + m.cfg.DiskCacheHitWeight*disk + shareWeight*shared
	additional := uint64(len(q.SequenceHashes)) + q.PrivateBlocks
	if reuse {
		additional -= uint64(m.depth(r, q.SequenceHashes))
	}
	if !m.cfg.TrackActiveBlocks || q.NoDecode {
		additional = 0
	}
	prefill := s * max(0, raw-credit)
	cost = prefill + float64(d+additional) + m.cfg.DecodeActiveRequestWeight*float64(n)
	if len(q.Preferred) > 0 && (q.Worker == nil || q.DP == nil) {
		sum := 0.0
		for _, pref := range q.Preferred {
			if slices.Contains(m.workers[r.Worker].Taints, pref.Taint) {
				sum += float64(pref.Weight)
			}
		}
		cost *= math.Exp(-math.Tanh(sum))
	}
	return cost, effective
}

var (
	chains   = [][]uint64{nil, {1, 2, 3, 4}, {1, 2, 3, 5}, {1, 2}, {1, 2, 6, 7, 8, 9}, {10, 11}, {12}, {1, 2, 3, 4, 13, 14}}
	taints   = []string{"a", "b", "c"}
	modelIDs = []worker.ID{3, 0, 9, 7}
)

func maybe[T any](t *rapid.T, name string, value T) *T {
	if rapid.IntRange(0, 3).Draw(t, name) == 0 {
		return &value
	}
	return nil
}

func (m *fleetModel) draw(t *rapid.T) router.Query {
	m.next++
	q := router.Query{
		Reservation: fmt.Sprint("m", m.next), PromptTokens: rapid.Uint64Range(1, 100).Draw(t, "isl"), BlockSize: rapid.SampledFrom([]uint32{1, 3, 16}).Draw(t, "block"),
		SequenceHashes: rapid.SampledFrom(chains).Draw(t, "hashes"), PrivateBlocks: rapid.Uint64Range(0, 2).Draw(t, "private"),
		Worker: maybe(t, "worker?", rapid.SampledFrom(modelIDs).Draw(t, "worker")), DP: maybe(t, "dp?", rapid.Uint32Range(0, 4).Draw(t, "dp")),
		NoBooking: rapid.IntRange(0, 3).Draw(t, "ask?") == 0, NoDecode: rapid.IntRange(0, 7).Draw(t, "embedding?") == 0,
	}
	if list := maybe(t, "allowed?", rapid.SliceOfN(rapid.SampledFrom(modelIDs), 0, 4).Draw(t, "allowed")); list != nil {
		q.Allowed = append([]worker.ID{}, *list...)
	}
	if taint := maybe(t, "taint?", rapid.SampledFrom(taints).Draw(t, "taint")); taint != nil {
		q.Taints = []string{*taint}
	}
	for _, taint := range taints {
		if w := maybe(t, "prefers?", rapid.Float32Range(-2, 2).Draw(t, "weight")); w != nil {
			q.Preferred = append(q.Preferred, router.Preference{Taint: taint, Weight: *w})
		}
	}
	if m.next%2 == 0 {
		q.Override = &router.Override{
			OverlapScoreCredit: maybe(t, "credit?", rapid.Float64Range(0, 2).Draw(t, "credit")), PrefillLoadScale: maybe(t, "scale?", rapid.Float64Range(0, 2).Draw(t, "scale")),
			TrackPrefillTokens: maybe(t, "track?", m.next%4 == 0), AssumeKVReuse: maybe(t, "reuse?", m.next%4 == 0), SharedCacheMultiplier: maybe(t, "multiplier?", .5),
		}
	}
	if from := maybe(t, "shared?", rapid.IntRange(0, 5).Draw(t, "from")); from != nil {
		q.Shared = []router.Span{{From: *from, To: *from + 3}}
	}
	q.Overlaps = &kvindex.Matches{}
	for _, id := range rapid.SliceOfNDistinct(rapid.SampledFrom(modelIDs), 0, 4, func(id worker.ID) worker.ID { return id }).Draw(t, "cached on") {
		for dp := range uint32(3) {
			if rapid.Bool().Draw(t, "cached") {
				q.Overlaps.Ranks = append(q.Overlaps.Ranks, has(rank(id, dp), rapid.IntRange(0, 6).Draw(t, "dev"), rapid.IntRange(0, 2).Draw(t, "host"), rapid.IntRange(0, 2).Draw(t, "disk")))
			}
		}
	}
	return q
}

func (m *fleetModel) selects(t *rapid.T) {
	q := m.draw(t)
	var terms []router.Terms
	if rapid.Bool().Draw(t, "explain") {
		q.Explain = &terms
	}
	candidates := m.candidates(&q)
	sel, err := m.f.p.Select(q, start)
	if len(m.workers) == 0 || len(candidates) == 0 {
		if err == nil {
			t.Fatalf("Select(%+v) = %+v, want an error: no rank will do", q, sel)
		}
		return
	}
	if q.Worker != nil && q.Allowed != nil && !slices.Contains(q.Allowed, *q.Worker) && !errors.Is(err, router.ErrPinForbidden) {
		t.Fatalf("Select = %v, want ErrPinForbidden", err)
	}
	if err != nil {
		t.Fatalf("Select(%+v) = %v, want one of %v", q, err, candidates)
	}
	costs, best, effective := map[worker.Rank]float64{}, math.Inf(1), uint64(0)
	for _, r := range candidates {
		cost, e := m.cost(&q, r, candidates)
		if costs[r] = cost; r == sel.Rank {
			effective = e
		}
		best = min(best, cost)
	}
	if got, ok := costs[sel.Rank]; !ok || got != best {
		t.Fatalf("Select(%+v) = %+v, want one that costs %v of %v", q, sel, best, costs)
	}
	if sel.EffectivePrefillTokens != effective {
		t.Fatalf("effective prefill tokens = %d, want %d", sel.EffectivePrefillTokens, effective)
	}
	if q.Explain != nil {
		if len(terms) != len(candidates) {
			t.Fatalf("%d terms for %v", len(terms), candidates)
		}
		for i, r := range candidates {
			if terms[i].Rank != r || terms[i].Cost != costs[r] {
				t.Fatalf("terms %d = %+v, want %v at %v", i, terms[i], r, costs[r])
			}
		}
	}
	if q.NoBooking {
		return
	}
	b := &modelBooking{rank: sel.Rank, hashes: q.SequenceHashes, private: q.PrivateBlocks}
	if !sel.TracksPrefill {
		effective = 0
	}
	b.prefill = effective
	if o := q.Override; o != nil && o.AssumeKVReuse != nil && !*o.AssumeKVReuse || !m.cfg.AssumeKVReuse && (o == nil || o.AssumeKVReuse == nil) {
		b.hashes, b.private = nil, b.private+uint64(len(q.SequenceHashes))
	}
	if !m.cfg.TrackActiveBlocks || q.NoDecode {
		b.hashes, b.private = nil, 0
	}
	m.booked[q.Reservation] = b
}

func (m *fleetModel) register(t *rapid.T) {
	id := rapid.SampledFrom(modelIDs).Draw(t, "worker")
	w := record(m.f.t, id, rapid.Uint32Range(1, 3).Draw(t, "size"))
	w.ID = id // 0 too
	w.DPStart = rapid.Uint32Range(0, 2).Draw(t, "start")
	w.Taints = rapid.SliceOfDistinct(rapid.SampledFrom(taints), func(s string) string { return s }).Draw(t, "taints")
	m.f.p = m.f.register(w)
	m.workers[w.ID] = w
	for id, b := range m.booked {
		if b.rank.Worker == w.ID && (b.rank.DP < w.DPStart || b.rank.DP >= w.DPStart+w.DPSize) {
			delete(m.booked, id)
		}
	}
}

func (m *fleetModel) agree(t *rapid.T) {
	if m.f.p == nil {
		return
	}
	for r, load := range m.f.p.Tracker.Loads(start) {
		var want tracker.Load
		want.PrefillTokens, want.DecodeBlocks, want.Requests = m.load(r)
		if load != want {
			t.Fatalf("load of %+v = %+v, want %+v", r, load, want)
		}
	}
}

func (m *fleetModel) anyOf(t *rapid.T) string {
	ids := slices.Sorted(maps.Keys(m.booked))
	if len(ids) == 0 {
		return "nobody"
	}
	return rapid.SampledFrom(ids).Draw(t, "id")
}

// agrees drives a partition and the slow scheduler through the same random steps. When all is
// freed, all books are zero.
func agrees(outer testing.TB) func(t *rapid.T) {
	return func(t *rapid.T) {
		m := &fleetModel{workers: map[worker.ID]worker.Worker{}, booked: map[string]*modelBooking{}, cfg: router.DefaultCostConfig()}
		m.cfg.OverlapScoreCreditDecay = rapid.SampledFrom([]float64{0, 0, 1, .3}).Draw(t, "decay")
		m.cfg.DecodeActiveRequestWeight = rapid.SampledFrom([]float64{0, 2.5}).Draw(t, "request weight")
		m.cfg.TrackPrefillTokens = rapid.IntRange(0, 3).Draw(t, "tracking") > 0
		m.cfg.TrackActiveBlocks = rapid.IntRange(0, 5).Draw(t, "blocks") > 0
		m.cfg.AssumeKVReuse = rapid.IntRange(0, 3).Draw(t, "reuse") > 0
		m.f = newScheduled(outer, func(c *router.CostConfig) { *c = m.cfg })
		m.register(t)
		steps := map[string]func(*rapid.T){
			"select": m.selects, "select more": m.selects, "select again": m.selects, "register": m.register, "": m.agree,
			"unregister": func(t *rapid.T) {
				id := rapid.SampledFrom(modelIDs).Draw(t, "worker")
				if len(m.workers) == 1 {
					return // the last one takes the partition with it
				}
				m.f.r.Unregister(id, start)
				delete(m.workers, id)
				for name, b := range m.booked {
					if b.rank.Worker == id {
						delete(m.booked, name)
					}
				}
			},
			"prefill done": func(t *rapid.T) {
				id := m.anyOf(t)
				if m.f.p.PrefillDone(id, start); m.booked[id] != nil {
					m.booked[id].prefill = 0
				}
			},
			"grow": func(t *rapid.T) {
				id := m.anyOf(t)
				if m.f.p.Grow(id, 1, nil, start); m.booked[id] != nil {
					m.booked[id].private++
				}
			},
			"free": func(t *rapid.T) {
				id := m.anyOf(t)
				m.f.p.Free(id, start)
				delete(m.booked, id)
			},
		}
		t.Repeat(steps)
		for id := range m.booked {
			m.f.p.Free(id, start)
		}
		m.f.checkEmpty()
	}
}

func TestSchedulerAgreesWithModel(t *testing.T) { rapid.Check(t, agrees(t)) }

func FuzzScheduler(f *testing.F) {
	seed, rng := make([]byte, 1<<14), rand.New(rand.NewPCG(7, 7))
	for i := range seed {
		seed[i] = byte(rng.Uint32())
	}
	f.Add(seed)
	f.Fuzz(func(t *testing.T, data []byte) { rapid.MakeFuzz(agrees(t))(t, data) })
}

// TestSamePromptTwice: of two equal prompts at the same time on two equal, idle workers each goes
// to a worker of its own.
func TestSamePromptTwice(t *testing.T) {
	for round := range 300 {
		f := newScheduled(t, nil, record(t, 1, 1), record(t, 2, 1))
		var went [2]worker.ID
		var both sync.WaitGroup
		for i := range went {
			both.Go(func() {
				sel, err := f.p.Select(router.Query{Reservation: fmt.Sprint(i), PromptTokens: 64, SequenceHashes: []uint64{1, 2, 3, 4}}, start)
				if err != nil {
					t.Error(err)
					return
				}
				went[i] = sel.Rank.Worker
			})
		}
		both.Wait()
		if went[0] == went[1] {
			t.Fatalf("round %d: both went to worker %v", round, went[0])
		}
	}
}

// TestEvenSpread: equally long prompts that have nothing in common, all at once, are shared out evenly.
func TestEvenSpread(t *testing.T) {
	f := newScheduled(t, nil)
	for id := range worker.ID(8) {
		f.register(record(t, id+1, 1))
	}
	var all sync.WaitGroup
	for i := range uint64(64) {
		all.Go(func() {
			q := router.Query{Reservation: fmt.Sprint(i), PromptTokens: 64, SequenceHashes: []uint64{4*i + 1, 4*i + 2, 4*i + 3, 4*i + 4}}
			if _, err := f.p.Select(q, start); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	for r, load := range f.p.Tracker.Loads(start) {
		if want := (tracker.Load{PrefillTokens: 512, DecodeBlocks: 32, Requests: 8}); load != want {
			t.Errorf("load of %+v = %+v, want %+v", r, load, want)
		}
	}
}

// TestSeed: with the same seed and the same requests the choices are the same, ties and draws
// included, and other seeds choose otherwise.
func TestSeed(t *testing.T) {
	choices := func(seed uint64, temperature float64) (all []worker.Rank) {
		catalog, err := worker.NewCatalog([]string{"M"}, nil)
		if err != nil {
			t.Fatal(err)
		}
		cfg := router.DefaultConfig()
		cfg.Mode, cfg.Cost.Temperature = router.KV, temperature
		f := &rig{t: t, r: router.New(cfg, busy.DefaultConfig(), catalog, rand.New(rand.NewPCG(seed, 1)))}
		for _, id := range []worker.ID{5, 2, 8, 1} { // registered in any order
			f.register(record(t, id, 3))
		}
		for range 40 {
			sel, _, err := f.ask(router.Query{PromptTokens: 10})
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, sel.Rank)
		}
		return all
	}
	for _, temperature := range []float64{0, .7} {
		if a, b := choices(1, temperature), choices(1, temperature); !slices.Equal(a, b) {
			t.Errorf("T=%v: choices with one seed = %v and %v", temperature, a, b)
		}
		if a, b := choices(1, temperature), choices(2, temperature); slices.Equal(a, b) {
			t.Errorf("T=%v: choices with two seeds are the same: %v", temperature, a)
		}
	}
}

// TestPinsByCost: row 51, and what a pin fails with.
func TestPinsByCost(t *testing.T) {
	tainted := record(t, 1, 2)
	tainted.Taints = []string{"a"}
	for _, tt := range []struct {
		name string
		q    router.Query
		want error
		rank worker.Rank
	}{
		{"row 51", router.Query{Worker: new(worker.ID(2)), DP: new(uint32(0)), Override: &router.Override{Temperature: new(.7)}}, nil, rank(2, 0)},
		{"allowed", router.Query{Worker: new(worker.ID(1)), DP: new(uint32(1)), Allowed: []worker.ID{7, 1}, Taints: []string{"a"}}, nil, rank(1, 1)},
		{"not allowed", router.Query{Worker: new(worker.ID(2)), DP: new(uint32(0)), Allowed: []worker.ID{1}}, router.ErrPinForbidden, worker.Rank{}},
		{"nobody is allowed", router.Query{Worker: new(worker.ID(2)), Allowed: []worker.ID{}}, router.ErrPinForbidden, worker.Rank{}},
		{"unknown worker", router.Query{Worker: new(worker.ID(3)), DP: new(uint32(0))}, router.ErrPinUnknown, worker.Rank{}},
		{"unknown rank", router.Query{Worker: new(worker.ID(1)), DP: new(uint32(2))}, router.ErrPinUnknown, worker.Rank{}},
		{"a taint is missing", router.Query{Worker: new(worker.ID(2)), DP: new(uint32(0)), Taints: []string{"a"}}, router.ErrPinUnknown, worker.Rank{}},
		{"nobody is allowed, without a pin", router.Query{Allowed: []worker.ID{}}, router.ErrUnroutable, worker.Rank{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newScheduled(t, nil, tainted, record(t, 2, 1))
			f.holds(rank(2, 0), 0, 20, 1)
			tt.q.PromptTokens = 16
			sel, _, err := f.ask(tt.q)
			if !errors.Is(err, tt.want) || sel.Booked != tt.rank {
				t.Errorf("Select = %+v, %v, want %+v, %v", sel, err, tt.rank, tt.want)
			}
		})
	}
}

// TestNoBooking: a question leaves no trace, and finds out about limits all the same.
func TestNoBooking(t *testing.T) {
	cfg := router.DefaultConfig()
	cfg.Mode = router.KV
	f := newConfigured(t, cfg, limits(nil, new(uint64(0))), record(t, 1, 2))
	q := router.Query{PromptTokens: 10, SequenceHashes: []uint64{1}, NoBooking: true}
	for range 3 {
		if sel, err := f.p.Select(q, start); err != nil || sel.EffectivePrefillTokens != 10 {
			t.Fatalf("Select = %+v, %v", sel, err)
		}
	}
	f.checkEmpty()
	f.holds(rank(1, 0), 5, 0, 1)
	if sel, err := f.p.Select(q, start); err != nil || sel.Rank != rank(1, 1) {
		t.Errorf("Select beside a busy rank = %+v, %v, want the other one", sel, err)
	}
	f.holds(rank(1, 1), 5, 0, 1)
	if sel, err := f.p.Select(q, start); !errors.Is(err, router.ErrOverloaded) {
		t.Errorf("Select with all busy = %+v, %v, want ErrOverloaded", sel, err)
	}
}

// TestBusyRanksAreLeftOut: however cheap a rank is, it gets nothing while it is over a threshold.
func TestBusyRanksAreLeftOut(t *testing.T) {
	cfg := router.DefaultConfig()
	cfg.Mode, cfg.Cost.PrefillLoadScale = router.KV, 0
	f := newConfigured(t, cfg, limits(nil, new(uint64(100))), record(t, 1, 4), record(t, 2, 4))
	for _, r := range []worker.Rank{rank(1, 0), rank(1, 1), rank(1, 3), rank(2, 0), rank(2, 1), rank(2, 2)} {
		f.holds(r, 101, 0, 1) // with scale 0 they cost nothing
	}
	f.holds(rank(1, 2), 0, 50, 1)
	f.holds(rank(2, 3), 0, 60, 1)
	sel, _, err := f.ask(router.Query{PromptTokens: 16})
	if err != nil || sel.Rank != rank(1, 2) {
		t.Errorf("Select = %+v, %v, want the cheaper one of those with room", sel.Rank, err)
	}
}

// TestUndeclaredRanks: a worker that declares no ranks is given load on those that it reports.
func TestUndeclaredRanks(t *testing.T) {
	f := newScheduled(t, nil, record(t, 1, 0))
	f.used(1, 10, 0, 1, 2)
	got := map[worker.Rank]int{}
	for range 9 {
		sel, _, err := f.ask(router.Query{PromptTokens: 16})
		if err != nil {
			t.Fatal(err)
		}
		got[sel.Rank]++
	}
	if want := map[worker.Rank]int{rank(1, 0): 3, rank(1, 1): 3, rank(1, 2): 3}; !maps.Equal(got, want) {
		t.Errorf("nine requests went to %v, want %v", got, want)
	}
}

// TestBookingsExpire: those that can do so after the time that is set, and their load goes.
func TestBookingsExpire(t *testing.T) {
	f := newScheduled(t, func(c *router.CostConfig) { c.ActiveRequestExpirySecs = 60 }, record(t, 1, 1))
	for _, expires := range []bool{true, false} {
		if _, _, err := f.ask(router.Query{PromptTokens: 16, SequenceHashes: []uint64{1}, Expires: expires}); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		after time.Duration
		want  uint64
	}{{60 * time.Second, 2}, {91 * time.Second, 1}, {time.Hour, 1}} {
		f.p.Expire(start.Add(tt.after))
		if got := f.p.Tracker.Load(rank(1, 0), start).Requests; got != tt.want {
			t.Errorf("requests after %v = %d, want %d", tt.after, got, tt.want)
		}
	}
}

// TestUndeclaredRanksWithGaps: the first request already finds the ranks that an engine reports, and
// what one of them has cached.
func TestUndeclaredRanksWithGaps(t *testing.T) {
	f := newScheduled(t, nil, record(t, 1, 0))
	f.used(1, 10, 1, 4)
	m := &kvindex.Matches{Ranks: []kvindex.Match{has(rank(1, 4), 3, 0, 0)}}
	sel, _, err := f.ask(router.Query{PromptTokens: 64, Overlaps: m})
	if err != nil || sel.Rank != rank(1, 4) || !sel.MultiRank || sel.CachedTokens != 48 {
		t.Errorf("Select = %+v, %v, want rank 4, named to the worker, with 48 tokens cached", sel, err)
	}
}
