package wire

// KVReason is why something of a batch was left out of what it did to the index.
type KVReason uint8

// The reasons, in the order in which they are looked for. Those from KVBlockSize on leave part of
// an event as it is.
const (
	KVMalformed          KVReason = iota // events
	KVUnknownEvent                       // events of a type that we do not know
	KVSecondTier                         // events of a cache that is not the engine's own
	KVUnknownOwner                       // events
	KVIgnoredEvent                       // events that ask for it
	KVNotLocal                           // events of blocks that another rank holds, or nobody knows who
	KVUnknownMedium                      // events
	KVOtherAttention                     // events of blocks that make no prefix
	KVUnknownAttention                   // events
	KVOtherGroup                         // events of a group that an earlier store has shown to make no prefix
	KVUnknownGroup                       // events of a group that no store has told anything of
	KVAmbiguousNamespace                 // stores after a block that two cache salts claim
	KVSelfReference                      // stores that name a block twice
	KVBlockSize                          // stores of blocks of another size; none of them is kept
	KVPlaceholder                        // stores that tell no tokens and a block size of 0, as some vLLM does of blocks in host memory; none is kept
	KVShortTokens                        // stores without tokens for all of their blocks; the first are kept
	KVBadRank                            // batches whose rank is no rank; the listener's is taken
	KVTableFull                          // blocks and groups for whose salt or kind there is no room
	KVReasons                            // how many there are
)

// String is the reason as metrics name it.
func (r KVReason) String() string {
	names := [...]string{
		"malformed_event", "unknown_event", "unsupported_ownership", "unknown_ownership", "ignored_event",
		"non_local_locality", "unknown_medium", "non_main_attention_kind", "unknown_kind",
		"non_main_attention_group", "unlearned_group_idx", "ambiguous_cache_namespace", "self_reference",
		"block_size_mismatch", "placeholder", "short_tokens", "bad_rank", "table_full",
	}
	if r >= KVReasons {
		return "unknown"
	}
	return names[r]
}

// KVCounts are numbers by reason.
type KVCounts [KVReasons]uint64
