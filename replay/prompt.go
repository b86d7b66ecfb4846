package replay

import (
	"encoding/json"
	"errors"
	"io"
	"strconv"
	"sync"
)

// bytesPerToken is how much text stands for one token, in spillway sim exactly and in common
// tokenizers roughly.
const bytesPerToken = 4

// letters are drawn from for prompt text: printable ASCII that JSON needs not escape, with spaces
// about every fifth character.
const letters = "abcdefghijklmnopqrstuvwxyz      "

// AppendPrompt appends the prompt text of r to dst: 4 bytes of ASCII for each of its ISLTokens.
// Each block is 2048 bytes that depend on its id alone; the last one is cut to the length.
func AppendPrompt(dst []byte, r *Request) []byte {
	want := len(dst) + r.ISLTokens*bytesPerToken
	for i := range blockCount(r.ISLTokens) {
		dst = appendBlock(dst, r.block(i))
	}
	return dst[:want]
}

func appendBlock(dst []byte, id uint64) []byte {
	state := mix(id)
	for range BlockTokens * bytesPerToken / 8 {
		state += 0x9e3779b97f4a7c15
		bits := mix(state)
		dst = append(dst,
			letters[bits&31], letters[bits>>5&31], letters[bits>>10&31], letters[bits>>15&31],
			letters[bits>>20&31], letters[bits>>25&31], letters[bits>>30&31], letters[bits>>35&31])
	}
	return dst
}

// mix is a bijection of 64 bits whose results look random: the finalizer of the SplitMix generator.
func mix(x uint64) uint64 {
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

// bodyMaker builds request bodies. It is read-only once made.
type bodyMaker struct {
	head, mid string // what goes before the prompt, and between it and max_tokens
}

func newBodyMaker(model, endpoint string) bodyMaker {
	name, _ := json.Marshal(model) // a string always has a JSON form
	b := bodyMaker{
		head: `{"model":` + string(name) + `,"messages":[{"role":"user","content":"`,
		mid:  `"}],"stream":true,"stream_options":{"include_usage":true},"temperature":0,"ignore_eos":true,"max_tokens":`,
	}
	if endpoint == "completions" {
		b.head = `{"model":` + string(name) + `,"prompt":"`
		b.mid = `","stream":true,"stream_options":{"include_usage":true},"temperature":0,"ignore_eos":true,"max_tokens":`
	}
	return b
}

// build returns the JSON body that asks for r.
func (b bodyMaker) build(r *Request) []byte {
	// A cut block is generated whole first, hence the room for one more.
	size := len(b.head) + blockCount(r.ISLTokens)*BlockTokens*bytesPerToken + len(b.mid) + 12
	out := make([]byte, 0, size)
	out = append(out, b.head...)
	out = AppendPrompt(out, r)
	out = append(out, b.mid...)
	out = strconv.AppendInt(out, int64(r.OSLTokens), 10)
	return append(out, '}')
}

// onceBody hands out a request body once and lets go of its memory as soon as it has, because an
// http.Request keeps its body for as long as the answer takes. The transport may close it from
// another goroutine than the one that reads.
type onceBody struct {
	mu   sync.Mutex
	rest []byte // guarded by mu; nil when all has been handed out
	shut bool   // guarded by mu
}

func (b *onceBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.shut {
		return 0, errBodyClosed
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
	if len(b.rest) == 0 {
		b.rest = nil
		return n, io.EOF
	}
	return n, nil
}

func (b *onceBody) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rest, b.shut = nil, true
	return nil
}

var errBodyClosed = errors.New("replay: request body is closed")
