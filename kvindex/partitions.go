package kvindex

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"spillway/worker"
)

// ErrBlockSize is what a registration fails with whose workers have other blocks than the
// partition.
var ErrBlockSize = errors.New("block_size mismatch")

// Partition is the index of one model and tenant. It stays the same object for as long as its
// Partitions, so a handle to it never goes stale.
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
// left may have put there with another one is dropped. Another size is ErrBlockSize.
func (ps *Partitions) Register(name worker.Partition, blockSize int) (*Partition, error) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.byName[name]
	switch {
	case p == nil:
		p = ps.addLocked(name, blockSize)
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
// it has another block size, that is ErrBlockSize: such blocks could never match.
func (ps *Partitions) Recover(name worker.Partition, blockSize int) (*Partition, error) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.byName[name]
	if p == nil {
		return ps.addLocked(name, blockSize), nil
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

func (ps *Partitions) addLocked(name worker.Partition, blockSize int) *Partition {
	p := &Partition{Name: name, Index: newIndex(ps.cfg, &ps.budget)}
	p.blockSize.Store(int64(blockSize))
	ps.byName[name] = p
	return p
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
