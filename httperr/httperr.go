// Package httperr is the one mapping from an error to a status, a code and a body. An Error
// carries the cause, the public message and the private detail; answer, metric label and log
// line all derive from it, so that they cannot disagree.
package httperr

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/labstack/echo/v4"

	"spillway/router"
)

// Cause is why a request failed. It is decided where the failure is seen, never from the number
// of the status, and is the error_type label of metrics.
type Cause string

// The causes.
const (
	Validation      Cause = "validation"
	NotFound        Cause = "not_found"
	Overload        Cause = "overload"
	Unavailable     Cause = "unavailable"
	Cancelled       Cause = "cancelled"
	ResponseTimeout Cause = "response_timeout"
	Internal        Cause = "internal"
	NotImplemented  Cause = "not_implemented"
)

// Reason tells refusals apart that share a status: the value of X-Spillway-Reason and the reason
// label of spillway_rejections_total.
type Reason string

// The reasons.
const (
	Overloaded       Reason = "overloaded"
	OverloadedPinned Reason = "overloaded-pinned"
	QueueFull        Reason = "queue-full"
	QueueTimeout     Reason = "queue-timeout"
	NoWorkers        Reason = "no-workers"
	NoHealthyWorkers Reason = "no-healthy-workers"
	Draining         Reason = "draining"
	WorkerOverloaded Reason = "worker-overloaded"
	BodyMemory       Reason = "body-memory" // of our own, for request bodies
)

// Reasons are all of them, in the order of the documentation.
var Reasons = []Reason{
	Overloaded, OverloadedPinned, QueueFull, QueueTimeout, NoWorkers, NoHealthyWorkers, Draining, WorkerOverloaded, BodyMemory,
}

// Dropped is the same fact in the words of llm-d, for x-llm-d-request-dropped-reason.
func (r Reason) Dropped() string {
	switch r {
	case Overloaded, OverloadedPinned, QueueFull, WorkerOverloaded, BodyMemory:
		return "rejected-saturated"
	case QueueTimeout:
		return "rejected-ttl-expired"
	case NoWorkers, NoHealthyWorkers:
		return "rejected-no-endpoints"
	case Draining:
		return "rejected-shutting-down"
	}
	return ""
}

// Rejected tells whether the refusal counts as load shed, as opposed to nothing being there.
func (r Reason) Rejected() bool {
	switch r {
	case Overloaded, OverloadedPinned, QueueFull, QueueTimeout, WorkerOverloaded:
		return true
	}
	return false
}

// Error is a failure that a client is told about.
type Error struct {
	Status  int    // HTTP status
	Cause   Cause  // what kind of failure it is
	Reason  Reason // "" unless it is a refusal
	Message string // public; never holds addresses, paths or prompts
	Detail  error  // private, for logs; nil if Message says it all
	Details any    // public, the body's details; nil for none

	// RetryAfter is when the client may come back; 0 leaves it to the configured default.
	RetryAfter time.Duration

	byStatus bool // made from a status alone, so that only its own slug fits
}

func (e *Error) Error() string {
	if e.Detail != nil {
		return fmt.Sprintf("%d %s: %v", e.Status, e.Message, e.Detail)
	}
	return fmt.Sprintf("%d %s", e.Status, e.Message)
}

func (e *Error) Unwrap() error { return e.Detail }

// Type is the slug of the body's type field: the registered reason phrase in lower snake case;
// service_unavailable for the refusals that are sent with the overload status, whatever that is.
func (e *Error) Type() string {
	if e.Cause == Overload && !e.byStatus && e.Status != http.StatusRequestTimeout {
		return "service_unavailable"
	}
	return Slug(e.Status)
}

// Slug is the reason phrase of a status in lower snake case.
func Slug(status int) string {
	switch status {
	case 413:
		return "payload_too_large"
	case 499:
		return "client_closed_request"
	case 529:
		return "service_unavailable"
	}
	text := http.StatusText(status)
	if text == "" {
		text = "error"
	}
	return strings.ReplaceAll(strings.ToLower(strings.ReplaceAll(text, "-", " ")), " ", "_")
}

// New makes an error whose cause follows from the status: for answers about a request itself, and
// for what a worker said of it.
func New(status int, message string) *Error {
	return &Error{Status: status, Cause: causeOf(status), Message: message, byStatus: true}
}

// Invalid is a request that failed validation.
func Invalid(format string, args ...any) *Error {
	return &Error{Status: 400, Cause: Validation, Message: "Validation: " + fmt.Sprintf(format, args...)}
}

func causeOf(status int) Cause {
	switch {
	case status == 404:
		return NotFound
	case status == 429, status == 529:
		return Overload
	case status == 503:
		return Unavailable
	case status == 499:
		return Cancelled
	case status == 501:
		return NotImplemented
	case status == 504:
		return ResponseTimeout
	case status >= 500:
		return Internal
	}
	return Validation
}

// The fixed sentences of refusals.
const (
	BusyMessage       = "Service temporarily unavailable: All workers are busy, please retry later"
	PinnedBusyMessage = "Service temporarily unavailable: Selected worker is busy, please retry later"
	NotReadyMessage   = "Service is not ready"
)

// From makes an Error of any error: of one as it is, of the router's sentinels and echo's own
// errors by the tables of the front end, of anything else a 500 that tells the client nothing.
// model is what the client asked for; overload is the configured overload status.
func From(err error, model string, overload int) *Error {
	if err == router.ErrOverloaded { // not by errors.As: refusing must be cheap
		return &Error{Status: overload, Cause: Overload, Reason: Overloaded, Message: BusyMessage}
	}
	var e *Error
	var he *echo.HTTPError
	var full *router.QueueFullError
	var class *router.ClassLimitError
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(err, router.ErrOverloaded):
		return From(router.ErrOverloaded, model, overload)
	case errors.Is(err, router.ErrPinBusy):
		return &Error{Status: overload, Cause: Overload, Reason: OverloadedPinned, Message: PinnedBusyMessage}
	case errors.As(err, &full):
		return &Error{Status: overload, Cause: Overload, Reason: QueueFull, Message: BusyMessage, Details: limitDetails{Kind: string(router.LimitRequests), Current: uint64(full.Current), Limit: uint64(full.Limit)}}
	case errors.As(err, &class):
		return &Error{Status: overload, Cause: Overload, Reason: QueueFull, Message: BusyMessage, Details: limitDetails{class.Class, string(class.Kind), class.Current, class.Limit}}
	case errors.Is(err, router.ErrQueueTimeout):
		return &Error{Status: overload, Cause: Overload, Reason: QueueTimeout, Message: BusyMessage}
	case errors.Is(err, router.ErrUnknownModel):
		return &Error{Status: 404, Cause: NotFound, Message: fmt.Sprintf("Model not found: %s", printable(model))}
	case errors.Is(err, router.ErrNoWorkers):
		return &Error{Status: 503, Cause: Unavailable, Reason: NoWorkers, Message: unavailable(model)}
	case errors.Is(err, router.ErrUnroutable):
		return &Error{Status: 503, Cause: Unavailable, Reason: NoHealthyWorkers, Message: unavailable(model)}
	case errors.Is(err, router.ErrPinUnknown), errors.Is(err, router.ErrPinMissing):
		return Invalid("%v", err)
	case errors.Is(err, context.Canceled):
		return &Error{Status: 499, Cause: Cancelled, Message: "Client closed request", Detail: err}
	case errors.As(err, &he):
		return fromEcho(he)
	}
	return &Error{Status: 500, Cause: Internal, Message: "Internal server error", Detail: err}
}

// limitDetails are the details of a refusal because a limit is reached, in the order that Dynamo
// has them.
type limitDetails struct {
	Class   string `json:"policy_class,omitempty"`
	Kind    string `json:"limit_kind"`
	Current uint64 `json:"current"`
	Limit   uint64 `json:"limit"`
}

func unavailable(model string) string {
	return "Service temporarily unavailable: No workers available for model " + printable(model)
}

// printable bounds what a client's own words may add to an answer.
func printable(s string) string {
	const most = 256
	if len(s) > most {
		s = strings.ToValidUTF8(s[:most], "") + "..."
	}
	return s
}

func fromEcho(he *echo.HTTPError) *Error {
	e := New(he.Code, http.StatusText(he.Code))
	if s, ok := he.Message.(string); ok && s != "" && he.Code < 500 {
		e.Message = s
	}
	if he.Code >= 500 {
		e.Message = "Internal server error"
		e.Detail = he
	}
	return e
}
