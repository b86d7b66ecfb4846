package engine

import "time"

// Kind says what an Event tells.
type Kind uint8

// The kinds of events. A sequence has any number of Preempted and Token events and ends with
// one Finished, unless it is aborted.
const (
	Step       Kind = iota + 1 // a decode step ended; ID is 0, the tokens it made follow
	FirstToken                 // the prompt is computed and the first token is there
	Token                      // a further token is there
	Preempted                  // the sequence lost its slot and blocks and waits again
	Finished                   // the sequence ended; it follows its last token
)

// String names the kind for test output.
func (k Kind) String() string {
	switch k {
	case Step:
		return "Step"
	case FirstToken:
		return "FirstToken"
	case Token:
		return "Token"
	case Preempted:
		return "Preempted"
	case Finished:
		return "Finished"
	default:
		return "Kind(?)"
	}
}

// Reason says why a sequence finished.
type Reason uint8

// The reasons of Finished events.
const (
	Complete Reason = iota + 1 // all of Request.Output was generated
	PoolFull                   // prompt and output alone fill every block of the rank
)

// Event is something that happened at a time of its own, which does not depend on how late
// Advance was called.
type Event struct {
	At           time.Time
	ID           uint64 // of the request, or 0 for Step
	Kind         Kind
	Reason       Reason // of Finished, else 0
	Generated    int    // output tokens so far, this one included; of Step, the sequences in it
	CachedTokens int    // of FirstToken and Finished: prompt tokens that the cache held
}

// Stats is the state of a rank and what it has done so far.
type Stats struct {
	Waiting       int    // requests without a slot
	Prefilling    int    // requests with a slot whose prompt is not computed
	Decoding      int    // requests with a slot that get tokens
	UsedBlocks    int    // KV blocks that requests refer to
	CachedBlocks  int    // KV blocks with reusable content that no request refers to
	PromptTokens  uint64 // lengths of the prompts that were computed to their end
	PrefillTokens uint64 // prompt tokens computed, those of restarts and of aborted requests included
	CachedTokens  uint64 // tokens that a prefill found in the cache, those of restarts included
	// QueryTokens and HitTokens count like vLLM's prefix cache counters: prompts looked up, and
	// what was found, once per request.
	QueryTokens     uint64
	HitTokens       uint64
	GeneratedTokens uint64
	Steps           uint64
	Preemptions     uint64
	Finished        uint64
	Aborted         uint64
}

// Running is the number of requests that hold a slot, as vLLM counts them.
func (s Stats) Running() int { return s.Prefilling + s.Decoding }
