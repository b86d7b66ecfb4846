package proxy

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"time"

	"spillway/buckets"
)

// Config is what an operator sets of the front end's HTTP side. A zero limit is off where its
// usage says so.
type Config struct {
	Host string `koanf:"http-host" dyn:"DYN_HTTP_HOST" usage:"address to listen on"`
	Port int    `koanf:"http-port" dyn:"DYN_HTTP_PORT" usage:"port to listen on; 0 takes a free one"`

	TLSCertPath string `koanf:"tls-cert-path" dyn:"DYN_TLS_CERT_PATH" usage:"file of the certificate to serve TLS with, on every address"`
	TLSKeyPath  string `koanf:"tls-key-path" dyn:"DYN_TLS_KEY_PATH" usage:"file of the certificate's key"`
	APIKey      string `koanf:"api-key" usage:"bearer token that clients must send for models and inference"`
	AdminAddr   string `koanf:"admin-addr" usage:"second address (host:port), to which /busy_threshold and the metrics move, and which alone has /workers and profiles"`
	AdminToken  string `koanf:"admin-token" usage:"bearer token for changing thresholds and workers, and for profiles"`

	BodyLimitMB             int           `koanf:"body-limit-mb" dyn:"DYN_HTTP_BODY_LIMIT_MB" usage:"largest request body in binary megabytes"`
	BodyMemoryMB            int           `koanf:"body-memory-mb" usage:"most memory that request bodies in flight may hold, in binary megabytes: at least twice body-limit-mb, since a body may not grow beyond what it leaves to others"`
	DialTimeout             time.Duration `koanf:"dial-timeout" usage:"limit for connecting to a worker"`
	ResponseHeaderTimeout   time.Duration `koanf:"response-header-timeout" usage:"limit for a worker to begin its answer, which without streaming it does when all is generated; 0 is off"`
	StreamInactivityTimeout time.Duration `koanf:"stream-inactivity-timeout" dyn:"DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS" usage:"limit for a pause in a worker's answer; 0 is off"`
	RequestTimeout          time.Duration `koanf:"request-timeout" usage:"limit for a request as a whole; clients may ask for less by x-request-timeout-ms; 0 is off"`
	ClientWriteTimeout      time.Duration `koanf:"client-write-timeout" usage:"limit for one write to a client that does not read"`
	ClientReadTimeout       time.Duration `koanf:"client-read-timeout" usage:"limit for each 16 KiB of a request body to come from a client"`
	ClientIdleTimeout       time.Duration `koanf:"client-idle-timeout" usage:"age at which a client's idle connection is closed; load balancers should close theirs before"`
	DrainTimeout            time.Duration `koanf:"drain-timeout" dyn:"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS" usage:"how long running requests may take after SIGTERM"`
	DrainDelay              time.Duration `koanf:"drain-delay" usage:"how long after SIGTERM requests are still admitted while /health and /ready say no"`
	MigrationLimit          int           `koanf:"migration-limit" dyn:"DYN_MIGRATION_LIMIT" usage:"further workers to try before the first byte of an answer"`
	InhibitedDuration       time.Duration `koanf:"inhibited-duration" dyn:"DYN_RUNTIME_INHIBITED_DURATION_SECS" usage:"how long a worker that failed hard is left alone; 0 is off"`
	RetryOn500              bool          `koanf:"retry-on-500" usage:"try another worker after a 500 too"`
	CommitOn                string        `koanf:"commit-on" usage:"when a stream is committed to its worker: event (its first) or head"`
	PreCommitPeek           time.Duration `koanf:"pre-commit-peek" dyn:"DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS" usage:"how long after a worker's head its first event is waited for before the stream is committed all the same; 0 is without limit"`
	SSEKeepAliveInterval    time.Duration `koanf:"sse-keep-alive-interval" dyn:"DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS" bad:"dyn" usage:"pause after which a stream is sent a comment; 0 is off"`
	UnaryPrefill            string        `koanf:"unary-prefill" usage:"when the prefill load of a request that does not stream ends: estimate, or hold until the response head"`
	SlotMaxAge              time.Duration `koanf:"slot-max-age" usage:"age without progress at which a reservation whose request is gone counts as leaked"`
	QueueTimeout            time.Duration `koanf:"queue-timeout" usage:"longest time for which a request waits for a worker, with queue-size"`
	QueueTimeoutStatus      string        `koanf:"queue-timeout-status" usage:"status of a refusal after such a wait: overload, for that of overload-status-code, or 408"`
	OverloadStatusCode      string        `koanf:"overload-status-code" dyn:"DYN_HTTP_OVERLOAD_STATUS_CODE" usage:"status of a refusal because of load"`
	RetryAfter              string        `koanf:"retry-after" usage:"seconds for Retry-After on such a refusal; 0 sends none, auto follows the rate at which room is freed"`
	ErrorEnvelope           string        `koanf:"error-envelope" usage:"shape of error bodies: flat, or openai to wrap them in an error object"`
	ExposeUpstreamError     bool          `koanf:"expose-upstream-errors" usage:"pass on the bodies of workers' 5xx answers"`
	ForceIncludeUsage       bool          `koanf:"force-include-usage" dyn:"DYN_ENABLE_FORCE_INCLUDE_USAGE" usage:"always ask workers for usage on streams"`
	StrictValidation        bool          `koanf:"strict-validation" usage:"check sampling parameters and refuse unknown fields"`
	StripNvext              bool          `koanf:"strip-nvext" usage:"remove nvext from bodies before they go to a worker"`
	ForwardAuth             *bool         `koanf:"forward-authorization" usage:"pass on the client's Authorization and X-Api-Key headers to workers without a key of their own; unset is only without api-key"`
	HideWorkerHeaders       bool          `koanf:"hide-worker-headers" usage:"leave out X-Spillway-Worker, X-Spillway-Dp-Rank and X-Spillway-Attempts"`
	SuppressSDKRetry        bool          `koanf:"suppress-sdk-retry" usage:"send x-should-retry: false with refusals because of load"`
	DisableRoutingHints     bool          `koanf:"disable-routing-hints" dyn:"DYN_DISABLE_FRONTEND_NVEXT" usage:"ignore headers that pin a request to a worker or rank"`
	DisableAdminAPI         bool          `koanf:"disable-admin-api" dyn:"DYN_DISABLE_FRONTEND_ADMIN_API" usage:"do not serve /busy_threshold and /workers"`
	EnableAnthropicAPI      bool          `koanf:"enable-anthropic-api" dyn:"DYN_ENABLE_ANTHROPIC_API" usage:"serve /v1/messages from workers that speak Anthropic's API"`
	MetricsPrefix           string        `koanf:"metrics-prefix" dyn:"DYN_METRICS_PREFIX" usage:"prefix of the front end family of metrics"`
	CompatMetrics           bool          `koanf:"compat-metrics" usage:"also tell how full pools are by the metrics of llm-d's endpoint picker"`
	CompatQueueSize         string        `koanf:"compat-queue-size" usage:"what its queue size is: fullness (x capacity, which is what llm-d's async processor needs of a front end that sheds) or queue"`
	MetadataHeader          string        `koanf:"metadata-header" dyn:"DYN_METADATA_HEADER" usage:"prefix of headers that carry metadata"`

	CanaryAfter   time.Duration `koanf:"canary-after" dyn:"DYN_CANARY_WAIT_TIME" dynunit:"s" dynif:"DYN_HEALTH_CHECK_ENABLED" dynelse:"10" usage:"time without a success after which a worker is sent a request for one token; 0 is off"`
	CanaryTimeout time.Duration `koanf:"canary-timeout" dyn:"DYN_HEALTH_CHECK_REQUEST_TIMEOUT" dynunit:"s" usage:"limit for such a request"`

	CBFailureThreshold uint64        `koanf:"cb-failure-threshold" usage:"failures in a row after which a worker's circuit opens and it gets no requests; 0 is off"`
	CBWindow           time.Duration `koanf:"cb-window" usage:"time within which these failures count"`
	CBOpen             time.Duration `koanf:"cb-open" usage:"how long a circuit stays open before requests try the worker one at a time"`
	CBSuccessThreshold uint64        `koanf:"cb-success-threshold" usage:"successes of such requests after which the circuit closes"`

	ChatPath        string `koanf:"chat-path" dyn:"DYN_HTTP_SVC_CHAT_PATH" usage:"route of chat completions"`
	CompletionsPath string `koanf:"completions-path" dyn:"DYN_HTTP_SVC_CMP_PATH" usage:"route of completions"`
	EmbeddingsPath  string `koanf:"embeddings-path" dyn:"DYN_HTTP_SVC_EMB_PATH" usage:"route of embeddings"`
	ResponsesPath   string `koanf:"responses-path" dyn:"DYN_HTTP_SVC_RESPONSES_PATH" usage:"route of responses"`
	AnthropicPath   string `koanf:"anthropic-path" dyn:"DYN_HTTP_SVC_ANTHROPIC_PATH" usage:"route of messages"`
	ModelsPath      string `koanf:"models-path" dyn:"DYN_HTTP_SVC_MODELS_PATH" usage:"route of the model list"`
	HealthPath      string `koanf:"health-route" dyn:"DYN_HTTP_SVC_HEALTH_PATH" usage:"route of the readiness probe"`
	LivePath        string `koanf:"live-route" dyn:"DYN_HTTP_SVC_LIVE_PATH" usage:"route of the liveness probe"`
	MetricsPath     string `koanf:"metrics-route" dyn:"DYN_HTTP_SVC_METRICS_PATH" usage:"route of the metrics"`

	Histograms *buckets.Shapes `koanf:"-"` // buckets as the environment reshapes them; nil: as documented
}

// The values of QueueTimeoutStatus.
const (
	timeoutStatusOverload = "overload"
	timeoutStatus408      = "408"
)

// DefaultConfig is the documented front end.
func DefaultConfig() Config {
	return Config{
		Host: "0.0.0.0", Port: 8000,
		BodyLimitMB: 45, BodyMemoryMB: 512, DialTimeout: 2 * time.Second, ClientWriteTimeout: time.Minute, ClientReadTimeout: time.Minute,
		ClientIdleTimeout: 11 * time.Minute, // some load balancers keep theirs for 10
		DrainTimeout:      5 * time.Second, MigrationLimit: 1, InhibitedDuration: 5 * time.Second,
		CanaryTimeout:      3 * time.Second,
		CBFailureThreshold: 10, CBWindow: 2 * time.Minute, CBOpen: time.Minute, CBSuccessThreshold: 3,
		CommitOn: "event", UnaryPrefill: "estimate", SlotMaxAge: 10 * time.Minute,
		QueueTimeout: 5 * time.Second, QueueTimeoutStatus: timeoutStatusOverload,
		OverloadStatusCode: "503", RetryAfter: "1", ErrorEnvelope: "flat", MetricsPrefix: "dynamo_frontend", CompatQueueSize: compatFullness, MetadataHeader: "x-dynamo-meta-",
		ChatPath: "/v1/chat/completions", CompletionsPath: "/v1/completions", EmbeddingsPath: "/v1/embeddings",
		ResponsesPath: "/v1/responses", AnthropicPath: "/v1/messages", ModelsPath: "/v1/models", HealthPath: "/health", LivePath: "/live", MetricsPath: "/metrics",
	}
}

// Validate checks every field; an overload status that cannot be sent is no error (overloadStatus).
func (c Config) Validate() error {
	var errs []error
	fail := func(key, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s: %s", key, fmt.Sprintf(format, args...)))
	}
	if c.Port < 0 || c.Port > 65535 {
		fail("http-port", "%d is not within 0..65535", c.Port)
	}
	if c.BodyLimitMB < 1 || c.BodyLimitMB > 4096 {
		fail("body-limit-mb", "%d is not within 1..4096", c.BodyLimitMB)
	}
	if most := 1 << 20; c.BodyMemoryMB < 2*c.BodyLimitMB || c.BodyMemoryMB > most {
		fail("body-memory-mb", "%d is not within %d..%d: at least twice body-limit-mb (%d)", c.BodyMemoryMB, 2*c.BodyLimitMB, most, c.BodyLimitMB)
	}
	if c.MigrationLimit < 0 || c.MigrationLimit > 100 {
		fail("migration-limit", "%d is not within 0..100", c.MigrationLimit)
	}
	for key, d := range map[string]time.Duration{
		"dial-timeout": c.DialTimeout, "client-write-timeout": c.ClientWriteTimeout,
		"client-read-timeout": c.ClientReadTimeout, "client-idle-timeout": c.ClientIdleTimeout, "slot-max-age": c.SlotMaxAge,
		"queue-timeout": c.QueueTimeout, "canary-timeout": c.CanaryTimeout, "cb-window": c.CBWindow, "cb-open": c.CBOpen,
	} {
		if d <= 0 {
			fail(key, "%v is not positive", d)
		}
	}
	for key, d := range map[string]time.Duration{
		"drain-timeout": c.DrainTimeout, "drain-delay": c.DrainDelay, "inhibited-duration": c.InhibitedDuration,
		"response-header-timeout": c.ResponseHeaderTimeout, "stream-inactivity-timeout": c.StreamInactivityTimeout,
		"canary-after": c.CanaryAfter, "request-timeout": c.RequestTimeout, "pre-commit-peek": c.PreCommitPeek, "sse-keep-alive-interval": c.SSEKeepAliveInterval,
	} {
		if d < 0 {
			fail(key, "%v is negative", d)
		}
	}
	if c.MetricsPrefix == "" {
		fail("metrics-prefix", "must not be empty")
	}
	if c.CBSuccessThreshold == 0 {
		fail("cb-success-threshold", "0 is not above 0")
	}
	if c.QueueTimeout > maxTimeout {
		fail("queue-timeout", "%v is longer than %v", c.QueueTimeout, maxTimeout)
	}
	if c.QueueTimeoutStatus != timeoutStatusOverload && c.QueueTimeoutStatus != timeoutStatus408 {
		fail("queue-timeout-status", "%q is neither overload nor 408", c.QueueTimeoutStatus)
	}
	if c.CompatQueueSize != compatFullness && c.CompatQueueSize != compatQueue {
		fail("compat-queue-size", "%q is neither fullness nor queue", c.CompatQueueSize)
	}
	if c.CommitOn != "event" && c.CommitOn != "head" {
		fail("commit-on", "%q is neither event nor head", c.CommitOn)
	}
	if c.UnaryPrefill != "estimate" && c.UnaryPrefill != "hold" {
		fail("unary-prefill", "%q is neither estimate nor hold", c.UnaryPrefill)
	}
	if c.ErrorEnvelope != "flat" && c.ErrorEnvelope != "openai" {
		fail("error-envelope", "%q is neither flat nor openai", c.ErrorEnvelope)
	}
	if n, err := strconv.Atoi(c.RetryAfter); c.RetryAfter != "auto" && (err != nil || n < 0) {
		fail("retry-after", "%q is neither auto nor a number of seconds", c.RetryAfter)
	}
	for key, path := range map[string]string{
		"chat-path": c.ChatPath, "completions-path": c.CompletionsPath, "embeddings-path": c.EmbeddingsPath,
		"responses-path": c.ResponsesPath, "anthropic-path": c.AnthropicPath,
		"models-path": c.ModelsPath, "health-route": c.HealthPath, "live-route": c.LivePath, "metrics-route": c.MetricsPath,
	} {
		if !strings.HasPrefix(path, "/") || strings.ContainsAny(path, ":*? #") {
			fail(key, "%q is no plain path", path)
		}
	}
	for key, text := range map[string]string{"api-key": c.APIKey, "admin-token": c.AdminToken} {
		if !visible(text) {
			fail(key, "holds something other than visible ASCII, which no header can carry")
		}
	}
	if _, port, err := net.SplitHostPort(c.AdminAddr); c.AdminAddr != "" {
		if _, bad := strconv.ParseUint(port, 10, 16); err != nil || bad != nil {
			fail("admin-addr", "%q is not host:port", c.AdminAddr)
		}
	}
	if _, err := c.certificate(); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// forwardsAuth tells whether clients' credentials go on to workers. A key that is meant for us is
// nobody else's business unless the operator says so.
func (c Config) forwardsAuth() bool {
	if c.ForwardAuth == nil {
		return c.APIKey == ""
	}
	return *c.ForwardAuth
}

// overloadStatus is the configured status; one that HTTP cannot carry with a body becomes 503
// with a warning, so that a misspelling never turns refusals into something else.
func (c Config) overloadStatus(log *slog.Logger) int {
	n, err := strconv.Atoi(strings.TrimSpace(c.OverloadStatusCode))
	if err != nil || n < 200 || n > 999 || n == 204 || n == 205 || n == 304 {
		log.Warn("overload-status-code cannot be used, 503 is sent instead", "value", c.OverloadStatusCode)
		return 503
	}
	return n
}
