package sim

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The faults that code must know by name.
const (
	refuse         = "refuse"
	slow           = "slow"
	healthFail     = "health-fail"
	healthOK       = "health-ok"
	freeze         = "freeze"
	reset          = "reset"
	closeEarly     = "close"
	garbage        = "garbage"
	bothLengths    = "both-lengths"
	oversizedHead  = "oversized-header"
	resetStream    = "reset-stream"
	closeStream    = "close-stream"
	freezeStream   = "freeze-stream"
	silence        = "silence"
	eof            = "eof"
	garbageFraming = "garbage-framing"
	garbageEvent   = "garbage-event"
	oversizedEvent = "oversized-event"
	errorEvent     = "error-event"
	overloaded     = "503-overload"
	tokenizerSlow  = "tokenizer-slow"
	tokenizerFail  = "tokenizer-fail"
	tokenizerLie   = "tokenizer-lie"
	tokenizerOff   = "tokenizer-off"
)

// stage is where a fault strikes.
type stage uint8

const (
	ofWorker stage = iota // the worker, not a request
	ofHealth              // an answer of /health or /ping
	ofHead                // instead of an answer's head, or with it
	ofBody                // amid an answer
	ofTokens              // an answer of the routes that tell tokens
)

// faultKind is one fault that can be asked for.
type faultKind struct {
	name  string
	stage stage
	takes string // its keys, beside fault, worker, seconds and, if it hits requests, count and share
}

func faultKinds() []faultKind {
	return []faultKind{
		{refuse, ofWorker, ""},
		{slow, ofWorker, "factor"},
		{healthFail, ofHealth, ""},
		{healthOK, ofWorker, ""},
		{freeze, ofHead, ""},
		{reset, ofHead, ""},
		{closeEarly, ofHead, ""},
		{"429", ofHead, "retry_after"},
		{"500", ofHead, "retry_after"},
		{"502", ofHead, "retry_after"},
		{"503", ofHead, "retry_after"},
		{overloaded, ofHead, "retry_after"},
		{garbage, ofHead, ""},
		{bothLengths, ofHead, ""},
		{oversizedHead, ofHead, "bytes"},
		{silence, ofBody, ""},
		{resetStream, ofBody, "after_tokens"},
		{closeStream, ofBody, "after_tokens"},
		{freezeStream, ofBody, "after_tokens"},
		{eof, ofBody, "after_tokens"},
		{garbageFraming, ofBody, "after_tokens"},
		{garbageEvent, ofBody, "after_tokens"},
		{oversizedEvent, ofBody, "after_tokens bytes"},
		{errorEvent, ofBody, "after_tokens code"},
		{tokenizerSlow, ofTokens, "delay_ms"},
		{tokenizerFail, ofTokens, "code"},
		{tokenizerLie, ofTokens, "extra_tokens"},
		{tokenizerOff, ofTokens, ""},
	}
}

// kindOf is the fault of a name, or nil.
func kindOf(name string) *faultKind {
	kinds := faultKinds()
	if i := slices.IndexFunc(kinds, func(k faultKind) bool { return k.name == name }); i >= 0 {
		return &kinds[i]
	}
	return nil
}

// faultSpec is a fault as it is asked for: the body of POST /sim/fault. docs/sim.md tells what
// the keys mean.
type faultSpec struct {
	Fault       string   `json:"fault"`
	Worker      *int     `json:"worker,omitempty"`
	Count       int      `json:"count,omitempty"`
	Share       *float64 `json:"share,omitempty"`
	Seconds     float64  `json:"seconds,omitempty"`
	AfterTokens *int     `json:"after_tokens,omitempty"`
	RetryAfter  *int     `json:"retry_after,omitempty"`
	Bytes       *int     `json:"bytes,omitempty"`
	Code        *int     `json:"code,omitempty"`
	Factor      *float64 `json:"factor,omitempty"`
	DelayMS     *int     `json:"delay_ms,omitempty"`
	ExtraTokens *int     `json:"extra_tokens,omitempty"`
}

const (
	maxFaultCount   = 1 << 30
	maxFaultSeconds = 86400
	maxFaultBytes   = 64 << 20
	maxFaultFactor  = 1000

	// A little above what a careful client takes: 1 MiB of head, 16 MiB of event.
	oversizedHeadBytes  = 2 << 20
	oversizedEventBytes = 17 << 20
	slowFactor          = 2
	tokenizerDelayMS    = 1000
)

// check refuses what is out of its range and keys that the fault does not take.
func (s *faultSpec) check() (*faultKind, error) {
	kind := kindOf(s.Fault)
	if kind == nil {
		var names []string
		for _, k := range faultKinds() {
			names = append(names, k.name)
		}
		return nil, badRequest("fault: %.40q is none of %s.", s.Fault, strings.Join(names, ", "))
	}
	hits := kind.stage != ofWorker // requests
	for _, key := range []struct {
		name         string
		given, takes bool
		ok           bool
		want         string
	}{
		{"count", s.Count != 0, hits, s.Count >= 0 && s.Count <= maxFaultCount, "within 0..1073741824"},
		{"share", s.Share != nil, hits, s.Share == nil || *s.Share > 0 && *s.Share <= 1, "above 0 and at most 1"},
		{"seconds", s.Seconds != 0, true, s.Seconds >= 0 && s.Seconds <= maxFaultSeconds, "within 0..86400"},
		{"after_tokens", s.AfterTokens != nil, kind.has("after_tokens"), within(s.AfterTokens, 0, 1<<28), "within 0..268435456"},
		{"retry_after", s.RetryAfter != nil, kind.has("retry_after"), within(s.RetryAfter, 0, 86400), "within 0..86400"},
		{"bytes", s.Bytes != nil, kind.has("bytes"), within(s.Bytes, 1, maxFaultBytes), "within 1..67108864"},
		{"code", s.Code != nil, kind.has("code"), within(s.Code, 400, 599), "within 400..599"},
		{"factor", s.Factor != nil, kind.has("factor"), s.Factor == nil || *s.Factor >= 1 && *s.Factor <= maxFaultFactor, "within 1..1000"},
		{"delay_ms", s.DelayMS != nil, kind.has("delay_ms"), within(s.DelayMS, 0, 1000*maxFaultSeconds), "within 0..86400000"},
		{"extra_tokens", s.ExtraTokens != nil, kind.has("extra_tokens"), within(s.ExtraTokens, 1, 1<<16), "within 1..65536"},
	} {
		if key.given && !key.takes {
			return nil, badRequest("%s: the fault %s does not take it.", key.name, s.Fault)
		}
		if !key.ok {
			return nil, badRequest("%s: is not %s.", key.name, key.want)
		}
	}
	return kind, nil
}

func (k *faultKind) has(key string) bool { return slices.Contains(strings.Fields(k.takes), key) }

func within(v *int, low, top int) bool { return v == nil || *v >= low && *v <= top }

// headerFault reads X-Sim-Fault, NAME[;key=value]...: the fault of one request.
func headerFault(v string) (*fault, error) {
	name, rest, more := strings.Cut(v, ";")
	spec := faultSpec{Fault: strings.TrimSpace(name)}
	for more {
		var pair string
		pair, rest, more = strings.Cut(rest, ";")
		key, value, _ := strings.Cut(strings.TrimSpace(pair), "=")
		n, err := strconv.Atoi(value)
		if err != nil {
			return nil, badRequest("X-Sim-Fault: %.40q is not a key and a number.", pair)
		}
		switch key {
		case "after_tokens":
			spec.AfterTokens = &n
		case "retry_after":
			spec.RetryAfter = &n
		case "bytes":
			spec.Bytes = &n
		case "code":
			spec.Code = &n
		default:
			return nil, badRequest("X-Sim-Fault: %.40q is none of after_tokens, retry_after, bytes, code.", key)
		}
	}
	kind, err := spec.check()
	if err != nil {
		return nil, fmt.Errorf("sim: read X-Sim-Fault: %w", err)
	}
	if kind.stage == ofWorker || kind.stage == ofTokens {
		return nil, badRequest("X-Sim-Fault: %s is a fault of a worker, not of a request.", kind.name)
	}
	return &fault{spec: spec, kind: *kind}, nil
}

// fault is one that has been asked for.
type fault struct {
	spec  faultSpec
	kind  faultKind
	until time.Time     // or zero
	ended chan struct{} // closed when it is cleared or replaced; nil if it is of one request

	seen, hits int // requests that it could have hit, that it has hit; guarded by faults.mu
}

func newFault(spec faultSpec, kind *faultKind, now time.Time) *fault {
	f := &fault{spec: spec, kind: *kind, ended: make(chan struct{})}
	if spec.Seconds > 0 {
		f.until = now.Add(time.Duration(spec.Seconds * float64(time.Second)))
	}
	return f
}

// wait returns when the fault is over, or errCut when ctx ends before.
func (f *fault) wait(ctx context.Context) error {
	var over <-chan time.Time
	if !f.until.IsZero() {
		timer := time.NewTimer(time.Until(f.until))
		defer timer.Stop()
		over = timer.C
	}
	select {
	case <-f.ended:
	case <-over:
	case <-ctx.Done():
		return errCut
	}
	return nil
}

// delay returns after the fault's delay, or when the fault is over, or with errCut when ctx ends before.
func (f *fault) delay(ctx context.Context) error {
	late, cancel := context.WithTimeout(ctx, time.Duration(or(f.spec.DelayMS, tokenizerDelayMS))*time.Millisecond)
	defer cancel()
	if err := f.wait(late); err != nil && ctx.Err() != nil {
		return err
	}
	return nil
}

// after is how many tokens of a stream come before the fault, or -1 for all.
func (f *fault) after() int {
	switch {
	case f.kind.name == silence:
		return 0
	case f.spec.AfterTokens != nil:
		return *f.spec.AfterTokens
	case f.kind.name == errorEvent:
		return 0
	case f.kind.name == eof:
		return -1
	}
	return 1
}

func or[T any](v *T, byDefault T) T {
	if v == nil {
		return byDefault
	}
	return *v
}
