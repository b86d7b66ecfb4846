package wire_test

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"testing"

	"spillway/wire"
	"spillway/worker"
)

// kvVectors is the part of hash-vectors.json that is about payloads.
type kvVectors struct {
	Wire struct {
		BlockSize uint32     `json:"listener_block_size"`
		Rank      uint32     `json:"listener_registered_rank"`
		Cases     []kvVector `json:"cases"`
	} `json:"wire_vectors"`
}

type kvVector struct {
	Name    string `json:"name"`
	Payload string `json:"payload_hex"`
	Expect  struct {
		Rank   *uint32 `json:"data_parallel_rank"`
		Events []struct {
			Kind   string   `json:"kind"`
			Rank   *uint32  `json:"dp_rank"`
			Tier   string   `json:"tier"`
			Parent *uint64  `json:"parent"`
			Engine []uint64 `json:"ext_hashes"`
			Local  []uint64 `json:"tokens_hashes"`
		} `json:"events"`
	} `json:"expect"`
}

func readKVVectors(tb testing.TB) kvVectors {
	tb.Helper()
	data, err := os.ReadFile("../kvhash/testdata/hash-vectors.json")
	if err != nil {
		tb.Fatal(err)
	}
	var v kvVectors
	if err := json.Unmarshal(data, &v); err != nil {
		tb.Fatal(err)
	}
	return v
}

// payload is the vector's bytes.
func (v *kvVector) payload(tb testing.TB) []byte {
	tb.Helper()
	b, err := hex.DecodeString(v.Payload)
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

func TestKVVectors(t *testing.T) {
	v := readKVVectors(t).Wire
	if len(v.Cases) != 24 {
		t.Fatalf("%d vectors, want 24", len(v.Cases))
	}
	for _, tt := range v.Cases {
		t.Run(tt.Name, func(t *testing.T) {
			var b wire.KVBatch
			if err := b.Decode(tt.payload(t)); err != nil {
				t.Fatal(err)
			}
			if r := tt.Expect.Rank; b.HasRank != (r != nil) || r != nil && b.Rank != *r {
				t.Errorf("rank %d, %v; want %v", b.Rank, b.HasRank, r)
			}
			if b.Time != 1.5 {
				t.Errorf("time %v, want 1.5", b.Time)
			}
			var want []string
			for _, e := range tt.Expect.Events {
				rank := v.Rank
				if e.Rank != nil {
					rank = *e.Rank
				}
				parent := "nil"
				if e.Parent != nil {
					parent = fmt.Sprint(*e.Parent)
				}
				switch e.Kind {
				case "stored":
					want = append(want, fmt.Sprintf("store r%d %s after %s %d %d", rank, e.Tier, parent, e.Engine, e.Local))
				case "removed":
					want = append(want, fmt.Sprintf("remove r%d %s %d", rank, e.Tier, e.Engine))
				case "cleared":
					want = append(want, fmt.Sprintf("clear r%d", rank))
				}
			}
			n := wire.NewKVNormalizer(worker.Rank{Worker: 1, DP: v.Rank}, v.BlockSize)
			if got := told(n, &b); !slices.Equal(got, want) {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
}

// told lists what a batch does to an index, with local hashes.
func told(n *wire.KVNormalizer, b *wire.KVBatch) []string {
	var lines []string
	n.Each(b, func(e *wire.KVEvent) {
		parent := "nil"
		if e.HasParent {
			parent = fmt.Sprint(e.Parent)
		}
		switch e.Kind {
		case wire.KVStore:
			lines = append(lines, fmt.Sprintf("store r%d %s after %s %d %d", e.Rank.DP, e.Tier, parent, e.Engine, e.Local))
		case wire.KVRemove:
			lines = append(lines, fmt.Sprintf("remove r%d %s %d", e.Rank.DP, e.Tier, e.Engine))
		case wire.KVClear:
			lines = append(lines, fmt.Sprintf("clear r%d", e.Rank.DP))
		}
	})
	return lines
}
