package budget_test

import (
	"testing"

	"spillway/dispatch/budget"
)

func TestAIMD(t *testing.T) {
	a := budget.AIMD{Least: 2, Most: 12, Increase: 1, Decrease: 0.5}
	for _, step := range []struct {
		successes int
		refused   []float64 // when they were sent; answers come at 40, then 1 s later
		want      int
	}{
		{0, nil, 2}, {1, nil, 2}, {2, nil, 3}, {500, nil, 12},
		{0, []float64{35, 36, 37}, 6},                                                       // one fall for all that were sent before it
		{0, []float64{39}, 6},                                                               // so was this one
		{500, nil, 12}, {0, []float64{69}, 6}, {0, []float64{75}, 3}, {0, []float64{85}, 2}, // not below the least
		{3, nil, 3},
	} {
		for range step.successes {
			a.Succeeded()
		}
		for _, sent := range step.refused {
			now := 40.0
			if sent > 60 {
				now = sent + 1
			}
			a.Refused(at(sent), at(now))
		}
		if got := a.Limit(); got != step.want {
			t.Errorf("after %+v the limit is %d, want %d", step, got, step.want)
		}
	}
}
