package proxy

import (
	"errors"
	"math/rand/v2"
	"time"

	"spillway/httperr"
	"spillway/router"
)

// failure is an attempt that ended before anything was sent to the client.
type failure struct {
	answer *httperr.Error
	retry  bool // another worker may do better
	unsent bool // the worker has processed nothing
	reason retryReason
}

func (f *failure) Error() string { return f.answer.Error() }
func (f *failure) Unwrap() error { return f.answer }

// failureOf is the failure in err, or nil. What errors.As needs on the heap is not made for an
// attempt that succeeded.
func failureOf(err error) *failure {
	if err == nil {
		return nil
	}
	var f *failure
	errors.As(err, &f)
	return f
}

// retryReason is why an attempt failed, as metrics tell it.
type retryReason uint8

const (
	byConnect retryReason = iota
	byReset
	byProtocol
	byTimeout
	byCapacity
	byStatus
)

var retryReasons = [...]string{"connect", "reset", "protocol", "timeout", "capacity", "status"}

// errTried means that the worker's circuit lets nobody through just now: it opened, or another
// request took the turn to try the worker, since the worker was chosen.
var errTried = errors.New("proxy: the worker is being tried by another request")

// admit opens the metrics of the request and gets it an answer from a worker.
func (x *exchange) admit(h hints) error {
	x.counts.queued.Add(1)
	x.waiting = true
	now := time.Now()
	x.enter(route, now)
	x.wait.deadline = x.deadlineOf(now)
	x.mayWait = x.s.queues && !batched(x.req.Header)
	x.estimate = x.scan.promptTokens()
	x.query = router.Query{
		PromptTokens: x.estimate, NoDecode: !x.ep.decodes, Only: x.target.Only, DP: h.dp, Session: h.session,
	}
	if x.s.kv && x.scan.nvext == object && !x.s.cfg.DisableRoutingHints {
		x.expected = agentHints(x.body).Output
	}
	if !x.scan.exactTokens() {
		x.query.PromptTokens = x.model.correct(x.estimate)
	}
	if h.worker != "" {
		id, err := x.s.pinned(h.worker)
		if err != nil {
			return err
		}
		x.query.Worker = &id
	}
	var first, last *failure
	var failedAt time.Time // of last
	for {
		err := x.reserve(now)
		if first == nil && (err == nil || x.queued > 0 || overloadedBy(err)) {
			x.counts.issued[x.ep.index].Add(1) // it has reached admission
		}
		x.mayWait = false // a further attempt finds room or does not
		if err != nil {
			if first != nil { // nowhere left to retry: the first failure is the answer
				err = first
			}
			return err
		}
		if last != nil {
			x.retried(last.reason, failedAt)
		}
		err = x.try(x.attempts - 1)
		x.release()
		if last = failureOf(err); last == nil {
			return err
		}
		if first == nil {
			first = last
		}
		if !last.retry || h.worker != "" || x.attempts > x.retries(last) || x.ctx.Err() != nil {
			return first
		}
		now = time.Now()
		if failedAt = now; x.expired(now) {
			return overdue(last)
		}
		x.migration(migrationFailed, failedAt)
		x.enter(route, failedAt)
		x.query.Exclude = append(x.query.Exclude, x.sel.Worker.ID)
	}
}

// overloadedBy tells whether a request was not placed because of load.
func overloadedBy(err error) bool {
	if err == nil {
		return false
	}
	var full *router.QueueFullError
	var class *router.ClassLimitError
	return errors.Is(err, router.ErrOverloaded) || errors.Is(err, router.ErrPinBusy) || errors.Is(err, router.ErrQueueTimeout) ||
		errors.As(err, &full) || errors.As(err, &class)
}

// retries is how many further attempts a failure allows. Where nothing was processed there is
// always one.
func (x *exchange) retries(f *failure) int {
	if f.unsent {
		return max(x.s.cfg.MigrationLimit, 1)
	}
	return x.s.cfg.MigrationLimit
}

// reserve picks a rank, books the request on it, and gets leave from its worker's circuit.
func (x *exchange) reserve(now time.Time) error {
	if !x.routed {
		x.routed = true
		x.s.metrics.routerStarted.Add(1)
	}
	for {
		placed, err := x.inform(now)
		if err == nil {
			placed, err = x.book(placed)
		}
		decided := x.decided(err, placed)
		if err == nil {
			x.attempts++
			x.sentAt = placed
			x.s.slots.expect(&x.slot, x.releaseAt(placed))
		}
		if !errors.Is(err, errTried) {
			return err
		}
		x.release()
		x.query.Exclude = append(x.query.Exclude, x.sel.Worker.ID)
		now = decided
	}
}

// book does one round of reserve. It returns when the request was placed or refused: now, or when
// its waiting ended. The error is errTried where the next round may do better.
func (x *exchange) book(now time.Time) (time.Time, error) {
	if x.hopeless {
		return now, router.ErrOverloaded
	}
	x.query.Reservation = reservationID()
	sel, now, err := x.place(now)
	if err != nil {
		return now, err
	}
	x.sel = sel
	x.slot = slot{id: x.query.Reservation, part: x.target.Partition, prefill: true}
	// Freed by release on every path from here on.
	x.s.slots.add(&x.slot)
	x.conclude(now)
	if sel.Session != router.NoSession {
		x.counts.sessions[sel.Session].Add(1)
	}
	x.s.shareBooked(x)
	x.verdict = neutral
	if x.peer, err = x.s.peer(sel.Worker, x.target.Partition.Busy); err != nil {
		return now, err
	}
	var ok bool
	if x.permit, ok = x.peer.circuit.allow(now); !ok {
		return now, errTried
	}
	return now, nil
}

// releaseAt is when the prefill is taken to be done although the worker has not shown it: a
// unary answer shows nothing before its end, and some streams show no token for long.
func (x *exchange) releaseAt(now time.Time) time.Time {
	predicted := x.peer.rate.predict(x.promised())
	switch {
	case !x.ep.decodes:
		return time.Time{}
	case x.scan.stream == yes:
		return now.Add(max(10*predicted, time.Minute))
	case x.s.cfg.UnaryPrefill == "hold":
		return time.Time{}
	}
	return now.Add(predicted)
}

// release gives back what the attempt holds, and tells what it says of its worker. It may be
// called more than once.
func (x *exchange) release() {
	x.departed()
	if !x.s.slots.remove(&x.slot) {
		return
	}
	now := time.Now()
	x.permit.settle(x.verdict, now)
	if x.verdict == succeeded {
		x.peer.proved.Store(now.UnixNano())
	}
	x.s.free(x.slot.part, x.slot.id, now)
	if x.s.autoRetry {
		x.peer.freed.free(now)
		x.model.freed.free(now)
	}
}

// prefillDone notes that the worker has computed the prompt.
func (x *exchange) prefillDone(now time.Time) {
	if x.s.slots.prefillDone(&x.slot) {
		x.s.endPrefill(x.slot.part, x.slot.id, now)
	}
}

// inhibit takes the worker out for a while: it failed hard.
func (x *exchange) inhibit() {
	x.verdict = failed
	if x.s.cfg.InhibitedDuration > 0 {
		now := time.Now()
		x.slot.part.Busy.Inhibit(x.sel.Worker.ID, now.Add(x.s.cfg.InhibitedDuration), now)
	}
}

// reservationID is random, never the client's: a client that repeats its request ID must not
// meet its own booking.
func reservationID() string {
	var b [32]byte
	const hex = "0123456789abcdef"
	for i := 0; i < len(b); i += 16 {
		v := rand.Uint64()
		for j := range 16 {
			b[i+j] = hex[v&15]
			v >>= 4
		}
	}
	return string(b[:])
}
