package router_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"spillway/busy"
	"spillway/router"
	"spillway/worker"
)

// wave is a rig with a queue. Its workers are busy with one request, whatever its length, until its
// prefill ends.
type wave struct {
	*rig
	now   time.Time
	going []string // reservations of those that hold a worker, in the order in which they were let go
}

func newWave(t testing.TB, size int, workers ...worker.Worker) *wave {
	t.Helper()
	return &wave{rig: newSized(t, router.RoundRobin, limits(nil, new(uint64(0))), size, workers...), now: start}
}

// wait has a request wait or go. It returns the error of Wait.
func (w *wave) wait(id string, o router.Order, q router.Query) (*router.Ticket, error) {
	q.Reservation = id
	if q.PromptTokens == 0 {
		q.PromptTokens = 100
	}
	ticket := &router.Ticket{Query: q, Order: o, Owner: id}
	admitted, err := w.p.Wait(ticket, w.now)
	w.take(admitted)
	return ticket, err
}

// take notes who may go, or why not.
func (w *wave) take(admitted []router.Admission) (told []string) {
	for _, a := range admitted {
		id := a.Ticket.Owner.(string)
		if a.Err == nil {
			w.going = append(w.going, id)
		} else {
			id += ": " + a.Err.Error()
		}
		told = append(told, id)
	}
	return told
}

// free ends the prefill of a request and lets others go.
func (w *wave) free(id string) []string {
	w.p.Free(id, w.now)
	return w.take(w.p.Admit(w.now))
}

func (w *wave) occupied(tokens ...uint64) {
	w.t.Helper()
	for i := range tokens {
		id := fmt.Sprint("old", i)
		if _, err := w.p.Select(router.Query{Reservation: id, PromptTokens: tokens[i]}, w.now); err != nil {
			w.t.Fatalf("Select = %v", err)
		}
	}
}

func at(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }

// TestQueueOrder: within a tenant by strict priority, priority, objective and arrival; between
// tenants by tokens.
func TestQueueOrder(t *testing.T) {
	type req struct {
		id     string
		order  router.Order
		tokens uint64
	}
	for _, tt := range []struct {
		name string
		reqs []req
		want string
	}{
		{"arrival", []req{{"a", router.Order{}, 0}, {"b", router.Order{}, 0}, {"c", router.Order{}, 0}}, "a b c"},
		{"priority", []req{{"a", router.Order{Priority: -1}, 0}, {"b", router.Order{}, 0}, {"c", router.Order{Priority: 7}, 0}}, "c b a"},
		{"strict before priority", []req{{"a", router.Order{Priority: 1000}, 0}, {"b", router.Order{StrictPriority: 1, Priority: -5}, 0}}, "b a"},
		{"objective", []req{{"a", router.Order{}, 0}, {"b", router.Order{Objective: at(9)}, 0}, {"c", router.Order{Objective: at(3)}, 0}}, "c b a"},
		{"priority before objective", []req{{"a", router.Order{Objective: at(1)}, 0}, {"b", router.Order{Priority: 1, Objective: at(9)}, 0}}, "b a"},
		{"two tenants by turns", []req{{"a1", router.Order{Tenant: "a"}, 0}, {"a2", router.Order{Tenant: "a"}, 0}, {"a3", router.Order{Tenant: "a"}, 0},
			{"b1", router.Order{Tenant: "b"}, 0}, {"b2", router.Order{Tenant: "b"}, 0}}, "a1 b1 a2 b2 a3"},
		{"priority does not reach beyond its tenant", []req{{"a1", router.Order{Tenant: "a"}, 0}, {"a2", router.Order{Tenant: "a"}, 0},
			{"b1", router.Order{Tenant: "b", StrictPriority: 9}, 0}, {"b2", router.Order{Tenant: "b", StrictPriority: 9}, 0}}, "a1 b1 a2 b2"},
		{"one long for three short", []req{{"a1", router.Order{Tenant: "a"}, 300}, {"a2", router.Order{Tenant: "a"}, 300},
			{"b1", router.Order{Tenant: "b"}, 100}, {"b2", router.Order{Tenant: "b"}, 100}, {"b3", router.Order{Tenant: "b"}, 100}, {"b4", router.Order{Tenant: "b"}, 100}},
			"b1 b2 a1 b3 b4 a2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWave(t, 10, record(t, 1, 0))
			w.occupied(1)
			for _, r := range tt.reqs {
				if _, err := w.wait(r.id, r.order, router.Query{PromptTokens: r.tokens}); err != nil {
					t.Fatalf("Wait(%s) = %v", r.id, err)
				}
			}
			if got := w.p.Waiting(); got != len(tt.reqs) {
				t.Errorf("Waiting = %d, want %d", got, len(tt.reqs))
			}
			for last := "old0"; w.p.Waiting() > 0; last = w.going[len(w.going)-1] {
				if got := w.free(last); len(got) != 1 {
					t.Fatalf("one worker freed: %q go, want one", got)
				}
			}
			if got := strings.Join(w.going, " "); got != tt.want {
				t.Errorf("they went %s, want %s", got, tt.want)
			}
			w.free(w.going[len(w.going)-1])
			w.checkEmpty()
		})
	}
}

// TestWaitGoesAtOnce: with room, Wait is Select, and nothing waits.
func TestWaitGoesAtOnce(t *testing.T) {
	w := newWave(t, 1, record(t, 1, 0))
	if _, err := w.wait("a", router.Order{}, router.Query{}); err != nil || len(w.going) != 1 || w.p.Waiting() != 0 {
		t.Fatalf("Wait = %v, went %q, %d wait; want a to go", err, w.going, w.p.Waiting())
	}
	if _, err := w.wait("b", router.Order{}, router.Query{}); err != nil || len(w.going) != 1 || w.p.Waiting() != 1 {
		t.Fatalf("Wait = %v, went %q, %d wait; want b to wait", err, w.going, w.p.Waiting())
	}
	if tokens := w.p.WaitingTokens(); tokens != 100 {
		t.Errorf("WaitingTokens = %d, want 100", tokens)
	}
	w.p.PrefillDone("a", w.now)
	if got := w.take(w.p.Admit(w.now)); !slices.Equal(got, []string{"b"}) {
		t.Errorf("after the prefill of a: %q go, want b", got)
	}
}

// TestNobodyOvertakes: who comes when room has just been made, and nobody has been told of it yet,
// goes after those who wait, and may find the place that they leave.
func TestNobodyOvertakes(t *testing.T) {
	w := newWave(t, 1, record(t, 1, 0))
	w.occupied(1)
	_, _ = w.wait("first", router.Order{}, router.Query{})
	w.p.Free("old0", w.now)
	if _, err := w.wait("second", router.Order{Priority: 9}, router.Query{}); err != nil {
		t.Errorf("Wait = %v, want a place in the queue", err)
	}
	if got := strings.Join(w.going, " "); got != "first" || w.p.Waiting() != 1 {
		t.Errorf("went %q and %d wait, want first to have gone and second to wait", got, w.p.Waiting())
	}
}

// TestPinsBlockNobody: a pinned request waits for its worker, and others pass it by.
func TestPinsBlockNobody(t *testing.T) {
	w := newWave(t, 10, record(t, 1, 0), record(t, 2, 2))
	w.occupied(1, 1, 1)
	pin := func(id worker.ID) router.Query { return router.Query{Worker: new(id)} }
	rank := router.Query{Worker: new(worker.ID(2)), DP: new(uint32(1))}
	_, _ = w.wait("p1", router.Order{}, pin(1))
	_, _ = w.wait("p1b", router.Order{}, pin(1))
	_, _ = w.wait("rank", router.Order{Tenant: "x"}, rank)
	_, _ = w.wait("any", router.Order{}, router.Query{})
	loads := w.p.Tracker.Loads(w.now)
	if len(w.going) != 0 || len(loads) != 3 {
		t.Fatalf("went %q with loads %v, want all ranks taken", w.going, loads)
	}
	onRank := map[worker.Rank]string{}
	for i := range 3 { // which of them has which rank
		id := fmt.Sprint("old", i)
		r, _ := w.p.Free(id, w.now)
		onRank[r] = id
		if _, err := w.p.Select(router.Query{Reservation: id, PromptTokens: 1, Worker: &r.Worker, DP: &r.DP}, w.now); err != nil {
			t.Fatalf("Select = %v", err)
		}
	}
	for _, step := range []struct {
		free worker.Rank
		want []string
	}{
		{worker.Rank{Worker: 2, DP: 0}, []string{"any"}},
		{worker.Rank{Worker: 1}, []string{"p1"}},
		{worker.Rank{Worker: 2, DP: 1}, []string{"rank"}},
	} {
		if got := w.free(onRank[step.free]); !slices.Equal(got, step.want) {
			t.Errorf("%+v freed: %q go, want %q", step.free, got, step.want)
		}
	}
	// With only p1b waiting, who is not pinned goes where there is room, though the queue is not empty.
	w.free("any")
	if _, err := w.wait("new", router.Order{}, router.Query{}); err != nil || w.going[len(w.going)-1] != "new" {
		t.Errorf("Wait = %v, went %q, want new to go", err, w.going)
	}
	if got := w.free("p1"); !slices.Equal(got, []string{"p1b"}) {
		t.Errorf("worker 1 freed again: %q go, want p1b", got)
	}
}

// TestNarrowedBlockNobody: those who can use some workers only do not hold up the others.
func TestNarrowedBlockNobody(t *testing.T) {
	one, two := record(t, 1, 0), record(t, 2, 0)
	w := newWave(t, 10, one, two)
	w.occupied(1, 1)
	only := ids(one)
	_, _ = w.wait("adapter", router.Order{Priority: 1}, router.Query{Only: only})
	_, _ = w.wait("base", router.Order{}, router.Query{})
	r, _ := w.p.Free("old0", w.now)
	first, then, other := "base", "adapter", "old1"
	if r.Worker == 1 { // the one that the adapter is on
		first, then = then, first
	}
	if got := w.take(w.p.Admit(w.now)); !slices.Equal(got, []string{first}) {
		t.Errorf("%+v freed: %q go, want %s", r, got, first)
	}
	if got := w.free(other); !slices.Equal(got, []string{then}) {
		t.Errorf("the other freed: %q go, want %s", got, then)
	}
}

// TestQueueBound: the places are the model's, not a tenant's nor a partition's.
func TestQueueBound(t *testing.T) {
	acme := record(t, 2, 0)
	acme.Tenant = "acme"
	w := newWave(t, 3, record(t, 1, 0))
	own := w.register(acme)
	w.occupied(1)
	if _, err := own.Select(router.Query{Reservation: "own", PromptTokens: 1}, start); err != nil {
		t.Fatal(err)
	}
	enter := func(p *router.Partition, id string) error {
		_, err := p.Wait(&router.Ticket{Query: router.Query{Reservation: id, PromptTokens: 1}, Order: router.Order{Tenant: id}, Owner: id}, start)
		return err
	}
	for i, p := range []*router.Partition{w.p, own, w.p} {
		if err := enter(p, fmt.Sprint(i)); err != nil {
			t.Fatalf("Wait %d = %v", i, err)
		}
	}
	for _, p := range []*router.Partition{w.p, own} {
		var full *router.QueueFullError
		if err := enter(p, "more"); !errors.As(err, &full) || *full != (router.QueueFullError{Current: 3, Limit: 3}) {
			t.Errorf("Wait in %+v = %v, want a QueueFullError of 3 of 3", p.Key, err)
		}
	}
	own.Free("own", start)
	if got := w.take(own.Admit(start)); !slices.Equal(got, []string{"1"}) {
		t.Errorf("Admit = %q, want 1", got)
	}
	if err := enter(w.p, "late"); err != nil {
		t.Errorf("Wait after another tenant's has gone = %v, want nil", err)
	}
}

// TestOffIsRefusal: without a queue Wait refuses as Select does.
func TestOffIsRefusal(t *testing.T) {
	w := newWave(t, 0, record(t, 1, 0))
	w.occupied(1)
	if _, err := w.wait("a", router.Order{}, router.Query{}); !errors.Is(err, router.ErrOverloaded) {
		t.Errorf("Wait = %v, want ErrOverloaded", err)
	}
	if _, err := w.wait("a", router.Order{}, router.Query{Worker: new(worker.ID(1))}); !errors.Is(err, router.ErrPinBusy) {
		t.Errorf("Wait for a worker = %v, want ErrPinBusy", err)
	}
	if w.p.Waiting() != 0 || w.r.Queues() {
		t.Errorf("%d wait and Queues = %v, want none and false", w.p.Waiting(), w.r.Queues())
	}
}

// TestNotQueued: only those wait for whom there is a worker that could have room.
func TestNotQueued(t *testing.T) {
	w := newWave(t, 10, record(t, 1, 0), record(t, 2, 0))
	w.occupied(1, 1)
	w.p.Busy.SetHealthy(2, false, start)
	for _, tt := range []struct {
		name string
		q    router.Query
		want error
	}{
		{"unknown pin", router.Query{Worker: new(worker.ID(9))}, router.ErrPinUnknown},
		{"unknown rank", router.Query{DP: new(uint32(9))}, router.ErrPinUnknown},
		{"pin to one that is down", router.Query{Worker: new(worker.ID(2))}, router.ErrUnroutable},
		{"all that may be used have failed", router.Query{Exclude: []worker.ID{1, 2}}, router.ErrUnroutable},
	} {
		if _, err := w.wait("x", router.Order{}, tt.q); !errors.Is(err, tt.want) || w.p.Waiting() != 0 {
			t.Errorf("%s: Wait = %v, %d wait, want %v", tt.name, err, w.p.Waiting(), tt.want)
		}
	}
	_, _ = w.wait("waiting", router.Order{}, router.Query{}) // which changes nothing for those
	if _, err := w.wait("x", router.Order{}, router.Query{Worker: new(worker.ID(2))}); !errors.Is(err, router.ErrUnroutable) {
		t.Errorf("Wait = %v, want ErrUnroutable", err)
	}
	if _, err := w.wait("x", router.Order{}, router.Query{Only: []*worker.Worker{}}); !errors.Is(err, router.ErrUnroutable) {
		t.Errorf("Wait for none of the workers = %v, want ErrUnroutable", err)
	}
	w.p.Busy.SetHealthy(1, false, start)
	if _, err := w.wait("x", router.Order{}, router.Query{}); !errors.Is(err, router.ErrUnroutable) {
		t.Errorf("Wait with all down = %v, want ErrUnroutable", err)
	}
	direct := newSized(t, router.Direct, limits(nil, new(uint64(0))), 10, record(t, 1, 0))
	if _, err := direct.p.Wait(&router.Ticket{Query: router.Query{Reservation: "x"}}, start); !errors.Is(err, router.ErrPinMissing) {
		t.Errorf("Wait in direct mode = %v, want ErrPinMissing", err)
	}
}

// TestWaitingEnds: those who wait are told when there is nobody left to wait for.
func TestWaitingEnds(t *testing.T) {
	fill := func(t *testing.T) *wave {
		w := newWave(t, 10, record(t, 1, 0), record(t, 2, 0))
		w.occupied(1, 1)
		_, _ = w.wait("pinned", router.Order{}, router.Query{Worker: new(worker.ID(1))})
		_, _ = w.wait("any", router.Order{}, router.Query{})
		return w
	}
	check := func(t *testing.T, w *wave, want ...string) {
		t.Helper()
		got := w.take(w.p.Admit(w.now))
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("Admit = %q, want %q", got, want)
		}
	}
	t.Run("its worker is removed", func(t *testing.T) {
		w := fill(t)
		w.r.Unregister(1, start)
		check(t, w, "pinned: "+router.ErrPinUnknown.Error())
	})
	t.Run("its worker is down", func(t *testing.T) {
		w := fill(t)
		w.p.Busy.Inhibit(1, start.Add(time.Second), start)
		check(t, w, "pinned: "+router.ErrUnroutable.Error())
	})
	t.Run("all are removed", func(t *testing.T) {
		w := fill(t)
		w.r.Unregister(1, start)
		w.r.Unregister(2, start)
		if w.r.Partition(w.p.Key) != w.p { // who else should tell those who wait?
			t.Errorf("the partition is gone with %d waiting", w.p.Waiting())
		}
		check(t, w, "any: "+router.ErrNoWorkers.Error(), "pinned: "+router.ErrNoWorkers.Error())
		if w.p.Waiting() != 0 || w.p.WaitingTokens() != 0 {
			t.Errorf("%d wait with %d tokens, want none", w.p.Waiting(), w.p.WaitingTokens())
		}
	})
	t.Run("the thresholds are gone", func(t *testing.T) {
		w := fill(t)
		check(t, w)
		w.r.SetThresholds("M", func(busy.Thresholds) busy.Thresholds { return busy.Thresholds{} }, start)
		check(t, w, "any", "pinned")
	})
	t.Run("a report", func(t *testing.T) {
		w := &wave{rig: newSized(t, router.RoundRobin, limits(new(0.5), nil), 10, record(t, 1, 1)), now: start}
		w.used(1, 60, 0)
		_, _ = w.wait("any", router.Order{}, router.Query{})
		check(t, w)
		w.used(1, 40, 0)
		check(t, w, "any")
	})
	t.Run("a mark ends by itself", func(t *testing.T) {
		w := newWave(t, 10, record(t, 1, 0))
		w.p.Busy.Mark(1, nil, time.Second, w.now)
		_, _ = w.wait("any", router.Order{}, router.Query{})
		check(t, w)
		w.now = at(11) // longer than any mark lasts
		check(t, w, "any")
	})
}

// TestDeadline: whose deadline has passed is not let go any more, wherever it stands.
func TestDeadline(t *testing.T) {
	w := newWave(t, 10, record(t, 1, 0))
	w.occupied(1)
	if _, err := w.wait("past", router.Order{Deadline: start}, router.Query{}); !errors.Is(err, router.ErrQueueTimeout) {
		t.Errorf("Wait with a deadline of now = %v, want ErrQueueTimeout", err)
	}
	_, _ = w.wait("a", router.Order{Deadline: at(5)}, router.Query{})
	_, _ = w.wait("b", router.Order{Deadline: at(2)}, router.Query{})
	_, _ = w.wait("c", router.Order{}, router.Query{})
	w.now = at(2).Add(-1)
	if got := w.take(w.p.Admit(w.now)); len(got) != 0 {
		t.Errorf("before any deadline: Admit = %q, want nothing", got)
	}
	late := ": " + router.ErrQueueTimeout.Error()
	w.now = at(2)
	if got := w.take(w.p.Admit(w.now)); !slices.Equal(got, []string{"b" + late}) {
		t.Errorf("at 2 s: Admit = %q, want the end of b", got)
	}
	w.now = at(7)
	if got := w.free("old0"); !slices.Equal(got, []string{"a" + late, "c"}) {
		t.Errorf("at 7 s: Admit = %q, want the end of a and c to go", got)
	}
}

// TestLeave: who leaves gives its place back, or is told that it has been let go already.
func TestLeave(t *testing.T) {
	w := newWave(t, 1, record(t, 1, 0))
	w.occupied(1)
	a, _ := w.wait("a", router.Order{}, router.Query{})
	if !w.p.Leave(a) || w.p.Waiting() != 0 {
		t.Errorf("a could not leave, %d wait", w.p.Waiting())
	}
	if w.p.Leave(a) {
		t.Error("a left twice")
	}
	b, err := w.wait("b", router.Order{}, router.Query{})
	if err != nil {
		t.Fatalf("Wait for the place of a = %v", err)
	}
	w.free("old0")
	if w.p.Leave(b) {
		t.Error("b left the queue, but it had gone")
	}
	w.free("b")
	w.checkEmpty()
}

// TestHopeless: by the pace at which others go, who cannot go before its deadline is refused at
// once; while no pace is known nobody is.
func TestHopeless(t *testing.T) {
	w := newWave(t, 100, record(t, 1, 0))
	w.occupied(1)
	last := "old0"
	for i := range 30 { // 100 tokens each; one goes per second
		if _, err := w.wait(fmt.Sprint(i), router.Order{Deadline: at(60)}, router.Query{}); err != nil {
			t.Fatalf("Wait %d = %v", i, err)
		}
	}
	step := func() {
		w.now = w.now.Add(time.Second)
		w.free(last)
		last = w.going[len(w.going)-1]
	}
	for range 7 {
		step()
	}
	if _, err := w.wait("early", router.Order{Deadline: w.now.Add(time.Second)}, router.Query{}); err != nil {
		t.Fatalf("Wait after 7 have gone = %v, want nil: no pace is known", err)
	}
	for range 3 {
		step()
	}
	// 21 are ahead, of whom one leaves without having gone: at 1 a second they take 21 s.
	for _, tt := range []struct {
		name   string
		o      router.Order
		within time.Duration
		want   error
	}{
		{"too late", router.Order{}, 19 * time.Second, router.ErrQueueTimeout},
		{"in time", router.Order{}, 22 * time.Second, nil},
		{"first by priority", router.Order{Priority: 1}, time.Second, nil},
		{"another tenant", router.Order{Tenant: "other"}, 900 * time.Millisecond, router.ErrQueueTimeout},
		{"another tenant, which has its turn soon", router.Order{Tenant: "other"}, 2 * time.Second, nil},
	} {
		tt.o.Deadline = w.now.Add(tt.within)
		ticket, err := w.wait(tt.name, tt.o, router.Query{})
		if !errors.Is(err, tt.want) {
			t.Errorf("%s: Wait = %v, want %v", tt.name, err, tt.want)
		}
		if err == nil {
			w.p.Leave(ticket)
		}
	}
	// A pause without anybody waiting says nothing about the pace.
	for w.p.Waiting() > 0 {
		step()
	}
	w.now = w.now.Add(time.Hour)
	_, _ = w.wait("new", router.Order{}, router.Query{})
	if _, err := w.wait("next", router.Order{Deadline: w.now.Add(time.Second)}, router.Query{}); err != nil {
		t.Errorf("Wait after a pause = %v, want nil", err)
	}
}
