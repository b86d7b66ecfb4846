package main

import (
	"context"
	"log/slog"

	"github.com/spf13/cobra"

	"spillway/configs"
	"spillway/replay"
	"spillway/sim"
)

func newReplay(p process) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "replay",
		Short: "Send a trace or a fixed load and report goodput",
		Long: `Sends chat or completion requests at the times that a trace or a rate says, whether or not
earlier ones have been answered, and reports what came back: shed, failed, latencies, and
the throughput of those requests that met the objectives. Ctrl-C ends it with a report of
what there was.`,
		Example: `  spillway replay --rate 20 --isl 1000 --osl 100 --duration 30s
  spillway replay --rate 40 --slo-ttft 2s+2x20000 --slo-itl 50ms --json report.json
  spillway replay --trace mooncake.jsonl --first 10m --speed 2 --spread 3s --seed 7
  spillway replay --rate 5 --url http://127.0.0.1:9001 --stats-url http://127.0.0.1:9001
  spillway replay --rate 5 --via select-service --url http://127.0.0.1:8092`,
	}
	return command(p, cmd, configs.DefaultReplay(), func(configs.Replay) configs.Log { return configs.DefaultLog() },
		func(ctx context.Context, cfg configs.Replay, _ *slog.Logger) error {
			cfg.Replay.Tokenize, cfg.Replay.PrefixHashes = sim.Tokens, sim.PrefixHashes
			_, err := replay.Run(ctx, cfg.Replay, p.stdout)
			return err
		})
}
