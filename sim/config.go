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

	RenderRoutes bool `koanf:"render-routes" usage:"also tell tokens by the render routes of later vLLM, not only at /tokenize"`

	KVEventsPort    int    `koanf:"kv-events-port" usage:"rank r of worker i publishes KV events on port + i*dp-size + r; 0 is off"`
	KVReplayPort    int    `koanf:"kv-replay-port" usage:"likewise, to ask for KV events that were missed; 0 is off"`
	KVReplayBatches int    `koanf:"kv-replay-batches" usage:"batches of KV events that a rank keeps for kv-replay-port, 64 MiB at most"`
	KVEventsLayout  string `koanf:"kv-events-layout" usage:"array, as vLLM before 0.24 has it, or map"`
}

// DefaultConfig is one worker with one rank at 127.0.0.1:9001.
func DefaultConfig() Config {
	return Config{
		Host: "127.0.0.1", Port: 9001, Count: 1, Model: "sim-model",
		DPSize: 1, BlockSize: 16, KVBlocks: 8192, MaxNumSeqs: 64, MaxModelLen: 131072,
		PrefillTokensPerSecond: 20000, ITL: 10 * time.Millisecond, ITLGrowth: 1, Speed: 1,
		KVReplayBatches: 10_000, KVEventsLayout: "array",
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
	return errors.Join(errors.Join(errs...), c.validateKVEvents())
}

// validateKVEvents reports bad settings of KV events.
func (c Config) validateKVEvents() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	ranks := c.Count * c.DPSize
	ports := []struct {
		key        string
		first, num int
	}{{"port", c.Port, c.Count}, {"kv-events-port", c.KVEventsPort, ranks}, {"kv-replay-port", c.KVReplayPort, ranks}}
	for i, p := range ports {
		if p.first == 0 || i == 0 {
			continue
		}
		if p.first < 0 || p.first+p.num-1 > 65535 {
			bad("%s: %d ranks from port %d on need ports within 1..65535", p.key, p.num, p.first)
		}
		for _, o := range ports[:i] {
			if o.first > 0 && o.first < p.first+p.num && p.first < o.first+o.num {
				bad("%s: %d ports from %d on meet the %d of %s from %d on", p.key, p.num, p.first, o.num, o.key, o.first)
			}
		}
	}
	if c.KVReplayPort > 0 && c.KVEventsPort == 0 {
		bad("kv-replay-port: there is nothing to replay without kv-events-port")
	}
	if c.KVReplayBatches < 1 || c.KVReplayBatches > 1<<20 {
		bad("kv-replay-batches: %d is not within 1..%d", c.KVReplayBatches, 1<<20)
	}
	if _, ok := layouts[c.KVEventsLayout]; !ok {
		bad("kv-events-layout: %q is neither array nor map", c.KVEventsLayout)
	}
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
		CacheEvents:            true,
	}
}
