package sim

import (
	"cmp"
	"net/http"
	"slices"
	"time"

	"spillway/kvhash"
	"spillway/sim/engine"
)

// tellCacheLocked takes note of what the engine has done to its prefix cache, and publishes it.
// It follows every call that lets the engine do anything.
func (r *rank) tellCacheLocked() {
	r.changes = r.eng.CacheEvents(r.changes[:0])
	if len(r.changes) == 0 {
		return
	}
	size := r.worker.server.cfg.BlockSize
	for _, e := range r.changes {
		switch e.Kind {
		case engine.Stored:
			r.local = kvhash.AppendBlocks(r.local[:0], e.Tokens, kvhash.Options{BlockSize: size})
			for i, h := range e.Hashes {
				r.held[h] = r.local[i]
			}
		case engine.Evicted:
			for _, h := range e.Hashes {
				delete(r.held, h)
			}
		case engine.Cleared:
			clear(r.held)
		}
	}
	if r.feed != nil {
		r.feed.put(time.Now(), r.changes, size)
	}
}

// clearCache forgets what the rank's prefix cache holds, unless requests hold blocks.
func (r *rank) clearCache() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	r.tellLocked(now)
	done := r.eng.ClearCache(r.pace.engine(now))
	r.tellCacheLocked()
	return done
}

// resetPrefixCache serves POST /reset_prefix_cache. As vLLM's it answers 200 whether or not it
// could: ranks with requests that run keep what they have.
func (w *worker) resetPrefixCache(http.ResponseWriter, *http.Request) error {
	for _, r := range w.ranks {
		if !r.clearCache() {
			w.server.log.Warn("the prefix cache is not cleared: requests hold blocks", "worker", w.index, "dp_rank", r.dp)
		}
	}
	return nil
}

// cachedBlock is a block of GET /sim/cache, with the names that dumps of an index have.
type cachedBlock struct {
	Engine uint64  `json:"block_hash"`
	Local  uint64  `json:"tokens_hash"`
	Parent *uint64 `json:"parent_hash"`
}

// rankCache is what a rank's prefix cache holds.
type rankCache struct {
	DPRank   int           `json:"dp_rank"`
	Sequence *uint64       `json:"sequence"` // of the last batch of events, which has led to this; nil before the first
	Dropped  uint64        `json:"batches_dropped"`
	Blocks   []cachedBlock `json:"blocks"` // sorted by hash
}

func (r *rank) cached() rankCache {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := rankCache{DPRank: r.dp, Blocks: make([]cachedBlock, 0, len(r.held))}
	if r.feed != nil {
		c.Sequence, c.Dropped = r.feed.told()
	}
	r.eng.Cached(func(hash, parent uint64, hasParent bool) {
		b := cachedBlock{Engine: hash, Local: r.held[hash]}
		if hasParent {
			b.Parent = &parent
		}
		c.Blocks = append(c.Blocks, b)
	})
	slices.SortFunc(c.Blocks, func(a, b cachedBlock) int { return cmp.Compare(a.Engine, b.Engine) })
	return c
}

// cache serves GET /sim/cache, the same on every worker of the process.
func (s *Server) cache(rw http.ResponseWriter, _ *http.Request) error {
	type workerCache struct {
		Worker int         `json:"worker"`
		Port   int         `json:"port"`
		Ranks  []rankCache `json:"ranks"`
	}
	all := make([]workerCache, len(s.workers))
	for i, w := range s.workers {
		all[i] = workerCache{Worker: i, Port: w.port}
		for _, r := range w.ranks {
			all[i].Ranks = append(all[i].Ranks, r.cached())
		}
	}
	return writeJSON(rw, http.StatusOK, struct {
		BlockSize int           `json:"block_size"`
		Workers   []workerCache `json:"workers"`
	}{s.cfg.BlockSize, all})
}
