package service

import (
	"math"
	"strconv"

	"spillway/httperr"
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
type field struct {
	name     string
	required bool
	read     func(d *decoder, name string, r *request) *httperr.Error
}

// The bodies, in the order of the documentation.
var (
	modelField  = field{"model_name", true, stringField(func(r *request) *string { return &r.model })}
	tenantField = field{"tenant_id", false, stringField(func(r *request) *string { return &r.tenant })}
	workerField = field{"worker_id", true, func(d *decoder, name string, r *request) (err *httperr.Error) {
		r.workerID, err = d.unsigned(name, math.MaxUint64)
		return err
	}}
	idField     = field{"request_id", true, stringField(func(r *request) *string { return &r.id })}
	hashesField = field{"sequence_hashes", true, readHashes}
	tokensField = field{"new_isl_tokens", false, func(d *decoder, name string, r *request) (err *httperr.Error) {
		r.tokens, err = d.unsigned(name, math.MaxUint64)
		return err
	}}

	registerBody = []field{
		workerField, modelField, tenantField,
		smallField("block_size", func(r *request) *uint32 { return &r.blockSize }),
		smallField("dp_start", func(r *request) *uint32 { return &r.dpStart }),
		smallField("dp_size", func(r *request) *uint32 { return &r.dpSize }),
	}
	unregisterBody = []field{workerField, modelField, tenantField}
	addBody        = []field{
		modelField, tenantField, idField, workerField,
		smallField("dp_rank", func(r *request) *uint32 { return &r.dp }), hashesField, tokensField,
	}
	namedBody     = []field{modelField, tenantField, idField}
	outputBody    = []field{modelField, tenantField, idField, {"decay_fraction", false, readDecay}}
	potentialBody = []field{modelField, tenantField, hashesField, tokensField}
	peerBody      = []field{{"url", true, stringField(func(r *request) *string { return &r.url })}}
)

func stringField(to func(*request) *string) func(*decoder, string, *request) *httperr.Error {
	return func(d *decoder, name string, r *request) *httperr.Error {
		if d.peek() != '"' {
			return d.mismatch(name, "a string")
		}
		s, err := d.text()
		*to(r) = string(s)
		return err
	}
}

func smallField(name string, to func(*request) *uint32) field {
	return field{name, true, func(d *decoder, name string, r *request) *httperr.Error {
		v, err := d.unsigned(name, math.MaxUint32)
		*to(r) = uint32(v)
		return err
	}}
}

// unsigned reads an integer from 0 to most.
func (d *decoder) unsigned(field string, most uint64) (uint64, *httperr.Error) {
	c := d.peek()
	if c != '-' && (c < '0' || c > '9') {
		return 0, d.mismatch(field, "a number")
	}
	text, err := d.number()
	if err != nil {
		return 0, err
	}
	v, failed := strconv.ParseUint(string(text), 10, 64)
	if failed != nil || v > most {
		return 0, wrong(field, "%.32s is not an integer from 0 to %d", text, most)
	}
	return v, nil
}

// readHashes reads signed integers of 64 bits, whose bits are the hashes.
func readHashes(d *decoder, name string, r *request) *httperr.Error {
	if d.peek() != '[' {
		return d.mismatch(name, "an array")
	}
	d.i++
	for first := true; ; first = false {
		switch c := d.peek(); {
		case c == ']' && first:
			d.i++
			return nil
		case first:
		case c == ']':
			d.i++
			return nil
		case c != ',':
			return d.notJSON("a comma or a closing bracket is missing")
		default:
			if d.i++; d.peek() == ']' {
				return d.notJSON("a comma before the closing bracket")
			}
		}
		h, ok := d.hash()
		if !ok {
			return d.badHash(name + "[" + strconv.Itoa(len(r.hashes)) + "]")
		}
		r.hashes = append(r.hashes, h)
	}
}

// hash reads an integer of 64 bits. If there is something else here it stays where it is.
func (d *decoder) hash() (uint64, bool) {
	i := d.i
	negative := i < len(d.b) && d.b[i] == '-'
	if negative {
		i++
	}
	from, v := i, uint64(0)
	for i < len(d.b) && d.b[i] >= '0' && d.b[i] <= '9' && i-from < 19 {
		v = v*10 + uint64(d.b[i]-'0') // 19 digits fit
		i++
	}
	switch {
	case i == from, d.b[from] == '0' && (i > from+1 || negative):
		return 0, false
	case v > 1<<63 || v == 1<<63 && !negative:
		return 0, false
	case i < len(d.b) && (d.b[i] >= '0' && d.b[i] <= '9' || d.b[i] == '.' || d.b[i] == 'e' || d.b[i] == 'E'):
		return 0, false
	}
	d.i = i
	if negative {
		v = -v
	}
	return v, true
}

func (d *decoder) badHash(field string) *httperr.Error {
	return d.mismatch(field, "an integer of 64 bits with sign")
}

// readDecay reads a number from 0 to 1.
func readDecay(d *decoder, name string, r *request) *httperr.Error {
	c := d.peek()
	if c != '-' && (c < '0' || c > '9') {
		return d.mismatch(name, "a number")
	}
	text, err := d.number()
	if err != nil {
		return err
	}
	v, failed := strconv.ParseFloat(string(text), 64)
	if failed != nil || v < 0 || v > 1 {
		return wrong(name, "%.32s is not from 0 to 1", text)
	}
	r.decay = &v
	return nil
}
