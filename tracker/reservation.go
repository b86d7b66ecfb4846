package tracker

import (
	"time"

	"spillway/worker"
)

// Reservation is what one request is promised.
type Reservation struct {
	ID            string // unique in the tracker
	Rank          worker.Rank
	Hashes        []uint64       // sequence hashes of the prompt's blocks: one that continues another's shares its blocks; not kept
	DecodeBlocks  uint64         // further KV blocks held until Free and shared with no other reservation
	PrefillTokens uint64         // prompt tokens to compute, until PrefillDone; 0 opens no prefill
	PrefillTime   *time.Duration // expected for them, 0 or more: the tokens fall over it; or nil
	Expires       bool           // by Config.ExpireAfter
}

// Effect tells what a call that names a reservation has done.
type Effect uint8

// The effects.
const (
	Unknown   Effect = iota // the reservation is not booked
	Unchanged               // it is, but loads are as before
	Changed                 // the load of its rank is another one
)

// booking is a reservation that is live.
type booking struct {
	id            string
	rank          *rankBook
	last          *node // of the last block that has a hash, or nil
	prefillTokens uint64
	prefillTime   time.Duration // if timed
	private       uint64        // blocks without hash: of the prompt and of the output
	privateLess   wide          // what those weigh less than whole
	booked        time.Time
	progress      time.Time // of the reservation, its last token or its last block
	expires       bool
	open          bool // its prefill is
	timed         bool // its prefill has a time

	links   [chains]links
	decayed bool
	less    uint32 // what its blocks weigh less than whole since, if decayed
}

// Reserve books r. It returns ErrBusy if the rank is over limit already (r is not counted: a long
// prompt may start on an idle rank), ErrDuplicate if the ID is booked, and ErrUnknownRank; then
// nothing has changed, but that reservations of the rank may have expired. Check and booking are
// one step, so a burst cannot slip through.
func (t *Tracker) Reserve(r Reservation, limit Limit, now time.Time) error {
	t.lock()
	defer t.mu.Unlock()
	rank := t.rankLocked(r.Rank)
	if rank == nil {
		return ErrUnknownRank
	}
	if t.bookings.m[r.ID] != nil {
		return ErrDuplicate
	}
	if t.checkLocked(rank, now) {
		t.expireLocked(rank, now, nil)
	}
	if limit != NoLimit && rank.load(now).over(limit) {
		return ErrBusy
	}
	t.bookLocked(r, rank, now)
	return nil
}

// Adopt books what another replica has booked, whatever the load. If the ID is booked on another
// rank that reservation ends first; moved tells so, and left is that rank. It returns
// ErrUnknownRank, or ErrDuplicate if the ID is booked on the same rank; then nothing has changed.
func (t *Tracker) Adopt(r Reservation, now time.Time) (left worker.Rank, moved bool, err error) {
	t.lock()
	defer t.mu.Unlock()
	rank := t.rankLocked(r.Rank)
	if rank == nil {
		return left, false, ErrUnknownRank
	}
	if old := t.bookings.m[r.ID]; old != nil {
		if old.rank == rank {
			return left, false, ErrDuplicate
		}
		left, moved = old.rank.Rank, true
		t.freeLocked(old, now)
	}
	if t.checkLocked(rank, now) {
		t.expireLocked(rank, now, nil)
	}
	t.bookLocked(r, rank, now)
	return left, moved, nil
}

func (t *Tracker) bookLocked(r Reservation, rank *rankBook, now time.Time) *booking {
	b := t.takeLocked()
	*b = booking{
		id: r.ID, rank: rank, private: r.DecodeBlocks, prefillTokens: r.PrefillTokens,
		booked: now, progress: now, expires: r.Expires, open: r.PrefillTokens > 0,
	}
	if r.PrefillTime != nil {
		b.timed, b.prefillTime = true, max(*r.PrefillTime, 0)
	}
	if b.open {
		rank.prefills.push(b, now)
	}
	if len(r.Hashes) > 0 {
		var fresh uint64
		b.last, fresh = t.prompts.add(r.Hashes, rank.slot)
		rank.blocks = rank.blocks.plus(wide{lo: fresh})
	}
	rank.blocks = rank.blocks.plus(wide{lo: b.private})
	rank.requests++
	rank.book.requests.Add(1)
	rank.list(b).push(b, inBooks)
	t.bookings.put(b.id, b)
	t.settleLocked(rank)
	return b
}

// PrefillDone takes the prefill tokens of a reservation off its rank, once. It tells whether the
// load changed, and whose.
func (t *Tracker) PrefillDone(id string, now time.Time) (worker.Rank, Effect) {
	t.lock()
	defer t.mu.Unlock()
	b := t.bookings.m[id]
	if b == nil {
		return worker.Rank{}, Unknown
	}
	b.progress = now
	if !b.open {
		return b.rank.Rank, Unchanged
	}
	b.close(now)
	t.settleLocked(b.rank)
	return b.rank.Rank, Changed
}

// Grow adds KV blocks of generated tokens to a reservation. With a decay, from 0 to 1, that becomes
// the weight of each of its output blocks and of those blocks at the end of its prompt that no other
// reservation on the rank holds: the nearer its end, the less it will still be in the way. Nil leaves
// weights alone. Grow tells whether the load may have changed, and whose.
func (t *Tracker) Grow(id string, blocks uint64, decay *float64, now time.Time) (worker.Rank, Effect) {
	t.lock()
	defer t.mu.Unlock()
	b := t.bookings.m[id]
	if b == nil {
		return worker.Rank{}, Unknown
	}
	b.progress = now
	added := saturated(b.private, blocks) - b.private
	b.private += added
	b.rank.blocks = b.rank.blocks.plus(wide{lo: added})
	if decay != nil {
		b.decayed, b.less = true, lost(*decay)
		t.weighLocked(b)
	}
	if blocks == 0 && decay == nil {
		return b.rank.Rank, Unchanged
	}
	t.settleLocked(b.rank)
	return b.rank.Rank, Changed
}

// lost is what a block of that weight weighs less than whole.
func lost(weight float64) uint32 {
	if !(weight > 0) { // not a number counts as 0 too
		return whole
	}
	return whole - uint32(min(weight, 1)*whole+0.5)
}

// weighLocked applies a booking's decay to its own blocks.
func (t *Tracker) weighLocked(b *booking) {
	r := b.rank
	less := product(b.private, uint64(b.less))
	r.less = r.less.minus(b.privateLess).plus(less)
	b.privateLess = less
	if b.last != nil {
		before, after := t.prompts.decay(b.last, r.slot, b.less)
		r.less = r.less.plus(wide{lo: after}).minus(wide{lo: before})
	}
}

// Find returns the rank on which a reservation is booked, and false if it is not.
func (t *Tracker) Find(id string) (worker.Rank, bool) {
	t.lock()
	defer t.mu.Unlock()
	b := t.bookings.m[id]
	if b == nil {
		return worker.Rank{}, false
	}
	return b.rank.Rank, true
}

// Renew has the age of a reservation count from now, if it is booked and expires.
func (t *Tracker) Renew(id string, now time.Time) {
	t.lock()
	defer t.mu.Unlock()
	if b := t.bookings.m[id]; b != nil && b.expires {
		b.booked = now
		l := b.rank.list(b)
		l.remove(b, inBooks)
		l.push(b, inBooks)
	}
}

// Free gives back all that a reservation holds and forgets it. It reports false if it is not
// booked: freed before, expired, or gone with its worker.
func (t *Tracker) Free(id string, now time.Time) (worker.Rank, bool) {
	t.lock()
	defer t.mu.Unlock()
	b := t.bookings.m[id]
	if b == nil {
		return worker.Rank{}, false
	}
	rank := b.rank.Rank
	t.freeLocked(b, now)
	return rank, true
}

func (t *Tracker) freeLocked(b *booking, now time.Time) {
	b.close(now)
	r := b.rank
	r.blocks = r.blocks.minus(wide{lo: b.private})
	r.less = r.less.minus(b.privateLess)
	if b.last != nil {
		gone, less := t.prompts.remove(b.last, r.slot)
		r.blocks = r.blocks.minus(wide{lo: gone})
		r.less = r.less.minus(wide{lo: less})
	}
	r.requests--
	r.book.requests.Add(-1)
	r.list(b).remove(b, inBooks)
	t.bookings.drop(b.id)
	t.putLocked(b)
	t.settleLocked(r)
}

// maxSpare bounds the ended bookings that are kept for new ones.
const maxSpare = 64

// takeLocked returns a booking to fill in.
func (t *Tracker) takeLocked() *booking {
	b := t.spare
	if b == nil {
		return &booking{}
	}
	t.spare = b.links[inBooks].next
	t.spares--
	return b
}

// putLocked takes back a booking that has ended. Nobody may use it any more.
func (t *Tracker) putLocked(b *booking) {
	*b = booking{}
	if t.spares < maxSpare {
		b.links[inBooks].next, t.spare = t.spare, b
		t.spares++
	}
}

// close ends the prefill of a reservation, if it is open.
func (b *booking) close(now time.Time) {
	if b.open {
		b.rank.prefills.remove(b, now)
		b.open = false
	}
}

// bookings is a list of reservations in the order in which they were booked.
type bookings struct{ front, back *booking }

// links are the neighbours of a reservation in one list.
type links struct{ prev, next *booking }

// A reservation is in at most one list of each kind.
const (
	inBooks    = iota // lasting or expiring of its rank, or spare
	inPrefills        // prefills of its rank
	chains
)

func (r *rankBook) list(b *booking) *bookings {
	if b.expires {
		return &r.expiring
	}
	return &r.lasting
}

func (l *bookings) push(b *booking, chain int) {
	if l.back != nil {
		b.links[chain].prev = l.back
		l.back.links[chain].next = b
	} else {
		l.front = b
	}
	l.back = b
}

func (l *bookings) remove(b *booking, chain int) {
	at := b.links[chain]
	if at.prev != nil {
		at.prev.links[chain].next = at.next
	} else {
		l.front = at.next
	}
	if at.next != nil {
		at.next.links[chain].prev = at.prev
	} else {
		l.back = at.prev
	}
	b.links[chain] = links{}
}
