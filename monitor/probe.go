package monitor

import (
	"context"
	"time"
)

const (
	unhealthyAfter = 3 // probes that failed, in a row
	healthyAfter   = 2 // probes that passed, in a row
)

// probe asks one worker for its health until ctx ends. A worker is taken for healthy until
// probes have failed.
func (m *KvWorkerMonitor) probe(ctx context.Context, w *watch) {
	interval := m.cfg.HealthInterval
	if interval == 0 || !pause(ctx, spread(w.id, interval)) {
		return
	}
	unhealthy, passed, failed := false, 0, 0
	for {
		began := time.Now()
		if record, list := w.target(); list != nil {
			err := m.ask(ctx, record.Endpoint+m.cfg.HealthPath, record.APIKey)
			if ctx.Err() != nil {
				return
			}
			if err == nil {
				passed, failed = passed+1, 0
			} else {
				passed, failed = 0, failed+1
			}
			switch {
			case !unhealthy && failed >= unhealthyAfter:
				unhealthy = true
				m.log.Warn("worker is unhealthy", "worker", record.Name, "err", err)
			case unhealthy && passed >= healthyAfter:
				unhealthy = false
				m.log.Info("worker is healthy again", "worker", record.Name)
			}
			w.probed(unhealthy, err == nil, time.Now())
		}
		if !pause(ctx, interval-time.Since(began)) {
			return
		}
	}
}

// ask is one probe; any 2xx passes.
func (m *KvWorkerMonitor) ask(ctx context.Context, url, key string) error {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.HealthTimeout)
	defer cancel()
	return m.get.get(ctx, url, key, "*/*", func([]byte, bool) error { return nil })
}
