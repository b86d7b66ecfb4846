package configs_test

import (
	"reflect"
	"testing"

	"spillway/configs"
	"spillway/worker"
)

func normal(t *testing.T, records ...worker.Worker) configs.Workers {
	t.Helper()
	var all configs.Workers
	for _, r := range records {
		n, err := r.Normalize()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, n)
	}
	return all
}

func TestWorkers(t *testing.T) {
	const file = `
workers:
  - http://a:1
  - url: http://b:2
    name: b
    models: [m, m-lora]
    dp_size: 4
    kv_total_blocks: 1000
    rank_routing: engine
    api_key: secret
  - url: http://d:4
    engine: custom
    custom:
      kv_usage: 'cache_used{tier="gpu"}'
      rank_label: rank
`
	a := worker.Worker{Endpoint: "http://a:1"}
	b := worker.Worker{Endpoint: "http://b:2", Name: "b", Models: []string{"m", "m-lora"}, DPSize: 4,
		KVTotalBlocks: 1000, RankRouting: worker.RankByEngine, APIKey: "secret"}
	d := worker.Worker{Endpoint: "http://d:4", Engine: "custom", Custom: worker.Custom{KVUsage: `cache_used{tier="gpu"}`, RankLabel: "rank"}}
	for _, tt := range []struct {
		name string
		file string
		env  []string
		args []string
		want configs.Workers
	}{
		{"by flag", "", nil, []string{"--workers", "http://a:1,https://c"}, normal(t, a, worker.Worker{Endpoint: "https://c"})},
		{"by variable", "", []string{"SPILLWAY_WORKERS=http://a:1"}, nil, normal(t, a)},
		{"by file", file, nil, nil, normal(t, a, b, d)},
		{"flag chooses, the file knows", file, nil, []string{"--workers=http://b:2,http://c:3"}, normal(t, b, worker.Worker{Endpoint: "http://c:3"})},
		{"one line in the file", "workers: http://a:1", nil, nil, normal(t, a)},
		{"all entries commented out", "workers:", nil, nil, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg, _, err := load(t, tt.file, tt.env, tt.args...)
			if err != nil || !reflect.DeepEqual(cfg.Workers, tt.want) {
				t.Errorf("Load: workers %+v, %v; want %+v", cfg.Workers, err, tt.want)
			}
		})
	}
}

func TestWorkerErrors(t *testing.T) {
	for _, tt := range []struct {
		name string
		file string
		args []string
		want string
	}{
		{"unknown key", "workers: [{url: http://a, dpsize: 2}]", nil, "workers: entry 1: unknown key dpsize (from file s.yaml)"},
		{"learnt, not configured", "workers: [{url: http://a, max_model_len: 2}]", nil, "workers: entry 1: unknown key max_model_len (from file s.yaml)"},
		{"bad value", "workers: [http://a, {url: http://b, dp_size: -1}]", nil, `workers: entry 2: dp_size: "-1" is not a whole number of at least 0 (from file s.yaml)`},
		{"beyond uint32", "workers: [{url: http://b, dp_size: 4294967296}]", nil, "workers: entry 1: dp_size: 4294967296 is too large or too small (from file s.yaml)"},
		{"no scheme", "", []string{"--workers=a:1"}, `workers: entry 1: url: "a:1" needs to begin with http:// or https:// (from flag --workers)`},
		{"twice", "", []string{"--workers=http://a:1,http://a:1/"}, "workers: entry 2: url: http://a:1 is listed twice (from flag --workers)"},
		{"one ID twice", "workers: [{url: http://a, instance_id: 7}, {url: http://b, instance_id: 7}]", nil, "workers: entry 2: instance_id: 7 is also that of a (from file s.yaml)"},
		{"one name twice", "workers: [{url: http://a, name: x}, {url: http://b, name: x}]", nil, "workers: entry 2: name: x is also that of http://a (from file s.yaml)"},
		{"unknown engine", "workers: [{url: http://a, engine: tgi}]", nil, `workers: entry 1: engine: "tgi" is none of auto, vllm, sglang, trtllm and custom (from file s.yaml)`},
		{"custom, unknown key", "workers: [{url: http://a, engine: custom, custom: {usage: u}}]", nil, "workers: entry 1: custom: unknown key usage (from file s.yaml)"},
		{"custom, a list", "workers: [{url: http://a, engine: custom, custom: [u]}]", nil, "workers: entry 1: custom: is not a map of keys (from file s.yaml)"},
		{"custom, no text", "workers: [{url: http://a, engine: custom, custom: {kv_usage: {a: b}}}]", nil, "workers: entry 1: custom: kv_usage: is a list or a map, not text (from file s.yaml)"},
		{"custom, no series", "workers: [{url: http://a, engine: custom, custom: {kv_usage: 'u{'}}]", nil, `workers: entry 1: custom: kv_usage: "u{" needs label=value in its braces, and a closing one (from file s.yaml)`},
		{"custom without a mapping", "workers: [{url: http://a, engine: custom}]", nil, "workers: entry 1: custom: kv_usage: nothing tells how full the cache is; give it, kv_used_blocks or kv_used_tokens (from file s.yaml)"},
		{"a map", "workers: {url: http://a}", nil, "workers: is not a list (from file s.yaml)"},
		{"a list in the list", "workers: [[]]", nil, "workers: entry 1: is neither a URL nor a map of keys (from file s.yaml)"},
		{"a number", "workers: [1]", nil, `workers: entry 1: url: "1" needs to begin with http:// or https:// (from file s.yaml)`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, _, err := load(t, tt.file, nil, tt.args...)
			if err == nil || err.Error() != tt.want {
				t.Errorf("Load(%q, %q): %v\nwant %s", tt.file, tt.args, err, tt.want)
			}
		})
	}
}
