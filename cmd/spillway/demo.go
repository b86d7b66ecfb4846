package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"

	"github.com/spf13/cobra"

	"spillway/configs"
	"spillway/sim"
	"spillway/worker"
)

func newDemo(p process) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run a front end and simulated workers in one process",
		Long: `Runs a front end with thresholds set over simulated workers small enough to be filled from
one terminal: the main job with nothing to install or configure.`,
		Example: `  spillway demo
  spillway demo --http-port 8080 --count 8
  spillway demo --active-decode-blocks-threshold 0.5 --kv-blocks 512`,
	}
	return command(p, cmd, configs.DefaultDemo(), func(c configs.Demo) configs.Log { return c.Serving.Log },
		func(ctx context.Context, cfg configs.Demo, log *slog.Logger) error { return runDemo(ctx, p, cfg, log) })
}

func runDemo(ctx context.Context, p process, cfg configs.Demo, log *slog.Logger) error {
	d, err := listen(ctx, cfg.Serving.Proxy)
	if err != nil {
		return err
	}
	workers, lns, err := demoWorkers(cfg.Sim, log)
	if err != nil {
		return errors.Join(err, d.close())
	}
	f, err := demoFrontend(p, cfg, lns, log)
	if err != nil {
		err = errors.Join(err, d.close())
		for _, l := range lns {
			err = errors.Join(err, l.Close())
		}
		return err
	}

	serving, stopServing := context.WithCancel(ctx)
	defer stopServing()
	working, stopWorking := context.WithCancel(context.WithoutCancel(ctx)) // outlasts the front end's drain
	defer stopWorking()
	worked := make(chan error, 1)
	go func() {
		worked <- workers.Run(working, lns)
		stopServing() // a front end of no workers is no demo
	}()
	welcome(p.stdout, d, endpoints(lns), cfg)
	err = f.run(serving, d)
	stopWorking()
	return errors.Join(err, <-worked)
}

func demoWorkers(cfg sim.Config, log *slog.Logger) (*sim.Server, []net.Listener, error) {
	workers, err := sim.New(cfg, log)
	if err != nil {
		return nil, nil, err
	}
	lns, err := sim.Listen(cfg)
	return workers, lns, err
}

func demoFrontend(p process, cfg configs.Demo, lns []net.Listener, log *slog.Logger) (*frontend, error) {
	fleet := configs.Fleet{KVEventsPort: cfg.Sim.KVEventsPort, KVReplayPort: cfg.Sim.KVReplayPort}
	for i, url := range endpoints(lns) {
		w, err := worker.Worker{
			Endpoint: url, Name: fmt.Sprintf("sim-%d", i), Models: []string{cfg.Sim.Model}, DPSize: uint32(cfg.Sim.DPSize),
		}.Normalize()
		if err != nil {
			return nil, err
		}
		fleet.Workers = append(fleet.Workers, w)
	}
	return newFrontend(p, cfg.Serving, fleet, log)
}

// welcome says where everything is and what to try.
func welcome(out io.Writer, d doors, workers []string, cfg configs.Demo) {
	url, admin := d.url(), d.url()
	fmt.Fprintf(out, "Front end: %s\n", url)
	if d.admin != nil {
		admin = d.adminURL()
		fmt.Fprintf(out, "Admin: %s\n", admin)
	}
	for i, w := range workers {
		fmt.Fprintf(out, "  sim-%d    %s\n", i, w)
	}
	fmt.Fprintf(out, `
Try, in another terminal:

  curl -N %[1]s%[2]s -H 'Content-Type: application/json' \
    -d '{"model":"%[3]s","messages":[{"role":"user","content":"Hello"}],"stream":true,"max_tokens":20}'
  curl %[5]s/busy_threshold
  curl %[1]s%[4]s/%[3]s/ready
  bin/spillway replay --url %[1]s --model %[3]s --rate 30 --isl 1000 --osl 200 --duration 20s

Ctrl-C ends it.
`, url, cfg.Serving.Proxy.ChatPath, cfg.Sim.Model, cfg.Serving.Proxy.ModelsPath, admin)
}
