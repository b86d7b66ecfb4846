package sim

import (
	"math/bits"
	"time"
)

// lateness is a histogram of delays from 1 µs on, each bucket at most an eighth wider than the
// one before; its size is fixed.
type lateness struct {
	buckets [40 * 8]uint64
	count   uint64
	longest time.Duration
}

func (l *lateness) add(d time.Duration) {
	d = max(d, 0)
	l.buckets[bucket(d)]++
	l.count++
	l.longest = max(l.longest, d)
}

// merge adds all of o.
func (l *lateness) merge(o *lateness) {
	for i, n := range o.buckets {
		l.buckets[i] += n
	}
	l.count += o.count
	l.longest = max(l.longest, o.longest)
}

// quantile is the upper end of the bucket in which the share q of all delays is reached, and
// never above the longest; 0 if there were none.
func (l *lateness) quantile(q float64) time.Duration {
	rank := uint64(q * float64(l.count))
	seen := uint64(0)
	for i, n := range l.buckets {
		seen += n
		if seen > rank {
			return min(upper(i), l.longest)
		}
	}
	return l.longest
}

// bucket numbers 0..7 µs singly, then splits each power of two into eight.
func bucket(d time.Duration) int {
	us := uint64(d / time.Microsecond)
	if us < 8 {
		return int(us)
	}
	exp := bits.Len64(us) - 4 // us>>exp is within 8..15
	return min(8+exp*8+int(us>>exp)-8, len(lateness{}.buckets)-1)
}

// upper is the end of bucket i, which is the begin of the next.
func upper(i int) time.Duration {
	if i++; i < 8 {
		return time.Duration(i) * time.Microsecond
	}
	exp, part := (i-8)/8, (i-8)%8
	return time.Duration(8+part) << exp * time.Microsecond
}
