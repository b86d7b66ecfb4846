package service

import (
	"spillway/jsonhttp"
	"spillway/worker"
)

// request is what bodies say, of all routes together.
type request struct {
	instance  uint64
	dp        *uint32 // nil if not given
	endpoint  string
	replay    string
	model     string
	tenant    *string // nil if not given
	group     *string // another name for the tenant
	blockSize uint32
	tokens    []uint32
	hashes    []uint64
	lora      string
	salt      *string // nil if not given
	url       string
}

// tenantOf is the tenant that a request names; false if it names none.
func (r *request) tenantOf() (string, bool) {
	switch {
	case r.tenant != nil:
		return *r.tenant, true
	case r.group != nil:
		return *r.group, true
	}
	return worker.DefaultTenant, false
}

func (r *request) partition() worker.Partition {
	tenant, _ := r.tenantOf()
	return worker.Partition{Model: r.model, Tenant: tenant}
}

func (r *request) rank() worker.Rank {
	rank := worker.Rank{Worker: worker.ID(r.instance)}
	if r.dp != nil {
		rank.DP = *r.dp
	}
	return rank
}

// field is one field of a body that a route knows.
type field = jsonhttp.Field[request]

// optional is a field of text that may be absent or null, as opposed to empty.
func optional(name string, to func(*request) **string) field {
	return jsonhttp.Optional(jsonhttp.String(name, false, func(r *request) *string {
		s := new(string)
		*to(r) = s
		return s
	}))
}

// The bodies, in the order of the documentation.
var (
	instanceField = jsonhttp.Uint64("instance_id", true, func(r *request) *uint64 { return &r.instance })
	modelField    = jsonhttp.String("model_name", true, func(r *request) *string { return &r.model })
	tenantField   = optional("tenant_id", func(r *request) **string { return &r.tenant })
	groupField    = optional("routing_group", func(r *request) **string { return &r.group })
	saltField     = optional("cache_salt", func(r *request) **string { return &r.salt })
	rankField     = jsonhttp.Optional(jsonhttp.Uint32("dp_rank", false, func(r *request) *uint32 {
		r.dp = new(uint32)
		return r.dp
	}))

	registerBody = []field{
		instanceField, modelField, tenantField, groupField, rankField,
		jsonhttp.String("endpoint", true, func(r *request) *string { return &r.endpoint }),
		jsonhttp.Optional(jsonhttp.String("replay_endpoint", false, func(r *request) *string { return &r.replay })),
		jsonhttp.Uint32("block_size", true, func(r *request) *uint32 { return &r.blockSize }),
	}
	unregisterBody = []field{instanceField, modelField, tenantField, groupField, rankField}
	queryBody      = []field{
		modelField, tenantField, groupField, saltField,
		jsonhttp.Optional(jsonhttp.String("lora_name", false, func(r *request) *string { return &r.lora })),
		jsonhttp.Uint32s("token_ids", true, func(r *request) *[]uint32 { return &r.tokens }),
	}
	hashesBody = []field{
		modelField, tenantField, groupField, saltField,
		jsonhttp.Hashes("block_hashes", true, func(r *request) *[]uint64 { return &r.hashes }),
	}
	peerBody = []field{jsonhttp.String("url", true, func(r *request) *string { return &r.url })}
)
