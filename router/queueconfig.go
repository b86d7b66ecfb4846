package router

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"time"
)

// QueueConfig is what an operator sets about requests that wait for the prefill of others.
type QueueConfig struct {
	QueueThreshold *float64   `koanf:"router-queue-threshold" dyn:"DYN_ROUTER_QUEUE_THRESHOLD" bad:"unreadable" usage:"requests wait while all ranks have more prompt tokens to compute than this share of max_num_batched_tokens; None: they never do"`
	QueuePolicy    QueueOrder `koanf:"router-queue-policy" dyn:"DYN_ROUTER_QUEUE_POLICY" bad:"dyn" usage:"which of them goes first: fcfs or wspt"`
	PolicyConfig   string     `koanf:"router-policy-config" dyn:"DYN_ROUTER_POLICY_CONFIG" usage:"YAML file of the classes that they wait in, instead of these two"`

	OverlapRefreshAfterSecs float64 `koanf:"router-overlap-refresh-after-secs" dyn:"DYN_ROUTER_OVERLAP_REFRESH_AFTER_SECS" bad:"dyn" usage:"seconds of waiting after which the KV index is asked again; 0 is never"`

	SelectionPolicy        string `koanf:"router-worker-selection-policy" dyn:"DYN_ROUTER_WORKER_SELECTION_POLICY" usage:"plug-in that chooses the worker: default is the only one"`
	PrefillSelectionPolicy string `koanf:"router-prefill-policy" dyn:"DYN_ROUTER_PREFILL_POLICY" usage:"the same for prefill workers"`
	DecodeSelectionPolicy  string `koanf:"router-decode-policy" dyn:"DYN_ROUTER_DECODE_POLICY" usage:"the same for decode workers"`

	Policies *Policies `koanf:"-"` // of the file PolicyConfig, read by ReadFiles; nil for none
}

// DefaultQueueConfig has nobody wait.
func DefaultQueueConfig() QueueConfig {
	return QueueConfig{QueuePolicy: FCFS, OverlapRefreshAfterSecs: 10}
}

// ReadFiles reads the policy file, if there is one.
func (c *QueueConfig) ReadFiles(read func(path string) ([]byte, error)) error {
	if c.PolicyConfig == "" {
		return nil
	}
	b, err := read(c.PolicyConfig)
	if err != nil {
		return fmt.Errorf("router-policy-config: %w", err)
	}
	if c.Policies, err = ParsePolicies(b); err != nil {
		return fmt.Errorf("router-policy-config: %s: %w", c.PolicyConfig, err)
	}
	return nil
}

// Validate returns all findings.
func (c QueueConfig) Validate() error {
	var errs []error
	if c.QueueThreshold != nil {
		errs = append(errs, atLeast0("router-queue-threshold", *c.QueueThreshold))
	}
	if order := cmp.Or(c.QueuePolicy, FCFS); order != FCFS && order != WSPT {
		errs = append(errs, fmt.Errorf("router-queue-policy: %q is neither fcfs nor wspt", c.QueuePolicy))
	}
	for _, s := range []struct{ key, name string }{
		{"router-worker-selection-policy", c.SelectionPolicy},
		{"router-prefill-policy", c.PrefillSelectionPolicy},
		{"router-decode-policy", c.DecodeSelectionPolicy},
	} {
		if cmp.Or(s.name, BuiltInSelection) != BuiltInSelection {
			errs = append(errs, fmt.Errorf("%s: there is no policy %q; the built-in one is %s", s.key, s.name, BuiltInSelection))
		}
	}
	return errors.Join(errs...)
}

// refreshAfter is the wait after which overlaps are looked up again; 0 is never.
func (c QueueConfig) refreshAfter() time.Duration {
	secs := c.OverlapRefreshAfterSecs
	if !(secs > 0 && secs <= math.MaxFloat64) {
		return 0
	}
	return time.Duration(min(secs, float64(math.MaxInt64/int64(time.Second)/2)) * float64(time.Second))
}
