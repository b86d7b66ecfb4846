package replay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// The oracle is asked a little ahead of the request, which waits for the answer: once it is under way,
// its own blocks are in the cache.
const (
	oracleLead  = 50 * time.Millisecond
	oracleLimit = time.Second
)

// oracleBlock is the block size in tokens that workers must have to be asked.
const oracleBlock = 16

// oracle asks simulated workers what they have cached of a prompt. It is safe for concurrent use.
type oracle struct {
	url       string
	hashes    func(text string, chat bool, blockSize int) []uint64
	chat      bool
	transport *http.Transport
}

func newOracle(cfg Config, transport *http.Transport) (*oracle, error) {
	switch {
	case cfg.OracleURL == "":
		return nil, nil
	case cfg.PrefixHashes == nil:
		return nil, errors.New("replay: oracle-url: nobody hashes prompts")
	}
	return &oracle{strings.TrimRight(cfg.OracleURL, "/") + "/sim/prefix", cfg.PrefixHashes, cfg.Endpoint == "chat", transport}, nil
}

// build returns the question about r.
func (o *oracle) build(r *Request) []byte {
	if o == nil {
		return nil
	}
	hashes := o.hashes(string(AppendPrompt(nil, r)), o.chat, oracleBlock)
	out := make([]byte, 0, 21*len(hashes)+64)
	out = strconv.AppendInt(append(out, `{"block_size":`...), oracleBlock, 10)
	out = append(out, `,"hashes":[`...)
	for i, h := range hashes {
		if i > 0 {
			out = append(out, ',')
		}
		out = strconv.AppendUint(out, h, 10)
	}
	return append(out, "]}"...)
}

// lead is how long before a request is due the oracle is asked about it.
func (o *oracle) lead() time.Duration {
	if o == nil {
		return 0
	}
	return oracleLead
}

// ask returns the most prompt tokens that any rank has cached, or -1 if that cannot be had, but not
// before due.
func (o *oracle) ask(ctx context.Context, question []byte, due time.Time) int {
	if o == nil {
		return -1
	}
	n, err := o.cached(ctx, question)
	if err != nil {
		n = -1
	}
	wait(ctx, due)
	return n
}

// wait returns at due, or when ctx ends.
func wait(ctx context.Context, due time.Time) {
	timer := time.NewTimer(time.Until(due))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

func (o *oracle) cached(ctx context.Context, question []byte) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, oracleLimit)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, o.url, bytes.NewReader(question))
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := o.transport.RoundTrip(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("status %d", resp.StatusCode)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return 0, err
	}
	var answer struct {
		Most *int `json:"most"`
	}
	if err := json.Unmarshal(text, &answer); err != nil {
		return 0, err
	}
	if answer.Most == nil {
		return 0, errors.New("no most in the answer")
	}
	return *answer.Most * oracleBlock, nil
}

// Oracle compares the cache hits of a run with the best there was: at each arrival, the longest
// cached prefix on any rank. It counts completed requests for which both are known.
type Oracle struct {
	Requests     int     `json:"requests"`
	Unknown      int     `json:"unknown"`       // completed, but the workers could not be asked, or told no usage
	CachedTokens int     `json:"cached_tokens"` // that the requests found
	BestTokens   int     `json:"best_tokens"`   // that any rank had
	BestShare    float64 `json:"best_share"`    // of their prompt tokens
	OfBest       float64 `json:"of_best"`       // CachedTokens over BestTokens

	prompt int
}

func (o *Oracle) add(best int, s *stream) {
	if best < 0 || !s.hasUsage {
		o.Unknown++
		return
	}
	o.Requests++
	o.CachedTokens += s.usage.Details.CachedTokens
	o.BestTokens += best
	o.prompt += s.usage.PromptTokens
}

func (o *Oracle) report() *Oracle {
	if o == nil {
		return nil
	}
	r := *o
	r.BestShare = over(float64(r.BestTokens), float64(r.prompt))
	r.OfBest = over(float64(r.CachedTokens), float64(r.BestTokens))
	return &r
}

// endlessCacheShare is what of the prompt tokens one worker could find cached that never forgets
// anything and has computed each prompt before the next one comes: a bound for any choice of
// workers. Prompts are taken in the order of reqs.
func endlessCacheShare(reqs []Request) float64 {
	type node struct {
		parent int
		block  uint64
	}
	seen := map[node]int{}
	prompt, cached := 0, 0
	for i := range reqs {
		r := &reqs[i]
		prompt += r.ISLTokens
		if r.Blocks == nil {
			continue // shares nothing
		}
		at, hit := 0, true
		for n, b := range r.Blocks {
			next, known := seen[node{at, b}]
			if hit = hit && known; hit {
				cached += min(BlockTokens, r.ISLTokens-n*BlockTokens)
			}
			if !known {
				next = len(seen) + 1
				seen[node{at, b}] = next
			}
			at = next
		}
	}
	return over(float64(cached), float64(prompt))
}
