package selectservice

import (
	"sync"

	"spillway/router"
)

// ids tells which partition a reservation was made in by this process. Routes name reservations by
// their ID alone, so one ID must not be booked in two partitions. What replicas have booked is not
// among them.
type ids struct {
	mu sync.Mutex // guards of; locks of trackers come after it
	of map[string]claim
}

// claim is a partition that an ID is booked in, or is about to be by so many requests.
type claim struct {
	part    *partition
	pending int
}

func newIDs() *ids { return &ids{of: map[string]claim{}} }

// begin takes an ID for a partition before it is booked there. It returns false, and the partition,
// if the ID is another one's. A claim whose booking has gone meanwhile is none.
func (x *ids) begin(id string, part *partition) (holder *partition, ok bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	c := x.of[id]
	if c.part != nil && c.part != part && (c.pending > 0 || c.part.booked(id)) {
		return c.part, false
	}
	if c.part != part {
		c = claim{part: part}
	}
	c.pending++
	x.of[id] = c
	return part, true
}

// end is called after each begin that went well, when the booking was made or has failed.
func (x *ids) end(id string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	c := x.of[id]
	c.pending--
	x.of[id] = c
	x.dropLocked(id, c)
}

// holder is the partition that an ID was booked in, or nil.
func (x *ids) holder(id string) *partition {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.of[id].part
}

// gone is called when a booking may have ended.
func (x *ids) gone(id string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if c, ok := x.of[id]; ok {
		x.dropLocked(id, c)
	}
}

// sweep drops what ended otherwise: with its worker, by its age, or freed by a replica.
func (x *ids) sweep() {
	x.mu.Lock()
	defer x.mu.Unlock()
	for id, c := range x.of {
		x.dropLocked(id, c)
	}
}

func (x *ids) dropLocked(id string, c claim) {
	if c.pending == 0 && !c.part.booked(id) {
		delete(x.of, id)
	}
}

// booked tells whether the partition has a reservation of that ID.
func (p *partition) booked(id string) bool {
	route := p.route.Load()
	if route == nil {
		return false
	}
	_, ok := route.Tracker.Find(id)
	return ok
}

// with calls f for each partition's route that may have the reservation until f reports true: the
// one that it was booked in first, then the others, since a replica may have booked it.
func (s *Server) with(id string, f func(p *partition, route *router.Partition) bool) bool {
	first := s.ids.holder(id)
	try := func(p *partition) bool {
		route := p.route.Load()
		return route != nil && f(p, route)
	}
	if first != nil && try(first) {
		return true
	}
	for _, p := range s.catalog.matching(filter{}) {
		if p != first && try(p) {
			return true
		}
	}
	return false
}
