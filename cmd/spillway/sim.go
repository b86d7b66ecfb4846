package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"strings"

	"github.com/spf13/cobra"

	"spillway/configs"
	"spillway/sim"
)

func newSim(p process) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "sim",
		Short: "Run simulated inference workers",
		Long: `Runs workers that answer like vLLM, with made-up words, and are as slow as their settings
say: prefill at a rate, decode steps that grow with the batch, a KV cache that fills up.
GET /sim/stats tells what they did, GET /sim/cache what their caches hold. With --kv-events-port
they publish that as vLLM does.

They misbehave on request. POST /sim/fault sets a fault on a worker, GET lists and DELETE clears
them, and the header X-Sim-Fault: NAME[;after_tokens=3] gives one to a single request:

  of the worker         refuse (connections), slow, health-fail, health-ok (while frozen)
  instead of an answer  freeze, reset, close, 429, 500, 502, 503, 503-overload, garbage
  with the answer       both-lengths, oversized-header, silence, reset-stream, close-stream,
                        freeze-stream, eof, garbage-framing, garbage-event, oversized-event,
                        error-event
  of the tokenizer      tokenizer-slow, tokenizer-fail, tokenizer-lie, tokenizer-off

  curl localhost:9001/sim/fault -d '{"fault":"429","count":10,"retry_after":2}'
  curl localhost:9001/sim/fault -d '{"fault":"reset-stream","share":0.1,"after_tokens":5}'
  curl -X DELETE localhost:9001/sim/fault

More keys are worker, seconds, bytes, code, factor, delay_ms and extra_tokens; docs/sim.md explains them.`,
		Example: `  spillway sim                                   # one worker on port 9001
  spillway sim --count 4 --kv-blocks 2048        # four small ones on 9001 to 9004
  spillway sim --kv-events-port 5557 --kv-replay-port 5657
  spillway sim --itl 20ms --prefill-tokens-per-second 8000 --speed 10`,
	}
	return command(p, cmd, configs.DefaultSim(), func(c configs.Sim) configs.Log { return c.Log },
		func(ctx context.Context, cfg configs.Sim, log *slog.Logger) error { return runSim(ctx, p, cfg, log) })
}

func runSim(ctx context.Context, p process, cfg configs.Sim, log *slog.Logger) error {
	workers, err := sim.New(cfg.Sim, log)
	if err != nil {
		return err
	}
	lns, err := sim.Listen(cfg.Sim)
	if err != nil {
		return err
	}
	fmt.Fprintf(p.stdout, "Workers of %s for --workers: %s\n", cfg.Sim.Model, strings.Join(endpoints(lns), ","))
	return workers.Run(ctx, lns)
}

// endpoints are the base URLs that listeners answer on.
func endpoints(lns []net.Listener) []string {
	urls := make([]string, len(lns))
	for i, ln := range lns {
		urls[i] = "http://" + reachable(ln.Addr())
	}
	return urls
}

// reachable is an address that this machine's clients can connect to: a listener on all
// addresses is also on the loopback one.
func reachable(addr net.Addr) string {
	tcp, ok := addr.(*net.TCPAddr)
	if !ok || !tcp.IP.IsUnspecified() {
		return addr.String()
	}
	return net.JoinHostPort("127.0.0.1", fmt.Sprint(tcp.Port))
}
