package selectservice

import (
	"fmt"
	"net/http"
	"slices"

	"spillway/httperr"
	"spillway/jsonhttp"
	"spillway/router"
	"spillway/worker"
)

// request is what bodies say, of all routes together; nil is what was not said.
type request struct {
	model, tenant string
	names         tenancy
	prompt        prompt

	selectionID   *string
	reservationID *string
	override      *router.Override
	expected      *uint32 // output tokens
	jump          *float64
	strict        *uint32
	session       *string
	pin           *pin
	allowed       []uint64 // nil for all
	constraints   constraints
	explain       bool

	workerID  *uint64
	dp        *uint32
	effective *uint64
	track     *bool
	decay     *float64
	peer      string
}

// pin is the one rank that a request may go to.
type pin struct {
	worker uint64
	dp     uint32
}

// constraints are what a request asks of the labels of workers.
type constraints struct {
	required  []string
	preferred []router.Preference
}

// tenancy is what was said of the tenant under its two names: that of the contract that is served, and
// that of the other one.
type tenancy struct {
	own, other       string
	hasOwn, hasOther bool
}

// tenancyFields are the fields of a body that name the tenant.
func tenancyFields[R any](own, other string, to func(*R) *tenancy) []jsonhttp.Field[R] {
	return []jsonhttp.Field[R]{
		jsonhttp.String(own, false, func(r *R) *string { to(r).hasOwn = true; return &to(r).own }),
		jsonhttp.String(other, false, func(r *R) *string { to(r).hasOther = true; return &to(r).other }),
	}
}

// tenantOf is the tenant that was named, the default one if none was.
func (s *Server) tenantOf(t *tenancy) (string, *httperr.Error) {
	switch {
	case t.hasOwn && t.hasOther && t.own != t.other:
		return "", httperr.New(http.StatusBadRequest, fmt.Sprintf("%s and %s are two names of one thing, and are not given the same value", s.tenant, s.otherTenant))
	case t.hasOwn:
		return t.own, nil
	case t.hasOther:
		return t.other, nil
	}
	return worker.DefaultTenant, nil
}

func (r *request) partition() worker.Partition {
	return worker.Partition{Model: r.model, Tenant: r.tenant}
}

// bookingID is the ID that a request is to be booked under, nil if it leaves that to us.
func (s *Server) bookingID(r *request) *string {
	if s.grouped {
		return r.selectionID
	}
	return r.reservationID
}

// field is one field of a body that a route knows.
type field = jsonhttp.Field[request]

// bodies are the fields of each route's body.
type bodies struct {
	choose, reserve, book, read, output, peer []field
}

// newBodies returns the bodies of a contract: the names of the tenant, its own first, and whether a
// selection's ID is that of its booking.
func newBodies(tenant, otherTenant string, grouped bool) bodies {
	partition := append(tenancyFields(tenant, otherTenant, func(r *request) *tenancy { return &r.names }),
		jsonhttp.String("model_name", false, func(r *request) *string { return &r.model }))
	override := jsonhttp.Optional(jsonhttp.Custom("router_config_override", false, readOverride))
	expected := jsonhttp.Optional(jsonhttp.Uint32("expected_output_tokens", false, func(r *request) *uint32 { return set(&r.expected) }))
	selectionID := jsonhttp.Optional(jsonhttp.String("selection_id", false, func(r *request) *string { return set(&r.selectionID) }))
	reservationID := func(required bool) field {
		return jsonhttp.String("reservation_id", required, func(r *request) *string { return set(&r.reservationID) })
	}
	b := bodies{
		read: slices.Concat(partition, promptFields, []field{override}),
		output: []field{
			jsonhttp.Optional(jsonhttp.Float("decay_fraction", false, func(r *request) *float64 { return set(&r.decay) })),
		},
		peer: []field{jsonhttp.String("endpoint", true, func(r *request) *string { return &r.peer })},
	}
	b.choose = slices.Concat(b.read, []field{
		selectionID, expected,
		jsonhttp.Optional(jsonhttp.Float("priority_jump", false, func(r *request) *float64 { return set(&r.jump) })),
		jsonhttp.Optional(jsonhttp.Uint32("strict_priority", false, func(r *request) *uint32 { return set(&r.strict) })),
		jsonhttp.Optional(jsonhttp.String("session_id", false, func(r *request) *string { return set(&r.session) })),
		jsonhttp.Optional(jsonhttp.Nested("pinned_worker", false, func(r *request) *pin { return set(&r.pin) }, []jsonhttp.Field[pin]{
			jsonhttp.Uint64("worker_id", true, func(p *pin) *uint64 { return &p.worker }),
			jsonhttp.Uint32("dp_rank", true, func(p *pin) *uint32 { return &p.dp }),
		})),
		jsonhttp.Optional(jsonhttp.Uint64s("allowed_worker_ids", false, func(r *request) *[]uint64 { return &r.allowed })),
		jsonhttp.Nested("routing_constraints", false, func(r *request) *constraints { return &r.constraints }, []jsonhttp.Field[constraints]{
			jsonhttp.Strings("required_taints", false, func(c *constraints) *[]string { return &c.required }),
			jsonhttp.Custom("preferred_taints", false, func(d *jsonhttp.Decoder, name string, c *constraints) *httperr.Error {
				return d.Entries(name, func(taint string) *httperr.Error {
					v, failed := d.Float(name)
					c.preferred = slices.DeleteFunc(c.preferred, func(p router.Preference) bool { return p.Taint == taint })
					c.preferred = append(c.preferred, router.Preference{Taint: taint, Weight: float32(v)})
					return failed
				})
			}),
		}),
		jsonhttp.Bool("explain", false, func(r *request) *bool { return &r.explain }),
	})
	b.reserve = b.choose
	booked := []field{
		override, expected,
		jsonhttp.Optional(jsonhttp.Uint32("dp_rank", false, func(r *request) *uint32 { return set(&r.dp) })),
		jsonhttp.Optional(jsonhttp.Uint64("effective_prefill_tokens", false, func(r *request) *uint64 { return set(&r.effective) })),
	}
	id := jsonhttp.Uint64("worker_id", true, func(r *request) *uint64 { return set(&r.workerID) })
	if grouped {
		b.book = slices.Concat(partition, promptFields, booked, []field{
			jsonhttp.String("selection_id", true, func(r *request) *string { return set(&r.selectionID) }), jsonhttp.Optional(id),
			jsonhttp.Optional(jsonhttp.Bool("track_prefill_tokens", false, func(r *request) *bool { return set(&r.track) })),
		})
	} else {
		b.reserve = append(slices.Clip(b.choose), jsonhttp.Optional(reservationID(false)))
		b.book = slices.Concat(partition, promptFields, booked, []field{reservationID(true), id})
	}
	return b
}

var overrideFields = []jsonhttp.Field[router.Override]{
	number("overlap_score_credit", func(o *router.Override) **float64 { return &o.OverlapScoreCredit }),
	number("prefill_load_scale", func(o *router.Override) **float64 { return &o.PrefillLoadScale }),
	number("overlap_score_weight", func(o *router.Override) **float64 { return &o.OverlapScoreWeight }),
	number("router_temperature", func(o *router.Override) **float64 { return &o.Temperature }),
	number("shared_cache_multiplier", func(o *router.Override) **float64 { return &o.SharedCacheMultiplier }),
	jsonhttp.Optional(jsonhttp.Bool("track_prefill_tokens", false, func(o *router.Override) *bool { return set(&o.TrackPrefillTokens) })),
	jsonhttp.Optional(jsonhttp.Bool("assume_kv_reuse", false, func(o *router.Override) *bool { return set(&o.AssumeKVReuse) })),
}

func number(name string, to func(*router.Override) **float64) jsonhttp.Field[router.Override] {
	return jsonhttp.Optional(jsonhttp.Float(name, false, func(o *router.Override) *float64 { return set(to(o)) }))
}

// readOverride reads what a request sets for itself. A value that no setting could have makes the
// body one of the wrong shape.
func readOverride(d *jsonhttp.Decoder, name string, r *request) *httperr.Error {
	if failed := d.Nested(name); failed != nil {
		return failed
	}
	o := new(router.Override)
	if failed := jsonhttp.Object(d, overrideFields, o); failed != nil {
		return failed
	}
	if err := o.Validate(); err != nil {
		return jsonhttp.Malformed(name, "%v", err)
	}
	r.override = o
	return nil
}
