package sim

import (
	"encoding/json"
	"net/http"

	"spillway/sim/engine"
)

// prefix serves POST /sim/prefix, the same on every worker of the process: how many leading tokens
// of a prompt each rank has cached, and the most of all. The body is that of a chat request or of a
// completion of one prompt; other keys of theirs are ignored.
func (w *worker) prefix(rw http.ResponseWriter, r *http.Request) error {
	var req struct {
		conversation
		Prompt json.RawMessage `json:"prompt"`
	}
	if err := readBody(rw, r, &req); err != nil {
		return err
	}
	var prompt []uint32
	if given(req.Prompt) {
		prompts, err := parsePrompts(req.Prompt)
		if err != nil {
			return err
		}
		if len(prompts) != 1 {
			return badRequest("prompt must be one prompt, got %d.", len(prompts))
		}
		prompt = prompts[0]
	} else {
		var err error
		if prompt, err = req.tokens(); err != nil {
			return err
		}
	}
	type workerPrefix struct {
		Worker int   `json:"worker"`
		Ranks  []int `json:"ranks"`
	}
	hashes := engine.PrefixHashes(nil, prompt, w.server.cfg.BlockSize)
	most, all := 0, make([]workerPrefix, len(w.server.workers))
	for i, o := range w.server.workers {
		all[i].Worker = i
		for _, r := range o.ranks {
			n := r.cachedPrefix(hashes) * w.server.cfg.BlockSize
			all[i].Ranks = append(all[i].Ranks, n)
			most = max(most, n)
		}
	}
	return writeJSON(rw, http.StatusOK, struct {
		PromptTokens int            `json:"prompt_tokens"`
		CachedTokens int            `json:"cached_tokens"` // the most of any rank
		Workers      []workerPrefix `json:"workers"`
	}{len(prompt), most, all})
}

func (r *rank) cachedPrefix(hashes []uint64) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.eng.CachedPrefix(hashes)
}
