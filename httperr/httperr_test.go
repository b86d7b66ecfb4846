package httperr_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/labstack/echo/v4"

	"spillway/httperr"
	"spillway/router"
	"spillway/tracker"
)

// TestNew is the status table: what Spillway says of a request, or a worker said of it.
func TestNew(t *testing.T) {
	for _, tt := range []struct {
		status int
		slug   string
		cause  httperr.Cause
	}{
		{400, "bad_request", httperr.Validation},
		{401, "unauthorized", httperr.Validation},
		{403, "forbidden", httperr.Validation},
		{404, "not_found", httperr.NotFound},
		{405, "method_not_allowed", httperr.Validation},
		{413, "payload_too_large", httperr.Validation},
		{415, "unsupported_media_type", httperr.Validation},
		{422, "unprocessable_entity", httperr.Validation},
		{429, "too_many_requests", httperr.Overload},
		{431, "request_header_fields_too_large", httperr.Validation},
		{499, "client_closed_request", httperr.Cancelled},
		{500, "internal_server_error", httperr.Internal},
		{501, "not_implemented", httperr.NotImplemented},
		{502, "bad_gateway", httperr.Internal},
		{503, "service_unavailable", httperr.Unavailable},
		{504, "gateway_timeout", httperr.ResponseTimeout},
		{505, "http_version_not_supported", httperr.Internal},
		{529, "service_unavailable", httperr.Overload},
		{599, "error", httperr.Internal},
	} {
		e := httperr.New(tt.status, "text")
		if e.Status != tt.status || e.Type() != tt.slug || e.Cause != tt.cause || e.Message != "text" || e.Reason != "" {
			t.Errorf("New(%d) = %+v of type %s, want type %s, cause %s", tt.status, e, e.Type(), tt.slug, tt.cause)
		}
		if got := httperr.Slug(tt.status); got != tt.slug {
			t.Errorf("Slug(%d) = %s, want %s", tt.status, got, tt.slug)
		}
	}
}

// TestFrom is what becomes of each error of the core, at every overload status that an operator
// might choose.
func TestFrom(t *testing.T) {
	const unavailable = "Service temporarily unavailable: No workers available for model m"
	hidden := errors.New("dial tcp 10.0.0.1:8000: refused")
	for _, overload := range []int{503, 529, 429, 500} {
		for _, tt := range []struct {
			name    string
			err     error
			status  int
			slug    string
			cause   httperr.Cause
			reason  httperr.Reason
			message string
		}{
			{"all busy", router.ErrOverloaded, overload, "service_unavailable", httperr.Overload, httperr.Overloaded,
				"Service temporarily unavailable: All workers are busy, please retry later"},
			{"pinned busy", router.ErrPinBusy, overload, "service_unavailable", httperr.Overload, httperr.OverloadedPinned,
				"Service temporarily unavailable: Selected worker is busy, please retry later"},
			{"wrapped", fmt.Errorf("proxy: %w", router.ErrOverloaded), overload, "service_unavailable", httperr.Overload, httperr.Overloaded, httperr.BusyMessage},
			{"unknown model", router.ErrUnknownModel, 404, "not_found", httperr.NotFound, "", "Model not found: m"},
			{"no workers", router.ErrNoWorkers, 503, "service_unavailable", httperr.Unavailable, httperr.NoWorkers, unavailable},
			{"none routable", router.ErrUnroutable, 503, "service_unavailable", httperr.Unavailable, httperr.NoHealthyWorkers, unavailable},
			{"pin unknown", router.ErrPinUnknown, 400, "bad_request", httperr.Validation, "", "Validation: the pinned worker or rank does not serve the model"},
			{"pin missing", router.ErrPinMissing, 400, "bad_request", httperr.Validation, "", "Validation: direct mode serves pinned requests only"},
			{"client gone", fmt.Errorf("read: %w", context.Canceled), 499, "client_closed_request", httperr.Cancelled, "", "Client closed request"},
			{"our bug", fmt.Errorf("router: reserve: %w", tracker.ErrDuplicate), 500, "internal_server_error", httperr.Internal, "", "Internal server error"},
			{"anything", hidden, 500, "internal_server_error", httperr.Internal, "", "Internal server error"},
			{"as it is", httperr.New(413, "large"), 413, "payload_too_large", httperr.Validation, "", "large"},
			{"as it is, wrapped", fmt.Errorf("x: %w", httperr.Invalid("n is %d", 0)), 400, "bad_request", httperr.Validation, "", "Validation: n is 0"},
			{"echo's 404", echo.ErrNotFound, 404, "not_found", httperr.NotFound, "", "Not Found"},
			{"echo's 405", echo.ErrMethodNotAllowed, 405, "method_not_allowed", httperr.Validation, "", "Method Not Allowed"},
			{"echo's 500", echo.NewHTTPError(500, "stack of /srv/x.go"), 500, "internal_server_error", httperr.Internal, "", "Internal server error"},
		} {
			e := httperr.From(tt.err, "m", overload)
			if e.Status != tt.status || e.Type() != tt.slug || e.Cause != tt.cause || e.Reason != tt.reason || e.Message != tt.message {
				t.Errorf("%s at %d: From(%v) = %+v of type %s, want %d %s, cause %s, reason %q, %q",
					tt.name, overload, tt.err, e, e.Type(), tt.status, tt.slug, tt.cause, tt.reason, tt.message)
			}
		}
	}
	if e := httperr.From(hidden, "m", 503); !errors.Is(e, hidden) || strings.Contains(e.Message, "10.0.0.1") || !strings.Contains(e.Error(), "10.0.0.1") {
		t.Errorf("From(%v) = %v with message %q, want the detail kept private", hidden, e, e.Message)
	}
}

// TestReasons is the table that tells refusals of one status apart.
func TestReasons(t *testing.T) {
	for i, tt := range []struct {
		reason   httperr.Reason
		label    string
		dropped  string
		rejected bool // counts as load shed
	}{
		{httperr.Overloaded, "overloaded", "rejected-saturated", true},
		{httperr.OverloadedPinned, "overloaded-pinned", "rejected-saturated", true},
		{httperr.QueueFull, "queue-full", "rejected-saturated", true},
		{httperr.QueueTimeout, "queue-timeout", "rejected-ttl-expired", true},
		{httperr.NoWorkers, "no-workers", "rejected-no-endpoints", false},
		{httperr.NoHealthyWorkers, "no-healthy-workers", "rejected-no-endpoints", false},
		{httperr.Draining, "draining", "rejected-shutting-down", false},
		{httperr.WorkerOverloaded, "worker-overloaded", "rejected-saturated", true},
		{httperr.BodyMemory, "body-memory", "rejected-saturated", false},
	} {
		if string(tt.reason) != tt.label || tt.reason.Dropped() != tt.dropped || tt.reason.Rejected() != tt.rejected {
			t.Errorf("%s: dropped %q, rejected %v, want %q, %v", tt.label, tt.reason.Dropped(), tt.reason.Rejected(), tt.dropped, tt.rejected)
		}
		if len(httperr.Reasons) != 9 || httperr.Reasons[i] != tt.reason {
			t.Errorf("Reasons = %v, want %s at %d", httperr.Reasons, tt.reason, i)
		}
	}
	if none := httperr.Reason(""); none.Dropped() != "" || none.Rejected() {
		t.Errorf("no reason: dropped %q, rejected %v, want none", none.Dropped(), none.Rejected())
	}
}

// TestRefusalTypes: the frozen body keeps its type at any status; a wait that is answered with
// 408 does not use it.
func TestRefusalTypes(t *testing.T) {
	for _, tt := range []struct {
		status int
		reason httperr.Reason
		want   string
	}{
		{503, httperr.WorkerOverloaded, "service_unavailable"},
		{429, httperr.Overloaded, "service_unavailable"},
		{429, "", "service_unavailable"}, // rendered in advance
		{500, httperr.QueueFull, "service_unavailable"},
		{529, httperr.QueueTimeout, "service_unavailable"},
		{408, httperr.QueueTimeout, "request_timeout"},
	} {
		e := &httperr.Error{Status: tt.status, Cause: httperr.Overload, Reason: tt.reason}
		if got := e.Type(); got != tt.want {
			t.Errorf("Type of %d %s = %s, want %s", tt.status, tt.reason, got, tt.want)
		}
	}
}

// TestModelNameIsBounded: a client's own words come back in part at most, and whole characters.
func TestModelNameIsBounded(t *testing.T) {
	name := strings.Repeat("\u00e4", 5000)
	e := httperr.From(router.ErrUnknownModel, name, 503)
	if len(e.Message) > 300 || !strings.HasSuffix(e.Message, "\u00e4...") || slices.Contains([]rune(e.Message), '\uFFFD') {
		t.Errorf("message for a name of %d bytes = %q", len(name), e.Message)
	}
}

func TestErrorText(t *testing.T) {
	for _, tt := range []struct {
		e    *httperr.Error
		want string
	}{
		{&httperr.Error{Status: 503, Message: "busy", RetryAfter: time.Second}, "503 busy"},
		{&httperr.Error{Status: 502, Message: "bad", Detail: errors.New("reset")}, "502 bad: reset"},
	} {
		if got := tt.e.Error(); got != tt.want {
			t.Errorf("Error() = %q, want %q", got, tt.want)
		}
	}
}

// TestLimitDetails: who is refused because of a limit is told of it, in the order that Dynamo has.
func TestLimitDetails(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want string
	}{
		{&router.QueueFullError{Current: 3, Limit: 3}, `{"limit_kind":"requests","current":3,"limit":3}`},
		{&router.ClassLimitError{Class: "latency", Kind: router.LimitISLTokens, Current: 7, Limit: 5},
			`{"policy_class":"latency","limit_kind":"raw_isl_tokens","current":7,"limit":5}`},
	} {
		e := httperr.From(fmt.Errorf("wrapped: %w", tt.err), "m", 503)
		got, err := json.Marshal(e.Details)
		if err != nil || string(got) != tt.want || e.Reason != httperr.QueueFull || e.Cause != httperr.Overload || e.Message != httperr.BusyMessage {
			t.Errorf("From(%v) = %+v with details %s, want %s", tt.err, e, got, tt.want)
		}
	}
	const want = `router policy class "latency" queue raw_isl_tokens limit reached (current=7, limit=5)`
	if got := (&router.ClassLimitError{Class: "latency", Kind: router.LimitISLTokens, Current: 7, Limit: 5}).Error(); got != want {
		t.Errorf("Error = %s, want %s", got, want)
	}
}
