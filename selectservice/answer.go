package selectservice

import (
	"cmp"
	"slices"
	"strconv"

	"spillway/jsonhttp"
	"spillway/kvindex"
	"spillway/router"
)

func (s *Server) appendPartition(b []byte, before string, p *partition) []byte {
	b = jsonhttp.AppendText(append(b, before...), p.key.Model)
	b = append(append(append(b, `,"`...), s.tenant...), `":`...)
	return jsonhttp.AppendText(b, p.key.Tenant)
}

// answer writes a selection to x. reservation is nil if nothing was booked.
func (s *Server) answer(x *exchange, p *partition, rec *record, sel router.Selection, reservation *string) {
	b := append(x.Out, '{')
	selectionID := x.selectionID
	if s.grouped && reservation != nil {
		selectionID = reservation
	}
	if selectionID != nil {
		b = append(jsonhttp.AppendText(append(b, `"selection_id":`...), *selectionID), ',')
	}
	switch {
	case reservation == nil:
	case s.grouped:
		b = append(b, `"sequence_hashes":[`...)
		for i, h := range x.hashed.seqs {
			if i > 0 {
				b = append(b, ',')
			}
			b = strconv.AppendInt(b, int64(h), 10)
		}
		b = jsonhttp.AppendUint(b, `],"isl_tokens":`, x.hashed.isl)
		b = append(strconv.AppendBool(append(b, `,"track_prefill_tokens":`...), sel.TracksPrefill), ',')
	default:
		b = append(jsonhttp.AppendText(append(b, `"reservation_id":`...), *reservation), ',')
	}
	b = s.appendPartition(b, `"model_name":`, p)
	b = jsonhttp.AppendUint(b, `,"worker_id":`, uint64(sel.Rank.Worker))
	b = jsonhttp.AppendUint(b, `,"dp_rank":`, uint64(sel.Rank.DP))
	b = jsonhttp.AppendText(append(b, `,"endpoint":`...), or(rec.endpoint, ""))
	b = jsonhttp.AppendUint(b, `,"block_size":`, uint64(x.ticket.Query.BlockSize))
	b = appendOverlap(append(b, `,"overlap":`...), rec, x.ticket.Query.Overlaps, int(x.ticket.Query.BlockSize))
	b = jsonhttp.AppendUint(b, `,"effective_prefill_tokens":`, sel.EffectivePrefillTokens)
	if x.explain && reservation == nil {
		b = appendTerms(append(b, `,"explain":`...), x.terms)
	}
	x.Out = append(b, '}')
}

// appendOverlap appends what a worker has of a prompt, in tokens.
func appendOverlap(b []byte, rec *record, m *kvindex.Matches, blockSize int) []byte {
	var room [8]kvindex.Match
	of := room[:0]
	var o kvindex.Overlap
	for _, x := range m.Ranks {
		if uint64(x.Rank.Worker) == rec.id {
			of = append(of, x)
			o.Add(x)
		}
	}
	tokens := func(blocks int) uint64 { return uint64(kvindex.Tokens(blocks, blockSize)) }
	b = jsonhttp.AppendUint(b, `{"longest_matched":`, tokens(o.Disk))
	b = jsonhttp.AppendUint(b, `,"gpu":`, tokens(o.GPU))
	b = append(b, `,"dp":{`...)
	slices.SortFunc(of, func(a, b kvindex.Match) int { return cmp.Compare(a.Rank.DP, b.Rank.DP) })
	start, size := rec.ranks()
	for i := range size {
		for len(of) > 0 && of[0].Rank.DP < start+i {
			of = of[1:]
		}
		device := 0
		if len(of) > 0 && of[0].Rank.DP == start+i {
			device = of[0].Device
		}
		b = strconv.AppendUint(appendKey(b, int(i), start+i), tokens(device), 10)
	}
	b = jsonhttp.AppendUint(b, `},"cpu":`, tokens(o.CPU))
	b = jsonhttp.AppendUint(b, `,"disk":`, tokens(o.Disk))
	return append(b, '}')
}

// appendTerms appends how the cost of each candidate came about, in blocks but for tokens.
func appendTerms(b []byte, all []router.Terms) []byte {
	b = append(b, '[')
	for i := range all {
		t := &all[i]
		if i > 0 {
			b = append(b, ',')
		}
		b = jsonhttp.AppendUint(b, `{"worker_id":`, uint64(t.Rank.Worker))
		b = jsonhttp.AppendUint(b, `,"dp_rank":`, uint64(t.Rank.DP))
		b = appendFloat(append(b, `,"cost":`...), t.Cost)
		b = jsonhttp.AppendUint(b, `,"device_blocks":`, uint64(t.Overlap.Device))
		b = jsonhttp.AppendUint(b, `,"host_pinned_extension_blocks":`, uint64(t.Overlap.Host))
		b = jsonhttp.AppendUint(b, `,"disk_extension_blocks":`, uint64(t.Overlap.Disk))
		b = jsonhttp.AppendUint(b, `,"cached_tokens":`, t.CachedTokens)
		b = jsonhttp.AppendUint(b, `,"effective_prefill_tokens":`, t.EffectivePrefillTokens)
		b = jsonhttp.AppendUint(b, `,"active_prefill_tokens":`, t.ActivePrefillTokens)
		b = jsonhttp.AppendUint(b, `,"active_decode_blocks":`, t.ActiveBlocks)
		b = jsonhttp.AppendUint(b, `,"additional_blocks":`, t.AdditionalBlocks)
		b = jsonhttp.AppendUint(b, `,"active_requests":`, t.ActiveRequests)
		b = appendFloat(append(b, `,"raw_prefill_blocks":`...), t.RawBlocks)
		b = appendFloat(append(b, `,"credit_factor":`...), t.CreditFactor)
		b = appendFloat(append(b, `,"credit_blocks":`...), t.CreditBlocks)
		b = appendFloat(append(b, `,"prefill_cost":`...), t.Prefill)
		b = jsonhttp.AppendUint(b, `,"decode_blocks_cost":`, t.DecodeBlocks)
		b = appendFloat(append(b, `,"requests_cost":`...), t.Requests)
		b = appendFloat(append(b, `,"taint_factor":`...), t.Factor)
		b = append(b, '}')
	}
	return append(b, ']')
}
