package router

import (
	"container/heap"
	"math"
	"slices"
	"time"

	"spillway/worker"
)

// queue is the requests that wait in a partition. Each class has a lane for each set of workers that
// its requests wait for, so that one for which there is no room holds up its own kind alone.
type queue struct {
	profile *Profile
	from    time.Time // from which orders count seconds
	n       int       // requests
	tokens  uint64    // of their prompts
	seq     uint64    // of the last that came
	due     time.Time // no deadline is before; zero if there is none

	backlogs []Backlog // of each class of the profile
	ring     []*class
	classes  map[turn]*class // those in ring
	cursor   int             // in ring, modulo its length: the class whose turn is next
	carry    *class          // that went last, and may spend what it has left before the others' turn; or nil

	groups []*group // those that somebody waits for
	byKey  map[groupKey]*group
	pinned map[worker.ID][]*group // those of one worker
	shared []*group               // the others
}

// turn is whose a turn is: that of a class of a policy file, or of a tenant where there is no file.
type turn struct {
	class  int // in the profile
	tenant string
}

// class is those who share one turn.
type class struct {
	turn
	spec    *Class
	quantum uint64 // tokens earned by a turn
	deficit uint64 // tokens earned and not spent
	n       int    // requests
	lanes   map[*group]*lane
	open    ordered[*lane] // those for whose requests there is room
}

// maxQuantum is what no request costs more than; with less no sum overflows.
const maxQuantum = maxCost

// newQueue is an empty queue. Classes of a file have their place in the ring, in the order of the
// file; tenants come and go, and one that comes is last.
func newQueue(profile *Profile, now time.Time) queue {
	q := queue{
		profile: profile, from: now, backlogs: make([]Backlog, len(profile.Classes)),
		classes: map[turn]*class{}, byKey: map[groupKey]*group{}, pinned: map[worker.ID][]*group{},
	}
	if !profile.synthetic {
		for i := range profile.Classes {
			q.addClass(turn{class: i}, i)
		}
	}
	return q
}

// addClass puts a class into the ring at an index.
func (q *queue) addClass(k turn, at int) *class {
	spec := &q.profile.Classes[k.class]
	c := &class{turn: k, spec: spec, quantum: min(spec.Quantum, maxQuantum), lanes: map[*group]*lane{}}
	q.ring = slices.Insert(q.ring, at, c)
	q.classes[k] = c
	return c
}

// classOf is the class whose turns a request shares, nil if there is none yet.
func (q *queue) classOf(t *Ticket) (turn, *class) {
	k := turn{class: t.policy}
	if q.profile.synthetic {
		k.tenant = t.Order.Tenant
	}
	return k, q.classes[k]
}

// enter sets what decides when t goes, as of its coming now.
func (q *queue) enter(t *Ticket, now time.Time) {
	q.seq++
	t.since, t.seq = now, q.seq
	q.rank(t)
}

// push appends t, of which enter has set what orders it.
func (q *queue) push(t *Ticket) {
	k, c := q.classOf(t)
	if c == nil {
		c = q.addClass(k, min(q.cursor, len(q.ring)))
		q.cursor++
	}
	l := q.laneFor(c, &t.Query)
	if l.group.n == 0 {
		l.group.since = t.since
	}
	t.lane = l
	heap.Push(&l.heap, t)
	l.settle()
	l.group.n++
	c.n++
	q.n++
	l.tokens += t.cost
	q.tokens += t.isl
	b := &q.backlogs[t.policy]
	b.Requests++
	b.ISLTokens += t.isl
	b.CachedTokens += t.cached
	if d := t.Order.Deadline; !d.IsZero() && (q.due.IsZero() || d.Before(q.due)) {
		q.due = d
	}
}

// remove takes t out, and with it what it leaves empty. What it had cost its class is not given back.
func (q *queue) remove(t *Ticket) {
	l, c, g := t.lane, t.lane.class, t.lane.group
	heap.Remove(&l.heap, t.index)
	t.lane = nil
	q.n--
	q.tokens -= t.isl
	l.tokens -= t.cost
	b := &q.backlogs[t.policy]
	b.Requests--
	b.ISLTokens -= t.isl
	b.CachedTokens -= t.cached
	if len(l.heap) == 0 {
		q.dropLane(l)
	} else {
		l.settle()
	}
	if g.n--; g.n == 0 {
		q.dropGroup(g)
	}
	if c.n--; c.n > 0 {
		return
	}
	c.deficit = 0
	if q.carry == c {
		q.carry = nil
	}
	if !q.profile.synthetic {
		return
	}
	delete(q.classes, c.turn)
	i := slices.Index(q.ring, c)
	q.ring = slices.Delete(q.ring, i, i+1)
	if i < q.cursor {
		q.cursor--
	}
}

// next is whose turn it is among those for whom there is room, nil if there is nobody: deficit
// round robin, in a time that does not depend on costs. It is still to be charged and removed.
func (q *queue) next() *Ticket {
	if q.carry != nil {
		if t := q.carry.candidate(); t != nil && t.cost <= q.carry.deficit {
			return t
		}
	}
	rounds := uint64(math.MaxUint64)
	for i := range q.ring {
		c := q.ring[(q.cursor+i)%len(q.ring)]
		t := c.candidate()
		if t == nil {
			continue // blocked: it keeps what it has, and earns nothing
		}
		if t.cost > c.deficit {
			c.deficit += c.quantum
		}
		if t.cost <= c.deficit {
			return t
		}
		rounds = min(rounds, (t.cost-c.deficit+c.quantum-1)/c.quantum)
	}
	if rounds == math.MaxUint64 {
		return nil
	}
	var first *Ticket
	for i := range q.ring {
		c := q.ring[(q.cursor+i)%len(q.ring)]
		t := c.candidate()
		if t == nil {
			continue
		}
		c.deficit += rounds * c.quantum
		if first == nil && t.cost <= c.deficit {
			first = t
		}
	}
	return first
}

// charge has the class of t, which next has returned, pay for it.
func (q *queue) charge(t *Ticket) {
	c := t.lane.class
	q.cursor = slices.Index(q.ring, c) + 1
	c.deficit -= t.cost
	if q.carry = nil; c.deficit > 0 {
		q.carry = c
	}
}

// candidate is the first of the class for whom there is room, or nil.
func (c *class) candidate() *Ticket {
	if len(c.open) == 0 {
		return nil
	}
	return c.open[0].heap[0]
}

// late are those whose deadline has passed.
func (q *queue) late(now time.Time) (late []*Ticket) {
	if q.due.IsZero() || now.Before(q.due) {
		return nil
	}
	q.due = time.Time{}
	for _, g := range q.groups {
		for _, l := range g.lanes {
			for _, t := range l.heap {
				switch d := t.Order.Deadline; {
				case d.IsZero():
				case !now.Before(d):
					late = append(late, t)
				case q.due.IsZero() || d.Before(q.due):
					q.due = d
				}
			}
		}
	}
	return late
}
