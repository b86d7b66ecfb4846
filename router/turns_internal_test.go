package router

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"spillway/worker"
)

// TestTurns has rows 78 to 83 of scheduler.md 18.7, on deficit round robin.
func TestTurns(t *testing.T) {
	type share struct {
		name    string
		quantum uint64
		costs   []uint64
	}
	of := func(n int, cost uint64) (all []uint64) {
		for range n {
			all = append(all, cost)
		}
		return all
	}
	for _, tt := range []struct {
		name    string
		classes []share
		pops    int
		want    string // who went, and the deficits afterwards
	}{
		{"78 quanta 1 and 3", []share{{"one", 1, of(9, 1)}, {"three", 3, of(9, 1)}}, 8, "one[0 0] three[0 2] three[0 1] three[0 0] one[0 0] three[0 2] three[0 1] three[0 0]"},
		{"79 alone", []share{{"a", 10, of(5, 3)}}, 9, "a[7] a[4] a[1] a[8] a[0]"},
		{"80 equal quanta", []share{{"A", 10, of(5, 3)}, {"B", 10, of(3, 5)}}, 9, "A[7 0] A[4 0] A[1 0] B[1 5] B[1 0] A[8 0] A[0 0] B[0 0]"},
		{"81 large costs", []share{{"standard", 1000, of(2, 7000)}, {"latency", 2000, of(2, 9000)}}, 9,
			"latency[5000 1000] standard[0 5000] latency[2000 0] standard[0 0]"},
		{"82 512 to 128", []share{{"premium", 512, of(20, 512)}, {"regular", 128, of(20, 512)}}, 10,
			"premium[0 0] premium[0 128] premium[0 256] premium[0 384] regular[0 0]"},
		{"83 all blocked", []share{{"a", 1, of(2, 1)}, {"b", 3, of(2, 1)}}, 0, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			profile := &Profile{}
			for _, c := range tt.classes {
				profile.Classes = append(profile.Classes, Class{Name: c.name, Order: FCFS, Quantum: c.quantum})
			}
			q := newQueue(profile, time.Unix(0, 0))
			for i, c := range tt.classes {
				for _, cost := range c.costs {
					waiting := &Ticket{policy: i, cost: cost}
					q.enter(waiting, time.Unix(0, 0))
					q.push(waiting)
				}
			}
			if got := q.next(); got != nil { // no group is open
				t.Fatalf("next = %+v with all blocked, want nobody", got)
			}
			for _, c := range q.ring {
				if c.deficit != 0 {
					t.Fatalf("deficit of %s = %d with all blocked, want 0", c.spec.Name, c.deficit)
				}
			}
			set := func(open bool) {
				for _, g := range q.groups {
					for _, l := range g.lanes {
						l.set(open)
					}
				}
			}
			var got []string
			for range tt.pops {
				if set(false); q.next() != nil { // between two for whom there is room there is a while without any
					t.Fatal("somebody goes with all blocked")
				}
				set(true)
				next := q.next()
				if next == nil {
					break
				}
				q.charge(next)
				name := next.lane.class.spec.Name
				q.remove(next)
				deficits := []uint64{}
				for _, c := range q.ring {
					deficits = append(deficits, c.deficit)
				}
				got = append(got, name+fmt.Sprint(deficits))
			}
			if s := strings.Join(got, " "); !strings.HasPrefix(s, tt.want) || tt.pops > 0 && tt.want == "" {
				t.Errorf("went %s\nwant %s", s, tt.want)
			}
		})
	}
}

// TestPace: the rate is that of the last admissions, however many there have been.
func TestPace(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	p := pace{from: now}
	for i, tt := range []struct {
		n     int
		every time.Duration
		want  float64 // tokens per second; 0 is unknown
	}{{7, time.Second, 0}, {1, time.Second, 100}, {32, time.Second, 100}, {64, time.Second / 10, 1000}, {0, 10 * time.Second, 0}} {
		for range tt.n {
			now = now.Add(tt.every)
			p.admit(100, now)
		}
		rate, known := p.rate(now)
		if tt.n == 0 { // a pause counts: 32 admissions of 100 tokens in 3.2 s and then none for 10
			rate, known = p.rate(now.Add(tt.every))
			tt.want = 3200 / 13.2
		}
		if known != (tt.want > 0) || rate < 0.97*tt.want || rate > 1.04*tt.want {
			t.Errorf("step %d: rate = %v, %v, want %v", i, rate, known, tt.want)
		}
	}
}

// TestPrecedence: what comes first decides before what comes next. Each beats the one after it.
func TestPrecedence(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	file := &Profile{Classes: []Class{{Order: FCFS, Quantum: 1}, {Order: WSPT, Quantum: 1}, {Order: LCFS, Quantum: 1}}}
	type one struct {
		order Order
		after time.Duration // since now
		cost  uint64
	}
	for _, tt := range []struct {
		name    string
		profile *Profile
		class   int
		list    []one
	}{
		{"tenants", syntheticProfile(nil, FCFS), 0, []one{
			{Order{StrictPriority: 1, Priority: -9}, 9, 1}, {Order{Priority: 2}, 8, 1}, {Order{Priority: 1, Objective: now}, 7, 1},
			{Order{Priority: 1, Objective: now.Add(1)}, 6, 1}, {Order{Priority: 1, PriorityJump: 5}, 5, 1}, {Order{Priority: 1}, 4, 1},
			{Order{Priority: 1}, 4, 1}, // the one that came first
		}},
		{"fcfs", file, 0, []one{
			{Order{StrictPriority: 1}, 9 * time.Second, 1}, {Order{PriorityJump: 50}, 5 * time.Second, 1},
			{Order{Priority: 40}, 5 * time.Second, 1}, // counts as a jump
			{Order{PriorityJump: math.NaN()}, 0, 1}, {Order{PriorityJump: -50}, time.Second, 1},
			{Order{PriorityJump: 1}, 3 * time.Second, 1},
		}},
		{"wspt", file, 1, []one{{Order{}, 9, 1}, {Order{PriorityJump: 5}, 9, 60}, {Order{}, 9, 11}, {Order{}, 0, 12}}},
		{"lcfs", file, 2, []one{{Order{PriorityJump: 9}, 0, 1}, {Order{}, 8 * time.Second, 1}, {Order{}, 0, 1}}},
	} {
		q := newQueue(tt.profile, now)
		var last *Ticket
		for i, x := range tt.list {
			next := &Ticket{Order: x.order, policy: tt.class, cost: x.cost}
			q.enter(next, now.Add(x.after))
			if last != nil && (!before(last, next) || before(next, last)) {
				t.Errorf("%s: %+v goes before %+v at %d, want it the other way round", tt.name, next.goes, last.goes, i)
			}
			last = next
		}
	}
}

// TestGroupKey: who may go to the same workers waits in one lane, however that was said.
func TestGroupKey(t *testing.T) {
	catalog := []*worker.Worker{{}, {}}
	list := []Query{
		{}, {Allowed: []worker.ID{}}, {Allowed: []worker.ID{1, 2}}, {Allowed: []worker.ID{1}}, {Exclude: []worker.ID{1, 2}},
		{Taints: []string{"a", "bc"}}, {Taints: []string{"ab", "c"}}, {Taints: []string{"a"}}, {Worker: new(worker.ID(0))},
		{Worker: new(worker.ID(1))}, {DP: new(uint32(0))}, {DP: new(uint32(1))}, {Only: catalog}, {Only: catalog[1:]}, {Only: catalog[:0]},
		{Allowed: []worker.ID{1}, Exclude: []worker.ID{2}}, {Allowed: []worker.ID{1, 2}, Taints: []string{"a"}},
	}
	for i := range list {
		for j := range list {
			if (keyOf(&list[i]) == keyOf(&list[j])) != (i == j) {
				t.Errorf("keys of %+v and %+v: equal = %v", list[i], list[j], i != j)
			}
		}
	}
	for _, same := range [][2]Query{
		{{Allowed: []worker.ID{1, 2}}, {Allowed: []worker.ID{2, 1, 2}}},
		{{Taints: []string{"a", "b"}}, {Taints: []string{"b", "a"}}},
		{{Worker: new(worker.ID(1)), DP: new(uint32(2))}, {Worker: new(worker.ID(1)), DP: new(uint32(2))}},
		{{PromptTokens: 1, Reservation: "a", NoBooking: true}, {PromptTokens: 2, Reservation: "b"}},
	} {
		if keyOf(&same[0]) != keyOf(&same[1]) {
			t.Errorf("keys of %+v and %+v differ", same[0], same[1])
		}
	}
}
