package engine

import (
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

type phase uint8

const (
	waiting    phase = iota // in the queue, holds nothing
	prefilling              // holds a slot and its blocks; waits for its turn or is computed
	decoding                // holds a slot and its blocks; gets tokens by steps
	ended                   // finished or aborted
)

// sequence is one request in the engine.
type sequence struct {
	id        uint64
	prompt    []uint32
	output    []uint32
	priority  int
	arrival   uint64 // order of submission
	phase     phase
	place     int  // index in the queue while waiting
	inStep    bool // gets a token at the end of the present step
	generated int  // output tokens so far

	blocks []int32
	hashes []uint64 // of complete blocks, as far as known; output extends them

	prefillTokens int // what a prefill makes ready: the prompt and the output so far
	prefillCached int // of these, what the cache held when its turn came
	cached        int // prefillCached of the first prefill, or -1
}

// tokens is the length of prompt and output so far.
func (s *sequence) tokens() int { return len(s.prompt) + s.generated }

// before says whether s goes first: lower priority value, then earlier arrival.
func (s *sequence) before(o *sequence) bool {
	if s.priority != o.priority {
		return s.priority < o.priority
	}
	return s.arrival < o.arrival
}

// hash extends s.hashes to the first blocks complete blocks. The hash of a block is chained:
// that of the block before it seeds it, so equal hashes mean equal prefixes. scratch is reused
// memory, returned for the next call.
func (s *sequence) hash(blocks, blockSize int, scratch []byte) []byte {
	parent := uint64(0)
	if n := len(s.hashes); n > 0 {
		parent = s.hashes[n-1]
	}
	for i := len(s.hashes); i < blocks; i++ {
		scratch = scratch[:0]
		for j := i * blockSize; j < (i+1)*blockSize; j++ {
			scratch = binary.LittleEndian.AppendUint32(scratch, s.token(j))
		}
		parent = xxh3.HashSeed(scratch, parent)
		s.hashes = append(s.hashes, parent)
	}
	return scratch
}

func (s *sequence) token(i int) uint32 {
	if i < len(s.prompt) {
		return s.prompt[i]
	}
	return s.output[i-len(s.prompt)]
}

// appendTokens appends the tokens from number from up to number to.
func (s *sequence) appendTokens(dst []uint32, from, to int) []uint32 {
	p := len(s.prompt)
	dst = append(dst, s.prompt[min(from, p):min(to, p)]...)
	return append(dst, s.output[max(from-p, 0):max(to-p, 0)]...)
}

// queue holds waiting sequences as a heap for container/heap, first to go on top.
type queue []*sequence

func (q queue) Len() int           { return len(q) }
func (q queue) Less(i, j int) bool { return q[i].before(q[j]) }

func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].place, q[j].place = i, j
}

// Push appends x, a *sequence.
func (q *queue) Push(x any) {
	s := x.(*sequence)
	s.place = len(*q)
	*q = append(*q, s)
}

// Pop removes the last element.
func (q *queue) Pop() any {
	old := *q
	last := len(old) - 1
	s := old[last]
	old[last] = nil
	*q = old[:last]
	return s
}
