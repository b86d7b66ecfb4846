package service_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
)

// TestLastWorker: workers that register while the last one goes end up in books that are found.
func TestLastWorker(t *testing.T) {
	s := start(t, config())
	call := func(path, body string) int {
		req := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		s.server.ServeHTTP(w, req)
		return w.Code
	}
	for round := range 64 {
		model := fmt.Sprintf(`"model_name":"m%d"`, round)
		register := func(id int) int {
			return call("/register", fmt.Sprintf(`{"worker_id":%d,%s,"block_size":16,"dp_start":0,"dp_size":1}`, id, model))
		}
		register(1)
		var all sync.WaitGroup
		all.Go(func() {
			if got := call("/unregister", fmt.Sprintf(`{"worker_id":1,%s}`, model)); got != 200 {
				t.Errorf("unregister = %d", got)
			}
		})
		all.Go(func() {
			add := fmt.Sprintf(`{"request_id":"r",%s,"worker_id":1,"dp_rank":0,"sequence_hashes":[1]}`, model)
			if got := call("/add", add); got != 201 && got != 404 {
				t.Errorf("add = %d", got)
			}
		})
		all.Go(func() {
			if got := register(2); got != 201 {
				t.Errorf("register = %d", got)
			}
		})
		all.Wait()
		add := fmt.Sprintf(`{"request_id":"r",%s,"worker_id":2,"dp_rank":0,"sequence_hashes":[1]}`, model)
		if got := call("/add", add); got != 201 {
			t.Fatalf("add on the worker that stays = %d, want 201", got)
		}
	}
}
