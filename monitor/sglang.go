package monitor

import (
	"bytes"
	"encoding/json"
	"math"
	"slices"

	"spillway/worker"
)

// sglang is how SGLang writes its page. prefix is "sglang:", or "sglang_" where an exporter has
// replaced what other systems do not allow in names.
func sglang(prefix string) *dialect {
	n := func(names ...string) []string {
		for i := range names {
			names[i] = prefix + names[i]
		}
		return names
	}
	m := newMapping(mapping{rankLabel: "dp_rank", sizeLabel: "page_size", totalLabel: "num_pages", specs: []spec{
		{role: asRatio, names: n("token_usage")},
		{role: asFullRatio, names: n("full_token_usage")},
		{role: asOtherRatio, names: n("swa_token_usage", "mamba_usage")},
		{role: asUsedTokens, names: n("kv_used_tokens")},
		{role: asOldUsedTokens, names: n("num_used_tokens")},
		{role: asTotalTokens, names: n("max_total_num_tokens")},
		{role: asTotalBlocks, names: n("num_pages")},
		{role: asBlockSize, names: n("page_size")},
		{role: asCapacityLabels, names: n("cache_config_info")},
		{role: asRunning, names: n("num_running_reqs")},
		{role: asWaiting, names: n("num_queue_reqs")},
		{role: asWaiting, names: n("num_prefill_prealloc_queue_reqs")},
		{role: asWaiting, names: n("num_prefill_inflight_queue_reqs")},
		{role: asWaiting, names: n("num_decode_prealloc_queue_reqs")},
		{role: asWaiting, names: n("num_decode_transfer_queue_reqs")},
		{role: asCounter, names: n("prompt_tokens_total")},
		{role: asCounter, names: n("generation_tokens_total")},
		{role: asCounter, names: n("num_requests_total")},
	}})
	return &dialect{prefixes: []string{prefix}, usage: prefix + "token_usage", read: m.read, asksServer: true}
}

// sglangLoads is SGLang's answer to /v1/loads, which it gives also where metrics are off.
var sglangLoads = &dialect{usage: "loads with token_usage", read: readLoads, asksServer: true}

const loadsPath = "/v1/loads?include=core,queues,disagg,memory"

// sglangHint is for the log where an SGLang server has no metrics page.
const sglangHint = "SGLang serves /metrics only when asStart with --enable-metrics"

// maxLoads bounds an answer to /v1/loads: 1 KiB for each rank that a worker may have.
const maxLoads = worker.MaxReportedRanks << 10

// readLoads reads an answer to /v1/loads. Some builds say 0 for what they leave out.
func readLoads(body []byte) page {
	var answer struct {
		Loads []struct {
			DP            *float64 `json:"dp_rank"`
			Running       *float64 `json:"num_running_reqs"`
			Waiting       *float64 `json:"num_waiting_reqs"`
			PrefillTokens *float64 `json:"num_waiting_uncached_tokens"`
			UsedTokens    *float64 `json:"num_used_tokens"`
			TotalTokens   *float64 `json:"max_total_num_tokens"`
			Usage         *float64 `json:"token_usage"`
		} `json:"loads"`
	}
	if len(body) > maxLoads {
		return page{invalid: true}
	}
	if err := json.Unmarshal(body, &answer); err != nil || answer.Loads == nil {
		return page{invalid: err != nil && !bytes.HasPrefix(bytes.TrimSpace(body), []byte("<"))}
	}
	p := page{known: true}
	seen := map[uint32]bool{}
	for _, l := range answer.Loads {
		dp := uint32(0)
		if l.DP != nil {
			if *l.DP != math.Trunc(*l.DP) || *l.DP < 0 || *l.DP >= worker.AnyDP {
				p.invalid = true
				continue
			}
			dp = uint32(*l.DP)
		}
		if seen[dp] || len(seen) == worker.MaxReportedRanks {
			p.invalid = true
			continue
		}
		seen[dp] = true
		r := rankPage{
			dp: dp, ratio: p.ratio(l.Usage), running: p.count(l.Running), waiting: p.count(l.Waiting),
			prefill: p.count(l.PrefillTokens),
		}
		if total := p.count(l.TotalTokens); total != nil && *total > 0 {
			r.totalTokens, r.usedTokens = total, p.count(l.UsedTokens)
		}
		p.ranks = append(p.ranks, r)
	}
	slices.SortFunc(p.ranks, func(a, b rankPage) int { return int(int64(a.dp) - int64(b.dp)) })
	return p
}

// count is a count of the page, or nil if there is none that makes sense.
func (p *page) count(v *float64) *uint64 {
	if v == nil {
		return nil
	}
	if *v < 0 || *v > maxCount {
		p.invalid = true
		return nil
	}
	return whole(v)
}

// ratio is a fraction of the page, or nil if there is none that makes sense.
func (p *page) ratio(v *float64) *float64 {
	if v != nil && *v < 0 {
		p.invalid = true
		return nil
	}
	return v
}

// serverInfo is what an SGLang server tells of its settings. The zero value is unknown.
type serverInfo struct {
	batchedTokens uint64 // M, or 0
	pageSize      uint64 // tokens per block, or 0
	told          bool   // the server was asked and has answered, if only that it does not tell
}

// readServerInfo reads an answer to /get_server_info.
func readServerInfo(body []byte) (serverInfo, error) {
	var answer struct {
		MaxPrefillTokens  *float64 `json:"max_prefill_tokens"`
		MaxTotalNumTokens *float64 `json:"max_total_num_tokens"`
		PageSize          *float64 `json:"page_size"`
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return serverInfo{}, err
	}
	number := func(v *float64) uint64 {
		if v == nil || !(*v >= 1 && *v <= maxCount) {
			return 0
		}
		return uint64(*v)
	}
	info := serverInfo{batchedTokens: number(answer.MaxPrefillTokens), pageSize: number(answer.PageSize), told: true}
	if info.batchedTokens == 0 {
		info.batchedTokens = number(answer.MaxTotalNumTokens)
	}
	return info, nil
}
