// Package kvindex knows which rank holds which KV-cache blocks, and so how much of a prompt each
// rank has already: the longest prefix on its device, and how far lower tiers extend it. It is
// searched by block hashes, which Spillway computes from tokens, and edited through the engines'
// own names for blocks, which need only be stable within one rank.
package kvindex

import "fmt"

// DefaultMaxEntries is the bound of an index that is given none: at 60 to 100 bytes each, between
// 3 and 5 GB.
const DefaultMaxEntries = 50_000_000

// DefaultMaxRanks is far more than any fleet has.
const DefaultMaxRanks = 65536

// DefaultMaxPartitions is room for many tenants: an empty partition takes 0.2 MB.
const DefaultMaxPartitions = 1024

// Config is what an operator may choose.
type Config struct {
	// MaxEntries is how many (block, rank, tier) entries may be held, over all partitions that
	// share the Config's Partitions. A store that could exceed it is refused whole.
	MaxEntries int `koanf:"kv-index-max-entries" usage:"entries (block, rank, tier) that the KV index may hold, at up to 100 bytes each; further blocks are ignored and counted"`

	// MaxRanks is how many ranks one partition may hear of. A batch can name any rank.
	MaxRanks int `koanf:"kv-index-max-ranks" usage:"ranks that the KV index may know in one partition; events of further ones are ignored and counted"`

	// MaxPartitions is how many models and tenants there may be. Names come from clients and peers.
	MaxPartitions int `koanf:"kv-index-max-partitions" usage:"partitions (model and tenant) that may have workers or blocks at a time; workers of further ones are refused"`
}

// DefaultConfig returns the defaults.
func DefaultConfig() Config {
	return Config{MaxEntries: DefaultMaxEntries, MaxRanks: DefaultMaxRanks, MaxPartitions: DefaultMaxPartitions}
}

// Validate returns an error that begins with the key of a bad value.
func (c Config) Validate() error {
	if c.MaxEntries < 1 {
		return fmt.Errorf("kv-index-max-entries: %d is not at least 1", c.MaxEntries)
	}
	if c.MaxRanks < 1 || c.MaxRanks > maxSeats {
		return fmt.Errorf("kv-index-max-ranks: %d is not between 1 and %d", c.MaxRanks, maxSeats)
	}
	if c.MaxPartitions < 1 {
		return fmt.Errorf("kv-index-max-partitions: %d is not at least 1", c.MaxPartitions)
	}
	return nil
}

// Parent is the engine hash of the block that precedes the first block of a store. The zero
// Parent is the root: the first block begins the prompt.
type Parent struct {
	Hash uint64
	Set  bool
}

// After returns the Parent with that engine hash.
func After(engine uint64) Parent { return Parent{Hash: engine, Set: true} }

// Status is what became of a store.
type Status uint8

// What may become of a store. Only after the first two has anything been stored.
const (
	Stored         Status = iota
	DuplicateStore        // all of it was known already, or a lower tier holds something else in its place; a warning
	ParentUnknown         // the rank does not hold the parent on its device
	InvalidBlock          // an engine hash occurs twice, or is the parent; or there are not as many engine as local hashes
	Full                  // there is no room for that many blocks, or for a further rank
)

var statusNames = [...]string{"ok", "duplicate_store", "parent_block_not_found", "invalid_block", "full"}

// String is the word for it in metrics.
func (s Status) String() string { return statusNames[s] }
