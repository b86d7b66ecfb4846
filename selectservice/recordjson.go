package selectservice

import (
	"maps"
	"slices"
	"strconv"

	"spillway/jsonhttp"
)

// appendRecord appends a record as clients see it. What was not said is null, but for what a
// client of the original does not expect.
func appendRecord(b []byte, r *record, tenant string) []byte {
	b = jsonhttp.AppendUint(b, `{"worker_id":`, r.id)
	b = jsonhttp.AppendText(append(b, `,"model_name":`...), r.model)
	b = jsonhttp.AppendText(append(append(append(b, `,"`...), tenant...), `":`...), r.tenant)
	b = jsonhttp.AppendText(append(b, `,"lifecycle":`...), string(r.lifecycle))
	b = appendString(append(b, `,"endpoint":`...), r.endpoint)
	b = appendString(append(b, `,"kv_events_endpoint":`...), r.events)
	b = appendByRank(b, `,"kv_events_endpoints":`, r.eventsByRank)
	b = appendString(append(b, `,"replay_endpoint":`...), r.replay)
	b = appendByRank(b, `,"replay_endpoints":`, r.replayByRank)
	b = appendNumber(append(b, `,"block_size":`...), r.blockSize)
	b = appendNumber(append(b, `,"data_parallel_start_rank":`...), r.dpStart)
	b = appendNumber(append(b, `,"data_parallel_size":`...), r.dpSize)
	b = appendNumber(append(b, `,"max_num_batched_tokens":`...), r.maxBatched)
	b = appendNumber(append(b, `,"total_kv_blocks":`...), r.totalBlocks)
	b = appendString(append(b, `,"stable_routing_id":`...), r.stableID)
	b = append(b, `,"is_eagle":`...)
	if r.eagle == nil {
		b = append(b, `null`...)
	} else {
		b = strconv.AppendBool(b, *r.eagle)
	}
	b = appendStrings(append(b, `,"taints":`...), r.taints)
	b = append(b, `,"topology_domains":{`...)
	for i, key := range slices.Sorted(maps.Keys(r.domains)) {
		if i > 0 {
			b = append(b, ',')
		}
		b = jsonhttp.AppendText(append(jsonhttp.AppendText(b, key), ':'), r.domains[key])
	}
	b = appendString(append(b, `},"kv_transfer_domain":`...), r.domain)
	b = appendString(append(b, `,"kv_transfer_enforcement":`...), r.enforcement)
	b = append(b, `,"kv_transfer_preferred_weight":`...)
	if r.weight == nil {
		b = append(b, `null`...)
	} else {
		b = appendFloat(b, *r.weight)
	}
	if len(r.reasons) > 0 {
		b = appendStrings(append(b, `,"not_schedulable_reasons":`...), r.reasons)
	}
	return append(b, '}')
}

func appendString(b []byte, s *string) []byte {
	if s == nil {
		return append(b, `null`...)
	}
	return jsonhttp.AppendText(b, *s)
}

func appendNumber[N uint32 | uint64](b []byte, n *N) []byte {
	if n == nil {
		return append(b, `null`...)
	}
	return strconv.AppendUint(b, uint64(*n), 10)
}

func appendFloat(b []byte, v float64) []byte { return strconv.AppendFloat(b, v, 'g', -1, 64) }

func appendStrings(b []byte, all []string) []byte {
	b = append(b, '[')
	for i, s := range all {
		if i > 0 {
			b = append(b, ',')
		}
		b = jsonhttp.AppendText(b, s)
	}
	return append(b, ']')
}

func appendByRank(b []byte, before string, all map[uint32]string) []byte {
	if len(all) == 0 {
		return b
	}
	b = append(append(b, before...), '{')
	for i, dp := range slices.Sorted(maps.Keys(all)) {
		b = jsonhttp.AppendText(appendKey(b, i, dp), all[dp])
	}
	return append(b, '}')
}

// appendKey appends the i-th name of an object, which is a number.
func appendKey(b []byte, i int, n uint32) []byte {
	if i > 0 {
		b = append(b, ',')
	}
	return append(strconv.AppendUint(append(b, '"'), uint64(n), 10), `":`...)
}
