package sim

import (
	"strings"

	"github.com/zeebo/xxh3"
)

// tokenBytes is how much text one token stands for.
const tokenBytes = 4

// appendText cuts text into tokens of four bytes, the last of which may be shorter. A token's
// ID is a hash of its bytes, so that text of the same beginning has tokens of the same
// beginning in every process. Characters are cut like anything else.
func appendText(ids []uint32, text string) []uint32 {
	for len(text) > tokenBytes {
		ids = append(ids, tokenID(text[:tokenBytes]))
		text = text[tokenBytes:]
	}
	if text != "" {
		ids = append(ids, tokenID(text))
	}
	return ids
}

// Tokens are those that a worker makes of a prompt: of a completion or, with chat, of a conversation
// whose only message, of a user, it is.
func Tokens(text string, chat bool) []uint32 {
	ids := make([]uint32, 0, len(text)/tokenBytes+8)
	if !chat {
		return appendText(ids, text)
	}
	return appendHead(appendEnd(appendText(appendHead(ids, "user"), text)), "assistant")
}

func tokenID(text string) uint32 { return uint32(xxh3.HashString(text)) }

// The chat template: a message is its role between two marks, its text and an end mark, 4
// tokens beside the text. The prompt to generate is the head of an assistant's message, 3
// tokens: so a conversation that goes on begins with the tokens of prompt and answer before.
func appendHead(ids []uint32, role string) []uint32 {
	return append(ids, tokenID("<|head|>"), tokenID("<|role|>"+role), tokenID("<|text|>"))
}

func appendEnd(ids []uint32) []uint32 { return append(ids, tokenID("<|end|>")) }

// words is generated text: word i depends on the seed and i alone and is one token.
type words uint64

const (
	consonants = "bdfghjklmnprstvz"
	vowels     = "aeiou"
)

// wordsFor makes text of a prompt: the same prompt has the same answer, except that each
// choice has its own.
func wordsFor(prompt []uint32, choice int) words {
	h := uint64(choice)
	for _, id := range prompt {
		h = mix(h ^ uint64(id))
	}
	return words(h)
}

// appendWord appends word i: three letters and a blank, which need no escapes in JSON.
func (w words) appendWord(dst []byte, i int) []byte {
	h := mix(uint64(w) + uint64(i))
	return append(dst, consonants[h%16], vowels[h>>8%5], consonants[h>>16%16], ' ')
}

// tokens is the first n words as token IDs.
func (w words) tokens(n int) []uint32 {
	ids := make([]uint32, n)
	var word [tokenBytes]byte
	for i := range ids {
		ids[i] = uint32(xxh3.Hash(w.appendWord(word[:0], i)))
	}
	return ids
}

// text is the first n words.
func (w words) text(n int) string {
	var b strings.Builder
	b.Grow(n * tokenBytes)
	var word [tokenBytes]byte
	for i := range n {
		b.Write(w.appendWord(word[:0], i))
	}
	return b.String()
}

// mix scrambles 64 bits reversibly (the finaliser of splitmix64).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
