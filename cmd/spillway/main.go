// Command spillway is a front end for LLM inference workers that sheds load before they drown,
// with simulated workers and a load generator to try it on. Each command builds, runs and stops
// its parts; what they do is in their packages.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"spillway/configs"
	"spillway/logline"
)

// The exit codes.
const (
	exitFailed      = 1   // what was asked for went wrong
	exitUsage       = 2   // what was asked for makes no sense: a flag, a setting, a file of them
	exitInterrupted = 130 // a second signal did not wait for the end
)

func main() {
	ctx, stop := untilSignal(context.Background())
	code := run(ctx, process{stdout: os.Stdout, stderr: os.Stderr, environ: os.Environ}, os.Args[1:])
	stop()
	os.Exit(code)
}

// process is what a command may use of the process it runs in.
type process struct {
	stdout, stderr io.Writer
	environ        func() []string
}

// failure is an error of a command that had begun; every other error is one of usage.
type failure struct{ error }

// Unwrap returns the cause.
func (f failure) Unwrap() error { return f.error }

// run executes one command line and returns the exit code.
func run(ctx context.Context, p process, args []string) int {
	root := newRoot(p)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	for line := range strings.Lines(strings.TrimSpace(err.Error())) {
		fmt.Fprintf(p.stderr, "spillway: %s\n", strings.TrimRight(line, "\n"))
	}
	var began failure
	if errors.As(err, &began) {
		return exitFailed
	}
	return exitUsage
}

func newRoot(p process) *cobra.Command {
	root := &cobra.Command{
		Use:   "spillway",
		Short: "Load-shedding front end for LLM inference",
		Long: `Spillway stands before LLM inference workers with an OpenAI-compatible API, learns how
busy they are, and refuses at once what they could not serve in time.

Each command takes its settings from flags, SPILLWAY_* variables (--drain-timeout is
SPILLWAY_DRAIN_TIMEOUT), documented DYN_* variables (in brackets in the help), and a YAML
file (--config), in this order. Unknown keys and bad values are errors.`,
		Example: `  spillway demo                                         # try it: simulated workers and all
  spillway frontend --workers http://gpu1:8000,http://gpu2:8000
  spillway sim --count 4                                # simulated workers alone
  spillway replay --rate 20 --isl 1000 --osl 100        # load for any OpenAI-compatible server`,
		Version:            version(),
		SilenceErrors:      true,
		SilenceUsage:       true,
		DisableSuggestions: true,
		Args:               cobra.NoArgs,
		RunE:               func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetVersionTemplate("spillway {{.Version}}\n")
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetOut(p.stdout)
	root.SetErr(p.stderr)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w (see %s --help)", err, cmd.CommandPath())
	})
	root.AddCommand(newFrontendCommand(p), newSim(p), newReplay(p), newSelectService(p), newSlotTracker(p), newIndexer(p), newDispatch(p), newDemo(p))
	return root
}

// command completes cmd: its flags are the settings of def, and it runs work with what the
// sources made of them.
func command[C configs.Validator](p process, cmd *cobra.Command, def C, logging func(C) configs.Log,
	work func(context.Context, C, *slog.Logger) error) *cobra.Command {
	configs.Flags(cmd.Flags(), def)
	cmd.Flags().SortFlags = false
	cmd.Version = version()
	cmd.SetVersionTemplate("spillway {{.Version}}\n")
	cmd.Args = cobra.NoArgs
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		path := cmd.Flags().Lookup(configs.PathKey).Value.String()
		cfg, warnings, err := configs.Load(def, path, p.environ, cmd.Flags())
		if err != nil {
			return err
		}
		log, flush := newLogger(p.stderr, logging(cfg))
		defer flush()
		for _, w := range warnings {
			log.Warn("setting not used", "setting", w)
		}
		if err := work(cmd.Context(), cfg, log); err != nil {
			return failure{err}
		}
		return nil
	}
	return cmd
}

// newLogger makes the process's log of valid settings. Lines of level info and below may wait for
// a moment, or for flush, which the process calls before it ends.
func newLogger(w io.Writer, cfg configs.Log) (log *slog.Logger, flush func()) {
	level, err := cfg.Level()
	if err != nil {
		panic("spillway: settings that were not validated: " + err.Error())
	}
	out := &lateWriter{w: w}
	return slog.New(promptHandler{logline.New(out, level, cfg.LogFormat == "json"), out}), out.flush
}

// untilSignal returns a context that ends with the first SIGINT or SIGTERM; a second one ends
// the process. stop gives the signals back.
func untilSignal(parent context.Context) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancel(parent)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		select {
		case <-signals:
			cancel()
		case <-ctx.Done():
			return
		}
		<-signals
		os.Exit(exitInterrupted)
	}()
	return ctx, func() { signal.Stop(signals); cancel() }
}
