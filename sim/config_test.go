package sim_test

import (
	"log/slog"
	"math"
	"strings"
	"testing"

	"spillway/sim"
)

func TestConfigValidate(t *testing.T) {
	if err := sim.DefaultConfig().Validate(); err != nil {
		t.Fatalf("DefaultConfig().Validate() = %v", err)
	}
	for _, tt := range []struct {
		want   string
		change func(*sim.Config)
	}{
		{"port: 70000 is not within 0..65535", func(c *sim.Config) { c.Port = 70000 }},
		{"count: 0 is not within 1..4096", func(c *sim.Config) { c.Count = 0 }},
		{"count: 10 workers from port 65530 on", func(c *sim.Config) { c.Port, c.Count = 65530, 10 }},
		{"dp-size: 0 is", func(c *sim.Config) { c.DPSize = 0 }},
		{"dp-size: 100 workers of 100 ranks", func(c *sim.Config) { c.Count, c.DPSize = 100, 100 }},
		{"model: is empty", func(c *sim.Config) { c.Model = "" }},
		{"block-size: 0 is", func(c *sim.Config) { c.BlockSize = 0 }},
		{"kv-blocks: 0 is", func(c *sim.Config) { c.KVBlocks = 0 }},
		{"max-num-seqs: 0 is", func(c *sim.Config) { c.MaxNumSeqs = 0 }},
		{"max-model-len: 1 is", func(c *sim.Config) { c.MaxModelLen = 1 }},
		{"prefill-tokens-per-second: 0 is", func(c *sim.Config) { c.PrefillTokensPerSecond = 0 }},
		{"prefill-tokens-per-second: NaN is", func(c *sim.Config) { c.PrefillTokensPerSecond = math.NaN() }},
		{"itl: 0s is", func(c *sim.Config) { c.ITL = 0 }},
		{"itl-growth: -1 is", func(c *sim.Config) { c.ITLGrowth = -1 }},
		{"speed: +Inf is", func(c *sim.Config) { c.Speed = math.Inf(1) }},
		{"kv-events-port: 1 ranks from port -1 on", func(c *sim.Config) { c.KVEventsPort = -1 }},
		{"kv-events-port: 4 ranks from port 65533 on", func(c *sim.Config) { c.KVEventsPort, c.Count, c.DPSize = 65533, 2, 2 }},
		{"kv-events-port: 2 ports from 9000 on meet the 1 of port", func(c *sim.Config) { c.KVEventsPort, c.DPSize = 9000, 2 }},
		{"kv-replay-port: 2 ports from 5558 on meet the 2 of kv-events-port",
			func(c *sim.Config) { c.KVEventsPort, c.KVReplayPort, c.DPSize = 5557, 5558, 2 }},
		{"kv-replay-port: there is nothing to replay", func(c *sim.Config) { c.KVReplayPort = 5557 }},
		{"kv-replay-batches: 0 is not", func(c *sim.Config) { c.KVReplayBatches = 0 }},
		{`kv-events-layout: "list" is neither`, func(c *sim.Config) { c.KVEventsLayout = "list" }},
	} {
		cfg := sim.DefaultConfig()
		tt.change(&cfg)
		err := cfg.Validate()
		if err == nil || !strings.HasPrefix(err.Error(), tt.want) {
			t.Errorf("Validate() = %v, want %s...", err, tt.want)
		}
		if _, err := sim.New(cfg, slog.New(slog.DiscardHandler)); err == nil {
			t.Errorf("New with %s = nil, want an error", tt.want)
		}
	}
}
