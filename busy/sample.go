package busy

import (
	"math"
	"time"

	"spillway/worker"
)

// Source tells where a sample comes from. Sources never overwrite each other.
type Source uint8

// The sources.
const (
	Scrape Source = iota // the metrics page of the worker
	Event                // the event plane: the worker itself, or other routers' books
	numSources
)

// String is the word that metrics use.
func (s Source) String() string {
	if s == Event {
		return "event"
	}
	return "scrape"
}

// Sample is what one source said about one rank. A nil value is not in this sample, and the
// one that is held stays in force.
type Sample struct {
	Rank    worker.Rank // DP is the engine's own label
	Source  Source
	TakenAt time.Time // when the value was asked for, on the clock of the callers' now

	DecodeBlocks        *uint64  // KV blocks promised by other routers, in all
	KVUsedBlocks        *uint64  // KV blocks in use
	KVUsageRatio        *float64 // the same as a fraction; anything but a finite number >= 0 is ignored
	KVTotalBlocks       *uint64  // per rank; 0 is unknown
	PrefillTokens       *uint64  // promised by other routers, or an estimate from the engine's queue
	MaxNumBatchedTokens *uint64  // tokens per engine step; 0 is unknown
	Running             *uint64  // requests
	Waiting             *uint64  // requests
	BlockSize           *uint64  // tokens per block
}

// field is one value of a sample; the ratio comes last because it is no count.
type field uint8

const (
	decodeBlocks field = iota
	usedBlocks
	totalBlocks
	prefillTokens
	batchedTokens
	running
	waiting
	blockSize
	numCounts
	usageRatio = numCounts
)

// record is the last value of each field from one source. The zero record holds nothing.
type record struct {
	takenAt time.Time         // of the newest sample merged
	has     uint16            // bit per field
	counts  [numCounts]uint64 // 0 where not known
	ratio   float64
}

// merge lays the values that s has over the record's.
func (r *record) merge(s *Sample) {
	r.takenAt = s.TakenAt
	for f, v := range [numCounts]*uint64{
		s.DecodeBlocks, s.KVUsedBlocks, s.KVTotalBlocks, s.PrefillTokens,
		s.MaxNumBatchedTokens, s.Running, s.Waiting, s.BlockSize,
	} {
		if v != nil {
			r.counts[f] = *v
			r.has |= 1 << f
		}
	}
	if v := s.KVUsageRatio; v != nil && *v >= 0 && *v <= math.MaxFloat64 {
		r.ratio = *v
		r.has |= 1 << usageRatio
	}
}

// keep forgets all but the given fields. What is not known stays 0.
func (r *record) keep(fields ...field) {
	kept := record{takenAt: r.takenAt}
	for _, f := range fields {
		if r.known(f) {
			kept.has |= 1 << f
			kept.counts[f] = r.counts[f]
		}
	}
	if kept.has == 0 {
		kept = record{}
	}
	*r = kept
}

func (r *record) known(f field) bool { return r.has&(1<<f) != 0 }

// held reports whether there is a sample.
func (r *record) held() bool { return r.has != 0 }

// empty reports whether the sample says nothing that could be stored.
func (s *Sample) empty() bool {
	var r record
	r.merge(s)
	return r.has == 0
}
