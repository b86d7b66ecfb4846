// Package worker holds the identities that everything else speaks of: workers, their
// data-parallel ranks, the partitions they serve, and the catalog of what is registered.
package worker

import (
	"errors"
	"fmt"
	"math"
	"net/url"
	"strconv"
	"strings"

	"github.com/zeebo/xxh3"
)

// ID names one registered engine process. It is stable while the worker's endpoint is, and
// appears as worker_id or instance_id on wires.
type ID uint64

// String is the decimal form that headers, metrics and logs use.
func (id ID) String() string { return strconv.FormatUint(uint64(id), 10) }

// AnyDP is the rank number under which load is booked when the engine, not Spillway, picks the
// rank. It is never sent to a worker; on wires the same number means "unset".
const AnyDP = math.MaxUint32

// Rank is one data-parallel rank of a worker: the unit of cache and of load.
type Rank struct {
	Worker ID
	DP     uint32
}

// DefaultTenant is the tenant of workers and requests that name none.
const DefaultTenant = "default"

// Partition is what load, thresholds and cache are kept apart by.
type Partition struct {
	Model  string // canonical name
	Tenant string
}

// RankRouting tells who picks the data-parallel rank of a request.
type RankRouting string

// The two answers.
const (
	RankBySpillway RankRouting = "spillway" // X-Data-Parallel-Rank is sent
	RankByEngine   RankRouting = "engine"   // the engine balances its own ranks
)

// Worker is the record of one engine process. It is read-only once it has been registered; a
// change is a new record under the same ID. A zero number means unknown.
type Worker struct {
	ID                  ID          `koanf:"instance_id"`
	Name                string      `koanf:"name"`
	Endpoint            string      `koanf:"url"`    // base URL, no trailing slash
	Models              []string    `koanf:"models"` // the base model first; the rest are aliases or adapters
	Tenant              string      `koanf:"tenant"`
	Engine              string      `koanf:"engine"`             // auto, vllm, sglang, trtllm or custom
	Custom              Custom      `koanf:"custom" only:"file"` // for engine custom only
	MetricsURL          string      `koanf:"metrics_url"`        // "" is Endpoint + "/metrics"
	APIKey              string      `koanf:"api_key"`            // bearer token for the worker, "" for none
	DPStart             uint32      `koanf:"dp_start"`
	DPSize              uint32      `koanf:"dp_size"` // 0: not declared
	RankRouting         RankRouting `koanf:"rank_routing"`
	KVTotalBlocks       uint64      `koanf:"kv_total_blocks"` // per rank; overrides what is scraped
	BlockSize           uint32      `koanf:"block_size"`      // tokens per block; overrides what is scraped
	MaxNumBatchedTokens uint64      `koanf:"max_num_batched_tokens"`
	MaxConcurrency      uint32      `koanf:"max_concurrency"`
	Taints              []string    `koanf:"taints"` // labels that requests can require or prefer
	MaxModelLen         uint64      `koanf:"-"`      // tokens; learnt from the worker's /v1/models
	Aliases             []string    `koanf:"-"`      // those of Models that are further names of the base model, not adapters; learnt likewise

	KVEvents map[uint32]string `koanf:"kv_events_endpoints"` // by rank, where its engine publishes KV events; see CheckEventEndpoint
	KVReplay map[uint32]string `koanf:"replay_endpoints"`    // by rank, where it sends those again that were lost, or ""

	// What may be said instead; Normalize makes entries of the maps of it.
	KVEventsEndpoint string `koanf:"kv_events_endpoint"` // of a worker with one rank
	ReplayEndpoint   string `koanf:"replay_endpoint"`    // of the first rank; the others' are on the ports after it
}

// Normalize fills what was left out (ID, Name, Tenant, Engine, RankRouting, endpoints of ranks) and
// checks the rest. Models may still be empty: they are then learnt from the worker.
func (w Worker) Normalize() (Worker, error) {
	u, err := url.Parse(w.Endpoint)
	switch {
	case err != nil:
		return w, fmt.Errorf("url: %w", err)
	case u.Scheme != "http" && u.Scheme != "https":
		return w, fmt.Errorf("url: %q needs to begin with http:// or https://", w.Endpoint)
	case u.Host == "":
		return w, fmt.Errorf("url: %q names no host", w.Endpoint)
	case u.User != nil:
		return w, errors.New("url: credentials belong in api_key")
	case u.RawQuery != "" || u.Fragment != "":
		return w, fmt.Errorf("url: %q must have neither query nor fragment", w.Endpoint)
	}
	w.Endpoint = strings.TrimRight(w.Endpoint, "/")
	if w.ID == 0 {
		w.ID = DefaultID(w.Endpoint)
	}
	if w.Name == "" {
		w.Name = strings.TrimRight(u.Host+u.Path, "/")
	}
	if w.Tenant == "" {
		w.Tenant = DefaultTenant
	}
	if w.MetricsURL == "" {
		w.MetricsURL = w.Endpoint + "/metrics"
	}
	switch w.Engine {
	case "":
		w.Engine = "auto"
	case "auto", "vllm", "sglang", "trtllm", "custom":
	default:
		return w, fmt.Errorf("engine: %q is none of auto, vllm, sglang, trtllm and custom", w.Engine)
	}
	if w.Engine != "custom" && w.Custom != (Custom{}) {
		return w, fmt.Errorf("custom: is for engine custom, and the engine is %s", w.Engine)
	}
	if w.Engine == "custom" {
		if err := w.Custom.check(); err != nil {
			return w, fmt.Errorf("custom: %w", err)
		}
	}
	switch w.RankRouting {
	case "":
		w.RankRouting = RankBySpillway
	case RankBySpillway, RankByEngine:
	default:
		return w, fmt.Errorf("rank_routing: %q is neither spillway nor engine", w.RankRouting)
	}
	switch {
	case w.DPSize > MaxDPSize:
		return w, fmt.Errorf("dp_size: %d is more than %d", w.DPSize, MaxDPSize)
	case w.DPSize == 0 && w.DPStart > 0:
		return w, fmt.Errorf("dp_start: %d declares no rank without dp_size", w.DPStart)
	case uint64(w.DPStart)+uint64(w.DPSize) > AnyDP:
		return w, fmt.Errorf("dp_start: %d ranks from %d go beyond %d", w.DPSize, w.DPStart, uint32(AnyDP-1))
	}
	for _, m := range w.Models {
		if m == "" {
			return w, errors.New("models: a name is empty")
		}
	}
	return w.normalizeKVEndpoints()
}

// Bounds of the ranks of one worker, so that a wrong number cannot exhaust memory: of those that an
// operator declares, and of those that are known by the word of an engine alone.
const (
	MaxDPSize        = 65536
	MaxReportedRanks = 4096
)

// DefaultID is the ID of a worker that was given none: a 64-bit hash of its endpoint with the
// top bit cleared, so that replicas which know it by the same URL agree.
func DefaultID(endpoint string) ID { return ID(xxh3.HashString(endpoint) &^ (1 << 63)) }

// Partition is where the worker belongs: that of its first model. It must have one.
func (w *Worker) Partition() Partition { return Partition{Model: w.Models[0], Tenant: w.Tenant} }

// PublishesKVEvents tells whether an endpoint for the KV events of each rank is known, so that all
// that the worker caches can be heard of. One that declares no ranks has rank 0.
func (w *Worker) PublishesKVEvents() bool {
	for i := range max(w.DPSize, 1) {
		if w.KVEvents[w.DPStart+i] == "" {
			return false
		}
	}
	return true
}

// AllPublishKVEvents tells whether a partition's KV events tell of all its caches, given its workers.
// A single worker that publishes none would never be credited with what it has, so then what is
// cached is concluded from decisions, for all workers alike.
func AllPublishKVEvents(workers []*Worker) bool {
	for _, w := range workers {
		if !w.PublishesKVEvents() {
			return false
		}
	}
	return len(workers) > 0
}

// Serves tells whether the worker answers to the given model name.
func (w *Worker) Serves(model string) bool {
	for _, m := range w.Models {
		if m == model {
			return true
		}
	}
	return false
}
