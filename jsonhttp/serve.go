package jsonhttp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"spillway/httperr"
)

// Serve serves clients on ln until ctx ends, then lets running requests end, for at most drain.
// After nil, nothing that it started is left.
func Serve(ctx context.Context, ln net.Listener, h http.Handler, drain time.Duration, log *slog.Logger) error {
	srv := &http.Server{
		Handler: h, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: time.Minute, IdleTimeout: 11 * time.Minute,
		MaxHeaderBytes: 1 << 20, DisableGeneralOptionsHandler: true,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve: %w", err)
	case <-ctx.Done():
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), drain)
	defer cancel()
	err := srv.Shutdown(last)
	if errors.Is(err, context.DeadlineExceeded) {
		err = srv.Close()
	}
	<-served
	return err
}

// CheckType is the failure of a request whose body is not said to be JSON.
func CheckType(r *http.Request) *httperr.Error {
	if !IsJSON(r.Header.Get("Content-Type")) {
		return httperr.New(http.StatusUnsupportedMediaType, "the body must be JSON, and Content-Type say application/json")
	}
	return nil
}
