package tracker_test

import (
	"errors"
	"maps"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"spillway/tracker"
	"spillway/worker"
)

var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func rank(id worker.ID, dp uint32) worker.Rank { return worker.Rank{Worker: id, DP: dp} }

func reservation(id string, r worker.Rank, prefill, blocks uint64) tracker.Reservation {
	return tracker.Reservation{ID: id, Rank: r, PrefillTokens: prefill, DecodeBlocks: blocks}
}

func TestReserve(t *testing.T) {
	limit := tracker.Limit{PrefillTokens: 100, DecodeBlocks: 10}
	for _, tt := range []struct {
		name          string
		booked, asked tracker.Reservation
		limit         tracker.Limit
		want          error
	}{
		{"idle, however long", reservation("a", rank(1, 0), 0, 0), reservation("b", rank(1, 0), 1e6, 1e6), limit, nil},
		{"at the prefill limit", reservation("a", rank(1, 0), 100, 0), reservation("b", rank(1, 0), 1, 0), limit, nil},
		{"over the prefill limit", reservation("a", rank(1, 0), 101, 0), reservation("b", rank(1, 0), 0, 0), limit, tracker.ErrBusy},
		{"at the decode limit", reservation("a", rank(1, 0), 0, 10), reservation("b", rank(1, 0), 0, 1), limit, nil},
		{"over the decode limit", reservation("a", rank(1, 0), 0, 11), reservation("b", rank(1, 0), 0, 0), limit, tracker.ErrBusy},
		{"another rank", reservation("a", rank(1, 1), 101, 0), reservation("b", rank(1, 0), 1, 0), limit, nil},
		{"no limit", reservation("a", rank(1, 0), math.MaxUint64, math.MaxUint64), reservation("b", rank(1, 0), 0, 0), tracker.NoLimit, nil},
		{"limit 0", reservation("a", rank(1, 0), 1, 0), reservation("b", rank(1, 0), 1, 0), tracker.Limit{}, tracker.ErrBusy},
		{"duplicate", reservation("a", rank(1, 0), 1, 1), reservation("a", rank(1, 0), 1, 1), limit, tracker.ErrDuplicate},
		{"duplicate on another rank", reservation("a", rank(1, 0), 1, 1), reservation("a", rank(1, 1), 1, 1), limit, tracker.ErrDuplicate},
		{"duplicate before busy", reservation("a", rank(1, 0), 101, 1), reservation("a", rank(1, 0), 1, 1), limit, tracker.ErrDuplicate},
		{"unknown rank", reservation("a", rank(1, 0), 1, 1), reservation("b", rank(1, 2), 1, 1), limit, tracker.ErrUnknownRank},
		{"unknown rank before duplicate", reservation("a", rank(1, 0), 1, 1), reservation("a", rank(1, 2), 1, 1), limit, tracker.ErrUnknownRank},
		{"unknown worker", reservation("a", rank(1, 0), 1, 1), reservation("b", rank(2, 0), 1, 1), limit, tracker.ErrUnknownRank},
		{"any rank of a worker that does not pick", reservation("a", rank(1, 0), 1, 1), reservation("b", rank(1, worker.AnyDP), 1, 1), limit, tracker.ErrUnknownRank},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tr := tracker.New(tracker.DefaultConfig())
			book := tr.Register(&worker.Worker{ID: 1, DPSize: 2}, start)
			if err := tr.Reserve(tt.booked, tracker.NoLimit, start); err != nil {
				t.Fatalf("Reserve(%+v) = %v", tt.booked, err)
			}
			before := tr.Loads(start)
			err := tr.Reserve(tt.asked, tt.limit, start)
			if !errors.Is(err, tt.want) {
				t.Errorf("Reserve(%+v) after %+v = %v, want %v", tt.asked, tt.booked, err, tt.want)
			}
			if err != nil && !maps.Equal(before, tr.Loads(start)) {
				t.Errorf("loads after %v = %v, want %v as before", err, tr.Loads(start), before)
			}
			if want := int64(1); err != nil && book.Requests() != want {
				t.Errorf("Requests() after %v = %d, want %d", err, book.Requests(), want)
			}
		})
	}
}

// TestLife follows one reservation. Each step may come twice, and late.
func TestLife(t *testing.T) {
	tr := tracker.New(tracker.DefaultConfig())
	book := tr.Register(&worker.Worker{ID: 1, DPSize: 1}, start)
	r := rank(1, 0)
	if err := tr.Reserve(reservation("a", r, 200, 12), tracker.NoLimit, start); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		call func() (worker.Rank, tracker.Effect)
		want tracker.Effect
		load tracker.Load
	}{
		{"grow", func() (worker.Rank, tracker.Effect) { return tr.Grow("a", 1, nil, start) }, tracker.Changed, tracker.Load{PrefillTokens: 200, DecodeBlocks: 13, Requests: 1}},
		{"grow by nothing", func() (worker.Rank, tracker.Effect) { return tr.Grow("a", 0, nil, start) }, tracker.Unchanged, tracker.Load{PrefillTokens: 200, DecodeBlocks: 13, Requests: 1}},
		{"first token", func() (worker.Rank, tracker.Effect) { return tr.PrefillDone("a", start) }, tracker.Changed, tracker.Load{DecodeBlocks: 13, Requests: 1}},
		{"first token again", func() (worker.Rank, tracker.Effect) { return tr.PrefillDone("a", start) }, tracker.Unchanged, tracker.Load{DecodeBlocks: 13, Requests: 1}},
		{"unknown", func() (worker.Rank, tracker.Effect) { return freed(tr.Free("b", start)) }, tracker.Unknown, tracker.Load{DecodeBlocks: 13, Requests: 1}},
		{"free", func() (worker.Rank, tracker.Effect) { return freed(tr.Free("a", start)) }, tracker.Changed, tracker.Load{}},
		{"free again", func() (worker.Rank, tracker.Effect) { return freed(tr.Free("a", start)) }, tracker.Unknown, tracker.Load{}},
		{"late token", func() (worker.Rank, tracker.Effect) { return tr.PrefillDone("a", start) }, tracker.Unknown, tracker.Load{}},
		{"late growth", func() (worker.Rank, tracker.Effect) { return tr.Grow("a", 5, nil, start) }, tracker.Unknown, tracker.Load{}},
	} {
		got, effect := tt.call()
		if effect != tt.want || effect != tracker.Unknown && got != r {
			t.Errorf("%s = %+v, %v, want %v", tt.name, got, effect, tt.want)
		}
		if load := tr.Load(r, start); load != tt.load {
			t.Errorf("load after %s = %+v, want %+v", tt.name, load, tt.load)
		}
		if a, p := tr.Promised(r, start); a != tt.load.DecodeBlocks || p != tt.load.PrefillTokens {
			t.Errorf("Promised after %s = %d, %d, want %+v", tt.name, a, p, tt.load)
		}
		if got := book.Requests(); got != int64(tt.load.Requests) {
			t.Errorf("Requests() after %s = %d, want %d", tt.name, got, tt.load.Requests)
		}
	}
}

func freed(r worker.Rank, ok bool) (worker.Rank, tracker.Effect) {
	if ok {
		return r, tracker.Changed
	}
	return r, tracker.Unknown
}

// TestRegister lists the ranks of a worker by its record, and what an earlier one leaves.
func TestRegister(t *testing.T) {
	declared := &worker.Worker{ID: 1, DPStart: 4, DPSize: 2}
	undeclared := &worker.Worker{ID: 1}
	byEngine := &worker.Worker{ID: 1, DPSize: 8, RankRouting: worker.RankByEngine}
	last := &worker.Worker{ID: 1, DPStart: worker.AnyDP - 1, DPSize: 1}
	for _, tt := range []struct {
		name    string
		records []*worker.Worker
		add     []uint32 // before the last record; each rank known then gets a request
		want    map[uint32]uint64
	}{
		{"declared", []*worker.Worker{declared}, nil, map[uint32]uint64{4: 0, 5: 0}},
		{"undeclared", []*worker.Worker{undeclared}, nil, map[uint32]uint64{0: 0}},
		{"by the engine", []*worker.Worker{byEngine}, nil, map[uint32]uint64{worker.AnyDP: 0}},
		{"the highest rank", []*worker.Worker{last}, nil, map[uint32]uint64{worker.AnyDP - 1: 0}},
		{"the same again", []*worker.Worker{declared, declared}, nil, map[uint32]uint64{4: 1, 5: 1}},
		{"undeclared again, with a rank that was seen", []*worker.Worker{undeclared, undeclared}, []uint32{3}, map[uint32]uint64{0: 1, 3: 1}},
		{"no longer declared", []*worker.Worker{declared, undeclared}, nil, map[uint32]uint64{0: 0, 4: 1, 5: 1}},
		{"declared now", []*worker.Worker{undeclared, declared}, []uint32{5}, map[uint32]uint64{4: 0, 5: 1}},
		{"by the engine now", []*worker.Worker{declared, byEngine}, nil, map[uint32]uint64{worker.AnyDP: 0}},
		{"by us now", []*worker.Worker{byEngine, undeclared}, nil, map[uint32]uint64{0: 0}},
		{"moved", []*worker.Worker{declared, {ID: 1, DPStart: 5, DPSize: 2}}, nil, map[uint32]uint64{5: 1, 6: 0}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tr := tracker.New(tracker.DefaultConfig())
			tr.Register(&worker.Worker{ID: 2}, start)
			if err := tr.Reserve(reservation("other", rank(2, 0), 1, 1), tracker.NoLimit, start); err != nil {
				t.Fatal(err)
			}
			var book *tracker.Book
			for i, w := range tt.records {
				if i > 0 {
					for _, dp := range tt.add {
						if !tr.AddRank(rank(1, dp), start) {
							t.Fatalf("AddRank(%d) = false", dp)
						}
					}
					for r := range tr.Loads(start) {
						if r.Worker == 1 {
							if err := tr.Reserve(reservation(string(rune('a'+r.DP)), r, 10, 1), tracker.NoLimit, start); err != nil {
								t.Fatal(err)
							}
						}
					}
				}
				book = tr.Register(w, start)
			}
			got, total := map[uint32]uint64{}, uint64(0)
			for r, load := range tr.Loads(start) {
				if r.Worker == 1 {
					got[r.DP], total = load.Requests, total+load.Requests
				}
			}
			if !maps.Equal(got, tt.want) || book.Requests() != int64(total) {
				t.Errorf("requests by rank = %v (%d), want %v", got, book.Requests(), tt.want)
			}
			tr.Unregister(1)
			if got := tr.Loads(start); len(got) != 1 || got[rank(2, 0)].Requests != 1 {
				t.Errorf("loads after Unregister = %v, want the other worker's alone", got)
			}
			tr.Unregister(1)
		})
	}
}

func TestAddRankIsBounded(t *testing.T) {
	tr := tracker.New(tracker.DefaultConfig())
	tr.Register(&worker.Worker{ID: 1}, start)
	if tr.AddRank(rank(2, 0), start) {
		t.Error("AddRank of an unknown worker = true, want false")
	}
	for dp := range uint32(worker.MaxReportedRanks) {
		if !tr.AddRank(rank(1, dp), start) {
			t.Fatalf("AddRank(%d) = false, want true", dp)
		}
	}
	if tr.AddRank(rank(1, worker.MaxReportedRanks), start) || !tr.AddRank(rank(1, 7), start) {
		t.Error("AddRank beyond MaxReportedRanks = true, or of a known rank = false")
	}
}

// TestIdle: progress is the booking, a token or a block.
func TestIdle(t *testing.T) {
	tr := tracker.New(tracker.DefaultConfig())
	tr.Register(&worker.Worker{ID: 1}, start)
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	for i, id := range []string{"a", "b", "c"} {
		if err := tr.Reserve(reservation(id, rank(1, 0), 1, 1), tracker.NoLimit, at(i)); err != nil {
			t.Fatal(err)
		}
	}
	learned := reservation("learned", rank(1, 0), 1, 1)
	learned.Expires = true
	if err := tr.Reserve(learned, tracker.NoLimit, at(2)); err != nil {
		t.Fatal(err)
	}
	tr.PrefillDone("a", at(10))
	tr.Grow("b", 0, nil, at(20))
	for _, tt := range []struct {
		since int
		want  []string
	}{{2, nil}, {3, []string{"c"}}, {10, []string{"c"}}, {11, []string{"a", "c"}}, {21, []string{"a", "b", "c"}}} {
		got := tr.Idle(at(tt.since))
		if slices.Sort(got); !slices.Equal(got, tt.want) {
			t.Errorf("Idle(%d s) = %v, want %v", tt.since, got, tt.want)
		}
		if held := tr.Held(rank(1, 0), at(tt.since)); held != (tt.want != nil) || tr.Held(rank(1, 1), at(tt.since)) {
			t.Errorf("Held(%d s) = %v, want %v, and false for another rank", tt.since, held, tt.want != nil)
		}
	}
}

// TestConcurrent books on one rank from many goroutines: exactly as many get in as fit.
func TestConcurrent(t *testing.T) {
	tr := tracker.New(tracker.DefaultConfig())
	book := tr.Register(&worker.Worker{ID: 1}, start)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var admitted []string
	for g := range 100 {
		wg.Go(func() {
			id := string(rune('A' + g))
			if tr.Reserve(reservation(id, rank(1, 0), 200, 1), tracker.Limit{PrefillTokens: 10000, DecodeBlocks: tracker.Unlimited}, start) == nil {
				mu.Lock()
				admitted = append(admitted, id)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if len(admitted) != 51 || book.Requests() != 51 {
		t.Errorf("admitted %d, Requests() = %d, want 51", len(admitted), book.Requests())
	}
	for _, id := range admitted {
		for range 3 {
			wg.Go(func() { tr.PrefillDone(id, start); tr.Grow(id, 2, nil, start); tr.Free(id, start) })
		}
	}
	wg.Wait()
	if load := tr.Load(rank(1, 0), start); load != (tracker.Load{}) || book.Requests() != 0 {
		t.Errorf("load = %+v, Requests() = %d, want none", load, book.Requests())
	}
}

func TestRanks(t *testing.T) {
	tr := tracker.New(tracker.DefaultConfig())
	tr.Register(&worker.Worker{ID: 1, DPStart: 2, DPSize: 3}, start)
	tr.Register(&worker.Worker{ID: 2}, start)
	if err := tr.Reserve(reservation("a", rank(1, 3), 5, 7), tracker.NoLimit, start); err != nil {
		t.Fatal(err)
	}
	first := tracker.RankLoad{DP: 9}
	got := tr.Ranks(1, start, []tracker.RankLoad{first})
	want := []tracker.RankLoad{first, {DP: 2}, {DP: 3, Load: tracker.Load{PrefillTokens: 5, DecodeBlocks: 7, Requests: 1}}, {DP: 4}}
	if !slices.Equal(got, want) {
		t.Errorf("Ranks(1) = %+v, want %+v", got, want)
	}
	if got := tr.Ranks(3, start, nil); len(got) != 0 {
		t.Errorf("Ranks of an unknown worker = %+v, want none", got)
	}
}
