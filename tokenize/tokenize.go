// Package tokenize finds the token IDs of prompts by asking the workers that will compute them, or
// a server beside them, since only they have the model's tokenizer and chat template. What they said
// is remembered by prompt. It is best effort: whatever goes wrong, the answer is that nothing is
// known, in bounded time, and the caller estimates.
package tokenize

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Limits of one prompt.
const (
	textTimeout  = 500 * time.Millisecond
	mediaTimeout = 5 * time.Second // with parts that are not text, which the worker may have to fetch
)

// Prompt is the body of a request whose prompt is wanted.
type Prompt struct {
	Model  string // canonical name
	Tenant string // whose workers may be asked
	Served string // the name by which they know the model, or the adapter
	Chat   bool   // the body is that of a chat completion, else of a completion
	Body   []byte // valid JSON; read during the call only
}

// Tokens is what is known of a prompt; the zero value is nothing.
type Tokens struct {
	IDs   []uint32 // shared and read-only; nil unless the worker will compute exactly these
	Count uint64   // of all prompts of the request; 0 is unknown
	Text  bool     // Count should be usage.prompt_tokens to the token; with images it may not be
}

// Worker is a server that can be asked.
type Worker struct {
	ID       uint64
	Name     string // for the log
	Endpoint string // base URL, no trailing slash
	APIKey   string // bearer token, "" for none
	SGLang   bool   // its /tokenize may have no chat template
}

// Workers calls ask for workers that may be asked for a prompt, the most welcome first, until it
// returns false. It should begin at another one each time, so that the work is spread.
type Workers func(p *Prompt, ask func(Worker) (more bool))

// Tokenizer finds tokens. It is safe for concurrent use.
type Tokenizer struct {
	cfg     Config
	workers Workers
	log     *slog.Logger
	metrics *metrics
	routes  []route
	post    func(s *server, ctx context.Context, w *Worker, path string, l *letter) (status int, err error)
	seed    uint64 // of keys, so that nobody can look for two prompts with one key

	servers servers

	mu      sync.Mutex // guards the fields below; held beside no other lock
	cache   cache
	flights map[key]*flight
	models  map[partition]*model
}

// partition is a model, by its canonical name, and a tenant.
type partition struct{ model, tenant string }

// flight is a prompt that is being asked for. All who want it wait for the same answer.
type flight struct {
	key     key
	waiting int                // callers who still want it; guarded by Tokenizer.mu
	cancel  context.CancelFunc // nobody wants it any more
	done    chan struct{}      // closed when tokens is set
	tokens  Tokens
}

// New returns a Tokenizer for a valid cfg whose Source asks somebody. Nothing runs between calls.
func New(cfg Config, workers Workers, reg prometheus.Registerer, log *slog.Logger) *Tokenizer {
	t := &Tokenizer{
		cfg: cfg, workers: workers, log: log, routes: cfg.routes(), post: (*server).post, seed: rand.Uint64(),
		servers: servers{known: map[uint64]*server{}}, flights: map[key]*flight{}, models: map[partition]*model{},
		cache: newCache(int64(cfg.CacheMB) << 20),
	}
	if cfg.URL != "" {
		t.workers = only(Worker{Name: cfg.URL, Endpoint: trimmed(cfg.URL)})
	}
	t.metrics = newMetrics(cfg, reg, t)
	return t
}

// only is one server beside the workers.
func only(w Worker) Workers { return func(_ *Prompt, ask func(Worker) bool) { ask(w) } }

// Close closes connections that nobody uses.
func (t *Tokenizer) Close() { t.servers.disconnect() }

// Tokenize returns what is known of a prompt, asking for it if need be: for up to half a second, or
// five with images and the like. It returns early, with nothing, when ctx ends, unless others wait
// for what this call has asked for.
func (t *Tokenizer) Tokenize(ctx context.Context, p Prompt) Tokens {
	if len(p.Body) > t.cfg.MaxBytes {
		t.metrics.prompts[tooLarge].Inc()
		return Tokens{}
	}
	r, ok := read(p.Body, p.Chat)
	if !ok {
		t.metrics.prompts[unreadable].Inc()
		return Tokens{}
	}
	t.mu.Lock()
	m := t.modelLocked(p.Model, p.Tenant)
	generation, countOnly := m.generation, m.countOnly
	t.mu.Unlock()
	k := t.keyOf(&p, &r, generation)

	t.mu.Lock()
	if tokens, ok := t.cache.find(k); ok {
		t.mu.Unlock()
		t.metrics.hits.Inc()
		t.metrics.prompts[cached].Inc()
		return tokens.unless(countOnly)
	}
	f, joined := t.flights[k]
	if !joined {
		f = &flight{key: k, done: make(chan struct{})}
		t.flights[k] = f
	}
	f.waiting++
	if joined {
		t.mu.Unlock()
		t.metrics.misses.Inc()
		return t.follow(ctx, f).unless(countOnly)
	}
	limit := textTimeout
	if r.media {
		limit = mediaTimeout
	}
	var asking context.Context
	asking, f.cancel = context.WithTimeout(context.WithoutCancel(ctx), limit)
	t.mu.Unlock()
	t.metrics.misses.Inc()
	return t.lead(ctx, asking, f, p, r).unless(countOnly)
}

// unless is without IDs if the model's have turned out not to be what workers compute.
func (t Tokens) unless(countOnly bool) Tokens {
	if countOnly {
		t.IDs = nil
	}
	return t
}

// lead asks for f, under asking, for all who wait. The caller's own ctx ends it only if nobody else
// does. p and r are values, so that only prompts that are asked for take room on the heap.
func (t *Tokenizer) lead(ctx, asking context.Context, f *flight, p Prompt, r reading) Tokens {
	began := time.Now()
	defer f.cancel()
	stop := context.AfterFunc(ctx, func() { t.leave(f) })
	defer stop()
	defer func() { // also after a panic: others wait
		t.mu.Lock()
		t.landLocked(f)
		if f.tokens.Count > 0 {
			t.cache.add(f.key, f.tokens)
		}
		t.mu.Unlock()
		close(f.done)
	}()
	tokens, why := t.ask(asking, &p, &r)
	f.tokens = tokens
	t.metrics.prompts[why].Inc()
	switch why {
	case asked, unanswered, left:
		t.metrics.latency.Observe(float64(time.Since(began)) / float64(time.Millisecond))
	}
	return tokens
}

// follow waits for what another caller has asked for.
func (t *Tokenizer) follow(ctx context.Context, f *flight) Tokens {
	select {
	case <-f.done:
		t.metrics.prompts[shared].Inc()
		return f.tokens
	case <-ctx.Done():
		t.leave(f)
		t.metrics.prompts[left].Inc()
		return Tokens{}
	}
}

// leave takes one caller off f, and with the last one f.
func (t *Tokenizer) leave(f *flight) {
	t.mu.Lock()
	f.waiting--
	alone := f.waiting == 0
	if alone {
		t.landLocked(f) // who comes now begins anew
	}
	t.mu.Unlock()
	if alone {
		f.cancel()
	}
}

func (t *Tokenizer) landLocked(f *flight) {
	if t.flights[f.key] == f {
		delete(t.flights, f.key)
	}
}
