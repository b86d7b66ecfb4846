package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var rounds = flag.Int("rounds", 100, "how often TestAtomicity has a burst come; make test says 1000")

// answered is what one call of a burst got.
type answered struct {
	id     string
	status int
	text   string
	worker uint64
}

func (s *selector) reserve(id string, to chan<- answered) {
	a := answered{id: id}
	a.status, a.text = s.call("POST", "/select_and_reserve", `{"token_ids":[1,2,3,4],"reservation_id":"`+id+`"}`)
	if a.status == 200 {
		a.worker = read[struct {
			Worker uint64 `json:"worker_id"`
		}](s.t, a.text).Worker
	}
	to <- a
}

// next is the next answer, which must come.
func (s *selector) next(got <-chan answered) answered {
	s.t.Helper()
	select {
	case a := <-got:
		return a
	case <-time.After(patience):
		s.t.Fatalf("no answer within %v", patience)
		panic("unreachable")
	}
}

// TestAtomicity has 64 calls come at once, again and again, for 8 idle equal workers none of which
// may compute two prompts. Exactly 8 get one each. As many as may wait; each DELETE lets exactly one of
// them go, to the worker that it has freed; the others are refused with the reason.
func TestAtomicity(t *testing.T) {
	const workers, calls = 8, 64
	for _, perWorker := range []int{0, 1} {
		t.Run(fmt.Sprintf("%d for each worker may wait", perWorker), func(t *testing.T) {
			t.Parallel()
			policies := filepath.Join(t.TempDir(), "policies.yaml")
			if err := os.WriteFile(policies, fmt.Appendf(nil, "default_policy_family: f\nuncached_isl_buckets: [{min_tokens: 0, bucket: b}]\npolicy_classes:\n"+
				"  - {name: latency, policy_family: f, cache_bucket: b, quantum: 1, prefill_busy_threshold: 0, request_queue_limit_per_worker: %d}\n", perWorker), 0o600); err != nil {
				t.Fatal(err)
			}
			s := startSelector(t, "--router-kv-events=false", "--router-policy-config", policies)
			for id := range workers {
				s.post("/workers", fmt.Sprintf(`{"worker_id":%d,"endpoint":"http://w","block_size":4,"max_num_batched_tokens":8192}`, id), 201)
			}
			places := perWorker * workers
			refusal := fmt.Sprintf(`,"details":{"policy_class":"latency","limit_kind":"requests","current":%d,"limit":%d}}`, places, places)
			for round := range *rounds {
				got := make(chan answered, calls)
				for i := range calls {
					go s.reserve(fmt.Sprint("r", i), got)
				}
				var booked []answered
				on := map[uint64]bool{}
				for range calls - places {
					switch a := s.next(got); {
					case a.status == 200:
						booked = append(booked, a)
						on[a.worker] = true
					case a.status != 503 || !strings.HasSuffix(a.text, refusal):
						t.Fatalf("round %d: %d %s, want 200, or 503 with %s", round, a.status, a.text, refusal)
					}
				}
				if len(booked) != workers || len(on) != workers {
					t.Fatalf("round %d: %d are booked on %d workers, and %d refused; want %d on as many", round, len(booked), len(on), calls-places-len(booked), workers)
				}
				s.duplicates(booked)
				wait := func(freed int) { // which is so before the DELETE is answered
					t.Helper()
					if p, want := s.loads()[0], max(places-freed, 0); p.Pending != want || p.Tokens != 4*want {
						t.Fatalf("round %d: after %d are freed %d wait, with %d tokens; want %d", round, freed, p.Pending, p.Tokens, want)
					}
				}
				wait(0)
				for i, b := range booked[:workers] {
					s.ask("DELETE", "/reservations/"+b.id, "", 200)
					if perWorker == 0 {
						continue
					}
					wait(i + 1)
					a := s.next(got)
					if a.status != 200 || a.worker != b.worker {
						t.Fatalf("round %d: after worker %d is freed who waits is answered %d %s", round, b.worker, a.status, a.text)
					}
					booked = append(booked, a)
				}
				for _, b := range booked[workers:] {
					s.ask("DELETE", "/reservations/"+b.id, "", 200)
				}
				if s.booksAreEmpty(); t.Failed() {
					t.Fatalf("in round %d", round)
				}
			}
		})
	}
}

// duplicates books what is booked once more, all at once.
func (s *selector) duplicates(booked []answered) {
	s.t.Helper()
	got := s.together(len(booked), func(i int) (method, path, body string) {
		return "POST", "/reservations", fmt.Sprintf(`{"reservation_id":%q,"worker_id":%d,"sequence_hashes":[1],"isl_tokens":4}`, booked[i].id, i)
	})
	if got[409] != len(booked) {
		s.t.Fatalf("bookings under IDs that are booked are answered %v, want %d of 409", got, len(booked))
	}
}
