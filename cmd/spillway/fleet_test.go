package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"spillway/configs"
)

// fleet is a front end over simulated workers, all in this process.
type fleet struct {
	t    *testing.T
	url  string // of the front end
	sim  string // of the first worker
	http *http.Client
}

// begin runs what `spillway demo` runs until the test ends; then nothing may be left of it.
func begin(t *testing.T, change func(*configs.Demo)) *fleet {
	t.Helper()
	before := goleak.IgnoreCurrent()
	cfg := configs.DefaultDemo()
	cfg.Serving.Proxy.Port, cfg.Sim.Port = 0, 0
	cfg.Serving.Monitor.ScrapeInterval = 50 * time.Millisecond
	change(&cfg)
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
