package monitor

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// Config are the settings of the monitor. It is read-only once given to New.
type Config struct {
	ScrapeInterval        time.Duration `koanf:"scrape-interval" usage:"time between looks at a worker's /metrics (0: never)"`
	ScrapeTimeout         time.Duration `koanf:"scrape-timeout" usage:"how long a worker may take to answer; never more than the interval is used"`
	Engine                string        `koanf:"engine" usage:"whose metric names to expect from workers that do not say: auto or vllm"`
	EnginePrefillEstimate bool          `koanf:"engine-prefill-estimate" usage:"also estimate the prompt tokens queued in an engine, from its waiting requests"`
	HealthInterval        time.Duration `koanf:"health-interval" usage:"time between health probes of a worker (0: never)"`
	HealthTimeout         time.Duration `koanf:"health-timeout" usage:"how long a health probe may take"`
	HealthPath            string        `koanf:"health-path" usage:"path of the health probe on the worker; any 2xx passes"`
}

// DefaultConfig scrapes each second and probes every five.
func DefaultConfig() Config {
	return Config{
		ScrapeInterval: time.Second,
		ScrapeTimeout:  time.Second,
		Engine:         "auto",
		HealthInterval: 5 * time.Second,
		HealthTimeout:  2 * time.Second,
		HealthPath:     "/health",
	}
}

// leastInterval keeps a slip of the unit from turning into a flood of requests.
const leastInterval = 10 * time.Millisecond

// Validate reports every setting that is out of range; each error begins with its key.
func (c Config) Validate() error {
	var errs []error
	for _, d := range []struct {
		key   string
		value time.Duration
	}{{"scrape-interval", c.ScrapeInterval}, {"health-interval", c.HealthInterval}} {
		if d.value != 0 && d.value < leastInterval {
			errs = append(errs, fmt.Errorf("%s: %v is neither 0 nor at least %v", d.key, d.value, leastInterval))
		}
	}
	if c.ScrapeTimeout <= 0 {
		errs = append(errs, fmt.Errorf("scrape-timeout: %v is not above 0", c.ScrapeTimeout))
	}
	if c.HealthTimeout <= 0 {
		errs = append(errs, fmt.Errorf("health-timeout: %v is not above 0", c.HealthTimeout))
	}
	if c.Engine != "auto" && c.Engine != "vllm" {
		errs = append(errs, fmt.Errorf("engine: %q is neither auto nor vllm", c.Engine))
	}
	if !strings.HasPrefix(c.HealthPath, "/") {
		errs = append(errs, fmt.Errorf("health-path: %q does not begin with /", c.HealthPath))
	}
	return errors.Join(errs...)
}

// StaleAfter is the age at which samples taken at the scrape interval may be called stale:
// the configured one, but at least three intervals, so that one lost answer is no outage.
func (c Config) StaleAfter(configured time.Duration) time.Duration {
	return max(configured, 3*c.ScrapeInterval)
}
