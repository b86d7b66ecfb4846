// Package tracker keeps the load that each rank has been promised. It does no I/O, starts no
// goroutine and never reads the clock: callers pass now.
package tracker

import (
	"cmp"
	"errors"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"spillway/worker"
)

// What Reserve returns when nothing was booked.
var (
	ErrDuplicate   = errors.New("reservation ID is booked already")
	ErrUnknownRank = errors.New("rank is not registered")
	ErrBusy        = errors.New("rank is over its limit")
)

// Load is work promised to one rank and not yet finished.
type Load struct {
	PrefillTokens uint64 // prompt tokens still to compute; cached ones are not counted
	DecodeBlocks  uint64 // KV blocks held
	Requests      uint64 // reservations, whatever they hold
}

// Unlimited as a field of Limit turns that check off.
const Unlimited = math.MaxUint64

// Limit is the greatest load that a rank may have before one more reservation.
type Limit struct {
	PrefillTokens uint64
	DecodeBlocks  uint64
}

// NoLimit lets every reservation through.
var NoLimit = Limit{PrefillTokens: Unlimited, DecodeBlocks: Unlimited}

func (l Load) over(m Limit) bool {
	return l.PrefillTokens > m.PrefillTokens || l.DecodeBlocks > m.DecodeBlocks
}

// Reservation is what one request is promised.
type Reservation struct {
	ID            string // unique in the tracker
	Rank          worker.Rank
	PrefillTokens uint64 // prompt tokens to compute, until PrefillDone
	DecodeBlocks  uint64 // KV blocks held until Free and shared with no other reservation
}

// Tracker books and frees load. It is safe for concurrent use.
type Tracker struct {
	mu       sync.Mutex // guards the fields below; nothing is called while it is held
	books    map[worker.ID]*Book
	bookings map[string]*booking // by reservation ID
}

// New returns a tracker that knows no ranks.
func New() *Tracker {
	return &Tracker{books: map[worker.ID]*Book{}, bookings: map[string]*booking{}}
}

// Book is the part of a tracker that belongs to one worker.
type Book struct {
	requests atomic.Int64
	ranks    map[uint32]*Load // guarded by the tracker's lock
}

// Requests is the number of live reservations on all ranks of the worker. It takes no lock.
func (b *Book) Requests() int64 { return b.requests.Load() }

type booking struct {
	Reservation
	book     *Book
	load     *Load
	progress time.Time // of the reservation, its last token or its last block
	prefill  bool      // PrefillTokens are still counted
}

// Register makes the ranks of w known and returns its book. A worker that declares none has rank
// 0, and those added with AddRank; one that picks its own rank has only worker.AnyDP. If w is
// known already, ranks that it still has keep their reservations and the others lose theirs.
func (t *Tracker) Register(w *worker.Worker) *Book {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.books[w.ID]
	if b == nil {
		b = &Book{ranks: map[uint32]*Load{}}
		t.books[w.ID] = b
	}
	first, size := w.DPStart, w.DPSize
	switch {
	case w.RankRouting == worker.RankByEngine:
		first, size = worker.AnyDP, 1
	case size == 0:
		first, size = 0, 1
	}
	kept := func(dp uint32) bool {
		undeclared := w.DPSize == 0 && w.RankRouting != worker.RankByEngine
		return dp >= first && dp-first < size || undeclared && dp != worker.AnyDP
	}
	for id, r := range t.bookings {
		if r.book == b && !kept(r.Rank.DP) {
			t.freeLocked(id, r)
		}
	}
	maps.DeleteFunc(b.ranks, func(dp uint32, _ *Load) bool { return !kept(dp) })
	for i := range size {
		if b.ranks[first+i] == nil {
			b.ranks[first+i] = &Load{}
		}
	}
	return b
}

// AddRank makes one more rank of a registered worker known: one that its engine reports although
// it is not declared. It reports false if the worker is unknown or has worker.MaxDPSize ranks.
func (t *Tracker) AddRank(r worker.Rank) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.books[r.Worker]
	if b == nil {
		return false
	}
	if b.ranks[r.DP] == nil {
		if len(b.ranks) >= worker.MaxDPSize {
			return false
		}
		b.ranks[r.DP] = &Load{}
	}
	return true
}

// Unregister forgets a worker and every reservation on it.
func (t *Tracker) Unregister(id worker.ID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for key, r := range t.bookings {
		if r.Rank.Worker == id {
			t.freeLocked(key, r)
		}
	}
	delete(t.books, id)
}

// Reserve books r. It returns ErrBusy if the rank is over limit already (r is not counted: a long
// prompt may start on an idle rank), ErrDuplicate if the ID is booked, and ErrUnknownRank; then
// nothing has changed. Check and booking are one step, so a burst cannot slip through.
func (t *Tracker) Reserve(r Reservation, limit Limit, now time.Time) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	book := t.books[r.Rank.Worker]
	if book == nil {
		return ErrUnknownRank
	}
	load := book.ranks[r.Rank.DP]
	if load == nil {
		return ErrUnknownRank
	}
	if _, ok := t.bookings[r.ID]; ok {
		return ErrDuplicate
	}
	if load.over(limit) {
		return ErrBusy
	}
	load.PrefillTokens += r.PrefillTokens
	load.DecodeBlocks += r.DecodeBlocks
	load.Requests++
	book.requests.Add(1)
	t.bookings[r.ID] = &booking{Reservation: r, book: book, load: load, progress: now, prefill: true}
	return nil
}

// PrefillDone takes the prefill tokens of a reservation off its rank, once. It reports whether
// the load changed, and whose.
func (t *Tracker) PrefillDone(id string, now time.Time) (worker.Rank, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.bookings[id]
	if b == nil {
		return worker.Rank{}, false
	}
	b.progress = now
	if !b.prefill {
		return b.Rank, false
	}
	b.prefill = false
	b.load.PrefillTokens -= b.PrefillTokens
	return b.Rank, true
}

// Grow adds KV blocks of generated tokens to a reservation. It reports whether the load changed,
// and whose.
func (t *Tracker) Grow(id string, blocks uint64, now time.Time) (worker.Rank, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.bookings[id]
	if b == nil {
		return worker.Rank{}, false
	}
	b.progress = now
	b.DecodeBlocks += blocks
	b.load.DecodeBlocks += blocks
	return b.Rank, blocks > 0
}

// Free gives back all that a reservation holds and forgets it. It reports false if it is not
// booked: freed before, or gone with its worker.
func (t *Tracker) Free(id string) (worker.Rank, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.bookings[id]
	if b == nil {
		return worker.Rank{}, false
	}
	t.freeLocked(id, b)
	return b.Rank, true
}

func (t *Tracker) freeLocked(id string, b *booking) {
	if b.prefill {
		b.load.PrefillTokens -= b.PrefillTokens
	}
	b.load.DecodeBlocks -= b.DecodeBlocks
	b.load.Requests--
	b.book.requests.Add(-1)
	delete(t.bookings, id)
}

// Idle lists the reservations that have made no progress since the given time: candidates for a
// leak, if their request has ended too.
func (t *Tracker) Idle(since time.Time) []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var ids []string
	for id, b := range t.bookings {
		if b.progress.Before(since) {
			ids = append(ids, id)
		}
	}
	return ids
}

// Held tells whether a rank has a reservation that has made no progress since the given time.
func (t *Tracker) Held(r worker.Rank, since time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, b := range t.bookings {
		if b.Rank == r && b.progress.Before(since) {
			return true
		}
	}
	return false
}

// Load is what a rank has been promised; zero for an unknown one.
func (t *Tracker) Load(r worker.Rank) Load {
	t.mu.Lock()
	defer t.mu.Unlock()
	if b := t.books[r.Worker]; b != nil {
		if l := b.ranks[r.DP]; l != nil {
			return *l
		}
	}
	return Load{}
}

// Promised is Load as the busy rule asks for it.
func (t *Tracker) Promised(r worker.Rank) (decodeBlocks, prefillTokens uint64) {
	l := t.Load(r)
	return l.DecodeBlocks, l.PrefillTokens
}

// RankLoad is the load of one rank of a worker.
type RankLoad struct {
	DP uint32
	Load
}

// Ranks appends to dst the loads of the ranks of one worker, by DP; nothing for an unknown one.
func (t *Tracker) Ranks(id worker.ID, dst []RankLoad) []RankLoad {
	from := len(dst)
	t.mu.Lock()
	if b := t.books[id]; b != nil {
		for dp, l := range b.ranks {
			dst = append(dst, RankLoad{dp, *l})
		}
	}
	t.mu.Unlock()
	slices.SortFunc(dst[from:], func(a, b RankLoad) int { return cmp.Compare(a.DP, b.DP) })
	return dst
}

// Loads are the loads of all ranks that are known, in no order.
func (t *Tracker) Loads() map[worker.Rank]Load {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := make(map[worker.Rank]Load, len(t.books))
	for id, b := range t.books {
		for dp, l := range b.ranks {
			all[worker.Rank{Worker: id, DP: dp}] = *l
		}
	}
	return all
}
