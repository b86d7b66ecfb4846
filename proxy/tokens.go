package proxy

import (
	"context"

	"spillway/worker"
)

// Prompt is a request whose tokens are wanted.
type Prompt struct {
	Partition worker.Partition // where it is decided
	Served    string           // model name that workers are asked for
	Chat      bool             // the body is one of chat completions, else of completions
	Body      []byte           // as the client sent it, valid JSON; read-only, and good during the call only
}

// Tokens is what is known of the tokens of a prompt.
type Tokens struct {
	IDs   []uint32 // exactly those that the worker will see, or nil; read-only, since a cache may share them
	Count uint64   // of them, 0 if it is not known either
	Rough bool     // the worker may count otherwise, as with images; Counted is not told then
}

// Tokenizer tells what tokens prompts become. Both functions may be called by many at a time.
type Tokenizer struct {
	// Tokenize returns the tokens of a prompt, as far as it finds them out in time. It returns no
	// error: a request goes on without. ctx ends with the client's request.
	Tokenize func(ctx context.Context, p Prompt) Tokens

	// Counted is told what a worker has counted (usage.prompt_tokens) where Tokenize had told a Count
	// that is not Rough.
	Counted func(p worker.Partition, counted, actual uint64)
}

// TokenizeBy has t tell the tokens of prompts in mode kv, where they matter. It is called before Run.
func (s *Server) TokenizeBy(t Tokenizer) { s.tokenizer = t }
