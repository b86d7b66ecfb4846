package monitor

import "spillway/worker"

// trtllm is how TensorRT-LLM writes its page: by itself, in some releases without the prefix,
// or behind Triton.
func trtllm() *dialect {
	n := func(name string) []string { return []string{"trtllm_" + name, name} }
	kv := func(r role, is string) spec {
		return spec{r, []string{"nv_trt_llm_kv_cache_block_metrics"}, []worker.Label{{Name: "kv_cache_block_type", Value: is}}}
	}
	requests := func(r role, is string) spec {
		return spec{r, []string{"nv_trt_llm_request_metrics"}, []worker.Label{{Name: "request_type", Value: is}}}
	}
	m := newMapping(mapping{specs: []spec{
		{role: asRatio, names: n("kv_cache_utilization")},
		{role: asTotalBlocks, names: n("kv_cache_max_blocks")},
		{role: asBlockSize, names: n("kv_cache_tokens_per_block")},
		{role: asRunning, names: n("num_requests_running")},
		{role: asWaiting, names: n("num_requests_waiting")},
		{role: asCounter, names: []string{"trtllm_request_success_total"}},
		kv(asRatio, "fraction"), kv(asTotalBlocks, "max"), kv(asUsedBlocks, "used"), kv(asBlockSize, "tokens_per"),
		requests(asRunning, "scheduled"), requests(asWaiting, "waiting"),
	}})
	return &dialect{prefixes: []string{"trtllm_", "nv_trt_llm_"}, usage: "trtllm_kv_cache_utilization", read: m.read}
}

// custom is the page of an engine that the operator has described. c must be valid.
func custom(c worker.Custom) *dialect {
	m := mapping{rankLabel: c.RankLabel, sizeLabel: c.BlockSizeLabel, totalLabel: c.NumBlocksLabel}
	d := &dialect{}
	for _, want := range []struct {
		role role
		text string
	}{
		{asRatio, c.KVUsage}, {asUsedBlocks, c.KVUsedBlocks}, {asUsedTokens, c.KVUsedTokens},
		{asTotalBlocks, c.KVTotalBlocks}, {asTotalTokens, c.KVTotalTokens}, {asBlockSize, c.BlockSize},
		{asRunning, c.Running}, {asWaiting, c.Waiting}, {asPrefillTokens, c.PrefillTokens}, {asCapacityLabels, c.CacheInfo},
	} {
		s, err := worker.ParseSeries(want.text)
		if err != nil {
			continue // it is not there: what is there has been checked with the record
		}
		m.specs = append(m.specs, spec{want.role, []string{s.Name}, s.Labels})
		if d.usage == "" {
			d.usage = want.text
		}
	}
	d.read = newMapping(m).read
	return d
}
