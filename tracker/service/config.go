package service

import (
	"errors"
	"fmt"
	"time"
)

// Config is what an operator sets. It is read-only after New.
type Config struct {
	Host              string        `koanf:"host" usage:"address to listen on"`
	Port              int           `koanf:"port" usage:"port to listen on; 0 takes a free one"`
	APIKey            string        `koanf:"api-key" usage:"bearer token that all routes but /health, /ready and /metrics ask for"`
	ExpireAfterSecs   uint64        `koanf:"router-active-request-expiry-secs" dyn:"DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS" bad:"dyn" usage:"age in seconds at which a request that was never freed is dropped"`
	ExpiryInterval    time.Duration `koanf:"expiry-interval" usage:"how often all ranks are looked at for such requests; one rank is looked at no more than twice as often"`
	MaxRanksPerWorker uint32        `koanf:"max-ranks-per-worker" usage:"most data-parallel ranks that one registration may have"`
	StateFile         string        `koanf:"state-file" usage:"file to keep workers and requests in over a restart; nothing: they are forgotten"`
	StateInterval     time.Duration `koanf:"state-interval" usage:"how often state-file is written, 0 for only when the process ends"`
	DrainTimeout      time.Duration `koanf:"drain-timeout" usage:"how long running requests may take after SIGTERM"`
}

// DefaultConfig listens on port 8091 and forgets requests after 300 seconds.
func DefaultConfig() Config {
	return Config{
		Host: "0.0.0.0", Port: 8091, ExpireAfterSecs: 300, ExpiryInterval: time.Minute,
		MaxRanksPerWorker: 65536, StateInterval: 30 * time.Second, DrainTimeout: 5 * time.Second,
	}
}

// maxSeconds bounds settings in seconds, so that they fit a time.Duration.
const maxSeconds = 1 << 32

// Validate reports every bad setting, each beginning with its key.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Port < 0 || c.Port > 65535 {
		bad("port: %d is not within 0..65535", c.Port)
	}
	if c.ExpireAfterSecs < 1 || c.ExpireAfterSecs > maxSeconds {
		bad("router-active-request-expiry-secs: %d is not within 1..%d", c.ExpireAfterSecs, uint64(maxSeconds))
	}
	if c.ExpiryInterval < 10*time.Millisecond {
		bad("expiry-interval: %v is less than 10ms", c.ExpiryInterval)
	}
	if c.MaxRanksPerWorker < 1 {
		bad("max-ranks-per-worker: 0 leaves no rank to register")
	}
	if c.StateInterval < 0 {
		bad("state-interval: %v is less than 0", c.StateInterval)
	}
	if c.DrainTimeout < 0 {
		bad("drain-timeout: %v is less than 0", c.DrainTimeout)
	}
	return errors.Join(errs...)
}
