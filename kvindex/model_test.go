package kvindex_test

import (
	"encoding/binary"
	"maps"
	"slices"

	"spillway/kvindex"
	"spillway/worker"
)

// model is the index in its slowest and plainest form: a map for each rule of kv-index.md 3, and
// paths of block hashes in place of sequence hashes.
type model struct {
	limit int
	ranks map[worker.Rank]*modelRank
}

type modelRank struct {
	paths map[uint64]string   // engine hash -> all block hashes from the first
	names map[string][]uint64 // path -> engine hashes, the newest last
	edges [worker.Tiers]map[modelEdge]uint64
	back  [worker.Tiers]map[uint64]modelEdge
}

type modelEdge struct {
	from  kvindex.Parent
	local uint64
}

func newModel(limit int) *model {
	return &model{limit: limit, ranks: map[worker.Rank]*modelRank{}}
}

func (m *model) rank(r worker.Rank) *modelRank {
	s := m.ranks[r]
	if s == nil {
		s = &modelRank{paths: map[uint64]string{}, names: map[string][]uint64{}}
		for t := range s.edges {
			s.edges[t], s.back[t] = map[modelEdge]uint64{}, map[uint64]modelEdge{}
		}
		m.ranks[r] = s
	}
	return s
}

func (m *model) entries() int {
	n := 0
	for _, s := range m.ranks {
		n += len(s.paths)
		for t := range s.edges {
			n += len(s.edges[t])
		}
	}
	return n
}

func (m *model) store(r worker.Rank, tier worker.Tier, parent kvindex.Parent, engine, local []uint64) kvindex.Status {
	if len(engine) == 0 {
		return kvindex.Stored
	}
	if m.limit < 1000 && m.entries()+len(engine) > m.limit { // else it is out of reach
		return kvindex.Full
	}
	s := m.rank(r)
	if parent == kvindex.After(0) {
		_, known := s.paths[0]
		for t := range s.back {
			_, lower := s.back[t][0]
			known = known || lower
		}
		if !known {
			parent = kvindex.Parent{}
		}
	}
	for i, e := range engine {
		if slices.Contains(engine[:i], e) || parent == kvindex.After(e) {
			return kvindex.InvalidBlock
		}
	}
	if tier != worker.Device {
		return s.storeLower(tier, parent, engine, local)
	}
	path := ""
	if parent.Set {
		var ok bool
		if path, ok = s.paths[parent.Hash]; !ok {
			return kvindex.ParentUnknown
		}
	}
	status := kvindex.DuplicateStore
	for i, e := range engine {
		path += string(binary.LittleEndian.AppendUint64(nil, local[i]))
		if was, ok := s.paths[e]; ok && was == path {
			continue
		}
		s.remove(e)
		s.paths[e] = path
		s.names[path] = append(s.names[path], e)
		status = kvindex.Stored
	}
	return status
}

func (s *modelRank) storeLower(tier worker.Tier, from kvindex.Parent, engine, local []uint64) kvindex.Status {
	status := kvindex.DuplicateStore
	for i, e := range engine {
		at := modelEdge{from, local[i]}
		if was, ok := s.back[tier][e]; ok && was != at {
			break
		}
		if was, ok := s.edges[tier][at]; ok && was != e {
			break
		}
		if _, ok := s.edges[tier][at]; !ok {
			s.edges[tier][at], s.back[tier][e] = e, at
			status = kvindex.Stored
		}
		from = kvindex.After(e)
	}
	return status
}

func (s *modelRank) remove(e uint64) bool {
	path, ok := s.paths[e]
	if ok {
		delete(s.paths, e)
		s.names[path] = slices.DeleteFunc(s.names[path], func(o uint64) bool { return o == e })
	}
	return ok
}

func (m *model) remove(r worker.Rank, tier worker.Tier, engine []uint64) (removed, unknown int) {
	s := m.rank(r)
	for _, e := range engine {
		at, ok := s.back[tier][e]
		if ok {
			delete(s.edges[tier], at)
			delete(s.back[tier], e)
		} else if tier == worker.Device {
			ok = s.remove(e)
		}
		if ok {
			removed++
		} else {
			unknown++
		}
	}
	return removed, unknown
}

func (m *model) removeWorker(id worker.ID) {
	maps.DeleteFunc(m.ranks, func(r worker.Rank, _ *modelRank) bool { return r.Worker == id })
}

// query returns the matches in order.
func (m *model) query(local []uint64, lower bool) []kvindex.Match {
	var all []kvindex.Match
	for r, s := range m.ranks {
		match := kvindex.Match{Rank: r}
		path, last := "", kvindex.Parent{}
		for _, l := range local {
			longer := path + string(binary.LittleEndian.AppendUint64(nil, l))
			names := s.names[longer]
			if len(names) == 0 {
				break
			}
			path, last = longer, kvindex.After(names[len(names)-1])
			match.Device++
		}
		pos := match.Device
		for t := worker.HostPinned; lower && t < worker.Tiers; t++ {
			for pos < len(local) {
				e, ok := s.edges[t][modelEdge{last, local[pos]}]
				if !ok {
					break
				}
				last = kvindex.After(e)
				pos++
				if t == worker.HostPinned {
					match.Host++
				} else {
					match.Disk++
				}
			}
		}
		if pos > 0 {
			all = append(all, match)
		}
	}
	ms := kvindex.Matches{Ranks: all}
	ms.Sort()
	return ms.Ranks
}
