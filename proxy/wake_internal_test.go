package proxy

import (
	"slices"
	"testing"
	"time"

	"spillway/router"
)

// TestWakeOrder: of those that are let go together the first is told last, because whom a goroutine
// makes ready last runs first.
func TestWakeOrder(t *testing.T) {
	for n, want := range [][]int64{{}, {0}, {1, 0}, {1, 2, 0}, {1, 2, 3, 0}} {
		told := make(chan router.Admission, n)
		admitted := make([]router.Admission, n)
		for i := range admitted {
			admitted[i] = router.Admission{Ticket: &router.Ticket{Owner: told}, Waited: time.Duration(i)}
		}
		wake(admitted)
		close(told)
		var got []int64
		for a := range told {
			got = append(got, int64(a.Waited))
		}
		if !slices.Equal(got, want) {
			t.Errorf("%d let go: told in the order %v, want %v", n, got, want)
		}
	}
}
