package router

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"spillway/busy"
	"spillway/kvindex"
	"spillway/tracker"
	"spillway/worker"
)

// Why a request was not placed. Nothing has been booked then.
var (
	ErrUnknownModel = errors.New("model is unknown")
	ErrNoWorkers    = errors.New("no worker is registered for the model")
	ErrUnroutable   = errors.New("no worker of the model is routable")
	ErrOverloaded   = errors.New("every routable worker is busy")
	ErrPinMissing   = errors.New("direct mode serves pinned requests only")
	ErrPinUnknown   = errors.New("the pinned worker or rank does not serve the model")
	ErrPinBusy      = errors.New("the pinned worker is busy")
	ErrPinForbidden = errors.New("the pinned worker is not among those that the request allows")
)

// Partition decides for one (model, tenant), one request at a time. It is safe for concurrent use.
type Partition struct {
	Key     worker.Partition
	Busy    *busy.List       // thresholds, reports and verdicts
	Tracker *tracker.Tracker // what the ranks have been promised
	mode    Mode
	cost    CostConfig
	profile *Profile      // the classes of the queue
	refresh time.Duration // the wait after which overlaps are looked up again; 0 is never
	places  *places       // of the model
	waiting atomic.Int64  // queue.n, for those who do not hold mu
	given   atomic.Uint64 // counts what may have made room

	mu     sync.Mutex // guards the fields below; held over pick and Reserve, before the locks of Busy and Tracker
	rng    *rand.Rand
	last   worker.ID   // chosen last in round-robin
	slots  []candidate // by the slot that Busy gave the worker
	fit    []int32     // scratch: slots that may be picked
	rooms  []busy.Room // scratch: ranks that may be picked
	one    [1]int32    // scratch: a slot
	queue  queue       // requests that wait
	looked picture     // when those who wait were last looked at

	sessions  *sessions   // nil if it remembers none
	allowed   []worker.ID // scratch: an allow-list, sorted
	scheduler scheduler   // of KV mode, and for who waits
}

// candidate is a registered worker; the zero value is an empty slot.
type candidate struct {
	id     worker.ID // of worker, at hand for searches
	worker *worker.Worker
	book   *tracker.Book
	multi  bool // more than one rank is declared or was ever free at once
}

// Query is what is known of a request when a rank is chosen for it.
type Query struct {
	Reservation  string           // ID to book under; unique in the partition
	PromptTokens uint64           // ISL, not less than what the worker will count
	NoDecode     bool             // nothing is generated (embeddings): no KV blocks are booked
	Only         []*worker.Worker // allow-list by ID, nil for all
	Exclude      []worker.ID      // workers that failed this request already
	Worker       *worker.ID       // pin to a worker, or nil
	DP           *uint32          // pin to a rank, or nil
	Allowed      []worker.ID      // allow-list in any order, nil for all, empty for nobody
	Taints       []string         // which the worker must carry, all of them
	Session      string           // goes where it was before if there is room; "" is none

	// The rest matters in KV mode alone. Hashing and the query of the index are the caller's to do
	// before, outside of any lock. What is pointed to must stay as it is while the request waits.

	BlockSize      uint32           // tokens per block of SequenceHashes and Overlaps; 0 is 16
	SequenceHashes []uint64         // of the prompt's complete blocks; not kept once the request is placed
	PrivateBlocks  uint64           // further blocks of the prompt, shared with no other request
	Overlaps       *kvindex.Matches // what ranks have of the prompt, or nil
	Shared         []Span           // of the prompt's blocks, in a cache that all workers read
	Preferred      []Preference     // taints that make a worker cheaper or dearer
	Override       *Override        // valid, or nil
	Expires        bool             // the booking does, by CostConfig.ActiveRequestExpirySecs
	NoBooking      bool             // only tell: nothing is booked
	Explain        *[]Terms         // gets the terms of all candidates, by worker and rank, or nil
}

// Preference is a taint and by how much workers that carry it are preferred: costs are multiplied
// by exp(-tanh(sum of weights)). A negative weight repels.
type Preference struct {
	Taint  string
	Weight float32
}

func (q *Query) pinned() bool { return q.Worker != nil || q.DP != nil }

// restricted tells whether there are workers that the request may not go to, but for those that have
// failed it.
func (q *Query) restricted() bool {
	return q.pinned() || q.Only != nil || q.Allowed != nil || len(q.Taints) > 0
}

// Selection is where a request goes. Its load is booked until Free.
type Selection struct {
	Worker    *worker.Worker
	Rank      worker.Rank // worker.AnyDP where the engine picks the rank
	MultiRank bool        // the rank has to be named to the worker
	BlockSize uint32      // tokens per KV block

	Booked       worker.Rank // where it is booked: Rank, but for a client's choice of one where the engine picks
	DecodeBlocks uint64      // KV blocks that are booked for the prompt
	Session      SessionEffect

	// Of KV mode, as the decision saw the rank.

	EffectivePrefillTokens uint64  // of the prompt, still to be computed; this is booked, if prefill is tracked
	CachedTokens           uint64  // the rest of the prompt, and beyond it if more is cached
	OverlapBlocks          float64 // cached blocks, those of lower tiers by their weight
	PotentialBlocks        uint64  // that the rank holds with the prompt
	TracksPrefill          bool    // whether prefill is tracked for this request
}

// Select picks a rank and books the request on it, in one step. It returns one of the errors
// above except ErrUnknownModel, or one that wraps tracker.ErrDuplicate; then nothing is booked.
// It does not look at who waits: see Wait.
func (p *Partition) Select(q Query, now time.Time) (Selection, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.selectLocked(&q, now)
}

func (p *Partition) selectLocked(q *Query, now time.Time) (Selection, error) {
	if p.Busy.Due(now) {
		p.Busy.Tick(now)
	}
	switch {
	case len(p.Busy.Snapshot().Registered) == 0:
		return Selection{}, ErrNoWorkers
	case p.mode == Direct && q.Worker == nil:
		return Selection{}, ErrPinMissing
	case q.Worker != nil && q.Allowed != nil && !slices.Contains(q.Allowed, *q.Worker):
		return Selection{}, ErrPinForbidden
	}
	if p.sessions != nil && q.Session != "" {
		return p.inSessionLocked(q, now)
	}
	return p.decideLocked(q, now)
}

// decideLocked picks a rank by the mode and books the request on it.
func (p *Partition) decideLocked(q *Query, now time.Time) (Selection, error) {
	snap := p.Busy.Snapshot()
	sel, err := p.placeLocked(p.suitableLocked(snap.FreeSlots, q, q.Exclude), q, false, now)
	if !errors.Is(err, tracker.ErrBusy) {
		return sel, err
	}
	snap = p.Busy.Snapshot() // a report may have come in since
	if err := p.refusalLocked(q, snap); err != nil {
		return Selection{}, err
	}
	// Those that the request may use are all marked.
	sel, err = p.placeLocked(p.suitableLocked(snap.RoutableSlots, q, q.Exclude), q, true, now)
	if errors.Is(err, tracker.ErrBusy) {
		return Selection{}, busyError(q)
	}
	return sel, err
}

// refusalLocked is why there is no free worker for q, or nil if only marks are in the way: without
// thresholds they are no more than a preference.
func (p *Partition) refusalLocked(q *Query, snap *busy.Snapshot) error {
	switch {
	case q.pinned() && len(p.suitableLocked(snap.RegisteredSlots, q, nil)) == 0:
		return ErrPinUnknown
	case len(p.suitableLocked(snap.RoutableSlots, q, q.Exclude)) == 0:
		return ErrUnroutable
	case !snap.ThresholdsSet:
		return nil
	}
	return busyError(q)
}

// busyError is the refusal of q where all are busy.
func busyError(q *Query) error {
	if q.pinned() {
		return ErrPinBusy
	}
	return ErrOverloaded
}

// Full tells whether Select would refuse any request that is pinned to nothing and may go to every
// worker, because all that are routable are busy.
func (p *Partition) Full(now time.Time) bool {
	if p.Busy.Due(now) {
		p.Busy.Tick(now)
	}
	snap := p.Busy.Snapshot()
	return p.mode != Direct && snap.ThresholdsSet && len(snap.FreeSlots) == 0 && len(snap.RoutableSlots) > 0
}

// suitableLocked returns those of slots, which are in the order of worker IDs, that the request
// may go to, however busy they are. The result is good until the next call.
func (p *Partition) suitableLocked(slots []int32, q *Query, exclude []worker.ID) []int32 {
	if !q.restricted() && len(exclude) == 0 {
		return slots
	}
	if q.Worker != nil {
		slots = p.slotOf(*q.Worker, slots)
	}
	p.fit = p.fit[:0]
	only := q.Only
	p.allowed = append(p.allowed[:0], q.Allowed...)
	slices.Sort(p.allowed)
	allowed := p.allowed
	for _, slot := range slots {
		c := &p.slots[slot]
		for len(only) > 0 && only[0].ID < c.id {
			only = only[1:]
		}
		for len(allowed) > 0 && allowed[0] < c.id {
			allowed = allowed[1:]
		}
		switch {
		case q.Only != nil && (len(only) == 0 || only[0].ID != c.id):
		case q.Worker != nil && *q.Worker != c.id:
		case q.DP != nil && !declares(c.worker, *q.DP):
		case slices.Contains(exclude, c.id):
		case q.Allowed != nil && (len(allowed) == 0 || allowed[0] != c.id):
		case !carries(c.worker, q.Taints):
		default:
			p.fit = append(p.fit, slot)
		}
	}
	return p.fit
}

// carries tells whether a worker has all of the taints.
func carries(w *worker.Worker, taints []string) bool {
	for _, t := range taints {
		if !slices.Contains(w.Taints, t) {
			return false
		}
	}
	return true
}

// slotOf returns the slot of a worker out of slots, which are in the order of worker IDs.
func (p *Partition) slotOf(id worker.ID, slots []int32) []int32 {
	i, found := slices.BinarySearchFunc(slots, id, func(s int32, id worker.ID) int { return cmp.Compare(p.slots[s].id, id) })
	if !found {
		return nil
	}
	return slots[i : i+1]
}

// declares tells whether a client may ask for the rank: of a worker that declares none it knows
// rank 0 alone.
func declares(w *worker.Worker, dp uint32) bool {
	return dp >= w.DPStart && dp-w.DPStart < max(w.DPSize, 1)
}

// placeLocked books q on one of the workers in slots, tracker.ErrBusy if none has a rank to spare.
// With marked, the mark of a pinned rank does not matter.
func (p *Partition) placeLocked(slots []int32, q *Query, marked bool, now time.Time) (Selection, error) {
	if p.mode == KV {
		return p.cheapestLocked(slots, q, marked, now)
	}
	return p.pickedLocked(slots, q, marked, now)
}

// PrefillDone takes the prompt of a request off the prefill load of its rank, once. It tells where
// the request is booked, if it is.
func (p *Partition) PrefillDone(id string, now time.Time) (worker.Rank, bool) {
	rank, effect := p.Tracker.PrefillDone(id, now)
	if effect == tracker.Changed {
		p.Busy.Refresh(rank.Worker, now)
		p.given.Add(1)
	}
	return rank, effect != tracker.Unknown
}

// Grow books KV blocks that the output of a request has filled. decay is that of tracker.Grow.
func (p *Partition) Grow(id string, blocks uint64, decay *float64, now time.Time) {
	if rank, effect := p.Tracker.Grow(id, blocks, decay, now); effect == tracker.Changed {
		p.Busy.Refresh(rank.Worker, now)
	}
}

// Free gives back all that is booked under id. Freeing twice is harmless. It tells where that was
// booked, if it was.
func (p *Partition) Free(id string, now time.Time) (worker.Rank, bool) {
	rank, ok := p.Tracker.Free(id, now)
	if ok {
		p.Busy.Refresh(rank.Worker, now)
		p.given.Add(1)
	}
	return rank, ok
}

// Reserve books r on the rank that it names, whatever the load and without a decision. It returns
// the errors of tracker.Reserve.
func (p *Partition) Reserve(r tracker.Reservation, now time.Time) error {
	err := p.Tracker.Reserve(r, tracker.NoLimit, now)
	if err == nil {
		p.Busy.Refresh(r.Rank.Worker, now)
	}
	return err
}

// Expire frees what was learned from other processes too long ago. It is called now and then.
func (p *Partition) Expire(now time.Time) {
	for _, gone := range p.Tracker.Expire(now) {
		p.Busy.Refresh(gone.Rank.Worker, now)
		p.given.Add(1)
	}
}

// Sessions is how many sessions are remembered, and how many may be; 0 of 0 if none is.
func (p *Partition) Sessions(now time.Time) (remembered, limit int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.sessions == nil {
		return 0, 0
	}
	p.sessions.expire(now)
	return len(p.sessions.byKey), p.sessions.limit
}

// Recovery is how long until the first inhibited worker is tried again; 0 if none is inhibited.
func (p *Partition) Recovery(now time.Time) time.Duration { return p.Busy.Recovery(now) }

func (p *Partition) register(w *worker.Worker, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	book := p.Tracker.Register(w, now)
	p.Busy.Register(w, now)
	slot, _ := p.Busy.Slot(w.ID)
	for len(p.slots) <= slot {
		p.slots = append(p.slots, candidate{})
	}
	p.slots[slot] = candidate{id: w.ID, worker: w, book: book, multi: w.DPSize > 1}
}

func (p *Partition) unregister(id worker.ID, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if slot, ok := p.Busy.Slot(id); ok {
		p.slots[slot] = candidate{}
	}
	p.Busy.Unregister(id, now)
	p.Tracker.Unregister(id)
}
