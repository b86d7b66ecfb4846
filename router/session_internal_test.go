package router

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"spillway/worker"
)

// TestSessionsAgreeWithModel compares random steps with a list that is searched from end to end.
func TestSessionsAgreeWithModel(t *testing.T) {
	type known struct {
		name string
		rank worker.Rank
		used time.Time
	}
	const ttl, limit = 10 * time.Second, 5
	rng := rand.New(rand.NewPCG(1, 2))
	s := newSessions(ttl, limit)
	var model []known // the longest idle first
	now := time.Unix(1000, 0)
	for step := range 20000 {
		now = now.Add(time.Duration(rng.IntN(4000)) * time.Millisecond)
		model = slices.DeleteFunc(model, func(k known) bool { return now.Sub(k.used) > ttl })
		name := fmt.Sprint("s", rng.IntN(8))
		at := slices.IndexFunc(model, func(k known) bool { return k.name == name })
		if rng.IntN(2) == 0 {
			rank, ok := s.rank(name, now)
			if ok != (at >= 0) || ok && rank != model[at].rank {
				t.Fatalf("step %d: rank(%s) = %v, %v; the model has %+v", step, name, rank, ok, model)
			}
			continue
		}
		rank := worker.Rank{Worker: worker.ID(rng.IntN(3)), DP: uint32(rng.IntN(3))}
		s.bind(name, rank, now)
		switch {
		case at >= 0:
			model = slices.Delete(model, at, at+1)
		case len(model) == limit:
			model = model[1:]
		}
		model = append(model, known{name, rank, now})
		if len(s.byKey) != len(model) {
			t.Fatalf("step %d: %d sessions are remembered, want %d", step, len(s.byKey), len(model))
		}
	}
}
