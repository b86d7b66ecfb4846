package proxy

import (
	"encoding/json"
	"reflect"
	"slices"
	"strconv"

	"spillway/worker"
)

// workerRecord is a worker as the /workers routes show it: what was said of it, nil where nothing
// was. What Spillway's front end has no use for yet (taints, topology, transfer) is
// checked, kept and shown, so that one record serves this server and the selection service.
type workerRecord struct {
	ID                  worker.ID         `json:"worker_id"`
	Model               string            `json:"model_name"`
	Tenant              string            `json:"tenant_id"`
	Lifecycle           string            `json:"lifecycle"`
	Endpoint            *string           `json:"endpoint"`
	KVEventsEndpoint    *string           `json:"kv_events_endpoint"`
	KVEventsEndpoints   map[string]string `json:"kv_events_endpoints,omitempty"` // by rank
	ReplayEndpoint      *string           `json:"replay_endpoint"`
	ReplayEndpoints     map[string]string `json:"replay_endpoints,omitempty"` // by rank
	BlockSize           *uint32           `json:"block_size"`
	DPStart             *uint32           `json:"data_parallel_start_rank"`
	DPSize              *uint32           `json:"data_parallel_size"`
	MaxNumBatchedTokens *uint64           `json:"max_num_batched_tokens"`
	KVTotalBlocks       *uint64           `json:"total_kv_blocks"`
	StableRoutingID     *string           `json:"stable_routing_id"`
	IsEagle             *bool             `json:"is_eagle"`
	Taints              []string          `json:"taints"`
	TopologyDomains     map[string]string `json:"topology_domains"`
	TransferDomain      *string           `json:"kv_transfer_domain"`
	TransferEnforcement *string           `json:"kv_transfer_enforcement"` // required or preferred
	TransferWeight      *float32          `json:"kv_transfer_preferred_weight"`
	Name                *string           `json:"name"` // from here on: what only the front end asks for
	Models              []string          `json:"models,omitempty"`
	Engine              *string           `json:"engine"`
	MetricsURL          *string           `json:"metrics_url"`
	RankRouting         *string           `json:"rank_routing"`
	MaxConcurrency      *uint32           `json:"max_concurrency"`
	Reasons             []string          `json:"not_schedulable_reasons,omitempty"`

	apiKey *string       // never shown
	custom worker.Custom // only from the configuration file
}

// recordField is one field that a body may set. Only pointers may be null.
type recordField struct {
	name string
	kind string // what it must be
	to   func(*workerRecord) any
	once bool // a PATCH cannot change it
}

var recordFields = []recordField{
	{"worker_id", "an integer from 0 to 2^64-1", func(r *workerRecord) any { return &r.ID }, true},
	{"model_name", "a string", func(r *workerRecord) any { return &r.Model }, true},
	{"tenant_id", "a string", func(r *workerRecord) any { return &r.Tenant }, true},
	{"endpoint", "a string", func(r *workerRecord) any { return &r.Endpoint }, false},
	{"kv_events_endpoint", "a string", func(r *workerRecord) any { return &r.KVEventsEndpoint }, false},
	{"kv_events_endpoints", "an object of strings by rank", func(r *workerRecord) any { return &r.KVEventsEndpoints }, false},
	{"replay_endpoint", "a string", func(r *workerRecord) any { return &r.ReplayEndpoint }, false},
	{"replay_endpoints", "an object of strings by rank", func(r *workerRecord) any { return &r.ReplayEndpoints }, false},
	{"block_size", "an integer from 0 to 2^32-1", func(r *workerRecord) any { return &r.BlockSize }, false},
	{"data_parallel_start_rank", "an integer from 0 to 2^32-1", func(r *workerRecord) any { return &r.DPStart }, false},
	{"data_parallel_size", "an integer from 0 to 2^32-1", func(r *workerRecord) any { return &r.DPSize }, false},
	{"max_num_batched_tokens", "an integer from 0 to 2^64-1", func(r *workerRecord) any { return &r.MaxNumBatchedTokens }, false},
	{"total_kv_blocks", "an integer from 0 to 2^64-1", func(r *workerRecord) any { return &r.KVTotalBlocks }, false},
	{"stable_routing_id", "a string", func(r *workerRecord) any { return &r.StableRoutingID }, false},
	{"is_eagle", "a boolean", func(r *workerRecord) any { return &r.IsEagle }, false},
	{"taints", "an array of strings", func(r *workerRecord) any { return &r.Taints }, false},
	{"topology_domains", "an object of strings", func(r *workerRecord) any { return &r.TopologyDomains }, false},
	{"kv_transfer_domain", "a string", func(r *workerRecord) any { return &r.TransferDomain }, false},
	{"kv_transfer_enforcement", "required or preferred", func(r *workerRecord) any { return &r.TransferEnforcement }, false},
	{"kv_transfer_preferred_weight", "a number", func(r *workerRecord) any { return &r.TransferWeight }, false},
	{"name", "a string", func(r *workerRecord) any { return &r.Name }, false},
	{"models", "an array of strings", func(r *workerRecord) any { return &r.Models }, false},
	{"engine", "a string", func(r *workerRecord) any { return &r.Engine }, false},
	{"metrics_url", "a string", func(r *workerRecord) any { return &r.MetricsURL }, false},
	{"rank_routing", "a string", func(r *workerRecord) any { return &r.RankRouting }, false},
	{"max_concurrency", "an integer from 0 to 2^32-1", func(r *workerRecord) any { return &r.MaxConcurrency }, false},
	{"api_key", "a string", func(r *workerRecord) any { return &r.apiKey }, false},
}

// set takes over the fields of a body. In a PATCH null changes nothing, and what cannot be
// changed is not looked at. The error, with which r is of no use, is 422 and names the field.
func (r *workerRecord) set(fields map[string]json.RawMessage, patch bool) *adminError {
	for _, f := range recordFields {
		raw, ok := fields[f.name]
		if !ok || patch && (f.once || string(raw) == "null") {
			continue
		}
		to := reflect.ValueOf(f.to(r)).Elem()
		if string(raw) == "null" && to.Kind() != reflect.Pointer {
			return &adminError{422, f.name + ": must not be null"}
		}
		to.SetZero() // collections are replaced, not merged
		if json.Unmarshal(raw, to.Addr().Interface()) != nil || holdsNull(raw, to) || !f.fits(to) {
			return &adminError{422, f.name + ": must be " + f.kind}
		}
	}
	return nil
}

// fits checks what the type of a field does not.
func (f *recordField) fits(v reflect.Value) bool {
	switch v := v.Interface().(type) {
	case map[string]string:
		for key := range v {
			if _, err := strconv.ParseUint(key, 10, 32); err != nil && f.name != "topology_domains" {
				return false
			}
		}
	case *string:
		return f.name != "kv_transfer_enforcement" || v == nil || *v == "required" || *v == "preferred"
	}
	return true
}

// holdsNull tells whether a collection has a null among its values: json takes it for "".
func holdsNull(raw json.RawMessage, v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Slice:
		var all []*string
		return json.Unmarshal(raw, &all) != nil || slices.Contains(all, nil)
	case reflect.Map:
		var all map[string]*string
		if json.Unmarshal(raw, &all) != nil {
			return true
		}
		for _, s := range all {
			if s == nil {
				return true
			}
		}
	}
	return false
}

// worker is the record as the rest of the program knows it, or why there can be none.
func (r *workerRecord) worker() (*worker.Worker, []string) {
	var reasons []string
	if orZero(r.Endpoint) == "" {
		reasons = append(reasons, "endpoint is required")
	}
	if r.BlockSize != nil && *r.BlockSize == 0 { // left out, it is learnt from the worker
		reasons = append(reasons, "block_size must be greater than 0")
	}
	if r.DPSize != nil && *r.DPSize == 0 {
		reasons = append(reasons, "data_parallel_size must be greater than 0")
	}
	if len(reasons) > 0 {
		return nil, reasons
	}
	w := worker.Worker{
		Name: orZero(r.Name), Endpoint: orZero(r.Endpoint), Tenant: r.Tenant, Engine: orZero(r.Engine), Custom: r.custom,
		MetricsURL: orZero(r.MetricsURL), APIKey: orZero(r.apiKey), DPStart: orZero(r.DPStart), DPSize: orZero(r.DPSize),
		RankRouting: worker.RankRouting(orZero(r.RankRouting)), KVTotalBlocks: orZero(r.KVTotalBlocks), BlockSize: orZero(r.BlockSize),
		MaxNumBatchedTokens: orZero(r.MaxNumBatchedTokens), MaxConcurrency: orZero(r.MaxConcurrency),
		KVEventsEndpoint: orZero(r.KVEventsEndpoint), KVEvents: ofRanks(r.KVEventsEndpoints),
		ReplayEndpoint: orZero(r.ReplayEndpoint), KVReplay: ofRanks(r.ReplayEndpoints),
	}
	if r.DPStart != nil && r.DPSize == nil {
		w.DPSize = 1
	}
	if r.Model != "" {
		w.Models = []string{r.Model}
		for _, m := range r.Models {
			if !slices.Contains(w.Models, m) {
				w.Models = append(w.Models, m)
			}
		}
	}
	w, err := w.Normalize()
	if err != nil {
		return nil, []string{"reconciliation failed: " + err.Error()}
	}
	w.ID = r.ID // 0 is an ID too
	return &w, nil
}

// recordOf is what the configuration says of a worker.
func recordOf(w *worker.Worker) workerRecord {
	r := workerRecord{
		ID: w.ID, Tenant: w.Tenant, Endpoint: &w.Endpoint, Name: &w.Name, Engine: &w.Engine, MetricsURL: &w.MetricsURL,
		RankRouting: new(string(w.RankRouting)), BlockSize: unlessZero(w.BlockSize), DPSize: unlessZero(w.DPSize),
		MaxNumBatchedTokens: unlessZero(w.MaxNumBatchedTokens), KVTotalBlocks: unlessZero(w.KVTotalBlocks),
		MaxConcurrency: unlessZero(w.MaxConcurrency), apiKey: &w.APIKey, custom: w.Custom,
		KVEventsEndpoints: byName(w.KVEvents), ReplayEndpoints: byName(w.KVReplay),
	}
	if w.DPSize > 0 {
		r.DPStart = &w.DPStart
	}
	r.named(w.Models)
	return r
}

// ofRanks is what a record says by rank: its keys have been found to be numbers.
func ofRanks(said map[string]string) map[uint32]string {
	var at map[uint32]string
	for key, text := range said {
		dp, err := strconv.ParseUint(key, 10, 32)
		if err != nil {
			continue
		}
		if at == nil {
			at = map[uint32]string{}
		}
		at[uint32(dp)] = text
	}
	return at
}

// byName is the reverse of ofRanks.
func byName(at map[uint32]string) map[string]string {
	var said map[string]string
	for dp, text := range at {
		if said == nil {
			said = map[string]string{}
		}
		said[strconv.FormatUint(uint64(dp), 10)] = text
	}
	return said
}

// named takes over names that were configured or learnt.
func (r *workerRecord) named(models []string) {
	if len(models) == 0 {
		return
	}
	r.Model, r.Models = models[0], nil
	if len(models) > 1 {
		r.Models = models
	}
}

// orZero is what p points to, the zero value if it is nil.
func orZero[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

func unlessZero[T comparable](v T) *T {
	var zero T
	if v == zero {
		return nil
	}
	return &v
}
