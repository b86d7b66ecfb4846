package kvindex_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"spillway/kvhash"
	"spillway/kvindex"
	"spillway/worker"
)

// trial plays the same steps to an index and to the model, and compares what they say.
type trial struct {
	t     testing.TB
	ix    *kvindex.Index
	model *model
	next  func(n int) int // the source of chance: 0 to n-1
	wide  int             // how many values locals and engine hashes have
	ranks int
	zero  bool // 0 is an engine hash like any other; nothing is dumped then
	log   []string
	m     kvindex.Matches
}

func newTrial(t testing.TB, next func(n int) int, ranks, wide, limit int) *trial {
	return &trial{
		t: t, ix: kvindex.New(kvindex.Config{MaxEntries: limit, MaxRanks: 1 << 20}), model: newModel(limit),
		next: next, wide: wide, ranks: ranks,
	}
}

func (tr *trial) say(format string, args ...any) {
	tr.log = append(tr.log, fmt.Sprintf(format, args...))
}

func (tr *trial) fail(format string, args ...any) {
	tr.t.Helper()
	for _, l := range tr.log[max(0, len(tr.log)-60):] {
		tr.t.Log(l)
	}
	tr.t.Fatalf(format, args...)
}

// rank picks one of the ranks, three to a worker.
func (tr *trial) rank() worker.Rank {
	n := tr.next(tr.ranks)
	return worker.Rank{Worker: worker.ID(n / 3), DP: uint32(n % 3)}
}

// hashes picks some, which often are consecutive, so that chains come about.
func (tr *trial) hashes(most int) []uint64 {
	all := make([]uint64, tr.next(most+1))
	start := tr.next(tr.wide)
	for i := range all {
		if all[i] = uint64((start + i) % tr.wide); tr.next(8) == 0 {
			all[i] = uint64(tr.next(tr.wide))
		}
	}
	return all
}

func (tr *trial) engines(most int) []uint64 {
	all := tr.hashes(most)
	for i := range all {
		if all[i] == 0 && !tr.zero {
			all[i] = uint64(tr.wide)
		}
	}
	return all
}

func (tr *trial) step() {
	rank, tier := tr.rank(), worker.Tier(max(0, tr.next(7)-3))
	switch op := tr.next(40); {
	case op < 24:
		engine := tr.engines(6)
		local := make([]uint64, len(engine))
		for i, e := range engine {
			if local[i] = e / 2; tr.next(8) == 0 { // two names for a block, often
				local[i] = uint64(tr.next(tr.wide))
			}
		}
		var parent kvindex.Parent
		if tr.next(4) > 0 {
			parent = kvindex.After(uint64(tr.next(tr.wide)))
			if len(engine) > 0 && engine[0] > 0 && tr.next(2) == 0 {
				parent.Hash = engine[0] - 1
			}
		}
		tr.say("store %v %v %v %v %v", rank, tier, parent, engine, local)
		if got, want := tr.ix.Store(rank, tier, parent, engine, local), tr.model.store(rank, tier, parent, engine, local); got != want {
			tr.fail("%s: got %s, want %s", tr.log[len(tr.log)-1], got, want)
		}
	case op < 36:
		engine := tr.engines(4)
		tr.say("remove %v %v %v", rank, tier, engine)
		got, unknown := tr.ix.Remove(rank, tier, engine)
		want, wantUnknown := tr.model.remove(rank, tier, engine)
		if got != want || unknown != wantUnknown {
			tr.fail("%s: got %d and %d, want %d and %d", tr.log[len(tr.log)-1], got, unknown, want, wantUnknown)
		}
	case op == 36:
		tr.say("clear %v", rank)
		tr.ix.Clear(rank)
		delete(tr.model.ranks, rank)
	case op == 37:
		tr.say("remove rank %v", rank)
		tr.ix.RemoveRank(rank)
		delete(tr.model.ranks, rank)
	case op == 38:
		tr.say("remove worker %v", rank.Worker)
		tr.ix.RemoveWorker(rank.Worker)
		tr.model.removeWorker(rank.Worker)
	case !tr.zero:
		if tr.next(1+tr.ranks/16) > 0 {
			return
		}
		tr.say("dump")
		tr.compare(reloaded(tr.t, tr.ix), "dumped and stored")
	}
	if tr.next(1+tr.ranks/16) == 0 {
		if got, want := tr.ix.Entries(), tr.model.entries(); got != want {
			tr.fail("after %s: %d entries, want %d", tr.log[len(tr.log)-1], got, want)
		}
		tr.compare(tr.ix, "queried")
	}
}

// compare asks for two prompts: one at random, and one that some rank holds.
func (tr *trial) compare(ix *kvindex.Index, how string) {
	for _, local := range [][]uint64{tr.held(), tr.hashes(8)} {
		want := tr.model.query(local, true)
		ix.Query(local, &tr.m)
		if tr.m.Sort(); !slices.Equal(tr.m.Ranks, want) {
			tr.fail("%s %v: got %v, want %v", how, local, tr.m.Ranks, want)
		}
		ix.QueryChained(local, kvhash.AppendSequences(nil, local), &tr.m)
		if tr.m.Sort(); !slices.Equal(tr.m.Ranks, want) {
			tr.fail("chained %s %v: got %v, want %v", how, local, tr.m.Ranks, want)
		}
		want = tr.model.query(local, false)
		ix.QueryDevice(local, &tr.m)
		if tr.m.Sort(); !slices.Equal(tr.m.Ranks, want) {
			tr.fail("device %s %v: got %v, want %v", how, local, tr.m.Ranks, want)
		}
	}
}

// held returns a path that some rank holds the end of, and a little more, if there is one.
func (tr *trial) held() []uint64 {
	s := tr.model.ranks[tr.rank()]
	if s == nil {
		return nil
	}
	longest := ""
	for e := range 4 {
		if p := s.paths[uint64((tr.next(tr.wide)+e)%tr.wide)]; len(p) > len(longest) {
			longest = p
		}
	}
	var all []uint64
	for i := 0; i < len(longest); i += 8 {
		var h uint64
		for j := range 8 {
			h |= uint64(longest[i+j]) << (8 * j)
		}
		all = append(all, h)
	}
	return append(all, tr.hashes(3)...)
}

// reloaded is a new index made from the dump of ix.
func reloaded(t testing.TB, ix *kvindex.Index) *kvindex.Index {
	other := kvindex.New(kvindex.DefaultConfig())
	lower := false
	ix.Dump(func(r kvindex.Run) bool {
		if lower = lower || r.Tier != worker.Device; lower && r.Tier == worker.Device {
			t.Errorf("dump: a device's run %v after those of lower tiers", r)
		}
		if got := other.Store(r.Rank, r.Tier, r.Parent, r.Engine, r.Local); got != kvindex.Stored {
			t.Errorf("dump: storing %+v: %s", r, got)
		}
		return true
	})
	return other
}

func TestProperties(t *testing.T) {
	for _, c := range []struct{ ranks, wide, limit, steps int }{
		{1, 60, 1000, 2000}, // many names
		{2, 6, 1000, 1000},
		{6, 12, 1000, 1000},
		{6, 30, 60, 1000},       // often full
		{40, 10, 100000, 2000},  // lists of holders
		{300, 8, 100000, 4000},  // sets of bits
		{3000, 5, 100000, 8000}, // sets become lists and lists become sets
	} {
		for seed := range uint64(4) {
			t.Run(fmt.Sprintf("ranks=%d,wide=%d,seed=%d", c.ranks, c.wide, seed), func(t *testing.T) {
				steps := c.steps
				if testing.Short() {
					steps /= 10
				}
				tr := newTrial(t, rand.New(rand.NewPCG(seed, 1)).IntN, c.ranks, c.wide, c.limit)
				tr.zero = seed == 0
				for range steps {
					tr.step()
				}
				tr.ix.Reset()
				if tr.ix.Entries() != 0 || tr.ix.Ranks() != 0 {
					t.Errorf("after Reset %d entries of %d ranks", tr.ix.Entries(), tr.ix.Ranks())
				}
			})
		}
	}
}

// FuzzSteps is the same with steps that the fuzzer chooses.
func FuzzSteps(f *testing.F) {
	for seed := range uint64(8) {
		r := rand.New(rand.NewPCG(seed, 2))
		b := make([]byte, 600)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		next := func(n int) int {
			if len(b) == 0 {
				return 0
			}
			v := int(b[0]) % n
			b = b[1:]
			return v
		}
		tr := newTrial(t, next, 1+next(12), 2+next(20), 40)
		tr.zero = next(4) == 0
		for range 400 {
			if len(b) == 0 {
				return
			}
			tr.step()
		}
	})
}
