package selectservice

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"spillway/httperr"
	"spillway/kvindex"
	"spillway/router"
	"spillway/tracker"
	"spillway/worker"
)

// choose serves /select: where a request would go, without booking it.
func (s *Server) choose(r *http.Request, x *exchange, now time.Time) (int, *httperr.Error) {
	p, failed := s.prepare(r, x)
	if failed != nil {
		return 0, failed
	}
	x.ticket.Query.NoBooking = true
	if x.explain {
		x.terms = x.terms[:0]
		x.ticket.Query.Explain = &x.terms
	}
	sel, _, err := s.decide(r.Context(), x, p, now)
	if err != nil {
		return 0, s.refusal(x, p, err)
	}
	rec := s.catalog.schedulable(p, uint64(sel.Rank.Worker))
	if rec == nil {
		return 0, goneWorker(sel)
	}
	if s.pending != nil && x.selectionID != nil {
		s.pending.put(s.pendingOf(x, p, sel), now)
	}
	s.answer(x, p, rec, sel, nil)
	return http.StatusOK, nil
}

// chooseAndReserve serves /select_and_reserve: both in one step.
func (s *Server) chooseAndReserve(r *http.Request, x *exchange, now time.Time) (int, *httperr.Error) {
	p, failed := s.prepare(r, x)
	if failed != nil {
		return 0, failed
	}
	id := newID
	if given := s.bookingID(&x.request); given != nil {
		id = func() string { return *given }
	}
	q := &x.ticket.Query
	q.Reservation, q.Expires = id(), true
	if holder, ok := s.ids.begin(q.Reservation, p); !ok {
		return 0, duplicate("failed to book scheduler state: ", q.Reservation, holder)
	}
	defer s.ids.end(q.Reservation)
	for again := true; ; again = false {
		sel, route, err := s.decide(r.Context(), x, p, now)
		if errors.Is(err, tracker.ErrUnknownRank) && again {
			continue // its worker has just gone
		}
		if err != nil {
			return 0, s.refusal(x, p, err)
		}
		rec := s.catalog.schedulable(p, uint64(sel.Rank.Worker))
		if err := r.Context().Err(); err != nil || rec == nil {
			route.Free(q.Reservation, s.now()) // nobody was told of it
			s.letGo(route, s.now())
			if rec != nil {
				return 0, httperr.From(err, "", 0)
			}
			return 0, goneWorker(sel)
		}
		prefill := uint64(0)
		if sel.TracksPrefill {
			prefill = sel.EffectivePrefillTokens
		}
		s.publish(x, p, tracker.Reservation{ID: q.Reservation, Rank: sel.Booked, Hashes: q.SequenceHashes, PrefillTokens: prefill})
		s.answer(x, p, rec, sel, &q.Reservation)
		return http.StatusOK, nil
	}
}

// newID is a UUID of version 4.
func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // it does not fail
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// prepare makes a query of what a body asks for: all that the decision needs and that can be done
// beforehand.
func (s *Server) prepare(r *http.Request, x *exchange) (*partition, *httperr.Error) {
	if s.isStopping() {
		return nil, errStopping
	}
	p, failed := s.catalog.usable(x.partition())
	if failed != nil {
		return nil, failed
	}
	if failed := x.prompt.hash(p, toSelect, s.reuses(x), &x.hashed); failed != nil {
		return nil, failed
	}
	blocks := p.blocks.Load()
	blocks.Index.Query(x.hashed.locals, &x.matches)
	x.ticket = router.Ticket{
		Owner: x.ready,
		Query: router.Query{
			PromptTokens: x.hashed.isl, SequenceHashes: x.hashed.seqs, BlockSize: uint32(blocks.BlockSize()),
			Overlaps: &x.matches, Override: x.override, Taints: x.constraints.required, Preferred: x.constraints.preferred,
		},
		Order: router.Order{
			StrictPriority: or(x.strict, 0), PriorityJump: max(or(x.jump, 0), 0), Class: policyClass(r.Header),
		},
	}
	q := &x.ticket.Query
	if len(x.hashed.locals) > 0 && s.setup.Router.Queues() {
		x.ticket.Overlaps = func() *kvindex.Matches {
			blocks.Index.Query(x.hashed.locals, &x.matches) // nobody looks at them while it waits
			return &x.matches
		}
	}
	if x.request.allowed != nil {
		x.allowed = x.allowed[:0]
		for _, id := range x.request.allowed {
			x.allowed = append(x.allowed, worker.ID(id))
		}
		q.Allowed = slices.Clip(x.allowed)
		if q.Allowed == nil {
			q.Allowed = []worker.ID{} // nobody, as opposed to all
		}
	}
	if x.pin != nil {
		q.Worker, q.DP = (*worker.ID)(&x.pin.worker), &x.pin.dp
	}
	return p, nil
}

// reuses tells whether requests with the same prompt are taken to share its blocks.
func (s *Server) reuses(x *exchange) bool {
	weights := s.setup.Cost.Weights(x.override)
	return weights.AssumeReuse
}

// policyClass is the class or family of the queue's policy that a request asks for.
func policyClass(h http.Header) string {
	class := strings.TrimSpace(h.Get("X-Dynamo-Meta-Policy-Class"))
	for i := range len(class) {
		if class[i] < ' ' || class[i] > '~' {
			return ""
		}
	}
	return class
}

// decide has the router choose, and waits for it as long as the router has the request wait. The
// partition returned is the one that holds the booking.
func (s *Server) decide(ctx context.Context, x *exchange, p *partition, now time.Time) (router.Selection, *router.Partition, error) {
	route := p.route.Load()
	admitted, err := route.Wait(&x.ticket, now)
	wake(admitted)
	if err != nil {
		return router.Selection{}, route, err
	}
	select {
	case a := <-x.ready: // it need not wait
		return a.Selection, route, a.Err
	default:
	}
	var why error
	select {
	case a := <-x.ready:
		return a.Selection, route, a.Err
	case <-ctx.Done():
		why = ctx.Err()
	case <-s.stopping:
		why = errShutDown
	}
	if route.Leave(&x.ticket) {
		return router.Selection{}, route, why
	}
	a := <-x.ready // who let us go is about to say so
	return a.Selection, route, a.Err
}

var errShutDown = httperr.New(http.StatusServiceUnavailable, "endpoint subscriber shutdown")

// refusal is what a client is told when there is no selection.
func (s *Server) refusal(x *exchange, p *partition, err error) *httperr.Error {
	var limit *router.ClassLimitError
	switch {
	case errors.As(err, &limit):
		p.refuse(limit)
		full := httperr.From(limit, p.key.Model, http.StatusServiceUnavailable)
		full.Message = limit.Error()
		return full
	case errors.Is(err, tracker.ErrDuplicate):
		return duplicate("failed to book scheduler state: ", x.ticket.Query.Reservation, p)
	case errors.Is(err, router.ErrPinForbidden):
		return httperr.New(http.StatusBadRequest, fmt.Sprintf("pinned worker %d is not in allowed worker set", x.pin.worker))
	case errors.Is(err, router.ErrPinBusy):
		return httperr.New(http.StatusTooManyRequests, fmt.Sprintf("pinned worker %d is overloaded", x.pin.worker))
	case errors.Is(err, router.ErrOverloaded):
		return httperr.New(http.StatusTooManyRequests, "all eligible workers are overloaded")
	case errors.Is(err, router.ErrNoWorkers), errors.Is(err, router.ErrUnroutable), errors.Is(err, router.ErrPinUnknown), errors.Is(err, tracker.ErrUnknownRank):
		return httperr.New(http.StatusServiceUnavailable, "no endpoints available to route work")
	}
	return httperr.From(err, p.key.Model, http.StatusServiceUnavailable)
}

func goneWorker(sel router.Selection) *httperr.Error {
	return httperr.New(http.StatusInternalServerError, fmt.Sprintf("selected worker %d is no longer schedulable", sel.Rank.Worker))
}

// duplicate is the refusal of an ID that is booked in p already, or is about to be.
func duplicate(before, id string, p *partition) *httperr.Error {
	at := "being booked"
	if route := p.route.Load(); route != nil {
		if rank, ok := route.Tracker.Find(id); ok {
			at = "assigned to worker " + rankName(rank)
		}
	}
	return httperr.New(http.StatusConflict, fmt.Sprintf("%sRequest %.256s already exists (%s)", before, id, at))
}

func rankName(r worker.Rank) string {
	return fmt.Sprintf("WorkerWithDpRank { worker_id: %d, dp_rank: %d }", r.Worker, r.DP)
}

// publish tells replicas of a booking.
func (s *Server) publish(x *exchange, p *partition, r tracker.Reservation) {
	if s.link.Added == nil {
		return
	}
	r.Hashes = append([]uint64{}, r.Hashes...) // ours are used again; none is not the same as not said
	s.link.Added(p.key, p.blockSize(), Booking{
		Reservation: r, TracksPrefill: r.PrefillTokens > 0, ExpectedOutputTokens: x.expected, LoRA: x.prompt.lora,
	})
}
