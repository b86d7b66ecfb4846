package kvhash_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/zeebo/xxh3"

	"spillway/kvhash"
)

type vectors struct {
	Constants struct {
		Chain  uint64 `json:"chain_seed"`
		LoRA   uint64 `json:"lora_inner_seed"`
		Salt   uint64 `json:"salt_inner_seed"`
		Mask   uint64 `json:"mm_pad_mask"`
		PadMin uint64 `json:"mm_pad_shift"`
	} `json:"constants"`
	Literals []struct {
		Input  *string  `json:"input_utf8"`
		Seed   uint64   `json:"seed"`
		XXH3   uint64   `json:"xxh3_64"`
		Block  uint64   `json:"block_hash"`
		Tokens []uint32 `json:"tokens"`
		After4 uint64   `json:"sequence_hash_after_1_4"`
		After8 uint64   `json:"sequence_hash_after_1_8"`
	} `json:"upstream_literals"`
	Seeds []struct {
		LoRA string `json:"lora_name"`
		Salt string `json:"cache_salt"`
		Seed uint64 `json:"block_seed"`
		Hex  string `json:"block_seed_hex"`
	} `json:"seed_vectors"`
	Blocks []blockVector `json:"vectors"`
	Chains []blockVector `json:"chain_vectors"`
}

type blockVector struct {
	Name            string              `json:"name"`
	BlockSize       int                 `json:"block_size"`
	Tokens          []uint32            `json:"tokens"`
	LoRA            string              `json:"lora_name"`
	Salt            string              `json:"cache_salt"`
	Eagle           bool                `json:"is_eagle"`
	Multimodal      map[string][]uint64 `json:"block_mm_hashes"`
	Seed            uint64              `json:"block_seed"`
	Hashes          []uint64            `json:"block_hashes_unsigned"`
	HashesSigned    []int64             `json:"block_hashes_signed"`
	Sequences       []uint64            `json:"sequence_hashes_unsigned"`
	SequencesSigned []int64             `json:"sequence_hashes_signed"`
}

func (v blockVector) options(t *testing.T) kvhash.Options {
	o := kvhash.Options{BlockSize: v.BlockSize, LoRA: v.LoRA, Salt: v.Salt, Eagle: v.Eagle}
	for at, hashes := range v.Multimodal {
		i, err := strconv.Atoi(at)
		if err != nil {
			t.Fatal(err)
		}
		for len(o.Multimodal) <= i {
			o.Multimodal = append(o.Multimodal, nil)
		}
		o.Multimodal[i] = hashes
	}
	return o
}

func load(t *testing.T) vectors {
	t.Helper()
	raw, err := os.ReadFile("testdata/hash-vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	var v vectors
	if err := json.NewDecoder(bytes.NewReader(raw)).Decode(&v); err != nil {
		t.Fatal(err)
	}
	if len(v.Blocks) < 25 || len(v.Chains) < 4 || len(v.Seeds) < 7 || len(v.Literals) < 4 {
		t.Fatalf("only %d, %d, %d and %d vectors", len(v.Blocks), len(v.Chains), len(v.Seeds), len(v.Literals))
	}
	return v
}

func signed(hashes []uint64) []int64 {
	s := make([]int64, len(hashes))
	for i, h := range hashes {
		s[i] = int64(h)
	}
	return s
}

func TestVectors(t *testing.T) {
	for _, v := range load(t).Blocks {
		t.Run(v.Name, func(t *testing.T) {
			o := v.options(t)
			got := kvhash.AppendBlocks(nil, v.Tokens, o)
			if !slices.Equal(got, v.Hashes) || !slices.Equal(signed(got), v.HashesSigned) {
				t.Errorf("AppendBlocks(%v, %+v) = %v, want %v", v.Tokens, o, got, v.Hashes)
			}
			if n := o.Blocks(len(v.Tokens)); n != len(v.Hashes) {
				t.Errorf("Blocks(%d) = %d, want %d", len(v.Tokens), n, len(v.Hashes))
			}
			if s := kvhash.Seed(v.LoRA, v.Salt); s != v.Seed {
				t.Errorf("Seed(%q, %q) = %d, want %d", v.LoRA, v.Salt, s, v.Seed)
			}
			seqs := kvhash.AppendSequences(nil, got)
			if !slices.Equal(seqs, v.Sequences) || !slices.Equal(signed(seqs), v.SequencesSigned) {
				t.Errorf("AppendSequences(%v) = %v, want %v", got, seqs, v.Sequences)
			}
		})
	}
}

func TestChainVectors(t *testing.T) {
	for _, v := range load(t).Chains {
		got := kvhash.AppendSequences(nil, v.Hashes)
		if !slices.Equal(got, v.Sequences) || !slices.Equal(signed(got), v.SequencesSigned) {
			t.Errorf("%s: AppendSequences(%v) = %v, want %v", v.Name, v.Hashes, got, v.Sequences)
		}
		for i := 1; i < len(got); i++ {
			if next := kvhash.Next(got[i-1], v.Hashes[i]); next != got[i] {
				t.Errorf("%s: Next(%d, %d) = %d, want %d", v.Name, got[i-1], v.Hashes[i], next, got[i])
			}
		}
	}
}

func TestSeedVectors(t *testing.T) {
	for _, v := range load(t).Seeds {
		got := kvhash.Seed(v.LoRA, v.Salt)
		if got != v.Seed || fmt.Sprintf("0x%016x", got) != v.Hex {
			t.Errorf("Seed(%q, %q) = %d, want %d (%s)", v.LoRA, v.Salt, got, v.Seed, v.Hex)
		}
	}
}

func TestLiterals(t *testing.T) {
	for _, v := range load(t).Literals {
		if v.Input != nil {
			if got := xxh3.HashStringSeed(*v.Input, v.Seed); got != v.XXH3 {
				t.Errorf("XXH3 of %q with seed %d = %d, want %d", *v.Input, v.Seed, got, v.XXH3)
			}
			continue
		}
		o := kvhash.Options{BlockSize: 4}
		if got := kvhash.AppendBlocks(nil, v.Tokens, o); !slices.Equal(got, []uint64{v.Block}) {
			t.Errorf("AppendBlocks(%v) = %v, want [%d]", v.Tokens, got, v.Block)
		}
		prompt := make([]uint32, v.Tokens[3])
		for i := range prompt {
			prompt[i] = uint32(i + 1)
		}
		seqs := kvhash.AppendSequences(nil, kvhash.AppendBlocks(nil, prompt, o))
		if want := v.After4 + v.After8; want != 0 && seqs[len(seqs)-1] != want { // one of them is 0
			t.Errorf("sequence hash after %v = %d, want %d", v.Tokens, seqs[len(seqs)-1], want)
		}
	}
}

func TestConstants(t *testing.T) {
	c := load(t).Constants
	if got, want := kvhash.Seed("", ""), c.Chain; got != want {
		t.Errorf("seed without names = %d, want %d", got, want)
	}
	if got, want := kvhash.Seed("a", "b"), c.Chain+xxh3.HashStringSeed("a", c.LoRA)+xxh3.HashStringSeed("b", c.Salt); got != want {
		t.Errorf("seed with both names = %d, want %d", got, want)
	}
	if got := kvhash.PadToken(9533257059414191570); got != 49115154 { // kv-index.md 2.4
		t.Errorf("PadToken = %d, want 49115154", got)
	}
	if got, want := uint64(kvhash.PadToken(1<<64-1)), c.PadMin+c.Mask; got != want {
		t.Errorf("largest pad token = %d, want %d", got, want)
	}
}

// TestSizes compares all window sizes with the bytes that the definition asks for.
func TestSizes(t *testing.T) {
	tokens := make([]uint32, 1300)
	for i := range tokens {
		tokens[i] = uint32(i) * 2654435761
	}
	for size := -1; size <= 300; size++ {
		for _, eagle := range []bool{false, true} {
			var want []uint64
			window := size
			if eagle {
				window++
			}
			for at := 0; size > 0 && at+window <= len(tokens); at += size {
				var b []byte
				for _, tok := range tokens[at : at+window] {
					b = binary.LittleEndian.AppendUint32(b, tok)
				}
				want = append(want, xxh3.HashSeed(b, 1337))
			}
			got := kvhash.AppendBlocks([]uint64{7}, tokens, kvhash.Options{BlockSize: size, Eagle: eagle})
			if !slices.Equal(got[1:], want) || got[0] != 7 {
				t.Fatalf("block size %d, eagle %v: %d hashes differ from the %d wanted", size, eagle, len(got)-1, len(want))
			}
		}
	}
}

// TestNext compares what is written out with the library.
func TestNext(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 10_000 {
		seq, block := r.Uint64()>>r.IntN(64), r.Uint64()>>r.IntN(64)
		b := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, seq), block)
		if got, want := kvhash.Next(seq, block), xxh3.HashSeed(b, 1337); got != want {
			t.Fatalf("Next(%d, %d) = %d, want %d", seq, block, got, want)
		}
	}
}

func TestMultimodalIsNotChanged(t *testing.T) {
	hashes := []uint64{3, 1, 2}
	o := kvhash.Options{BlockSize: 2, Multimodal: [][]uint64{hashes}}
	a := kvhash.AppendBlocks(nil, []uint32{1, 2, 3, 4}, o)
	o.Multimodal = [][]uint64{{1, 2, 3}, nil, {9}} // more than there are blocks
	if b := kvhash.AppendBlocks(nil, []uint32{1, 2, 3, 4}, o); !slices.Equal(a, b) {
		t.Errorf("order within a block matters: %v and %v", a, b)
	}
	if !slices.Equal(hashes, []uint64{3, 1, 2}) {
		t.Errorf("the caller's hashes are now %v", hashes)
	}
}

func TestAllocations(t *testing.T) {
	tokens := make([]uint32, 4096)
	dst := make([]uint64, 0, 4096)
	for _, size := range []int{1, 16, 64, 256} {
		for _, eagle := range []bool{false, true} {
			o := kvhash.Options{BlockSize: size, LoRA: "a", Salt: "b", Eagle: eagle}
			if n := testing.AllocsPerRun(10, func() { kvhash.AppendBlocks(dst[:0], tokens, o) }); n != 0 {
				t.Errorf("AppendBlocks with block size %d, eagle %v allocates %v times", size, eagle, n)
			}
		}
	}
	if n := testing.AllocsPerRun(10, func() { kvhash.AppendSequences(dst[:0], dst[:512]) }); n != 0 {
		t.Errorf("AppendSequences allocates %v times", n)
	}
}

func BenchmarkAppendBlocks(b *testing.B) {
	tokens := make([]uint32, 8192)
	for i := range tokens {
		tokens[i] = uint32(i * 7919)
	}
	for _, size := range []int{16, 64} {
		b.Run(fmt.Sprintf("size=%d", size), func(b *testing.B) {
			dst := make([]uint64, 0, len(tokens)/size)
			b.ReportAllocs()
			for b.Loop() {
				dst = kvhash.AppendBlocks(dst[:0], tokens, kvhash.Options{BlockSize: size})
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(dst)), "ns/block")
		})
	}
}

func BenchmarkAppendSequences(b *testing.B) {
	blocks := make([]uint64, 512)
	dst := make([]uint64, 0, len(blocks))
	b.ReportAllocs()
	for b.Loop() {
		dst = kvhash.AppendSequences(dst[:0], blocks)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(blocks)), "ns/block")
}
