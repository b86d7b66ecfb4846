// Package dispatch sends queued requests that can wait to a front end, as far as there is room that
// nobody else needs. They lie in Redis, under the keys and in the JSON of llm-d's batch gateway and
// async processor, until a result for them has been published; what a crashed process was working
// on is found by its lease, which ends. How much may be sent is decided by package budget.
package dispatch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// Config is what an operator sets by flags; queues are in the transport's document.
type Config struct {
	TransportFile string `koanf:"transport-config-file" usage:"JSON file of the Redis to use and its queues"`
	Transport     string `koanf:"transport-config" usage:"the same JSON inline; exactly one of the two"`
	TransportKind string `koanf:"transport" usage:"redis-sortedset"`
	PoolFile      string `koanf:"pool-config-file" usage:"JSON file of worker pools; without it there is one, default"`
	MergeFile     string `koanf:"request-merge-policy-config-file" usage:"JSON file of how queues of one budget take turns; without it the earliest deadline goes first"`
	TransformFile string `koanf:"transform-config-file" usage:"JSON file of changes to requests before they are sent"`
	Concurrency   int    `koanf:"concurrency" usage:"workers of the pool default: requests in flight at once"`

	Host        string `koanf:"host" usage:"address to listen on"`
	Port        int    `koanf:"port" usage:"port of status, dead letters and of submit, results and cancel; 0 takes a free one"`
	HealthPort  int    `koanf:"health-port" usage:"port of /healthz and /readyz; 0 takes a free one"`
	MetricsPort int    `koanf:"metrics-port" usage:"port of /metrics; 0 takes a free one"`
	APIKey      string `koanf:"api-key" usage:"bearer token that --port then asks for"`
	MetricsKey  string `koanf:"metrics-endpoint-token-file" usage:"file of a bearer token that --metrics-port then asks for"`

	RequestTimeout   time.Duration `koanf:"request-timeout" usage:"limit of one attempt; the deadline of the request is one too"`
	DrainTimeout     time.Duration `koanf:"drain-timeout" usage:"how long requests in flight may take after SIGTERM; what is left then goes back into the queue"`
	MaxAttempts      int           `koanf:"max-attempts" usage:"attempts that a request may fail; refusals for overload do not count; 0 is no limit"`
	MaxResponseBytes int           `koanf:"max-response-bytes" usage:"largest answer that is taken"`
	StreamPolicy     string        `koanf:"stream-policy" usage:"what becomes of stream: true in a request: force_off, passthrough or reject"`
	ResultExtras     bool          `koanf:"result-extras" usage:"tell in results more than llm-d does: metadata, attempts, times, usage"`
	ResultPrecedence string        `koanf:"result-queue-precedence" usage:"whose choice of a result list counts: message or config"`
	DryRun           bool          `koanf:"dry-run" usage:"take nothing out of the queues; log what would be sent, and why not"`

	PrometheusURL    string        `koanf:"prometheus-url" usage:"Prometheus that gates ask"`
	MetricsPoll      time.Duration `koanf:"metrics-poll-interval" usage:"how often it is asked"`
	CacheTTL         time.Duration `koanf:"prometheus-cache-ttl" usage:"llm-d's name of metrics-poll-interval, in place of which it counts; 0: it was not given"`
	QueryTimeout     time.Duration `koanf:"query-timeout" usage:"how long it may take to answer, or a front end"`
	BacklogPoll      time.Duration `koanf:"metrics-backlog-poll-interval" usage:"how often queues are measured; 0 is off"`
	BudgetLog        time.Duration `koanf:"budget-log-interval" usage:"how often the log tells of each budget while something is queued or in flight; 0 is off"`
	MaxSampleAge     time.Duration `koanf:"max-sample-age" usage:"age at which a sample from Prometheus is believed no longer; of scraped ones a sixth of it"`
	OverloadCooldown time.Duration `koanf:"overload-cooldown" usage:"shortest time a gate stays closed after a refusal where no reading can end that"`
	OverloadExempt   []string      `koanf:"overload-exempt-reasons" usage:"reasons of refusals that say nothing of load"`
	IgnoreLateSheds  bool          `koanf:"ignore-late-sheds" usage:"ignore refusals of requests that were sent before the gate last opened"`

	LeaseTTL      time.Duration `koanf:"lease-ttl" usage:"time after which the requests of a process that died are taken over"`
	ReapInterval  time.Duration `koanf:"reap-interval" usage:"how often such requests are looked for"`
	MaxDeliveries int           `koanf:"max-deliveries" usage:"processes that a request may crash before it goes to the dead letters"`
	DeadLetterMax int           `koanf:"dead-letter-max" usage:"dead letters that are kept of a queue, about"`
	CancelPoll    time.Duration `koanf:"cancel-poll-interval" usage:"how often cancellations are looked for"`
	ResultHoldMax time.Duration `koanf:"result-hold-max" usage:"how long a result is kept that Redis does not take"`
	RefuseHold    time.Duration `koanf:"refuse-hold" usage:"how long a request is passed over that a queue's gate has refused"`
	PoolWaitMax   time.Duration `koanf:"pool-wait-max" usage:"how long a worker waits for its pool's gate before it gives the request back"`
	ImportRetries bool          `koanf:"import-legacy-retry" usage:"at the start, take over what llm-d's processor has in its retry set"`
	TLSCA         string        `koanf:"tls-ca-cert" usage:"file of further certificate authorities to trust at the gateway"`
	TLSCert       string        `koanf:"tls-cert" usage:"file of a client certificate for the gateway"`
	TLSKey        string        `koanf:"tls-key" usage:"file of its key"`
	TLSInsecure   bool          `koanf:"tls-insecure-skip-verify" usage:"trust any certificate of the gateway"`
	CompatMetrics bool          `koanf:"compat-metrics" usage:"also tell the metrics by the names of llm-d's async processor"`
	Prometheus    HTTPAuth      `koanf:",squash"`

	Inside *Inside `koanf:"-" json:"-"` // nil in a process of its own
}

// Inside is what a dispatcher knows of the front end in whose process it runs.
type Inside struct {
	URL    string // where queues without an igw_base_url send their requests
	APIKey string // what it asks of clients; those requests bear it if they bring no Authorization
	// Capacity measures a pool. It must not block for longer than a moment.
	Capacity func(ctx context.Context, pool string) (Capacity, error)
}

// Capacity is how full a pool is, and how large.
type Capacity struct {
	Fullness         float64 // 1 - D
	ReadyEndpoints   int
	Requests, Tokens uint64 // what all of them take, 0 if unknown
	Time             time.Time
}

// HTTPAuth is how a source of metrics is asked.
type HTTPAuth struct {
	BearerTokenFile string   `koanf:"metrics-bearer-token-file" usage:"file of a bearer token for Prometheus and scraped pages; read again when it changes"`
	BasicUser       string   `koanf:"metrics-basic-auth-user" usage:"user for basic authentication there"`
	BasicFile       string   `koanf:"metrics-basic-auth-password-file" usage:"file of its password"`
	CA              string   `koanf:"metrics-tls-ca" usage:"file of the certificate authorities to trust there"`
	Cert            string   `koanf:"metrics-tls-cert" usage:"file of a client certificate for there"`
	Key             string   `koanf:"metrics-tls-key" usage:"file of its key"`
	ServerName      string   `koanf:"metrics-tls-server-name" usage:"name that the certificate there must have"`
	Insecure        bool     `koanf:"metrics-tls-insecure-skip-verify" usage:"trust any certificate there"`
	Headers         []string `koanf:"metrics-headers" usage:"headers to send there: Name=value, separated by commas"`
}

// DefaultConfig is what the documentation says.
func DefaultConfig() Config {
	return Config{
		TransportKind: "redis-sortedset", Concurrency: 64, Host: "0.0.0.0", Port: 8093, HealthPort: 8081, MetricsPort: 9090,
		RequestTimeout: 5 * time.Minute, DrainTimeout: 2 * time.Minute, MaxAttempts: 10, MaxResponseBytes: 32 << 20,
		StreamPolicy: "force_off", ResultExtras: true, ResultPrecedence: "message",
		MetricsPoll: 2 * time.Second, QueryTimeout: queryTimeout, BacklogPoll: 15 * time.Second, BudgetLog: 10 * time.Second, MaxSampleAge: 30 * time.Second,
		OverloadCooldown: 5 * time.Second, OverloadExempt: []string{"rejected-context-cancelled", "rejected-shutting-down"},
		LeaseTTL: time.Minute, ReapInterval: 5 * time.Second, MaxDeliveries: 5, DeadLetterMax: 10000, CancelPoll: time.Second,
		ResultHoldMax: 10 * time.Minute, RefuseHold: time.Second, PoolWaitMax: 10 * time.Second,
	}
}

const maxWorkers = 65536

// Validate returns all findings, each beginning with its key. What is in files is looked at by New.
func (c Config) Validate() error {
	var errs []error
	fail := func(key, format string, args ...any) { errs = append(errs, fmt.Errorf(key+": "+format, args...)) }
	if c.TransportKind != "redis-sortedset" {
		fail("transport", "%q is not redis-sortedset", c.TransportKind)
	}
	for key, n := range map[string]int{"port": c.Port, "health-port": c.HealthPort, "metrics-port": c.MetricsPort} {
		if n < 0 || n > 65535 {
			fail(key, "%d is not within 0..65535", n)
		}
	}
	if c.Concurrency < 1 || c.Concurrency > maxWorkers {
		fail("concurrency", "%d is not within 1..%d", c.Concurrency, maxWorkers)
	}
	for key, n := range map[string]int{"max-deliveries": c.MaxDeliveries, "dead-letter-max": c.DeadLetterMax, "max-response-bytes": c.MaxResponseBytes} {
		if n < 1 {
			fail(key, "%d is not positive", n)
		}
	}
	if c.MaxAttempts < 0 {
		fail("max-attempts", "%d is negative", c.MaxAttempts)
	}
	for key, d := range map[string]time.Duration{
		"request-timeout": c.RequestTimeout, "query-timeout": c.QueryTimeout, "metrics-poll-interval": c.MetricsPoll, "max-sample-age": c.MaxSampleAge,
		"overload-cooldown": c.OverloadCooldown, "reap-interval": c.ReapInterval, "cancel-poll-interval": c.CancelPoll,
		"result-hold-max": c.ResultHoldMax, "refuse-hold": c.RefuseHold, "pool-wait-max": c.PoolWaitMax,
	} {
		if d <= 0 {
			fail(key, "%v is not positive", d)
		}
	}
	if c.LeaseTTL < time.Second {
		fail("lease-ttl", "%v is below 1s", c.LeaseTTL)
	}
	for key, d := range map[string]time.Duration{"drain-timeout": c.DrainTimeout, "metrics-backlog-poll-interval": c.BacklogPoll, "prometheus-cache-ttl": c.CacheTTL, "budget-log-interval": c.BudgetLog} {
		if d < 0 {
			fail(key, "%v is negative", d)
		}
	}
	if c.StreamPolicy != "force_off" && c.StreamPolicy != "passthrough" && c.StreamPolicy != "reject" {
		fail("stream-policy", "%q is none of force_off, passthrough, reject", c.StreamPolicy)
	}
	if c.ResultPrecedence != "message" && c.ResultPrecedence != "config" {
		fail("result-queue-precedence", "%q is neither message nor config", c.ResultPrecedence)
	}
	if (c.TLSCert == "") != (c.TLSKey == "") {
		fail("tls-cert", "needs tls-key, and the other way round")
	}
	for _, h := range c.Prometheus.Headers {
		if name, _, ok := strings.Cut(h, "="); !ok || name == "" {
			fail("metrics-headers", "%q is not Name=value", h)
		}
	}
	return errors.Join(errs...)
}

// Transport is the document of the Redis to use and its queues.
type Transport struct {
	URL           string   `json:"url"`
	Mode          string   `json:"mode"` // standalone, cluster or sentinel
	Addrs         []string `json:"addrs"`
	MasterName    string   `json:"master_name"`
	ResultQueue   string   `json:"result_queue_name"`
	RetryQueue    string   `json:"retry_queue_name"` // of llm-d's processor
	PollMS        int      `json:"poll_interval_ms"`
	BatchSize     int      `json:"batch_size"` // most claims of one round, 0: as many as there are free workers
	EnableTracing bool     `json:"enable_tracing"`
	Dedupe        string   `json:"dedupe"` // active: what is submitted here is refused while its ID is in work; "": it is a new generation
	Queues        []*Queue `json:"queues"`
}

// Queue is one queue and where its requests go.
type Queue struct {
	ID          string            `json:"id"`
	Name        string            `json:"queue_name"`
	BaseURL     string            `json:"igw_base_url"`
	Path        string            `json:"request_path_url"`
	PoolID      string            `json:"worker_pool_id"`
	Objective   string            `json:"inference_objective"`
	ResultQueue string            `json:"result_queue_name"`
	GateType    string            `json:"gate_type"`
	GateParams  json.RawMessage   `json:"gate_params"`
	Labels      map[string]string `json:"labels"`
	Group       string            `json:"budget_group"`

	keys    keys
	apiKey  string // of the front end in whose process this is, if that is where requests go
	gateway *gateway
	workers *workers
	gate    *gate
	group   *group
	uri     string               // of requests whose messages name no endpoint
	holds   map[string]time.Time // by gid, until when; this and the next ones are of who has the turn
	ahead   []head               // that were seen and not taken yet, in their order
	rest    []redis.Z            // behind them, as they were found
	known   []head               // that were seen before rest and may be in it
	seen    time.Time            // when rest was found
	reached int64                // how many messages were looked at last
	depth   atomic.Pointer[depth]
	failing atomic.Bool // the gate could not be asked about a message
	shut    time.Time   // then, until when it is asked no more; of who has the turn
	counts
}

// pool is a set of workers.
type pool struct {
	ID         string          `json:"id"`
	Workers    int             `json:"workers"`
	GateType   string          `json:"gate_type"`
	GateParams json.RawMessage `json:"gate_params"`
}

// strict decodes a document and refuses what it does not know.
func strict(text []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return err
	}
	if dec.More() {
		return errors.New("there is something behind the document")
	}
	return nil
}

// transport reads and completes the document. environ is for REDIS_URL.
func (c Config) transport(getenv func(string) string) (*Transport, error) {
	text := []byte(c.Transport)
	switch {
	case (c.Transport == "") == (c.TransportFile == ""):
		return nil, errors.New("transport-config-file: give it or transport-config, and not both")
	case c.TransportFile != "":
		var err error
		if text, err = os.ReadFile(c.TransportFile); err != nil {
			return nil, fmt.Errorf("transport-config-file: %w", err)
		}
	}
	t := &Transport{ResultQueue: "result-list", RetryQueue: "retry-sortedset", PollMS: 200, Mode: "standalone"}
	if err := strict(text, t); err != nil {
		return nil, fmt.Errorf("transport-config: %w", err)
	}
	if t.URL == "" {
		t.URL = getenv("REDIS_URL")
	}
	if t.URL == "" && len(t.Addrs) == 0 {
		return nil, errors.New("transport-config: url is missing, and REDIS_URL is not set")
	}
	if t.PollMS < 10 || t.PollMS > 60000 || t.BatchSize < 0 || len(t.Queues) == 0 || len(t.Queues) > 1000 {
		return nil, errors.New("transport-config: poll_interval_ms must be within 10..60000, batch_size not negative, and there must be 1 to 1000 queues")
	}
	if t.Dedupe != "" && t.Dedupe != "active" {
		return nil, fmt.Errorf("transport-config: dedupe %q is not active", t.Dedupe)
	}
	seen := map[string]bool{}
	for _, q := range t.Queues {
		if err := q.complete(c.Inside); err != nil {
			return nil, fmt.Errorf("transport-config: queue %q: %w", q.Name, err)
		}
		if seen["i"+q.ID] || seen["n"+q.Name] {
			return nil, fmt.Errorf("transport-config: queue %q: its id or name is there twice", q.Name)
		}
		if t.Mode == "cluster" && q.keys.spread() {
			return nil, fmt.Errorf("transport-config: queue %q: in a cluster a name with a brace needs a {tag}", q.Name)
		}
		seen["i"+q.ID], seen["n"+q.Name] = true, true
	}
	return t, nil
}

func (q *Queue) complete(inside *Inside) error {
	if q.Name == "" {
		return errors.New("queue_name is missing")
	}
	kind := "constant"
	if inside != nil {
		kind = "spillway"
		if q.BaseURL == "" {
			q.BaseURL, q.apiKey = inside.URL, inside.APIKey
		}
	}
	if u, err := url.Parse(q.BaseURL); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
		return fmt.Errorf("igw_base_url %q is no http or https URL", q.BaseURL)
	}
	for _, d := range []struct{ to, def *string }{{&q.ID, &q.Name}, {&q.Path, new("/v1/completions")}, {&q.PoolID, new("default")}, {&q.GateType, &kind}} {
		if *d.to == "" {
			*d.to = *d.def
		}
	}
	q.keys = keysOf(q.Name)
	q.depth.Store(&depth{})
	if err := checkEndpoint(q.Path); err != nil {
		return err
	}
	u, err := url.Parse(q.Path)
	if err == nil {
		q.uri = u.RequestURI()
	}
	return err
}

// checkEndpoint refuses what would lead elsewhere than below the gateway's URL; "" is fine.
func checkEndpoint(path string) error {
	if path == "" {
		return nil
	}
	u, err := url.Parse(path)
	if err != nil || u.Scheme != "" || u.Host != "" || !strings.HasPrefix(path, "/") || strings.HasPrefix(path, "//") || strings.Contains(u.Path, "..") || strings.ContainsAny(path, "\r\n\\") {
		return fmt.Errorf("endpoint %q is no absolute path", path)
	}
	return nil
}

// pools reads the pools' file.
func (c Config) pools() ([]pool, error) {
	if c.PoolFile == "" {
		return []pool{{ID: "default", Workers: c.Concurrency}}, nil
	}
	text, err := os.ReadFile(c.PoolFile)
	if err != nil {
		return nil, fmt.Errorf("pool-config-file: %w", err)
	}
	var all []pool
	if err := strict(text, &all); err != nil {
		return nil, fmt.Errorf("pool-config-file: %w", err)
	}
	seen := map[string]bool{}
	for _, p := range all {
		if p.ID == "" || seen[p.ID] || p.Workers < 1 || p.Workers > maxWorkers {
			return nil, fmt.Errorf("pool-config-file: pool %q: needs an id of its own and 1 to %d workers", p.ID, maxWorkers)
		}
		seen[p.ID] = true
	}
	return all, nil
}
