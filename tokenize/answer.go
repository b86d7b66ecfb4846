package tokenize

import (
	"encoding/binary"
	"errors"
	"math"
	"sync"
)

// errAnswer is an answer of which no tokens can be made.
var errAnswer = errors.New("tokenize: the answer holds no tokens")

// scratch are slices to parse IDs into, before it is known how many there are.
var scratch = sync.Pool{New: func() any { return new([]uint32) }}

// answered makes tokens of an answer of a route to what was read of a body. The error is errAnswer.
func answered(to route, body []byte, r *reading) (Tokens, error) {
	room := scratch.Get().(*[]uint32)
	defer scratch.Put(room)
	a := answer{ids: (*room)[:0]}
	c := cursor{b: body}
	ok := false
	if to == toRender {
		ok = a.rendered(&c)
	} else {
		ok = a.tokenized(&c)
	}
	*room = a.ids
	if !ok || c.next() != 0 || a.prompts != r.prompts || len(a.ids) == 0 {
		return Tokens{}, errAnswer
	}
	tokens := Tokens{Count: uint64(len(a.ids)), Text: !r.media && !a.features}
	if tokens.Text && a.prompts == 1 {
		tokens.IDs = append(make([]uint32, 0, len(a.ids)), a.ids...)
	}
	return tokens, nil
}

// answer is what is read of one.
type answer struct {
	ids      []uint32 // of all prompts
	prompts  int
	features bool // there are images or the like, whose IDs do not say what they show
}

// tokenized reads {"count":3,"tokens":[1,2,3]}.
func (a *answer) tokenized(c *cursor) bool {
	count, counted, seen := uint64(0), false, false
	a.prompts = 1
	ok := c.object(func(key []byte) (ok bool) {
		switch string(key) {
		case "count":
			c.next()
			counted = true
			count, ok = c.number()
			return ok
		case "tokens":
			a.ids, seen = a.ids[:0], true // where a key is repeated the last one counts
			return a.list(c)
		}
		return c.skip()
	})
	return ok && seen && (!counted || count == uint64(len(a.ids)))
}

// rendered reads {"token_ids":[1,2,3],"features":null}, or an array of such objects.
func (a *answer) rendered(c *cursor) bool {
	if c.next() == '[' {
		return c.array(func() bool { return a.one(c) })
	}
	return a.one(c)
}

func (a *answer) one(c *cursor) bool {
	from, seen := len(a.ids), false
	a.prompts++
	return c.object(func(key []byte) bool {
		switch string(key) {
		case "token_ids":
			a.ids, seen = a.ids[:from], true
			return a.list(c)
		case "features":
			if c.next() != 'n' {
				a.features = true
			}
		}
		return c.skip()
	}) && seen
}

// list reads an array of token IDs. A long prompt has thousands, so row reads most of them.
func (a *answer) list(c *cursor) bool {
	if !c.take('[') {
		return false
	}
	if c.take(']') {
		return true
	}
	for {
		a.row(c)
		c.next()
		id, ok := c.number()
		if !ok || id > math.MaxUint32 {
			return false
		}
		a.ids = append(a.ids, uint32(id))
		switch {
		case c.take(','):
		case c.take(']'):
			return true
		default:
			return false
		}
	}
}

// row reads IDs as far as nothing but digits and a comma makes each, and leaves the rest: the last one,
// and what lies too near to the end. Of long ones it takes eight digits at a time. Of short ones it does
// not: the next ID would have to wait until the length of this one is computed, where it now is guessed.
func (a *answer) row(c *cursor) {
	const (
		all   = 0x0101010101010101
		zeros = '0' * all
	)
	b, ids := c.b[c.i:], a.ids
	for len(b) > maxDigits {
		w := (*[maxDigits + 1]byte)(b)
		id, n := uint64(0), 0
		// Bytes of digits are below 10 now; if one is not, it or what is added to it has the upper bit.
		if digits := binary.LittleEndian.Uint64(w[:]) ^ zeros; (digits+(0x80-10)*all|digits)&(0x80*all) == 0 {
			id, n = eight(digits), 8
		}
		for n < maxDigits && w[n]-'0' <= 9 {
			id = id*10 + uint64(w[n]-'0')
			n++
		}
		if n == 0 || w[n] != ',' || w[0] == '0' && n > 1 || id > math.MaxUint32 {
			break
		}
		ids = append(ids, uint32(id))
		b = b[n+1:]
	}
	c.i, a.ids = len(c.b)-len(b), ids
}

// maxDigits is how many digits an ID has at most.
const maxDigits = 10

// eight is the number of eight decimal digits, one in each byte, the first one in the lowest.
func eight(digits uint64) uint64 {
	digits = (digits*10 + digits>>8) & 0x00ff00ff00ff00ff   // pairs of them
	digits = (digits*100 + digits>>16) & 0x0000ffff0000ffff // pairs of pairs
	return (digits*10000 + digits>>32) & 0x00000000ffffffff
}

// number reads a whole number of at most 18 digits, without leading zeros.
func (c *cursor) number() (n uint64, ok bool) {
	from := c.i
	for c.i < len(c.b) {
		d := c.b[c.i] - '0'
		if d > 9 {
			break
		}
		n = n*10 + uint64(d)
		c.i++
	}
	digits := c.i - from
	return n, digits == 1 || digits > 1 && digits <= 18 && c.b[from] != '0'
}
