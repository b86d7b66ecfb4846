package service

import (
	"net/http"

	"spillway/httperr"
	"spillway/jsonhttp"
	"spillway/kvhash"
	"spillway/kvindex"
)

// query answers how much of a prompt, given as tokens, each worker holds.
func (s *Server) query(x *exchange) (int, *httperr.Error) {
	p, failed := s.registry.find(x.partition())
	if failed != nil {
		return 0, failed
	}
	size := p.BlockSize()
	options := kvhash.Options{BlockSize: size, LoRA: x.lora}
	if x.salt != nil {
		options.Salt = *x.salt
	}
	x.locals = kvhash.AppendBlocks(x.locals[:0], x.tokens, options)
	p.Index.Query(x.locals, &x.matches)
	x.Out = appendMatches(x.Out[:0], &x.matches, size)
	return http.StatusOK, nil
}

// queryByHash is query for block hashes, which have the salt in them already.
func (s *Server) queryByHash(x *exchange) (int, *httperr.Error) {
	if x.salt != nil {
		return 0, httperr.New(http.StatusBadRequest, "cache_salt: block_hashes have it in them already, so it must not be given")
	}
	p, failed := s.registry.find(x.partition())
	if failed != nil {
		return 0, failed
	}
	p.Index.Query(x.hashes, &x.matches)
	x.Out = appendMatches(x.Out[:0], &x.matches, p.BlockSize())
	return http.StatusOK, nil
}

// appendMatches appends the answer to a query, in tokens: of the ranks that hold something, and of
// their workers.
func appendMatches(b []byte, m *kvindex.Matches, blockSize int) []byte {
	m.Sort()
	b = append(b, `{"scores":{`...)
	workers := 0
	for each := m.Ranks; len(each) > 0; {
		var of []kvindex.Match
		of, each = ofOneWorker(each)
		ranks := 0
		for _, r := range of {
			if r.Device == 0 {
				continue
			}
			if ranks == 0 {
				b = append(appendKey(b, workers, r.Rank.Worker), '{')
				workers++
			}
			b = jsonhttp.AppendUint(appendKey(b, ranks, r.Rank.DP), "", tokens(r.Device, blockSize))
			ranks++
		}
		if ranks > 0 {
			b = append(b, '}')
		}
	}
	b = append(b, `},"frequencies":[],"instances":{`...)
	workers = 0
	for each := m.Ranks; len(each) > 0; workers++ {
		var of []kvindex.Match
		of, each = ofOneWorker(each)
		var o kvindex.Overlap
		for _, r := range of {
			o.Add(r)
		}
		b = appendKey(b, workers, of[0].Rank.Worker)
		b = jsonhttp.AppendUint(b, `{"longest_matched":`, tokens(o.Disk, blockSize))
		b = jsonhttp.AppendUint(b, `,"gpu":`, tokens(o.GPU, blockSize))
		b = append(b, `,"dp":{`...)
		for i, r := range of {
			b = jsonhttp.AppendUint(appendKey(b, i, r.Rank.DP), "", tokens(r.Device, blockSize))
		}
		b = jsonhttp.AppendUint(b, `},"cpu":`, tokens(o.CPU, blockSize))
		b = jsonhttp.AppendUint(b, `,"disk":`, tokens(o.Disk, blockSize))
		b = append(b, '}')
	}
	return append(b, `}}`...)
}

func tokens(blocks, blockSize int) uint64 { return uint64(kvindex.Tokens(blocks, blockSize)) }

// ofOneWorker cuts off the matches of the first worker.
func ofOneWorker(sorted []kvindex.Match) (of, rest []kvindex.Match) {
	n := 1
	for n < len(sorted) && sorted[n].Rank.Worker == sorted[0].Rank.Worker {
		n++
	}
	return sorted[:n], sorted[n:]
}
