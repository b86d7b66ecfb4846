package sim

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// promptBuckets are the bounds of vllm:request_prompt_tokens.
func promptBuckets() [16]int {
	return [...]int{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000}
}

// promptLengths is a histogram of the prompt tokens of finished requests.
type promptLengths struct {
	buckets    [16]uint64 // by the bounds of promptBuckets, not cumulative
	sum, count uint64
}

func (p *promptLengths) add(tokens int) {
	p.sum += uint64(tokens)
	p.count++
	for i, bound := range promptBuckets() {
		if tokens <= bound {
			p.buckets[i]++
			return
		}
	}
}

// metrics serves GET /metrics: the worker's state under vLLM's names in the text format, read
// when it is asked for.
func (w *worker) metrics(rw http.ResponseWriter, _ *http.Request) error {
	snaps := make([]*snapshot, len(w.ranks))
	for i, r := range w.ranks {
		snaps[i] = r.snapshot()
	}
	p := &page{model: labelEscaper().Replace(w.server.cfg.Model), snaps: snaps}
	p.perRank("vllm:kv_cache_usage_perc", "gauge", "Share of the KV blocks that requests refer to, 0 to 1.",
		func(s *snapshot) float64 { return float64(s.engine.UsedBlocks) / float64(s.blocks) })
	p.perRank("vllm:num_requests_running", "gauge", "Requests that hold a sequence slot.",
		func(s *snapshot) float64 { return float64(s.engine.Running()) })
	p.perRank("vllm:num_requests_waiting", "gauge", "Requests that wait for a slot or for blocks.",
		func(s *snapshot) float64 { return float64(s.engine.Waiting) })
	p.perRank("vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache.",
		func(s *snapshot) float64 { return float64(s.engine.QueryTokens) })
	p.perRank("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.",
		func(s *snapshot) float64 { return float64(s.engine.HitTokens) })
	p.perRank("vllm:num_preemptions_total", "counter", "Sequences sent back to the queue for want of blocks.",
		func(s *snapshot) float64 { return float64(s.engine.Preemptions) })
	p.perRank("vllm:prompt_tokens_total", "counter", "Tokens of the prompts computed.",
		func(s *snapshot) float64 { return float64(s.engine.PromptTokens) })
	p.perRank("vllm:generation_tokens_total", "counter", "Tokens generated.",
		func(s *snapshot) float64 { return float64(s.engine.GeneratedTokens) })
	p.promptLengths()
	cfg := w.server.cfg
	p.head("vllm:cache_config_info", "gauge", "The KV cache; num_gpu_blocks is the sum over all ranks.")
	for dp := range snaps {
		p.printf("vllm:cache_config_info{block_size=\"%d\",enable_prefix_caching=\"True\",engine=\"%d\",num_gpu_blocks=\"%d\"} 1\n",
			cfg.BlockSize, dp, cfg.KVBlocks*cfg.DPSize)
	}
	p.head("process_start_time_seconds", "gauge", "Unix time at which the worker started.")
	p.printf("process_start_time_seconds %.3f\n", float64(w.server.started.UnixMilli())/1000)
	rw.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	if _, err := rw.Write(p.text); err != nil {
		return fmt.Errorf("%w: %w", errCut, err)
	}
	return nil
}

// page is a metrics page in the making.
type page struct {
	model string // escaped
	snaps []*snapshot
	text  []byte
}

func (p *page) printf(format string, args ...any) { p.text = fmt.Appendf(p.text, format, args...) }

func (p *page) head(name, kind, help string) {
	p.printf("# HELP %s %s\n# TYPE %s %s\n", name, help, name, kind)
}

// perRank adds a metric with a value for each rank.
func (p *page) perRank(name, kind, help string, value func(*snapshot) float64) {
	p.head(name, kind, help)
	for dp, s := range p.snaps {
		p.printf("%s{engine=\"%d\",model_name=\"%s\"} %s\n", name, dp, p.model, strconv.FormatFloat(value(s), 'g', -1, 64))
	}
}

func (p *page) promptLengths() {
	const name = "vllm:request_prompt_tokens"
	p.head(name, "histogram", "Prompt tokens of finished requests.")
	for dp, s := range p.snaps {
		l := &s.tally.promptLengths
		labels := fmt.Sprintf("engine=\"%d\",model_name=\"%s\"", dp, p.model)
		sum := uint64(0)
		for i, bound := range promptBuckets() {
			sum += l.buckets[i]
			p.printf("%s_bucket{%s,le=\"%d.0\"} %d\n", name, labels, bound, sum)
		}
		p.printf("%s_bucket{%s,le=\"+Inf\"} %d\n%s_sum{%s} %d\n%s_count{%s} %d\n",
			name, labels, l.count, name, labels, l.sum, name, labels, l.count)
	}
}

func labelEscaper() *strings.Replacer {
	return strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)
}
