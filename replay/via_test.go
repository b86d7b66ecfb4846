package replay_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

// selectors plays a selection service that has one worker.
type selectors struct {
	mu     sync.Mutex
	worker string
	refuse int            // every n-th request, if not 0
	asked  int            // for a worker
	state  map[string]int // 1 booked, 2 prefill is over, 3 freed
	wrong  []string       // calls that should not come
}

func (s *selectors) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id, call, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/reservations/"), "/")
	switch {
	case r.URL.Path == "/select_and_reserve":
		var body struct {
			Model    string `json:"model_name"`
			Tokens   []int  `json:"token_ids"`
			Expected int    `json:"expected_output_tokens"`
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || body.Model != "sim-model" || len(body.Tokens) != 101 || body.Expected != 5 {
			s.wrong = append(s.wrong, fmt.Sprintf("%+v, %v", body, err))
		}
		if s.asked++; s.refuse > 0 && s.asked%s.refuse == 0 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		id := fmt.Sprint("r", s.asked)
		s.state[id] = 1
		fmt.Fprintf(w, `{"reservation_id":%q,"worker_id":7,"dp_rank":3,"endpoint":%q}`, id, s.worker)
	case r.Method == http.MethodPost && call == "prefill_complete" && s.state[id] == 1:
		s.state[id] = 2
	case r.Method == http.MethodDelete && call == "" && s.state[id] == 2:
		s.state[id] = 3
	default:
		s.wrong = append(s.wrong, r.Method+" "+r.URL.Path)
		w.WriteHeader(http.StatusNotFound)
	}
}

func TestViaSelectService(t *testing.T) {
	s := &selectors{state: map[string]int{}, refuse: 5}
	s.worker = serve(t, func(w http.ResponseWriter, r *http.Request, a asked) {
		if rank := r.Header.Get("X-Data-Parallel-Rank"); rank != "3" || r.URL.Path != "/v1/chat/completions" {
			t.Errorf("the worker is asked for rank %q, %s", rank, r.URL.Path)
		}
		answer(w, a, 0)
	})
	srv := httptest.NewServer(s)
	defer srv.Close()
	cfg := load(srv.URL, 20)
	cfg.Via = "select-service"
	cfg.Tokenize = func(text string, chat bool) []uint32 {
		if !chat {
			t.Error("the prompt of a chat is read as that of a completion")
		}
		return make([]uint32, len(text)/4+1)
	}
	rep, table := mustRun(t, cfg)
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.wrong) > 0 {
		t.Errorf("calls that should not have come: %v", s.wrong)
	}
	if rep.Completed != 16 || rep.Shed != 4 {
		t.Errorf("completed %d, shed %d; want 16, 4\n%s", rep.Completed, rep.Shed, table)
	}
	if l := rep.Lifecycle; l == nil || l.Selected != 16 || l.PrefillCompleted != 16 || l.Freed != 16 || l.Failed != 0 || l.Latency.Count != 16 {
		t.Errorf("lifecycle %+v, want 16 of each", l)
	}
	for id, state := range s.state {
		if state != 3 {
			t.Errorf("reservation %s ends in state %d, want 3", id, state)
		}
	}
	if len(rep.Workers) != 1 || rep.Workers[0].Name != "7" {
		t.Errorf("workers %+v, want 7 alone", rep.Workers)
	}
}
