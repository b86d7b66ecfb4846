package sim

import (
	"errors"
	"fmt"
	"math"
	"time"

	"spillway/sim/engine"
)

// Config says how many workers a process simulates and how fast each of their ranks is. It is
// a value, read-only after New.
type Config struct {
	Host  string `koanf:"host" usage:"address to listen on"`
	Port  int    `koanf:"port" usage:"port of worker 0; worker i listens on port + i; 0 takes free ones"`
	Count int    `koanf:"count" usage:"number of workers"`
	Model string `koanf:"model" usage:"name of the served model"`

	DPSize      int `koanf:"dp-size" usage:"data-parallel ranks per worker; each is an engine of its own"`
	BlockSize   int `koanf:"block-size" usage:"tokens per KV block"`
	KVBlocks    int `koanf:"kv-blocks" usage:"KV blocks per rank"`
	MaxNumSeqs  int `koanf:"max-num-seqs" usage:"sequences that a rank runs at a time; the others wait"`
	MaxModelLen int `koanf:"max-model-len" usage:"tokens that prompt and output of a request may have together"`

	PrefillTokensPerSecond float64       `koanf:"prefill-tokens-per-second" usage:"prompt tokens that a rank computes per second"`
	ITL                    time.Duration `koanf:"itl" usage:"duration of a decode step with one sequence"`
	ITLGrowth              float64       `koanf:"itl-growth" usage:"share of itl that a full rank adds to a decode step"`
	PrefillStallsDecode    bool          `koanf:"prefill-stalls-decode" usage:"make decoding stand still while a prompt is computed"`
	Speed                  float64       `koanf:"speed" usage:"divides all simulated times"`
}

// DefaultConfig is one worker with one rank at 127.0.0.1:9001.
func DefaultConfig() Config {
	return Config{
		Host: "127.0.0.1", Port: 9001, Count: 1, Model: "sim-model",
		DPSize: 1, BlockSize: 16, KVBlocks: 8192, MaxNumSeqs: 64, MaxModelLen: 131072,
		PrefillTokensPerSecond: 20000, ITL: 10 * time.Millisecond, ITLGrowth: 1, Speed: 1,
	}
}

// maxRanks bounds the ranks of one process, each of which has a goroutine and a KV memory.
const maxRanks = 4096

// Validate reports every bad setting, each beginning with its key.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	within := func(key string, v, low, top int) {
		if v < low || v > top {
			bad("%s: %d is not within %d..%d", key, v, low, top)
		}
	}
	above := func(key string, v float64) {
		if !(v > 0) || math.IsInf(v, 1) {
			bad("%s: %v is not a number above 0", key, v)
		}
	}
	within("port", c.Port, 0, 65535)
	within("count", c.Count, 1, maxRanks)
	within("dp-size", c.DPSize, 1, maxRanks)
	if c.Port > 0 && c.Port+c.Count-1 > 65535 {
		bad("count: %d workers from port %d on need ports above 65535", c.Count, c.Port)
	}
	if c.Count*c.DPSize > maxRanks {
		bad("dp-size: %d workers of %d ranks are more than %d ranks", c.Count, c.DPSize, maxRanks)
	}
	if c.Model == "" {
		bad("model: is empty")
	}
	within("block-size", c.BlockSize, 1, 1<<20)
	within("kv-blocks", c.KVBlocks, 1, 1<<26)
	within("max-num-seqs", c.MaxNumSeqs, 1, 1<<20)
	within("max-model-len", c.MaxModelLen, 2, 1<<28)
	above("prefill-tokens-per-second", c.PrefillTokensPerSecond)
	if c.ITL <= 0 {
		bad("itl: %v is not above 0", c.ITL)
	}
	if !(c.ITLGrowth >= 0) || math.IsInf(c.ITLGrowth, 1) {
		bad("itl-growth: %v is not a number of 0 or more", c.ITLGrowth)
	}
	above("speed", c.Speed)
	return errors.Join(errs...)
}

func (c Config) engine() engine.Config {
	return engine.Config{
		PrefillTokensPerSecond: c.PrefillTokensPerSecond,
		ITL:                    c.ITL,
		ITLGrowth:              c.ITLGrowth,
		MaxNumSeqs:             c.MaxNumSeqs,
		BlockSize:              c.BlockSize,
		KVBlocks:               c.KVBlocks,
		PrefillStallsDecode:    c.PrefillStallsDecode,
		Speed:                  c.Speed,
	}
}
