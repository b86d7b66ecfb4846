package sim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

// reopenPause is the time between attempts to listen again on a port that someone has taken
// while the fault refuse kept it closed.
const reopenPause = 50 * time.Millisecond

// door is a worker's listening socket. The fault refuse shuts it.
type door struct {
	mu     sync.Mutex   // guards the fields below; faults.mu may be taken with it
	srv    *http.Server // set once, by serve
	ln     net.Listener // nil while shut, and before serve
	opened chan struct{}
}

// shut closes the listener, so that connections are refused. Idle ones are closed and the
// others are after their answer.
func (d *door) shut() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ln == nil {
		return
	}
	_ = d.ln.Close() // it does not listen any more, whatever close has to say
	d.ln = nil
	d.opened = make(chan struct{})
	d.srv.SetKeepAlivesEnabled(false)
}

// open lets ln take connections, unless a fault came between.
func (d *door) open(ln net.Listener, fs *faults) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if fs.find(refuse, time.Now()) != nil {
		return false
	}
	d.ln = ln
	d.srv.SetKeepAlivesEnabled(true)
	close(d.opened)
	return true
}

// waiting is closed when the door opens; it is nil while it is open.
func (d *door) waiting() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ln != nil {
		return nil
	}
	return d.opened
}

// accept serves connections until the server is shut down or its listener fails, and waits
// where the fault refuse closes the listener.
func (w *worker) accept(ctx context.Context, srv *http.Server, ln net.Listener) error {
	addr := ln.Addr().String()
	for {
		err := srv.Serve(ln)
		if errors.Is(err, http.ErrServerClosed) || w.door.waiting() == nil {
			return err
		}
		if ln = w.reopen(ctx, addr); ln == nil {
			return http.ErrServerClosed
		}
	}
}

// reopen listens on addr when no fault forbids it, or returns nil when ctx ends before.
func (w *worker) reopen(ctx context.Context, addr string) net.Listener {
	for ctx.Err() == nil {
		if f := w.faults.find(refuse, time.Now()); f != nil {
			_ = f.wait(ctx) // the loop asks ctx itself
			continue
		}
		var lc net.ListenConfig
		ln, err := lc.Listen(ctx, "tcp", addr)
		if err == nil && w.door.open(ln, &w.faults) {
			return ln
		}
		if err == nil {
			_ = ln.Close() // refused again before anyone could connect
			continue
		}
		w.server.log.Debug("cannot listen again", "address", addr, "err", err)
		pause := time.NewTimer(reopenPause)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
		}
	}
	return nil
}

// serve answers requests on ln until ctx ends.
func (w *worker) serve(ctx context.Context, ln net.Listener) error {
	var conns sync.WaitGroup // net/http itself does not wait for the goroutines of closed ones
	srv := &http.Server{
		Handler:           w.routes(),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       5 * time.Minute,
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ConnContext:       func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		ConnState: func(_ net.Conn, state http.ConnState) {
			switch state {
			case http.StateNew: // called by Serve, so no Add comes after it has returned
				conns.Add(1)
			case http.StateClosed:
				conns.Done()
			}
		},
		ErrorLog: slog.NewLogLogger(w.server.log.Handler(), slog.LevelDebug),
	}
	w.door.begin(srv, ln)
	var err error
	served := make(chan struct{})
	go func() {
		defer close(served)
		err = w.accept(ctx, srv, ln)
	}()
	select {
	case <-served:
	case <-ctx.Done():
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), unwind)
	defer cancel()
	if srv.Shutdown(last) != nil {
		// A handler stands in a write to a client that does not read. Closing frees it.
		_ = srv.Close()
	}
	<-served
	conns.Wait()
	if !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("sim: serve: %w", err)
	}
	return nil
}

func (d *door) begin(srv *http.Server, ln net.Listener) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.srv, d.ln = srv, ln
}
