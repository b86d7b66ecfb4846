package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"spillway/buckets"
	"spillway/busy"
	"spillway/configs"
	"spillway/dispatch"
	"spillway/kvindex"
	"spillway/monitor"
	"spillway/proxy"
	"spillway/replica"
	"spillway/router"
	"spillway/worker"
)

func newFrontendCommand(p process) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "frontend",
		Short: "Serve clients from inference workers, and shed what they cannot hold",
		Long: `Serves the OpenAI API from the given workers. With a threshold set, a worker all of whose
ranks are over it is passed over, and when all workers are, requests are refused at once
with 503. Thresholds can be read and changed while running at /busy_threshold.`,
		Example: `  spillway frontend --workers http://gpu1:8000,http://gpu2:8000
  spillway frontend --workers http://gpu1:8000 --active-decode-blocks-threshold 0.85
  spillway frontend --workers http://gpu1:8000,http://gpu2:8000 --router-mode kv --kv-events-port 5557
  spillway frontend --config configs/frontend.yaml --http-port 8080`,
	}
	return command(p, cmd, configs.DefaultFrontend(), func(c configs.Frontend) configs.Log { return c.Serving.Log },
		func(ctx context.Context, cfg configs.Frontend, log *slog.Logger) error {
			return runFrontend(ctx, p, cfg, log)
		})
}

func runFrontend(ctx context.Context, p process, cfg configs.Frontend, log *slog.Logger) error {
	f, err := newFrontend(p, cfg.Serving, cfg.Fleet, log)
	if err != nil {
		return err
	}
	if cfg.Replica.Enabled() {
		f.peers = exchangeBookings(cfg.Replica, f.routes, f.server, f.metrics, log)
	}
	d, err := listen(ctx, cfg.Serving.Proxy)
	if err != nil {
		return err
	}
	fmt.Fprintf(p.stdout, "Front end: %s\n", d.url())
	if d.admin != nil {
		fmt.Fprintf(p.stdout, "Admin: %s\n", d.adminURL())
	}
	defer easeCollector()()
	if cfg.DispatchFile == "" {
		return f.run(ctx, d)
	}
	queues, err := newInnerDispatcher(p, cfg, f, d.url(), log)
	if err != nil {
		return errors.Join(fmt.Errorf("dispatch: %w", err), d.close())
	}
	return f.runWith(ctx, d, queues)
}

// frontend holds the parts of one front end.
type frontend struct {
	server  *proxy.Server
	monitor *monitor.KvWorkerMonitor
	index   *kvindex.Partitions  // what workers have cached, if that counts
	caches  *monitor.KVListeners // nil if they are not heard of
	peers   *replica.Replica     // nil if nothing is exchanged
	routes  *router.Router
	metrics *prometheus.Registry
	log     *slog.Logger
	close   func() // what is left open when all has ended
}

// oldReservation is the age at which an engine should know of a request that it was sent.
const oldReservation = 30 * time.Second

// newFrontend builds the parts and makes the workers known. Nothing runs yet.
func newFrontend(p process, cfg configs.Serving, fleet configs.Fleet, log *slog.Logger) (*frontend, error) {
	catalog, err := fleet.Catalog()
	if err != nil {
		return nil, err
	}
	cfg.Busy.SignalStaleAfter = cfg.Monitor.StaleAfter(cfg.Busy.SignalStaleAfter)
	routes := router.New(cfg.Router, cfg.Busy, catalog, rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())))

	metrics := newRegistry()
	shapes := buckets.FromEnviron(p.environ())
	cfg.Proxy.Histograms, cfg.Monitor.Histograms = shapes, shapes
	server, err := proxy.New(cfg.Proxy, routes, metrics, log)
	if err != nil {
		return nil, err
	}

	index := kvindex.NewPartitions(cfg.Index)
	listeners := followCaches(cfg, server, index, metrics, log)
	end := func() {}
	if cfg.Router.Resolved().Mode == router.KV && cfg.Tokenize.Asks() {
		cfg.Tokenize.Prefix, cfg.Tokenize.Histograms = cfg.Proxy.MetricsPrefix, shapes
		end = tellTokens(cfg.Tokenize, routes, server, metrics, log)
	}

	watcher := monitor.New(cfg.Monitor, log, metrics)
	watcher.StaleIsBusy = cfg.Busy.StalePolicy == busy.StaleBusy
	watcher.Register = func(w *worker.Worker) (*busy.List, error) {
		list, err := server.Learned(w)
		if err == nil {
			log.Info("worker known", "worker", w.Name, "endpoint", w.Endpoint, "model", w.Models[0])
		}
		return list, err
	}
	server.Link(watcher.Watch, watcher.Forget)
	watcher.Needed = routes.ThresholdsSet
	if listeners != nil {
		watcher.Restarted = listeners.Restarted
	}
	watcher.Held = func(r worker.Rank, now time.Time) bool { return routes.Held(r, now.Add(-oldReservation)) }
	known, err := fleet.Known()
	if err != nil {
		return nil, err
	}
	for i := range known {
		w := &known[i]
		if err := server.Join(w); err != nil {
			return nil, err
		}
		log.Info("worker configured", "worker", w.Name, "endpoint", w.Endpoint, "models", w.Models)
	}
	if len(known) == 0 && cfg.Proxy.AdminAddr == "" {
		log.Warn("no workers configured: every request will be refused; give --workers or --config, or --admin-addr to add them there")
	}
	for _, w := range shapes.Warnings() {
		log.Warn("setting not used", "setting", w)
	}
	logChecks(log, cfg.Busy.Thresholds())
	if routes.Queues() {
		log.Info("requests may wait", "queue_size", cfg.Router.QueueSize, "queue_timeout", cfg.Proxy.QueueTimeout, "policy_config", cfg.Router.Queue.PolicyConfig)
	}
	return &frontend{server: server, monitor: watcher, index: index, caches: listeners, routes: routes, metrics: metrics, log: log, close: end}, nil
}

// run serves until ctx ends. What takes requests stops first, what feeds it after.
func (f *frontend) run(ctx context.Context, d doors) error {
	feeding, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	fed := make(chan error, 3)
	if f.peers == nil {
		fed <- nil
	} else if err := attend(feeding, f.peers, f.log, fed); err != nil {
		return errors.Join(err, d.close())
	}
	go func() { fed <- f.monitor.Run(feeding) }()
	go func() { fed <- hear(feeding, f.caches) }()
	err := f.server.Run(ctx, d.clients, d.admin)
	f.close()
	stop()
	return errors.Join(err, <-fed, <-fed, <-fed)
}

// runWith is run with a dispatcher beside it. Both begin to drain at the same time: what the dispatcher
// has sent may be finished, and what it would send next is refused and stays in its queue.
func (f *frontend) runWith(ctx context.Context, d doors, queues *dispatch.Dispatcher) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- queues.Run(ctx) }()
	err := f.run(ctx, d)
	stop()
	return errors.Join(err, <-ended)
}

// doors are the listeners of a front end.
type doors struct {
	clients net.Listener
	admin   net.Listener // nil if there is no admin address
	scheme  string
}

func (d doors) url() string      { return d.scheme + "://" + reachable(d.clients.Addr()) }
func (d doors) adminURL() string { return d.scheme + "://" + reachable(d.admin.Addr()) }

func (d doors) close() error {
	err := d.clients.Close()
	if d.admin != nil {
		err = errors.Join(err, d.admin.Close())
	}
	return err
}

func listen(ctx context.Context, cfg proxy.Config) (doors, error) {
	var lc net.ListenConfig
	d := doors{scheme: "http"}
	if cfg.TLSCertPath != "" {
		d.scheme = "https"
	}
	var err error
	if d.clients, err = lc.Listen(ctx, "tcp", net.JoinHostPort(cfg.Host, strconv.Itoa(cfg.Port))); err != nil {
		return d, fmt.Errorf("front end: %w", err)
	}
	if cfg.AdminAddr == "" {
		return d, nil
	}
	if d.admin, err = lc.Listen(ctx, "tcp", cfg.AdminAddr); err != nil {
		return d, fmt.Errorf("front end: admin-addr: %w", errors.Join(err, d.clients.Close()))
	}
	return d, nil
}

// logChecks tells which checks can make a worker busy: the first question when nothing is shed,
// or everything.
func logChecks(log *slog.Logger, t busy.Thresholds) {
	if !t.Any() {
		log.Info("no rejection checks: no threshold is set, so nothing is refused for load")
		return
	}
	var checks []any
	if t.DecodeFrac != nil {
		checks = append(checks, "active_decode_blocks_threshold", *t.DecodeFrac)
	}
	if t.PrefillTokens != nil {
		checks = append(checks, "active_prefill_tokens_threshold", *t.PrefillTokens)
	}
	if t.PrefillFrac != nil {
		checks = append(checks, "active_prefill_tokens_threshold_frac", *t.PrefillFrac)
	}
	log.Info("rejection checks", checks...)
}
