package kvhash

import (
	"slices"

	"github.com/zeebo/xxh3"
)

// Text hashes text as if each four of its bytes, the lowest first, were a token, with zeros after the
// last ones. So prompts can be compared of which nobody knows the tokens. The hashes are never those of
// an engine's blocks. The text comes in pieces, of which no copy is made but of what lies across two
// blocks; where it is cut does not matter. Use begins with Reset. It is not safe for concurrent use.
type Text struct {
	seed   uint64
	window int // bytes in a block; 0 hashes nothing
	most   int // further blocks
	blocks []uint64
	part   []byte // of the next block
	bytes  int    // that came
}

// bytesPerToken is what of a text counts as a token.
const bytesPerToken = 4

// Reset begins a new text, of which no more than so many blocks are hashed; the memory of the one before
// is used again. Of o only BlockSize, LoRA and Salt matter.
func (t *Text) Reset(o Options, most int) {
	t.seed, t.window, t.most, t.bytes = Seed(o.LoRA, o.Salt), bytesPerToken*max(o.BlockSize, 0), most, 0
	t.blocks, t.part = t.blocks[:0], t.part[:0]
}

// Add continues the text.
func (t *Text) Add(piece []byte) {
	t.bytes += len(piece)
	if t.full() {
		return
	}
	if n := len(t.part); n > 0 {
		n = min(t.window-n, len(piece))
		t.part = append(t.part, piece[:n]...)
		if len(t.part) < t.window {
			return
		}
		t.put(t.part)
		t.part, piece = t.part[:0], piece[n:]
	}
	t.blocks = slices.Grow(t.blocks, min(len(piece)/t.window, t.most-len(t.blocks)))
	for ; len(piece) >= t.window && !t.full(); piece = piece[t.window:] {
		t.put(piece[:t.window])
	}
	if !t.full() {
		t.part = append(t.part, piece...)
	}
}

func (t *Text) full() bool { return t.window == 0 || len(t.blocks) >= t.most }

func (t *Text) put(block []byte) { t.blocks = append(t.blocks, xxh3.HashSeed(block, t.seed)) }

// Tokens is how many four bytes there are, a last one that is not whole included.
func (t *Text) Tokens() int { return (t.bytes + bytesPerToken - 1) / bytesPerToken }

// Blocks ends the text and returns the hashes of its complete blocks. They are good until Reset.
func (t *Text) Blocks() []uint64 {
	if n := len(t.part); n > 0 && t.window-n < bytesPerToken { // zeros make the last token whole, and that the block
		t.part = append(t.part, make([]byte, t.window-n)...)
		t.put(t.part)
		t.part = t.part[:0]
	}
	return t.blocks
}
