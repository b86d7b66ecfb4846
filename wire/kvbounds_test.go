package wire_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/tinylib/msgp/msgp"
	"pgregory.net/rapid"

	"spillway/wire"
	"spillway/worker"
)

// allocated is how many bytes f allocates.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// many repeats a value n times in an array.
func many(n int, value []byte) []byte {
	return append(msgp.AppendArrayHeader(nil, uint32(n)), bytes.Repeat(value, n)...)
}

// lastOf is an array of n values, all nil but the last.
func lastOf(n int, value []byte) []byte {
	b := many(n, []byte{0xc0})
	return append(b[:len(b)-1], value...)
}

// TestKVMemory: no payload makes us take more than a small multiple of itself, however it is made.
// The race detector makes slices.Grow allocate twice.
func TestKVMemory(t *testing.T) {
	const n = 50_000
	one := func(event []byte) []byte { return slices.Concat([]byte{0x92, 0xc0, 0x91}, event) }
	store := func(hashes, tokens []byte, size byte, rest ...byte) []byte {
		return one(slices.Concat([]byte{0x95 + byte(min(len(rest), 1))*5}, pack("BlockStored"), hashes, []byte{0xc0}, tokens, []byte{size}, rest))
	}
	var different []byte
	for i := range uint32(n) {
		different = msgp.AppendUint32(different, i)
	}
	different = append(msgp.AppendArrayHeader(nil, n), different...)
	salted := slices.Concat([]byte{0x85}, pack("type"), pack("BlockStored"), pack("block_hashes"), different,
		pack("token_ids"), many(n, []byte{1}), pack("block_size"), []byte{1}, pack("cache_salt"), pack("a"))
	bomb := func(event []byte) []byte { return slices.Concat([]byte{0x92, 0xc0, 0x91}, event, make([]byte, 100)) }
	for _, tt := range []struct {
		name    string
		payload []byte
		times   uint64
		bomb    bool
	}{
		{"the same hash", one(slices.Concat([]byte{0x92}, pack("BlockRemoved"), many(n, []byte{7}))), 20, false},
		{"the same hash stored", store(many(n, []byte{7}), []byte{0x90}, 1), 20, false},
		{"tokens", store([]byte{0x91, 1}, many(n, []byte{7}), 1), 20, false},
		{"blocks of one token", store(different, many(n, []byte{7}), 1), 24, false},
		{"pairs", store([]byte{0x91, 1}, many(n, []byte{0x92, 1, 2}), 1), 20, false},
		{"small removes", slices.Concat([]byte{0x92, 0xc0}, many(n, slices.Concat([]byte{0x92}, pack("BlockRemoved"), []byte{0x90}))), 20, false},
		{"ignored", slices.Concat([]byte{0x92, 0xc0}, many(n, pack(list{"Ignored"}))), 20, false},
		{"events that are none", slices.Concat([]byte{0x92, 0xc0}, many(n, []byte{7})), 20, false},
		{"lists that break off", slices.Concat([]byte{0x92, 0xc0}, many(n, slices.Concat([]byte{0x92}, pack("BlockRemoved"), []byte{0x93, 7, 7, 0xa0}))), 20, false},
		{"media", store([]byte{0x91, 1}, []byte{0x92, 1, 2}, 1, slices.Concat([]byte{0xc0, 0xc0, 0xc0, 0xc0}, many(n, []byte{0x91, 0x91, 0x91, 7}))...), 36, false},
		{"blocks without media", store([]byte{0x91, 1}, []byte{0x92, 1, 2}, 1, slices.Concat([]byte{0xc0, 0xc0, 0xc0, 0xc0}, lastOf(n, []byte{0x91, 0x91, 0x91, 7}))...), 20, false},
		{"salted blocks", one(salted), 60, false}, // a map of what they are salted with
		{"an array of 2^32", bomb([]byte{0x92, 0xac, 'B', 'l', 'o', 'c', 'k', 'R', 'e', 'm', 'o', 'v', 'e', 'd', 0xdd, 0xff, 0xff, 0xff, 0xff}), 20, true},
		{"a map of 2^32", bomb([]byte{0xdf, 0xff, 0xff, 0xff, 0xff}), 20, true},
		{"text of 2^32", bomb([]byte{0x91, 0xdb, 0xff, 0xff, 0xff, 0xff}), 20, true},
		{"an extension of 2^32", bomb([]byte{0x91, 0xc9, 0xff, 0xff, 0xff, 0xff, 1}), 20, true},
	} {
		var b wire.KVBatch
		n := wire.NewKVNormalizer(worker.Rank{}, 1)
		got := allocated(func() {
			if err := b.Decode(tt.payload); err == nil {
				n.Each(&b, func(*wire.KVEvent) {})
			} else if !tt.bomb {
				t.Errorf("%s: %v", tt.name, err)
			}
		})
		if most := tt.times*uint64(len(tt.payload)) + 16<<10; got > most {
			t.Errorf("%s: %d bytes for a payload of %d, want %d at most", tt.name, got, len(tt.payload), most)
		}
	}
}

// TestKVMemoryIsUsedAgain: batches like the ones before need no memory, and one that was large does
// not keep it.
func TestKVMemoryIsUsedAgain(t *testing.T) {
	payloads := stream(4, 64, wire.KVMaps)
	var b wire.KVBatch
	n := wire.NewKVNormalizer(worker.Rank{}, 16)
	round := func(p []byte) {
		if err := b.Decode(p); err != nil {
			t.Fatal(err)
		}
		n.Each(&b, func(*wire.KVEvent) {})
	}
	if got := testing.AllocsPerRun(100, func() {
		for _, p := range payloads {
			round(p)
		}
	}); got > 0 {
		t.Errorf("%v allocations", got)
	}
	large := stream(1, 40_000, wire.KVArrays)[0] // 640,000 tokens
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	round(large)
	round(payloads[0])
	if after := heap(); after > before+1<<20 {
		t.Errorf("%d bytes are kept after a large batch", after-before)
	}
	runtime.KeepAlive(&b)
	runtime.KeepAlive(large)
}

// TestKVTablesAreBounded fills what a normalizer keeps.
func TestKVTablesAreBounded(t *testing.T) {
	n := wire.NewKVNormalizer(worker.Rank{}, 2)
	var b wire.KVBatch
	say := func(payload []byte) {
		if err := b.Decode(payload); err != nil {
			t.Fatal(err)
		}
		n.Each(&b, func(*wire.KVEvent) {})
	}
	for from := 0; from < 5000; from += 1000 {
		var events list
		for g := range 1000 {
			events = append(events, with(fields{"group_idx": from + g, "kv_cache_spec_kind": "full_attention"}))
		}
		say(batch(events...))
	}
	if got, want := n.Counts[wire.KVTableFull], uint64(5000-4096); got != want {
		t.Errorf("%d groups found no room, want %d", got, want)
	}
	n = wire.NewKVNormalizer(worker.Rank{}, 2)
	salt := string(bytes.Repeat([]byte{'s'}, 1<<20))
	for i := range 70 { // 64 MiB is the bound
		say(batch(salted(i+1, nil, salt, "GPU")))
	}
	if got, want := n.Counts[wire.KVTableFull], uint64(70-64); got != want {
		t.Errorf("%d salts found no room, want %d", got, want)
	}
	say(batch(list{"AllBlocksCleared"}, salted(1, nil, salt, "GPU"))) // there is room again
	if got, want := n.Counts[wire.KVTableFull], uint64(70-64); got != want {
		t.Errorf("after a clear %d salts found no room, want %d", got, want)
	}
	n = wire.NewKVNormalizer(worker.Rank{}, 2)
	for from := 0; from < 1<<20+1000; from += 1 << 14 {
		hashes := make(list, 1<<14)
		for i := range hashes {
			hashes[i] = from + i + 1
		}
		say(batch(fields{"type": "BlockStored", "block_hashes": hashes, "token_ids": tokensX, "block_size": 2, "cache_salt": "a"}))
	}
	if got, want := n.Counts[wire.KVTableFull], uint64(1<<14); got != want {
		t.Errorf("%d salted blocks found no room, want %d", got, want)
	}
}

// TestKVRepeats: a block that is named twice is found in lists of all lengths, and chosen hashes
// take no longer than others.
func TestKVRepeats(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		e := wire.KVPublished{Kind: wire.KVStore, BlockSize: 1, Tokens: []uint32{1}}
		length := rapid.IntRange(1, 600).Draw(t, "length")
		step := rapid.SampledFrom([]uint64{1, 1 << 33, 1 << 50, 0x9e3779b97f4a7c15}).Draw(t, "step")
		for i := range length {
			e.Hashes = append(e.Hashes, 1+uint64(i)*step)
		}
		r.Shuffle(length, func(i, j int) { e.Hashes[i], e.Hashes[j] = e.Hashes[j], e.Hashes[i] })
		switch rapid.SampledFrom([]string{"none", "twice", "parent"}).Draw(t, "which") {
		case "twice":
			e.Hashes = append(e.Hashes, e.Hashes[r.IntN(length)])
		case "parent":
			e.Parent, e.HasParent = e.Hashes[r.IntN(length)], true
		}
		slices.Sort(e.Hashes[:length/2])
		different := map[uint64]bool{}
		for _, h := range e.Hashes {
			different[h] = true
		}
		want := uint64(0)
		if len(different) < len(e.Hashes) || e.HasParent {
			want = 1
		}
		n := wire.NewKVNormalizer(worker.Rank{}, 1)
		var b wire.KVBatch
		if err := b.Decode(wire.AppendKVBatch(nil, wire.KVArrays, 0, 0, []wire.KVPublished{e})); err != nil {
			t.Fatal(err)
		}
		n.Each(&b, func(*wire.KVEvent) {})
		if got := n.Counts[wire.KVSelfReference]; got != want {
			t.Fatalf("%d hashes, %d different, parent %v: %d self references, want %d", len(e.Hashes), len(different), e.HasParent, got, want)
		}
	})
}

// TestKVThereAndBack decodes what it has encoded.
func TestKVThereAndBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const size = 3
		events := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) wire.KVPublished {
			e := wire.KVPublished{Kind: rapid.SampledFrom(wire.KVKinds).Draw(t, "kind")}
			if e.Kind == wire.KVClear {
				return e
			}
			e.Hashes = rapid.SliceOfNDistinct(rapid.Uint64Min(1<<60), 1, 20, rapid.ID[uint64]).Draw(t, "hashes")
			if e.Kind == wire.KVStore {
				e.BlockSize = size
				e.Tokens = rapid.SliceOfN(rapid.Uint32(), size*len(e.Hashes), size*len(e.Hashes)).Draw(t, "tokens")
				e.Parent, e.HasParent = rapid.Uint64Range(1, 1<<60-1).Draw(t, "parent"), true
			}
			return e
		}), 0, 5).Draw(t, "events")
		layout := rapid.SampledFrom([]wire.KVLayout{wire.KVArrays, wire.KVMaps}).Draw(t, "layout")
		var b wire.KVBatch
		if err := b.Decode(wire.AppendKVBatch(nil, layout, 7, 9, events)); err != nil {
			t.Fatal(err)
		}
		i := 0
		n := wire.NewKVNormalizer(worker.Rank{Worker: 5}, size)
		n.Each(&b, func(e *wire.KVEvent) {
			want := wire.KVEvent{Kind: events[i].Kind, Rank: worker.Rank{Worker: 5, DP: 9}, Engine: events[i].Hashes}
			if want.Kind == wire.KVStore {
				want.Parent, want.HasParent = events[i].Parent, true
				want.Local = slowBlocks(events[i].Tokens, size, "", "", false, nil)
			}
			if got, want := fmt.Sprintf("%+v", *e), fmt.Sprintf("%+v", want); got != want {
				t.Fatalf("event %d: %s, want %s", i, got, want)
			}
			i++
		})
		if i != len(events) || n.Counts != (wire.KVCounts{}) {
			t.Fatalf("%d events of %d, left out %v", i, len(events), n.Counts)
		}
	})
}
