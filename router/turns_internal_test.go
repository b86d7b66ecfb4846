package router

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// TestTurns has the rows of scheduler.md 18.7 on deficit round robin.
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
			for _, l := range q.groups[0].lanes {
				l.set(true)
			}
			var got []string
			for range tt.pops {
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
