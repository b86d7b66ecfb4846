package selectservice

import (
	"fmt"
	"maps"
	"slices"
	"strconv"

	"spillway/httperr"
	"spillway/jsonhttp"
	"spillway/worker"
)

// lifecycle is what has become of a worker's registration.
type lifecycle string

const (
	incomplete    lifecycle = "incomplete"    // something is missing or wrong; reasons say what
	schedulable   lifecycle = "schedulable"   // it is chosen
	unschedulable lifecycle = "unschedulable" // it was deleted
)

// record is what was said of a worker, and what came of it. It is read-only once it is in the
// catalog; nil is what was not said.
type record struct {
	id              uint64
	model, tenant   string
	endpoint        *string
	events          *string
	eventsByRank    map[uint32]string
	replay          *string
	replayByRank    map[uint32]string
	blockSize       *uint32
	dpStart, dpSize *uint32
	maxBatched      *uint64
	totalBlocks     *uint64
	stableID        *string
	eagle           *bool
	taints          []string // sorted, each once
	domains         map[string]string
	domain          *string
	enforcement     *string
	weight          *float64

	lifecycle lifecycle
	reasons   []string
	deleted   uint64 // of unschedulable ones: which deletion it was
}

func (r *record) partition() worker.Partition {
	return worker.Partition{Model: r.model, Tenant: r.tenant}
}

func or[T any](p *T, otherwise T) T {
	if p != nil {
		return *p
	}
	return otherwise
}

// ranks are those that the worker has or would have.
func (r *record) ranks() (start, size uint32) { return or(r.dpStart, 0), or(r.dpSize, 1) }

// listenAt returns where KV events of the worker are published, by rank.
func (r *record) listenAt() map[uint32]string {
	if len(r.eventsByRank) > 0 {
		return r.eventsByRank
	}
	if start, size := r.ranks(); size == 1 && r.events != nil {
		return map[uint32]string{start: *r.events}
	}
	return nil
}

// replayAt returns where the events of a rank can be had again, "" for nowhere.
func (r *record) replayAt(dp uint32) (string, error) {
	if at, ok := r.replayByRank[dp]; ok {
		return at, nil
	}
	start, _ := r.ranks()
	if r.replay == nil || *r.replay == "" || dp < start {
		return "", nil
	}
	if err := worker.CheckEventEndpoint(*r.replay); err != nil {
		return "", err
	}
	at, err := worker.ReplayEndpoint(*r.replay, dp-start)
	if err != nil {
		return "", nil // no convention tells of one
	}
	return at, nil
}

// sameCache tells whether what is known of the cache of a worker stays true: it has the same
// blocks and says so at the same place.
func (r *record) sameCache(was *record) bool {
	start, size := r.ranks()
	wasStart, wasSize := was.ranks()
	return r.partition() == was.partition() && or(r.blockSize, 0) == or(was.blockSize, 0) && or(r.eagle, false) == or(was.eagle, false) &&
		start == wasStart && size == wasSize && maps.Equal(r.listenAt(), was.listenAt()) &&
		or(r.replay, "") == or(was.replay, "") && maps.Equal(r.replayByRank, was.replayByRank)
}

// maxReasons bounds those that a record lists of one kind.
const maxReasons = 32

// missing tells what keeps the worker from being schedulable, in the order of the documentation.
func (r *record) missing(events, queues bool, maxRanks uint32) (reasons []string) {
	if or(r.endpoint, "") == "" {
		reasons = append(reasons, "endpoint is required")
	}
	if or(r.blockSize, 0) == 0 {
		reasons = append(reasons, "block_size must be greater than 0")
	} else if *r.blockSize > maxBlockSize {
		reasons = append(reasons, fmt.Sprintf("block_size must not exceed %d", maxBlockSize))
	}
	start, size := r.ranks()
	if size == 0 {
		reasons = append(reasons, "data_parallel_size must be greater than 0")
	}
	if uint64(start)+uint64(size) > worker.AnyDP || size > maxRanks {
		return append(reasons, fmt.Sprintf("data_parallel range is invalid: at most %d ranks, the last below %d", maxRanks, uint32(worker.AnyDP)))
	}
	if queues && r.maxBatched == nil {
		reasons = append(reasons, "max_num_batched_tokens is required while queueing is enabled")
	}
	if !events {
		return reasons
	}
	at, absent := r.listenAt(), 0
	for dp := start; dp-start < size; dp++ {
		if at[dp] != "" {
			continue
		}
		if absent++; absent <= maxReasons {
			reasons = append(reasons, fmt.Sprintf("kv_events endpoint is required for dp_rank %d", dp))
		}
	}
	if absent > maxReasons {
		reasons = append(reasons, fmt.Sprintf("kv_events endpoint is required for %d further ranks", absent-maxReasons))
	}
	return reasons
}

// maxBlockSize bounds the tokens of a block; real ones have up to some hundreds.
const maxBlockSize = 1 << 20

// worker is the record as the router knows it.
func (r *record) worker() *worker.Worker {
	start, size := r.ranks()
	return &worker.Worker{
		ID: worker.ID(r.id), Name: strconv.FormatUint(r.id, 10), Endpoint: or(r.endpoint, ""), Models: []string{r.model}, Tenant: r.tenant,
		DPStart: start, DPSize: size, RankRouting: worker.RankBySpillway, BlockSize: or(r.blockSize, 0),
		KVTotalBlocks: or(r.totalBlocks, 0), MaxNumBatchedTokens: or(r.maxBatched, 0), Taints: r.taints,
	}
}

// registration is a body that tells of a worker.
type registration struct {
	record
	names tenancy
}

type workerField = jsonhttp.Field[registration]

// said is a field that keeps a pointer to what it read.
func said[T any](of func(string, bool, func(*registration) *T) workerField, name string, to func(*registration) **T) workerField {
	return jsonhttp.Optional(of(name, false, func(r *registration) *T {
		v := new(T)
		*to(r) = v
		return v
	}))
}

// byRank is an object from ranks to endpoints.
func byRank(name string, to func(*registration) *map[uint32]string) workerField {
	return jsonhttp.Custom(name, false, func(d *jsonhttp.Decoder, name string, r *registration) *httperr.Error {
		all := map[uint32]string{}
		*to(r) = all
		return d.Entries(name, func(key string) *httperr.Error {
			dp, err := strconv.ParseUint(key, 10, 32)
			if err != nil {
				return jsonhttp.Malformed(name, "%.32q is no rank", key)
			}
			at, failed := d.Text(name)
			all[uint32(dp)] = at
			return failed
		})
	})
}

// variant is one of a few words.
func variant(name string, words []string, to func(*registration) **string) workerField {
	return jsonhttp.Optional(jsonhttp.Custom(name, false, func(d *jsonhttp.Decoder, name string, r *registration) *httperr.Error {
		word, failed := d.Text(name)
		if failed == nil && !slices.Contains(words, word) {
			return jsonhttp.Malformed(name, "%.32q is none of %v", word, words)
		}
		*to(r) = &word
		return failed
	}))
}

// collections cannot be null where a worker is registered.
var collections = []workerField{
	jsonhttp.Strings("taints", false, func(r *registration) *[]string { return &r.taints }),
	jsonhttp.Custom("topology_domains", false, func(d *jsonhttp.Decoder, name string, r *registration) *httperr.Error {
		r.domains = map[string]string{}
		return d.Entries(name, func(key string) (failed *httperr.Error) {
			r.domains[key], failed = d.Text(name)
			return failed
		})
	}),
	byRank("kv_events_endpoints", func(r *registration) *map[uint32]string { return &r.eventsByRank }),
	byRank("replay_endpoints", func(r *registration) *map[uint32]string { return &r.replayByRank }),
}

var scalars = []workerField{
	said(jsonhttp.String, "endpoint", func(r *registration) **string { return &r.endpoint }),
	said(jsonhttp.String, "kv_events_endpoint", func(r *registration) **string { return &r.events }),
	said(jsonhttp.String, "replay_endpoint", func(r *registration) **string { return &r.replay }),
	said(jsonhttp.Uint32, "block_size", func(r *registration) **uint32 { return &r.blockSize }),
	said(jsonhttp.Uint32, "data_parallel_start_rank", func(r *registration) **uint32 { return &r.dpStart }),
	said(jsonhttp.Uint32, "data_parallel_size", func(r *registration) **uint32 { return &r.dpSize }),
	said(jsonhttp.Uint64, "max_num_batched_tokens", func(r *registration) **uint64 { return &r.maxBatched }),
	said(jsonhttp.Uint64, "total_kv_blocks", func(r *registration) **uint64 { return &r.totalBlocks }),
	said(jsonhttp.String, "stable_routing_id", func(r *registration) **string { return &r.stableID }),
	said(jsonhttp.Bool, "is_eagle", func(r *registration) **bool { return &r.eagle }),
	said(jsonhttp.String, "kv_transfer_domain", func(r *registration) **string { return &r.domain }),
	variant("kv_transfer_enforcement", []string{"required", "preferred"}, func(r *registration) **string { return &r.enforcement }),
	said(jsonhttp.Float, "kv_transfer_preferred_weight", func(r *registration) **float64 { return &r.weight }),
}

// registerBody are the fields of POST /workers, where the tenant has these names.
func registerBody(tenant, otherTenant string) []workerField {
	return slices.Concat([]workerField{
		jsonhttp.Uint64("worker_id", true, func(r *registration) *uint64 { return &r.id }),
		jsonhttp.String("model_name", false, func(r *registration) *string { return &r.model }),
	}, tenancyFields(tenant, otherTenant, func(r *registration) *tenancy { return &r.names }), scalars, collections)
}

// patchBody are those of PATCH: it cannot move a worker.
var patchBody = slices.Concat(scalars, nullable(collections))

func nullable(fields []workerField) (all []workerField) {
	for _, f := range fields {
		all = append(all, jsonhttp.Optional(f))
	}
	return all
}

// changed is r with what by says of it.
func (r *record) changed(by *record) *record {
	next := *r
	next.reasons = nil
	overwrite(&next.endpoint, by.endpoint)
	overwrite(&next.events, by.events)
	overwrite(&next.replay, by.replay)
	overwrite(&next.blockSize, by.blockSize)
	overwrite(&next.dpStart, by.dpStart)
	overwrite(&next.dpSize, by.dpSize)
	overwrite(&next.maxBatched, by.maxBatched)
	overwrite(&next.totalBlocks, by.totalBlocks)
	overwrite(&next.stableID, by.stableID)
	overwrite(&next.eagle, by.eagle)
	overwrite(&next.domain, by.domain)
	overwrite(&next.enforcement, by.enforcement)
	overwrite(&next.weight, by.weight)
	if by.taints != nil {
		next.taints = by.taints
	}
	if by.domains != nil {
		next.domains = by.domains
	}
	if by.eventsByRank != nil {
		next.eventsByRank = by.eventsByRank
	}
	if by.replayByRank != nil {
		next.replayByRank = by.replayByRank
	}
	return &next
}

func overwrite[T any](to **T, by *T) {
	if by != nil {
		*to = by
	}
}
