package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"go.uber.org/goleak"

	"spillway/configs"
	"spillway/router"
)

// fleet is a front end over simulated workers, all in this process.
type fleet struct {
	t    *testing.T
	url  string // of the front end
	sim  string // of the first worker
	http *http.Client
}

// inModes runs a test for each of two ways in which a front end may choose workers, of which clients
// must not notice anything: by turns, and by what workers tell of their caches.
func inModes(t *testing.T, test func(t *testing.T, mode router.Mode)) {
	for _, mode := range []router.Mode{router.RoundRobin, router.KV} {
		t.Run(string(mode), func(t *testing.T) { test(t, mode) })
	}
}

// modeFlags are those of `spillway demo` with so many ranks.
func modeFlags(t *testing.T, mode router.Mode, ranks int) []string {
	flags := []string{"--router-mode", string(mode)}
	if mode == router.KV {
		base := freePorts(t, 2*ranks)
		flags = append(flags, "--kv-events-port", strconv.Itoa(base), "--kv-replay-port", strconv.Itoa(base+ranks))
	}
	return flags
}

// begin runs what `spillway demo` runs until the test ends; then nothing may be left of it.
func begin(t *testing.T, mode router.Mode, change func(*configs.Demo)) *fleet {
	t.Helper()
	before := goleak.IgnoreCurrent()
	cfg := configs.DefaultDemo()
	cfg.Serving.Proxy.Port, cfg.Sim.Port = 0, 0
	cfg.Serving.Monitor.ScrapeInterval = 50 * time.Millisecond
	change(&cfg)
	if cfg.Serving.Router.Mode = mode; mode == router.KV {
		ranks := cfg.Sim.Count * cfg.Sim.DPSize
		cfg.Sim.KVEventsPort = freePorts(t, 2*ranks)
		cfg.Sim.KVReplayPort = cfg.Sim.KVEventsPort + ranks
	}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	d, err := listen(t.Context(), cfg.Serving.Proxy)
	if err != nil {
		t.Fatal(err)
	}
	workers, lns, err := demoWorkers(cfg.Sim, log)
	if err != nil {
		t.Fatal(err)
	}
	front, err := demoFrontend(process{environ: func() []string { return nil }}, cfg, lns, log)
	if err != nil {
		t.Fatal(err)
	}
	serving, stopServing := context.WithCancel(context.Background())
	working, stopWorking := context.WithCancel(context.Background())
	served, worked := make(chan error, 1), make(chan error, 1)
	go func() { worked <- workers.Run(working, lns) }()
	go func() { served <- front.run(serving, d) }()
	f := &fleet{t: t, url: d.url(), sim: endpoints(lns)[0], http: &http.Client{Transport: &http.Transport{}}}
	t.Cleanup(func() {
		f.http.CloseIdleConnections()
		stopServing()
		if err := <-served; err != nil {
			t.Errorf("front end: %v", err)
		}
		stopWorking()
		if err := <-worked; err != nil {
			t.Errorf("workers: %v", err)
		}
		f.http.CloseIdleConnections()
		http.DefaultClient.CloseIdleConnections()
		goleak.VerifyNone(t, before)
	})
	return f
}

// serveFrontend runs a front end with these arguments in this process until the test ends.
func serveFrontend(t *testing.T, args ...string) (f *frontend, d doors, logged *output) {
	t.Helper()
	flags := pflag.NewFlagSet("frontend", pflag.ContinueOnError)
	configs.Flags(flags, configs.DefaultFrontend())
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	cfg, _, err := configs.Load(configs.DefaultFrontend(), flags.Lookup(configs.PathKey).Value.String(), func() []string { return nil }, flags)
	if err != nil {
		t.Fatal(err)
	}
	logged = &output{}
	log, flush := newLogger(logged, cfg.Serving.Log)
	t.Cleanup(flush)
	if f, err = newFrontend(process{environ: func() []string { return nil }}, cfg.Serving, cfg.Fleet, log); err != nil {
		t.Fatal(err)
	}
	if d, err = listen(t.Context(), cfg.Serving.Proxy); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- f.run(ctx, d) }()
	t.Cleanup(func() {
		stop()
		if err := <-served; err != nil {
			t.Errorf("front end: %v", err)
		}
	})
	return f, d, logged
}

// simStats is what a test reads of GET /sim/stats.
type simStats struct {
	Aborted   int `json:"aborted_requests"`
	Finished  int `json:"finished_requests"`
	Running   int `json:"running"`
	Waiting   int `json:"waiting"`
	Generated int `json:"tokens_generated"`
}

func (f *fleet) stats() (s simStats) {
	f.t.Helper()
	_, body := fetch(f.t, f.sim+"/sim/stats")
	if err := json.Unmarshal([]byte(body), &s); err != nil {
		f.t.Fatal(err)
	}
	return s
}

// metrics are the values of the series whose name begins so, by series.
func (f *fleet) metrics(name string) map[string]string {
	f.t.Helper()
	_, page := fetch(f.t, f.url+"/metrics")
	found := map[string]string{}
	for line := range strings.Lines(page) {
		if series, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok && strings.HasPrefix(series, name) {
			found[series] = value
		}
	}
	return found
}

// settled checks, as a scrape shows it, that no request holds anything any more. A client may
// have the whole of its answer a moment before that.
func (f *fleet) settled() {
	f.t.Helper()
	for _, name := range []string{"spillway_slots_inflight", "dynamo_queued_requests", "spillway_slot_leaks_total", "spillway_body_memory_bytes"} {
		eventually(f.t, name+" is there and 0 for all", func() bool {
			found := f.metrics(name)
			for _, value := range found {
				if value != "0" {
					return false
				}
			}
			return len(found) > 0
		})
	}
}
