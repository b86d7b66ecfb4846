package configs_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"spillway/configs"
)

// TestCommands checks of each command's Config that its settings can be declared (no key is
// used twice), and that its defaults pass.
func TestCommands(t *testing.T) {
	replay := configs.DefaultReplay()
	replay.Replay.Rate = 1 // one of the two kinds of load has to be chosen
	for name, def := range map[string]configs.Validator{
		"frontend": configs.DefaultFrontend(), "demo": configs.DefaultDemo(),
		"sim": configs.DefaultSim(), "replay": replay,
	} {
		configs.Flags(pflag.NewFlagSet(name, pflag.ContinueOnError), def)
		if err := def.Validate(); err != nil {
			t.Errorf("%s: defaults: %v", name, err)
		}
	}
}

// TestExampleFile loads the file that we ship.
func TestExampleFile(t *testing.T) {
	none := func() []string { return nil }
	cfg, warnings, err := configs.Load(configs.DefaultFrontend(), "frontend.yaml", none, nil)
	if err != nil || len(warnings) > 0 {
		t.Fatalf("Load(frontend.yaml): %v, warnings %q", err, warnings)
	}
	if len(cfg.Fleet.Workers) != 2 || !cfg.Serving.Busy.Thresholds().Any() {
		t.Errorf("Load(frontend.yaml) = %+v, want two workers and a threshold", cfg)
	}
}

func TestFrontendSettings(t *testing.T) {
	for _, tt := range []struct {
		name string
		env  []string
		args []string
		want string
	}{
		{"DYN threshold", []string{"DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD=1.5"}, nil,
			"active-decode-blocks-threshold: 1.5 is not within 0..1 (from variable DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD)"},
		{"mode kv", nil, []string{"--load-aware"}, ""},
		{"no time", nil, []string{"--router-ttl-secs=-1"}, "router-ttl-secs: -1 is not a number of at least 0 (from flag --router-ttl-secs)"},
		{"router mode", nil, []string{"--router-mode=fastest"},
			`router-mode: "fastest" is none of round-robin, random, power-of-two, least-loaded, direct, kv (from flag --router-mode)`},
		{"no number in a DYN variable", []string{"DYN_ROUTER_QUEUE_THRESHOLD=much"}, nil, ""},
		{"a number out of range", []string{"DYN_ROUTER_QUEUE_THRESHOLD=-1"}, nil,
			"router-queue-threshold: -1 is not a number of at least 0 (from variable DYN_ROUTER_QUEUE_THRESHOLD)"},
		{"a keyed hash", []string{"DYN_ROUTER_TRACKING_HASH=keyed"}, nil, `router-tracking-hash: "keyed" is not public-xxh3-v1, the only one (from variable DYN_ROUTER_TRACKING_HASH)`},
		{"the hash that there is", []string{"DYN_ROUTER_TRACKING_HASH=public-xxh3-v1"}, nil, ""},
		{"busy-threshold is only warned about", []string{"SPILLWAY_BUSY_THRESHOLD=0.9"}, nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			fs := pflag.NewFlagSet("frontend", pflag.ContinueOnError)
			configs.Flags(fs, configs.DefaultFrontend())
			if err := fs.Parse(tt.args); err != nil {
				t.Fatal(err)
			}
			got := ""
			_, _, err := configs.Load(configs.DefaultFrontend(), "", func() []string { return tt.env }, fs)
			if err != nil {
				got = err.Error()
			}
			if got != tt.want {
				t.Errorf("Load(%q, %q): %s\nwant %s", tt.env, tt.args, got, tt.want)
			}
		})
	}
}

// TestReplicaSync: that replicas exchange reservations is told by the settings of the exchange alone.
func TestReplicaSync(t *testing.T) {
	for _, tt := range []struct {
		env, warning string
		args         []string
	}{
		{"DYN_ROUTER_REPLICA_SYNC=true", "router-replica-sync: exchanges nothing without replica-sync-port (from variable DYN_ROUTER_REPLICA_SYNC)", nil},
		{"", "router-replica-sync: exchanges nothing without replica-sync-port (from flag --router-replica-sync)", []string{"--router-replica-sync"}},
		{"DYN_ROUTER_REPLICA_SYNC=true", "", []string{"--replica-sync-port", "8192"}},
		{"DYN_ROUTER_REPLICA_SYNC=off", "", nil},
		{"DYN_ROUTER_REPLICA_SYNC=perhaps", `router-replica-sync: "perhaps" is not true or false (from variable DYN_ROUTER_REPLICA_SYNC): ignored`, nil},
	} {
		fs := pflag.NewFlagSet("select-service", pflag.ContinueOnError)
		configs.Flags(fs, configs.DefaultSelectService())
		if err := fs.Parse(tt.args); err != nil {
			t.Fatal(err)
		}
		_, warnings, err := configs.Load(configs.DefaultSelectService(), "", func() []string { return []string{tt.env} }, fs)
		if got := strings.Join(warnings, "\n"); err != nil || got != tt.warning {
			t.Errorf("Load(%q, %q): %v, warnings %q; want %q", tt.env, tt.args, err, got, tt.warning)
		}
	}
	_, warnings, err := configs.Load(configs.DefaultFrontend(), "", func() []string { return []string{"DYN_ROUTER_REPLICA_SYNC=1"} }, nil)
	if want := "router-replica-sync: exchanges nothing without replica-sync-bind (from variable DYN_ROUTER_REPLICA_SYNC)"; err != nil || len(warnings) != 1 || warnings[0] != want {
		t.Errorf("of a front end: %v, warnings %q; want %q", err, warnings, want)
	}
}

// TestPolicyFile: what is wrong with the file that a setting names is told with the setting.
func TestPolicyFile(t *testing.T) {
	dir := t.TempDir()
	good, bad := filepath.Join(dir, "good"), filepath.Join(dir, "bad")
	for path, text := range map[string]string{good: "worker_selection: {}", bad: "models: {}"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const from = " (from variable DYN_ROUTER_POLICY_CONFIG)"
	for path, want := range map[string]string{
		good: "", "": "",
		bad:                        "router-policy-config: " + bad + ": holds neither a profile nor worker_selection" + from,
		filepath.Join(dir, "none"): "router-policy-config: open " + filepath.Join(dir, "none") + ": no such file or directory" + from,
	} {
		got := ""
		cfg, _, err := configs.Load(configs.DefaultFrontend(), "", func() []string { return []string{"DYN_ROUTER_POLICY_CONFIG=" + path} }, nil)
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("Load with policy file %q: %s\nwant %s", path, got, want)
		}
		if read := cfg.Serving.Router.Queue.Policies != nil; read != (path == good) {
			t.Errorf("Load with policy file %q: read = %v", path, read)
		}
	}
}

func TestNamesThatMeanTwoThings(t *testing.T) {
	for _, fleet := range []configs.Fleet{
		{Models: []string{"a", "b"}, Aliases: configs.Aliases{"a": "b"}},
		{Models: []string{"a"}, Workers: configs.Workers{{ID: 1, Name: "w", Models: []string{"b", "a"}, Tenant: "default"}}},
	} {
		if err := fleet.Validate(); err == nil {
			t.Errorf("Validate(%+v) = nil, want an error", fleet)
		}
	}
}

// TestInnerDispatch: who has the file of a dispatcher run by a front end is told of what guards nothing there.
func TestInnerDispatch(t *testing.T) {
	for key, want := range map[string]int{"metrics-endpoint-token-file: /etc/token": 1, "metrics-port: 9999": 1, "dry-run: true": 0} {
		path := filepath.Join(t.TempDir(), "dispatch.yaml")
		if err := os.WriteFile(path, []byte(key), 0o600); err != nil {
			t.Fatal(err)
		}
		_, warnings, err := configs.Load(configs.InnerDispatch{Dispatch: configs.DefaultDispatch()}, path, func() []string { return nil }, nil)
		if err != nil || len(warnings) != want {
			t.Errorf("Load of %q warns %q, %v; want %d warnings", key, warnings, err, want)
		}
	}
}
