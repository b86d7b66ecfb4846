package monitor

import (
	"maps"
	"math"
	"slices"
	"strconv"

	"github.com/zeebo/xxh3"

	"spillway/worker"
)

// role is what a series of a mapped page is good for.
type role uint8

const (
	asRatio      role = iota // KV cache in use, 0 to 1, of the fullest pool
	asFullRatio              // the same of the pool that block counts are about
	asOtherRatio             // of a further pool
	asUsedBlocks
	asTotalBlocks
	asBlockSize
	asUsedTokens
	asOldUsedTokens // in place of asUsedTokens where there are none
	asTotalTokens
	asPrefillTokens
	asRunning
	asWaiting
	asCapacityLabels // capacity stands in the labels
	asCounter        // shows by falling that the process is a new one
	asStart          // when the process began
	numRoles
)

// spec is one series that is wanted, by any of its names and with all of its labels. Several of
// one count role are added up.
type spec struct {
	role   role
	names  []string
	labels []worker.Label
}

// mapping is how an engine that names its metrics plainly writes a page: each value is of one
// rank, and repeated by tensor and pipeline ranks at most.
type mapping struct {
	specs      []spec
	rankLabel  string            // "": all is one rank
	sizeLabel  string            // of cacheLabels: tokens per block
	totalLabel string            // of cacheLabels: blocks
	names      map[string]metric // wanted names
	of         [][]int           // by metric, from 1: specs of that name
}

// newMapping indexes the specs by name. There are fewer than 256 names.
func newMapping(m mapping) *mapping {
	m.names, m.of = map[string]metric{}, make([][]int, 1)
	m.specs = append(m.specs, spec{role: asStart, names: []string{"process_start_time_seconds"}})
	for i, s := range m.specs {
		for _, name := range s.names {
			if m.names[name] == none {
				m.names[name] = metric(len(m.of))
				m.of = append(m.of, nil)
			}
			at := m.names[name]
			m.of[at] = append(m.of[at], i)
		}
	}
	return &m
}

// mapReader collects the series of one mapped page.
type mapReader struct {
	*mapping
	page
	ranks  map[uint32]*[numRoles]*float64 // the greatest of each gauge
	counts map[specKey]*count
}

// specKey is what a count is summed over: specs and model names. The greatest is taken of what
// else differs.
type specKey struct {
	spec  int
	dp    uint32
	model string
}

// read reads a page. One without wanted names has no ranks.
func (m *mapping) read(body []byte) page {
	r := mapReader{mapping: m, ranks: map[uint32]*[numRoles]*float64{}, counts: map[specKey]*count{}}
	sc := scanner{rest: body, name: func(name []byte) metric { return m.names[string(name)] }}
	seen := 0
	for s, ok := sc.next(); ok; s, ok = sc.next() {
		if seen++; seen > maxSeries {
			r.invalid = true
			break
		}
		if !r.add(s) {
			r.invalid = true
		}
	}
	r.known = r.known || sc.malformed > 0
	r.invalid = r.invalid || sc.malformed > 0 || sc.truncated
	r.truncated = sc.truncated
	r.combine()
	return r.page
}

// add takes one series, or reports false if it makes no sense.
func (r *mapReader) add(s series) bool {
	sound := true
	for _, i := range r.of[s.metric] {
		if r.matches(s, i) && !r.take(s, i) {
			sound = false
		}
	}
	return sound
}

func (r *mapReader) matches(s series, i int) bool {
	for _, l := range r.specs[i].labels {
		if v, _ := s.label(l.Name); string(v) != l.Value {
			return false
		}
	}
	return true
}

func (r *mapReader) take(s series, i int) bool {
	sp := &r.specs[i]
	finite := s.value >= 0 && s.value <= math.MaxFloat64
	switch sp.role {
	case asStart:
		if finite {
			r.start = max(r.start, s.value)
		}
		return finite
	case asCounter:
		r.known = true
		if finite {
			r.counted(i, s)
		}
		return finite
	}
	r.known = true
	dp, ok := r.rankOf(s)
	if !ok || !r.know(dp) || !finite {
		return false
	}
	at := r.ranks[dp]
	switch sp.role {
	case asCapacityLabels:
		return r.labelled(s, at, r.sizeLabel, asBlockSize) && r.labelled(s, at, r.totalLabel, asTotalBlocks)
	case asRatio, asFullRatio, asOtherRatio:
		raise(&at[sp.role], s.value)
		return true
	}
	if s.value > maxCount {
		return false
	}
	if sp.role != asRunning && sp.role != asWaiting {
		raise(&at[sp.role], s.value)
		return true
	}
	model, _ := s.label("model_name")
	key := specKey{i, dp, string(model)}
	if r.counts[key] == nil {
		r.counts[key] = &count{}
	}
	r.counts[key].add(s)
	return true
}

func (r *mapReader) counted(i int, s series) {
	if r.counters == nil {
		r.counters = map[uint64]float64{}
	}
	r.counters[xxh3.HashSeed(s.labels, uint64(i))] = s.value
}

// rankOf is the rank that a series is about: 0 if it names none.
func (r *mapReader) rankOf(s series) (uint32, bool) {
	if r.rankLabel == "" {
		return 0, true
	}
	label, _ := s.label(r.rankLabel)
	return parseRank(label)
}

// parseRank reads the label of a rank; none is rank 0.
func parseRank(label []byte) (uint32, bool) {
	if len(label) == 0 {
		return 0, true
	}
	dp, err := strconv.ParseUint(string(label), 10, 32)
	return uint32(dp), err == nil && dp < worker.AnyDP
}

func (r *mapReader) know(dp uint32) bool {
	if r.ranks[dp] == nil {
		if len(r.ranks) == worker.MaxReportedRanks {
			return false
		}
		r.ranks[dp] = new([numRoles]*float64)
	}
	return true
}

// labelled takes a number out of a label, if there is one.
func (r *mapReader) labelled(s series, at *[numRoles]*float64, label string, as role) bool {
	if label == "" {
		return true
	}
	n, ok := infoNumber(s, label)
	if ok && n > 0 {
		raise(&at[as], float64(n))
	}
	return ok
}

// combine makes the ranks of the page from what was collected.
func (r *mapReader) combine() {
	dps := slices.Sorted(maps.Keys(r.ranks))
	r.page.ranks = make([]rankPage, len(dps))
	at := make(map[uint32]*rankPage, len(dps))
	for i, dp := range dps {
		p := &r.page.ranks[i]
		*p = rankOfRoles(dp, r.ranks[dp])
		at[dp] = p
	}
	for key, c := range r.counts {
		switch p := at[key.dp]; r.specs[key.spec].role {
		case asRunning:
			p.running = c.addTo(p.running)
		case asWaiting:
			p.waiting = c.addTo(p.waiting)
		}
	}
}

// rankOfRoles makes one rank's part of a page from its gauges.
func rankOfRoles(dp uint32, v *[numRoles]*float64) rankPage {
	used := v[asUsedTokens]
	if used == nil {
		used = v[asOldUsedTokens]
	}
	p := rankPage{
		dp: dp, ratio: v[asRatio],
		used: whole(v[asUsedBlocks]), usedTokens: whole(used), totalTokens: whole(v[asTotalTokens]),
		prefill: whole(v[asPrefillTokens]),
	}
	if n := whole(v[asTotalBlocks]); n != nil {
		p.total = *n
	}
	if n := whole(v[asBlockSize]); n != nil {
		p.blockSize = *n
	}
	full, other := v[asFullRatio], v[asOtherRatio]
	if p.ratio != nil && (other != nil && *other > 0 || full != nil && *p.ratio > *full+ratioGrain) {
		// Some pool is fuller than that of the blocks, and the fullest is what stops requests.
		p.used, p.usedTokens = nil, nil
	}
	return p
}

// ratioGrain is how much two ratios may differ by having been rounded.
const ratioGrain = 0.005

func whole(v *float64) *uint64 {
	if v == nil {
		return nil
	}
	n := uint64(math.Round(*v))
	return &n
}
