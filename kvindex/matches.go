package kvindex

import (
	"cmp"
	"math"
	"slices"

	"spillway/worker"
)

// Match is how many leading blocks of a prompt one rank holds. At least one number is not 0.
type Match struct {
	Rank   worker.Rank
	Device int // leading blocks on the device
	Host   int // further blocks in pinned host memory
	Disk   int // further blocks on disk, or in external storage after that
}

// Matches is the answer to a query. The zero value is ready; one that is used again keeps its
// memory, so that queries allocate nothing. It is not safe for concurrent use.
type Matches struct {
	Ranks []Match // each rank that holds something, once, in no particular order; see Sort

	scratch
}

// Sort puts Ranks in order of worker, then DP rank.
func (m *Matches) Sort() {
	slices.SortFunc(m.Ranks, func(a, b Match) int {
		return cmp.Or(cmp.Compare(a.Rank.Worker, b.Rank.Worker), cmp.Compare(a.Rank.DP, b.Rank.DP))
	})
}

// Rank returns the match of one rank, which is zero but for its Rank if it holds nothing. It looks
// through all matches.
func (m *Matches) Rank(r worker.Rank) Match {
	for _, x := range m.Ranks {
		if x.Rank == r {
			return x
		}
	}
	return Match{Rank: r}
}

// Overlap is what a worker has of a prompt, in blocks: for each number the most that one of its
// ranks has, so they may come from different ranks. GPU <= CPU <= Disk.
type Overlap struct {
	GPU  int // on the device
	CPU  int // the same, and what host memory adds
	Disk int // the same, and what disk and external storage add; also the longest match
}

// Add takes one rank's match into account.
func (o *Overlap) Add(m Match) {
	o.GPU = max(o.GPU, m.Device)
	o.CPU = max(o.CPU, m.Device+m.Host)
	o.Disk = max(o.Disk, m.Device+m.Host+m.Disk)
}

// Worker returns the overlap of one worker. It looks through all matches.
func (m *Matches) Worker(id worker.ID) Overlap {
	var o Overlap
	for _, x := range m.Ranks {
		if x.Rank.Worker == id {
			o.Add(x)
		}
	}
	return o
}

// Tokens is a number of blocks in tokens; what no uint32 can hold is its largest value.
func Tokens(blocks, blockSize int) uint32 {
	if n := uint64(blocks) * uint64(blockSize); n <= math.MaxUint32 {
		return uint32(n)
	}
	return math.MaxUint32
}
