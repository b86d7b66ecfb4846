package monitor

import (
	"maps"
	"math"
	"slices"
	"strconv"

	"github.com/zeebo/xxh3"

	"spillway/worker"
)

// The names of a vLLM page that are decoded.
const (
	vllmUsage metric = iota + 1
	vllmOldUsage
	vllmRunning
	vllmWaiting
	vllmCacheInfo
	vllmPreemptions // this and the next two show by falling that the process is a new one
	vllmPromptTokens
	vllmGenerationTokens
	vllmPromptSum
	vllmPromptCount
	vllmSleep
	processStart
)

func vllmName(name []byte) metric {
	switch string(name) {
	case "vllm:kv_cache_usage_perc":
		return vllmUsage
	case "vllm:gpu_cache_usage_perc": // before 0.9; the same value where both are present
		return vllmOldUsage
	case "vllm:num_requests_running":
		return vllmRunning
	case "vllm:num_requests_waiting":
		return vllmWaiting
	case "vllm:cache_config_info":
		return vllmCacheInfo
	case "vllm:num_preemptions_total":
		return vllmPreemptions
	case "vllm:prompt_tokens_total":
		return vllmPromptTokens
	case "vllm:generation_tokens_total":
		return vllmGenerationTokens
	case "vllm:request_prompt_tokens_sum":
		return vllmPromptSum
	case "vllm:request_prompt_tokens_count":
		return vllmPromptCount
	case "vllm:engine_sleep_state":
		return vllmSleep
	case "process_start_time_seconds":
		return processStart
	}
	return none
}

// maxSeries bounds the wanted series of one page: all ranks that a worker may have, each with
// every wanted metric twice. What is beyond is left out and the page counts as invalid.
const maxSeries = 24 * worker.MaxReportedRanks

// maxCount bounds counts and capacities, so that no number of a page overflows ours.
const maxCount = 1 << 53

// page is what one page says, with the series of one metric and rank combined.
type page struct {
	ranks     []rankPage // by DP, which is the engine's own label
	asleep    bool       // the engine says that it is not awake
	start     float64    // when the process began, Unix seconds; 0: not said
	counters  map[uint64]float64
	invalid   bool // something wanted was malformed, not finite, negative or too much
	truncated bool // the page ended inside a line
	known     bool // something wanted was there, sound or not
}

// rankPage is one rank's part of a page. Nil and 0 are: not said.
type rankPage struct {
	dp                     uint32
	ratio                  *float64 // KV cache in use, 0 to 1
	used                   *uint64  // KV blocks in use
	total                  uint64   // KV blocks of this rank
	usedTokens             *uint64  // for engines that count tokens instead of blocks
	totalTokens            *uint64  // the same
	blockSize              uint64   // tokens per block
	running, waiting       *uint64  // requests
	prefill                *uint64  // prompt tokens that wait for prefill
	promptSum, promptCount *uint64  // tokens, requests: of all finished ones
}

// vllmReader collects the series of one page.
type vllmReader struct {
	page
	ranks  map[uint32]*vllmRank
	counts map[countKey]*count
	infos  map[uint32]cacheInfo
	bare   bool // a cache_config_info had no engine label
	seen   int
	slept  bool // engine_sleep_state was there
	awake  bool
}

type vllmRank struct{ usage, oldUsage *float64 }

type cacheInfo struct{ blocks, blockSize uint64 } // 0: not known

// countKey is what a count is summed over or not: model names are summed, processes and
// tensor or pipeline ranks repeat the same number, so the greatest is taken.
type countKey struct {
	metric metric
	dp     uint32
	model  string
}

type count struct {
	total      float64
	hasTotal   bool
	byPriority map[string]float64 // used only if there is no total
}

// readVLLM reads a page of a vLLM server. A page that is no such thing has no ranks.
func readVLLM(body []byte) page {
	r := vllmReader{
		ranks: map[uint32]*vllmRank{}, counts: map[countKey]*count{}, infos: map[uint32]cacheInfo{},
	}
	sc := scanner{rest: body, name: vllmName}
	for s, ok := sc.next(); ok; s, ok = sc.next() {
		r.known = r.known || s.metric != processStart
		if r.seen++; r.seen > maxSeries || !r.add(s) {
			r.invalid = true
		}
		if r.seen > maxSeries {
			break
		}
	}
	r.known = r.known || sc.malformed > 0
	r.invalid = r.invalid || sc.malformed > 0 || sc.truncated
	r.truncated = sc.truncated
	r.asleep = r.slept && !r.awake
	r.combine()
	return r.page
}

// add takes one series, or reports false if it makes no sense.
func (r *vllmReader) add(s series) bool {
	dp, ok := engineOf(s)
	if !ok {
		return false
	}
	finite := s.value >= 0 && s.value <= math.MaxFloat64
	switch s.metric {
	case vllmUsage, vllmOldUsage, vllmRunning, vllmWaiting:
		if !r.know(dp) { // also if the value is unusable: the rank is there
			return false
		}
	}
	if !finite {
		return false
	}
	switch s.metric {
	case vllmUsage:
		raise(&r.ranks[dp].usage, s.value)
	case vllmOldUsage:
		raise(&r.ranks[dp].oldUsage, s.value)
	case vllmRunning, vllmWaiting, vllmPromptSum, vllmPromptCount:
		return r.count(s, dp)
	case vllmCacheInfo:
		return r.info(s, dp)
	case vllmPreemptions, vllmPromptTokens, vllmGenerationTokens:
		if r.counters == nil {
			r.counters = map[uint64]float64{}
		}
		r.counters[xxh3.HashSeed(s.labels, uint64(s.metric))] = s.value
	case vllmSleep:
		if state, _ := s.label("sleep_state"); string(state) == "awake" {
			r.slept = true
			r.awake = r.awake || s.value > 0
		}
	case processStart:
		r.start = max(r.start, s.value)
	}
	return true
}

// engineOf is the rank that a series is about: 0 if it names none.
func engineOf(s series) (uint32, bool) {
	label, _ := s.label("engine")
	return parseRank(label)
}

func (r *vllmReader) know(dp uint32) bool {
	if r.ranks[dp] == nil {
		if len(r.ranks) == worker.MaxReportedRanks {
			return false
		}
		r.ranks[dp] = &vllmRank{}
	}
	return true
}

func (r *vllmReader) count(s series, dp uint32) bool {
	if s.value > maxCount {
		return false
	}
	model, _ := s.label("model_name")
	key := countKey{s.metric, dp, string(model)}
	if r.counts[key] == nil {
		r.counts[key] = &count{}
	}
	r.counts[key].add(s)
	return true
}

// add takes one more series of the count. The series with an empty priority, or none, is the
// total over priorities.
func (c *count) add(s series) {
	priority, _ := s.label("priority")
	if len(priority) == 0 {
		c.total, c.hasTotal = max(c.total, s.value), true
		return
	}
	if c.byPriority == nil {
		c.byPriority = map[string]float64{}
	}
	c.byPriority[string(priority)] = max(c.byPriority[string(priority)], s.value)
}

// info takes the capacity out of the labels. The word None stands for what vLLM does not
// know (yet).
func (r *vllmReader) info(s series, dp uint32) bool {
	label, labelled := s.label("engine")
	r.bare = r.bare || !labelled || len(label) == 0
	if _, ok := r.infos[dp]; !ok && len(r.infos) == worker.MaxReportedRanks {
		return false
	}
	blocks, ok1 := infoNumber(s, "num_gpu_blocks")
	size, ok2 := infoNumber(s, "block_size")
	had := r.infos[dp]
	r.infos[dp] = cacheInfo{max(had.blocks, blocks), max(had.blockSize, size)}
	return ok1 && ok2
}

func infoNumber(s series, name string) (uint64, bool) {
	label, ok := s.label(name)
	if !ok || len(label) == 0 || string(label) == "None" {
		return 0, true
	}
	n, err := strconv.ParseUint(string(label), 10, 64)
	if err != nil || n > maxCount {
		return 0, false
	}
	return n, true
}

// combine makes the ranks of the page from what was collected.
func (r *vllmReader) combine() {
	dps := slices.Sorted(maps.Keys(r.ranks))
	if len(dps) == 0 {
		dps = slices.Sorted(maps.Keys(r.infos))
	}
	r.page.ranks = make([]rankPage, len(dps))
	at := make(map[uint32]*rankPage, len(dps))
	for i, dp := range dps {
		p := &r.page.ranks[i]
		p.dp = dp
		if v := r.ranks[dp]; v != nil {
			if p.ratio = v.usage; p.ratio == nil {
				p.ratio = v.oldUsage
			}
		}
		p.total, p.blockSize = r.capacity(dp, len(dps))
		at[dp] = p
	}
	for key, c := range r.counts {
		p := at[key.dp]
		if p == nil {
			continue // prompt statistics alone make no rank
		}
		switch key.metric {
		case vllmRunning:
			p.running = c.addTo(p.running)
		case vllmWaiting:
			p.waiting = c.addTo(p.waiting)
		case vllmPromptSum:
			p.promptSum = c.addTo(p.promptSum)
		case vllmPromptCount:
			p.promptCount = c.addTo(p.promptCount)
		}
	}
}

// capacity is the KV blocks of one rank of so many, and its block size; 0 is unknown. vLLM
// repeats under every engine the sum over the engines of its process, so it is divided.
func (r *vllmReader) capacity(dp uint32, ranks int) (blocks, blockSize uint64) {
	info, ok := r.infos[dp]
	if !ok && len(r.infos) == 1 && (ranks == 1 || r.bare) {
		for _, only := range r.infos { // whatever it calls itself
			info = only
		}
	}
	if r.bare && ranks > 1 {
		return 0, info.blockSize // whose blocks these are is not said
	}
	if info.blocks == 0 {
		return 0, info.blockSize
	}
	return max(1, info.blocks/uint64(len(r.infos))), info.blockSize
}

// addTo adds the count of one model name to sum, which is nil before the first.
func (c *count) addTo(sum *uint64) *uint64 {
	v := c.total
	if !c.hasTotal {
		for _, n := range c.byPriority {
			v += n
		}
	}
	n := uint64(math.Round(min(v, maxCount)))
	if sum != nil {
		n = min(n+*sum, maxCount)
	}
	return &n
}

func raise(to **float64, v float64) {
	if *to == nil || v > **to {
		*to = &v
	}
}
