package busy

import (
	"errors"
	"fmt"
	"math"
)

// Thresholds are the limits of one model. Each is optional and works on its own: nil is off,
// 0 is a limit. A value is over a limit only if it is strictly greater. What the pointers
// point at is never written to by this package.
type Thresholds struct {
	DecodeFrac    *float64 // of a rank's KV blocks, 0 to 1
	PrefillTokens *uint64  // prompt tokens not yet through prefill, up to 2^63-1
	PrefillFrac   *float64 // the same as a fraction of the engine's per-step token budget; may exceed 1
}

// Any reports whether a limit is set. Without one nobody is ever busy.
func (t Thresholds) Any() bool {
	return t.DecodeFrac != nil || t.PrefillTokens != nil || t.PrefillFrac != nil
}

// Merge returns t with the limits that are set in o in place of its own.
func (t Thresholds) Merge(o Thresholds) Thresholds {
	if o.DecodeFrac != nil {
		t.DecodeFrac = o.DecodeFrac
	}
	if o.PrefillTokens != nil {
		t.PrefillTokens = o.PrefillTokens
	}
	if o.PrefillFrac != nil {
		t.PrefillFrac = o.PrefillFrac
	}
	return t
}

// Equal reports whether both set the same limits to the same values.
func (t Thresholds) Equal(o Thresholds) bool {
	return same(t.DecodeFrac, o.DecodeFrac) && same(t.PrefillTokens, o.PrefillTokens) &&
		same(t.PrefillFrac, o.PrefillFrac)
}

// Validate reports every limit that is out of range. Each error begins with the name that the
// limit has in the JSON of /busy_threshold.
func (t Thresholds) Validate() error {
	return t.validate("active_decode_blocks_threshold", "active_prefill_tokens_threshold",
		"active_prefill_tokens_threshold_frac")
}

func (t Thresholds) validate(decode, prefill, frac string) error {
	var errs []error
	if v := t.DecodeFrac; v != nil && !(*v >= 0 && *v <= 1) { // written so that NaN fails
		errs = append(errs, fmt.Errorf("%s: %v is not within 0..1", decode, *v))
	}
	if v := t.PrefillTokens; v != nil && *v > math.MaxInt64 {
		errs = append(errs, fmt.Errorf("%s: %d is above %d", prefill, *v, int64(math.MaxInt64)))
	}
	if v := t.PrefillFrac; v != nil && !(*v >= 0 && *v <= math.MaxFloat64) {
		errs = append(errs, fmt.Errorf("%s: %v is not a finite number of at least 0", frac, *v))
	}
	return errors.Join(errs...)
}

// clone copies what the pointers point at, so that a caller may reuse its variables.
func (t Thresholds) clone() Thresholds {
	return Thresholds{copied(t.DecodeFrac), copied(t.PrefillTokens), copied(t.PrefillFrac)}
}

// Report is what is known of one rank. An unknown count is 0: all limits are at least 0 and
// the comparison is strict, so a 0 never makes a rank busy.
type Report struct {
	// DecodeBlocks and PrefillTokens are what the rank has been promised (A and P). They are
	// fractional where an engine spreads a worker's load over its ranks itself. Tokens are
	// exact up to 2^53.
	DecodeBlocks  float64
	PrefillTokens float64

	UsedBlocks uint64  // KV blocks in use as the engine reports them (U), valid if UsedKnown
	UsedKnown  bool    // tells "0 in use" from "not reported"
	UsageRatio float64 // as the engine reports it; compared only where U/T cannot be

	TotalBlocks      uint64 // KV blocks of the rank (T), 0: unknown
	MaxBatchedTokens uint64 // tokens per engine step (M), 0: unknown
}

// PromisedRatio is A/T, or 0 if T is unknown.
func (r Report) PromisedRatio() float64 {
	if r.TotalBlocks == 0 {
		return 0
	}
	return r.DecodeBlocks / float64(r.TotalBlocks)
}

// ReportedRatio is U/T, or the ratio that the engine gave if U or T is unknown, or 0.
func (r Report) ReportedRatio() float64 {
	if r.UsedKnown && r.TotalBlocks > 0 {
		return float64(r.UsedBlocks) / float64(r.TotalBlocks)
	}
	return r.UsageRatio
}

// PrefillRatio is P/M, or 0 if M is unknown.
func (r Report) PrefillRatio() float64 {
	if r.MaxBatchedTokens == 0 {
		return 0
	}
	return r.PrefillTokens / float64(r.MaxBatchedTokens)
}

// Checks is a set of reasons for which a rank is busy; the empty set is a free rank.
type Checks uint8

// The reasons. CheckDecodeBlocks is two in one, because what was promised and what the engine
// reports are compared apart; use Has.
const (
	checkPromised Checks = 1 << iota
	checkReported
	CheckPrefillTokens // P is over its limit
	CheckPrefillFrac   // P/M is over its limit
	CheckBackpressure  // the worker refused a request for capacity
	CheckStale         // the engine fell silent, and the policy takes that for load

	CheckDecodeBlocks = checkPromised | checkReported // A/T or U/T is over its limit
)

// checkNames are the words of metrics and log records.
var checkNames = [...]struct {
	check Checks
	name  string
}{
	{CheckDecodeBlocks, "decode_blocks"},
	{CheckPrefillTokens, "prefill_tokens"},
	{CheckPrefillFrac, "prefill_tokens_frac"},
	{CheckBackpressure, "backpressure"},
	{CheckStale, "stale"},
}

// Busy reports whether there is any reason.
func (c Checks) Busy() bool { return c != 0 }

// Has reports whether c and o have a reason in common.
func (c Checks) Has(o Checks) bool { return c&o != 0 }

// Names are the reasons as metrics and logs call them: decode_blocks, prefill_tokens,
// prefill_tokens_frac, backpressure, stale.
func (c Checks) Names() []string {
	var names []string
	for _, n := range checkNames {
		if c.Has(n.check) {
			names = append(names, n.name)
		}
	}
	return names
}

// Check tells which limits a rank is over. It divides, as the rule is written: 0.29*100 is
// below 29 in float64, so multiplying would call 29 of 100 blocks over a limit of 0.29.
func (t Thresholds) Check(r Report) Checks { return t.check(r, 0, 1) }

// check is Check for a rank that was found over the limits in held: those count as exceeded
// until the value is not above release times the limit.
func (t Thresholds) check(r Report, held Checks, release float64) Checks {
	var c Checks
	limit := func(by Checks, at float64) float64 {
		if held.Has(by) {
			return release * at
		}
		return at
	}
	if t.DecodeFrac != nil {
		if r.PromisedRatio() > limit(checkPromised, *t.DecodeFrac) {
			c |= checkPromised
		}
		if r.ReportedRatio() > limit(checkReported, *t.DecodeFrac) {
			c |= checkReported
		}
	}
	if t.PrefillTokens != nil && r.PrefillTokens > limit(CheckPrefillTokens, float64(*t.PrefillTokens)) {
		c |= CheckPrefillTokens
	}
	if t.PrefillFrac != nil && r.PrefillRatio() > limit(CheckPrefillFrac, *t.PrefillFrac) {
		c |= CheckPrefillFrac
	}
	return c
}

func same[T comparable](a, b *T) bool {
	return a == b || a != nil && b != nil && *a == *b
}

func copied[T any](p *T) *T {
	if p == nil {
		return nil
	}
	v := *p
	return &v
}
