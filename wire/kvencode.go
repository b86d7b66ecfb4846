package wire

import (
	"github.com/tinylib/msgp/msgp"
)

// KVLayout is how a batch of KV events is laid out. Engines have changed it more than once.
type KVLayout uint8

// The layouts.
const (
	KVArrays KVLayout = iota // events are arrays, vLLM's before 0.24
	KVMaps                   // events are maps
)

// KVPublished is an event as an engine publishes it.
type KVPublished struct {
	Kind      KVKind
	Hashes    []uint64 // the engine's, of a store's or remove's blocks
	Parent    uint64   // valid with HasParent: the block before the first of a store
	HasParent bool
	Tokens    []uint32 // of a store's blocks, BlockSize each
	BlockSize uint32   // of a store
}

// AppendKVBatch appends to dst the payload of a batch, as vLLM would publish it for blocks on the
// device. seconds is its time since 1970.
func AppendKVBatch(dst []byte, layout KVLayout, seconds float64, dp uint32, events []KVPublished) []byte {
	b := msgp.AppendArrayHeader(dst, 3)
	b = msgp.AppendFloat64(b, seconds)
	b = msgp.AppendArrayHeader(b, uint32(len(events)))
	for i := range events {
		if layout == KVMaps {
			b = events[i].appendMap(b)
		} else {
			b = events[i].appendArray(b)
		}
	}
	return msgp.AppendUint32(b, dp)
}

const deviceMedium = "GPU"

func (e *KVPublished) appendArray(b []byte) []byte {
	switch e.Kind {
	case KVStore:
		b = msgp.AppendString(msgp.AppendArrayHeader(b, 9), "BlockStored")
		b = e.appendParent(appendHashes(b, e.Hashes))
		b = msgp.AppendUint32(appendTokenIDs(b, e.Tokens), e.BlockSize)
		b = msgp.AppendNil(b) // lora_id
		b = msgp.AppendString(b, deviceMedium)
		b = msgp.AppendNil(b) // lora_name
		return e.appendExtraKeys(b)
	case KVRemove:
		b = msgp.AppendString(msgp.AppendArrayHeader(b, 3), "BlockRemoved")
		return msgp.AppendString(appendHashes(b, e.Hashes), deviceMedium)
	}
	return msgp.AppendString(msgp.AppendArrayHeader(b, 1), "AllBlocksCleared")
}

func (e *KVPublished) appendMap(b []byte) []byte {
	key := func(name string) { b = msgp.AppendString(b, name) }
	switch e.Kind {
	case KVStore:
		b = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(b, 12), "type"), "BlockStored")
		key("block_hashes")
		b = appendHashes(b, e.Hashes)
		key("parent_block_hash")
		b = e.appendParent(b)
		key("token_ids")
		b = appendTokenIDs(b, e.Tokens)
		key("block_size")
		b = msgp.AppendUint32(b, e.BlockSize)
		key("lora_id")
		b = msgp.AppendNil(b)
		key("medium")
		b = msgp.AppendString(b, deviceMedium)
		key("lora_name")
		b = msgp.AppendNil(b)
		key("extra_keys")
		b = e.appendExtraKeys(b)
		key("group_idx")
		b = msgp.AppendUint32(b, 0)
		key("kv_cache_spec_kind")
		b = msgp.AppendString(b, "full_attention")
		key("kv_cache_spec_sliding_window")
		return msgp.AppendNil(b)
	case KVRemove:
		b = msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(b, 4), "type"), "BlockRemoved")
		key("block_hashes")
		b = appendHashes(b, e.Hashes)
		key("medium")
		b = msgp.AppendString(b, deviceMedium)
		key("group_idx")
		return msgp.AppendUint32(b, 0)
	}
	return msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(b, 1), "type"), "AllBlocksCleared")
}

func (e *KVPublished) appendParent(b []byte) []byte {
	if !e.HasParent {
		return msgp.AppendNil(b)
	}
	return msgp.AppendUint64(b, e.Parent)
}

// appendExtraKeys says of each block that nothing but tokens has gone into its hash.
func (e *KVPublished) appendExtraKeys(b []byte) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(e.Hashes)))
	for range e.Hashes {
		b = msgp.AppendNil(b)
	}
	return b
}

func appendHashes(b []byte, hashes []uint64) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(hashes)))
	for _, h := range hashes {
		b = msgp.AppendUint64(b, h)
	}
	return b
}

func appendTokenIDs(b []byte, tokens []uint32) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(tokens)))
	for _, t := range tokens {
		b = msgp.AppendUint32(b, t)
	}
	return b
}
