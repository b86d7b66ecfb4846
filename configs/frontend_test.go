package configs_test

import (
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
		{"mode kv", nil, []string{"--load-aware"}, "router-mode: the front end does not serve mode kv yet (from default)"},
		{"router mode", nil, []string{"--router-mode=fastest"},
			`router-mode: "fastest" is none of round-robin, random, power-of-two, least-loaded, direct, kv (from flag --router-mode)`},
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
