package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
	"time"

	"spillway/worker"
)

// promise is one request as its client sees it.
type promise struct {
	id        string
	partition worker.Partition
	rank      worker.Rank
	hashes    []int64
	tokens    uint64
	open      bool // its prefill
	output    int  // blocks
	sent      time.Time
	doubt     string // the path of a call about it that may have arrived or not; "" is none
}

func (p *promise) add() string {
	return fmt.Sprintf(`{"model_name":%q,"tenant_id":%q,"request_id":%q,"worker_id":%d,"dp_rank":%d,"sequence_hashes":%s,"new_isl_tokens":%d}`,
		p.partition.Model, p.partition.Tenant, p.id, p.rank.Worker, p.rank.DP, list(p.hashes), p.tokens)
}

func (p *promise) named() string {
	return fmt.Sprintf(`{"model_name":%q,"tenant_id":%q,"request_id":%q}`, p.partition.Model, p.partition.Tenant, p.id)
}

func list(hashes []int64) string {
	return strings.ReplaceAll(fmt.Sprint(hashes), " ", ",")
}

func registration(p worker.Partition, id uint64, ranks int) string {
	return fmt.Sprintf(`{"worker_id":%d,"model_name":%q,"tenant_id":%q,"block_size":16,"dp_start":0,"dp_size":%d}`, id, p.Model, p.Tenant, ranks)
}

// place is a rank of one partition.
type place struct {
	worker.Partition
	worker.Rank
}

// modelled are books that are added up whenever they are asked.
type modelled struct {
	ranks    []place // in the order of /loads
	on       map[place][]*promise
	bookings int
}

// model makes books of what all clients hold.
func (l *lifecycle) model() *modelled {
	m := &modelled{on: map[place][]*promise{}}
	for _, s := range l.sites {
		for w := range s.workers {
			m.register(s.Partition, uint64(w), s.ranks)
		}
	}
	for _, c := range l.clients {
		if c.registered {
			m.register(c.own, c.ownWorker(), ownRanks)
		}
		for _, p := range slices.Concat(c.held, c.orphans) {
			at := place{p.partition, p.rank}
			m.on[at] = append(m.on[at], p)
			m.bookings++
		}
	}
	slices.SortFunc(m.ranks, func(a, b place) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Tenant, b.Tenant), cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.DP, b.DP))
	})
	return m
}

func (m *modelled) register(p worker.Partition, id uint64, ranks int) {
	for dp := range ranks {
		m.ranks = append(m.ranks, place{p, worker.Rank{Worker: worker.ID(id), DP: uint32(dp)}})
	}
}

// load is what a rank has been promised: distinct prefixes and output blocks, tokens of open prefills.
func (m *modelled) load(at place) (tokens uint64, blocks int) {
	prefixes := map[string]bool{}
	var over uint64
	for _, p := range m.on[at] {
		for i := range p.hashes {
			prefixes[fmt.Sprint(p.hashes[:i+1])] = true
		}
		blocks += p.output
		if p.open {
			var carry uint64
			tokens, carry = bits.Add64(tokens, p.tokens, 0)
			over += carry
		}
	}
	if over > 0 {
		tokens = math.MaxUint64
	}
	return tokens, blocks + len(prefixes)
}

// loads is the answer of /loads.
func (m *modelled) loads() []byte {
	var rows []string
	for _, at := range m.ranks {
		tokens, blocks := m.load(at)
		rows = append(rows, fmt.Sprintf(`{"model_name":%q,"tenant_id":%q,"worker_id":%d,"dp_rank":%d,"active_prefill_tokens":%d,"active_decode_blocks":%d}`,
			at.Model, at.Tenant, at.Worker, at.DP, tokens, blocks))
	}
	return []byte("[" + strings.Join(rows, ",") + "]")
}

// prospect is a body of /potential_loads.
type prospect struct {
	partition worker.Partition
	hashes    []int64
	tokens    uint64
}

func (q prospect) body() string {
	return fmt.Sprintf(`{"model_name":%q,"tenant_id":%q,"sequence_hashes":%s,"new_isl_tokens":%d}`, q.partition.Model, q.partition.Tenant, list(q.hashes), q.tokens)
}

// potential is the answer of /potential_loads, but for its order.
func (m *modelled) potential(q prospect) []byte {
	var rows []string
	for _, at := range m.ranks {
		if at.Partition != q.partition {
			continue
		}
		tokens, blocks := m.load(at)
		tokens, carry := bits.Add64(tokens, q.tokens, 0)
		if carry > 0 {
			tokens = math.MaxUint64
		}
		overlap := 0
		for _, p := range m.on[at] {
			n := 0
			for n < min(len(p.hashes), len(q.hashes)) && p.hashes[n] == q.hashes[n] {
				n++
			}
			overlap = max(overlap, n)
		}
		rows = append(rows, fmt.Sprintf(`{"worker_id":%d,"dp_rank":%d,"potential_prefill_tokens":%d,"potential_decode_blocks":%d,"active_requests":%d}`,
			at.Worker, at.DP, tokens, blocks+len(q.hashes)-overlap, len(m.on[at])))
	}
	return []byte("[" + strings.Join(rows, ",") + "]")
}

// sameElements tells whether two JSON arrays have the same texts as elements, in any order.
func sameElements(a, b []byte) bool { return slices.Equal(elements(a), elements(b)) }

func elements(array []byte) []string {
	var raw []json.RawMessage
	if json.Unmarshal(array, &raw) != nil {
		return []string{string(array)}
	}
	var texts []string
	for _, r := range raw {
		texts = append(texts, string(r))
	}
	slices.Sort(texts)
	return texts
}

// difference lists the first few elements that two arrays do not share.
func difference(got, want []byte) string {
	g, w := elements(got), elements(want)
	var b strings.Builder
	for sign, lists := range map[string][2][]string{" got": {g, w}, "want": {w, g}} {
		shown := 0
		for _, e := range lists[0] {
			if _, found := slices.BinarySearch(lists[1], e); !found && shown < 5 {
				fmt.Fprintf(&b, "%s %s\n", sign, e)
				shown++
			}
		}
	}
	return b.String()
}
