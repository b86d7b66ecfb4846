package proxy

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"spillway/httperr"
	"spillway/upstream"
)

// wait bounds how long a request waits for its worker. The deadline of the worker's connection is
// the only timer: it is not moved when something comes, but when it fires too early.
type wait struct {
	deadline time.Time // of the whole request; zero is none
	heard    time.Time // since when the worker has been silent; kept only if its silence is bounded
	armed    time.Time // deadline that is set on the connection; zero is none
	fired    bool      // it has passed
}

// maxTimeout is the longest limit that a client can set: more cannot be meant.
const maxTimeout = 24 * time.Hour

// deadlineOf is when a request that was admitted now has to be over, by what is configured and by
// what its client asks for.
func (x *exchange) deadlineOf(now time.Time) time.Time {
	limit := x.s.cfg.RequestTimeout
	if v := first(x.req.Header, "X-Request-Timeout-Ms"); v != "" {
		if asked := milliseconds(v); asked > 0 && (limit == 0 || asked < limit) {
			limit = asked
		}
	}
	if limit == 0 {
		return time.Time{}
	}
	return now.Add(limit)
}

// milliseconds reads a limit that a client sets, 0 where it asks for nothing sensible.
func milliseconds(v string) time.Duration {
	n, err := strconv.ParseUint(strings.TrimSpace(v), 10, 64) // n is the largest there is if it is too large
	if err != nil && !errors.Is(err, strconv.ErrRange) {
		return 0
	}
	return time.Duration(min(n, uint64(maxTimeout/time.Millisecond))) * time.Millisecond
}

// expired tells whether the time of the request as a whole is over.
func (x *exchange) expired(now time.Time) bool {
	return !x.wait.deadline.IsZero() && !now.Before(x.wait.deadline)
}

// silence is how long the worker may send nothing, 0 for any time. The head of an answer that is
// no stream comes when all is generated, so until then it has to send nothing.
func (x *exchange) silence() time.Duration { return x.s.cfg.StreamInactivityTimeout }

// earlier returns the earlier of two times of which a zero one is never.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// headDeadline is until when the worker must have begun to answer the present attempt.
func (x *exchange) headDeadline() time.Time {
	at := x.wait.deadline
	if d := x.s.cfg.ResponseHeaderTimeout; d > 0 {
		at = earlier(at, x.sentAt.Add(d))
	}
	if d := x.silence(); d > 0 && x.scan.stream == yes {
		at = earlier(at, x.sentAt.Add(d))
	}
	return at
}

// begun notes that the head of an answer has come.
func (x *exchange) begun() {
	x.wait.armed, x.wait.fired = time.Time{}, false
	x.listened()
}

// listened begins a new silence of the worker's. It does so when something has come and been dealt
// with: while a slow client is written to, nobody listens to the worker.
func (x *exchange) listened() {
	if x.silence() > 0 {
		x.wait.heard = time.Now()
	}
}

// due is when waiting for further bytes must end; zero is never.
func (x *exchange) due() time.Time {
	at := x.wait.deadline
	if d := x.silence(); d > 0 {
		at = earlier(at, x.wait.heard.Add(d))
	}
	return at
}

// next is resp.Next within the limits of the request. It fails with os.ErrDeadlineExceeded when
// one of them is passed, or at the given time, if it is not zero.
func (x *exchange) next(resp *upstream.Response, until time.Time) (part []byte, err error) {
	err = x.within(resp, until, func() (err error) {
		part, err = resp.Next()
		return err
	})
	return part, err
}

// each is resp.Each within the limits of the request, with the errors of next.
func (x *exchange) each(resp *upstream.Response, until time.Time, f func(part []byte) bool) error {
	return x.within(resp, until, func() error {
		return resp.Each(func(part []byte) bool {
			more := f(part)
			x.listened()
			return more
		})
	})
}

// within has read wait for the worker until one of the limits of the request is passed, or until
// the given time, if it is not zero.
func (x *exchange) within(resp *upstream.Response, until time.Time, read func() error) error {
	for {
		at := earlier(x.due(), until)
		if x.wait.fired || !at.IsZero() && (x.wait.armed.IsZero() || at.Before(x.wait.armed)) {
			x.wait.armed, x.wait.fired = at, false
			if err := resp.SetReadDeadline(at); err != nil {
				return err
			}
		}
		err := read()
		if err == nil {
			x.listened()
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		x.wait.fired = true
		if at = earlier(x.due(), until); !at.IsZero() && !time.Now().Before(at) {
			return err
		}
	}
}

// passed tells whether one of the limits of the request is passed.
func (x *exchange) passed(now time.Time) bool {
	at := x.due()
	return !at.IsZero() && !now.Before(at)
}

// late makes of a limit that was passed what the client gets. If the request's own time is over,
// that is no fault of the worker; retry is whether another one may have a go if it is.
func (x *exchange) late(now time.Time, retry bool, err error) error {
	err = fmt.Errorf("worker %s: %w", x.sel.Worker.Name, err)
	if x.expired(now) {
		return overdue(err)
	}
	x.inhibit()
	return &failure{retry: retry, reason: byTimeout, answer: &httperr.Error{
		Status: http.StatusGatewayTimeout, Cause: httperr.ResponseTimeout,
		Message: "The worker did not answer in time", Detail: err,
	}}
}

// overdue is what a client gets whose request took longer than it may.
func overdue(detail error) *httperr.Error {
	return &httperr.Error{
		Status: http.StatusGatewayTimeout, Cause: httperr.ResponseTimeout,
		Message: "The request took longer than its limit", Detail: detail,
	}
}
