package selectservice

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"

	"spillway/httperr"
	"spillway/jsonhttp"
	"spillway/kvhash"
)

// prompt is what a body says of a prompt.
type prompt struct {
	tokens    []uint32
	hasTokens bool // perhaps of none
	objects   [][]uint64
	expanded  expanded // of mm_routing_info
	locals    []uint64
	hasLocals bool
	seqs      []uint64
	hasSeqs   bool
	isl       *uint64
	lora      string
	salt      string
	eagle     *bool
}

// expanded is the view of a multimodal prompt that has a token for each part of an object.
type expanded struct {
	tokens  []uint32
	objects [][]uint64 // hashes of those that each block touches
}

// reset forgets a prompt, but for its memory.
func (p *prompt) reset() {
	*p = prompt{tokens: p.tokens[:0], locals: p.locals[:0], seqs: p.seqs[:0]}
}

// blockObjects is a field with what each block has of multimodal objects.
func blockObjects[R any](name string, to func(*R) *[][]uint64) jsonhttp.Field[R] {
	return jsonhttp.Optional(jsonhttp.Custom(name, false, func(d *jsonhttp.Decoder, name string, r *R) *httperr.Error {
		all := [][]uint64{}
		failed := d.Array(name, func(i int) *httperr.Error {
			all = append(all, nil)
			if null, failed := d.Null(); null || failed != nil {
				return failed
			}
			return jsonhttp.Object(d, mmInfo, &all[i])
		})
		*to(r) = all
		return failed
	}))
}

// mmInfo are the fields of what one block has. Only the hashes matter; they are put in order when
// they are hashed.
var mmInfo = []jsonhttp.Field[[]uint64]{
	jsonhttp.Custom("mm_objects", true, func(d *jsonhttp.Decoder, name string, hashes *[]uint64) *httperr.Error {
		return d.Array(name, func(int) *httperr.Error { return jsonhttp.Object(d, mmObject, hashes) })
	}),
}

var mmObject = []jsonhttp.Field[[]uint64]{
	jsonhttp.Custom("mm_hash", true, func(d *jsonhttp.Decoder, name string, hashes *[]uint64) *httperr.Error {
		h, failed := d.Uint(name, 1<<64-1)
		*hashes = append(*hashes, h)
		return failed
	}),
	jsonhttp.Custom("offsets", true, func(d *jsonhttp.Decoder, name string, _ *[]uint64) *httperr.Error {
		return d.Array(name, func(i int) *httperr.Error {
			ends := 0
			failed := d.Array(name, func(int) *httperr.Error {
				ends++
				_, failed := d.Uint(name, 1<<64-1)
				return failed
			})
			if failed == nil && ends != 2 {
				failed = jsonhttp.Malformed(name+"["+strconv.Itoa(i)+"]", "a start and an end are wanted, not %d numbers", ends)
			}
			return failed
		})
	}),
}

var expandedFields = []jsonhttp.Field[expanded]{
	jsonhttp.Uint32s("routing_token_ids", true, func(e *expanded) *[]uint32 { return &e.tokens }),
	blockObjects("block_mm_infos", func(e *expanded) *[][]uint64 { return &e.objects }),
}

// present is a field that tells whether it was there, be it empty.
func present[R any](f func(string, bool, func(*R) *[]uint64) jsonhttp.Field[R], name string, to func(*R) (*[]uint64, *bool)) jsonhttp.Field[R] {
	return jsonhttp.Optional(f(name, false, func(r *R) *[]uint64 {
		list, there := to(r)
		*there = true
		return list
	}))
}

// promptFields are the fields of a prompt in the body of any route.
var promptFields = []field{
	jsonhttp.Optional(jsonhttp.Uint32s("token_ids", false, func(r *request) *[]uint32 {
		r.prompt.hasTokens = true
		return &r.prompt.tokens
	})),
	jsonhttp.Optional(jsonhttp.Nested("mm_routing_info", false, func(r *request) *expanded { return &r.prompt.expanded }, expandedFields)),
	blockObjects("block_mm_infos", func(r *request) *[][]uint64 { return &r.prompt.objects }),
	present(jsonhttp.Hashes, "block_hashes", func(r *request) (*[]uint64, *bool) { return &r.prompt.locals, &r.prompt.hasLocals }),
	present(jsonhttp.Hashes, "sequence_hashes", func(r *request) (*[]uint64, *bool) { return &r.prompt.seqs, &r.prompt.hasSeqs }),
	jsonhttp.Optional(jsonhttp.Uint64("isl_tokens", false, func(r *request) *uint64 { return set(&r.prompt.isl) })),
	jsonhttp.Optional(jsonhttp.String("lora_name", false, func(r *request) *string { return &r.prompt.lora })),
	jsonhttp.Optional(jsonhttp.String("cache_salt", false, func(r *request) *string { return &r.prompt.salt })),
	jsonhttp.Optional(jsonhttp.Bool("is_eagle", false, func(r *request) *bool { return set(&r.prompt.eagle) })),
}

// set makes *to something that can be read into.
func set[T any](to **T) *T {
	*to = new(T)
	return *to
}

// hashed says of a prompt what the index and the books ask for. Its slices are those of the
// prompt, or of what it was given.
type hashed struct {
	locals []uint64 // hash of each block
	seqs   []uint64 // hash of each block and all before it
	isl    uint64   // tokens
}

// use is what a route needs of a prompt.
type use int

const (
	toSelect use = iota // block hashes too, and not of nothing
	toRead              // block hashes too
	toBook              // sequence hashes
)

// hash reads the first form that the body has of its prompt: expanded tokens, tokens, or hashes,
// which are taken as they are. Without reuse tokens get sequence hashes that no other prompt has.
// room is written over.
func (p *prompt) hash(part *partition, use use, reuse bool, room *hashed) *httperr.Error {
	if p.hasTokens || len(p.expanded.tokens) > 0 {
		tokens, objects := p.tokens, p.objects
		if len(p.expanded.tokens) > 0 {
			tokens, objects = p.expanded.tokens, p.expanded.objects
		}
		options := kvhash.Options{BlockSize: int(part.blockSize()), LoRA: p.lora, Salt: p.salt, Eagle: or(p.eagle, part.eagle.Load()), Multimodal: objects}
		room.locals = kvhash.AppendBlocks(room.locals[:0], tokens, options)
		room.seqs = kvhash.AppendSequences(room.seqs[:0], room.locals)
		if !reuse {
			for i := range room.seqs {
				room.seqs[i] = rand.Uint64()
			}
		}
		room.isl = uint64(len(tokens))
		if room.isl == 0 && use == toSelect {
			return noPrompt
		}
		return nil
	}
	absent := func(field string) *httperr.Error {
		return httperr.New(http.StatusBadRequest, field+" is required without token_ids")
	}
	switch {
	case use != toBook && !p.hasLocals:
		return absent("block_hashes")
	case !p.hasSeqs:
		return absent("sequence_hashes")
	case p.isl == nil:
		return absent("isl_tokens")
	case use == toBook:
	case *p.isl == 0:
		return noPrompt
	case len(p.locals) != len(p.seqs):
		return httperr.New(http.StatusBadRequest, fmt.Sprintf("block_hashes length %d must match sequence_hashes length %d", len(p.locals), len(p.seqs)))
	}
	room.locals = append(room.locals[:0], p.locals...)
	room.seqs = append(room.seqs[:0], p.seqs...)
	room.isl = *p.isl
	return nil
}

var noPrompt = httperr.New(http.StatusBadRequest, "isl_tokens must be greater than 0")
