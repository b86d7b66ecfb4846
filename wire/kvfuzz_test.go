package wire_test

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"
	"github.com/zeebo/xxh3"

	"spillway/wire"
	"spillway/worker"
)

// slowBlocks hashes blocks as the specification says it, one after the other.
func slowBlocks(tokens []uint32, size int, lora, salt string, pairs bool, media [][]uint64) []uint64 {
	seed := uint64(1337)
	if lora != "" {
		seed += xxh3.HashStringSeed(lora, 0)
	}
	if salt != "" {
		seed += xxh3.HashStringSeed(salt, 1)
	}
	window := size
	if pairs {
		window++
	}
	var hashes []uint64
	for at := 0; size > 0 && at+window <= len(tokens); at += size {
		var b []byte
		for _, id := range tokens[at : at+window] {
			b = binary.LittleEndian.AppendUint32(b, id)
		}
		if i := at / size; i < len(media) {
			for _, m := range slices.Sorted(slices.Values(media[i])) {
				b = binary.LittleEndian.AppendUint64(b, m)
			}
		}
		hashes = append(hashes, xxh3.HashSeed(b, seed))
	}
	return hashes
}

// slowEvent is an event in the slow and obvious reader: maps by name, places given names.
type slowEvent map[string]any

// slowRead reads a batch by way of any, and plays it to a slow and obvious normalizer without
// groups and salts of parents. It returns false for what it does not understand: events with
// names for groups, kinds, places in a tail, and whatever is malformed.
func slowRead(payload []byte) (lines []string, ok bool) {
	v, rest, err := msgp.ReadIntfBytes(payload)
	if err != nil || len(rest) > 0 {
		return nil, false
	}
	a, isArray := v.([]any)
	if !isArray || len(a) < 2 || len(a) > 3 {
		return nil, false
	}
	events, isArray := a[1].([]any)
	if !isArray {
		return nil, false
	}
	rank := uint64(0)
	if len(a) == 3 && a[2] != nil {
		var isNumber bool
		if rank, isNumber = slowUint(a[2]); !isNumber || rank > math.MaxInt32 {
			return nil, false
		}
	}
	for _, v := range events {
		e := slowFields(v)
		if e == nil {
			return nil, false
		}
		line, ok := e.line(rank)
		if !ok {
			return nil, false
		}
		lines = append(lines, line)
	}
	return lines, true
}

func slowUint(v any) (uint64, bool) {
	switch v := v.(type) {
	case int64:
		return uint64(v), v >= 0
	case uint64:
		return v, true
	}
	return 0, false
}

// slowFields gives names to the places of an event.
func slowFields(v any) slowEvent {
	switch v := v.(type) {
	case map[string]any:
		return v
	case []any:
		names := []string{"type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"}
		if len(v) > 0 && v[0] == "BlockRemoved" {
			names = []string{"type", "block_hashes", "medium"}
		}
		if len(v) > len(names) {
			return nil
		}
		e := slowEvent{}
		for i, x := range v {
			e[names[i]] = x
		}
		return e
	}
	return nil
}

func (e slowEvent) text(name string) (string, bool) {
	if e[name] == nil {
		return "", true
	}
	s, ok := e[name].(string)
	return s, ok
}

func (e slowEvent) hashes() ([]uint64, bool) {
	list, ok := e["block_hashes"].([]any)
	var hashes []uint64
	for _, v := range list {
		h, known := slowHash(v)
		if !known {
			return nil, false
		}
		hashes = append(hashes, h)
	}
	return hashes, ok
}

func slowHash(v any) (uint64, bool) {
	switch v := v.(type) {
	case int64:
		return uint64(v), true
	case uint64:
		return v, true
	case []byte:
		if len(v) == 0 {
			return 0, false
		}
		padded := append(make([]byte, 8), v...)
		return binary.BigEndian.Uint64(padded[len(padded)-8:]), true
	}
	return 0, false
}

// line is what a good event without finer points does.
func (e slowEvent) line(rank uint64) (string, bool) {
	for _, fine := range []string{"group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "metadata",
		"block_mm_infos", "extra_keys", "cache_salt"} {
		if e[fine] != nil {
			return "", false
		}
	}
	if e["type"] == "AllBlocksCleared" {
		return fmt.Sprintf("clear r%d", rank), len(e) == 1
	}
	hashes, ok := e.hashes()
	medium, isText := e.text("medium")
	tier, known := map[string]string{"": "device", "GPU": "device", "CPU": "host_pinned", "STORAGE": "disk", "SHARED": "external"}[medium]
	if !ok || !isText || !known {
		return "", false
	}
	switch e["type"] {
	case "BlockRemoved":
		return fmt.Sprintf("remove r%d %s %d", rank, tier, hashes), true
	case "BlockStored":
		return e.storeLine(rank, tier, hashes)
	}
	return "", false
}

func (e slowEvent) storeLine(rank uint64, tier string, hashes []uint64) (string, bool) {
	lora, isText := e.text("lora_name")
	size, isSize := slowUint(e["block_size"])
	list, isList := e["token_ids"].([]any)
	if !isText || !isSize || size != 2 || !isList {
		return "", false
	}
	var tokens []uint32
	for _, v := range list {
		id, isNumber := slowUint(v)
		if !isNumber || id > math.MaxUint32 {
			return "", false
		}
		tokens = append(tokens, uint32(id))
	}
	parent := "nil"
	all := slices.Clone(hashes)
	if e["parent_block_hash"] != nil {
		p, ok := slowHash(e["parent_block_hash"])
		if !ok || p == 0 {
			return "", false
		}
		parent = strconv.FormatUint(p, 10)
		all = append(all, p)
	}
	slices.Sort(all)
	if len(slices.Compact(all)) < len(hashes)+len(all)-len(slices.Compact(all)) || slowTwice(hashes, e["parent_block_hash"]) {
		return "", false
	}
	local := slowBlocks(tokens, int(size), lora, "", false, nil)
	kept := min(len(local), len(hashes))
	return fmt.Sprintf("store r%d %s after %s %d %d", rank, tier, parent, hashes[:kept], local[:kept]), true
}

func slowTwice(hashes []uint64, parent any) bool {
	p, has := slowHash(parent)
	seen := map[uint64]bool{}
	if has {
		seen[p] = true
	}
	for _, h := range hashes {
		if seen[h] {
			return true
		}
		seen[h] = true
	}
	return false
}

func FuzzKVBatch(f *testing.F) {
	for _, v := range readKVVectors(f).Wire.Cases {
		f.Add(v.payload(f))
	}
	for _, layout := range []wire.KVLayout{wire.KVArrays, wire.KVMaps} {
		f.Add(stream(1, 20, layout)[0])
	}
	f.Add(pack(list{1.5, list{stored(list{11}, nil, tokensX, nil, "GPU", nil, list{list{strings.Repeat("ab", 32), 3}}, list{fields{"mm_objects": list{fields{"mm_hash": 42}}}}, 3, "full_attention")}, -1}))
	f.Add(pack(list{1.5, list{salted(1, nil, "a", "GPU"), salted(1, nil, "b", "CPU"), salted(2, 1, nil, "GPU"), removed(1), ofGroup(3, nil)}, nil}))
	used := new(wire.KVBatch) // for all inputs, so that what one leaves behind shows in the next
	f.Fuzz(func(t *testing.T, payload []byte) {
		n := wire.NewKVNormalizer(worker.Rank{Worker: 1}, 2)
		var fresh wire.KVBatch
		err := fresh.Decode(payload)
		n.Each(&fresh, func(*wire.KVEvent) {})
		if took, most := wire.KVHeld(&fresh, n), 40*len(payload)+1<<10; took > most {
			t.Errorf("%d bytes for a payload of %d", took, len(payload))
		}
		if again := used.Decode(payload); (again == nil) != (err == nil) {
			t.Fatalf("Decode = %v, and with memory used before %v", err, again)
		}
		counts := n.Counts
		n = wire.NewKVNormalizer(worker.Rank{Worker: 1}, 2)
		got := told(n, used)
		if n.Counts != counts {
			t.Fatalf("left out %v, and with memory used before %v", counts, n.Counts)
		}
		n = wire.NewKVNormalizer(worker.Rank{Worker: 1}, 2)
		n.Each(&fresh, func(e *wire.KVEvent) {
			if e.Kind == wire.KVStore && (len(e.Engine) != len(e.Local) || slowTwice(e.Engine, nil) || int(e.Tier) >= worker.Tiers) {
				t.Fatalf("%+v", *e)
			}
		})
		if want, ok := slowRead(payload); ok && (err != nil || !slices.Equal(got, want)) {
			t.Fatalf("%s: %v, %q, want %q", hex.EncodeToString(payload), err, got, want)
		}
	})
}
