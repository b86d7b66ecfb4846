package router_test

import (
	"fmt"
	"testing"

	"spillway/busy"
	"spillway/router"
	"spillway/worker"
)

// BenchmarkSelect books and frees one request over 1,000 workers, each with a few requests on
// it. Refused is Select alone, with every worker busy.
func BenchmarkSelect(b *testing.B) {
	for _, mode := range allModes {
		for _, ranks := range []uint32{1, 8} {
			b.Run(fmt.Sprintf("%s/ranks=%d", mode, ranks), func(b *testing.B) {
				f := thousand(b, mode, limits(new(0.85), new(uint64(10000))), ranks)
				q := router.Query{PromptTokens: 200}
				if mode == router.Direct {
					q.Worker = new(worker.ID(700))
				}
				benchmark(b, f, q)
			})
		}
	}
	for _, tt := range []struct {
		name string
		q    router.Query
	}{
		{"excluded", router.Query{Exclude: []worker.ID{17, 500}}},
		{"pinned rank", router.Query{DP: new(uint32(3))}},
		{"no decode", router.Query{NoDecode: true}},
	} {
		b.Run(tt.name, func(b *testing.B) {
			benchmark(b, thousand(b, router.RoundRobin, limits(new(0.85), nil), 8), tt.q)
		})
	}
	b.Run("narrowed to half", func(b *testing.B) {
		f := thousand(b, router.RoundRobin, limits(new(0.85), nil), 1)
		var only []*worker.Worker
		for i, w := range f.r.Catalog().Workers() {
			if i%2 == 0 {
				only = append(only, w)
			}
		}
		benchmark(b, f, router.Query{Only: only})
	})
	b.Run("refused", func(b *testing.B) {
		f := thousand(b, router.RoundRobin, limits(nil, new(uint64(0))), 1)
		b.ReportAllocs()
		for b.Loop() {
			if _, err := f.p.Select(router.Query{Reservation: "r", PromptTokens: 200}, start); err == nil {
				b.Fatal("Select succeeded, want ErrOverloaded")
			}
		}
	})
}

func thousand(b *testing.B, mode router.Mode, cfg busy.Config, ranks uint32) *rig {
	f := newRig(b, mode, cfg)
	for i := range 1000 {
		f.register(record(b, worker.ID(i+1), ranks))
	}
	q := router.Query{PromptTokens: 100}
	for i := range 3000 {
		q.Worker = new(worker.ID(i%1000 + 1))
		if _, _, err := f.ask(q); err != nil && i < 1000 {
			b.Fatalf("Select = %v", err)
		}
	}
	return f
}

func benchmark(b *testing.B, f *rig, q router.Query) {
	q.Reservation = "r"
	b.ReportAllocs()
	for b.Loop() {
		if _, err := f.p.Select(q, start); err != nil {
			b.Fatalf("Select = %v", err)
		}
		f.p.Free(q.Reservation, start)
	}
}

// BenchmarkAdmit frees one of so many ranks, all of which are full and have a request pinned to them
// that waits, lets that go and has it wait again.
func BenchmarkAdmit(b *testing.B) {
	for _, lanes := range []int{1, 100, 1000, 4000} { // to register 10,000 takes longer than to measure
		b.Run(fmt.Sprintf("lanes=%d", lanes), func(b *testing.B) {
			w := newClasses(b, "  - {name: x, quantum: 1, prefill_busy_threshold: 0}")
			for i := range lanes {
				w.register(record(b, worker.ID(i+1), 1))
			}
			tickets := make([]router.Ticket, 2*lanes)
			for i := range tickets {
				q := router.Query{Reservation: fmt.Sprint(i), PromptTokens: 100, Worker: new(worker.ID(i%lanes + 1)), DP: new(uint32(0))}
				tickets[i] = router.Ticket{Query: q, Order: router.Order{Class: "x"}}
				if _, err := w.p.Wait(&tickets[i], start); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				going := &tickets[i%len(tickets)] // the two of a rank take turns
				on, _ := w.p.Free(going.Query.Reservation, start)
				if got := w.p.AdmitOn(on.Worker, start); len(got) != 1 {
					b.Fatalf("%d go, want one", len(got))
				}
				if _, err := w.p.Wait(going, start); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
