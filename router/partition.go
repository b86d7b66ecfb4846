package router

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"spillway/busy"
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
)

// Partition decides for one (model, tenant), one request at a time. It is safe for concurrent use.
type Partition struct {
	Key     worker.Partition
	Busy    *busy.List       // thresholds, reports and verdicts
	Tracker *tracker.Tracker // what the ranks have been promised
	mode    Mode

	mu    sync.Mutex // guards the fields below; held over pick and Reserve, before the locks of Busy and Tracker
	rng   *rand.Rand
	last  worker.ID   // chosen last in round-robin
	slots []candidate // by the slot that Busy gave the worker
	fit   []int32     // scratch: slots that may be picked
	rooms []busy.Room // scratch: ranks that may be picked
}

type candidate struct {
	worker *worker.Worker // nil: the slot is empty
	book   *tracker.Book
}

// Query is what is known of a request when a rank is chosen for it.
type Query struct {
	Reservation  string           // ID to book under; unique in the partition
	PromptTokens uint64           // ISL, not less than what the worker will count
	NoDecode     bool             // nothing is generated (embeddings): no KV blocks are booked
	Only         []*worker.Worker // allow-list, nil for all
	Exclude      []worker.ID      // workers that failed this request already
	Worker       *worker.ID       // pin to a worker, or nil
	DP           *uint32          // pin to a rank, or nil
}

// Selection is where a request goes. Its load is booked until Free.
type Selection struct {
	Worker    *worker.Worker
	Rank      worker.Rank
	MultiRank bool   // the rank has to be named to the worker
	BlockSize uint32 // tokens per KV block
}

// Select picks a rank and books the request on it, in one step. It returns one of the errors
// above except ErrUnknownModel; then nothing is booked.
func (p *Partition) Select(q Query, now time.Time) (Selection, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	snap := p.Busy.Snapshot()
	if len(snap.Registered) == 0 {
		return Selection{}, ErrNoWorkers
	}
	if q.Worker != nil {
		return p.pinnedLocked(q, snap, now)
	}
	if p.mode == Direct {
		return Selection{}, ErrPinMissing
	}
	if q.DP != nil && !p.rankExistsLocked(q) {
		return Selection{}, ErrPinUnknown
	}
	if !slices.ContainsFunc(snap.RoutableSlots, func(s int32) bool { return p.allowedLocked(s, q) }) {
		return Selection{}, ErrUnroutable
	}
	fit := snap.FreeSlots
	if q.Only != nil || len(q.Exclude) > 0 || q.DP != nil {
		p.fit = p.fit[:0]
		for _, s := range snap.FreeSlots {
			if p.allowedLocked(s, q) {
				p.fit = append(p.fit, s)
			}
		}
		fit = p.fit
	}
	for len(fit) > 0 {
		i := p.pickLocked(fit)
		c := p.slots[fit[i]]
		sel, err := p.bookLocked(c.worker, q, now)
		if !errors.Is(err, tracker.ErrBusy) {
			if err == nil {
				p.last = c.worker.ID
			}
			return sel, err
		}
		// Another writer of the tracker was faster: this worker is full, look at the rest.
		p.fit = append(p.fit[:0], fit...)
		fit = slices.Delete(p.fit, i, i+1)
	}
	if q.DP != nil {
		return Selection{}, ErrPinBusy
	}
	return Selection{}, ErrOverloaded
}

func (p *Partition) pinnedLocked(q Query, snap *busy.Snapshot, now time.Time) (Selection, error) {
	slot, ok := p.Busy.Slot(*q.Worker)
	if !ok || p.slots[slot].worker == nil || !p.allowedLocked(int32(slot), q) {
		return Selection{}, ErrPinUnknown
	}
	if _, ok := slices.BinarySearch(snap.Routable, *q.Worker); !ok {
		return Selection{}, ErrUnroutable
	}
	sel, err := p.bookLocked(p.slots[slot].worker, q, now)
	if errors.Is(err, tracker.ErrBusy) {
		return Selection{}, ErrPinBusy
	}
	return sel, err
}

// bookLocked books q on the rank of w with the fewest requests. tracker.ErrBusy means that w has
// no rank to spare.
func (p *Partition) bookLocked(w *worker.Worker, q Query, now time.Time) (Selection, error) {
	p.rooms = p.Busy.FreeRanks(w.ID, p.rooms[:0])
	multi := w.DPSize > 1 || len(p.rooms) > 1
	p.rng.Shuffle(len(p.rooms), func(i, j int) { p.rooms[i], p.rooms[j] = p.rooms[j], p.rooms[i] })
	if len(p.rooms) > 1 {
		slices.SortStableFunc(p.rooms, func(a, b busy.Room) int {
			return cmp.Compare(p.Tracker.Load(worker.Rank{Worker: w.ID, DP: a.DP}).Requests,
				p.Tracker.Load(worker.Rank{Worker: w.ID, DP: b.DP}).Requests)
		})
	}
	blockSize := p.Busy.BlockSize(w.ID)
	for _, room := range p.rooms {
		if q.DP != nil && room.DP != *q.DP && room.DP != worker.AnyDP {
			continue
		}
		r := tracker.Reservation{
			ID: q.Reservation, Rank: worker.Rank{Worker: w.ID, DP: room.DP}, PrefillTokens: q.PromptTokens,
		}
		if !q.NoDecode {
			r.DecodeBlocks = q.PromptTokens / uint64(blockSize)
		}
		limit := tracker.Limit{PrefillTokens: room.MaxPrefillTokens, DecodeBlocks: room.MaxDecodeBlocks}
		switch err := p.Tracker.Reserve(r, limit, now); {
		case err == nil:
			p.Busy.Refresh(w.ID, now)
			return Selection{
				Worker: w, Rank: r.Rank, BlockSize: blockSize,
				MultiRank: multi && room.DP != worker.AnyDP,
			}, nil
		case !errors.Is(err, tracker.ErrBusy):
			return Selection{}, fmt.Errorf("router: reserve: %w", err)
		}
	}
	return Selection{}, tracker.ErrBusy
}

// allowedLocked tells whether the request may go to the worker in a slot, however busy it is.
func (p *Partition) allowedLocked(slot int32, q Query) bool {
	w := p.slots[slot].worker
	return (q.Only == nil || slices.ContainsFunc(q.Only, func(o *worker.Worker) bool { return o.ID == w.ID })) &&
		!slices.Contains(q.Exclude, w.ID) && (q.DP == nil || declares(w, *q.DP))
}

func (p *Partition) rankExistsLocked(q Query) bool {
	return slices.ContainsFunc(p.slots, func(c candidate) bool { return c.worker != nil && declares(c.worker, *q.DP) })
}

// declares tells whether a worker may have the rank: all that declare none have rank 0 alone as
// far as a client can know.
func declares(w *worker.Worker, dp uint32) bool {
	return dp >= w.DPStart && dp-w.DPStart < max(w.DPSize, 1)
}

// pickLocked returns the index in fit, which is not empty, of the slot to try.
func (p *Partition) pickLocked(fit []int32) int {
	switch p.mode {
	case Random:
		return p.rng.IntN(len(fit))
	case PowerOfTwo:
		i := p.rng.IntN(len(fit))
		if len(fit) == 1 {
			return i
		}
		j := (i + 1 + p.rng.IntN(len(fit)-1)) % len(fit) // another one; which comes first is random
		if p.requests(fit[j]) < p.requests(fit[i]) {
			return j
		}
		return i
	case LeastLoaded:
		best, least, ties := 0, int64(0), 0
		for i, s := range fit {
			switch n := p.requests(s); {
			case ties == 0 || n < least:
				best, least, ties = i, n, 1
			case n == least:
				if ties++; p.rng.IntN(ties) == 0 {
					best = i
				}
			}
		}
		return best
	}
	// Round-robin goes by ID, not by a count: the set of free workers changes between requests.
	i, found := slices.BinarySearchFunc(fit, p.last, func(s int32, last worker.ID) int {
		return cmp.Compare(p.slots[s].worker.ID, last)
	})
	if found {
		i++
	}
	return i % len(fit)
}

func (p *Partition) requests(slot int32) int64 { return p.slots[slot].book.Requests() }

// PrefillDone takes the prompt of a request off the prefill load of its rank, once.
func (p *Partition) PrefillDone(id string, now time.Time) {
	if rank, ok := p.Tracker.PrefillDone(id, now); ok {
		p.Busy.Refresh(rank.Worker, now)
	}
}

// Grow books KV blocks that the output of a request has filled.
func (p *Partition) Grow(id string, blocks uint64, now time.Time) {
	if rank, ok := p.Tracker.Grow(id, blocks, now); ok {
		p.Busy.Refresh(rank.Worker, now)
	}
}

// Free gives back all that is booked under id. Freeing twice is harmless.
func (p *Partition) Free(id string, now time.Time) {
	if rank, ok := p.Tracker.Free(id); ok {
		p.Busy.Refresh(rank.Worker, now)
	}
}

// Recovery is how long until the first inhibited worker is tried again; 0 if none is inhibited.
func (p *Partition) Recovery(now time.Time) time.Duration { return p.Busy.Recovery(now) }

func (p *Partition) register(w *worker.Worker, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	book := p.Tracker.Register(w)
	p.Busy.Register(w, now)
	slot, _ := p.Busy.Slot(w.ID)
	for len(p.slots) <= slot {
		p.slots = append(p.slots, candidate{})
	}
	p.slots[slot] = candidate{w, book}
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
