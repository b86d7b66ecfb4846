package wire_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"spillway/kvhash"
	"spillway/wire"
	"spillway/worker"
)

type (
	list   = []any
	fields = map[string]any
)

// pack makes MessagePack of a value.
func pack(v any) []byte {
	b, err := msgp.AppendIntf(nil, v)
	if err != nil {
		panic(err)
	}
	return b
}

// batch is the payload of some events.
func batch(events ...any) []byte { return pack(list{1.5, events, nil}) }

// Blocks of two tokens: x is 10, 11 and y is 12, 13.
var (
	tokensX  = list{10, 11}
	tokensXY = list{10, 11, 12, 13}
)

// stored is an event in places: hashes, the parent or nil, tokens, and what follows the size.
func stored(hashes list, parent any, tokens list, rest ...any) any {
	return append(list{"BlockStored", hashes, parent, tokens, 2}, rest...)
}

// salted is a store of x that names a salt, or nil, in a medium.
func salted(hash int, parent any, salt any, medium string) any {
	return fields{"type": "BlockStored", "block_hashes": list{hash}, "parent_block_hash": parent, "token_ids": tokensX,
		"block_size": 2, "medium": medium, "cache_salt": salt}
}

// with is x on the device as hash 11, with further fields.
func with(more fields) any {
	e := fields{"type": "BlockStored", "block_hashes": list{11}, "token_ids": tokensX, "block_size": 2}
	for k, v := range more {
		e[k] = v
	}
	return e
}

func removed(hash int, more ...any) any { return append(list{"BlockRemoved", list{hash}}, more...) }

// ofGroup is a remove of hash 11 of a group.
func ofGroup(group int, more fields) any {
	e := fields{"type": "BlockRemoved", "block_hashes": list{11}, "group_idx": group}
	for k, v := range more {
		e[k] = v
	}
	return e
}

// names says what local hashes are of: x, y and what has been mixed in.
func names() map[uint64]string {
	known := map[uint64]string{}
	for _, o := range []kvhash.Options{
		{}, {LoRA: "ada"}, {Salt: "a"}, {Salt: "b"}, {LoRA: "ada", Salt: "a"},
		{LoRA: "dynamo-cache-salt:a"}, {LoRA: "dynamo-cache-salt:a", Salt: "a"},
		{Multimodal: [][]uint64{{42}}}, {Multimodal: [][]uint64{{0x0123456789abcdef}}}, {Multimodal: [][]uint64{{42, 43}}},
	} {
		o.BlockSize = 2
		for name, tokens := range map[string][]uint32{"x": {10, 11}, "y": {12, 13}} {
			if o.LoRA != "" {
				name += "+" + o.LoRA
			}
			if o.Salt != "" {
				name += "/" + o.Salt
			}
			for _, m := range o.Multimodal {
				name += fmt.Sprintf("%x", m)
			}
			known[kvhash.AppendBlocks(nil, tokens, o)[0]] = name
		}
	}
	for i, h := range kvhash.AppendBlocks(nil, []uint32{10, 11, 12, 13, 14}, kvhash.Options{BlockSize: 2, Eagle: true}) {
		known[h] = fmt.Sprintf("eagle%d", i)
	}
	return known
}

// play plays payloads to a new listener of rank 0 and tells what they do: events as
// tier:parent>hash=name, -hash and clear, and then what was counted.
func play(t *testing.T, payloads ...[]byte) string {
	t.Helper()
	n := wire.NewKVNormalizer(worker.Rank{Worker: 1}, 2)
	known := names()
	var b wire.KVBatch
	var lines []string
	for _, p := range payloads {
		if err := b.Decode(p); err != nil {
			t.Fatalf("Decode(%x): %v", p, err)
		}
		n.Each(&b, func(e *wire.KVEvent) { lines = append(lines, line(e, known)) })
	}
	for why, count := range n.Counts {
		if count > 0 {
			lines = append(lines, fmt.Sprintf("%s=%d", wire.KVReason(why), count))
		}
	}
	return strings.Join(lines, " ")
}

func line(e *wire.KVEvent, known map[uint64]string) string {
	where := ""
	if e.Kind != wire.KVClear && e.Tier != worker.Device {
		where = e.Tier.String() + ":"
	}
	if e.Rank.DP != 0 {
		where = fmt.Sprintf("r%d:", e.Rank.DP) + where
	}
	var parts []string
	for i, h := range e.Engine {
		name := fmt.Sprintf("-%d", int64(h))
		if e.Kind == wire.KVStore {
			name = fmt.Sprintf("%d=%s", int64(h), known[e.Local[i]])
		}
		parts = append(parts, name)
	}
	what := strings.Join(parts, ",")
	switch {
	case e.Kind == wire.KVClear:
		what = "clear"
	case e.HasParent:
		what = fmt.Sprintf("%d>%s", int64(e.Parent), what)
	case what == "":
		what = "nothing"
	}
	return where + what
}

// TestKVShapes is the batch container of 1.3.
func TestKVShapes(t *testing.T) {
	x := stored(list{11}, nil, tokensX, nil)
	events := list{x}
	for _, tt := range []struct {
		name, want string
		batch      any
	}{
		{"two", "11=x", list{1.5, events}},
		{"three", "r3:11=x", list{1.5, events, 3}},
		{"three, nil", "11=x", list{1.5, events, nil}},
		{"four", "r3:11=x", list{1.5, events, 3, fields{"a": list{1}}}},
		{"map", "r3:11=x", fields{"ts": 1.5, "events": events, "data_parallel_rank": 3}},
		{"map, dp_rank", "r3:11=x", fields{"ts": 1.5, "events": events, "dp_rank": 3, "other": fields{"b": 1}}},
		{"map, attn_dp_rank", "r3:11=x", fields{"events": events, "attn_dp_rank": 3}},
		{"map without rank", "11=x", fields{"ts": 1.5, "events": events}},
		{"negative rank", "11=x bad_rank=1", list{1.5, events, -1}},
		{"rank beyond 31 bits", "11=x bad_rank=1", list{1.5, events, uint64(1 << 31)}},
		{"rank of another type", "11=x bad_rank=1", list{1.5, events, list{"three"}}},
		{"time of another type", "11=x", list{"now", events, nil}},
		{"whole seconds", "11=x", list{1, events, nil}},
		{"no events", "", list{1.5, list{}, 0}},
	} {
		if got := play(t, pack(tt.batch)); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestKVNoBatch(t *testing.T) {
	good := batch(stored(list{11}, nil, tokensX, nil))
	deep := slices.Concat([]byte{0x93, 0xc0, 0x90}, nested(40))
	for _, tt := range []struct {
		name    string
		payload []byte
		want    error
	}{
		{"empty", nil, wire.ErrKVBatch},
		{"number", pack(7), wire.ErrKVBatch},
		{"text", pack("events"), wire.ErrKVBatch},
		{"array of one", pack(list{1.5}), wire.ErrKVBatch},
		{"events that are no array", pack(list{1.5, fields{}}), wire.ErrKVBatch},
		{"map without events", pack(fields{"ts": 1.5}), wire.ErrKVBatch},
		{"key that is no text", []byte{0x81, 0x01, 0x90}, wire.ErrKVBatch},
		{"events twice", slices.Concat([]byte{0x82}, pack("events"), pack(list{}), pack("events"), pack(list{})), wire.ErrKVBatch},
		{"more events than bytes", []byte{0x92, 0x01, 0xdd, 0xff, 0xff, 0xff, 0xff}, wire.ErrKVBatch},
		{"bytes after it", append(slices.Clone(good), 0), wire.ErrKVBatch},
		{"nested too deep", deep, wire.ErrKVBatch},
		{"no MessagePack", []byte{0x92, 0xc0, 0x91, 0xc1}, wire.ErrKVBatch},
		{"too large", make([]byte, wire.MaxKVBytes+1), wire.ErrKVSize},
	} {
		var b wire.KVBatch
		if err := b.Decode(tt.payload); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
		wire.NewKVNormalizer(worker.Rank{}, 2).Each(&b, func(e *wire.KVEvent) { t.Errorf("%s: %+v", tt.name, e) })
	}
	for cut := range good {
		var b wire.KVBatch
		if err := b.Decode(good[:cut]); !errors.Is(err, wire.ErrKVBatch) {
			t.Errorf("the first %d of %d bytes: %v, want %v", cut, len(good), err, wire.ErrKVBatch)
		}
	}
}

// nested is a number within so many arrays.
func nested(levels int) []byte {
	b := make([]byte, levels+1)
	for i := range levels {
		b[i] = 0x91
	}
	return b
}

// TestKVMalformed is what one event with a fault does between two good ones.
func TestKVMalformed(t *testing.T) {
	deep := map[string]any{}
	for range 40 {
		deep = fields{"in": deep}
	}
	for _, tt := range []struct {
		name  string
		event any
		why   string
	}{
		{"unknown tag", list{"BlockTeleported", 1, 2}, "unknown_event"},
		{"unknown type", fields{"type": "BlockTeleported", "to": 1}, "unknown_event"},
		{"no type", fields{"block_hashes": list{1}}, "malformed_event"},
		{"type of another type", fields{"type": 1}, "malformed_event"},
		{"nil", nil, "malformed_event"},
		{"number", 7, "malformed_event"},
		{"no tag", list{}, "malformed_event"},
		{"tag that is no text", list{1, list{1}}, "malformed_event"},
		{"store without size", list{"BlockStored", list{1}, nil, list{1}}, "malformed_event"},
		{"remove without hashes", list{"BlockRemoved"}, "malformed_event"},
		{"map without hashes", fields{"type": "BlockRemoved"}, "malformed_event"},
		{"map without tokens", fields{"type": "BlockStored", "block_hashes": list{1}, "block_size": 2}, "malformed_event"},
		{"map without size", fields{"type": "BlockStored", "block_hashes": list{1}, "token_ids": tokensX}, "malformed_event"},
		{"hashes that are none", removedList(nil), "malformed_event"},
		{"empty bytes for a hash", removedList(list{[]byte{}}), "malformed_event"},
		{"text for a hash", removedList(list{"1"}), "malformed_event"},
		{"float for a hash", removedList(list{1.0}), "malformed_event"},
		{"parent of another type", stored(list{1}, "1", tokensX), "malformed_event"},
		{"negative token", stored(list{1}, nil, list{-1, 2}), "malformed_event"},
		{"token of 33 bits", stored(list{1}, nil, list{uint64(1 << 32), 2}), "malformed_event"},
		{"token that is no number", stored(list{1}, nil, list{"a", 2}), "malformed_event"},
		{"number after pairs", stored(list{1}, nil, list{list{1, 2}, 3}), "malformed_event"},
		{"pair after numbers", stored(list{1}, nil, list{1, list{1, 2}}), "malformed_event"},
		{"three for a pair", stored(list{1}, nil, list{list{1, 2, 3}}), "malformed_event"},
		{"negative size", with(fields{"block_size": -2}), "malformed_event"},
		{"medium of another type", with(fields{"medium": 1}), "malformed_event"},
		{"adapter of another type", with(fields{"lora_name": 1}), "malformed_event"},
		{"salt of another type", with(fields{"cache_salt": 1}), "malformed_event"},
		{"metadata of another type", with(fields{"metadata": 1}), "malformed_event"},
		{"negative group", with(fields{"group_idx": -1}), "malformed_event"},
		{"kind of another type", with(fields{"kv_cache_spec_kind": 1}), "malformed_event"},
		{"locality of another type", with(fields{"locality": 1}), "malformed_event"},
		{"ownership of another type", with(fields{"ownership": 1}), "malformed_event"},
		{"extra keys of another type", with(fields{"extra_keys": "a"}), "malformed_event"},
		{"extra keys of a block of another type", with(fields{"extra_keys": list{"a"}}), "malformed_event"},
		{"media of another type", with(fields{"block_mm_infos": list{1}}), "malformed_event"},
		{"object without hash", with(fields{"block_mm_infos": list{fields{"mm_objects": list{fields{}}}}}), "malformed_event"},
		{"nested too deep", with(fields{"session": deep}), "malformed_event"},
	} {
		got := play(t, batch(stored(list{11}, nil, tokensX), tt.event, removed(11)))
		if want := "11=x -11 " + tt.why + "=1"; got != want {
			t.Errorf("%s: %q, want %q", tt.name, got, want)
		}
	}
}

func removedList(hashes any) any { return list{"BlockRemoved", hashes} }

// TestKVNameTwice is a map that says two things.
func TestKVNameTwice(t *testing.T) {
	e := slices.Concat([]byte{0x83}, pack("type"), pack("BlockRemoved"),
		pack("block_hashes"), pack(list{1}), pack("block_hashes"), pack(list{2}))
	got := play(t, slices.Concat([]byte{0x92, 0xc0, 0x92}, e, pack(removed(11))))
	if want := "-11 malformed_event=1"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
