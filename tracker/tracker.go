// Package tracker keeps the load that each rank has been promised. It does no I/O, starts no
// goroutine and never reads the clock: callers pass now.
package tracker

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"spillway/worker"
)

// What Reserve, Adopt and Restore return when nothing was booked.
var (
	ErrDuplicate   = errors.New("reservation ID is booked already")
	ErrUnknownRank = errors.New("rank is not registered")
	ErrBusy        = errors.New("rank is over its limit")
	ErrExpired     = errors.New("reservation is too old")
)

// Load is work promised to one rank and not yet finished. Sums beyond a uint64 read as its maximum.
type Load struct {
	PrefillTokens uint64 // prompt tokens still to compute; cached ones are not counted
	DecodeBlocks  uint64 // KV blocks held; those that reservations share count once
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

// Config says when reservations that can expire do.
type Config struct {
	ExpireAfter time.Duration // a reservation goes when it is older than this; more than 0
	CheckEvery  time.Duration // a rank is not looked at more often, nor before it is as old; 0 or more
}

// DefaultConfig lets reservations that can expire do so after five minutes.
func DefaultConfig() Config {
	return Config{ExpireAfter: 5 * time.Minute, CheckEvery: 30 * time.Second}
}

// Validate tells whether the times make sense.
func (c Config) Validate() error {
	if c.ExpireAfter <= 0 || c.CheckEvery < 0 {
		return fmt.Errorf("tracker: expiry after %v, checked every %v: not times to wait for", c.ExpireAfter, c.CheckEvery)
	}
	return nil
}

// Tracker books and frees load. It is safe for concurrent use.
//
// All changes are made under one lock, each in a few microseconds. Reads of many ranks take it for
// one portion of them at a time and let changes that wait go first.
type Tracker struct {
	cfg Config

	gate sync.Mutex // orders those who wait for mu; never taken with mu held
	mu   sync.Mutex // guards the fields below; nothing is called while it is held

	books     map[worker.ID]*Book
	bookings  shrinking[string, *booking] // by reservation ID
	prompts   forest                      // blocks of all bookings that have hashes
	slots     []*rankBook                 // nil where free
	freeSlots []uint32
	moves     uint64   // counts the changes of slots
	seating   seating  // for boards
	falling   int      // ranks that fall
	expired   uint64   // reservations that did
	spare     *booking // ended bookings, linked as inBooks
	spares    int
}

// New returns a tracker that knows no ranks. cfg is valid.
func New(cfg Config) *Tracker {
	return &Tracker{cfg: cfg, books: map[worker.ID]*Book{}}
}

// lock takes mu. Who has to wait holds the gate, and breathe passes through it.
func (t *Tracker) lock() {
	if t.mu.TryLock() {
		return
	}
	t.gate.Lock()
	t.mu.Lock()
	t.gate.Unlock()
}

// breathe lets go of mu for those who wait, and takes it again. What it guards may have changed.
func (t *Tracker) breathe() {
	t.mu.Unlock()
	t.gate.Lock()
	t.mu.Lock()
	t.gate.Unlock()
}

// Book is the part of a tracker that belongs to one worker.
type Book struct {
	requests atomic.Int64
	ranks    map[uint32]*rankBook // guarded by the tracker's lock
}

// Requests is the number of live reservations on all ranks of the worker. It takes no lock.
func (b *Book) Requests() int64 { return b.requests.Load() }

// rankBook is what one rank has been promised.
type rankBook struct {
	worker.Rank
	slot     uint32
	seat     int32 // in a valid seating
	falls    bool  // its prefills do, by time
	changed  bool  // listed in the seating
	book     *Book
	requests uint64
	blocks   wide // each as if it weighed whole
	less     wide // what they weigh less, in units of weight
	prefills prefills
	lasting  bookings // those that do not expire
	expiring bookings // those that do, oldest first
	checked  time.Time
}

func (r *rankBook) load(now time.Time) Load {
	return Load{PrefillTokens: r.prefills.tokens(now), DecodeBlocks: r.decodeBlocks(), Requests: r.requests}
}

// decodeBlocks is the weight of all blocks, rounded half up.
func (r *rankBook) decodeBlocks() uint64 {
	if r.less == (wide{}) {
		return r.blocks.capped()
	}
	return r.blocks.short(r.less.plus(wide{lo: whole/2 - 1}).over(whole))
}

// Register makes the ranks of w known and returns its book. A worker that declares none has rank
// 0, and those added with AddRank; one that picks its own rank has only worker.AnyDP. If w is
// known already, ranks that it still has keep their reservations and the others lose theirs.
func (t *Tracker) Register(w *worker.Worker, now time.Time) *Book {
	t.lock()
	defer t.mu.Unlock()
	b := t.books[w.ID]
	if b == nil {
		b = &Book{ranks: map[uint32]*rankBook{}}
		t.books[w.ID] = b
	}
	first, size := w.DPStart, w.DPSize
	switch {
	case w.RankRouting == worker.RankByEngine:
		first, size = worker.AnyDP, 1
	case size == 0:
		first, size = 0, 1
	}
	undeclared := w.DPSize == 0 && w.RankRouting != worker.RankByEngine
	for dp, r := range b.ranks {
		if !(dp >= first && dp-first < size || undeclared && dp != worker.AnyDP) {
			t.dropRankLocked(r)
		}
	}
	ranks := make([]rankBook, 0, size) // side by side, since reads go over all of them
	for i := range size {
		if b.ranks[first+i] == nil {
			ranks = append(ranks, rankBook{Rank: worker.Rank{Worker: w.ID, DP: first + i}, book: b, checked: now})
			t.addRankLocked(&ranks[len(ranks)-1])
		}
	}
	return b
}

// AddRank makes one more rank of a registered worker known: one that its engine reports although
// it is not declared. It reports false if the worker is unknown or has worker.MaxReportedRanks.
func (t *Tracker) AddRank(r worker.Rank, now time.Time) bool {
	t.lock()
	defer t.mu.Unlock()
	b := t.books[r.Worker]
	if b == nil {
		return false
	}
	if b.ranks[r.DP] == nil {
		if len(b.ranks) >= worker.MaxReportedRanks {
			return false
		}
		t.addRankLocked(&rankBook{Rank: r, book: b, checked: now})
	}
	return true
}

// Unregister forgets a worker and every reservation on it.
func (t *Tracker) Unregister(id worker.ID) {
	t.lock()
	defer t.mu.Unlock()
	b := t.books[id]
	if b == nil {
		return
	}
	for _, r := range b.ranks {
		t.dropRankLocked(r)
	}
	delete(t.books, id)
}

func (t *Tracker) addRankLocked(r *rankBook) {
	t.movedLocked()
	r.book.ranks[r.DP] = r
	if last := len(t.freeSlots) - 1; last >= 0 {
		r.slot = t.freeSlots[last]
		t.freeSlots = t.freeSlots[:last]
		t.slots[r.slot] = r
		return
	}
	r.slot = uint32(len(t.slots))
	t.slots = append(t.slots, r)
}

// movedLocked notes that a rank comes or goes.
func (t *Tracker) movedLocked() {
	t.moves++
	if t.seating.valid {
		t.seating = seating{}
	}
}

// dropRankLocked forgets a rank and all that is booked on it.
func (t *Tracker) dropRankLocked(r *rankBook) {
	t.movedLocked()
	for _, l := range []*bookings{&r.lasting, &r.expiring} {
		for l.front != nil {
			t.freeLocked(l.front, l.front.progress)
		}
	}
	delete(r.book.ranks, r.DP)
	t.slots[r.slot] = nil
	t.freeSlots = append(t.freeSlots, r.slot)
}

func (t *Tracker) rankLocked(r worker.Rank) *rankBook {
	if b := t.books[r.Worker]; b != nil {
		return b.ranks[r.DP]
	}
	return nil
}
