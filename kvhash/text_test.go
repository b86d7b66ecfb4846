package kvhash_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"spillway/kvhash"
)

// words are the tokens that a text stands for.
func words(text []byte) (tokens []uint32) {
	for len(text) > 0 {
		var word [4]byte
		text = text[copy(word[:], text):]
		tokens = append(tokens, binary.LittleEndian.Uint32(word[:]))
	}
	return tokens
}

// TestText compares the hashes of texts, in pieces of any size, with those of their words as tokens.
func TestText(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var text kvhash.Text
	for i := range 2000 {
		all := make([]byte, rng.IntN(600))
		for j := range all {
			all[j] = byte(rng.Uint32())
		}
		o := kvhash.Options{BlockSize: rng.IntN(70), LoRA: []string{"", "l"}[i%2], Salt: []string{"", "s"}[i/2%2]}
		most := 1 << 20
		if i%5 == 0 {
			most = rng.IntN(5)
		}
		want := kvhash.AppendBlocks(nil, words(all), o)
		want = want[:min(len(want), most)]
		text.Reset(o, most)
		var cuts []int
		for rest := all; len(rest) > 0; {
			n := rng.IntN(min(len(rest), 1+rng.IntN(300)) + 1)
			text.Add(rest[:n])
			rest, cuts = rest[n:], append(cuts, n)
		}
		if got := text.Blocks(); !slices.Equal(got, want) {
			t.Fatalf("Blocks of %d bytes, in pieces of %v, at most %d, %+v = %x, want %x", len(all), cuts, most, o, got, want)
		}
		if got, want := text.Tokens(), len(words(all)); got != want {
			t.Fatalf("Tokens of %d bytes = %d, want %d", len(all), got, want)
		}
	}
}

func BenchmarkText(b *testing.B) {
	for _, size := range []int{1 << 10, 32 << 10} {
		b.Run(fmt.Sprintf("bytes=%d", size), func(b *testing.B) {
			all := make([]byte, size)
			var text kvhash.Text
			var seqs []uint64
			b.ReportAllocs()
			b.SetBytes(int64(size))
			for b.Loop() {
				text.Reset(kvhash.Options{BlockSize: 16}, 1<<16)
				text.Add(all)
				seqs = kvhash.AppendSequences(seqs[:0], text.Blocks())
			}
		})
	}
}
