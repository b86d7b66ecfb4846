package proxy

import (
	"strings"
	"sync"
	"time"

	"spillway/kvhash"
	"spillway/kvindex"
)

// prefix is what mode kv knows of the prompt of a request: its tokens, the hashes of its blocks, and how
// many of them ranks have. It is used again by other requests.
type prefix struct {
	source tokenSource
	exact  bool   // the hashes are of the tokens that the worker will see
	size   uint32 // tokens per block
	cache  *cache // of the partition, nil if caches do not count
	words  int    // of the text that was hashed in place of tokens, 0 if none was

	locals, seqs []uint64 // of complete blocks; none if there is nothing to ask
	ids          []uint32
	text         kvhash.Text
	matches      kvindex.Matches
}

// tokenSource is where the number of prompt tokens is from.
type tokenSource uint8

const (
	fromEstimate  tokenSource = iota // of the length of the text
	fromBody                         // the body has token IDs
	fromTokenizer                    // it told the tokens
	fromCount                        // it told how many there are
	numTokenSources
)

var tokenSources = [numTokenSources]string{"estimate", "body", "tokenizer", "count"}

// maxPrefix bounds the blocks of a prompt that are hashed: a million tokens in the usual ones. What is
// beyond counts as not cached.
const maxPrefix = 1 << 16

// prefixes are those that are not in use.
var prefixes = sync.Pool{New: func() any { return new(prefix) }}

// maxKept bounds the memory of one of them, in blocks.
const maxKept = 1 << 13

// forget gives the prefix back. Nobody may look at the hashes any more.
func (x *exchange) forget() {
	k := x.prefix
	if k == nil {
		return
	}
	x.prefix, x.query.SequenceHashes, x.query.Overlaps = nil, nil, nil
	if cap(k.locals) <= maxKept && cap(k.text.Blocks()) <= maxKept && cap(k.ids) <= maxKept*defaultBlockSize {
		k.source, k.exact, k.cache, k.words = fromEstimate, false, nil, 0
		k.locals, k.seqs = k.locals[:0], k.seqs[:0]
		prefixes.Put(k)
	}
}

// inform has the query say what ranks have of the prompt, in mode kv. What a request costs that nobody can
// take must be little, so that is found out first; the error is then why. It returns what time it is.
func (x *exchange) inform(now time.Time) (time.Time, error) {
	if !x.s.kv || x.hopeless {
		return now, nil
	}
	if err := x.target.Partition.Outlook(&x.query, x.mayWait, now); err != nil {
		return now, err
	}
	k := x.prefix
	if k == nil {
		k = prefixes.Get().(*prefix)
		x.prefix = k
		x.hash(k)
	}
	if k.cache != nil && len(k.locals) > 0 {
		from := time.Now()
		x.query.Overlaps = k.match(x.query.PromptTokens)
		now = time.Now()
		x.s.metrics.matching.observe(int64(now.Sub(from)), 1)
		return now, nil
	}
	return time.Now(), nil
}

// match asks the index how much of a prompt of so many tokens ranks have.
func (k *prefix) match(tokens uint64) *kvindex.Matches {
	k.cache.blocks.Index.QueryChained(k.locals, k.seqs, &k.matches)
	if k.words == 0 {
		return &k.matches
	}
	// Blocks were of text, which has more words than tokens, or fewer: the part of it counts.
	scale, most := float64(tokens)/float64(k.words), int(min(tokens/uint64(k.size), maxPrefix))
	for i := range k.matches.Ranks {
		m := &k.matches.Ranks[i]
		m.Device = min(int(float64(m.Device)*scale), most)
	}
	return &k.matches
}

// hash finds out what the tokens of the prompt are, and hashes its blocks where anybody asks for that.
func (x *exchange) hash(k *prefix) {
	q := &x.query
	k.cache = x.s.caches.of(x.target.Partition.Key)
	k.size = x.blockSize(k.cache)
	// The books hold blocks once that requests have in common.
	shares := x.s.cost.TrackActiveBlocks && x.s.cost.AssumeKVReuse
	if x.ep.decodes && !x.scan.several() && (k.cache != nil || shares) {
		ids := x.tokens(k)
		from := time.Now()
		o := kvhash.Options{BlockSize: int(k.size), LoRA: x.adapter(), Salt: x.salt()}
		switch {
		case ids != nil:
			k.exact = true
			k.locals = kvhash.AppendBlocks(k.locals[:0], ids[:min(len(ids), maxPrefix*int(k.size))], o)
		case k.cache != nil && !k.cache.byEvents.Load():
			k.text.Reset(o, maxPrefix)
			x.scan.write(x.body, &k.text)
			k.locals = append(k.locals[:0], k.text.Blocks()...)
			k.words = max(k.text.Tokens(), 1)
		}
		between := time.Now()
		k.seqs = kvhash.AppendSequences(k.seqs[:0], k.locals)
		x.s.metrics.hashing.observe(int64(between.Sub(from)), 1)
		x.s.metrics.chaining.observe(int64(time.Since(between)), 1)
	} else if x.scan.exactTokens() {
		k.source = fromBody
	}
	x.model.metrics.tokensFrom[k.source].Add(1)
	q.BlockSize, q.PrivateBlocks = k.size, q.PromptTokens/uint64(k.size)
	if k.exact && shares {
		q.SequenceHashes = k.seqs
		q.PrivateBlocks -= min(q.PrivateBlocks, uint64(len(k.seqs)))
	}
}

// tokens returns the tokens of the prompt, or as many as are hashed, if they are known exactly, else nil.
// PromptTokens is as exact as it can be from then on.
func (x *exchange) tokens(k *prefix) []uint32 {
	if x.scan.exactTokens() {
		k.source = fromBody
		var ok bool
		if k.ids, ok = x.scan.appendIDs(k.ids[:0], x.body, maxPrefix*int(k.size)); ok {
			return k.ids
		}
		return nil
	}
	if x.s.tokenizer.Tokenize == nil || x.ep.dialect != openAI || x.scan.promptEmbeds.given() {
		return nil
	}
	t := x.s.tokenizer.Tokenize(x.ctx, Prompt{
		Partition: x.target.Partition.Key, Served: x.target.Served, Chat: x.ep == &endpoints[chatCompletions], Body: x.body,
	})
	switch {
	case len(t.IDs) > 0:
		k.source, t.Count = fromTokenizer, uint64(len(t.IDs))
	case t.Count > 0:
		k.source = fromCount
	default:
		return nil
	}
	x.query.PromptTokens = t.Count
	if !t.Rough {
		x.tokenized = t.Count
	}
	return t.IDs
}

// blockSize is how many tokens the blocks of the partition have.
func (x *exchange) blockSize(c *cache) uint32 {
	if c != nil {
		return c.size.Load()
	}
	busy := x.target.Partition.Busy
	if all := busy.Snapshot().Registered; len(all) > 0 {
		return busy.BlockSize(all[0])
	}
	return defaultBlockSize
}

// defaultBlockSize is that of engines which have not told theirs, in tokens.
const defaultBlockSize = 16

// adapter is the LoRA adapter that is asked for, "" for none. Until a worker has told whether a further name
// of it is an alias or an adapter it counts as one: then prompts are only told apart that need not be.
func (x *exchange) adapter() string {
	if x.target.Adapter {
		return x.target.Served
	}
	return ""
}

// saltTag marks in an engine's events the cache salt of a request: see the key cache_salt.
const saltTag = "dynamo-cache-salt:"

// salt keeps what is cached apart: as the body says, else by tenant.
func (x *exchange) salt() string {
	if x.scan.salt.size() > 0 {
		return strings.TrimPrefix(x.scan.salt.string(), saltTag)
	}
	return x.tenantSalt()
}

// tenantSalt is the tenant, if that has no partition of its own.
func (x *exchange) tenantSalt() string {
	if x.tenant == x.target.Partition.Key.Tenant {
		return ""
	}
	return x.tenant
}

// conclude notes that the prompt will be cached where it has been booked, unless engines tell.
func (x *exchange) conclude(now time.Time) {
	k := x.prefix
	if k == nil || k.cache == nil {
		return
	}
	x.s.metrics.hitRate.observe(int64(1e6*float64(min(x.sel.CachedTokens, x.query.PromptTokens))/float64(max(x.query.PromptTokens, 1))), 1)
	if len(k.locals) == 0 || k.cache.byEvents.Load() || k.cache.size.Load() != k.size {
		return
	}
	status, err := k.cache.routed.Record(x.sel.Booked, k.locals, k.seqs, now)
	if err != nil || status == kvindex.Full {
		x.s.metrics.unrecorded.Add(1)
	}
}

// promised is the prompt tokens that the rank has been promised to compute.
func (x *exchange) promised() uint64 {
	switch {
	case !x.s.kv:
		return x.query.PromptTokens
	case x.sel.TracksPrefill:
		return x.sel.EffectivePrefillTokens
	}
	return 0
}
