package tracker_test

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"spillway/tracker"
	"spillway/worker"
)

// examples are scripts of steps that are separated by semicolons:
//
//	R 7 0 2            register worker 7 with ranks 0 and 1; U 7 unregisters it
//	A id 7.0 1,2,3 48  reserve with these hashes and prefill tokens; ! after it names the error
//	P id, O id 0.5     prefill done; an output block with that weight (none: weights stay); = is the effect
//	F id               free; = is what it reports
//	L 7.0:48,3 ...     the loads of all ranks: prefill tokens, decode blocks
//	Q 1,2 5 7.0:53,3,1 what the prompt would make of each rank: tokens, blocks, requests before it
//
// A hash may be a range, 1-64, and - is no hash.
var examples = []struct{ name, steps string }{
	{"E1-E3", "R 7 0 2; R 8 0 1; A a 7.0 11,-22,33; A b 7.0 11,-22,44; A c 7.1 11,-22,55; L 7.0:0,4 7.1:0,3 8.0:0,0;" +
		"Q 11,-22,33,66 0 7.0:0,5,2 7.1:0,5,1 8.0:0,4,0; F b; L 7.0:0,3 7.1:0,3 8.0:0,0"},
	{"E4", "R 7 0 2; R 8 0 1; A a 7.0 11 8; U 7; L 8.0:0,0; A x 7.0 - !rank; F a =false; P a =0"},
	{"E5", "R 4 0 1; A a 4.0 1,2 48; A b 4.0 1,3 16; L 4.0:64,3; P a =2; P a =1; L 4.0:16,3; F b; L 4.0:0,2; F a; F a =false; L 4.0:0,0; P a =0"},
	{"E6", "R 1 0 1; A a 1.0 1,2,3 8; A b 1.0 1,2,3 8; L 1.0:16,3; Q 1,2,3 8 1.0:24,3,2; F a; L 1.0:8,3; F b; L 1.0:0,0"},
	{"E7", "R 1 0 1; A a 1.0 1,2,4,5; Q 1,2,3,5 0 1.0:0,6,1; Q 2,4 0 1.0:0,6,1; Q 1,2,4,5 0 1.0:0,4,1; Q 1 0 1.0:0,4,1; Q 1,2,4,5,6 0 1.0:0,5,1"},
	{"E8", "R 1 0 1; A a 1.0 1,2,3 8; Q 1,2,4 5 1.0:13,4,1"},
	{"E9", "R 1 0 1; A a 1.0 - 100; L 1.0:100,0; Q - 7 1.0:107,0,1; Q 1,2 7 1.0:107,2,1; F a; L 1.0:0,0"},
	{"E10", "R 1 0 1; A a 1.0 1,2 0; L 1.0:0,2; P a =1; L 1.0:0,2"},
	{"E11", "R 1 0 1; A l 1.0 1-4; A s 1.0 1,2; L 1.0:0,4; F l; L 1.0:0,2; Q 1-4 0 1.0:0,4,1; F s; L 1.0:0,0"},
	{"E12", "R 1 0 1; A s 1.0 1,2; A l 1.0 1-4; L 1.0:0,4; F l; L 1.0:0,2; F s; L 1.0:0,0"},
	{"E13", "R 1 0 1; A a 1.0 1,2,3; A b 1.0 1,2,4; L 1.0:0,4; F a; L 1.0:0,3; Q 1,2,3 0 1.0:0,4,1; F b; L 1.0:0,0"},
	{"E14", "R 1 0 1; R 2 0 1; A a 1.0 1,2 8; A a 2.0 1,2 8 !duplicate; A a 1.0 9 8 !duplicate; L 1.0:8,2 2.0:0,0; F a; A a 2.0 1,2 8; L 1.0:0,0 2.0:8,2"},
	{"E15-E16", "R 1 2 2; L 1.2:0,0 1.3:0,0; A a 1.0 1 !rank; A a 1.2 1; A b 1.4 1 !rank; U 1; L ; F a =false; P a =0; R 1 0 1; A a 1.0 1-3; L 1.0:0,3"},
	{"E17", "R 1 0 1; R 2 0 1; A a 1.0 1,2 8; A b 2.0 1,2 8; U 1; L 2.0:8,2; F a =false; P a =0; P b =2; Q 1,2,3 4 2.0:4,3,1;" +
		"A a 2.0 1-3 1; L 2.0:1,3; R 1 0 1; L 1.0:0,0 2.0:1,3; Q 1,2 0 1.0:0,2,0 2.0:1,3,2"},
	{"E18", "R 1 0 1; F e =false; P e =0; A e 1.0 1 8; L 1.0:8,1"},
	{"E19", "R 1 0 1; A a 1.0 1 10; A b 1.0 2 20; A c 1.0 3 40; P b; L 1.0:50,3; P a; L 1.0:40,3; F c; L 1.0:0,2; Q 1,2,3 0 1.0:0,4,2"},
	{"E20", "R 1 0 1; A a 1.0 -1,-9223372036854775808,9223372036854775807 1; Q -1,-9223372036854775808,9223372036854775807 0 1.0:1,3,1"},
	{"E21", "R 1 0 2; A a 1.0 1,2,3 5; A b 1.1 1 5; Q 1,2,3 2 1.0:7,3,1 1.1:7,3,1"},
	{"E22", "R 1 0 1; R 2 0 1; R 3 0 1; A a 1.0 1-96; A b 2.0 1-64; A c 3.0 1-33; Q 1-96 0 1.0:0,96,1 2.0:0,96,1 3.0:0,96,1"},
	{"E23 N1", "R 1 0 1; A a 1.0 5,5; L 1.0:0,2; Q 5,5 0 1.0:0,2,1; Q 5 0 1.0:0,2,1; Q 5,5,5 0 1.0:0,3,1; F a; L 1.0:0,0"},
	{"E24 N3", "R 1 0 1; A a 1.0 1,2; A b 1.0 2; L 1.0:0,3; Q 2 0 1.0:0,3,2; Q 1,2 0 1.0:0,3,2; F a; L 1.0:0,1; F b; L 1.0:0,0"},
	{"E28", "R 1 0 1; A a 1.0 1 8; U 1; U 1; A a 1.0 1 !rank; Q - 0"},
	{"N2", "R 1 0 1; A a 1.0 1,2,1; L 1.0:0,3; F a; L 1.0:0,0"},
	{"N4, exactly", "R 1 0 1; A a 1.0 1,2,3; A b 1.0 1,9,3; L 1.0:0,5; F a; L 1.0:0,3; F b; L 1.0:0,0"},
	{"N5, exactly", "R 1 0 1; A a 1.0 1,2,3; A b 1.0 1,9,3,4; L 1.0:0,6; F b; L 1.0:0,3; F a; L 1.0:0,0"},
	{"O1", "R 1 0 1; A r1 1.0 1,2,3; O r1 =2; L 1.0:0,4; F r1; L 1.0:0,0"},
	{"O2-O4", "R 1 0 1; A r1 1.0 1,2,3; O r1 0.5; L 1.0:0,2; A r2 1.0 1,2; L 1.0:0,2; O r1 0.0; L 1.0:0,1; F r1; F r2; L 1.0:0,0"},
	{"O5-O6", "R 1 0 1; A long 1.0 1,2,3; A short 1.0 1,2; W long 0.5; L 1.0:0,3; F long; L 1.0:0,2; F short; L 1.0:0,0"},
	{"O7", "R 1 0 1; A long 1.0 1-4; A short 1.0 1,2; W long 0.5; L 1.0:0,3; F short; L 1.0:0,3; F long; L 1.0:0,0"},
	{"O8-O9", "R 1 0 1; A l 1.0 1,2,3; A r 1.0 1,2,4; O l; L 1.0:0,5; W l 0.5; L 1.0:0,4; W l 0.25; L 1.0:0,4; F l; L 1.0:0,3; F r; L 1.0:0,0"},
	{"O10", "R 1 0 1; A r 1.0 -; O r; L 1.0:0,1; F r; L 1.0:0,0; O r =0"},
	{"O11", "R 1 0 1; R 2 0 1; A a 1.0 1,2,3 12; O a 0.5; P a; A b 2.0 1,2,4 12; Q 1,2,3,5 12 1.0:12,3,1 2.0:24,5,1"},
	{"output of 64 expected tokens, as its fraction left falls", "R 1 0 1; A a 1.0 1,2; O a 0.859375; L 1.0:0,3; O a 0.609375; L 1.0:0,2; O a 0.359375; L 1.0:0,2; O a 0.109375; L 1.0:0,1; F a; L 1.0:0,0"},
	{"the same, told at once", "R 1 0 1; A a 1.0 1,2; O a 0.375; L 1.0:0,1; A b 1.0 3,4; O b 0; L 1.0:0,1; F a; L 1.0:0,0; F b"},
	{"weights of another rank stay", "R 1 0 2; A a 1.0 1,2,3,4; A b 1.1 1,2,3,4; W a 0.5; A c 1.0 1,2; L 1.0:0,2 1.1:0,4; F a; L 1.0:0,1 1.1:0,4; F c; F b; L 1.0:0,0 1.1:0,0"},
	{"sums saturate", "R 1 0 1; A a 1.0 1 18446744073709551615; A b 1.0 2 18446744073709551615; L 1.0:18446744073709551615,2;" +
		"Q 3 7 1.0:18446744073709551615,3,2; F a; L 1.0:18446744073709551615,1; A c 1.0 2 1; F b; L 1.0:1,1; F c; L 1.0:0,0"},
}

func TestExamples(t *testing.T) {
	for _, tt := range examples {
		t.Run(tt.name, func(t *testing.T) {
			s := script{T: t, tracker: tracker.New(tracker.DefaultConfig())}
			for _, step := range strings.Split(tt.steps, ";") {
				s.run(strings.TrimSpace(step))
			}
		})
	}
}

type script struct {
	*testing.T
	tracker *tracker.Tracker
}

func (s *script) run(step string) {
	s.Helper()
	f := strings.Fields(step)
	want := ""
	if last := f[len(f)-1]; last[0] == '=' || last[0] == '!' {
		want, f = last[1:], f[:len(f)-1]
	}
	answers := func(got any) {
		s.Helper()
		if want != "" && fmt.Sprint(got) != want {
			s.Fatalf("%s: got %v", step, got)
		}
	}
	switch f[0] {
	case "R":
		s.tracker.Register(&worker.Worker{ID: worker.ID(s.number(f[1])), DPStart: uint32(s.number(f[2])), DPSize: uint32(s.number(f[3]))}, start)
	case "U":
		s.tracker.Unregister(worker.ID(s.number(f[1])))
	case "A":
		r := tracker.Reservation{ID: f[1], Rank: s.rank(f[2]), Hashes: s.hashes(f[3])}
		if len(f) > 4 {
			r.PrefillTokens = s.number(f[4])
		}
		err := s.tracker.Reserve(r, tracker.NoLimit, start)
		if !errors.Is(err, map[string]error{"": nil, "rank": tracker.ErrUnknownRank, "duplicate": tracker.ErrDuplicate}[want]) {
			s.Fatalf("%s: %v", step, err)
		}
	case "P":
		_, got := s.tracker.PrefillDone(f[1], start)
		answers(got)
	case "O", "W": // W is the weight alone
		var weight *float64
		if len(f) > 2 {
			v, err := strconv.ParseFloat(f[2], 64)
			if err != nil {
				s.Fatal(err)
			}
			weight = &v
		}
		blocks := map[string]uint64{"O": 1}[f[0]]
		_, got := s.tracker.Grow(f[1], blocks, weight, start)
		answers(got)
	case "F":
		_, got := s.tracker.Free(f[1], start)
		answers(got)
	case "L":
		s.same(step, s.tracker.Project(nil, start, nil), f[1:], func(p tracker.Projection) string {
			return fmt.Sprintf("%d.%d:%d,%d", p.Worker, p.DP, p.PrefillTokens, p.DecodeBlocks)
		})
	case "Q":
		s.board(step, s.hashes(f[1]))
		s.same(step, s.tracker.Project(s.hashes(f[1]), start, nil), f[3:], func(p tracker.Projection) string {
			blocks, tokens := p.Potential(s.number(f[2]))
			return fmt.Sprintf("%d.%d:%d,%d,%d", p.Worker, p.DP, tokens, blocks, p.Requests)
		})
	default:
		s.Fatalf("%s: no such step", step)
	}
}

// board checks that a Board tells the same as Project.
func (s *script) board(step string, hashes []uint64) {
	s.Helper()
	var b tracker.Board
	s.tracker.Read(hashes, start, &b)
	for _, p := range s.tracker.Project(hashes, start, nil) {
		i := slices.Index(b.Ranks, p.Rank)
		if i < 0 || b.Loads[i].Tokens() != p.PrefillTokens || b.Loads[i].Blocks() != p.DecodeBlocks || uint64(len(hashes))-uint64(b.Held[i]) != p.AdditionalBlocks {
			s.Fatalf("%s: the board has %+v %v %v, Project %+v", step, b.Ranks, b.Loads, b.Held, p)
		}
	}
}

func (s *script) same(step string, list []tracker.Projection, want []string, text func(tracker.Projection) string) {
	s.Helper()
	got := make([]string, len(list))
	for i, p := range list {
		got[i] = text(p)
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		s.Fatalf("%s: got %v", step, got)
	}
}

func (s *script) number(text string) uint64 {
	s.Helper()
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		s.Fatal(err)
	}
	return n
}

func (s *script) rank(text string) worker.Rank {
	id, dp, _ := strings.Cut(text, ".")
	return rank(worker.ID(s.number(id)), uint32(s.number(dp)))
}

func (s *script) hashes(text string) (all []uint64) {
	s.Helper()
	if text == "-" {
		return nil
	}
	for _, h := range strings.Split(text, ",") {
		if from, to, ok := strings.Cut(h, "-"); ok && from != "" {
			for n := s.number(from); n <= s.number(to); n++ {
				all = append(all, n)
			}
			continue
		}
		n, err := strconv.ParseInt(h, 10, 64)
		if err != nil {
			s.Fatal(err)
		}
		all = append(all, uint64(n))
	}
	return all
}

// TestManyTails is example E27: 64 shared blocks and a thousand tails.
func TestManyTails(t *testing.T) {
	tr := tracker.New(tracker.DefaultConfig())
	tr.Register(&worker.Worker{ID: 1, DPSize: 1}, start)
	prompt := make([]uint64, 65)
	for i := range 64 {
		prompt[i] = uint64(i + 1)
	}
	for i := range 1000 {
		prompt[64] = uint64(10000 + i)
		r := tracker.Reservation{ID: fmt.Sprint(i), Rank: rank(1, 0), Hashes: prompt, PrefillTokens: 3}
		if err := tr.Reserve(r, tracker.NoLimit, start); err != nil {
			t.Fatal(err)
		}
	}
	if got, want := tr.Load(rank(1, 0), start), (tracker.Load{PrefillTokens: 3000, DecodeBlocks: 1064, Requests: 1000}); got != want {
		t.Errorf("load = %+v, want %+v", got, want)
	}
	for i := range 1000 {
		tr.Free(fmt.Sprint(i), start)
	}
	if got := tr.Load(rank(1, 0), start); got != (tracker.Load{}) {
		t.Errorf("load after all is freed = %+v, want none", got)
	}
}

// TestLongPrompt books, shares, cuts and frees 65,536 blocks; nothing in it may recurse.
func TestLongPrompt(t *testing.T) {
	tr := tracker.New(tracker.DefaultConfig())
	tr.Register(&worker.Worker{ID: 1, DPSize: 2}, start)
	const n = 65536
	prompt := make([]uint64, n)
	for i := range prompt {
		prompt[i] = uint64(i) * 0x9e3779b97f4a7c15
	}
	for i, size := range []int{n, 1, n / 2, n, n - 1} {
		r := tracker.Reservation{ID: fmt.Sprint(i), Rank: rank(1, uint32(i%2)), Hashes: prompt[:size]}
		if err := tr.Reserve(r, tracker.NoLimit, start); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range tr.Project(prompt, start, nil) {
		if p.DecodeBlocks != n || p.AdditionalBlocks != 0 {
			t.Errorf("Project = %+v, want %d blocks and none to add", p, n)
		}
	}
	tr.Free("0", start)
	tr.Free("3", start)
	if a, b := tr.Load(rank(1, 0), start).DecodeBlocks, tr.Load(rank(1, 1), start).DecodeBlocks; a != n-1 || b != 1 {
		t.Errorf("blocks = %d and %d, want %d and 1", a, b, n-1)
	}
	tr.Unregister(1)
}

// TestPrefillFalls follows D1 to D10, prefills with an expected time.
func TestPrefillFalls(t *testing.T) {
	const none = -1
	type read struct {
		at        int // seconds
		tokens    uint64
		remaining int // ms
	}
	type step struct {
		at     int
		id     string
		tokens uint64 // 0: the prefill is done
		time   int    // seconds
	}
	a, b := step{0, "a", 100, 10}, step{2, "b", 60, 6}
	for _, tt := range []struct {
		name  string
		steps []step
		reads []read
	}{
		{"D1", []step{a, b}, []read{{2, 140, 14000}, {5, 110, 11000}, {12, 40, 4000}}},
		{"D2", []step{a, b}, []read{{17, 0, 0}}},
		{"D3", []step{a, {0, "b", 60, none}}, []read{{12, 60, none}}},
		{"D4", []step{{0, "a", 100, 0}, {0, "b", 60, 6}}, []read{{0, 60, 6000}, {3, 60, 3000}}},
		{"D5", []step{a, {0, "b", 40, 4}, {5, "b", 0, 0}}, []read{{5, 90, 9000}}},
		{"D6", []step{a, {0, "b", 40, 4}, {2, "b", 0, 0}}, []read{{2, 100, 10000}, {3, 90, 9000}}},
		{"D7", []step{a, {0, "b", 40, none}, {5, "b", 0, 0}}, []read{{5, 50, 5000}}},
		{"D8", []step{a, {0, "b", 40, 8}, {3, "a", 0, 0}}, []read{{3, 40, 8000}, {5, 30, 6000}}},
		{"D9", []step{{0, "a", 1000, 2}}, []read{{1, 500, 1000}, {2, 0, 0}, {9, 0, 0}}},
		{"D10", []step{{0, "a", 100, none}}, []read{{0, 100, none}, {90, 100, none}}},
		{"a front without time", []step{{0, "a", 100, none}, {0, "b", 60, 6}}, []read{{4, 160, none}}},
		{"a front of no time, the next without", []step{{0, "a", 100, 0}, {0, "b", 60, none}}, []read{{0, 60, none}}},
		{"nothing", nil, []read{{0, 0, 0}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
			tr := tracker.New(tracker.DefaultConfig())
			tr.Register(&worker.Worker{ID: 1, DPSize: 1}, start)
			for _, s := range tt.steps {
				if s.tokens == 0 {
					tr.PrefillDone(s.id, at(s.at))
					continue
				}
				r := reservation(s.id, rank(1, 0), s.tokens, 1)
				if s.time != none {
					r.PrefillTime = new(time.Duration(s.time) * time.Second)
				}
				if err := tr.Reserve(r, tracker.NoLimit, at(s.at)); err != nil {
					t.Fatal(err)
				}
			}
			for _, r := range tt.reads {
				if got := tr.Load(rank(1, 0), at(r.at)).PrefillTokens; got != r.tokens {
					t.Errorf("prefill tokens at %d s = %d, want %d", r.at, got, r.tokens)
				}
				got, known := tr.PrefillRemaining(rank(1, 0), at(r.at))
				if known != (r.remaining != none) || known && got.Milliseconds() != int64(r.remaining) {
					t.Errorf("remaining at %d s = %v, %v, want %d ms", r.at, got, known, r.remaining)
				}
			}
			for _, limit := range []uint64{0, 30, 59, 99} { // the time promised is the first at which it is so
				when, ok := tr.PrefillFalls(rank(1, 0), limit)
				if ok && tr.Load(rank(1, 0), when).PrefillTokens > limit || ok && when.After(start) && tr.Load(rank(1, 0), when.Add(-1)).PrefillTokens <= limit {
					t.Errorf("PrefillFalls(%d) = %v, but the tokens then are %d", limit, when.Sub(start), tr.Load(rank(1, 0), when).PrefillTokens)
				}
				if end := at(3500); !ok && tr.Load(rank(1, 0), start.Add(3*time.Second)).PrefillTokens > limit && tr.Load(rank(1, 0), end).PrefillTokens <= limit {
					t.Errorf("PrefillFalls(%d) = never, but it is so after an hour", limit)
				}
			}
		})
	}
}

// TestExpiry is the timeline of the specification: a limit of 10 s, a look at most every 30 s.
func TestExpiry(t *testing.T) {
	at := func(s float64) time.Time { return start.Add(time.Duration(s * float64(time.Second))) }
	tr := tracker.New(tracker.Config{ExpireAfter: 10 * time.Second, CheckEvery: 30 * time.Second})
	tr.Register(&worker.Worker{ID: 1, DPSize: 1}, start)
	tr.Register(&worker.Worker{ID: 2, DPSize: 1}, start)
	add := func(s float64, id string, w worker.ID, expires bool, want error, hashes ...uint64) {
		t.Helper()
		r := tracker.Reservation{ID: id, Rank: rank(w, 0), Hashes: hashes, Expires: expires}
		if err := tr.Reserve(r, tracker.NoLimit, at(s)); !errors.Is(err, want) {
			t.Fatalf("Reserve(%s) at %v s = %v, want %v", id, s, err, want)
		}
	}
	loads := func(s float64, first, second uint64) {
		t.Helper()
		a, b := tr.Load(rank(1, 0), at(s)).DecodeBlocks, tr.Load(rank(2, 0), at(s)).DecodeBlocks
		if a != first || b != second {
			t.Fatalf("blocks at %v s = %d and %d, want %d and %d", s, a, b, first, second)
		}
	}
	add(1, "r1", 1, true, nil, 1, 2)
	add(1, "q1", 2, true, nil, 1, 2)
	add(1, "own", 2, false, nil, 7)
	add(20, "r2", 1, true, nil, 1, 3)
	loads(20, 3, 3)
	add(32, "r1", 1, true, tracker.ErrDuplicate)
	loads(32, 3, 3)
	add(32, "r3", 1, true, nil, 9)
	loads(32, 1, 3)
	if _, ok := tr.Free("r1", at(32)); ok {
		t.Error("Free of an expired reservation = true, want false")
	}
	if _, got := tr.PrefillDone("r2", at(32)); got != tracker.Unknown {
		t.Errorf("PrefillDone of an expired reservation = %v, want Unknown", got)
	}
	add(32, "r1", 1, true, nil, 9, 10)
	loads(58, 2, 3)
	if got, want := tr.Expire(at(60)), []tracker.Expired{{ID: "q1", Rank: rank(2, 0)}}; !slices.Equal(got, want) {
		t.Errorf("Expire at 60 s = %v, want %v", got, want)
	}
	loads(61.5, 2, 1)
	if got := tr.Expire(at(120)); len(got) != 2 || tr.ExpiredTotal() != 5 {
		t.Errorf("Expire at 120 s = %v, %d in all, want 2 and 5", got, tr.ExpiredTotal())
	}
	loads(120, 0, 1)
	tr = tracker.New(tracker.Config{ExpireAfter: 10 * time.Second})
	tr.Register(&worker.Worker{ID: 1, DPSize: 1}, start)
	add(0, "r", 1, true, nil, 1)
	if got := tr.Expire(at(10)); len(got) != 0 {
		t.Errorf("Expire at the limit = %v, want none: only what is older goes", got)
	}
	if got := tr.Expire(at(10.001)); len(got) != 1 {
		t.Errorf("Expire beyond the limit = %v, want r", got)
	}
	tr = tracker.New(tracker.Config{ExpireAfter: 10 * time.Second, CheckEvery: 30 * time.Second})
	tr.Register(&worker.Worker{ID: 1, DPSize: 1}, start)
	add(0, "r", 1, true, nil, 1)
	if early, due := tr.Expire(at(29.999)), tr.Expire(at(30)); len(early) != 0 || len(due) != 1 {
		t.Errorf("Expire just before the first look = %v, and at it = %v, want none and r", early, due)
	}
}

// TestAdopt books what a replica has booked: an ID lives on one rank.
func TestAdopt(t *testing.T) {
	tr := tracker.New(tracker.DefaultConfig())
	tr.Register(&worker.Worker{ID: 1, DPSize: 1}, start)
	tr.Register(&worker.Worker{ID: 2, DPSize: 1}, start)
	for _, tt := range []struct {
		to     worker.Rank
		tokens uint64
		left   worker.Rank
		moved  bool
		err    error
		loads  [2]uint64
	}{
		{rank(3, 0), 8, worker.Rank{}, false, tracker.ErrUnknownRank, [2]uint64{0, 0}},
		{rank(1, 0), 8, worker.Rank{}, false, nil, [2]uint64{8, 0}},
		{rank(1, 0), 9, worker.Rank{}, false, tracker.ErrDuplicate, [2]uint64{8, 0}},
		{rank(1, 1), 9, worker.Rank{}, false, tracker.ErrUnknownRank, [2]uint64{8, 0}},
		{rank(2, 0), 4, rank(1, 0), true, nil, [2]uint64{0, 4}},
	} {
		r := tracker.Reservation{ID: "r", Rank: tt.to, Hashes: []uint64{1, 2}, PrefillTokens: tt.tokens, Expires: true}
		left, moved, err := tr.Adopt(r, start)
		if left != tt.left || moved != tt.moved || !errors.Is(err, tt.err) {
			t.Errorf("Adopt(%+v) = %v, %v, %v, want %v, %v, %v", r, left, moved, err, tt.left, tt.moved, tt.err)
		}
		if got := [2]uint64{tr.Load(rank(1, 0), start).PrefillTokens, tr.Load(rank(2, 0), start).PrefillTokens}; got != tt.loads {
			t.Errorf("loads after Adopt(%+v) = %v, want %v", r, got, tt.loads)
		}
	}
}
