package router_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"spillway/kvindex"
	"spillway/router"
	"spillway/tracker"
	"spillway/worker"
)

// newClasses is a rig in mode kv, with classes of the given list, or a threshold of 0 for all if
// that is "". There are no busy thresholds.
func newClasses(t testing.TB, list string, workers ...worker.Worker) *wave {
	t.Helper()
	catalog, err := worker.NewCatalog([]string{"M"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	cfg := router.DefaultConfig()
	cfg.Mode = router.KV
	cfg.Queue.QueueThreshold = new(0.0)
	if list != "" {
		cfg.Queue.Policies = policies(t, classFile(list))
	}
	w := &wave{rig: &rig{t: t, r: router.New(cfg, limits(nil, nil), catalog, seeded())}, now: start}
	for _, x := range workers {
		w.register(x)
	}
	return w
}

func seeded(n ...uint64) *rand.Rand {
	return rand.New(rand.NewPCG(7, slices.Concat(n, []uint64{0})[0]))
}

// classFile is a policy file with the family std, its class (threshold 0, quantum 1), and others.
func classFile(list string) string {
	return "default_policy_family: std\nuncached_isl_buckets: [{min_tokens: 0, bucket: all}]\npolicy_classes:\n" +
		"  - {name: std-all, policy_family: std, cache_bucket: all, quantum: 1, prefill_busy_threshold: 0}\n" + list
}

// load books so many prefill tokens on a rank of worker 1.
func (w *wave) load(dp uint32, tokens uint64) {
	w.t.Helper()
	r := tracker.Reservation{ID: fmt.Sprint("load", dp), Rank: worker.Rank{Worker: 1, DP: dp}, PrefillTokens: tokens}
	if err := w.p.Reserve(r, w.now); err != nil {
		w.t.Fatalf("Reserve = %v", err)
	}
}

// batch is a worker of so many ranks that computes so many tokens in a batch.
func batch(t testing.TB, id worker.ID, ranks uint32, tokens uint64) worker.Worker {
	w := record(t, id, ranks)
	w.MaxNumBatchedTokens = tokens
	return w
}

// TestQueueThreshold has rows 67 to 71 of scheduler.md 18.7: who is admitted, and who waits.
func TestQueueThreshold(t *testing.T) {
	class := func(thresholds string) string { return "  - {name: x, quantum: 1, " + thresholds + "}" }
	for _, tt := range []struct {
		row, class string
		batch      uint64
		p          []uint64 // by rank
		wait       bool
	}{
		{"67", class("prefill_busy_threshold_frac: 0"), 0, []uint64{0}, false},
		{"67", class("prefill_busy_threshold_frac: 0"), 0, []uint64{1}, true},
		{"68", class("prefill_busy_threshold_frac: 0.5"), 100, []uint64{50}, false},
		{"68", class("prefill_busy_threshold_frac: 0.5"), 100, []uint64{51}, true},
		{"69", class("prefill_busy_threshold: 1024, prefill_busy_threshold_frac: 2"), 400, []uint64{900}, true},
		{"70", class("prefill_busy_threshold_frac: 1"), 0, []uint64{1_000_000}, false},
		{"71", class("prefill_busy_threshold: 0"), 0, []uint64{1, 0}, false},
		{"71, none idle", class("prefill_busy_threshold: 0"), 0, []uint64{1, 1}, true},
		{"no threshold", "  - {name: x, quantum: 1}", 1, []uint64{1_000_000}, false},
	} {
		w := newClasses(t, tt.class, batch(t, 1, uint32(len(tt.p)), tt.batch))
		for dp, tokens := range tt.p {
			if tokens > 0 {
				w.load(uint32(dp), tokens)
			}
		}
		_, err := w.wait("a", router.Order{Class: "x"}, router.Query{})
		if waits := w.p.Waiting() == 1; err != nil || waits != tt.wait || waits == (len(w.going) == 1) {
			t.Errorf("row %s: Wait = %v, went %q, waits = %v; want waits = %v", tt.row, err, w.going, waits, tt.wait)
		}
	}
}

// TestPrefillFalls has row 84: a prefill of 100 tokens that takes 10 s is down to 40 after 6.
func TestPrefillFalls(t *testing.T) {
	w := newClasses(t, "  - {name: x, quantum: 1, prefill_busy_threshold_frac: 0.5}", batch(t, 1, 1, 100))
	first := tracker.Reservation{ID: "first", Rank: worker.Rank{Worker: 1}, PrefillTokens: 100, PrefillTime: new(10 * time.Second)}
	if err := w.p.Reserve(first, start); err != nil {
		t.Fatal(err)
	}
	_, _ = w.wait("second", router.Order{Class: "x"}, router.Query{})
	for _, step := range []struct {
		at   float64
		want int
	}{{0, 0}, {4.9, 0}, {6, 1}} {
		if w.now = at(step.at); step.at == 6 { // there is room, and nobody has been told: it goes to who came first
			_, _ = w.wait("third", router.Order{Class: "x", PriorityJump: 1}, router.Query{})
		}
		if got := w.take(w.p.Admit(w.now)); len(got) != step.want {
			t.Errorf("at %v s: Admit = %q, want %d to go", step.at, got, step.want)
		}
	}
}

// TestPinsWait: only the pinned rank counts, and who may go nowhere does not wait.
func TestPinsWait(t *testing.T) {
	w := newClasses(t, "", record(t, 1, 2), record(t, 2, 1))
	w.load(0, 1)
	on := func(id worker.ID, dp uint32) router.Query { return router.Query{Worker: new(id), DP: new(dp)} }
	for _, tt := range []struct {
		name string
		q    router.Query
		want string // "waits" or an error or nothing
	}{
		{"busy rank", on(1, 0), "waits"},
		{"idle rank", on(1, 1), ""},
		{"unknown rank", on(1, 2), router.ErrPinUnknown.Error()},
		{"unknown worker", on(9, 0), router.ErrPinUnknown.Error()},
		{"no worker is allowed", router.Query{Only: []*worker.Worker{}}, router.ErrUnroutable.Error()},
	} {
		got := ""
		before := w.p.Waiting()
		if _, err := w.wait(tt.name, router.Order{}, tt.q); err != nil {
			got = err.Error()
		} else if w.p.Waiting() > before {
			got = "waits"
		}
		if got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

// TestClassOrders has rows 72 to 75 of scheduler.md 18.7.
func TestClassOrders(t *testing.T) {
	type request struct {
		id       string
		at       float64
		order    router.Order
		isl      uint64
		overlaps []kvindex.Match // of blocks of one token
		rank     *uint32
	}
	held := func(dp uint32, tokens int) kvindex.Match {
		return kvindex.Match{Rank: worker.Rank{Worker: 1, DP: dp}, Device: tokens}
	}
	for _, tt := range []struct {
		row, policy string
		requests    []request
		want        string
	}{
		{"72", "fcfs", []request{{"first", 0, router.Order{}, 1, nil, nil}, {"second", 5, router.Order{PriorityJump: 50}, 1, nil, nil}}, "second first"},
		{"72, too small a jump", "fcfs", []request{{"first", 0, router.Order{}, 1, nil, nil}, {"second", 5, router.Order{PriorityJump: 4}, 1, nil, nil}}, "first second"},
		{"a jump back is none", "fcfs", []request{{"first", 0, router.Order{PriorityJump: -9}, 1, nil, nil}, {"second", 5, router.Order{}, 1, nil, nil}}, "first second"},
		{"73", "fcfs", []request{{"jump", 0, router.Order{PriorityJump: 1000}, 1, nil, nil}, {"strict", 1000, router.Order{StrictPriority: 1}, 1, nil, nil}}, "strict jump"},
		{"74", "wspt", []request{ // 6/512, 1/64, 1/1
			{"jump", 0, router.Order{PriorityJump: 5}, 512, nil, nil},
			{"cached", 1, router.Order{}, 1024, []kvindex.Match{held(0, 960)}, nil},
			{"all cached", 2, router.Order{}, 512, []kvindex.Match{held(0, 1024)}, nil},
		}, "all cached cached jump"},
		{"74, strict", "wspt", []request{{"short", 0, router.Order{}, 1, nil, nil}, {"strict", 1, router.Order{StrictPriority: 1}, 512, nil, nil}}, "strict short"},
		{"75", "wspt", []request{ // 1/1008, not 1/64; 1/1000
			{"pinned", 0, router.Order{}, 1024, []kvindex.Match{held(0, 16), held(1, 960)}, new(uint32(0))},
			{"other", 1, router.Order{}, 1000, nil, new(uint32(0))},
		}, "other pinned"},
		{"equal scores", "wspt", []request{{"a", 0, router.Order{}, 7, nil, nil}, {"b", 1, router.Order{}, 7, nil, nil}}, "a b"},
		{"a priority is a jump", "wspt", []request{{"a", 0, router.Order{}, 7, nil, nil}, {"b", 1, router.Order{Priority: 1}, 7, nil, nil}}, "b a"},
	} {
		t.Run(tt.row, func(t *testing.T) {
			ranks := uint32(1)
			if tt.row == "75" {
				ranks = 2
			}
			w := newClasses(t, "  - {name: x, quantum: 1, prefill_busy_threshold: 0, queue_policy: "+tt.policy+"}", record(t, 1, ranks))
			w.load(0, 1)
			if ranks == 2 {
				w.load(1, 1)
			}
			for _, r := range tt.requests {
				w.now = at(r.at)
				r.order.Class = "x"
				q := router.Query{PromptTokens: r.isl, BlockSize: 1, Overlaps: &kvindex.Matches{Ranks: r.overlaps}}
				if r.rank != nil {
					q.Worker, q.DP = new(worker.ID(1)), r.rank
				}
				if _, err := w.wait(r.id, r.order, q); err != nil || len(w.going) > 0 {
					t.Fatalf("Wait(%s) = %v, went %q", r.id, err, w.going)
				}
			}
			last := "load0"
			for w.p.Waiting() > 0 { // a prompt that is cached leaves the rank as idle as it was
				w.going = w.going[:len(w.going):len(w.going)]
				w.free(last)
				last = w.going[len(w.going)-1]
			}
			if got := strings.Join(w.going, " "); got != tt.want {
				t.Errorf("they went %q, want %q", got, tt.want)
			}
		})
	}
}

// TestClassLimits has rows 76 and 77 of scheduler.md 18.7.
func TestClassLimits(t *testing.T) {
	w := newClasses(t, "  - {name: x, quantum: 1, prefill_busy_threshold: 0, request_queue_limit_per_worker: 1, "+
		"raw_isl_token_queue_limit_per_worker: 5, cached_token_queue_limit_per_worker: 3}", record(t, 1, 1), record(t, 2, 1))
	query := func(isl uint64, cached int) router.Query {
		m := kvindex.Match{Rank: worker.Rank{Worker: 2}, Device: cached}
		return router.Query{PromptTokens: isl, BlockSize: 1, Overlaps: &kvindex.Matches{Ranks: []kvindex.Match{m}}}
	}
	x := router.Order{Class: "x"}
	limit := func(what string, err error, want router.ClassLimitError) {
		t.Helper()
		var got *router.ClassLimitError
		if !errors.As(err, &got) || *got != want {
			t.Errorf("%s: Wait = %v, want %v", what, err, &want)
		}
	}
	w.load(0, 1)
	if _, err := w.p.Select(router.Query{Reservation: "two", PromptTokens: 1, Worker: new(worker.ID(2))}, start); err != nil {
		t.Fatal(err)
	}
	first, err := w.wait("8,4", x, query(8, 4))
	if err != nil {
		t.Errorf("8,4: Wait = %v", err)
	}
	if _, err := w.wait("100,100", x, query(100, 100)); err != nil {
		t.Errorf("100,100: Wait = %v", err)
	}
	_, err = w.wait("1,0", x, query(1, 0))
	limit("1,0", err, router.ClassLimitError{Class: "x", Kind: router.LimitRequests, Current: 2, Limit: 2})
	class := w.r.Profile("M").Class("x", 0)
	if got, want := w.p.Backlogs(nil)[class], (router.Backlog{Requests: 2, ISLTokens: 108, CachedTokens: 104}); got != want || w.p.WaitingTokens() != 108 {
		t.Errorf("Backlogs = %+v with %d tokens, want %+v", got, w.p.WaitingTokens(), want)
	}
	if _, err := w.wait("of another class", router.Order{}, query(1, 0)); err != nil {
		t.Errorf("Wait in another class = %v, want nil", err)
	}
	w.p.Leave(first) // who leaves is not counted any more: S-2
	_, err = w.wait("1,0", x, query(1, 0))
	limit("after one has left", err, router.ClassLimitError{Class: "x", Kind: router.LimitISLTokens, Current: 100, Limit: 10})
	w.r.Unregister(2, start) // evicts nobody
	if got := w.p.Waiting(); got != 2 {
		t.Errorf("%d wait after a worker has gone, want 2", got)
	}
	_, err = w.wait("1,0", x, query(1, 0))
	limit("with one worker", err, router.ClassLimitError{Class: "x", Kind: router.LimitRequests, Current: 1, Limit: 1})

	w = newClasses(t, "  - {name: x, quantum: 1, prefill_busy_threshold: 0, request_queue_limit_per_worker: 0}", record(t, 1, 1))
	if _, err := w.wait("77, idle", x, query(1, 0)); err != nil {
		t.Errorf("row 77, not busy: Wait = %v", err)
	}
	_, err = w.wait("77, busy", x, query(1, 0))
	limit("row 77", err, router.ClassLimitError{Class: "x", Kind: router.LimitRequests})
}

// TestCachedLimit is the third limit, which is looked at last.
func TestCachedLimit(t *testing.T) {
	w := newClasses(t, "  - {name: x, quantum: 1, prefill_busy_threshold: 0, cached_token_queue_limit_per_worker: 3}", record(t, 1, 1))
	w.load(0, 1)
	q := router.Query{PromptTokens: 8, BlockSize: 1, Overlaps: &kvindex.Matches{Ranks: []kvindex.Match{
		{Rank: worker.Rank{Worker: 9}, Device: 8},        // of no worker that we know
		{Rank: worker.Rank{Worker: 1, DP: 7}, Device: 7}, // nor rank
		{Rank: worker.Rank{Worker: 1}, Device: 2, Host: 2},
	}}}
	_, _ = w.wait("a", router.Order{Class: "x"}, q)
	_, err := w.wait("b", router.Order{Class: "x"}, q)
	want := router.ClassLimitError{Class: "x", Kind: router.LimitCachedTokens, Current: 4, Limit: 3} // 2 + 0.75 x 2, rounded
	var got *router.ClassLimitError
	if !errors.As(err, &got) || *got != want {
		t.Errorf("Wait = %v, want %v", err, &want)
	}
}

// TestDrainAfterEnqueue is S-1: who finds an idle worker goes, though others of its class wait for a
// rank that is busy.
func TestDrainAfterEnqueue(t *testing.T) {
	w := newClasses(t, "", record(t, 1, 1), record(t, 2, 1))
	w.load(0, 1)
	_, _ = w.wait("pinned", router.Order{}, router.Query{Worker: new(worker.ID(1))})
	if _, err := w.wait("any", router.Order{}, router.Query{}); err != nil || !slices.Equal(w.going, []string{"any"}) {
		t.Errorf("Wait = %v, went %q, want any to go", err, w.going)
	}
}

// TestExpiryAdmits is S-4: a booking that expires makes room like one that is freed.
func TestExpiryAdmits(t *testing.T) {
	w := newClasses(t, "", record(t, 1, 1))
	r := tracker.Reservation{ID: "forgotten", Rank: worker.Rank{Worker: 1}, PrefillTokens: 9, Expires: true}
	if err := w.p.Reserve(r, start); err != nil {
		t.Fatal(err)
	}
	_, _ = w.wait("a", router.Order{}, router.Query{})
	w.now = at(299)
	w.p.Expire(w.now)
	if got := w.take(w.p.Admit(w.now)); len(got) > 0 {
		t.Errorf("Admit before it has expired = %q", got)
	}
	w.now = at(400)
	w.p.Expire(w.now)
	if got := w.take(w.p.Admit(w.now)); !slices.Equal(got, []string{"a"}) {
		t.Errorf("Admit = %q, want a", got)
	}
}

// TestClassThresholds: what is full to one class need not be to another.
func TestClassThresholds(t *testing.T) {
	w := newClasses(t, "  - {name: batch, quantum: 1, prefill_busy_threshold: 1024}", record(t, 1, 1))
	w.load(0, 1024)
	_, _ = w.wait("a", router.Order{}, router.Query{})
	if _, err := w.wait("b", router.Order{Class: "batch"}, router.Query{}); err != nil || !slices.Equal(w.going, []string{"b"}) {
		t.Errorf("Wait = %v, went %q, want b to go past a", err, w.going)
	}
	_, _ = w.wait("c", router.Order{Class: "batch"}, router.Query{})
	if w.p.Waiting() != 2 {
		t.Errorf("%d wait, want a and c", w.p.Waiting())
	}
	w.p.PrefillDone("load0", start)
	if got := w.take(w.p.Admit(start)); !slices.Equal(got, []string{"c"}) { // b's 100 tokens are left
		t.Errorf("Admit = %q, want c", got)
	}
}

// TestQueriesBookNothing: one wake-up lets all of them go.
func TestQueriesBookNothing(t *testing.T) {
	w := newClasses(t, "", record(t, 1, 1))
	w.load(0, 1)
	for i := range 5 {
		_, _ = w.wait(fmt.Sprint(i), router.Order{}, router.Query{NoBooking: true})
	}
	_, _ = w.wait("booked", router.Order{}, router.Query{})
	_, _ = w.wait("after", router.Order{}, router.Query{})
	if got := w.free("load0"); len(got) != 6 || w.p.Waiting() != 1 {
		t.Errorf("%q go and %d wait, want all but after to go", got, w.p.Waiting())
	}
}

// TestRefresh: who has waited for ten seconds is looked up again when it goes.
func TestRefresh(t *testing.T) {
	fresh := &kvindex.Matches{}
	for _, tt := range []struct {
		name   string
		waits  float64
		answer *kvindex.Matches
		want   bool
	}{{"at once", 9.9, fresh, false}, {"late", 10, fresh, true}, {"no answer", 10, nil, false}} {
		w := newClasses(t, "", record(t, 1, 1))
		w.load(0, 1)
		old := &kvindex.Matches{}
		asked := 0
		ticket := &router.Ticket{Query: router.Query{Reservation: "a", PromptTokens: 9, Overlaps: old}, Owner: "a",
			Overlaps: func() *kvindex.Matches { asked++; return tt.answer }}
		if got, err := w.p.Wait(ticket, start); err != nil || len(got) > 0 {
			t.Fatalf("Wait = %v, %v", got, err)
		}
		w.now = at(tt.waits)
		w.take(w.p.Admit(w.now))
		if asked > 0 {
			t.Errorf("%s: asked before it could go", tt.name)
		}
		w.free("load0")
		if got := ticket.Query.Overlaps == fresh; len(w.going) != 1 || got != tt.want || (asked > 0) != (tt.waits >= 10) {
			t.Errorf("%s: went %q with fresh overlaps = %v after asking %d times, want %v", tt.name, w.going, got, asked, tt.want)
		}
	}
}

// TestShares: classes that always have somebody waiting get tokens by their quanta. Where costs are
// beyond a quantum the rule of scheduler.md 9.5, which rows 78 to 83 fix, prefers the small quantum by
// a percent or two: a class that is visited with enough left over earns nothing on that visit.
func TestShares(t *testing.T) {
	w := newClasses(t, "  - {name: premium, quantum: 512, prefill_busy_threshold: 0}\n"+
		"  - {name: regular, quantum: 128, prefill_busy_threshold: 0}", record(t, 1, 1))
	w.load(0, 1)
	rng := seeded()
	const longest = 700
	costs := map[string]uint64{}
	got := map[string]float64{}
	n := 0
	enter := func(class string) {
		n++
		id := fmt.Sprint(class, " ", n)
		costs[id] = 1 + rng.Uint64N(longest)
		if _, err := w.wait(id, router.Order{Class: class}, router.Query{PromptTokens: costs[id]}); err != nil {
			t.Fatal(err)
		}
	}
	for range 5 {
		enter("premium")
		enter("regular")
	}
	last := "load0"
	for range 5000 {
		w.free(last)
		last = w.going[len(w.going)-1]
		class, _, _ := strings.Cut(last, " ")
		got[class] += float64(costs[last])
		enter(class)
	}
	if ratio := got["premium"] / 512 / (got["regular"] / 128); ratio < 0.97 || ratio > 1.03 {
		t.Errorf("tokens = %v, quanta 512 and 128: %v times as much as it should be, want 0.97 to 1.03", got, ratio)
	}
}

// TestAtomicity: of 64 that come at once to 8 idle ranks, 8 go to different ones, and as many wait as
// may; each Free lets exactly one go.
func TestAtomicity(t *testing.T) {
	rounds := 1000
	if testing.Short() {
		rounds = 20
	}
	for _, limit := range []int{0, 1} {
		t.Run(fmt.Sprintf("limit %d", limit), func(t *testing.T) {
			w := newClasses(t, fmt.Sprintf("  - {name: x, quantum: 1, prefill_busy_threshold: 0, request_queue_limit_per_worker: %d}", limit))
			for id := range worker.ID(8) {
				w.register(record(t, id+1, 1))
			}
			for round := range rounds {
				w.burst(round, 8*limit)
			}
		})
	}
}

// burst is one round of TestAtomicity.
func (w *wave) burst(round, places int) {
	const requests, ranks = 64, 8
	var (
		mu      sync.Mutex
		refused int
		placed  = map[string]worker.Rank{}
		done    sync.WaitGroup
	)
	take := func(admitted []router.Admission) (n int) {
		mu.Lock()
		defer mu.Unlock()
		for _, a := range admitted {
			if a.Err != nil {
				w.t.Errorf("round %d: %v ends with %v", round, a.Ticket.Owner, a.Err)
			}
			placed[a.Ticket.Owner.(string)] = a.Selection.Rank
			n++
		}
		return n
	}
	for i := range requests {
		done.Go(func() {
			id := fmt.Sprint(round, ".", i)
			ticket := &router.Ticket{Query: router.Query{Reservation: id, PromptTokens: 100}, Order: router.Order{Class: "x"}, Owner: id}
			admitted, err := w.p.Wait(ticket, w.now)
			take(admitted)
			if err == nil {
				return
			}
			want := router.ClassLimitError{Class: "x", Kind: router.LimitRequests, Current: uint64(places), Limit: uint64(places)}
			var got *router.ClassLimitError
			if !errors.As(err, &got) || *got != want {
				w.t.Errorf("round %d: Wait = %v, want %v", round, err, &want)
			}
			mu.Lock()
			defer mu.Unlock()
			refused++
		})
	}
	done.Wait()
	on := map[worker.Rank]bool{}
	for _, r := range placed {
		on[r] = true
	}
	if len(placed) != ranks || len(on) != ranks || w.p.Waiting() != places || refused != requests-ranks-places {
		w.t.Fatalf("round %d: %d placed on %d ranks, %d wait, %d refused, want %d on %d, %d and %d",
			round, len(placed), len(on), w.p.Waiting(), refused, ranks, ranks, places, requests-ranks-places)
	}
	for len(placed) > 0 {
		for id := range placed {
			before := w.p.Waiting()
			delete(placed, id)
			w.p.Free(id, w.now)
			if n := take(w.p.Admit(w.now)); n != min(before, 1) {
				w.t.Fatalf("round %d: one freed with %d waiting: %d go", round, before, n)
			}
			break
		}
	}
	w.checkEmpty()
}

// TestEveryTicketEnds: whatever happens at the same time, each request ends once, as one that was
// placed, left or was refused, no class is over its limit, and all is given back.
func TestEveryTicketEnds(t *testing.T) {
	w := newClasses(t, "  - {name: x, quantum: 64, prefill_busy_threshold: 100, request_queue_limit_per_worker: 3}\n"+
		"  - {name: y, quantum: 16, prefill_busy_threshold_frac: 0.5, queue_policy: wspt}", batch(t, 1, 2, 400), batch(t, 2, 1, 400))
	const clients, each = 12, 150
	var done sync.WaitGroup
	wake := func(admitted []router.Admission) {
		for _, a := range admitted {
			a.Ticket.Owner.(chan router.Admission) <- a // a second one would block: the channel holds one
		}
	}
	for c := range clients {
		done.Go(func() {
			rng := seeded(uint64(c))
			for i := range each {
				ended := make(chan router.Admission, 1)
				ticket := &router.Ticket{
					Query: router.Query{Reservation: fmt.Sprint(c, ".", i), PromptTokens: 1 + rng.Uint64N(300), NoBooking: rng.IntN(9) == 0},
					Order: router.Order{Class: []string{"x", "y", "std"}[rng.IntN(3)], PriorityJump: rng.Float64(), StrictPriority: rng.Uint32N(2)},
					Owner: ended,
				}
				if rng.IntN(3) == 0 {
					ticket.Query.Worker = new(worker.ID(1 + rng.IntN(2)))
				}
				admitted, err := w.p.Wait(ticket, start)
				wake(admitted)
				if b := w.p.Backlogs(nil); b[1].Requests > 3*2 {
					t.Errorf("%d wait in class x, want 6 at most", b[1].Requests)
				}
				var limit *router.ClassLimitError
				switch {
				case errors.As(err, &limit):
					continue
				case err != nil:
					t.Errorf("Wait = %v", err)
					continue
				case rng.IntN(4) == 0 && w.p.Leave(ticket):
					continue
				}
				a := <-ended
				if a.Ticket != ticket || a.Err != nil {
					t.Errorf("ended with %+v", a)
				}
				if rng.IntN(2) == 0 {
					if on, ok := w.p.PrefillDone(ticket.Query.Reservation, start); ok {
						wake(w.p.AdmitOn(on.Worker, start))
					}
				}
				on, ok := w.p.Free(ticket.Query.Reservation, start)
				if ok == ticket.Query.NoBooking {
					t.Errorf("booked = %v for a query with NoBooking = %v", ok, ticket.Query.NoBooking)
				}
				if ok {
					wake(w.p.AdmitOn(on.Worker, start))
				}
			}
		})
	}
	done.Wait()
	if b := w.p.Backlogs(nil); w.p.Waiting() != 0 || w.p.WaitingTokens() != 0 || b[0] != (router.Backlog{}) || b[1] != b[0] || b[2] != b[0] {
		t.Errorf("at the end %d wait with %d tokens, %+v", w.p.Waiting(), w.p.WaitingTokens(), b)
	}
	w.checkEmpty()
}

// TestNobodyIsForgotten goes through random requests that come, go and leave, one after another. After
// each step those wait who have to, and nobody else: all ranks that one may go to are full to its
// class.
func TestNobodyIsForgotten(t *testing.T) {
	for seed := range uint64(60) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { neverForgotten(t, seeded(seed)) })
	}
}

func neverForgotten(t *testing.T, rng *rand.Rand) {
	w := newClasses(t, "  - {name: x, quantum: 64, prefill_busy_threshold: 200}\n"+
		"  - {name: y, quantum: 16, prefill_busy_threshold_frac: 0.25, queue_policy: wspt}\n  - {name: z, quantum: 1}")
	records := []worker.Worker{batch(t, 1, 2, 400), batch(t, 2, 1, 0), batch(t, 3, 1, 100)}
	records[2].Taints = []string{"fast"}
	for _, x := range records {
		w.register(x)
	}
	waiting, going := map[string]*router.Ticket{}, []string{}
	full := func(ticket *router.Ticket) bool {
		profile, q := w.r.Profile("M"), &ticket.Query
		class := &profile.Classes[profile.Class(ticket.Order.Class, q.PromptTokens)]
		for _, x := range records {
			if q.Worker != nil && *q.Worker != x.ID || q.Allowed != nil && !slices.Contains(q.Allowed, x.ID) ||
				len(q.Taints) > 0 && x.Taints == nil {
				continue
			}
			for _, l := range w.p.Tracker.Ranks(x.ID, w.now, nil) {
				if (q.DP == nil || *q.DP == l.DP) && !class.Busy(l.PrefillTokens, x.MaxNumBatchedTokens) {
					return false
				}
			}
		}
		return true
	}
	took := func(admitted []router.Admission) {
		for _, a := range admitted {
			id := a.Ticket.Query.Reservation
			if a.Err != nil {
				t.Fatalf("%s ends with %v", id, a.Err)
			}
			delete(waiting, id)
			going = append(going, id)
		}
	}
	for i := range 150 {
		w.now = w.now.Add(time.Duration(rng.IntN(100)) * time.Millisecond)
		what := ""
		switch op := rng.IntN(8); {
		case op < 4:
			ticket := &router.Ticket{
				Query: router.Query{Reservation: fmt.Sprint(i), PromptTokens: 1 + rng.Uint64N(300), NoBooking: rng.IntN(9) == 0},
				Order: router.Order{Class: []string{"std", "x", "y", "z"}[rng.IntN(4)], StrictPriority: rng.Uint32N(2)},
			}
			switch rng.IntN(6) {
			case 0:
				ticket.Query.Worker, ticket.Query.DP = new(worker.ID(1)), new(rng.Uint32N(2))
			case 1:
				ticket.Query.Worker = new(worker.ID(1 + rng.IntN(3)))
			case 2:
				ticket.Query.Allowed = []worker.ID{3, 1}
			case 3:
				ticket.Query.Taints = []string{"fast"}
			}
			what = fmt.Sprintf("%+v comes", ticket.Order)
			waiting[ticket.Query.Reservation] = ticket
			admitted, err := w.p.Wait(ticket, w.now)
			if err != nil {
				t.Fatalf("step %d: %s: Wait = %v", i, what, err)
			}
			took(admitted)
		case op < 7 && len(going) > 0:
			k := rng.IntN(len(going))
			what = going[k] + " is done"
			var on worker.Rank
			if rng.IntN(2) == 0 {
				on, _ = w.p.PrefillDone(going[k], w.now)
			} else {
				on, _ = w.p.Free(going[k], w.now)
				going = slices.Delete(going, k, k+1)
			}
			if rng.IntN(8) > 0 {
				took(w.p.AdmitOn(on.Worker, w.now))
			} else {
				took(w.p.Admit(w.now))
			}
		default:
			for id, ticket := range waiting {
				what = id + " leaves"
				if !w.p.Leave(ticket) {
					t.Fatalf("step %d: %s, and does not wait", i, what)
				}
				delete(waiting, id)
				break
			}
		}
		if w.p.Waiting() != len(waiting) {
			t.Fatalf("step %d: %s: %d wait, want %d", i, what, w.p.Waiting(), len(waiting))
		}
		for id, ticket := range waiting {
			if !full(ticket) {
				t.Fatalf("step %d: %s: %s (%+v) waits, and could go", i, what, id, ticket.Order)
			}
		}
	}
	for id, ticket := range waiting {
		if !w.p.Leave(ticket) {
			t.Errorf("%s could not leave", id)
		}
	}
	for _, id := range going {
		w.p.Free(id, w.now)
	}
	if w.p.Waiting() != 0 || w.p.WaitingTokens() != 0 {
		t.Errorf("at the end %d wait with %d tokens", w.p.Waiting(), w.p.WaitingTokens())
	}
	w.checkEmpty()
}

// TestLanesByHeads: of those who can all go at once, the lanes of a class go by their first requests,
// also after those have changed.
func TestLanesByHeads(t *testing.T) {
	w := newClasses(t, "", record(t, 1, 1), record(t, 2, 1))
	w.load(0, 1)
	if _, err := w.p.Select(router.Query{Reservation: "two", PromptTokens: 1, Worker: new(worker.ID(2))}, start); err != nil {
		t.Fatal(err)
	}
	for _, r := range []struct {
		strict uint32
		on     worker.ID
	}{{5, 1}, {1, 1}, {4, 2}, {3, 2}, {2, 1}} {
		o := router.Order{StrictPriority: r.strict}
		if _, err := w.wait(fmt.Sprint(r.strict), o, router.Query{Worker: &r.on, NoBooking: true}); err != nil {
			t.Fatal(err)
		}
	}
	w.p.Free("two", start)
	if got := strings.Join(w.free("load0"), " "); got != "5 4 3 2 1" {
		t.Errorf("they went %s, want 5 4 3 2 1", got)
	}
}
