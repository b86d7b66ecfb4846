package monitor

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"spillway/buckets"
)

// Config are the settings of the monitor. It is read-only once given to New.
type Config struct {
	ScrapeInterval        time.Duration `koanf:"scrape-interval" usage:"time between looks at a worker's /metrics (0: never)"`
	ScrapeTimeout         time.Duration `koanf:"scrape-timeout" usage:"how long a worker may take to answer; never more than the interval is used"`
	Engine                string        `koanf:"engine" usage:"whose metric names to expect from workers that do not say: auto, vllm, sglang or trtllm"`
	EnginePrefillEstimate bool          `koanf:"engine-prefill-estimate" usage:"also estimate the prompt tokens queued in an engine, from its waiting requests"`
	HealthInterval        time.Duration `koanf:"health-interval" usage:"time between health probes of a worker (0: never)"`
	HealthTimeout         time.Duration `koanf:"health-timeout" usage:"how long a health probe may take"`
	HealthPath            string        `koanf:"health-path" usage:"path of the health probe on the worker; any 2xx passes"`
	EventPlane            string        `koanf:"event-plane" dyn:"DYN_EVENT_PLANE" usage:"where load events of workers and other routers come from: off or zmq"`
	EventEndpoints        []string      `koanf:"event-endpoints" usage:"publishers of load events, tcp://host:port each, for event-plane zmq"`

	Histograms *buckets.Shapes `koanf:"-"` // buckets as the environment reshapes them; nil: as documented
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
		EventPlane:     "off",
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
	switch c.Engine {
	case "auto", "vllm", "sglang", "trtllm":
	case "custom":
		errs = append(errs, errors.New("engine: custom needs a mapping, so it is set with it, for each worker in the file"))
	default:
		errs = append(errs, fmt.Errorf("engine: %q is none of auto, vllm, sglang and trtllm", c.Engine))
	}
	if !strings.HasPrefix(c.HealthPath, "/") {
		errs = append(errs, fmt.Errorf("health-path: %q does not begin with /", c.HealthPath))
	}
	return errors.Join(append(errs, c.checkEvents())...)
}

// maxEndpoints bounds the publishers of load events.
const maxEndpoints = 256

func (c Config) checkEvents() error {
	switch c.EventPlane {
	case "off":
		return nil // endpoints may stay in the file
	case "zmq":
	case "nats":
		return errors.New("event-plane: nats is not built in; use zmq or off")
	default:
		return fmt.Errorf("event-plane: %q is neither off nor zmq", c.EventPlane)
	}
	switch {
	case len(c.EventEndpoints) == 0:
		return errors.New("event-endpoints: event-plane zmq needs at least one, such as tcp://gpu1:5560")
	case len(c.EventEndpoints) > maxEndpoints:
		return fmt.Errorf("event-endpoints: %d are more than %d", len(c.EventEndpoints), maxEndpoints)
	}
	for i, e := range c.EventEndpoints {
		if err := checkEndpoint(e); err != nil {
			return fmt.Errorf("event-endpoints: %w", err)
		}
		if slices.Contains(c.EventEndpoints[:i], e) {
			return fmt.Errorf("event-endpoints: %s is listed twice, so its load would be counted twice", e)
		}
	}
	return nil
}

func checkEndpoint(e string) error {
	u, err := url.Parse(e)
	if err != nil {
		return fmt.Errorf("%q: %w", e, err)
	}
	port, err := strconv.ParseUint(u.Port(), 10, 16)
	if u.Scheme != "tcp" || u.Hostname() == "" || u.Hostname() == "*" || e != "tcp://"+u.Host || err != nil || port == 0 {
		return fmt.Errorf("%q is not of the form tcp://host:port", e)
	}
	return nil
}

// StaleAfter is the age at which samples taken at the scrape interval may be called stale:
// the configured one, but at least three intervals, so that one lost answer is no outage.
func (c Config) StaleAfter(configured time.Duration) time.Duration {
	return max(configured, 3*c.ScrapeInterval)
}
