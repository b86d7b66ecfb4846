package router

import (
	"cmp"
	"container/heap"
	"encoding/binary"
	"iter"
	"slices"
	"time"

	"spillway/worker"
)

// group is a set of workers and ranks that requests wait for.
type group struct {
	key   groupKey
	query Query // what a request has to say to get just these workers, and nothing else
	at    int   // in queue.groups
	n     int   // requests
	lanes []*lane
	shut  bool      // there was no room, when it came to booking
	since time.Time // somebody has been waiting
	pace  *pace     // nil until one has gone before others
}

// lane is the requests of a class that wait for the same workers.
type lane struct {
	class  *class
	group  *group
	heap   ordered[*Ticket]
	tokens uint64 // that they cost
	at     int    // in class.open, or closed
}

// closed is the place of a lane for which there is no room.
const closed = -1

// groupKey tells sets of workers and ranks apart. Lists of the catalog are told apart by where they
// are kept, so two keys may stand for the same workers after the catalog has changed: their requests
// then have a lane each, which costs them nothing.
type groupKey struct {
	only     **worker.Worker
	narrowed bool
	sets     string    // Allowed, Exclude and Taints
	worker   worker.ID // if onWorker
	dp       uint32    // if onRank
	onWorker bool
	onRank   bool
}

func keyOf(q *Query) groupKey {
	k := groupKey{narrowed: q.Only != nil, onWorker: q.Worker != nil, onRank: q.DP != nil, sets: setsOf(q)}
	if len(q.Only) > 0 {
		k.only = &q.Only[0]
	}
	if k.onWorker {
		k.worker = *q.Worker
	}
	if k.onRank {
		k.dp = *q.DP
	}
	return k
}

// setsOf is the lists that belong to the request, equal if they are the same sets.
func setsOf(q *Query) string {
	var b []byte
	if q.Allowed != nil { // an empty one is not the same
		b = appendIDs(append(b, 'a'), q.Allowed)
	}
	if len(q.Exclude) > 0 {
		b = appendIDs(append(b, 'x'), q.Exclude)
	}
	if len(q.Taints) > 0 {
		b = append(b, 't')
		for _, t := range slices.Compact(slices.Sorted(slices.Values(q.Taints))) {
			b = append(binary.AppendUvarint(b, uint64(len(t))), t...)
		}
	}
	return string(b)
}

func appendIDs(b []byte, ids []worker.ID) []byte {
	set := slices.Compact(slices.Sorted(slices.Values(ids)))
	b = binary.AppendUvarint(b, uint64(len(set)))
	for _, id := range set {
		b = binary.BigEndian.AppendUint64(b, uint64(id))
	}
	return b
}

// laneFor is the lane of a class for requests that may go where q may. One that is new is closed.
func (q *queue) laneFor(c *class, query *Query) *lane {
	k := keyOf(query)
	g := q.byKey[k]
	if g == nil {
		g = &group{key: k, at: len(q.groups), query: Query{
			Only: query.Only, Worker: copied(query.Worker), DP: copied(query.DP),
			Exclude: slices.Clone(query.Exclude), Allowed: slices.Clone(query.Allowed), Taints: slices.Clone(query.Taints),
		}}
		q.byKey[k] = g
		q.groups = append(q.groups, g)
		if k.onWorker {
			q.pinned[k.worker] = append(q.pinned[k.worker], g)
		} else {
			q.shared = append(q.shared, g)
		}
	}
	l := c.lanes[g]
	if l == nil {
		l = &lane{class: c, group: g, at: closed}
		c.lanes[g] = l
		g.lanes = append(g.lanes, l)
	}
	return l
}

// copied is a pointer of our own: the request may be gone long before its group is.
func copied[T any](p *T) *T {
	if p == nil {
		return nil
	}
	return new(*p)
}

// dropLane takes out a lane in which nobody waits any more.
func (q *queue) dropLane(l *lane) {
	l.set(false)
	delete(l.class.lanes, l.group)
	l.group.lanes = without(l.group.lanes, l)
}

// dropGroup takes out a group for which nobody waits any more.
func (q *queue) dropGroup(g *group) {
	delete(q.byKey, g.key)
	last := len(q.groups) - 1
	q.groups[g.at], q.groups[last].at = q.groups[last], g.at
	q.groups[last] = nil
	q.groups = q.groups[:last]
	if !g.key.onWorker {
		q.shared = without(q.shared, g)
		return
	}
	rest := without(q.pinned[g.key.worker], g)
	if len(rest) == 0 {
		delete(q.pinned, g.key.worker)
		return
	}
	q.pinned[g.key.worker] = rest
}

// near are the groups that a change on one worker may matter to.
func (q *queue) near(id worker.ID) iter.Seq[*group] {
	return func(yield func(*group) bool) {
		for _, list := range [...][]*group{q.shared, q.pinned[id]} {
			for _, g := range list {
				if !yield(g) {
					return
				}
			}
		}
	}
}

// without takes x out of list, the last coming into its place.
func without[T comparable](list []T, x T) []T {
	i, last := slices.Index(list, x), len(list)-1
	list[i] = list[last]
	clear(list[last:])
	return list[:last]
}

// waiting are all who wait for the group.
func (g *group) waiting() (all []*Ticket) {
	for _, l := range g.lanes {
		all = append(all, l.heap...)
	}
	return all
}

// has tells whether somebody of a class of the profile waits for the group, which may be nil.
func (g *group) has(policy int) bool {
	return g != nil && slices.ContainsFunc(g.lanes, func(l *lane) bool { return l.class.class == policy })
}

// set opens or closes a lane.
func (l *lane) set(open bool) {
	switch {
	case open == (l.at != closed):
	case open:
		heap.Push(&l.class.open, l)
	default:
		heap.Remove(&l.class.open, l.at)
	}
}

// settle puts an open lane where it belongs after its first request may have changed.
func (l *lane) settle() {
	if l.at != closed {
		heap.Fix(&l.class.open, l.at)
	}
}

// precedence is what decides between requests of one class.
type precedence struct {
	strict    uint32 // higher first
	priority  int32  // higher first
	objective time.Time
	score     float64 // higher first
	seq       uint64
}

// rank fixes what decides for t, of which all else is set.
func (q *queue) rank(t *Ticket) {
	o, spec := &t.Order, &q.profile.Classes[t.policy]
	t.goes = precedence{strict: o.StrictPriority, seq: t.seq}
	jump := o.PriorityJump
	if !(jump > 0) { // so written that not-a-number is none
		jump = 0
	}
	if q.profile.synthetic && spec.Order == FCFS {
		t.goes.priority, t.goes.objective = o.Priority, o.Objective
	} else {
		jump = max(jump, float64(o.Priority))
	}
	came := t.since.Sub(q.from).Seconds()
	switch spec.Order {
	case WSPT:
		t.goes.score = (1 + jump) / float64(t.cost)
	case LCFS:
		t.goes.score = jump + came
	default:
		t.goes.score = jump - came
	}
}

// before tells whether a goes before b, of the same class.
func before(a, b *Ticket) bool {
	o, p := &a.goes, &b.goes
	return cmp.Or(
		cmp.Compare(p.strict, o.strict), cmp.Compare(p.priority, o.priority),
		compareObjectives(o.objective, p.objective), cmp.Compare(p.score, o.score), cmp.Compare(o.seq, p.seq),
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

// queued is what a heap orders: it goes before others, and knows its place among them.
type queued[T any] interface {
	goesBefore(T) bool
	moved(to int)
}

func (t *Ticket) goesBefore(u *Ticket) bool { return before(t, u) }
func (t *Ticket) moved(to int)              { t.index = to }

// A lane is ordered by its first request.
func (l *lane) goesBefore(o *lane) bool { return before(l.heap[0], o.heap[0]) }
func (l *lane) moved(to int)            { l.at = to }

// ordered is a heap for container/heap; the first to go is at its top.
type ordered[T queued[T]] []T

// Len implements heap.Interface.
func (h ordered[T]) Len() int { return len(h) }

// Less implements heap.Interface.
func (h ordered[T]) Less(i, j int) bool { return h[i].goesBefore(h[j]) }

// Swap implements heap.Interface.
func (h ordered[T]) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].moved(i)
	h[j].moved(j)
}

// Push implements heap.Interface.
func (h *ordered[T]) Push(x any) {
	v := x.(T)
	v.moved(len(*h))
	*h = append(*h, v)
}

// Pop implements heap.Interface.
func (h *ordered[T]) Pop() any {
	var none T
	last := len(*h) - 1
	v := (*h)[last]
	(*h)[last] = none
	*h = (*h)[:last]
	v.moved(closed)
	return v
}
