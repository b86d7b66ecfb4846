// Package sim simulates inference workers: HTTP servers that speak like vLLM and take the time
// that work on a GPU would take. What that time is says package engine; this package gives
// each rank a clock, an OpenAI-style API and metrics.
//
// Faults can be asked for, to see what a client makes of them: POST /sim/fault sets one on a
// worker, DELETE clears it, and the header X-Sim-Fault gives one to a single request. They are
// made of answers, connections and, for slow, the rank's clock; engines know nothing of them.
// An answer that breaks off aborts its sequences like a client that leaves. docs/sim.md lists
// them.
//
// What the ranks' prefix caches hold is published as KV events over ZMQ, if asked for, in step with
// GET /sim/cache. Nothing that a subscriber does or leaves undone holds up a rank.
package sim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// unwind is how long Run waits for handlers to notice that it is over.
const unwind = 2 * time.Second

// Server is all simulated workers of a process.
type Server struct {
	cfg     Config
	log     *slog.Logger
	started time.Time
	workers []*worker

	faulting sync.Mutex // held while faults are set or cleared; the first lock where there are more
}

// New makes the workers that cfg asks for, idle and with empty memory. Nothing runs yet.
func New(cfg Config, log *slog.Logger) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, log: log, started: time.Now()}
	for i := range cfg.Count {
		w, err := newWorker(s, i)
		if err != nil {
			return nil, fmt.Errorf("sim: new worker: %w", err)
		}
		s.workers = append(s.workers, w)
	}
	return s, nil
}

// Listen opens the listeners that Run needs, one per worker. On an error none is left open.
func Listen(cfg Config) ([]net.Listener, error) {
	var lns []net.Listener
	for i := range cfg.Count {
		port := 0
		if cfg.Port > 0 {
			port = cfg.Port + i
		}
		ln, err := net.Listen("tcp", net.JoinHostPort(cfg.Host, strconv.Itoa(port)))
		if err != nil {
			err = fmt.Errorf("sim: listen for worker %d: %w", i, err)
			for _, open := range lns {
				err = errors.Join(err, open.Close())
			}
			return nil, err
		}
		lns = append(lns, ln)
	}
	return lns, nil
}

// Run serves worker i on lns[i] until ctx ends, and closes lns. Requests under way are then
// cut like those of a worker that is killed. After it returns nothing that it started is left.
// A Server runs once.
func (s *Server) Run(ctx context.Context, lns []net.Listener) error {
	if len(lns) != len(s.workers) {
		err := fmt.Errorf("sim: %d listeners for %d workers", len(lns), len(s.workers))
		for _, ln := range lns {
			err = errors.Join(err, ln.Close())
		}
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var parts sync.WaitGroup
	errs := make([]error, len(s.workers)+1)
	for i, w := range s.workers {
		w.port = port(lns[i])
		for _, r := range w.ranks {
			parts.Go(func() { r.run(ctx) })
		}
	}
	for i, w := range s.workers {
		parts.Go(func() {
			defer stop() // one that fails takes the others with it
			errs[i] = w.serve(ctx, lns[i])
		})
		s.log.Info("simulated worker listens", "worker", i, "address", lns[i].Addr().String(), "model", s.cfg.Model, "ranks", s.cfg.DPSize)
	}
	if s.cfg.KVEventsPort > 0 {
		parts.Go(func() {
			defer stop()
			errs[len(s.workers)] = s.publish(ctx)
		})
		s.log.Info("simulated workers publish KV events", "port", s.cfg.KVEventsPort, "replay_port", s.cfg.KVReplayPort, "layout", s.cfg.KVEventsLayout)
	}
	parts.Wait()
	return errors.Join(errs...)
}

// publish publishes the KV events of all ranks until ctx ends or one can not.
func (s *Server) publish(ctx context.Context) (err error) {
	zctx, err := zmq.NewContext()
	if err != nil {
		return fmt.Errorf("sim: starting libzmq: %w", err)
	}
	defer func() { err = errors.Join(err, zctx.Term()) }()
	const socketsEach = 2
	if err := zctx.SetMaxSockets(socketsEach * (s.cfg.Count*s.cfg.DPSize + 1)); err != nil {
		return fmt.Errorf("sim: starting libzmq: %w", err)
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var publishers sync.WaitGroup
	errs := make([]error, s.cfg.Count*s.cfg.DPSize)
	for i, w := range s.workers {
		for _, r := range w.ranks {
			at := i*s.cfg.DPSize + r.dp
			publishers.Go(func() {
				if errs[at] = newPublisher(s.cfg, i, r.dp, r.feed).run(ctx, zctx); errs[at] != nil {
					stop()
				}
			})
		}
	}
	publishers.Wait()
	return errors.Join(errs...)
}

func port(ln net.Listener) int {
	if a, ok := ln.Addr().(*net.TCPAddr); ok {
		return a.Port
	}
	return 0
}
