package router_test

import (
	"math"
	"strings"
	"testing"

	"spillway/router"
)

// matrix is the file of scheduler.md 10 with a second family, a class outside of families and a
// model of its own.
const matrix = `
default_policy_family: standard
uncached_isl_buckets:
  - {min_tokens: 0,  bucket: cached}
  - {min_tokens: 32, bucket: uncached}
policy_classes:
  - {name: standard-cached, policy_family: standard, cache_bucket: cached, quantum: 2048, queue_policy: wspt,
     prefill_busy_threshold: 4096, prefill_busy_threshold_frac: 16.0, request_queue_limit_per_worker: 1024,
     raw_isl_token_queue_limit_per_worker: 1048576, cached_token_queue_limit_per_worker: 2097152}
  - {name: standard-uncached, policy_family: standard, cache_bucket: uncached, quantum: 512}
  - {name: latency-cached, policy_family: latency, cache_bucket: cached, quantum: 1}
  - {name: latency-uncached, policy_family: latency, cache_bucket: uncached, quantum: 1}
  - {name: batch, quantum: 3}
models:
  own:
    default_policy_family: f
    uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
    policy_classes: [{name: only, policy_family: f, cache_bucket: all, quantum: 7}]
worker_selection: {aggregated: default}
`

func policies(t testing.TB, file string) *router.Policies {
	t.Helper()
	p, err := router.ParsePolicies([]byte(file))
	if err != nil {
		t.Fatalf("ParsePolicies = %v", err)
	}
	return p
}

// profiles is a router with a policy file.
func profiles(t testing.TB, file string) *router.Router {
	t.Helper()
	cfg := router.DefaultConfig()
	cfg.Queue.Policies = policies(t, file)
	return router.New(cfg, limits(nil, nil), nil, nil)
}

// TestClassOfRequest has row 85 of scheduler.md 18.7.
func TestClassOfRequest(t *testing.T) {
	r := profiles(t, matrix)
	for _, tt := range []struct {
		model, header string
		uncached      uint64
		want          string
	}{
		{"M", "nobody", 64, "standard-uncached"},
		{"M", "latency", 64, "latency-uncached"},
		{"M", "batch", 64, "batch"},
		{"M", "latency-cached", 64, "standard-uncached"}, // a class of the matrix is not chosen by its name
		{"M", "", 0, "standard-cached"},
		{"M", "", 31, "standard-cached"},
		{"M", "", 32, "standard-uncached"},
		{"M", "latency", 31, "latency-cached"},
		{"own", "batch", 64, "only"}, // its profile has no such class, and nothing of the root's
	} {
		p := r.Profile(tt.model)
		if got := p.Classes[p.Class(tt.header, tt.uncached)].Name; got != tt.want {
			t.Errorf("%s: class for %q with %d uncached tokens = %s, want %s", tt.model, tt.header, tt.uncached, got, tt.want)
		}
	}
	if !r.Profile("M").Queues() || r.Profile("own").Queues() {
		t.Errorf("Queues = %v for M and %v for own, want true and false", r.Profile("M").Queues(), r.Profile("own").Queues())
	}
}

// TestSyntheticProfile: without a file there is one class, and the header means nothing.
func TestSyntheticProfile(t *testing.T) {
	cfg := router.DefaultConfig()
	if p := router.New(cfg, limits(nil, nil), nil, nil).Profile("M"); p.Queues() || p.Classes[0].Order != router.FCFS {
		t.Errorf("Profile = %+v, want fcfs without a threshold", p)
	}
	cfg.Queue.QueueThreshold, cfg.Queue.QueuePolicy = new(0.0), router.WSPT
	cfg.Queue.Policies = policies(t, "models: {own: {default_policy_family: f, uncached_isl_buckets: [{min_tokens: 0, bucket: all}], "+
		"policy_classes: [{name: only, policy_family: f, cache_bucket: all, quantum: 7}]}}")
	r := router.New(cfg, limits(nil, nil), nil, nil)
	p := r.Profile("M")
	c := p.Classes[p.Class("only", 9)]
	if len(p.Classes) != 1 || c.Name != router.DefaultClass || c.Order != router.WSPT || c.Quantum != 1 || !p.Queues() {
		t.Errorf("Profile of a model that the file does not name = %+v, want one class, wspt, quantum 1, with a threshold", p)
	}
	if got := r.Profile("own").Classes[0].Name; got != "only" {
		t.Errorf("class of own = %s, want only", got)
	}
}

// TestClassBusy has rows 67 to 70 of scheduler.md 18.7.
func TestClassBusy(t *testing.T) {
	for _, tt := range []struct {
		row    string
		tokens *uint64
		frac   *float64
		batch  uint64 // 0 is missing
		p      uint64
		want   bool
	}{
		{"67", nil, new(0.0), 100, 0, false},
		{"67", nil, new(0.0), 100, 1, true},
		{"68", nil, new(0.5), 100, 50, false},
		{"68", nil, new(0.5), 100, 51, true},
		{"69", new(uint64(1024)), new(2.0), 400, 900, true},
		{"69, the first is over too", new(uint64(1024)), new(3.0), 400, 1025, true},
		{"69, neither", new(uint64(1024)), new(3.0), 400, 1024, false},
		{"70", nil, new(1.0), 0, 1_000_000, false},
		{"70, over it", nil, new(1.0), 0, 10_000_001, true},
		{"threshold 0 is any prefill", new(uint64(0)), nil, 0, 1, true},
		{"no threshold", nil, nil, 1, math.MaxUint64, false},
	} {
		c := router.Class{BusyPrefillTokens: tt.tokens, BusyPrefillFrac: tt.frac}
		if got := c.Busy(tt.p, tt.batch); got != tt.want {
			t.Errorf("row %s: Busy(%d, %d) = %v, want %v", tt.row, tt.p, tt.batch, got, tt.want)
		}
	}
}

func TestParsePolicies(t *testing.T) {
	const buckets = "uncached_isl_buckets: [{min_tokens: 0, bucket: a}, {min_tokens: 5, bucket: b}]\n"
	classes := func(list string) string {
		return "default_policy_family: f\n" + buckets + "policy_classes: [{name: x, policy_family: f, cache_bucket: a, quantum: 1}, " + list + "]"
	}
	const y = "{name: y, policy_family: f, cache_bucket: b, quantum: 1}"
	for _, tt := range []struct{ name, file, want string }{
		{"good", classes(y), ""},
		{"good", matrix, ""},
		{"only worker_selection", "worker_selection: {}", ""},
		{"only models", "models: {m: {" + strings.ReplaceAll(strings.TrimSuffix(buckets, "\n"), "\n", ", ") +
			", default_policy_family: f, policy_classes: [{name: x, policy_family: f, cache_bucket: a, quantum: 1}, " + y + "]}}", ""},
		{"empty", "", "holds neither a profile nor worker_selection"},
		{"no models", "models: {}", "holds neither"},
		{"two documents", "worker_selection: {}\n---\nworker_selection: {}", "more than one YAML document"},
		{"not a map", "[]", "cannot unmarshal"},
		{"unknown key", "default_policy: f", "default_policy not found"},
		{"unknown key of a class", classes("{name: y, quantums: 1}"), "quantums not found"},
		{"key twice", "worker_selection: {}\nworker_selection: {}", "already defined"},
		{"buckets alone", buckets, "default_policy_family: is missing"},
		{"no buckets", "default_policy_family: f\npolicy_classes: [" + y + "]", "uncached_isl_buckets: there are none"},
		{"no classes", "default_policy_family: f\n" + buckets, "policy_classes: there are none"},
		{"floor above 0", strings.Replace(classes(y), "min_tokens: 0", "min_tokens: 1", 1), "entry 1: min_tokens: the first has to be 0"},
		{"floors do not rise", strings.Replace(classes(y), "min_tokens: 5", "min_tokens: 0", 1), "entry 2: min_tokens: is not above"},
		{"no floor", strings.Replace(classes(y), "min_tokens: 5, ", "", 1), "entry 2: min_tokens: is missing"},
		{"bucket twice", strings.Replace(classes(y), "bucket: b}", "bucket: a}", 1), "there are two a"},
		{"bad name", classes("{name: 'a b', quantum: 1}"), `entry 2: name: "a b" is not a name`},
		{"no name", classes("{quantum: 1}"), `entry 2: name: "" is not a name`},
		{"name twice", classes("{name: x, quantum: 1}"), "entry 2: name: there are two x"},
		{"bad family", classes("{name: y, policy_family: 'é', cache_bucket: b, quantum: 1}"), "entry 2: policy_family"},
		{"family alone", classes("{name: y, policy_family: f, quantum: 1}"), "both there or both not"},
		{"bucket alone", classes("{name: y, cache_bucket: b, quantum: 1}"), "both there or both not"},
		{"unknown bucket", classes("{name: y, policy_family: f, cache_bucket: c, quantum: 1}"), `no bucket "c"`},
		{"two classes for a bucket", classes("{name: y, policy_family: f, cache_bucket: a, quantum: 1}"), "has a class for a already"},
		{"none for a bucket", classes("{name: y, quantum: 1}"), "family f has no class for bucket b"},
		{"explicit like a family", classes(y + ", {name: f, quantum: 1}"), "f is the name of a family and of a class"},
		{"no such default", strings.Replace(classes(y), "default_policy_family: f", "default_policy_family: g", 1), "no class is of family g"},
		{"lcfs", classes("{name: y, queue_policy: lcfs, quantum: 1}"), `"lcfs" is neither fcfs nor wspt`},
		{"no quantum", classes("{name: y}"), "quantum: needs to be above 0"},
		{"quantum 0", classes("{name: y, quantum: 0}"), "quantum: needs to be above 0"},
		{"quantum 1.5", classes("{name: y, quantum: 1.5}"), "not a whole number"},
		{"quantum -1", classes("{name: y, quantum: -1}"), "-1"},
		{"limit as text", classes("{name: y, quantum: 1, request_queue_limit_per_worker: '3'}"), "not a whole number"},
		{"threshold nan", classes("{name: y, quantum: 1, prefill_busy_threshold_frac: .nan}"), "prefill_busy_threshold_frac"},
		{"threshold inf", classes("{name: y, quantum: 1, prefill_busy_threshold_frac: .inf}"), "prefill_busy_threshold_frac"},
		{"threshold -1", classes("{name: y, quantum: 1, prefill_busy_threshold_frac: -1}"), "prefill_busy_threshold_frac"},
		{"model without a name", "models: {'': {default_policy_family: f}}", "models: a name is empty"},
		{"model without a profile", "models: {m: }", "models: m: has no profile"},
		{"model with half a profile", "models: {m: {default_policy_family: f}}", "models: m: uncached_isl_buckets: there are none"},
		{"unknown plug-in", "worker_selection: {decode: mine}", `worker_selection: decode: there is no policy "mine"`},
		{"plug-in of an unknown type", "worker_selection: {instances: [{name: mine, type: sticky, parameters: {a: 1}}]}", `type: "sticky" is not known`},
		{"plug-in called default", "worker_selection: {instances: [{name: default, type: sticky}]}", "default is the built-in policy"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := ""
			if _, err := router.ParsePolicies([]byte(tt.file)); err != nil {
				got = err.Error()
			}
			if (tt.want == "") != (got == "") || !strings.Contains(got, tt.want) {
				t.Errorf("ParsePolicies(%s): %q, want %q", tt.file, got, tt.want)
			}
		})
	}
}

// FuzzParsePolicies: whatever is in a file, what has been accepted has a class for every request.
func FuzzParsePolicies(f *testing.F) {
	f.Add([]byte(matrix))
	f.Add([]byte("worker_selection: {}"))
	f.Fuzz(func(t *testing.T, file []byte) {
		p, err := router.ParsePolicies(file)
		if err != nil {
			return
		}
		cfg := router.DefaultConfig()
		cfg.Queue.Policies = p
		r := router.New(cfg, limits(nil, nil), nil, nil)
		for _, model := range []string{"M", "own"} {
			profile := r.Profile(model)
			for _, header := range []string{"", "latency", "batch"} {
				for _, uncached := range []uint64{0, 31, 32, math.MaxUint64} {
					c := profile.Classes[profile.Class(header, uncached)]
					if c.Name == "" || c.Quantum == 0 || c.Order != router.FCFS && c.Order != router.WSPT {
						t.Fatalf("%s: class for %q, %d = %+v", model, header, uncached, c)
					}
				}
			}
		}
	})
}

func TestQueueConfig(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*router.QueueConfig)
		want   string // the key
	}{
		{"default", func(*router.QueueConfig) {}, ""},
		{"threshold 0", func(c *router.QueueConfig) { c.QueueThreshold = new(0.0) }, ""},
		{"below 0", func(c *router.QueueConfig) { c.QueueThreshold = new(-1.0) }, "router-queue-threshold: "},
		{"no number", func(c *router.QueueConfig) { c.QueueThreshold = new(math.NaN()) }, "router-queue-threshold: "},
		{"wspt", func(c *router.QueueConfig) { c.QueuePolicy = router.WSPT }, ""},
		{"lcfs", func(c *router.QueueConfig) { c.QueuePolicy = router.LCFS }, "router-queue-policy: "},
		{"built-in", func(c *router.QueueConfig) { c.SelectionPolicy = "default" }, ""},
		{"plug-in", func(c *router.QueueConfig) { c.SelectionPolicy = "mine" }, "router-worker-selection-policy: "},
		{"plug-in", func(c *router.QueueConfig) { c.DecodeSelectionPolicy = "mine" }, "router-decode-policy: "},
	} {
		c := router.DefaultQueueConfig()
		tt.change(&c)
		err := c.Validate()
		if (err == nil) != (tt.want == "") || err != nil && !strings.HasPrefix(err.Error(), tt.want) {
			t.Errorf("%s: Validate = %v, want %q", tt.name, err, tt.want)
		}
	}
}
