package service

import (
	"spillway/jsonhttp"
	"spillway/worker"
)

// request is what bodies say, of all routes together.
type request struct {
	model, tenant string
	id            string
	workerID      uint64
	dp            uint32
	blockSize     uint32
	dpStart       uint32
	dpSize        uint32
	hashes        []uint64
	tokens        uint64
	decay         *float64
	url           string
}

func (r *request) partition() worker.Partition {
	return worker.Partition{Model: r.model, Tenant: r.tenant}
}

func (r *request) rank() worker.Rank {
	return worker.Rank{Worker: worker.ID(r.workerID), DP: r.dp}
}

// field is one field of a body that a route knows.
type field = jsonhttp.Field[request]

// The bodies, in the order of the documentation.
var (
	modelField  = jsonhttp.String("model_name", true, func(r *request) *string { return &r.model })
	tenantField = jsonhttp.String("tenant_id", false, func(r *request) *string { return &r.tenant })
	workerField = jsonhttp.Uint64("worker_id", true, func(r *request) *uint64 { return &r.workerID })
	idField     = jsonhttp.String("request_id", true, func(r *request) *string { return &r.id })
	hashesField = jsonhttp.Hashes("sequence_hashes", true, func(r *request) *[]uint64 { return &r.hashes })
	tokensField = jsonhttp.Uint64("new_isl_tokens", false, func(r *request) *uint64 { return &r.tokens })

	registerBody = []field{
		workerField, modelField, tenantField,
		jsonhttp.Uint32("block_size", true, func(r *request) *uint32 { return &r.blockSize }),
		jsonhttp.Uint32("dp_start", true, func(r *request) *uint32 { return &r.dpStart }),
		jsonhttp.Uint32("dp_size", true, func(r *request) *uint32 { return &r.dpSize }),
	}
	unregisterBody = []field{workerField, modelField, tenantField}
	addBody        = []field{
		modelField, tenantField, idField, workerField,
		jsonhttp.Uint32("dp_rank", true, func(r *request) *uint32 { return &r.dp }), hashesField, tokensField,
	}
	namedBody     = []field{modelField, tenantField, idField}
	outputBody    = []field{modelField, tenantField, idField, jsonhttp.Share("decay_fraction", false, func(r *request) **float64 { return &r.decay })}
	potentialBody = []field{modelField, tenantField, hashesField, tokensField}
	peerBody      = []field{jsonhttp.String("url", true, func(r *request) *string { return &r.url })}
)
