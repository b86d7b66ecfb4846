package service

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"spillway/worker"
)

// Config is what an operator sets. It is read-only after New.
type Config struct {
	Host         string        `koanf:"host" usage:"address to listen on"`
	Port         int           `koanf:"port" usage:"port to listen on; 0 takes a free one"`
	Workers      []string      `koanf:"workers" usage:"workers to listen to from the start, id[:rank]=endpoint each, such as 7=tcp://gpu1:5557 or 7:1=tcp://gpu1:5558"`
	BlockSize    uint32        `koanf:"block-size" usage:"tokens per block of the workers; needed with workers"`
	ModelName    string        `koanf:"model-name" usage:"model of the workers"`
	Tenant       string        `koanf:"tenant-id" usage:"tenant of the workers"`
	DrainTimeout time.Duration `koanf:"drain-timeout" usage:"how long running requests may take after SIGTERM"`
}

// DefaultConfig listens on port 8090 and knows no worker.
func DefaultConfig() Config {
	return Config{Host: "0.0.0.0", Port: 8090, ModelName: "default", Tenant: worker.DefaultTenant, DrainTimeout: 5 * time.Second}
}

// Validate reports every bad setting, each beginning with its key.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Port < 0 || c.Port > 65535 {
		bad("port: %d is not within 0..65535", c.Port)
	}
	if c.DrainTimeout < 0 {
		bad("drain-timeout: %v is less than 0", c.DrainTimeout)
	}
	if len(c.Workers) > 0 && c.BlockSize == 0 {
		bad("block-size: workers need it")
	}
	if c.BlockSize > maxBlockSize {
		bad("block-size: %d is more than %d", c.BlockSize, maxBlockSize)
	}
	for _, w := range c.Workers {
		if _, _, err := parseWorker(w); err != nil {
			bad("workers: %w", err)
		}
	}
	return errors.Join(errs...)
}

// maxBlockSize bounds the tokens of a block; real ones have up to some hundreds.
const maxBlockSize = 1 << 20

// parseWorker reads id[:rank]=endpoint.
func parseWorker(s string) (r worker.Rank, endpoint string, err error) {
	name, endpoint, ok := strings.Cut(s, "=")
	id, rank, ranked := strings.Cut(name, ":")
	if !ranked {
		rank = "0"
	}
	n, err := strconv.ParseUint(id, 10, 64)
	dp, bad := strconv.ParseUint(rank, 10, 32)
	if !ok || err != nil || bad != nil || dp == worker.AnyDP {
		return r, "", fmt.Errorf("%.256q is not of the form id[:rank]=endpoint", s)
	}
	return worker.Rank{Worker: worker.ID(n), DP: uint32(dp)}, endpoint, worker.CheckEventEndpoint(endpoint)
}
