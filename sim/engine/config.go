package engine

import (
	"errors"
	"fmt"
	"math"
	"time"
)

// Config says how fast one rank is and how much it holds. It is read-only after New.
type Config struct {
	PrefillTokensPerSecond float64       // prompt tokens computed per second, above 0
	ITL                    time.Duration // a decode step with one sequence, above 0
	ITLGrowth              float64       // share of ITL that a full batch adds to a step, 0 or more
	MaxNumSeqs             int           // sequence slots, 1 or more
	BlockSize              int           // tokens per KV block, 1 or more
	KVBlocks               int           // KV blocks of the rank, 1 or more
	PrefillStallsDecode    bool          // a decode step stands still while a prefill runs
	Speed                  float64       // divides all times, above 0
	CacheEvents            bool          // keep what happens to the prefix cache, for Engine.CacheEvents to be called
}

// maxKVBlocks keeps block numbers within an int32.
const maxKVBlocks = math.MaxInt32 - 1

// Validate reports every field that New cannot work with, joined.
func (c Config) Validate() error {
	var errs []error
	above := func(name string, v float64) {
		if !(v > 0) || math.IsInf(v, 1) {
			errs = append(errs, fmt.Errorf("engine: %s: %v is not a number above 0", name, v))
		}
	}
	within := func(name string, v, top int) {
		if v < 1 || v > top {
			errs = append(errs, fmt.Errorf("engine: %s: %d is not within 1..%d", name, v, top))
		}
	}
	above("PrefillTokensPerSecond", c.PrefillTokensPerSecond)
	above("ITL", float64(c.ITL))
	above("Speed", c.Speed)
	if !(c.ITLGrowth >= 0) || math.IsInf(c.ITLGrowth, 1) {
		errs = append(errs, fmt.Errorf("engine: ITLGrowth: %v is not a number of 0 or more", c.ITLGrowth))
	}
	within("MaxNumSeqs", c.MaxNumSeqs, 1<<20)
	within("BlockSize", c.BlockSize, 1<<20)
	within("KVBlocks", c.KVBlocks, maxKVBlocks)
	return errors.Join(errs...)
}

// Step is how long a decode step with running decoding sequences takes.
func (c Config) Step(running int) time.Duration {
	growth := c.ITLGrowth * float64(running-1) / float64(c.MaxNumSeqs)
	return atLeastOne(float64(c.ITL) * (1 + growth) / c.Speed)
}

// Prefill is how long computing so many prompt tokens takes.
func (c Config) Prefill(tokens int) time.Duration {
	return atLeastOne(float64(tokens) * c.nanosPerToken())
}

func (c Config) nanosPerToken() float64 {
	return float64(time.Second) / (c.PrefillTokensPerSecond * c.Speed)
}

// atLeastOne rounds to nanoseconds. A span of 0 would let the clock stand still for ever, one
// beyond a year would overflow sums.
func atLeastOne(nanos float64) time.Duration {
	const year = 365 * 24 * time.Hour
	return time.Duration(math.Round(min(max(nanos, 1), float64(year))))
}
