package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"spillway/configs"
	"spillway/dispatch"
)

func newDispatch(p process) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "dispatch",
		Short: "Send queued requests that can wait, as far as there is room to spare",
		Long: `Takes requests out of queues in Redis and sends them to a front end while the dispatch budget
says that nobody else needs the room. A request leaves Redis when its result is there: what a process
was working on when it died is sent by another one. Keys and JSON are those of llm-d's batch gateway
and async processor. docs/dispatch.md tells how to write the queues' file.`,
		Example: `  spillway dispatch --transport-config-file queues.json
  spillway dispatch --transport-config-file queues.json --dry-run

  spillway dispatch submit requests.jsonl --deadline 24h
  spillway dispatch status
  spillway dispatch results --count 1000 > results.jsonl
  spillway dispatch cancel ID...`,
	}
	cmd = command(p, cmd, configs.DefaultDispatch(), func(c configs.Dispatch) configs.Log { return c.Log },
		func(ctx context.Context, cfg configs.Dispatch, log *slog.Logger) error {
			return runDispatch(ctx, p, cfg, log)
		})
	cmd.AddCommand(newSubmit(p), newDispatchStatus(p), newResults(p), newCancel(p))
	return cmd
}

// dispatchWitness is told of the steps of messages; only tests of crashes set it.
var dispatchWitness func(dispatch.Step, string)

// useOneProcessor has goroutines run one at a time until undo, unless an operator has said how many may
// (GOMAXPROCS). One processor does some 30,000 messages a second, and with a second one each costs a third
// more: the work on one is a few steps of some microseconds, and most of them would wake somebody.
func useOneProcessor() (undo func()) {
	if os.Getenv("GOMAXPROCS") != "" {
		return func() {}
	}
	runtime.GOMAXPROCS(1)
	return runtime.SetDefaultGOMAXPROCS
}

func runDispatch(ctx context.Context, p process, cfg configs.Dispatch, log *slog.Logger) error {
	metrics := newRegistry()
	d, err := dispatch.New(cfg.Dispatch, p.getenv, metrics, log)
	if err != nil {
		return err
	}
	d.Witness = dispatchWitness
	var doors dispatch.Doors
	for _, door := range []struct {
		ln   *net.Listener
		name string
		port int
	}{{&doors.API, "Dispatcher", cfg.Dispatch.Port}, {&doors.Health, "Health", cfg.Dispatch.HealthPort}, {&doors.Metrics, "Metrics", cfg.Dispatch.MetricsPort}} {
		if *door.ln, err = p.open(ctx, door.name, cfg.Dispatch.Host, door.port); err != nil {
			return fmt.Errorf("dispatch: %w", err)
		}
	}
	defer easeCollector()()
	defer useOneProcessor()()
	return serveFed(ctx, d.Run, func(ctx context.Context) error { return d.Serve(ctx, doors, metrics) })
}

// beforeTheCut is how long before a front end cuts what has not ended its dispatcher takes its own back.
const beforeTheCut = 500 * time.Millisecond

// newInnerDispatcher makes the dispatcher of a front end's own process, and has it answer at the front
// end's operators' address. url is where the front end can be reached.
func newInnerDispatcher(p process, cfg configs.Frontend, f *frontend, url string, log *slog.Logger) (*dispatch.Dispatcher, error) {
	inner, warnings, err := configs.Load(configs.InnerDispatch{Dispatch: configs.DefaultDispatch()}, cfg.DispatchFile, func() []string { return nil }, nil)
	if err != nil {
		return nil, err
	}
	for _, w := range warnings {
		log.Warn("setting of the dispatcher not used", "setting", w)
	}
	c, front := inner.Dispatch.Dispatch, cfg.Serving.Proxy
	c.APIKey = cmp.Or(c.APIKey, front.AdminToken, front.APIKey)
	c.DrainTimeout = max(0, min(c.DrainTimeout, front.DrainDelay+front.DrainTimeout-beforeTheCut))
	c.Inside = &dispatch.Inside{URL: url, APIKey: front.APIKey, Capacity: func(ctx context.Context, pool string) (dispatch.Capacity, error) {
		now, err := f.server.Capacity(ctx, pool, 0)
		return dispatch.Capacity{
			Fullness: now.Fullness, ReadyEndpoints: now.ReadyEndpoints, Requests: now.Capacity.Requests, Tokens: now.Capacity.Tokens, Time: now.Time(),
		}, err
	}}
	d, err := dispatch.New(c, p.getenv, f.metrics, log)
	if err != nil {
		return nil, err
	}
	return d, f.server.Mount("/internal/dispatch/*", d.Handler())
}

// getenv is a variable of the environment, "" if it is not set.
func (p process) getenv(name string) string {
	for _, v := range p.environ() {
		if value, ok := strings.CutPrefix(v, name+"="); ok {
			return value
		}
	}
	return ""
}
