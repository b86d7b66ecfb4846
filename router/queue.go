package router

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"spillway/busy"
	"spillway/kvindex"
	"spillway/worker"
)

// ErrQueueTimeout means that no worker had room for a request before its deadline, or that by the
// rate at which others are let go none will have.
var ErrQueueTimeout = errors.New("no worker has room before the request's deadline")

// QueueFullError means that as many requests of the model wait as may.
type QueueFullError struct {
	Current, Limit int // requests, over all tenants of the model
}

func (e *QueueFullError) Error() string {
	return fmt.Sprintf("the queue of the model is full: %d of %d requests wait", e.Current, e.Limit)
}

// Order is what decides when a waiting request goes. Classes of a policy file take turns, by deficit
// round robin over the tokens that their prompts have still to be computed; without a file it is
// tenants that do. Of those who share a turn those go first whose strict priority is higher. Then it
// is for the order of the class to decide, by PriorityJump and arrival. Without a file, and by fcfs,
// Priority and Objective come before that.
type Order struct {
	Tenant         string // who takes turns with others where there is no policy file; "" is one too
	StrictPriority uint32
	Priority       int32     // higher first; a priority jump where the order does not know it
	PriorityJump   float64   // seconds that it goes ahead in fcfs, weight in wspt; below 0 counts as 0
	Class          string    // what the client asks for, a policy class or family; "" is nothing
	Objective      time.Time // when its first token should be there; zero is none, and comes last
	Deadline       time.Time // when waiting ends in vain; zero is never
}

// Ticket is a request that may wait. It is the partition's from Wait until an Admission holds it,
// Leave has taken it out, or Wait has failed; meanwhile nobody else may touch it.
type Ticket struct {
	Query Query
	Order Order
	Owner any // the caller's own, left alone

	// Overlaps asks the index again, for who has waited for long; nil for who has nothing to ask. It
	// is called with the partition's lock held, so all it may lock is the index. Nil is no answer.
	Overlaps func() *kvindex.Matches

	policy int    // its class, in the profile
	isl    uint64 // prompt tokens, from 1 to maxCost
	cached uint64 // of them, where most are
	cost   uint64 // the others, at least 1
	since  time.Time
	seq    uint64
	goes   precedence
	lane   *lane // nil unless it waits
	index  int   // in the lane
}

// maxCost keeps sums of tokens within what can be counted.
const maxCost = 1 << 40

// Admission ends the waiting of a request.
type Admission struct {
	Ticket    *Ticket
	Selection Selection // booked under Ticket.Query.Reservation, unless Err is set
	Err       error     // nil, ErrQueueTimeout, or an error of Select other than that it has to wait
	Waited    time.Duration
}

// places are those in which requests of one model may wait; the partitions of its tenants share them.
type places struct {
	taken atomic.Int64
	limit int
	hold  bool // requests wait while all workers are busy too, not only while ranks are full
}

// take takes a place, or tells how many are taken.
func (p *places) take() error {
	for {
		n := p.taken.Load()
		if n >= int64(p.limit) {
			return &QueueFullError{Current: int(n), Limit: p.limit}
		}
		if p.taken.CompareAndSwap(n, n+1) {
			return nil
		}
	}
}

// Wait has a request placed, or wait until it can be: while all ranks that it may go to are full to
// its class, and where there are places also while all workers that it may go to are busy. It
// returns those whose waiting is over, which can be t itself, and which the caller must wake:
// bookings have been made for them. It does not let t overtake one that waits and could go. If t
// cannot wait, the error is one of Select, a *ClassLimitError, a *QueueFullError or
// ErrQueueTimeout, and nothing is booked for it.
func (p *Partition) Wait(t *Ticket, now time.Time) ([]Admission, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	admitted := p.admitLocked(ifNeeded, nil, now)
	p.classifyLocked(t)
	class := &p.profile.Classes[t.policy]
	var g *group // if somebody waits for the same workers
	if p.queue.n > 0 {
		g = p.queue.byKey[keyOf(&t.Query)]
	}
	if !g.has(t.policy) && !p.fullLocked(&t.Query, class, now) { // else it waits as they do
		sel, err := p.selectLocked(&t.Query, now)
		if err == nil {
			return append(admitted, Admission{Ticket: t, Selection: sel}), nil
		}
		if !waits(err) || !p.places.hold {
			return admitted, err
		}
	}
	if p.profile.synthetic {
		p.measureLocked(t)
	}
	p.queue.enter(t, now)
	if d := t.Order.Deadline; !d.IsZero() && (!now.Before(d) || g != nil && now.Add(p.queue.delay(g, t, now)).After(d)) {
		return admitted, ErrQueueTimeout
	}
	if err := class.limit(p.queue.backlogs[t.policy], len(p.Busy.Snapshot().Registered)); err != nil {
		return admitted, err
	}
	if err := p.places.take(); err != nil {
		return admitted, err
	}
	p.queue.push(t)
	p.waiting.Store(int64(p.queue.n))
	// Whoever made room since we looked may have found nobody waiting, and gone.
	return append(admitted, p.admitLocked(ifNeeded, nil, now)...), nil
}

// classifyLocked finds the class of t. Without a policy file the prompt need not be measured for it.
func (p *Partition) classifyLocked(t *Ticket) {
	t.policy = 0
	if !p.profile.synthetic {
		p.measureLocked(t)
		t.policy = p.profile.Class(t.Order.Class, t.isl-t.cached)
	}
}

// measureLocked finds what of the prompt is cached, and so what its turn costs.
func (p *Partition) measureLocked(t *Ticket) {
	t.isl = min(max(t.Query.PromptTokens, 1), maxCost)
	t.cached = min(p.cachedLocked(&t.Query), t.isl)
	t.cost = max(t.isl-t.cached, 1)
}

// cachedLocked is the most of the prompt that a rank has cached which it may go to, in tokens.
func (p *Partition) cachedLocked(q *Query) (most uint64) {
	if q.Overlaps == nil {
		return 0
	}
	weights := p.cost.Weights(nil)
	for i := range q.Overlaps.Ranks {
		m := &q.Overlaps.Ranks[i]
		cached := weights.CachedTokens(*m, q.blockSize())
		if cached > most && p.eligibleLocked(m.Rank, q) {
			most = cached
		}
	}
	return most
}

// eligibleLocked tells whether the request may go to a rank, however busy or ill its worker is.
func (p *Partition) eligibleLocked(r worker.Rank, q *Query) bool {
	slot, ok := p.Busy.Slot(r.Worker)
	if !ok || q.DP != nil && *q.DP != r.DP {
		return false
	}
	p.one[0] = int32(slot)
	return declares(p.slots[slot].worker, r.DP) && len(p.suitableLocked(p.one[:], q, q.Exclude)) > 0
}

// fullLocked tells whether all ranks that the request may go to are full to a class. Who may go
// nowhere need not wait for that.
func (p *Partition) fullLocked(q *Query, class *Class, now time.Time) bool {
	if !class.Queues() {
		return false
	}
	slots := p.suitableLocked(p.Busy.Snapshot().RegisteredSlots, q, q.Exclude)
	if q.Worker != nil && q.DP != nil && len(slots) > 0 { // without a look at all the others
		w := p.slots[slots[0]].worker
		load := p.Tracker.Load(worker.Rank{Worker: w.ID, DP: bookedDP(w, *q.DP)}, now)
		return class.Busy(load.PrefillTokens, w.MaxNumBatchedTokens)
	}
	s := &p.scheduler
	s.unmark()
	if p.Tracker.Read(nil, now, &s.board) {
		p.seatLocked()
	}
	some := false
	for _, slot := range slots {
		w, r := p.slots[slot].worker, s.runs[slot]
		for seat := r.first; seat < r.first+r.n; seat++ {
			if q.DP != nil && s.board.Ranks[seat].DP != bookedDP(w, *q.DP) {
				continue
			}
			if !class.Busy(s.board.Loads[seat].Tokens(), w.MaxNumBatchedTokens) {
				return false
			}
			some = true
		}
	}
	return some
}

// bookedDP is the rank that a request for rank dp of a worker is booked on.
func bookedDP(w *worker.Worker, dp uint32) uint32 {
	if w.RankRouting == worker.RankByEngine {
		return worker.AnyDP
	}
	return dp
}

// waits tells whether a request that Select refused with err may wait, if there are places.
func waits(err error) bool { return errors.Is(err, ErrOverloaded) || errors.Is(err, ErrPinBusy) }

// Admit lets those go that wait and can be placed now, each booked already, and ends the waiting of
// those for whom there is no worker any more or whose deadline has passed. The caller must wake all
// of them. It is called after whatever may have made room: a Free, a PrefillDone, an expiry, a
// report, a threshold, a change of workers.
func (p *Partition) Admit(now time.Time) []Admission {
	p.given.Add(1) // before we look whether anybody waits: see Wait
	if p.Waiting() == 0 {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.admitLocked(always, nil, now)
}

// AdmitOn is Admit after one Free or PrefillDone, which has told that worker. If nothing else has
// happened it looks at those alone that may go there.
func (p *Partition) AdmitOn(id worker.ID, now time.Time) []Admission {
	if p.Waiting() == 0 {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.admitLocked(always, &id, now)
}

// Leave takes t out of the queue. It reports false if t does not wait: then an Admission holds it,
// and the booking in that is the caller's to free.
func (p *Partition) Leave(t *Ticket) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.lane == nil {
		return false
	}
	p.dropLocked(t)
	return true
}

// Waiting is how many requests wait. It takes no lock.
func (p *Partition) Waiting() int { return int(p.waiting.Load()) }

// WaitingTokens is the sum of their prompt tokens, of which each has one at least.
func (p *Partition) WaitingTokens() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.queue.tokens
}

// Backlogs appends to dst what waits in each class of the profile, in its order.
func (p *Partition) Backlogs(dst []Backlog) []Backlog {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append(dst, p.queue.backlogs...)
}

// Profile is the classes in which requests wait.
func (p *Partition) Profile() *Profile { return p.profile }

// picture is what tells whether there can be more room than there was.
type picture struct {
	snapshot *busy.Snapshot
	given    uint64
}

// When admitLocked looks at who waits.
const (
	always   = true
	ifNeeded = false // not if nothing has been given back, and no verdict has changed, since it last did
)

// admitLocked is Admit, or AdmitOn. It looks at one request of each lane, not at each that waits.
func (p *Partition) admitLocked(look bool, on *worker.ID, now time.Time) (admitted []Admission) {
	if p.queue.n == 0 {
		p.looked = picture{p.Busy.Snapshot(), p.given.Load()}
		return nil
	}
	if p.Busy.Due(now) {
		p.Busy.Tick(now)
	}
	end := func(t *Ticket, sel Selection, err error) {
		p.dropLocked(t)
		admitted = append(admitted, Admission{t, sel, err, now.Sub(t.since)})
	}
	for _, t := range p.queue.late(now) {
		end(t, Selection{}, ErrQueueTimeout)
	}
	present := picture{p.Busy.Snapshot(), p.given.Load()}
	switch known := (picture{p.looked.snapshot, p.looked.given + 1}); {
	case !look && present == p.looked:
		return admitted
	case on != nil && present == known:
		for g := range p.queue.near(*on) {
			g.shut = false
			_ = p.judgeLocked(g, now) // who has nothing to wait for any more is told by Select
		}
	default:
		for i := len(p.queue.groups) - 1; i >= 0; i-- { // from the end: one that empties is taken out
			g := p.queue.groups[i]
			g.shut = false
			if err := p.judgeLocked(g, now); err != nil {
				for _, t := range g.waiting() {
					end(t, Selection{}, err)
				}
			}
		}
	}
	p.looked = present
	for t := p.queue.next(); t != nil; t = p.queue.next() {
		g := t.lane.group
		p.refreshLocked(t, now)
		sel, err := p.selectLocked(&t.Query, now)
		if waits(err) && p.places.hold { // a report came in since we looked
			g.shut = true
			_ = p.judgeLocked(g, now)
			continue
		}
		if err == nil {
			g.admit(t.cost, now)
			p.queue.charge(t)
		}
		end(t, sel, err)
		if err == nil && !t.Query.NoBooking {
			for g := range p.queue.near(sel.Worker.ID) { // there may be no room any more
				_ = p.judgeLocked(g, now)
			}
		}
	}
	return admitted
}

// judgeLocked finds out which lanes of a group are open: there is room for their requests, as far as
// the present snapshot tells, or they need not wait for it. An error is why no more is to be waited
// for.
func (p *Partition) judgeLocked(g *group, now time.Time) error {
	err := p.outlookLocked(&g.query)
	if err != nil && !waits(err) {
		return err
	}
	shut := g.shut || err != nil && p.places.hold
	var last *Class
	full := false
	for _, l := range g.lanes {
		if spec := l.class.spec; !shut && spec != last {
			last, full = spec, p.fullLocked(&g.query, spec, now)
		}
		l.set(!shut && !full)
	}
	return nil
}

// refreshLocked asks the index again about a request that has waited for long.
func (p *Partition) refreshLocked(t *Ticket, now time.Time) {
	if p.refresh == 0 || t.Overlaps == nil || now.Sub(t.since) < p.refresh {
		return
	}
	if m := t.Overlaps(); m != nil {
		t.Query.Overlaps = m
	}
}

// dropLocked takes t out of the queue and gives its place back.
func (p *Partition) dropLocked(t *Ticket) {
	p.queue.remove(t)
	p.places.taken.Add(-1)
	p.waiting.Store(int64(p.queue.n))
}

// Outlook is what Select would say to q as far as present verdicts tell: nil if there is a worker for
// it. It is asked before anything is spent on what only a decision needs; Overlaps and the like do not
// matter. mayWait is that the request may wait for a worker; then it is nil too if there is a place.
func (p *Partition) Outlook(q *Query, mayWait bool, now time.Time) error {
	if p.Busy.Due(now) {
		p.Busy.Tick(now)
	}
	if !q.pinned() && q.Only == nil && q.Exclude == nil && q.Allowed == nil && q.Taints == nil && len(p.Busy.Snapshot().FreeSlots) > 0 {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	err := p.outlookLocked(q)
	if waits(err) && mayWait && p.places.hold {
		if n := int(p.places.taken.Load()); n >= p.places.limit {
			return &QueueFullError{Current: n, Limit: p.places.limit}
		}
		return nil
	}
	return err
}

// outlookLocked is what selectLocked would say to q as far as the present snapshot tells: nil if
// there is a worker for it. It books nothing.
func (p *Partition) outlookLocked(q *Query) error {
	snap := p.Busy.Snapshot()
	if len(snap.Registered) == 0 {
		return ErrNoWorkers
	}
	for _, slot := range p.suitableLocked(snap.FreeSlots, q, q.Exclude) {
		if q.DP == nil {
			return nil
		}
		p.rooms = p.Busy.FreeRanks(p.slots[slot].id, p.rooms[:0])
		if len(pinnedRoom(p.rooms, *q.DP, false)) > 0 {
			return nil
		}
	}
	return p.refusalLocked(q, snap)
}
