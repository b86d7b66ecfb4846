package selectservice

import (
	"cmp"
	"net/http"
	"slices"
	"time"

	"spillway/httperr"
	"spillway/jsonhttp"
	"spillway/kvindex"
	"spillway/tracker"
	"spillway/worker"
)

// project fills x.list with the loads of all ranks of a partition, by worker and rank.
func project(x *exchange, p *partition, seqs []uint64, now time.Time) {
	x.list = x.list[:0]
	if route := p.route.Load(); route != nil {
		x.list = route.Tracker.Project(seqs, now, x.list)
	}
	slices.SortFunc(x.list, func(a, b tracker.Projection) int { return compareRanks(a.Rank, b.Rank) })
}

func compareRanks(a, b worker.Rank) int {
	return cmp.Or(cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.DP, b.DP))
}

// appendLoads appends x.list; with a prompt, what would be on each rank with it.
func appendLoads(b []byte, x *exchange, prefill func(worker.Rank) uint64) []byte {
	b = append(b, '[')
	for i := range x.list {
		r := &x.list[i]
		blocks, tokens := r.DecodeBlocks, r.PrefillTokens
		if prefill != nil {
			blocks, tokens = r.Potential(prefill(r.Rank))
		}
		if i > 0 {
			b = append(b, ',')
		}
		b = jsonhttp.AppendUint(b, `{"worker_id":`, uint64(r.Worker))
		b = jsonhttp.AppendUint(b, `,"dp_rank":`, uint64(r.DP))
		b = jsonhttp.AppendUint(b, `,"potential_prefill_tokens":`, tokens)
		b = jsonhttp.AppendUint(b, `,"potential_decode_blocks":`, blocks)
		b = jsonhttp.AppendUint(b, `,"active_requests":`, r.Requests)
		b = append(b, '}')
	}
	return append(b, ']')
}

// loads lists what is booked now, in words that the original has for what could be.
func (s *Server) loads(w http.ResponseWriter, r *http.Request) *httperr.Error {
	f, ok := s.filter(w, r)
	if !ok {
		return nil
	}
	x := take()
	defer x.put()
	now, b := s.now(), append(x.Out, '[')
	for i, p := range s.catalog.matching(f) {
		if i > 0 {
			b = append(b, ',')
		}
		project(x, p, nil, now)
		b = s.appendPartition(b, `{"model_name":`, p)
		b = appendLoads(append(b, `,"loads":`...), x, nil)
		waiting, tokens := 0, uint64(0)
		if route := p.route.Load(); route != nil {
			waiting, tokens = route.Waiting(), route.WaitingTokens()
		}
		b = jsonhttp.AppendUint(b, `,"pending_count":`, uint64(waiting))
		b = append(jsonhttp.AppendUint(b, `,"pending_isl_tokens":`, tokens), '}')
	}
	x.Out = append(b, ']')
	x.Answer(w, http.StatusOK)
	return nil
}

// look reads the prompt of a body that asks for no decision, and what ranks have of it.
func (s *Server) look(x *exchange) (*partition, *httperr.Error) {
	p, failed := s.catalog.usable(x.partition())
	if failed == nil {
		failed = x.prompt.hash(p, toRead, s.reuses(x), &x.hashed)
	}
	if failed != nil {
		return nil, failed
	}
	p.blocks.Load().Index.Query(x.hashed.locals, &x.matches)
	x.matches.Sort()
	return p, nil
}

// match is what one rank has of the prompt, after look.
func (x *exchange) match(r worker.Rank) kvindex.Match {
	at, ok := slices.BinarySearchFunc(x.matches.Ranks, r, func(m kvindex.Match, r worker.Rank) int { return compareRanks(m.Rank, r) })
	if !ok {
		return kvindex.Match{Rank: r}
	}
	return x.matches.Ranks[at]
}

// potentialLoads tells of each rank what it would have to do with one more prompt.
func (s *Server) potentialLoads(_ *http.Request, x *exchange, now time.Time) (int, *httperr.Error) {
	p, failed := s.look(x)
	if failed != nil {
		return 0, failed
	}
	weights, blockSize := s.setup.Cost.Weights(x.override), p.blockSize()
	project(x, p, x.hashed.seqs, now)
	x.Out = appendLoads(x.Out, x, func(r worker.Rank) uint64 {
		if !weights.TrackPrefill {
			return 0
		}
		return weights.EffectivePrefillTokens(x.match(r), blockSize, x.hashed.isl)
	})
	return http.StatusOK, nil
}

// overlapScores tells of each rank what it has of a prompt, in blocks.
func (s *Server) overlapScores(_ *http.Request, x *exchange, now time.Time) (int, *httperr.Error) {
	p, failed := s.look(x)
	if failed != nil {
		return 0, failed
	}
	weights := s.setup.Cost.Weights(x.override)
	project(x, p, nil, now)
	ranks := make([]worker.Rank, 0, len(x.list))
	for i := range x.list {
		ranks = append(ranks, x.list[i].Rank)
	}
	for _, m := range x.matches.Ranks { // perhaps of workers that nobody has registered
		ranks = append(ranks, m.Rank)
	}
	slices.SortFunc(ranks, compareRanks)
	b := jsonhttp.AppendUint(x.Out, `{"block_size":`, uint64(p.blockSize()))
	b = append(jsonhttp.AppendUint(b, `,"num_blocks":`, uint64(len(x.hashed.locals))), `,"workers":[`...)
	for i, r := range slices.Compact(ranks) {
		m := x.match(r)
		if i > 0 {
			b = append(b, ',')
		}
		b = jsonhttp.AppendUint(b, `{"worker_id":`, uint64(r.Worker))
		b = jsonhttp.AppendUint(b, `,"dp_rank":`, uint64(r.DP))
		b = jsonhttp.AppendUint(b, `,"device_blocks":`, uint64(m.Device))
		b = jsonhttp.AppendUint(b, `,"host_pinned_blocks":`, uint64(m.Device+m.Host))
		b = jsonhttp.AppendUint(b, `,"disk_blocks":`, uint64(m.Device+m.Host+m.Disk))
		b = jsonhttp.AppendUint(b, `,"host_pinned_extension_blocks":`, uint64(m.Host))
		b = jsonhttp.AppendUint(b, `,"disk_extension_blocks":`, uint64(m.Disk))
		b = appendFloat(append(b, `,"shared_beyond_device_blocks":null,"router_credit_blocks":`...), weights.CreditBlocks(m, 0))
		b = append(b, '}')
	}
	x.Out = append(b, `],"shared_cache":{"enabled":false,"total_hit_blocks":0,"ranges":[],"error":null}}`...)
	return http.StatusOK, nil
}

// dump writes what the index holds, while events go on.
func (s *Server) dump(w http.ResponseWriter, r *http.Request) *httperr.Error {
	if err := jsonhttp.SendLong(w, r, s.setup.Dump); err != nil {
		s.log.Info("a dump was not read to its end", "err", err)
	}
	return nil
}
