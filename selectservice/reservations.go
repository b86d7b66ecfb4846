package selectservice

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"spillway/httperr"
	"spillway/jsonhttp"
	"spillway/router"
	"spillway/tracker"
	"spillway/worker"
)

// book serves /reservations: a booking on a rank that the client names.
func (s *Server) book(_ *http.Request, x *exchange, now time.Time) (int, *httperr.Error) {
	if s.isStopping() {
		return 0, errStopping
	}
	id := *s.bookingID(&x.request)
	if s.pending != nil {
		if x.workerID == nil {
			return s.replay(x, id, now)
		}
		s.pending.discard(pendingKey{x.partition(), id})
	}
	p, failed := s.catalog.usable(x.partition())
	if failed != nil {
		return 0, failed
	}
	if failed := x.prompt.hash(p, toBook, s.reuses(x), &x.hashed); failed != nil {
		return 0, failed
	}
	prefill := or(x.effective, 0)
	if prefill > x.hashed.isl {
		return 0, httperr.New(http.StatusBadRequest, fmt.Sprintf("effective_prefill_tokens (%d) must not exceed isl_tokens (%d)", prefill, x.hashed.isl))
	}
	if !or(x.track, true) {
		prefill = 0
	}
	rank := worker.Rank{Worker: worker.ID(*x.workerID), DP: or(x.dp, 0)}
	return s.reserve(x, p, tracker.Reservation{ID: id, Rank: rank, Hashes: x.hashed.seqs, PrefillTokens: prefill, Expires: true}, now)
}

// reserve books r and answers.
func (s *Server) reserve(x *exchange, p *partition, r tracker.Reservation, now time.Time) (int, *httperr.Error) {
	rec := s.catalog.schedulable(p, uint64(r.Rank.Worker))
	if rec == nil {
		return 0, httperr.New(http.StatusNotFound, fmt.Sprintf("schedulable worker %d not found for %s", r.Rank.Worker, s.catalog.name(p.key)))
	}
	if holder, ok := s.ids.begin(r.ID, p); !ok {
		return 0, duplicate("", r.ID, holder)
	}
	defer s.ids.end(r.ID)
	switch err := p.route.Load().Reserve(r, now); {
	case errors.Is(err, tracker.ErrUnknownRank):
		return 0, httperr.New(http.StatusNotFound, "Worker "+rankName(r.Rank)+" not found")
	case errors.Is(err, tracker.ErrDuplicate):
		return 0, duplicate("", r.ID, p)
	case err != nil:
		return 0, httperr.From(err, p.key.Model, http.StatusServiceUnavailable)
	}
	s.publish(x, p, r)
	name := `{"reservation_id":`
	if s.grouped {
		name = `{"selection_id":`
	}
	b := jsonhttp.AppendText(append(x.Out, name...), r.ID)
	b = s.appendPartition(b, `,"model_name":`, p)
	b = jsonhttp.AppendUint(b, `,"worker_id":`, uint64(r.Rank.Worker))
	b = jsonhttp.AppendUint(b, `,"dp_rank":`, uint64(r.Rank.DP))
	b = jsonhttp.AppendText(append(b, `,"endpoint":`...), or(rec.endpoint, ""))
	x.Out = append(b, '}')
	return http.StatusCreated, nil
}

func unknownReservation(id string) *httperr.Error {
	return httperr.New(http.StatusNotFound, fmt.Sprintf("reservation %.256s not found", id))
}

// prefillComplete ends the prefill of a reservation. Those whom that lets go have been told before
// the answer.
func (s *Server) prefillComplete(w http.ResponseWriter, r *http.Request) *httperr.Error {
	id, now := r.PathValue("id"), s.now()
	known := s.with(id, func(p *partition, route *router.Partition) bool {
		rank, known := route.PrefillDone(id, now)
		if known {
			s.renew(route, id, now)
			if s.link.PrefillDone != nil {
				s.link.PrefillDone(p.key, p.blockSize(), id, rank)
			}
			wake(route.AdmitOn(rank.Worker, now))
		}
		return known
	})
	if !known {
		return unknownReservation(id)
	}
	jsonhttp.Send(w, http.StatusOK, jsonhttp.OK)
	return nil
}

func (s *Server) outputBlock(r *http.Request, x *exchange, now time.Time) (int, *httperr.Error) {
	if x.decay != nil && !(*x.decay >= 0 && *x.decay <= 1) {
		return 0, httperr.New(http.StatusBadRequest, "decay_fraction must be between 0.0 and 1.0")
	}
	id := r.PathValue("id")
	known := s.with(id, func(_ *partition, route *router.Partition) bool {
		_, effect := route.Tracker.Grow(id, 1, x.decay, now)
		if effect != tracker.Unknown {
			s.renew(route, id, now)
		}
		return effect != tracker.Unknown
	})
	if !known {
		return 0, unknownReservation(id)
	}
	return http.StatusOK, nil
}

// free gives back what is booked under an ID. One that is not known is none of our business, unless
// nobody ever was.
func (s *Server) free(w http.ResponseWriter, r *http.Request) *httperr.Error {
	id, now := r.PathValue("id"), s.now()
	if !s.catalog.any() {
		return unknownReservation(id)
	}
	s.with(id, func(p *partition, route *router.Partition) bool {
		rank, known := route.Free(id, now)
		if known {
			if s.link.Freed != nil {
				s.link.Freed(p.key, p.blockSize(), id, rank)
			}
			wake(route.AdmitOn(rank.Worker, now))
		}
		return known
	})
	s.ids.gone(id)
	jsonhttp.Send(w, http.StatusOK, jsonhttp.OK)
	return nil
}

func (s *Server) renew(route *router.Partition, id string, now time.Time) {
	if s.cfg.Renew {
		route.Tracker.Renew(id, now)
	}
}
