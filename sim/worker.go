package sim

import (
	"net/http"
	"strconv"
	"sync"
)

// worker is one simulated engine process with its ranks.
type worker struct {
	server *Server
	index  int
	port   int // set once, by Run
	ranks  []*rank
	faults faults
	door   door

	mu       sync.Mutex // guards assigned; may be taken without, never with, a rank's lock
	assigned []int      // per rank: sequences that were given to it and have not ended
}

func newWorker(s *Server, index int) (*worker, error) {
	w := &worker{server: s, index: index, assigned: make([]int, s.cfg.DPSize)}
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
	for pattern, h := range map[string]handler{
		"POST /v1/chat/completions": w.chat,
		"POST /v1/completions":      w.completions,
		"POST /v1/embeddings":       w.embeddings,
	} {
		mux.HandleFunc(pattern, w.faulty(inference, h))
	}
	for pattern, h := range w.tokenRoutes() {
		mux.HandleFunc(pattern, w.faulty(tokenizing, h))
	}
	for pattern, h := range map[string]handler{
		"POST /reset_prefix_cache": w.resetPrefixCache,
		"GET /v1/models":           w.models,
		"GET /version":             version,
		"GET /metrics":             w.metrics,
	} {
		mux.HandleFunc(pattern, w.faulty(other, h))
	}
	mux.HandleFunc("GET /health", w.faulty(probe, health))
	mux.HandleFunc("GET /ping", w.faulty(probe, health))
	for pattern, h := range map[string]handler{ // no fault keeps these from answering
		"GET /sim/stats":    w.server.stats,
		"GET /sim/cache":    w.server.cache,
		"POST /sim/prefix":  w.prefix,
		"GET /sim/fault":    w.server.faultStates,
		"POST /sim/fault":   w.setFault,
		"DELETE /sim/fault": w.clearFaults,
	} {
		mux.HandleFunc(pattern, func(rw http.ResponseWriter, r *http.Request) {
			if err := h(rw, r); err != nil {
				writeError(rw, err)
			}
		})
	}
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

func health(http.ResponseWriter, *http.Request) error { return nil } // 200 with an empty body

func version(rw http.ResponseWriter, _ *http.Request) error {
	// The vLLM release whose answers these are like.
	return writeJSON(rw, http.StatusOK, map[string]string{"version": "0.11.0+spillway.sim"})
}

func (w *worker) models(rw http.ResponseWriter, _ *http.Request) error {
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
	return writeJSON(rw, http.StatusOK, struct {
		Object string  `json:"object"`
		Data   []model `json:"data"`
	}{"list", []model{{name, "model", w.server.started.Unix(), "vllm", name, nil, w.server.cfg.MaxModelLen}}})
}
