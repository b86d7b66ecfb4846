package router_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"spillway/router"
	"spillway/worker"
)

// crowd is the queue as its rules are written: a list of those who wait, which is gone through for
// each who goes, and deficits that are paid a token at a time.
type crowd struct {
	waiting []*router.Ticket // in the order in which they came
	turns   []string         // tenants with somebody waiting; whose turn is next is first
	deficit map[string]uint64
	carry   string // may go before its turn, with what it has left
	holds   map[worker.ID]string
	workers []worker.ID
}

func (c *crowd) free(id worker.ID) bool { return c.holds[id] == "" }

// fits tells whether a worker that t may go to is free.
func (c *crowd) fits(t *router.Ticket) bool {
	return slices.ContainsFunc(c.workers, func(id worker.ID) bool {
		allowed := t.Query.Only == nil || slices.ContainsFunc(t.Query.Only, func(w *worker.Worker) bool { return w.ID == id })
		return c.free(id) && allowed && (t.Query.Worker == nil || *t.Query.Worker == id)
	})
}

// best is the first of a tenant's who fits.
func (c *crowd) best(tenant string) (best *router.Ticket) {
	for _, t := range c.waiting {
		if t.Order.Tenant != tenant || !c.fits(t) {
			continue
		}
		if best == nil || ahead(t.Order, best.Order) {
			best = t
		}
	}
	return best
}

// ahead tells whether a later one goes before an earlier one.
func ahead(later, earlier router.Order) bool {
	if later.StrictPriority != earlier.StrictPriority {
		return later.StrictPriority > earlier.StrictPriority
	}
	if later.Priority != earlier.Priority {
		return later.Priority > earlier.Priority
	}
	if later.Objective.IsZero() {
		return false
	}
	return earlier.Objective.IsZero() || later.Objective.Before(earlier.Objective)
}

// next is who goes next, or nil.
func (c *crowd) next() *router.Ticket {
	if t := c.best(c.carry); c.carry != "" && t != nil && t.Query.PromptTokens <= c.deficit[c.carry] {
		return t
	}
	somebody := false
	for _, tenant := range c.turns {
		t := c.best(tenant)
		if t == nil {
			continue
		}
		somebody = true
		if t.Query.PromptTokens > c.deficit[tenant] {
			c.deficit[tenant]++
		}
		if t.Query.PromptTokens <= c.deficit[tenant] {
			return t
		}
	}
	for somebody {
		for _, tenant := range c.turns {
			if c.best(tenant) != nil {
				c.deficit[tenant]++
			}
		}
		for _, tenant := range c.turns {
			if t := c.best(tenant); t != nil && t.Query.PromptTokens <= c.deficit[tenant] {
				return t
			}
		}
	}
	return nil
}

func (c *crowd) enter(t *router.Ticket) {
	c.waiting = append(c.waiting, t)
	if !slices.Contains(c.turns, t.Order.Tenant) {
		c.turns = append(c.turns, t.Order.Tenant)
	}
}

// drop takes t out; with it goes its tenant if it was the last.
func (c *crowd) drop(t *router.Ticket) {
	c.waiting = slices.DeleteFunc(c.waiting, func(o *router.Ticket) bool { return o == t })
	tenant := t.Order.Tenant
	if slices.ContainsFunc(c.waiting, func(o *router.Ticket) bool { return o.Order.Tenant == tenant }) {
		return
	}
	c.turns = slices.DeleteFunc(c.turns, func(o string) bool { return o == tenant })
	delete(c.deficit, tenant)
	if c.carry == tenant {
		c.carry = ""
	}
}

// goes has t take a worker, and its tenant pay.
func (c *crowd) goes(t *router.Ticket, on worker.ID) {
	i := slices.Index(c.turns, t.Order.Tenant)
	c.turns = slices.Concat(c.turns[i+1:], c.turns[:i+1])
	c.carry = ""
	if c.deficit[t.Order.Tenant] -= t.Query.PromptTokens; c.deficit[t.Order.Tenant] > 0 {
		c.carry = t.Order.Tenant
	}
	c.drop(t)
	c.holds[on] = t.Query.Reservation
}

// TestQueueIsTheCrowd compares the queue with the rules over random requests that come, go, leave and
// wait in vain.
func TestQueueIsTheCrowd(t *testing.T) {
	for seed := range uint64(300) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { compareQueues(t, rand.New(rand.NewPCG(seed, 1))) })
	}
}

func compareQueues(t *testing.T, rng *rand.Rand) {
	const workers, places = 4, 12
	w := newWave(t, places)
	c := &crowd{deficit: map[string]uint64{}, holds: map[worker.ID]string{}}
	var records []worker.Worker
	for i := range workers {
		records = append(records, record(t, worker.ID(i+1), 0))
		w.register(records[i])
		c.workers = append(c.workers, records[i].ID)
	}
	narrowed := [][]*worker.Worker{ids(records[:2]...), ids(records[2:]...)}
	// check goes through who was let go and compares each with who should have been.
	check := func(what string, admitted []router.Admission, late []*router.Ticket) {
		t.Helper()
		for _, a := range admitted {
			if a.Err != nil {
				if !slices.Contains(late, a.Ticket) {
					t.Fatalf("%s: %v ends with %v, want only those to end whose time is over", what, a.Ticket.Owner, a.Err)
				}
				continue
			}
			want := c.next()
			if want != a.Ticket || !c.free(a.Selection.Worker.ID) {
				t.Fatalf("%s: %v goes to %v, want %+v to go to a free one", what, a.Ticket.Owner, a.Selection.Worker.ID, want)
			}
			c.goes(a.Ticket, a.Selection.Worker.ID)
		}
		if next := c.next(); next != nil {
			t.Fatalf("%s: nobody more goes, want %v to", what, next.Owner)
		}
	}
	// expire takes out whose deadline has passed.
	expire := func() (late []*router.Ticket) {
		for _, ticket := range slices.Clone(c.waiting) {
			if d := ticket.Order.Deadline; !d.IsZero() && !w.now.Before(d) {
				late = append(late, ticket)
				c.drop(ticket)
			}
		}
		return late
	}
	for i := range 120 {
		w.now = w.now.Add(time.Duration(rng.IntN(300)) * time.Millisecond)
		switch op := rng.IntN(10); {
		case op < 5:
			ticket := newTicket(rng, i, w.now, narrowed)
			what := fmt.Sprintf("step %d, %+v comes", i, ticket.Order)
			late := expire()
			admitted, err := w.p.Wait(ticket, w.now)
			if own := slices.IndexFunc(admitted, func(a router.Admission) bool { return a.Ticket == ticket }); own >= 0 {
				// Those who waited come first; then it finds a worker that none of them may go to.
				check(what, admitted[:own], late)
				if !c.fits(ticket) || own != len(admitted)-1 {
					t.Fatalf("%s: it goes, want it to wait", what)
				}
				c.holds[admitted[own].Selection.Worker.ID] = ticket.Query.Reservation
				continue
			}
			check(what+" after those who wait", admitted, late)
			var full *router.QueueFullError
			switch {
			case err == nil:
				c.enter(ticket)
			case errors.As(err, &full) && len(c.waiting) == places, errors.Is(err, router.ErrQueueTimeout) && !ticket.Order.Deadline.IsZero():
			default:
				t.Fatalf("%s: Wait = %v with %d of %d waiting", what, err, len(c.waiting), places)
			}
		case op < 8:
			busy := slices.DeleteFunc(slices.Clone(c.workers), c.free)
			if len(busy) == 0 {
				continue
			}
			id := busy[rng.IntN(len(busy))]
			w.p.Free(c.holds[id], w.now)
			delete(c.holds, id)
			late := expire()
			check(fmt.Sprintf("step %d, worker %d is free", i, id), w.p.Admit(w.now), late)
		case op < 9 && len(c.waiting) > 0:
			ticket := c.waiting[rng.IntN(len(c.waiting))]
			if !w.p.Leave(ticket) {
				t.Fatalf("step %d: %v waits, and cannot leave", i, ticket.Owner)
			}
			c.drop(ticket)
		default:
			late := expire()
			check(fmt.Sprintf("step %d, nothing happens", i), w.p.Admit(w.now), late)
		}
		tokens := uint64(0)
		for _, ticket := range c.waiting {
			tokens += ticket.Query.PromptTokens
		}
		if w.p.Waiting() != len(c.waiting) || w.p.WaitingTokens() != tokens || len(c.waiting) > places {
			t.Fatalf("after step %d: %d wait with %d tokens, want %d with %d", i, w.p.Waiting(), w.p.WaitingTokens(), len(c.waiting), tokens)
		}
	}
	for len(c.holds) > 0 {
		for id, reservation := range c.holds {
			w.p.Free(reservation, w.now)
			delete(c.holds, id)
			check("the end", w.p.Admit(w.now), expire())
			break
		}
	}
	if len(c.waiting) > 0 || w.p.WaitingTokens() != 0 {
		t.Errorf("at the end %d wait with %d tokens, want nobody", len(c.waiting), w.p.WaitingTokens())
	}
	w.checkEmpty()
}

// newTicket is a request of any kind.
func newTicket(rng *rand.Rand, i int, now time.Time, narrowed [][]*worker.Worker) *router.Ticket {
	ticket := &router.Ticket{
		Query: router.Query{Reservation: fmt.Sprint(i), PromptTokens: 1 + rng.Uint64N(30)}, Owner: fmt.Sprint(i),
		Order: router.Order{Tenant: string(rune('a' + rng.IntN(3)))},
	}
	if rng.IntN(4) == 0 {
		ticket.Order.Priority = int32(rng.IntN(5) - 2)
	}
	if rng.IntN(6) == 0 {
		ticket.Order.StrictPriority = uint32(rng.IntN(2))
	}
	if rng.IntN(4) == 0 {
		ticket.Order.Objective = now.Add(time.Duration(rng.IntN(4)) * time.Second)
	}
	if rng.IntN(4) == 0 {
		ticket.Order.Deadline = now.Add(time.Duration(1+rng.IntN(4000)) * time.Millisecond)
	}
	switch rng.IntN(6) {
	case 0:
		ticket.Query.Worker = new(worker.ID(1 + rng.IntN(4)))
	case 1:
		ticket.Query.Only = narrowed[rng.IntN(len(narrowed))]
	}
	return ticket
}
