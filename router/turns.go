package router

import (
	"cmp"
	"container/heap"
	"math"
	"slices"
	"time"
)

// queue is the requests that wait in a partition. Each class, of which every tenant is one, has
// a lane for each set of workers that its requests wait for, so that one for which there is no
// room holds up its own kind alone. The zero value is empty.
type queue struct {
	n      int       // requests
	tokens uint64    // of their prompts
	seq    uint64    // of the last that came
	due    time.Time // no deadline is before; zero if there is none

	groups []*group // those that somebody waits for, in the order in which they were first
	ring   []*class // those with somebody waiting
	cursor int      // in ring, modulo its length: the class whose turn is next; one that comes is last
	carry  *class   // that may spend what it has left before the others' turn, if somebody still waits; or nil
}

// group is a set of workers and ranks that requests wait for.
type group struct {
	key   groupKey
	query Query // of the first that waited; as to where it may go it stands for all
	n     int
	open  bool // there is room, as far as the snapshot tells
	shut  bool // there was not, when it came to booking
	pace  pace
}

// class is those who share one turn.
type class struct {
	tenant  string
	quantum uint64 // tokens earned by a turn
	deficit uint64 // tokens earned and not spent
	lanes   []*lane
}

// lane is the requests of a class that wait for the same workers.
type lane struct {
	group  *group
	heap   ordered
	tokens uint64
}

// quantum makes turns as fine as can be: tenants with the same to wait for get the same tokens,
// to within one request.
const quantum = 1

func (q *queue) find(k groupKey) *group {
	for _, g := range q.groups {
		if g.key == k {
			return g
		}
	}
	return nil
}

// push appends t, whose cost, time and number are set.
func (q *queue) push(t *Ticket) {
	g := q.find(keyOf(&t.Query))
	if g == nil {
		g = &group{key: keyOf(&t.Query), query: t.Query, pace: pace{from: t.since}}
		q.groups = append(q.groups, g)
	}
	var c *class
	if i := slices.IndexFunc(q.ring, func(c *class) bool { return c.tenant == t.Order.Tenant }); i >= 0 {
		c = q.ring[i]
	} else {
		c = &class{tenant: t.Order.Tenant, quantum: quantum}
		q.ring = slices.Insert(q.ring, min(q.cursor, len(q.ring)), c)
		q.cursor++
	}
	l := c.lane(g)
	if l == nil {
		l = &lane{group: g}
		c.lanes = append(c.lanes, l)
	}
	t.class, t.lane = c, l
	heap.Push(&l.heap, t)
	g.n++
	q.n++
	l.tokens += t.cost
	q.tokens += t.cost
	if d := t.Order.Deadline; !d.IsZero() && (q.due.IsZero() || d.Before(q.due)) {
		q.due = d
	}
}

// remove takes t out, and with it what it leaves empty. What it had cost its class is not given back.
func (q *queue) remove(t *Ticket) {
	c, l, g := t.class, t.lane, t.lane.group
	heap.Remove(&l.heap, t.index)
	t.class, t.lane = nil, nil
	q.n--
	q.tokens -= t.cost
	l.tokens -= t.cost
	if g.n--; g.n == 0 {
		q.groups = slices.DeleteFunc(q.groups, func(o *group) bool { return o == g })
	}
	if len(l.heap) > 0 {
		return
	}
	c.lanes = slices.DeleteFunc(c.lanes, func(o *lane) bool { return o == l })
	if len(c.lanes) > 0 {
		return
	}
	i := slices.Index(q.ring, c)
	q.ring = slices.Delete(q.ring, i, i+1)
	if i < q.cursor {
		q.cursor--
	}
}

// late are those whose deadline has passed.
func (q *queue) late(now time.Time) (late []*Ticket) {
	if q.due.IsZero() || now.Before(q.due) {
		return nil
	}
	q.due = time.Time{}
	for _, c := range q.ring {
		for _, l := range c.lanes {
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

// of are all who wait for a group.
func (q *queue) of(g *group) (all []*Ticket) {
	for _, c := range q.ring {
		if l := c.lane(g); l != nil {
			all = append(all, l.heap...)
		}
	}
	return all
}

// next is whose turn it is among those whose group is open, nil if there is nobody: deficit round
// robin, in a time that does not depend on costs. It is still to be charged and removed.
func (q *queue) next() *Ticket {
	carry := q.carry
	q.carry = nil
	if carry != nil {
		if t := carry.candidate(); t != nil && t.cost <= carry.deficit {
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
	c := t.class
	q.cursor = slices.Index(q.ring, c) + 1
	c.deficit -= t.cost
	if c.deficit > 0 {
		q.carry = c
	}
}

// delay is how long t will wait, if those that wait for the group too go at their present pace: 0
// where that is not known yet. Other tenants get as many tokens meanwhile as its own.
func (q *queue) delay(g *group, t *Ticket, now time.Time) time.Duration {
	rate, known := g.pace.rate(now)
	if !known {
		return 0
	}
	var own, others uint64
	for _, c := range q.ring {
		if l := c.lane(g); l != nil && c.tenant == t.Order.Tenant {
			for _, w := range l.heap {
				if before(w, t) {
					own += w.cost
				}
			}
		}
	}
	for _, c := range q.ring {
		if l := c.lane(g); l != nil && c.tenant != t.Order.Tenant {
			others += min(l.tokens, own+t.cost)
		}
	}
	return time.Duration(min(float64(own+others)/rate, math.MaxInt32) * float64(time.Second))
}

func (c *class) lane(g *group) *lane {
	for _, l := range c.lanes {
		if l.group == g {
			return l
		}
	}
	return nil
}

// candidate is the first of the class for whom there is room, or nil.
func (c *class) candidate() (first *Ticket) {
	for _, l := range c.lanes {
		if t := l.heap[0]; l.group.open && (first == nil || before(t, first)) {
			first = t
		}
	}
	return first
}

// before tells whether a goes before b, of the same class.
func before(a, b *Ticket) bool {
	o, p := &a.Order, &b.Order
	return cmp.Or(
		cmp.Compare(p.StrictPriority, o.StrictPriority), cmp.Compare(p.Priority, o.Priority),
		compareObjectives(o.Objective, p.Objective), cmp.Compare(a.seq, b.seq),
	) < 0
}

func compareObjectives(a, b time.Time) int {
	switch {
	case a.IsZero() && b.IsZero():
		return 0
	case a.IsZero():
		return 1
	case b.IsZero():
		return -1
	}
	return a.Compare(b)
}

// ordered is a heap of tickets of one lane; the first to go is at its top.
type ordered []*Ticket

// Len implements heap.Interface.
func (h ordered) Len() int { return len(h) }

// Less implements heap.Interface.
func (h ordered) Less(i, j int) bool { return before(h[i], h[j]) }

// Swap implements heap.Interface.
func (h ordered) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

// Push implements heap.Interface.
func (h *ordered) Push(x any) {
	t := x.(*Ticket)
	t.index = len(*h)
	*h = append(*h, t)
}

// Pop implements heap.Interface.
func (h *ordered) Pop() any {
	last := len(*h) - 1
	t := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return t
}

// pace is how fast those go that wait for one group. It begins anew when nobody has waited for a
// while: times without waiting say nothing of how long one would have had to.
type pace struct {
	from time.Time // since when the tokens are counted
	last [32]struct {
		at     time.Time
		tokens uint64
	} // the last admissions, a ring
	n      int    // admissions in all
	tokens uint64 // of those in last
}

// minPace is the number of admissions from which on a rate can be told. Fewer come in a burst that
// a queue is there to take up.
const minPace = 8

func (p *pace) admit(tokens uint64, now time.Time) {
	e := &p.last[p.n%len(p.last)]
	if p.n >= len(p.last) {
		p.from = e.at
		p.tokens -= e.tokens
	}
	e.at, e.tokens = now, tokens
	p.tokens += tokens
	p.n++
}

// rate is in tokens per second.
func (p *pace) rate(now time.Time) (float64, bool) {
	took := now.Sub(p.from)
	if p.n < minPace || took <= 0 {
		return 0, false
	}
	return float64(p.tokens) / took.Seconds(), true
}
