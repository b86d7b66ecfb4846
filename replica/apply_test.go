package replica_test

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway/replica"
	"spillway/tracker"
	"spillway/wire"
	"spillway/worker"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// world is the receiver of the specification's examples: model m of tenant default, blocks of 16
// tokens, workers 1 and 2 with rank 0 each.
type world struct {
	*replica.Applier
	tracker *tracker.Tracker
	reg     *prometheus.Registry
	changed []worker.ID
	now     time.Time
}

func newWorld() *world {
	w := &world{tracker: tracker.New(tracker.DefaultConfig()), reg: prometheus.NewRegistry(), now: noon}
	for _, id := range []worker.ID{1, 2} {
		w.tracker.Register(&worker.Worker{ID: id, DPSize: 1}, noon)
	}
	w.Applier = replica.NewApplier(w.find, w.reg)
	return w
}

func (w *world) find(model, tenant string) (replica.Books, bool) {
	changed := func(id worker.ID) { w.changed = append(w.changed, id) }
	return replica.Books{Tracker: w.tracker, BlockSize: 16, Changed: changed}, model == "m" && tenant == "default"
}

// remote applies events, one batch.
func (w *world) remote(events ...wire.ReplicaEvent) { w.Apply(events, w.now) }

// state is rank:(prefill,blocks) of each rank.
func (w *world) state() string {
	var all []string
	loads := w.tracker.Loads(w.now)
	for _, r := range slices.SortedFunc(maps.Keys(loads), func(a, b worker.Rank) int { return cmp.Compare(a.Worker, b.Worker) }) {
		all = append(all, fmt.Sprintf("%d.%d:(%d,%d)", r.Worker, r.DP, loads[r].PrefillTokens, loads[r].DecodeBlocks))
	}
	return strings.Join(all, " ")
}

func (w *world) outcome(t *testing.T, kind, result string) float64 {
	t.Helper()
	families, err := w.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range families[0].GetMetric() {
		if m.GetLabel()[0].GetValue() == kind && m.GetLabel()[1].GetValue() == result {
			return m.GetCounter().GetValue()
		}
	}
	t.Fatalf("no outcome %s of %s", result, kind)
	return 0
}

// add is an Add as a slot tracker sends it: a hint only for tokens.
func add(id string, to worker.ID, tokens uint64, hashes ...uint64) wire.ReplicaEvent {
	e := event(wire.ReplicaAdd, id)
	e.Rank.Worker = to
	e.Promise = wire.Promise{Hashes: hashes, TrackPrefill: tokens > 0, PrefillTokens: tokens}
	return e
}

func at(kind wire.ReplicaKind, id string, r worker.Rank) wire.ReplicaEvent {
	e := event(kind, id)
	e.Rank = r
	return e
}

func TestApply(t *testing.T) {
	const nothing = "1.0:(0,0) 2.0:(0,0)"
	x1 := add("R1", 1, 8, 1, 2, 3)
	done := at(wire.ReplicaPrefillDone, "R1", worker.Rank{Worker: 77, DP: 7})
	with := func(e wire.ReplicaEvent, change func(e *wire.ReplicaEvent)) wire.ReplicaEvent {
		change(&e)
		return e
	}
	reserve := func(id string, to worker.ID, want error) func(t *testing.T, w *world) {
		return func(t *testing.T, w *world) {
			t.Helper()
			r := tracker.Reservation{ID: id, Rank: worker.Rank{Worker: to}, Hashes: []uint64{1, 2, 3}, PrefillTokens: 8}
			if err := w.tracker.Reserve(r, tracker.NoLimit, w.now); !errors.Is(err, want) {
				t.Errorf("Reserve(%s) = %v, want %v", id, err, want)
			}
		}
	}
	events := func(all ...wire.ReplicaEvent) func(t *testing.T, w *world) {
		return func(_ *testing.T, w *world) { w.remote(all...) }
	}
	later := func(d time.Duration) func(t *testing.T, w *world) {
		return func(_ *testing.T, w *world) { w.now = w.now.Add(d) }
	}
	free := func(id string, want worker.ID) func(t *testing.T, w *world) {
		return func(t *testing.T, w *world) {
			t.Helper()
			if rank, ok := w.tracker.Free(id, w.now); !ok || rank.Worker != want {
				t.Errorf("Free(%s) = %+v, %v, want worker %d", id, rank, ok, want)
			}
		}
	}
	for _, tt := range []struct {
		name  string
		steps []func(t *testing.T, w *world)
		want  string
	}{
		{"X1", steps(events(x1)), "1.0:(8,3) 2.0:(0,0)"},
		{"X2", steps(events(x1), reserve("R1", 2, tracker.ErrDuplicate)), "1.0:(8,3) 2.0:(0,0)"},
		{"X3", steps(events(x1, x1)), "1.0:(8,3) 2.0:(0,0)"},
		{"X3 with other hashes", steps(events(x1, add("R1", 1, 9, 7))), "1.0:(8,3) 2.0:(0,0)"},
		{"X4", steps(events(x1, done)), "1.0:(0,3) 2.0:(0,0)"},
		{"X5", steps(events(x1, done, add("R1", 2, 4, 1, 2))), "1.0:(0,0) 2.0:(4,2)"},
		{"X6", steps(events(x1, done, add("R1", 2, 4, 1, 2)), free("R1", 2)), nothing},
		{"X8", steps(reserve("L3", 1, nil), events(at(wire.ReplicaFree, "L3", worker.Rank{Worker: 2})), reserve("L3", 2, nil)), "1.0:(0,0) 2.0:(8,3)"},
		{"X9", steps(events(
			add("a", 3, 1, 1),
			with(x1, func(e *wire.ReplicaEvent) { e.Rank.DP = 1 }),
			with(x1, func(e *wire.ReplicaEvent) { e.Rank.DP = math.MaxUint32 }),
			with(x1, func(e *wire.ReplicaEvent) { e.BlockSize = 32 }),
			with(x1, func(e *wire.ReplicaEvent) { e.Tenant = "other" }),
			with(x1, func(e *wire.ReplicaEvent) { e.Model = "other" }),
		)), nothing},
		{"X12", steps(events(with(add("a", 1, 7, 1), func(e *wire.ReplicaEvent) { e.Promise.TrackPrefill = false }))), "1.0:(0,1) 2.0:(0,0)"},
		{"X13", steps(events(with(add("a", 1, 0, 1), func(e *wire.ReplicaEvent) { e.Promise.TrackPrefill = true }))), "1.0:(0,1) 2.0:(0,0)"},
		{"X14", steps(events(add("a", 1, 3))), "1.0:(3,0) 2.0:(0,0)"},
		{"X15", steps(events(long), later(time.Second)), "1.0:(500,1) 2.0:(0,0)"},
		{"X15 later", steps(events(long), later(2*time.Second)), "1.0:(0,1) 2.0:(0,0)"},
		{"X15 freed", steps(events(long), later(2*time.Second), events(at(wire.ReplicaFree, "a", worker.Rank{}))), nothing},
		{"X16", steps(events(at(wire.ReplicaFree, "W1", worker.Rank{Worker: 1}), add("W1", 1, 2, 5, 6))), "1.0:(2,2) 2.0:(0,0)"},
		{"X17", steps(events(done, at(wire.ReplicaFree, "R1", worker.Rank{Worker: 1}))), nothing},
		{"no end of its own before the limit", steps(events(x1), later(5*time.Minute), expire), "1.0:(8,3) 2.0:(0,0)"},
		{"expires after it", steps(events(x1), later(5*time.Minute+1), expire), nothing},
		{"those of this process do not", steps(reserve("L", 1, nil), later(time.Hour), expire), "1.0:(8,3) 2.0:(0,0)"},
		{"expires when another is added", steps(events(x1), later(time.Hour), events(add("b", 1, 1, 9))), "1.0:(1,1) 2.0:(0,0)"},
		{"more tokens than there are", steps(events(add("a", 1, math.MaxUint64), add("b", 1, math.MaxUint64), at(wire.ReplicaFree, "a", worker.Rank{}), add("c", 1, 1),
			at(wire.ReplicaFree, "b", worker.Rank{}))), "1.0:(1,0) 2.0:(0,0)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld()
			for _, step := range tt.steps {
				step(t, w)
			}
			if got := w.state(); got != tt.want {
				t.Errorf("loads are %s, want %s", got, tt.want)
			}
		})
	}
}

func steps(all ...func(t *testing.T, w *world)) []func(t *testing.T, w *world) { return all }

func expire(_ *testing.T, w *world) { w.tracker.Expire(w.now) }

// long is an Add whose prefill is expected to take two seconds.
var long = func() wire.ReplicaEvent {
	e := add("a", 1, 1000, 1)
	e.Promise.PrefillDuration = new(2 * time.Second)
	return e
}()

// TestApplyPotential is the rest of X1: what a prompt that begins alike would add.
func TestApplyPotential(t *testing.T) {
	w := newWorld()
	w.remote(add("R1", 1, 8, 1, 2, 3))
	got := map[worker.ID]string{}
	for _, p := range w.tracker.Project([]uint64{1, 2, 3}, w.now, nil) {
		blocks, prefill := p.Potential(0)
		got[p.Rank.Worker] = fmt.Sprint(prefill, blocks, p.Requests)
	}
	if want := map[worker.ID]string{1: "8 3 1", 2: "0 3 0"}; !maps.Equal(got, want) {
		t.Errorf("prefill, blocks, requests = %v, want %v", got, want)
	}
}

// TestApplyBurst is X20.
func TestApplyBurst(t *testing.T) {
	w := newWorld()
	var all []wire.ReplicaEvent
	for i := range uint64(300) {
		all = append(all, add(fmt.Sprint("r", i), 1, 0, 1000+i))
	}
	for batch := range slices.Chunk(all, 256) {
		w.remote(batch...)
	}
	if got, want := w.state(), "1.0:(0,300) 2.0:(0,0)"; got != want {
		t.Errorf("loads are %s, want %s", got, want)
	}
}

// TestOutcomes: each event is counted by what has become of it, and each worker whose load has
// changed is named once per batch.
func TestOutcomes(t *testing.T) {
	w := newWorld()
	x1 := add("R1", 1, 8, 1)
	other, size := x1, x1
	other.Tenant, size.BlockSize = "other", 32
	w.remote(x1, x1, other, size, add("R2", 3, 1), event(wire.ReplicaPrefillDone, "R1"), event(wire.ReplicaPrefillDone, "R1"),
		event(wire.ReplicaPrefillDone, "R9"), add("R1", 2, 1, 1), event(wire.ReplicaFree, "R1"), event(wire.ReplicaFree, "R1"))
	for _, tt := range []struct {
		kind, result string
		want         float64
	}{
		{"add", "changed", 2}, {"add", "unchanged", 1}, {"add", "partition", 1}, {"add", "block_size", 1}, {"add", "rank", 1},
		{"prefill_done", "changed", 1}, {"prefill_done", "unchanged", 1}, {"prefill_done", "reservation", 1}, {"prefill_done", "partition", 0},
		{"free", "changed", 1}, {"free", "unchanged", 0}, {"free", "reservation", 1}, {"free", "block_size", 0},
	} {
		if got := w.outcome(t, tt.kind, tt.result); got != tt.want {
			t.Errorf("outcome %s of %s: %v, want %v", tt.result, tt.kind, got, tt.want)
		}
	}
	slices.Sort(w.changed)
	if want := []worker.ID{1, 2}; !slices.Equal(w.changed, want) {
		t.Errorf("changed are %v, want %v", w.changed, want)
	}
	w.remote(add("R4", 1, 1))
	w.changed = nil
	w.remote(add("R4", 2, 1))
	slices.Sort(w.changed)
	if want := []worker.ID{1, 2}; !slices.Equal(w.changed, want) {
		t.Errorf("after a reservation has moved, changed are %v, want %v", w.changed, want)
	}
	w.changed = nil
	w.remote(event(wire.ReplicaFree, "R1"))
	if len(w.changed) != 0 {
		t.Errorf("after an event that did nothing, changed are %v", w.changed)
	}
}

// TestReplicatedBooks is X19, and what two trackers tell each other over sockets: the books of the
// second follow those of the first.
func TestReplicatedBooks(t *testing.T) {
	a := start(t)
	w := newWorld()
	b := prepare(config(a.Endpoint()))
	b.apply = func(batch []wire.ReplicaEvent) { w.Apply(batch, w.now) }
	b.start(t)
	link(t, a, b)
	for _, tt := range []struct {
		event wire.ReplicaEvent
		want  string
	}{
		{add("R1", 1, 8, 1, 2, 3), "1.0:(8,3) 2.0:(0,0)"},
		{add("R2", 1, 4, 1, 2, 4), "1.0:(12,4) 2.0:(0,0)"},
		{event(wire.ReplicaPrefillDone, "R1"), "1.0:(4,4) 2.0:(0,0)"},
		{add("R3", 9, 4, 1), "1.0:(4,4) 2.0:(0,0)"},
		{event(wire.ReplicaFree, "R1"), "1.0:(4,3) 2.0:(0,0)"},
		{event(wire.ReplicaFree, "R2"), "1.0:(0,0) 2.0:(0,0)"},
	} {
		a.Publish(tt.event)
		settle(t, a, b)
		if got := w.state(); got != tt.want {
			t.Errorf("after %s of %s loads are %s, want %s", tt.event.Kind, tt.event.Reservation, got, tt.want)
		}
	}
}

// TestMirrors lets two processes with the same workers book at random and tell each other. Both
// books agree in the end, and are empty once all is freed.
func TestMirrors(t *testing.T) {
	var worlds [2]*world
	var nodes [2]*node
	for i := range nodes {
		w := newWorld()
		worlds[i], nodes[i] = w, prepare(config())
		nodes[i].apply = func(batch []wire.ReplicaEvent) { w.Apply(batch, noon) }
		nodes[i].start(t)
	}
	for i, n := range nodes {
		if _, err := n.Register(t.Context(), nodes[1-i].Endpoint()); err != nil {
			t.Fatal(err)
		}
	}
	link(t, nodes[0], nodes[1])
	link(t, nodes[1], nodes[0])
	agree := func(when string) {
		t.Helper()
		settle(t, nodes[0], nodes[1])
		settle(t, nodes[1], nodes[0])
		if a, b := worlds[0].state(), worlds[1].state(); a != b {
			t.Fatalf("%s: loads are %s and %s, want the same", when, a, b)
		}
	}
	dice := rand.New(rand.NewPCG(1, 2))
	var local [2]*replica.Applier // stands for what the process books itself
	for i, w := range worlds {
		local[i] = replica.NewApplier(func(string, string) (replica.Books, bool) { return replica.Books{Tracker: w.tracker}, true }, prometheus.NewRegistry())
	}
	book := func(i int, e wire.ReplicaEvent) {
		local[i].Apply([]wire.ReplicaEvent{e}, noon)
		nodes[i].Publish(e)
	}
	for step := range 5_000 {
		i := dice.IntN(2)
		id := fmt.Sprint(i, "-", dice.IntN(50)) // each books under names of its own
		switch dice.IntN(4) {
		case 0, 1:
			book(i, add(id, worker.ID(1+dice.IntN(3)), uint64(dice.IntN(100)), 1, 2, uint64(dice.IntN(5))))
		case 2:
			book(i, event(wire.ReplicaPrefillDone, id))
		case 3:
			book(i, event(wire.ReplicaFree, id))
		}
		if step%burst == burst-1 {
			agree(fmt.Sprint("step ", step))
		}
	}
	for i := range nodes {
		for n := range 50 {
			book(i, event(wire.ReplicaFree, fmt.Sprint(i, "-", n)))
		}
	}
	agree("after all is freed")
	if got, want := worlds[0].state(), "1.0:(0,0) 2.0:(0,0)"; got != want {
		t.Errorf("after all is freed loads are %s, want %s", got, want)
	}
}
