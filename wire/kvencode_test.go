package wire_test

import (
	"fmt"
	"testing"

	"spillway/wire"
)

// TestKVEncode reads what AppendKVBatch writes.
func TestKVEncode(t *testing.T) {
	events := []wire.KVPublished{
		{Kind: wire.KVStore, Hashes: []uint64{11, 1<<64 - 1}, Tokens: []uint32{10, 11, 12, 13}, BlockSize: 2},
		{Kind: wire.KVStore, Hashes: []uint64{13}, Parent: 1<<64 - 1, HasParent: true, Tokens: []uint32{10, 11}, BlockSize: 2},
		{Kind: wire.KVRemove, Hashes: []uint64{13, 11}},
		{Kind: wire.KVClear},
	}
	for _, layout := range []wire.KVLayout{wire.KVArrays, wire.KVMaps} {
		payload := wire.AppendKVBatch([]byte("before"), layout, 1.5, 3, events)[len("before"):]
		var b wire.KVBatch
		if err := b.Decode(payload); err != nil || b.Time != 1.5 || b.Rank != 3 || !b.HasRank {
			t.Fatalf("layout %d: time %v, rank %d %v, %v", layout, b.Time, b.Rank, b.HasRank, err)
		}
		want := "r3:11=x,-1=y r3:-1>13=x r3:-13,-11 r3:clear"
		if got := play(t, payload); got != want {
			t.Errorf("layout %d: %q, want %q", layout, got, want)
		}
	}
	empty := wire.AppendKVBatch(nil, wire.KVMaps, 0, 0, nil)
	if got := play(t, empty); got != "" {
		t.Errorf("no events: %q", got)
	}
}

func TestKVWords(t *testing.T) {
	seen := map[string]bool{}
	for why := range wire.KVReasons {
		if s := why.String(); s == "unknown" || seen[s] {
			t.Errorf("reason %d is %q", why, s)
		} else {
			seen[s] = true
		}
	}
	if got, want := fmt.Sprint(wire.KVReasons, wire.KVKinds, wire.KVKind(0)), "unknown [stored removed cleared] unknown"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
