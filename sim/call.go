package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"time"

	"spillway/sim/engine"
)

// call is one request being served: its choices run in the engines, its handler waits for them.
type call struct {
	worker   *worker
	id       string
	created  int64
	choices  []*choice
	per      int // choices per prompt
	prompt   int // tokens of all prompts
	bell     chan struct{}
	priority int
	whole    bool // all of the answer was written
}

// newCall prepares a call whose answer has an ID of the given prefix. Its close must be called.
func (w *worker) newCall(r *http.Request, prefix string, g *generation) *call {
	id := r.Header.Get("X-Request-Id")
	if id == "" {
		id = fmt.Sprintf("%016x%016x", rand.Uint64(), rand.Uint64())
	}
	c := &call{
		worker: w, id: prefix + id[:min(len(id), 256)], created: time.Now().Unix(),
		per: 1, bell: make(chan struct{}, 1),
	}
	if g != nil {
		c.priority = g.Priority
	}
	return c
}

// start submits n sequences for prompt, which get output tokens each, to the wanted rank.
func (c *call) start(prompt []uint32, n, output, rank int, own bool) error {
	c.prompt += len(prompt)
	for i := range n {
		r := c.worker.assign(rank)
		rank = r.dp // the sequences of a prompt stay together
		ch := &choice{index: len(c.choices), rank: r, prompt: len(prompt), stop: own, bell: c.bell}
		ch.text = wordsFor(prompt, i)
		if err := r.submit(ch, prompt, ch.text.tokens(output), c.priority); err != nil {
			c.worker.unassign(r.dp)
			if errors.Is(err, engine.ErrNeverFits) {
				return badRequest("The prompt of %d tokens does not fit into the KV cache of %d tokens.",
					len(prompt), c.worker.server.cfg.KVBlocks*c.worker.server.cfg.BlockSize)
			}
			return err
		}
		c.choices = append(c.choices, ch)
	}
	return nil
}

// close takes back what is still running.
func (c *call) close() {
	for _, ch := range c.choices {
		ch.rank.end(ch, c.whole)
		c.worker.unassign(ch.rank.dp)
	}
}

// wait returns when all choices have ended, or errCut when ctx does before.
func (c *call) wait(ctx context.Context) error {
	for _, ch := range c.choices {
		for {
			if _, reason := ch.state(); reason != 0 {
				break
			}
			select {
			case <-c.bell:
			case <-ctx.Done():
				for _, ch := range c.choices {
					ch.had, _ = ch.state()
				}
				return errCut
			}
		}
	}
	for _, ch := range c.choices {
		ch.had, _ = ch.state()
	}
	return nil
}

// finishReason is the API's word for why ch ended.
func (ch *choice) finishReason(why engine.Reason) string {
	if ch.stop && why == engine.Complete {
		return "stop"
	}
	return "length"
}

type usage struct {
	PromptTokens        int           `json:"prompt_tokens"`
	TotalTokens         int           `json:"total_tokens"`
	CompletionTokens    int           `json:"completion_tokens"`
	PromptTokensDetails *usageDetails `json:"prompt_tokens_details,omitempty"`
}

type usageDetails struct {
	CachedTokens int64 `json:"cached_tokens"`
}

// usage counts each prompt once, however many choices it has; what the cache held of it is
// what its first choice found.
func (c *call) usage() usage {
	u := usage{PromptTokens: c.prompt, PromptTokensDetails: &usageDetails{}}
	for i, ch := range c.choices {
		generated, _ := ch.state()
		u.CompletionTokens += generated
		if i%c.per == 0 {
			u.PromptTokensDetails.CachedTokens += ch.cached.Load()
		}
	}
	u.TotalTokens = u.PromptTokens + u.CompletionTokens
	return u
}
