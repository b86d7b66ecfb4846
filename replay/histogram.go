package replay

import (
	"math/bits"
	"time"
)

// Histogram counts durations in buckets at most 0.4% wide, in memory that does not grow. The zero
// value is ready. It is not safe for concurrent use.
type Histogram struct {
	counts []uint64 // grown to the highest bucket in use; 115 KB at the very most
	n      uint64
	low    time.Duration
	high   time.Duration
}

// histogramBits is the precision: a bucket is 2^-8 of its value wide.
const histogramBits = 8

// Add counts d; below 0 counts as 0.
func (h *Histogram) Add(d time.Duration) {
	d = max(d, 0)
	i := bucketOf(uint64(d))
	if i >= len(h.counts) {
		h.counts = append(h.counts, make([]uint64, i+1-len(h.counts))...)
	}
	h.counts[i]++
	if h.n == 0 || d < h.low {
		h.low = d
	}
	h.high = max(h.high, d)
	h.n++
}

// Count returns how many durations were added.
func (h *Histogram) Count() uint64 { return h.n }

// Max returns the longest duration added, exactly, and 0 if there was none.
func (h *Histogram) Max() time.Duration { return h.high }

// Percentile returns the smallest duration that p percent (1 to 100) of those added do not exceed,
// within 0.4%, and 0 if there was none.
func (h *Histogram) Percentile(p int) time.Duration {
	rank := (h.n*uint64(p) + 99) / 100
	var seen uint64
	for i, c := range h.counts {
		if seen += c; c > 0 && seen >= rank {
			return min(max(bucketMiddle(i), h.low), h.high)
		}
	}
	return 0
}

// bucketOf numbers the buckets: one for each value below 2^(bits+1), then 2^bits for each doubling.
func bucketOf(v uint64) int {
	if v < 1<<histogramBits {
		return int(v)
	}
	shift := bits.Len64(v) - histogramBits - 1
	return shift<<histogramBits + int(v>>shift)
}

func bucketMiddle(i int) time.Duration {
	if i < 2<<histogramBits {
		return time.Duration(i)
	}
	shift := i>>histogramBits - 1
	first := uint64(i-shift<<histogramBits) << shift
	return time.Duration(first + (1<<shift)/2)
}

// percentileOf returns the p-th percentile of d by nearest rank, exactly, and 0 if d is empty. d
// must be sorted.
func percentileOf(sorted []time.Duration, p int) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[(len(sorted)*p+99)/100-1]
}
