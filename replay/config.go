// Package replay sends a recorded trace or a fixed load of LLM requests to an OpenAI-compatible
// endpoint and reports what clients got: goodput under a latency objective, what was shed and why,
// TTFT and ITL, and whether the measurement itself can be believed.
//
// It is open-loop: each request leaves at its arrival time whether or not earlier ones have
// finished, so a slow server meets the queue that it would meet in production. Latencies count
// from the time a request was due, not from when it was sent, so lateness of the client is never
// hidden.
package replay

import (
	"errors"
	"fmt"
	"math"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Bounds on what a trace or a fixed load may ask for, so that a typing error is an error and not
// a machine out of memory.
const (
	maxRequests = 2_000_000
	maxTokens   = 1 << 24                    // prompt or output tokens of one request
	maxArrival  = 100 * 365 * 24 * time.Hour // arrivals may be Unix times
)

// Config says what is sent, where, and what counts as good. Exactly one of TracePath and Rate
// decides the load. "Trace time" is the time in the trace, or in the fixed load as if at speed 1;
// all other durations are real time.
type Config struct {
	TracePath string        `koanf:"trace" usage:"trace file to replay; or give a fixed load with --rate"`
	Format    string        `koanf:"format" usage:"trace format: auto, mooncake (JSON lines) or csv (arrival in seconds or a date, input and output tokens)"`
	ISLTokens int           `koanf:"isl" usage:"fixed load: prompt tokens of each request"`
	OSLTokens int           `koanf:"osl" usage:"fixed load: output tokens of each request"`
	Rate      float64       `koanf:"rate" usage:"fixed load: requests per second of trace time, evenly spaced unless --poisson; 0 is no fixed load"`
	Duration  time.Duration `koanf:"duration" usage:"fixed load: how much trace time to send for, unless --requests is given"`
	Requests  int           `koanf:"requests" usage:"stop after this many requests, of a trace or a fixed load; 0 is no limit"`
	Poisson   bool          `koanf:"poisson" usage:"fixed load: exponentially distributed gaps instead of even ones"`

	Skip         time.Duration `koanf:"skip" usage:"leave out arrivals in the first part of the trace, in trace time"`
	First        time.Duration `koanf:"first" usage:"send only arrivals in this much trace time after --skip; 0 is all"`
	Spread       time.Duration `koanf:"spread" usage:"move each arrival later by a random trace time below this, because traces come in lumps of one timestamp"`
	Seed         uint64        `koanf:"seed" usage:"seed of all that is random; another seed also gives a fixed load other prompts"`
	Speed        float64       `koanf:"speed" usage:"trace seconds per second; changes arrivals only, not patience or objectives"`
	SpeedProfile string        `koanf:"speed-profile" usage:"let the speed follow a sine: AMPLITUDE,PERIOD as in 0.5,10m for speed x (1 + 0.5 sin(2 pi t / 10m)) at real time t"`

	URL         string        `koanf:"url" usage:"base URL of the endpoint, without /v1"`
	Model       string        `koanf:"model" usage:"model to ask for"`
	Endpoint    string        `koanf:"endpoint" usage:"chat or completions"`
	Via         string        `koanf:"via" usage:"select-service: url is that of the selection service, which is asked for a worker, which is then called; prompts get the tokens of simulated workers"`
	Timeout     time.Duration `koanf:"timeout" usage:"patience of a client, from the time its request was due to the end of the answer; 0 is endless"`
	Leave       float64       `koanf:"leave" usage:"share of clients, 0 to 1, that leave on purpose after a random time"`
	LeaveAfter  time.Duration `koanf:"leave-after" usage:"those that leave do so after a random time below this"`
	MaxInFlight int           `koanf:"max-in-flight" usage:"requests that may be open at once; one due beyond that is not sent, is counted, and makes the run invalid"`

	SLOTTFT string        `koanf:"slo-ttft" usage:"objective for the time to the first token: CONSTANT or CONSTANT+FACTORxRATE, as in 2s+2x20000 for 2 s and twice the prompt at 20000 tokens/s; empty is none"`
	SLOITL  time.Duration `koanf:"slo-itl" usage:"objective for the 99th percentile of the gaps between a request's own tokens; 0 is none"`
	Warmup  time.Duration `koanf:"warmup" usage:"requests due in this much real time from the start are sent but not reported"`

	PIDs      []string `koanf:"pids" usage:"processes whose CPU seconds over the run to report"`
	StatsURLs []string `koanf:"stats-url" usage:"base URLs of simulated workers, or full URLs of their /sim/stats, whose step lateness to report"`
	OracleURL string   `koanf:"oracle-url" usage:"base URL of a simulated worker, which is asked 50 ms before each request how much of its prompt any worker of its process has cached: the best that a choice of worker could have found"`
	JSON      string   `koanf:"json" usage:"file to write the report to as JSON; - prints it instead of the table"`
	Progress  bool     `koanf:"progress" usage:"print a line every 5 seconds on standard error"`

	// Tokenize returns the tokens that workers make of a prompt: of a completion, or of a chat whose
	// only message it is. It has no key; via needs it.
	Tokenize func(text string, chat bool) []uint32

	// PrefixHashes returns the hashes that simulated workers have of the prompt's blocks of that many
	// tokens. It has no key; oracle-url needs it.
	PrefixHashes func(text string, chat bool, blockSize int) []uint64
}

// DefaultConfig returns the settings of a run without flags. It does not pass Validate until a
// trace or a rate is chosen.
func DefaultConfig() Config {
	return Config{
		Format: "auto", ISLTokens: 1000, OSLTokens: 100, Duration: time.Minute,
		Seed: 1, Speed: 1,
		URL: "http://127.0.0.1:8000", Model: "sim-model", Endpoint: "chat",
		Timeout: 10 * time.Minute, LeaveAfter: 10 * time.Second, MaxInFlight: 10000,
	}
}

// Validate returns all that is wrong with c, joined; each error begins with the key it is about.
func (c Config) Validate() error {
	return errors.Join(c.validateLoad(), c.validateTiming(), c.validateTarget(), c.validateMeasure())
}

func (c Config) validateLoad() error {
	var errs []error
	if c.TracePath == "" && c.Rate == 0 {
		errs = append(errs, errors.New("trace: give a trace file, or a fixed load with --rate"))
	}
	if c.TracePath != "" && c.Rate != 0 {
		errs = append(errs, errors.New("rate: a fixed load cannot be joined with --trace"))
	}
	if c.TracePath != "" && c.Poisson {
		errs = append(errs, errors.New("poisson: a trace has its own arrivals; use it with --rate"))
	}
	switch c.Format {
	case "auto", "mooncake", "csv":
	default:
		errs = append(errs, fmt.Errorf("format: %q is not auto, mooncake or csv", c.Format))
	}
	errs = append(errs, within("isl", c.ISLTokens, 1, maxTokens), within("osl", c.OSLTokens, 1, maxTokens),
		within("requests", c.Requests, 0, maxRequests))
	if !(c.Rate >= 0 && c.Rate <= 1e6) {
		errs = append(errs, fmt.Errorf("rate: %v is not within 0..1000000", c.Rate))
	} else if c.Rate > 0 && c.Requests == 0 && c.Rate*c.Duration.Seconds() > maxRequests {
		errs = append(errs, fmt.Errorf("duration: %v at %v requests/s is more than %d requests", c.Duration, c.Rate, maxRequests))
	}
	if c.Rate > 0 && c.Requests == 0 && c.Duration <= 0 {
		errs = append(errs, fmt.Errorf("duration: %v is not above 0", c.Duration))
	}
	return errors.Join(errs...)
}

func (c Config) validateTiming() error {
	errs := []error{
		notNegative("skip", c.Skip), notNegative("first", c.First), notNegative("spread", c.Spread),
		notNegative("timeout", c.Timeout), notNegative("slo-itl", c.SLOITL), notNegative("warmup", c.Warmup),
	}
	if !(c.Speed > 0 && c.Speed <= 1e6) {
		errs = append(errs, fmt.Errorf("speed: %v is not above 0 and at most 1000000", c.Speed))
	}
	if _, err := parseProfile(c.SpeedProfile); err != nil {
		errs = append(errs, fmt.Errorf("speed-profile: %w", err))
	}
	if !(c.Leave >= 0 && c.Leave <= 1) {
		errs = append(errs, fmt.Errorf("leave: %v is not within 0..1", c.Leave))
	}
	if c.Leave > 0 && c.LeaveAfter <= 0 {
		errs = append(errs, fmt.Errorf("leave-after: %v is not above 0", c.LeaveAfter))
	}
	return errors.Join(errs...)
}

func (c Config) validateTarget() error {
	var errs []error
	if err := checkURL(c.URL); err != nil {
		errs = append(errs, fmt.Errorf("url: %w", err))
	}
	if c.Model == "" {
		errs = append(errs, errors.New("model: must not be empty"))
	}
	if c.Endpoint != "chat" && c.Endpoint != "completions" {
		errs = append(errs, fmt.Errorf("endpoint: %q is not chat or completions", c.Endpoint))
	}
	if c.Via != "" && c.Via != viaSelect {
		errs = append(errs, fmt.Errorf("via: %q is not %s", c.Via, viaSelect))
	}
	errs = append(errs, within("max-in-flight", c.MaxInFlight, 1, 1_000_000))
	return errors.Join(errs...)
}

func (c Config) validateMeasure() error {
	var errs []error
	if _, err := ParseTTFT(c.SLOTTFT); err != nil {
		errs = append(errs, fmt.Errorf("slo-ttft: %w", err))
	}
	for _, s := range c.PIDs {
		if pid, err := strconv.Atoi(s); err != nil || pid < 1 || pid > math.MaxInt32 {
			errs = append(errs, fmt.Errorf("pids: %q is not a process ID", s))
		}
	}
	for _, s := range c.StatsURLs {
		if err := checkURL(s); err != nil {
			errs = append(errs, fmt.Errorf("stats-url: %w", err))
		}
	}
	if c.OracleURL != "" {
		if err := checkURL(c.OracleURL); err != nil {
			errs = append(errs, fmt.Errorf("oracle-url: %w", err))
		}
	}
	return errors.Join(errs...)
}

func within(key string, v, low, high int) error {
	if v < low || v > high {
		return fmt.Errorf("%s: %d is not within %d..%d", key, v, low, high)
	}
	return nil
}

func notNegative(key string, d time.Duration) error {
	if d < 0 {
		return fmt.Errorf("%s: %v is negative", key, d)
	}
	return nil
}

func checkURL(s string) error {
	u, err := url.Parse(s)
	if err != nil {
		return fmt.Errorf("%q is not a URL", s)
	}
	if (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		return fmt.Errorf("%q is not of the form http://host:port", s)
	}
	return nil
}

// target is the full URL that requests go to first.
func (c Config) target() string {
	base := strings.TrimRight(c.URL, "/")
	if c.Via == viaSelect {
		return base + "/select_and_reserve"
	}
	return base + c.path()
}

// path is that of the OpenAI route.
func (c Config) path() string {
	if c.Endpoint == "completions" {
		return "/v1/completions"
	}
	return "/v1/chat/completions"
}
