package sim

import (
	"net/http"
	"strconv"
	"sync"
)

// worker is one simulated engine process with its ranks.
type worker struct {
	server *Server
	port   int // set once, by Run
	ranks  []*rank

	mu       sync.Mutex // guards assigned; may be taken without, never with, a rank's lock
	assigned []int      // per rank: sequences that were given to it and have not ended
}

func newWorker(s *Server) (*worker, error) {
	w := &worker{server: s, assigned: make([]int, s.cfg.DPSize)}
	for dp := range s.cfg.DPSize {
		r, err := newRank(w, dp)
		if err != nil {
			return nil, err
		}
		w.ranks = append(w.ranks, r)
	}
	return w, nil
}

func (w *worker) routes() http.Handler {
	mux := http.NewServeMux()
	handle := func(pattern string, h func(http.ResponseWriter, *http.Request) error) {
		mux.HandleFunc(pattern, func(rw http.ResponseWriter, r *http.Request) {
			if err := h(rw, r); err != nil {
				writeError(rw, err)
			}
		})
	}
	handle("POST /v1/chat/completions", w.chat)
	handle("POST /v1/completions", w.completions)
	handle("POST /v1/embeddings", w.embeddings)
	handle("POST /tokenize", w.tokenize)
	mux.HandleFunc("GET /v1/models", w.models)
	mux.HandleFunc("GET /version", version)
	mux.HandleFunc("GET /health", health)
	mux.HandleFunc("GET /ping", health)
	mux.HandleFunc("GET /sim/stats", w.server.stats)
	mux.HandleFunc("GET /metrics", w.metrics)
	return mux
}

// assign chooses the rank for a sequence: the wanted one, or with a negative number the one
// with the fewest sequences. Whoever calls it calls unassign when the sequence has ended.
func (w *worker) assign(wanted int) *rank {
	w.mu.Lock()
	defer w.mu.Unlock()
	if wanted < 0 {
		wanted = 0
		for dp, n := range w.assigned {
			if n < w.assigned[wanted] {
				wanted = dp
			}
		}
	}
	w.assigned[wanted]++
	return w.ranks[wanted]
}

func (w *worker) unassign(dp int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.assigned[dp]--
}

// rankHeader reads X-Data-Parallel-Rank: the rank that the client wants, or -1.
func (w *worker) rankHeader(r *http.Request) (int, error) {
	v := r.Header.Get("X-Data-Parallel-Rank")
	if v == "" {
		return -1, nil
	}
	dp, err := strconv.Atoi(v)
	if err != nil || dp < 0 || dp >= len(w.ranks) {
		return 0, badRequest("X-Data-Parallel-Rank: %.20q is not within 0..%d", v, len(w.ranks)-1)
	}
	return dp, nil
}

func health(http.ResponseWriter, *http.Request) {} // 200 with an empty body

func version(rw http.ResponseWriter, _ *http.Request) {
	// The vLLM release whose answers these are like.
	_ = writeJSON(rw, http.StatusOK, map[string]string{"version": "0.11.0+spillway.sim"})
}

func (w *worker) models(rw http.ResponseWriter, _ *http.Request) {
	type model struct {
		ID          string  `json:"id"`
		Object      string  `json:"object"`
		Created     int64   `json:"created"`
		OwnedBy     string  `json:"owned_by"`
		Root        string  `json:"root"`
		Parent      *string `json:"parent"`
		MaxModelLen int     `json:"max_model_len"`
	}
	name := w.server.cfg.Model
	_ = writeJSON(rw, http.StatusOK, struct {
		Object string  `json:"object"`
		Data   []model `json:"data"`
	}{"list", []model{{name, "model", w.server.started.Unix(), "vllm", name, nil, w.server.cfg.MaxModelLen}}})
}
