package router

import (
	"cmp"
	"fmt"
	"math"
)

// QueueOrder decides which request of a class goes first among those of one strict priority. With j
// for the priority jump of a request, never below 0, the higher of these numbers goes first, and of
// equals the one that came first.
type QueueOrder string

// The orders.
const (
	FCFS QueueOrder = "fcfs" // j less the seconds at which it came: a jump is a head start in seconds
	WSPT QueueOrder = "wspt" // (1 + j) over the tokens to compute: short work first
	LCFS QueueOrder = "lcfs" // j and the seconds at which it came; neither flag nor file accepts it
)

// DefaultClass is the class of a profile that no file has told of.
const DefaultClass = "default"

// unknownBatch stands for the batch of a worker that has told none, so large that no rank is over
// a share of it.
const unknownBatch = 10_000_000

// Class is one class of a policy profile: who waits in it, in what order they go, and how many may.
type Class struct {
	Name    string
	Order   QueueOrder
	Quantum uint64 // tokens that a turn earns, > 0

	// A rank with more prompt tokens to compute than one of these is full to the class, and when all
	// that a request may go to are, it waits. Nil is off; with both nil nobody waits for them.
	BusyPrefillTokens *uint64
	BusyPrefillFrac   *float64 // of what the worker computes in one batch, finite, >= 0

	// Who would have to wait is refused when so many of the class do already, counted per registered
	// worker. Nil is no limit.
	MaxRequests     *uint64
	MaxISLTokens    *uint64 // prompt tokens
	MaxCachedTokens *uint64 // those of them that a worker has cached
}

// Queues tells whether requests of the class may have to wait for the prefill of others.
func (c *Class) Queues() bool { return c.BusyPrefillTokens != nil || c.BusyPrefillFrac != nil }

// Busy tells whether a rank is full to the class (scheduler.md 9.1). prefill are the prompt tokens
// that it has still to compute, batch is max_num_batched_tokens of its worker, 0 if unknown.
func (c *Class) Busy(prefill, batch uint64) bool {
	if c.BusyPrefillTokens != nil && prefill > *c.BusyPrefillTokens {
		return true
	}
	if batch == 0 {
		batch = unknownBatch
	}
	return c.BusyPrefillFrac != nil && float64(prefill) > *c.BusyPrefillFrac*float64(batch)
}

// LimitKind is what there is too much of.
type LimitKind string

// The limits of a class, in the order in which they are looked at.
const (
	LimitRequests     LimitKind = "requests"
	LimitISLTokens    LimitKind = "raw_isl_tokens"
	LimitCachedTokens LimitKind = "cached_tokens"
)

// LimitKinds are all of them.
var LimitKinds = [...]LimitKind{LimitRequests, LimitISLTokens, LimitCachedTokens}

// ClassLimitError means that a request would have had to wait, and that as much of its class waits
// as may.
type ClassLimitError struct {
	Class          string
	Kind           LimitKind
	Current, Limit uint64
}

func (e *ClassLimitError) Error() string {
	return fmt.Sprintf("router policy class %q queue %s limit reached (current=%d, limit=%d)", e.Class, e.Kind, e.Current, e.Limit)
}

// Backlog is what waits in a class.
type Backlog struct {
	Requests     uint64
	ISLTokens    uint64
	CachedTokens uint64
}

// limit is the refusal of one more request where this much waits already and there are so many
// workers, or nil. The request itself does not count: the one that crosses a limit is taken.
func (c *Class) limit(b Backlog, workers int) error {
	for _, l := range [...]struct {
		kind    LimitKind
		each    *uint64
		current uint64
	}{
		{LimitRequests, c.MaxRequests, b.Requests},
		{LimitISLTokens, c.MaxISLTokens, b.ISLTokens},
		{LimitCachedTokens, c.MaxCachedTokens, b.CachedTokens},
	} {
		if l.each == nil {
			continue
		}
		if most := saturatingProduct(*l.each, uint64(workers)); l.current >= most {
			return &ClassLimitError{Class: c.Name, Kind: l.kind, Current: l.current, Limit: most}
		}
	}
	return nil
}

func saturatingProduct(a, b uint64) uint64 {
	if b != 0 && a > math.MaxUint64/b {
		return math.MaxUint64
	}
	return a * b
}

// Profile is the classes of one model. It is read-only.
type Profile struct {
	Classes []Class // at least one

	synthetic bool // no file has told of it: one class, in which tenants take turns
	buckets   []bucket
	explicit  map[string]int   // index in Classes of a class that is chosen by its own name
	families  map[string][]int // index in Classes for each bucket
	family    string           // for those who name none that is known
}

// bucket is the prompts of which at least so many tokens are cached nowhere.
type bucket struct {
	floor uint64
	name  string
}

// Queues tells whether any class has requests wait for the prefill of others. Workers then have to
// tell how many tokens they compute in one batch.
func (p *Profile) Queues() bool {
	for i := range p.Classes {
		if p.Classes[i].Queues() {
			return true
		}
	}
	return false
}

// Class is the index in Classes of the class for a request that asks for one by name, "" for none,
// and of which so many tokens are cached nowhere that it may go (scheduler.md 10).
func (p *Profile) Class(name string, uncached uint64) int {
	if p.synthetic {
		return 0
	}
	if i, ok := p.explicit[name]; ok {
		return i
	}
	family, ok := p.families[name]
	if !ok {
		family = p.families[p.family]
	}
	b := len(p.buckets) - 1
	for b > 0 && p.buckets[b].floor > uncached {
		b--
	}
	return family[b]
}

// syntheticProfile is what holds where no file has told otherwise. threshold is nil if nobody waits
// for prefills.
func syntheticProfile(threshold *float64, order QueueOrder) *Profile {
	return &Profile{
		Classes:   []Class{{Name: DefaultClass, Order: cmp.Or(order, FCFS), Quantum: 1, BusyPrefillFrac: threshold}},
		synthetic: true,
	}
}

// Policies are the profiles of a policy file. They are read-only; nil are none.
type Policies struct {
	root   *Profile // for models that are not in models, or nil
	models map[string]*Profile
}

// profile is that of a model by its canonical name, nil if the file has none for it.
func (p *Policies) profile(model string) *Profile {
	if p == nil {
		return nil
	}
	if own, ok := p.models[model]; ok {
		return own
	}
	return p.root
}

// queues tells whether any class of any profile has requests wait.
func (p *Policies) queues() bool {
	if p == nil {
		return false
	}
	for _, own := range p.models {
		if own.Queues() {
			return true
		}
	}
	return p.root != nil && p.root.Queues()
}
