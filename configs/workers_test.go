package configs_test

import (
	"fmt"
	"reflect"
	"testing"

	"github.com/spf13/pflag"

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
  - url: http://e:5
    dp_size: 2
    kv_events_endpoints: {0: tcp://e:1, "1": tcp://e:2}
    replay_endpoint: tcp://e:3
`
	a := worker.Worker{Endpoint: "http://a:1"}
	b := worker.Worker{Endpoint: "http://b:2", Name: "b", Models: []string{"m", "m-lora"}, DPSize: 4,
		KVTotalBlocks: 1000, RankRouting: worker.RankByEngine, APIKey: "secret"}
	d := worker.Worker{Endpoint: "http://d:4", Engine: "custom", Custom: worker.Custom{KVUsage: `cache_used{tier="gpu"}`, RankLabel: "rank"}}
	e := worker.Worker{Endpoint: "http://e:5", DPSize: 2, KVEvents: map[uint32]string{0: "tcp://e:1", 1: "tcp://e:2"}, KVReplay: map[uint32]string{0: "tcp://e:3", 1: "tcp://e:4"}}
	for _, tt := range []struct {
		name string
		file string
		env  []string
		args []string
		want configs.Workers
	}{
		{"by flag", "", nil, []string{"--workers", "http://a:1,https://c"}, normal(t, a, worker.Worker{Endpoint: "https://c"})},
		{"by variable", "", []string{"SPILLWAY_WORKERS=http://a:1"}, nil, normal(t, a)},
		{"by file", file, nil, nil, normal(t, a, b, d, e)},
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
		{"no rank", "workers: [{url: http://a, kv_events_endpoints: {-1: tcp://a:1}}]", nil, "workers: entry 1: kv_events_endpoints: -1: is no rank (from file s.yaml)"},
		{"no map of ranks", "workers: [{url: http://a, kv_events_endpoints: [tcp://a:1]}]", nil, "workers: entry 1: kv_events_endpoints: is not a map of rank to text (from file s.yaml)"},
		{"no text of a rank", "workers: [{url: http://a, replay_endpoints: {0: [tcp://a:1]}}]", nil, "workers: entry 1: replay_endpoints: 0: [tcp://a:1] is not text (from file s.yaml)"},
		{"a bad endpoint", "workers: [{url: http://a, kv_events_endpoint: 'a:1'}]", nil, `workers: entry 1: kv_events_endpoint: "a:1": missing scheme (from file s.yaml)`},
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

// TestFleetPorts checks where workers that do not say it are taken to publish KV events.
func TestFleetPorts(t *testing.T) {
	type at = map[uint32]string
	here := worker.Worker{Endpoint: "http://127.0.0.1:1"}
	beside := worker.Worker{Endpoint: "http://127.0.0.1:2", DPSize: 2}
	says := worker.Worker{Endpoint: "http://127.0.0.1:3", KVEventsEndpoint: "tcp://x:1"}
	last := worker.Worker{Endpoint: "http://127.0.0.1:4"}
	six := worker.Worker{Endpoint: "http://[::1]:1", DPStart: 4, DPSize: 1}
	fleet := configs.Fleet{Workers: normal(t, here, beside, says, last, six), KVEventsPort: 5557, KVReplayPort: 5657}
	all, err := fleet.Known()
	if err != nil || len(all) != 5 {
		t.Fatalf("Known = %+v, %v", all, err)
	}
	for i, want := range []struct{ events, replay at }{
		{at{0: "tcp://127.0.0.1:5557"}, at{0: "tcp://127.0.0.1:5657"}},
		{at{0: "tcp://127.0.0.1:5558", 1: "tcp://127.0.0.1:5559"}, at{0: "tcp://127.0.0.1:5658", 1: "tcp://127.0.0.1:5659"}},
		{at{0: "tcp://x:1"}, nil},
		{at{0: "tcp://127.0.0.1:5560"}, at{0: "tcp://127.0.0.1:5660"}},
		{at{4: "tcp://[::1]:5561"}, at{4: "tcp://[::1]:5661"}},
	} {
		if !reflect.DeepEqual(all[i].KVEvents, want.events) || !reflect.DeepEqual(all[i].KVReplay, want.replay) {
			t.Errorf("%s publishes at %v and %v, want %v and %v", all[i].Endpoint, all[i].KVEvents, all[i].KVReplay, want.events, want.replay)
		}
	}
	if fleet.Workers[0].KVEvents != nil {
		t.Error("Known has changed what was configured")
	}
	fleet.DPSize = 4
	if all, err = fleet.Known(); err != nil || all[0].DPSize != 4 || all[1].DPSize != 2 || all[3].KVEvents[3] != "tcp://127.0.0.1:5566" {
		t.Errorf("with four ranks each Known = %+v, %v", all, err)
	}
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"--kv-events-port=65535"}, ""},
		{[]string{"--kv-events-port=65535", "--dp-size=2"}, "kv-events-port: 65535: port 65536, of a rank of a worker at h, is not within 1..65535 (from flag --kv-events-port)"},
		{[]string{"--kv-events-port=-1"}, "kv-events-port: -1: port -1, of a rank of a worker at h, is not within 1..65535 (from flag --kv-events-port)"},
		{[]string{"--kv-events-port=1", "--kv-replay-port=70000"}, "kv-replay-port: 70000: port 70000, of a rank of a worker at h, is not within 1..65535 (from flag --kv-replay-port)"},
		{[]string{"--kv-replay-port=1"}, "kv-replay-port: there is nothing to replay without kv-events-port (from flag --kv-replay-port)"},
		{[]string{fmt.Sprint("--dp-size=", worker.MaxDPSize+1)}, fmt.Sprintf("dp-size: %d is more than %d (from flag --dp-size)", worker.MaxDPSize+1, worker.MaxDPSize)},
	} {
		fs := pflag.NewFlagSet("frontend", pflag.ContinueOnError)
		configs.Flags(fs, configs.DefaultFrontend())
		if err := fs.Parse(append(tt.args, "--workers=http://h:1")); err != nil {
			t.Fatal(err)
		}
		_, _, err := configs.Load(configs.DefaultFrontend(), "", func() []string { return nil }, fs)
		if got := errorText(err); got != tt.want {
			t.Errorf("%v: %s\nwant %s", tt.args, got, tt.want)
		}
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
