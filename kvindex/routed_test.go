package kvindex_test

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"spillway/kvhash"
	"spillway/kvindex"
	"spillway/worker"
)

// routedIndex is an index with decisions, asked at one time after another.
type routedIndex struct {
	t  *testing.T
	ix *kvindex.Index
	r  *kvindex.Routed
	m  kvindex.Matches
}

func newRouted(t *testing.T, cfg kvindex.RoutedConfig) *routedIndex {
	ix := kvindex.New(kvindex.DefaultConfig())
	return &routedIndex{t: t, ix: ix, r: ix.Routed(cfg)}
}

func (x *routedIndex) record(rank worker.Rank, at time.Duration, local ...uint64) kvindex.Status {
	x.t.Helper()
	s, err := x.r.Record(rank, local, kvhash.AppendSequences(nil, local), time.Unix(1000, 0).Add(at))
	if err != nil {
		x.t.Fatal(err)
	}
	return s
}

// want checks how many blocks a rank is thought to hold at a time.
func (x *routedIndex) want(rank worker.Rank, at time.Duration, want int, local ...uint64) {
	x.t.Helper()
	x.r.Expire(time.Unix(1000, 0).Add(at))
	x.ix.Query(local, &x.m)
	if got := x.m.Rank(rank).Device; got != want {
		x.t.Errorf("after %v %v has %d of %v, want %d", at, rank, got, local, want)
	}
}

const ms = time.Millisecond

func TestRoutedExpires(t *testing.T) {
	x := newRouted(t, kvindex.RoutedConfig{TTL: 10 * time.Second, MaxEntries: 100, PruneTo: 0.8})
	x.record(rankA, 30*ms, 1, 2, 3)
	x.record(rankC, 0, 1, 2, 3)
	x.want(rankA, 10*time.Second+29*ms, 3, 1, 2, 3)
	x.want(rankC, 10*time.Second+29*ms, 0, 1, 2, 3) // its deadline is a bucket's
	x.want(rankA, 10*time.Second+99*ms, 3, 1, 2, 3) // rounded up
	x.record(rankA, 10*time.Second+99*ms, 1, 2)     // moved; the third block is not
	x.want(rankA, 10*time.Second+100*ms, 2, 1, 2, 3)
	x.want(rankA, 20*time.Second+99*ms, 2, 1, 2, 3)
	x.want(rankA, 20*time.Second+100*ms, 0, 1, 2, 3)
	if x.r.Entries() != 0 || x.ix.Entries() != 0 {
		t.Errorf("%d and %d entries are left", x.r.Entries(), x.ix.Entries())
	}
}

func TestRoutedTTLZero(t *testing.T) {
	x := newRouted(t, kvindex.RoutedConfig{TTL: 0, MaxEntries: 100, PruneTo: 0.8})
	x.record(rankA, 0, 1, 2)
	x.want(rankA, 0, 0, 1, 2)
}

func TestRoutedAndEvents(t *testing.T) {
	x := newRouted(t, kvindex.RoutedConfig{TTL: time.Second, MaxEntries: 100, PruneTo: 0.8})
	local := []uint64{1, 2}
	x.ix.Store(rankA, worker.Device, kvindex.Parent{}, kvhash.AppendSequences(nil, local), local)
	if s := x.record(rankA, 0, 1, 2, 3); s != kvindex.Stored {
		t.Errorf("Record = %s", s)
	}
	x.want(rankA, time.Minute, 2, 1, 2, 3) // what events told stays
	if s := x.record(rankA, time.Minute, 1, 2); s != kvindex.DuplicateStore {
		t.Errorf("Record of what is held = %s", s)
	}
	if _, err := x.r.Record(rankA, local, local[:1], time.Unix(0, 0)); !errors.Is(err, kvindex.ErrHashes) {
		t.Errorf("Record of lists that differ: %v", err)
	}
}

func TestRoutedRemove(t *testing.T) {
	x := newRouted(t, kvindex.RoutedConfig{TTL: time.Second, MaxEntries: 100, PruneTo: 0.8})
	x.record(rankA, 0, 1, 2)
	x.record(rankA1, 0, 1)
	x.record(rankC, 0, 1, 2, 3)
	x.ix.RemoveRank(rankC)
	if got := x.r.Entries(); got != 3 {
		t.Errorf("%d entries after a rank has gone, want 3", got)
	}
	local := []uint64{1, 2, 3} // the rank is back, with events: no timer of old may touch them
	x.ix.Store(rankC, worker.Device, kvindex.Parent{}, kvhash.AppendSequences(nil, local), local)
	x.want(rankC, time.Minute, 3, 1, 2, 3)
	x.record(rankA, time.Minute, 1, 2)
	x.ix.RemoveWorker(1)
	if got := x.r.Entries(); got != 0 {
		t.Errorf("%d entries after the worker has gone", got)
	}
}

// TestRoutedPrunesARank has just as much go as one rank holds, of which two prompts end in the same bucket.
// Then the others leave, so that there is nothing any more.
func TestRoutedPrunesARank(t *testing.T) {
	x := newRouted(t, kvindex.RoutedConfig{TTL: 10 * time.Second, MaxEntries: 10, PruneTo: 1})
	x.record(rankA, 0, 1, 2)
	x.record(rankA, 0, 1)
	x.record(rankC, time.Second, chain(100, 4)...)
	x.record(rankC, 2*time.Second, chain(200, 6)...)
	if got := x.r.Entries(); got != 10 {
		t.Fatalf("%d entries, want those of one rank", got)
	}
	x.ix.RemoveRank(rankC)
	x.want(rankA, time.Minute, 0, 1, 2)
	x.record(rankA, time.Minute, 1, 2)
	x.want(rankA, time.Minute, 2, 1, 2)
}

func TestRoutedIsBounded(t *testing.T) {
	x := newRouted(t, kvindex.RoutedConfig{TTL: time.Hour, MaxEntries: 100, PruneTo: 0.8})
	for i := range uint64(10) {
		x.record(rankA, time.Duration(i)*time.Second, chain(1000*i, 10)...)
	}
	if got := x.r.Entries(); got != 100 {
		t.Fatalf("%d entries, want 100", got)
	}
	x.record(rankA, 11*time.Second, 1, 2)
	if got := x.r.Entries(); got != 82 || x.ix.Entries() != 82 {
		t.Errorf("%d and %d entries, want 80 and the 2 new ones", got, x.ix.Entries())
	}
	x.want(rankA, 12*time.Second, 0, chain(1000, 10)...) // the oldest have gone
	x.want(rankA, 12*time.Second, 10, chain(2000, 10)...)
	x.record(rankA, 13*time.Second, chain(1<<20, 101)...) // more than there can be
	x.want(rankA, 13*time.Second, 0, chain(1<<20, 101)...)
	x.record(rankA, 14*time.Second, chain(1<<20, 100)...)
	x.want(rankA, 14*time.Second, 100, chain(1<<20, 100)...)
	if got := x.r.Entries(); got != 100 {
		t.Errorf("%d entries, want 100", got)
	}
}

// TestRoutedAgainstModel records at random and compares with a map of deadlines.
func TestRoutedAgainstModel(t *testing.T) {
	ranks := []worker.Rank{rankA, rankA1, rankC}
	for seed := range uint64(10) {
		r := rand.New(rand.NewPCG(seed, 5))
		x := newRouted(t, kvindex.RoutedConfig{TTL: 2 * time.Second, MaxEntries: 1 << 20, PruneTo: 0.8})
		deadlines := map[worker.Rank]map[string]time.Duration{}
		var now time.Duration
		prompt := func() []uint64 {
			if seed%2 == 1 { // over several stretches, apart from some place in one on
				p, from := make([]uint64, 1+r.IntN(60)), []int{0, 7, 15, 16, 17, 31, 40}[r.IntN(7)]
				for i := from; i < len(p); i++ {
					p[i] = uint64(1 + from%3)
				}
				return p
			}
			p := make([]uint64, 1+r.IntN(4))
			for i := range p {
				p[i] = uint64(r.IntN(3))
			}
			return p
		}
		for range 3000 {
			now += time.Duration(r.IntN(200)) * ms
			rank := ranks[r.IntN(len(ranks))]
			switch op := r.IntN(50); {
			case op == 0:
				x.ix.RemoveRank(rank)
				delete(deadlines, rank)
			case op < 30:
				p := prompt()
				x.record(rank, now, p...)
				if deadlines[rank] == nil {
					deadlines[rank] = map[string]time.Duration{}
				}
				for i := range p {
					end := now + 2*time.Second
					if rest := end % (100 * ms); rest > 0 {
						end += 100*ms - rest
					}
					deadlines[rank][key(p[:i+1])] = end
				}
			default:
				p, want := prompt(), 0
				for want < len(p) && deadlines[rank][key(p[:want+1])] > now {
					want++
				}
				x.want(rank, now, want, p...)
			}
		}
		x.r.Expire(time.Unix(2000, 0).Add(now))
		if x.r.Entries() != 0 || x.ix.Entries() != 0 {
			t.Errorf("%d and %d entries are left", x.r.Entries(), x.ix.Entries())
		}
		if t.Failed() {
			return
		}
	}
}

func key(p []uint64) string {
	b := make([]byte, len(p))
	for i, v := range p {
		b[i] = byte(v)
	}
	return string(b)
}

// TestRoutedAfterEmptying: what the index has lost meanwhile is stored anew, and what was forgotten is not
// removed later.
func TestRoutedAfterEmptying(t *testing.T) {
	x := newRouted(t, kvindex.RoutedConfig{TTL: 10 * time.Second, MaxEntries: 100, PruneTo: 0.8})
	x.record(rankA, 0, 1, 2, 3)
	x.record(rankC, 0, 1, 2, 3)
	x.ix.Reset()
	x.record(rankA, time.Second, 1, 2, 3)
	x.want(rankA, time.Second, 3, 1, 2, 3)
	x.record(rankC, time.Second, 1, 2, 3, 4)
	x.want(rankC, time.Second, 4, 1, 2, 3, 4)
	x.ix.Reset()
	if n := x.r.Entries(); n != 0 {
		t.Errorf("%d entries after Reset", n)
	}
	x.record(rankA, 9*time.Second, 1, 2)
	x.want(rankA, 18*time.Second, 2, 1, 2, 3)
	x.want(rankA, 19*time.Second, 0, 1, 2, 3)
}

// TestRoutedMovesTheLast: a prompt that is sent again keeps all its blocks, though the deadline of one alone
// moves, and what had gone on from it goes.
func TestRoutedMovesTheLast(t *testing.T) {
	x := newRouted(t, kvindex.RoutedConfig{TTL: 10 * time.Second, MaxEntries: 100, PruneTo: 0.8})
	x.record(rankA, 0, chain(100, 20)...)
	x.record(rankA, time.Second, chain(100, 12)...)
	for i := range 9 {
		x.record(rankA, time.Duration(i)*time.Second, chain(100, 10)...)
	}
	x.want(rankA, 10*time.Second, 12, chain(100, 20)...)
	x.want(rankA, 11*time.Second, 10, chain(100, 20)...)
	x.want(rankA, 17*time.Second, 10, chain(100, 20)...)
	x.want(rankA, 18*time.Second, 0, chain(100, 20)...)
	if x.r.Entries() != 0 || x.ix.Entries() != 0 {
		t.Errorf("%d and %d entries are left", x.r.Entries(), x.ix.Entries())
	}
}

// TestRoutedLimit: a rank is not taken to hold more than it has room for. What was recorded first goes,
// from the end of its prompt, unless a later prompt has it too.
func TestRoutedLimit(t *testing.T) {
	x := newRouted(t, kvindex.RoutedConfig{TTL: time.Hour, MaxEntries: 1000, PruneTo: 0.8})
	x.r.Limit(map[worker.Rank]int{rankA: 25})
	shared := chain(100, 5)
	first, second, third := append(slices.Clone(shared), 1, 2, 3, 4, 5), append(slices.Clone(shared), 6, 7, 8, 9, 10), chain(200, 5)
	x.record(rankA, 1*time.Second, first...)
	x.record(rankA, 2*time.Second, second...)
	x.record(rankA, 3*time.Second, third...)
	x.record(rankA, 4*time.Second, chain(300, 8)...) // 28: three too many
	x.want(rankA, 4*time.Second, 7, first...)
	x.want(rankA, 4*time.Second, 10, second...)
	x.record(rankA, 5*time.Second, first...) // it is sent again: three come back, and the second one's go
	x.want(rankA, 5*time.Second, 10, first...)
	x.want(rankA, 5*time.Second, 7, second...)
	x.want(rankA, 5*time.Second, 5, third...)
	x.record(rankC, 5*time.Second, chain(0, 100)...) // one that is not named has no limit
	x.want(rankC, 5*time.Second, 100, chain(0, 100)...)
	x.record(rankA, 6*time.Second, chain(400, 40)...) // it alone is too long
	x.want(rankA, 6*time.Second, 25, chain(400, 40)...)
	x.want(rankA, 6*time.Second, 0, first...)
	if got := x.r.Entries(); got != 125 || x.ix.Entries() != 125 {
		t.Errorf("%d and %d entries, want 25 and 100", got, x.ix.Entries())
	}
	x.r.Limit(map[worker.Rank]int{rankA: 0})
	x.record(rankA, 7*time.Second, 1)
	x.want(rankA, 7*time.Second, 0, 1)
}

// TestRoutedTakenByEvents: where an engine tells that it has dropped a block after all, the prompt is
// noted anew.
func TestRoutedTakenByEvents(t *testing.T) {
	x := newRouted(t, kvindex.RoutedConfig{TTL: 10 * time.Second, MaxEntries: 100, PruneTo: 0.8})
	local := chain(100, 40)
	seqs := kvhash.AppendSequences(nil, local)
	x.record(rankA, 0, local...)
	x.record(rankC, 0, local...)
	x.ix.Store(rankA, worker.Device, kvindex.Parent{}, seqs, local)
	x.ix.Remove(rankA, worker.Device, seqs[30:])
	x.want(rankA, 0, 30, local...)
	x.want(rankC, 0, 40, local...)
	x.record(rankA, time.Second, local...)
	x.want(rankA, time.Second, 40, local...)
	x.want(rankA, 11*time.Second, 30, local...) // as events have told
	if x.r.Entries() != 0 || x.ix.Entries() != 30 {
		t.Errorf("%d and %d entries are left, want 0 and 30", x.r.Entries(), x.ix.Entries())
	}
}

// TestRoutedFull: what there is no room for in the index is not noted.
func TestRoutedFull(t *testing.T) {
	ix := kvindex.New(kvindex.Config{MaxEntries: 50, MaxRanks: 1})
	x := &routedIndex{t: t, ix: ix, r: ix.Routed(kvindex.RoutedConfig{TTL: time.Hour, MaxEntries: 100, PruneTo: 0.8})}
	if got := x.record(rankA, 0, chain(0, 51)...); got != kvindex.Full {
		t.Errorf("Record of 51 blocks = %s, want full", got)
	}
	if got := x.record(rankA, 0, chain(0, 40)...); got != kvindex.Stored {
		t.Errorf("Record of 40 blocks = %s, want ok", got)
	}
	if got := x.record(rankC, 0, 1); got != kvindex.Full {
		t.Errorf("Record for a rank too many = %s, want full", got)
	}
	if got := x.record(rankA, 0, chain(1<<20, 11)...); got != kvindex.Full {
		t.Errorf("Record of 11 more = %s, want full", got)
	}
	if got := x.record(rankA, 0, chain(1<<20, 10)...); got != kvindex.Stored || x.r.Entries() != 50 || ix.Entries() != 50 {
		t.Errorf("Record of 10 more = %s, %d and %d entries, want ok, 50", got, x.r.Entries(), ix.Entries())
	}
	ix.Clear(rankA)
	if x.r.Entries() != 0 || ix.Entries() != 0 {
		t.Errorf("%d and %d entries are left", x.r.Entries(), ix.Entries())
	}
}
