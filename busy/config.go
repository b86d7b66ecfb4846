package busy

import (
	"errors"
	"fmt"
	"time"
)

// Stale policies: what an engine sample that has grown too old is worth.
const (
	StaleHold = "hold" // the last values stay in force
	StaleFree = "free" // its loads count as unknown; capacities stay known
	StaleBusy = "busy" // the rank counts as busy
)

// Config are the settings of the busy rule. Thresholds are what a model starts with; they can
// be changed while running, the rest cannot.
type Config struct {
	ActiveDecodeBlocksThreshold      *float64 `koanf:"active-decode-blocks-threshold" dyn:"DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD" usage:"a rank is busy above this fraction of its KV blocks, 0 to 1 (unset: not checked)"`
	ActivePrefillTokensThreshold     *uint64  `koanf:"active-prefill-tokens-threshold" dyn:"DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD" usage:"a rank is busy above this many prompt tokens waiting for prefill (unset: not checked)"`
	ActivePrefillTokensThresholdFrac *float64 `koanf:"active-prefill-tokens-threshold-frac" dyn:"DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC" usage:"the same as a fraction of max_num_batched_tokens, may exceed 1 (unset: not checked)"`

	SignalStaleAfter time.Duration `koanf:"signal-stale-after" usage:"age at which a load sample from an engine counts as stale, at least 3 scrape intervals"`
	StalePolicy      string        `koanf:"stale-policy" usage:"what a stale sample means: hold (last value stays), free (unknown) or busy"`
	BackpressureHold time.Duration `koanf:"backpressure-hold" usage:"least time for which a worker that refused a request for capacity is passed over, up to 10s"`
	BusyReleaseRatio float64       `koanf:"busy-release-ratio" usage:"a busy rank stays busy until below this part of the threshold, 0.5 to 1 (1: no hysteresis)"`
}

// DefaultConfig sets no threshold, so nobody is ever busy.
func DefaultConfig() Config {
	return Config{
		SignalStaleAfter: 5 * time.Second,
		StalePolicy:      StaleHold,
		BackpressureHold: time.Second,
		BusyReleaseRatio: 1,
	}
}

// Validate reports every setting that is out of range; each error begins with its key.
func (c Config) Validate() error {
	errs := []error{c.Thresholds().validate("active-decode-blocks-threshold",
		"active-prefill-tokens-threshold", "active-prefill-tokens-threshold-frac")}
	if c.SignalStaleAfter <= 0 {
		errs = append(errs, fmt.Errorf("signal-stale-after: %v is not above 0", c.SignalStaleAfter))
	}
	switch c.StalePolicy {
	case StaleHold, StaleFree, StaleBusy:
	default:
		errs = append(errs, fmt.Errorf("stale-policy: %q is neither hold, free nor busy", c.StalePolicy))
	}
	if c.BackpressureHold < 0 || c.BackpressureHold > maxMark {
		errs = append(errs, fmt.Errorf("backpressure-hold: %v is not within 0s..%v", c.BackpressureHold, maxMark))
	}
	if !(c.BusyReleaseRatio >= 0.5 && c.BusyReleaseRatio <= 1) { // written so that NaN fails
		errs = append(errs, fmt.Errorf("busy-release-ratio: %v is not within 0.5..1", c.BusyReleaseRatio))
	}
	return errors.Join(errs...)
}

// Thresholds are the limits that a model starts with.
func (c Config) Thresholds() Thresholds {
	return Thresholds{c.ActiveDecodeBlocksThreshold, c.ActivePrefillTokensThreshold, c.ActivePrefillTokensThresholdFrac}
}
