package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// newRegistry holds what every process tells of itself.
func newRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), buildInfo())
	return r
}

// open listens on a port of a host, and prints where what answers there is to be reached.
func (p process) open(ctx context.Context, what, host string, port int) (net.Listener, error) {
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err == nil {
		fmt.Fprintf(p.stdout, "%s: http://%s\n", what, reachable(ln.Addr()))
	}
	return ln, err
}

// serveFed runs serve, and feed beside it until serve has ended, whatever becomes of ctx.
func serveFed(ctx context.Context, serve, feed func(context.Context) error) error {
	feeding, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- feed(feeding) }()
	err := serve(ctx)
	stop()
	return errors.Join(err, <-ended)
}
