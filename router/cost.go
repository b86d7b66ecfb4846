package router

import (
	"errors"
	"fmt"
	"math"

	"spillway/kvindex"
	"spillway/worker"
)

// CostConfig is what an operator sets of KV mode, in which the rank with the lowest cost is chosen:
//
//	cost = PrefillLoadScale x max(0, blocks to prefill - credit) + blocks held + weight x requests
//
// Blocks to prefill are those of the rank's backlog and of the prompt, credit is for what the rank
// has cached of the prompt, and blocks held are counted with the prompt on the rank.
type CostConfig struct {
	LoadAware                 bool     `koanf:"load-aware" dyn:"DYN_ROUTER_LOAD_AWARE" bad:"unreadable" usage:"mode kv by load alone: no credit for cached blocks, no KV events, no reuse of blocks assumed"`
	OverlapScoreCredit        float64  `koanf:"router-kv-overlap-score-credit" dyn:"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT" bad:"unreadable" usage:"what a cached block of the prompt takes off the cost of a rank, in blocks; 0 ignores caches"`
	OverlapScoreCreditDecay   float64  `koanf:"router-kv-overlap-score-credit-decay" dyn:"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY" bad:"unreadable" usage:"how fast the credit falls with the prefill backlog of a rank beyond the least; 0 is not at all"`
	PrefillLoadScale          float64  `koanf:"router-prefill-load-scale" dyn:"DYN_ROUTER_PREFILL_LOAD_SCALE" bad:"unreadable" usage:"weight of blocks to prefill against blocks held"`
	OverlapScoreWeight        *float64 `koanf:"router-kv-overlap-score-weight" dyn:"DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT,DYN_OVERLAP_SCORE_WEIGHT" bad:"unreadable" usage:"older name of --router-prefill-load-scale, which it overrides; 0 also sets the credit to 0"`
	DecodeActiveRequestWeight float64  `koanf:"router-decode-active-request-weight" dyn:"DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT" bad:"unreadable" usage:"cost of each request that a rank serves already, in blocks"`
	HostCacheHitWeight        float64  `koanf:"router-host-cache-hit-weight" dyn:"DYN_ROUTER_HOST_CACHE_HIT_WEIGHT" bad:"unreadable" usage:"worth of a block in host memory against one on the device, 0 to 1"`
	DiskCacheHitWeight        float64  `koanf:"router-disk-cache-hit-weight" dyn:"DYN_ROUTER_DISK_CACHE_HIT_WEIGHT" bad:"unreadable" usage:"worth of a block on disk or in external storage against one on the device, 0 to 1"`
	Temperature               float64  `koanf:"router-temperature" dyn:"DYN_ROUTER_TEMPERATURE" bad:"unreadable" usage:"0 chooses the lowest cost; above, ranks are drawn, the best e^(1/temperature) times as likely as the worst"`
	UseKVEvents               bool     `koanf:"router-kv-events" dyn:"DYN_ROUTER_USE_KV_EVENTS,DYN_USE_KV_EVENTS" bad:"unreadable" usage:"learn from the engines' KV events what they have cached"`
	TrackActiveBlocks         bool     `koanf:"router-track-active-blocks" dyn:"DYN_ROUTER_TRACK_ACTIVE_BLOCKS" bad:"unreadable" usage:"count the KV blocks of prompts that are served"`
	AssumeKVReuse             bool     `koanf:"router-assume-kv-reuse" dyn:"DYN_ROUTER_ASSUME_KV_REUSE" bad:"unreadable" usage:"requests with a common prefix share its blocks on a rank; off counts them for each"`
	TrackPrefillTokens        bool     `koanf:"router-track-prefill-tokens" dyn:"DYN_ROUTER_TRACK_PREFILL_TOKENS" bad:"unreadable" usage:"count prompt tokens that wait for prefill; off leaves prefill out of the cost"`
	TrackingHash              string   `koanf:"router-tracking-hash" dyn:"DYN_ROUTER_TRACKING_HASH" usage:"how blocks of prompts in flight are told apart: public-xxh3-v1, there is no other way"`
	ActiveRequestExpirySecs   uint64   `koanf:"router-active-request-expiry-secs" dyn:"DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS" bad:"dyn" usage:"age in seconds at which a booking that was never freed is dropped, where bookings expire"`

	// DecodeOnly is for workers whose prompts others prefill: without prefill tracking, credit
	// counts against the blocks held. The command sets it.
	DecodeOnly bool `koanf:"-"`
}

// DefaultCostConfig are the defaults of the original.
func DefaultCostConfig() CostConfig {
	return CostConfig{
		OverlapScoreCredit: 1, PrefillLoadScale: 1, HostCacheHitWeight: 0.75, DiskCacheHitWeight: 0.25,
		UseKVEvents: true, TrackActiveBlocks: true, AssumeKVReuse: true, TrackPrefillTokens: true,
		TrackingHash: publicHash, ActiveRequestExpirySecs: 300,
	}
}

// Validate returns all findings, each beginning with its key. Not-a-number and infinity fail
// everywhere, so that no cost can become one.
func (c CostConfig) Validate() error {
	errs := []error{
		atLeast0("router-kv-overlap-score-credit", c.OverlapScoreCredit),
		atLeast0("router-kv-overlap-score-credit-decay", c.OverlapScoreCreditDecay),
		atLeast0("router-prefill-load-scale", c.PrefillLoadScale),
		atLeast0("router-decode-active-request-weight", c.DecodeActiveRequestWeight),
		fraction("router-host-cache-hit-weight", c.HostCacheHitWeight),
		fraction("router-disk-cache-hit-weight", c.DiskCacheHitWeight),
		atLeast0("router-temperature", c.Temperature),
	}
	if c.OverlapScoreWeight != nil {
		errs = append(errs, atLeast0("router-kv-overlap-score-weight", *c.OverlapScoreWeight))
	}
	if c.TrackingHash != publicHash {
		errs = append(errs, fmt.Errorf("router-tracking-hash: %q is not %s, the only one", c.TrackingHash, publicHash))
	}
	if c.ActiveRequestExpirySecs < 1 || c.ActiveRequestExpirySecs > maxExpirySecs {
		errs = append(errs, fmt.Errorf("router-active-request-expiry-secs: %d is not within 1..%d", c.ActiveRequestExpirySecs, maxExpirySecs))
	}
	return errors.Join(errs...)
}

// publicHash tells blocks apart by hashes that anyone can compute.
const publicHash = "public-xxh3-v1"

// maxExpirySecs is a century.
const maxExpirySecs = 100 * 365 * 24 * 60 * 60

func atLeast0(key string, x float64) error {
	if x >= 0 && x <= math.MaxFloat64 { // written so that not-a-number fails
		return nil
	}
	return fmt.Errorf("%s: %v is not a number of at least 0", key, x)
}

func fraction(key string, x float64) error {
	if x >= 0 && x <= 1 {
		return nil
	}
	return fmt.Errorf("%s: %v is not within 0..1", key, x)
}

// Override is what one request sets for itself; nil fields leave the configuration's.
type Override struct {
	OverlapScoreCredit    *float64 // overlap_score_credit
	PrefillLoadScale      *float64 // prefill_load_scale
	OverlapScoreWeight    *float64 // overlap_score_weight, deprecated: the scale, before PrefillLoadScale; 0 also sets the credit to 0
	Temperature           *float64 // router_temperature
	SharedCacheMultiplier *float64 // shared_cache_multiplier
	TrackPrefillTokens    *bool    // track_prefill_tokens
	AssumeKVReuse         *bool    // assume_kv_reuse
}

// Validate returns all findings, each beginning with the name of the member.
func (o *Override) Validate() error {
	var errs []error
	check := func(name string, x *float64, rule func(string, float64) error) {
		if x != nil {
			errs = append(errs, rule(name, *x))
		}
	}
	check("overlap_score_credit", o.OverlapScoreCredit, atLeast0)
	check("prefill_load_scale", o.PrefillLoadScale, atLeast0)
	check("overlap_score_weight", o.OverlapScoreWeight, atLeast0)
	check("router_temperature", o.Temperature, atLeast0)
	check("shared_cache_multiplier", o.SharedCacheMultiplier, fraction)
	return errors.Join(errs...)
}

// Weights are the numbers with which one request is decided.
type Weights struct {
	Credit       float64 // of a block cached on the device, in the cost alone
	CreditDecay  float64
	Host, Disk   float64 // of a block in a lower tier; one on the device is worth 1
	Shared       float64 // of a block in a cache that all workers read
	Scale        float64 // of blocks to prefill
	Requests     float64 // of a request
	Temperature  float64
	TrackPrefill bool
	AssumeReuse  bool
	DecodeOnly   bool
}

// Weights are the settings with what a request sets for itself; o may be nil and is valid.
func (c CostConfig) Weights(o *Override) Weights {
	w := Weights{
		Credit: c.OverlapScoreCredit, CreditDecay: c.OverlapScoreCreditDecay,
		Host: c.HostCacheHitWeight, Disk: c.DiskCacheHitWeight,
		Scale: c.PrefillLoadScale, Requests: c.DecodeActiveRequestWeight, Temperature: c.Temperature,
		TrackPrefill: c.TrackPrefillTokens, AssumeReuse: c.AssumeKVReuse, DecodeOnly: c.DecodeOnly,
	}
	w.deprecated(c.OverlapScoreWeight)
	if o == nil {
		return w
	}
	override(&w.Credit, o.OverlapScoreCredit)
	override(&w.Scale, o.PrefillLoadScale)
	override(&w.Temperature, o.Temperature)
	override(&w.Shared, o.SharedCacheMultiplier)
	override(&w.TrackPrefill, o.TrackPrefillTokens)
	override(&w.AssumeReuse, o.AssumeKVReuse)
	w.deprecated(o.OverlapScoreWeight)
	return w
}

func (w *Weights) deprecated(weight *float64) {
	if weight == nil {
		return
	}
	if w.Scale = *weight; *weight == 0 {
		w.Credit = 0
	}
}

func override[T any](to *T, value *T) {
	if value != nil {
		*to = *value
	}
}

// OverlapBlocks is what a rank has of a prompt, in blocks on the device. Credit, decay and scale
// do not matter to it.
func (w *Weights) OverlapBlocks(m kvindex.Match) float64 {
	return float64(m.Device) + float64(w.Host*float64(m.Host)) + float64(w.Disk*float64(m.Disk))
}

// CachedTokens is OverlapBlocks in tokens. It may be more than the prompt has.
func (w *Weights) CachedTokens(m kvindex.Match, blockSize uint32) uint64 {
	return uint64(max(math.Round(w.OverlapBlocks(m)*float64(blockSize)), 0))
}

// EffectivePrefillTokens are those of a prompt of isl tokens that a rank still has to compute: the
// prefill load that is booked.
func (w *Weights) EffectivePrefillTokens(m kvindex.Match, blockSize uint32, isl uint64) uint64 {
	return isl - min(w.CachedTokens(m, blockSize), isl)
}

// CreditBlocks is what the overlap takes off a cost, before it falls with the backlog. shared are
// the blocks of the prompt that a cache holds which all workers read: see Beyond.
func (w *Weights) CreditBlocks(m kvindex.Match, shared int) float64 { return w.credit(m, shared, 1) }

// credit is CreditBlocks with that part of what the device holds.
func (w *Weights) credit(m kvindex.Match, shared int, k float64) float64 {
	return float64(float64(w.Credit*k)*float64(m.Device)) + float64(w.Host*float64(m.Host)) +
		float64(w.Disk*float64(m.Disk)) + float64(w.Shared*float64(shared))
}

// Span is the blocks [From, To) of a prompt.
type Span struct{ From, To int }

// Beyond counts the blocks of spans that a rank with so many leading blocks on its device lacks.
func Beyond(spans []Span, device int) int {
	n := 0
	for _, s := range spans {
		n += max(0, s.To-max(s.From, device))
	}
	return n
}

// Terms tell how the cost of one candidate came about; tokens and blocks are the prompt's and the
// rank's before it. Cost = Factor x (Prefill + DecodeBlocks + Requests), but for workers that only decode.
type Terms struct {
	Rank                   worker.Rank
	Overlap                kvindex.Match // its blocks; Rank is not set
	SharedBlocks           int           // see Beyond
	CachedTokens           uint64
	EffectivePrefillTokens uint64
	ActivePrefillTokens    uint64  // P
	ActiveBlocks           uint64  // D
	AdditionalBlocks       uint64  // A
	ActiveRequests         uint64  // N
	RawBlocks              float64 // to prefill, as if nothing were cached
	CreditFactor           float64 // k, what is left of the credit for the device
	CreditBlocks           float64
	Prefill                float64 // scale x max(0, RawBlocks - CreditBlocks)
	DecodeBlocks           uint64  // D + A
	Requests               float64 // weight x N
	Factor                 float64 // by preferred taints
	Cost                   float64
}
