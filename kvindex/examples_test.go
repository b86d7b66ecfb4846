package kvindex_test

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"spillway/kvhash"
	"spillway/kvindex"
	"spillway/worker"
)

// The sources of the examples of kv-index.md 3.12.
var (
	rankA  = worker.Rank{Worker: 1, DP: 0}
	rankA1 = worker.Rank{Worker: 1, DP: 1}
	rankC  = worker.Rank{Worker: 2, DP: 0}
)

var sources = map[string]worker.Rank{"A": rankA, "A1": rankA1, "C": rankC}

var tiers = map[string]worker.Tier{"dev": worker.Device, "host": worker.HostPinned, "disk": worker.Disk, "external": worker.External}

// play applies one step in the notation of the examples to the index and compares its outcome:
//
//	S A dev nil 1 2:501      store; engine hash 100+local unless given; " = status" if not ok
//	R A dev 101 102          remove; " = removed/unknown" to check both
//	clear A, remove A, removeworker 1
func play(t *testing.T, ix *kvindex.Index, step string) {
	t.Helper()
	call, want, _ := strings.Cut(step, " = ")
	f := strings.Fields(call)
	var got string
	switch f[0] {
	case "S":
		var parent kvindex.Parent
		if f[3] != "nil" {
			parent = kvindex.After(number(f[3]))
		}
		var engine, local []uint64
		for _, b := range f[4:] {
			l, e, given := strings.Cut(b, ":")
			local = append(local, number(l))
			if given {
				engine = append(engine, number(e))
			} else {
				engine = append(engine, 100+number(l))
			}
		}
		got = ix.Store(sources[f[1]], tiers[f[2]], parent, engine, local).String()
		if want == "" {
			want = "ok"
		}
	case "R":
		var engine []uint64
		for _, e := range f[3:] {
			engine = append(engine, number(e))
		}
		removed, unknown := ix.Remove(sources[f[1]], tiers[f[2]], engine)
		got = fmt.Sprintf("%d/%d", removed, unknown)
		if want == "" {
			want = fmt.Sprintf("%d/0", len(engine))
		}
	case "clear":
		ix.Clear(sources[f[1]])
	case "remove":
		ix.RemoveRank(sources[f[1]])
	case "removeworker":
		ix.RemoveWorker(worker.ID(number(f[1])))
	default:
		t.Fatalf("no such step: %s", step)
	}
	if got != want {
		t.Errorf("%s: got %s, want %s", call, got, want)
	}
}

func number(s string) uint64 {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		panic(err)
	}
	return n
}

func numbers(s string) []uint64 {
	var all []uint64
	for _, f := range strings.Fields(s) {
		all = append(all, number(f))
	}
	return all
}

// answer writes a query's result like "A=4+2+2 C=1": device blocks, and if there are any what
// host and disk add.
func answer(ix *kvindex.Index, locals string) string {
	var m kvindex.Matches
	ix.Query(numbers(locals), &m)
	m.Sort()
	var all []string
	for _, x := range m.Ranks {
		name := fmt.Sprint(x.Rank)
		for n, r := range sources {
			if r == x.Rank {
				name = n
			}
		}
		s := fmt.Sprintf("%s=%d", name, x.Device)
		if x.Host+x.Disk > 0 {
			s += fmt.Sprintf("+%d+%d", x.Host, x.Disk)
		}
		all = append(all, s)
	}
	return strings.Join(all, " ")
}

// examples are the rows of kv-index.md 3.12 by their number. A query is "locals = answer", where
// answer is as above.
var examples = []struct {
	name    string
	steps   []string
	queries []string
}{
	{"1", []string{"S A dev nil 1 2 3"}, []string{"1 2 3 = A=3", "1 2 3 4 = A=3", "1 2 9 = A=2", "9 2 3 = ", " = "}},
	{"2", []string{"S A dev nil 1 2", "S C dev nil 1 3"}, []string{"1 = A=1 C=1", "1 2 = A=2 C=1", "1 3 = A=1 C=2", "2 = "}},
	{"3", []string{"S A dev nil 1 2 3", "S A dev 103 4 5"}, []string{"1 2 3 4 5 = A=5"}},
	{"4", []string{"S A dev 103 4 5 = parent_block_not_found"}, []string{"1 2 3 4 5 = ", "4 5 = "}},
	{"5", []string{"S A dev nil 1 2 3", "S C dev 103 4 = parent_block_not_found"}, []string{"1 2 3 4 = A=3"}},
	{"6", []string{"S A dev nil 1 2 3", "R A dev 103"}, []string{"1 2 3 = A=2"}},
	{"7", []string{"S A dev nil 1 2 3 4 5", "R A dev 103"}, []string{"1 2 3 4 5 = A=2", "1 2 = A=2"}},
	{"7b", []string{"S A dev nil 1 2 3 4 5", "R A dev 103", "S A dev 102 3"}, []string{"1 2 3 4 5 = A=5"}},
	{"8", []string{"S A dev nil 1 2 3", "R A dev 101"}, []string{"1 2 3 = "}},
	{"9", []string{"S A dev nil 1 2 3", "R A dev 999 102 = 1/1"}, []string{"1 2 3 = A=1"}},
	{"10", []string{"S A dev nil 1 2 3", "S A dev nil 1 2 3 = duplicate_store", "R A dev 103"}, []string{"1 2 3 = A=2"}},
	{"11", []string{"S A dev nil 1 2 3", "S A1 dev nil 1 2 3", "S C dev nil 1 2 3", "clear A"}, []string{"1 2 3 = A1=3 C=3"}},
	{"12", []string{"S A dev nil 1 2 3", "S A1 dev nil 1 2", "S C dev nil 1", "removeworker 1"}, []string{"1 2 3 = C=1"}},
	{"13", []string{"S A dev nil 7:201", "S A dev 201 7:202", "S A dev 202 7:203"}, []string{"7 = A=1", "7 7 7 = A=3", "7 7 7 7 = A=3"}},
	{"14", []string{"S A dev nil 1 2 3", "S C dev nil 1:501 2:502 3:503", "R C dev 503", "R C dev 102 = 0/1"}, []string{"1 2 3 = A=3 C=2"}},
	{"15", []string{"S A dev nil 11 12", "S A host 112 13"}, []string{"11 12 13 = A=2+1+0"}},
	{"16", []string{"S A dev nil 11 12", "S A host 112 13", "S A disk 113 14"}, []string{"11 12 13 14 = A=2+1+1"}},
	{"17", []string{"S A host nil 1 2 3"}, []string{"1 2 3 = A=0+3+0", "2 3 = "}},
	{"18", []string{"S A dev nil 1 2", "S A host nil 1 2 3 4"}, []string{"1 2 3 4 = A=2+2+0"}},
	{"18b", []string{"S A dev nil 1 2", "S A host nil 1 2 3 4", "R A dev 102"}, []string{"1 2 3 4 = A=1+3+0"}},
	{"18c", []string{"S A dev nil 1 2", "S A host nil 1 2 3 4", "R A dev 102", "R A dev 101"}, []string{"1 2 3 4 = A=0+4+0"}},
	{"19", []string{"S A dev nil 1 2", "S A disk 102 3", "S A host 103 4"}, []string{"1 2 3 4 = A=2+0+1"}},
	{"20", []string{"S A host 102 3 4"}, []string{"1 2 3 4 = "}},
	{"20b", []string{"S A host 102 3 4", "S A dev nil 1 2"}, []string{"1 2 3 4 = A=2+2+0"}},
	{"21", []string{"S A dev nil 1 2", "S C host 102 3"}, []string{"1 2 3 = A=2"}},
	{"22", []string{"S A host nil 1 2 3", "R A host 102"}, []string{"1 2 3 = A=0+1+0"}},
	{"22b", []string{"S A host nil 1 2 3", "R A host 102", "S A host 101 2"}, []string{"1 2 3 = A=0+3+0"}},
	{"23", []string{"S A dev nil 1", "S A disk 101 2", "S A external 102 3"}, []string{"1 2 3 = A=1+0+2"}},
	{"24", []string{"S A dev nil 1 2 3 4", "S A1 dev nil 1 2", "S A1 host 102 3 4 5 6"}, []string{"1 2 3 4 5 6 7 8 = A=4 A1=2+4+0"}},
	{"25", []string{"S A dev nil 1 2 3 4", "S A1 dev nil 1 2", "S A host 104 5 6", "S A disk 106 7 8"}, []string{"1 2 3 4 5 6 7 8 = A=4+2+2 A1=2"}},
	{"26", nil, []string{"1 2 = "}},
	{"27", []string{"S A dev nil 1 2 3", "S A host nil 1 2 3", "clear A"}, []string{"1 2 3 = "}},
	{"28", []string{"S A dev nil 1:101 2:101 = invalid_block", "S A dev 101 2:101 = invalid_block"}, []string{"1 2 = "}},
	{"29", []string{"S A dev 0 1 2"}, []string{"1 2 = A=2"}},
	{"29b: 0 is an engine hash like any other once it is known", []string{"S A dev nil 1:0 2", "S A dev 0 3"}, []string{"1 2 = A=2", "1 3 = A=2", "3 = "}},
	{"30", []string{"S A dev nil 1 2 3", "S A dev nil 9:103"}, []string{"1 2 3 = A=2", "9 = A=1"}},
	{"31", []string{"S A dev nil 1 2 3", "S A dev nil 1:601", "R A dev 101"}, []string{"1 2 3 = A=3"}},
	{"31b: the newest alias goes first", []string{"S A dev nil 1 2 3", "S A dev nil 1:601", "R A dev 601"}, []string{"1 2 3 = A=3"}},
	{"32", []string{"S A host nil 1 2", "S A host nil 1:301 5:305 = duplicate_store"}, []string{"1 2 = A=0+2+0", "1 5 = A=0+1+0"}},
	{"host before device", []string{"S A host nil 1 2", "S A disk nil 1 2 3", "S C disk nil 1"}, []string{"1 2 3 = A=0+2+1 C=0+0+1"}},
	{"the walk starts at the newest alias", []string{"S A dev nil 1 1:601 = ok", "S A dev nil 1:701", "S A host 701 2", "S A host 101 3"}, []string{"1 2 = A=1+1+0", "1 3 = A=1"}},
	{"the alias that is left", []string{"S A dev nil 1", "S A dev nil 1:701", "S A host 101 2", "R A dev 701"}, []string{"1 2 = A=1+1+0"}},
	{"an empty store is nothing", []string{"S A dev 55"}, []string{"1 = "}},
	{"remove rank", []string{"S A dev nil 1", "S A1 dev nil 1", "S A host nil 1", "remove A", "remove C"}, []string{"1 = A1=1"}},
}

func TestExamples(t *testing.T) {
	for _, tt := range examples {
		t.Run(tt.name, func(t *testing.T) {
			ix := kvindex.New(kvindex.DefaultConfig())
			for _, s := range tt.steps {
				play(t, ix, s)
			}
			for _, q := range tt.queries {
				locals, want, _ := strings.Cut(q, " = ")
				if got := answer(ix, locals); got != want {
					t.Errorf("query [%s]: got %q, want %q", locals, got, want)
				}
			}
			ix.RemoveWorker(1)
			ix.RemoveWorker(2)
			if ix.Entries() != 0 || ix.Ranks() != 0 {
				t.Errorf("%d entries and %d ranks are left of nothing", ix.Entries(), ix.Ranks())
			}
		})
	}
}

// TestOverlaps has the token numbers that some rows of 3.12 give.
func TestOverlaps(t *testing.T) {
	for _, tt := range []struct {
		row, locals    string
		blockSize      int
		gpu, cpu, disk uint32
		dp             map[uint32]uint32
	}{
		{"15", "11 12 13", 4, 8, 12, 12, nil},
		{"16", "11 12 13 14", 4, 8, 12, 16, nil},
		{"17", "1 2 3", 16, 0, 48, 48, map[uint32]uint32{0: 0}},
		{"23", "1 2 3", 16, 16, 16, 48, nil},
		{"24", "1 2 3 4 5 6 7 8", 16, 64, 96, 96, map[uint32]uint32{0: 64, 1: 32}},
		{"25", "1 2 3 4 5 6 7 8", 16, 64, 96, 128, map[uint32]uint32{0: 64, 1: 32}},
		{"26", "1 2", 16, 0, 0, 0, map[uint32]uint32{3: 0}},
	} {
		i := slices.IndexFunc(examples, func(e struct {
			name    string
			steps   []string
			queries []string
		}) bool {
			return e.name == tt.row
		})
		ix := kvindex.New(kvindex.DefaultConfig())
		for _, s := range examples[i].steps {
			play(t, ix, s)
		}
		var m kvindex.Matches
		ix.Query(numbers(tt.locals), &m)
		o := m.Worker(1)
		tokens := func(blocks int) uint32 { return kvindex.Tokens(blocks, tt.blockSize) }
		if tokens(o.GPU) != tt.gpu || tokens(o.CPU) != tt.cpu || tokens(o.Disk) != tt.disk {
			t.Errorf("row %s: overlap %+v blocks of %d, want %d, %d and %d tokens", tt.row, o, tt.blockSize, tt.gpu, tt.cpu, tt.disk)
		}
		for dp, want := range tt.dp {
			if got := tokens(m.Rank(worker.Rank{Worker: 1, DP: dp}).Device); got != want {
				t.Errorf("row %s: rank %d has %d tokens, want %d", tt.row, dp, got, want)
			}
		}
		ix.QueryDevice(numbers(tt.locals), &m)
		if o := m.Worker(1); tokens(o.GPU) != tt.gpu || o.CPU != o.GPU || o.Disk != o.GPU {
			t.Errorf("row %s: overlap of the device alone is %+v", tt.row, o)
		}
	}
	if got := kvindex.Tokens(1<<30, 16); got != 1<<32-1 {
		t.Errorf("2^34 tokens are %d", got)
	}
}

// TestHashedExamples has row 34 and the one from end to end.
func TestHashedExamples(t *testing.T) {
	prompt := []uint32{10, 11, 12, 13, 20, 21, 22, 23}
	blocks := func(salt string) []uint64 {
		return kvhash.AppendBlocks(nil, prompt, kvhash.Options{BlockSize: 4, Salt: salt})
	}
	plain := blocks("")
	if want := []uint64{8906183847324352865, 13603407971999731239}; !slices.Equal(plain, want) {
		t.Fatalf("block hashes %v, want %v", plain, want)
	}
	ix := kvindex.New(kvindex.DefaultConfig())
	ix.Store(rankA, worker.Device, kvindex.Parent{}, []uint64{101}, plain[:1])
	ix.Store(rankA, worker.HostPinned, kvindex.After(101), []uint64{102}, plain[1:])
	var m kvindex.Matches
	ix.Query(plain, &m)
	if got, want := m.Worker(1), (kvindex.Overlap{GPU: 1, CPU: 2, Disk: 2}); got != want {
		t.Errorf("overlap %+v, want %+v", got, want)
	}
	ix.Store(rankC, worker.Device, kvindex.Parent{}, []uint64{1, 2}, blocks("tenant-a"))
	for salt, want := range map[string]int{"tenant-a": 2, "tenant-b": 0, "": 0} {
		ix.Query(blocks(salt), &m)
		if got := m.Rank(rankC).Device; got != want {
			t.Errorf("salt %q: %d blocks, want %d", salt, got, want)
		}
	}
}

func TestPartitions(t *testing.T) {
	ps := kvindex.NewPartitions(kvindex.Config{MaxEntries: 10, MaxRanks: 10, MaxPartitions: 2})
	one, two := worker.Partition{Model: "m", Tenant: "t1"}, worker.Partition{Model: "m", Tenant: "t2"}
	if ps.Partition(one) != nil {
		t.Error("there is a partition that nobody made")
	}
	p, err := ps.Register(one, 16)
	if err != nil || p.BlockSize() != 16 || p.Name != one || ps.Partition(one) != p {
		t.Fatalf("Register = %+v, %v", p, err)
	}
	play(t, p.Index, "S A dev nil 1 2 3")
	if same, err := ps.Register(one, 16); same != p || err != nil {
		t.Errorf("second Register = %p, %v, want %p", same, err, p)
	}
	_, err = ps.Register(one, 32)
	if !errors.Is(err, kvindex.ErrBlockSize) || !strings.Contains(err.Error(), "existing=16 requested=32") {
		t.Errorf("Register with other blocks: %v", err)
	}
	if _, err := ps.Recover(one, 32); !errors.Is(err, kvindex.ErrBlockSize) {
		t.Errorf("Recover with other blocks: %v", err)
	}
	// Row 33: partitions never mix.
	q, err := ps.Recover(two, 8)
	if err != nil || answer(q.Index, "1 2 3") != "" || answer(p.Index, "1 2 3") != "A=3" {
		t.Errorf("answers %q and %q, %v", answer(q.Index, "1 2 3"), answer(p.Index, "1 2 3"), err)
	}
	// The room is shared, and what a dump made takes the size of the first registration.
	play(t, q.Index, "S A dev nil 1 2 3 4 5 6 7 8 = full")
	play(t, q.Index, "S A dev nil 1 2 3 4 5 6 7")
	if held, limit := ps.Entries(); held != 10 || limit != 10 {
		t.Errorf("%d of %d entries", held, limit)
	}
	if r, err := ps.Register(two, 4); r != q || err != nil || q.BlockSize() != 4 || q.Index.Entries() != 0 {
		t.Errorf("Register over a dump = %p, %v, with %d entries and blocks of %d", r, err, q.Index.Entries(), q.BlockSize())
	}
	if _, err := ps.Register(two, 8); !errors.Is(err, kvindex.ErrBlockSize) {
		t.Errorf("Register with other blocks: %v", err)
	}
	// The last worker leaves, and one with other blocks comes: the same object, empty.
	ps.Release(one)
	if p.Index.Entries() != 0 || ps.Partition(one) != p {
		t.Errorf("after Release %d entries in %p, want 0 in %p", p.Index.Entries(), ps.Partition(one), p)
	}
	if r, err := ps.Register(one, 64); r != p || err != nil || p.BlockSize() != 64 {
		t.Errorf("Register after Release = %p, %v", r, err)
	}
	ps.Release(worker.Partition{Model: "never"})
	if all := ps.All(); len(all) != 2 || all[0] != p || all[1] != q {
		t.Errorf("All() = %v", all)
	}
}

// Names of partitions come from clients, so there is a bound; those that nobody needs give way.
func TestPartitionsAreBounded(t *testing.T) {
	cfg := kvindex.DefaultConfig()
	cfg.MaxPartitions = 3
	ps := kvindex.NewPartitions(cfg)
	name := func(i int) worker.Partition { return worker.Partition{Model: "m", Tenant: strconv.Itoa(i)} }
	first, err := ps.Register(name(0), 16)
	if err != nil {
		t.Fatal(err)
	}
	dumped, err := ps.Recover(name(1), 16)
	if err != nil {
		t.Fatal(err)
	}
	play(t, dumped.Index, "S A dev nil 1 2 3")
	for i := 2; i < 10; i++ {
		if _, err := ps.Register(name(i), 16); err != nil {
			t.Fatalf("after %d partitions that have no workers any more: %v", i-2, err)
		}
		ps.Release(name(i))
	}
	if ps.Partition(name(0)) != first || ps.Partition(name(1)) != dumped || len(ps.All()) != 3 {
		t.Errorf("of %d partitions, one with workers or blocks is gone", len(ps.All()))
	}
	if _, err := ps.Register(name(2), 16); err != nil {
		t.Fatal(err)
	}
	if _, err := ps.Register(name(3), 16); !errors.Is(err, kvindex.ErrPartitions) {
		t.Errorf("Register of one too many = %v, want ErrPartitions", err)
	}
	if _, err := ps.Recover(name(3), 16); !errors.Is(err, kvindex.ErrPartitions) {
		t.Errorf("Recover of one too many = %v, want ErrPartitions", err)
	}
	if p, err := ps.Register(name(1), 16); p != dumped || err != nil {
		t.Errorf("Register of one that is there = %v", err)
	}
	// Who cannot be had after all has not cost what a dump brought.
	ps.Withdraw(name(1))
	if dumped.Index.Entries() != 3 {
		t.Errorf("%d entries after Withdraw, want 3", dumped.Index.Entries())
	}
	if _, err := ps.Register(name(1), 32); err != nil {
		t.Errorf("Register with other blocks after Withdraw = %v", err)
	}
}
