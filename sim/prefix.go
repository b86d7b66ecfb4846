package sim

import (
	"net/http"

	"spillway/sim/engine"
)

// PrefixHashes are what POST /sim/prefix takes for a prompt of one block size: the hashes of those of
// its blocks that may come from a prefix cache. The prompt is told as to Tokens.
func PrefixHashes(text string, chat bool, blockSize int) []uint64 {
	return engine.PrefixHashes(nil, Tokens(text, chat), blockSize)
}

// prefix serves POST /sim/prefix, the same on every worker of the process: how many leading blocks
// of a prompt each rank has cached, and the most of all. Hashing is left to who asks, so that a
// question in the midst of a measurement costs the workers little.
func (w *worker) prefix(rw http.ResponseWriter, r *http.Request) error {
	var req struct {
		BlockSize int      `json:"block_size"`
		Hashes    []uint64 `json:"hashes"`
	}
	if err := readBody(rw, r, &req); err != nil {
		return err
	}
	if size := w.server.cfg.BlockSize; req.BlockSize != size {
		return badRequest("block_size must be %d, got %d.", size, req.BlockSize)
	}
	type workerPrefix struct {
		Worker int   `json:"worker"`
		Ranks  []int `json:"ranks"`
	}
	most, all := 0, make([]workerPrefix, len(w.server.workers))
	for i, o := range w.server.workers {
		all[i].Worker = i
		for _, r := range o.ranks {
			n := r.cachedPrefix(req.Hashes)
			all[i].Ranks = append(all[i].Ranks, n)
			most = max(most, n)
		}
	}
	return writeJSON(rw, http.StatusOK, struct {
		Most    int            `json:"most"` // of any rank
		Workers []workerPrefix `json:"workers"`
	}{most, all})
}

func (r *rank) cachedPrefix(hashes []uint64) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.eng.CachedPrefix(hashes)
}
