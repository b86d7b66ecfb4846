package kvindex

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"spillway/worker"
)

// ErrBlockSize is what a registration fails with whose workers have other blocks than the
// partition.
var ErrBlockSize = errors.New("block_size mismatch")

// ErrPartitions means that there is no room for a further partition.
var ErrPartitions = errors.New("too many partitions")

// Partition is the index of one model and tenant. It stays the same object while workers come and
// go, so a handle to it does not go stale. Only where Config.MaxPartitions are reached are those
// dropped that nobody is registered for and that hold nothing.
type Partition struct {
	Name  worker.Partition // set once, then read-only
	Index *Index           // set once, then read-only

	blockSize  atomic.Int64
	registered bool // guarded by Partitions.mu; else only a dump made it, or its last worker has left
}

// BlockSize is tokens per block.
func (p *Partition) BlockSize() int { return int(p.blockSize.Load()) }

// Partitions holds the index of each model and tenant. It is safe for concurrent use.
type Partitions struct {
	cfg    Config
	budget budget
	mu     sync.RWMutex // guards what follows; may be held while locks of an Index are taken
	byName map[worker.Partition]*Partition
}

// NewPartitions returns a Partitions that holds nothing.
func NewPartitions(cfg Config) *Partitions {
	return &Partitions{cfg: cfg, budget: budget{limit: int64(cfg.MaxEntries)}, byName: map[worker.Partition]*Partition{}}
}

// Register returns the partition for a worker with blocks of that many tokens, and makes it if
// there is none. The first registration fixes the block size: what a dump or workers that have
// left may have put there with another one is dropped. Another size is ErrBlockSize. It fails with
// ErrPartitions if there is none and no room for it.
func (ps *Partitions) Register(name worker.Partition, blockSize int) (*Partition, error) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.byName[name]
	switch {
	case p == nil:
		var err error
		if p, err = ps.addLocked(name, blockSize); err != nil {
			return nil, err
		}
	case p.BlockSize() == blockSize:
	case p.registered:
		return nil, mismatch(p, blockSize)
	default:
		p.Index.Reset()
		p.blockSize.Store(int64(blockSize))
	}
	p.registered = true
	return p, nil
}

// Recover returns the partition for blocks from a peer's dump, and makes it if there is none. If
// it has another block size, that is ErrBlockSize: such blocks could never match. It fails with
// ErrPartitions if there is none and no room for it.
func (ps *Partitions) Recover(name worker.Partition, blockSize int) (*Partition, error) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.byName[name]
	if p == nil {
		return ps.addLocked(name, blockSize)
	}
	if p.BlockSize() != blockSize {
		return nil, mismatch(p, blockSize)
	}
	return p, nil
}

func mismatch(p *Partition, blockSize int) error {
	return fmt.Errorf("%w for model %q, tenant %q: existing=%d requested=%d",
		ErrBlockSize, p.Name.Model, p.Name.Tenant, p.BlockSize(), blockSize)
}

func (ps *Partitions) addLocked(name worker.Partition, blockSize int) (*Partition, error) {
	if len(ps.byName) >= ps.cfg.MaxPartitions {
		maps.DeleteFunc(ps.byName, func(_ worker.Partition, p *Partition) bool { return !p.registered && p.Index.Entries() == 0 })
	}
	if len(ps.byName) >= ps.cfg.MaxPartitions {
		return nil, fmt.Errorf("%w: there are %d", ErrPartitions, len(ps.byName))
	}
	p := &Partition{Name: name, Index: newIndex(ps.cfg, &ps.budget)}
	p.blockSize.Store(int64(blockSize))
	ps.byName[name] = p
	return p, nil
}

// Withdraw takes back a Register of a worker that could not be had after all, and is the only one.
// What a dump has put into the partition stays.
func (ps *Partitions) Withdraw(name worker.Partition) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if p := ps.byName[name]; p != nil {
		p.registered = false
	}
}

// Release empties a partition whose last worker has been deregistered. The next registration
// may choose another block size.
func (ps *Partitions) Release(name worker.Partition) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if p := ps.byName[name]; p != nil {
		p.Index.Reset()
		p.registered = false
	}
}

// Partition returns the partition of that name, or nil if there never was one.
func (ps *Partitions) Partition(name worker.Partition) *Partition {
	ps.mu.RLock()
	defer ps.mu.RUnlock()
	return ps.byName[name]
}

// All returns the partitions by model, then tenant.
func (ps *Partitions) All() []*Partition {
	ps.mu.RLock()
	all := make([]*Partition, 0, len(ps.byName))
	for _, p := range ps.byName {
		all = append(all, p)
	}
	ps.mu.RUnlock()
	slices.SortFunc(all, func(a, b *Partition) int {
		return cmp.Or(cmp.Compare(a.Name.Model, b.Name.Model), cmp.Compare(a.Name.Tenant, b.Name.Tenant))
	})
	return all
}

// Entries is how many entries all partitions hold together, and how many they may.
func (ps *Partitions) Entries() (held, limit int) {
	return int(ps.budget.used.Load()), ps.cfg.MaxEntries
}
