// Package kvhash turns token IDs into the numbers that KV-cache blocks are known by: a block hash
// (also: local hash) for the tokens of one block, and a sequence hash for a block and all before
// it. All are XXH3, 64 bits, with fixed seeds, so every process arrives at the same ones.
package kvhash

import (
	"encoding/binary"
	"math/bits"
	"slices"

	"github.com/zeebo/xxh3"
)

// seed is that of the chain, and of blocks that have neither LoRA adapter nor cache salt.
const seed = 1337

// The seeds that names are hashed with. They differ, so that an adapter and a salt of the same
// name do not meet.
const (
	loraSeed = 0
	saltSeed = 1
)

// What a multimodal hash becomes where a model marks its images by runs of one token.
const (
	padMask  = 1<<30 - 1
	padShift = 1_000_000
)

// Options are what besides its tokens decides the hash of a block.
type Options struct {
	BlockSize int    // tokens per block; nothing has blocks of size 0
	LoRA      string // name of the adapter, "" for the base model
	Salt      string // cache salt, "" for none
	Eagle     bool   // a window has one token more than a block, and shares it with the next one

	// Multimodal holds the hashes of the objects that each block touches, by block. It may be
	// shorter than the prompt has blocks, or nil. It is read only; order within a block is free.
	Multimodal [][]uint64
}

// Seed returns the seed of all block hashes under a LoRA adapter and a cache salt; "" is none.
func Seed(lora, salt string) uint64 {
	s := uint64(seed)
	if lora != "" {
		s += xxh3.HashStringSeed(lora, loraSeed)
	}
	if salt != "" {
		s += xxh3.HashStringSeed(salt, saltSeed)
	}
	return s
}

// Blocks is how many blocks a prompt of that many tokens has. A part of a block is none.
func (o Options) Blocks(tokens int) int {
	if o.Eagle {
		tokens--
	}
	if o.BlockSize <= 0 || tokens <= 0 {
		return 0
	}
	return tokens / o.BlockSize
}

// AppendBlocks appends the hashes of all complete blocks of tokens to dst. It allocates nothing
// if dst has room and blocks are no larger than 256 tokens.
func AppendBlocks(dst []uint64, tokens []uint32, o Options) []uint64 {
	n := o.Blocks(len(tokens))
	if n == 0 {
		return dst
	}
	window := o.BlockSize
	if o.Eagle {
		window++
	}
	dst = slices.Grow(dst, n)
	s := Seed(o.LoRA, o.Salt)
	var room [4 * 257]byte
	buf := room[:]
	if 4*window > len(buf) {
		buf = make([]byte, 4*window)
	}
	buf = buf[:4*window]
	for i := range n {
		put(buf, tokens[i*o.BlockSize:][:window])
		if i < len(o.Multimodal) && len(o.Multimodal[i]) > 0 {
			dst = append(dst, xxh3.HashSeed(withMultimodal(buf, o.Multimodal[i]), s))
			continue
		}
		dst = append(dst, xxh3.HashSeed(buf, s))
	}
	return dst
}

// put writes tokens to buf, which has just the room, as four bytes each, the lowest first.
func put(buf []byte, tokens []uint32) {
	for len(tokens) >= 4 { // fewer checks of bounds; a view by unsafe would save little more
		b, t := buf[:16:16], tokens[:4:4]
		binary.LittleEndian.PutUint64(b, uint64(t[0])|uint64(t[1])<<32)
		binary.LittleEndian.PutUint64(b[8:], uint64(t[2])|uint64(t[3])<<32)
		buf, tokens = buf[16:], tokens[4:]
	}
	for i, t := range tokens {
		binary.LittleEndian.PutUint32(buf[4*i:], t)
	}
}

// withMultimodal returns the bytes of a block's tokens with those of the multimodal hashes after
// them, the smallest first.
func withMultimodal(tokens []byte, hashes []uint64) []byte {
	all := make([]byte, 0, len(tokens)+8*len(hashes))
	all = append(all, tokens...)
	for _, h := range slices.Sorted(slices.Values(hashes)) {
		all = binary.LittleEndian.AppendUint64(all, h)
	}
	return all
}

// Next returns the sequence hash of a block that follows the sequence seq. That of a first block
// is its block hash.
//
// It is XXH3 of both numbers' 16 bytes, the library's answer written out for this one length and
// seed: a chain of them is what a query waits for, and this way takes half the time.
func Next(seq, block uint64) uint64 {
	const ( // words of XXH3's secret, in pairs, and the seed
		flipSeq   = (0x1f67b3b7a4a44072 ^ 0x78e5c0cc4ee679cb) + seed
		flipBlock = (0x2172ffcc7dd05a82 ^ 0x8e2443f7744608b8) - seed
	)
	lo, hi := seq^flipSeq, block^flipBlock
	high, low := bits.Mul64(lo, hi)
	h := 16 + bits.ReverseBytes64(lo) + hi + (high ^ low)
	h = (h ^ h>>37) * 0x165667919e3779f9
	return h ^ h>>32
}

// AppendSequences appends the sequence hashes of a prompt's blocks, the first at its beginning,
// to dst.
func AppendSequences(dst, blocks []uint64) []uint64 {
	var seq uint64
	for i, b := range blocks {
		if i == 0 {
			seq = b
		} else {
			seq = Next(seq, b)
		}
		dst = append(dst, seq)
	}
	return dst
}

// PadToken returns the token that stands for an image or other object in the blocks of a model
// whose placeholder token is configured. Such blocks are hashed without Multimodal.
func PadToken(multimodal uint64) uint32 {
	return padShift + uint32(multimodal&padMask)
}
