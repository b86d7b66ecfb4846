package configs_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"spillway/configs"
)

// limits stands for the Config of a package with settings.
type limits struct {
	Frac   *float64      `koanf:"frac" dyn:"DYN_FRAC" usage:"share, or None"`
	Tokens *uint64       `koanf:"tokens" usage:"tokens, or None"`
	Hold   time.Duration `koanf:"hold" dyn:"DYN_HOLD_SECS" usage:"how long"`
	Peek   time.Duration `koanf:"peek" dyn:"DYN_PEEK_MS" usage:"how long"`
	Wait   time.Duration `koanf:"wait" dyn:"DYN_WAIT" dynunit:"s" dynif:"DYN_CHECK" dynelse:"10" usage:"how long"`
}

type command struct {
	Limits  limits  `koanf:",squash"`
	Port    int     `koanf:"port" dyn:"DYN_PORT" usage:"port"`
	Name    string  `koanf:"name" usage:"name"`
	On      bool    `koanf:"on" dyn:"DYN_ON" usage:"switch"`
	Seed    uint64  `koanf:"seed" usage:"seed"`
	Status  int     `koanf:"status" dyn:"DYN_STATUS" bad:"dyn" usage:"status"`
	Level   string  `koanf:"level" dyn:"DYN_LEVEL" bad:"dyn" usage:"level"`
	Credit  float64 `koanf:"credit" dyn:"DYN_CREDIT,DYN_OLD_CREDIT" bad:"unreadable" usage:"credit"`
	Events  bool    `koanf:"events" dyn:"DYN_EVENTS,DYN_OLD_EVENTS" bad:"unreadable" usage:"events"`
	Form    string  `koanf:"form" dyn:"DYN_JSON" dynbool:"json" usage:"form"`
	Ratio   float64
	URLs    []string        `koanf:"urls" usage:"addresses"`
	Peers   []string        `koanf:"peers" list:"exact" usage:"addresses"`
	Workers configs.Workers `koanf:"workers" usage:"workers"`
	Models  []string        `koanf:"models" only:"file"`
	Aliases configs.Aliases `koanf:"aliases" only:"file"`
}

func (c command) Validate() error {
	var errs []error
	if c.Port < 1 || c.Port > 65535 {
		errs = append(errs, fmt.Errorf("port: %d is not within 1..65535", c.Port))
	}
	if c.Limits.Frac != nil && !(*c.Limits.Frac <= 1) {
		errs = append(errs, fmt.Errorf("frac: %v is above 1", *c.Limits.Frac))
	}
	if c.Status < 200 {
		errs = append(errs, fmt.Errorf("status: %d is no final status", c.Status))
	}
	if c.Credit < 0 {
		errs = append(errs, fmt.Errorf("credit: %v is below 0", c.Credit))
	}
	if c.Level != "info" && c.Level != "debug" {
		errs = append(errs, fmt.Errorf("level: %q is unknown", c.Level))
	}
	return errors.Join(errors.Join(errs...))
}

func (c command) Deprecated() map[string]string {
	return map[string]string{"admission-control": "set the thresholds instead"}
}

func defaults() command {
	return command{Port: 8000, Name: "spillway", Status: 503, Level: "info", Form: "text", Events: true,
		Limits: limits{Hold: 5 * time.Second}}
}

// load runs Load as cmd does, on the text of a file ("" for none), variables and arguments.
func load(t testing.TB, file string, env []string, args ...string) (command, []string, error) {
	t.Helper()
	path := ""
	if file != "" {
		path = filepath.Join(t.TempDir(), "s.yaml")
		if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	configs.Flags(fs, defaults())
	if err := fs.Parse(args); err != nil {
		t.Fatalf("parse %q: %v", args, err)
	}
	cfg, warnings, err := configs.Load(defaults(), path, func() []string { return env }, fs)
	if err != nil && path != "" {
		err = errors.New(strings.ReplaceAll(err.Error(), path, "s.yaml"))
	}
	for i := range warnings {
		if path != "" {
			warnings[i] = strings.ReplaceAll(warnings[i], path, "s.yaml")
		}
	}
	return cfg, warnings, err
}

func TestPrecedence(t *testing.T) {
	for _, tt := range []struct {
		name string
		file string
		env  []string
		args []string
		want int
	}{
		{"default", "", nil, nil, 8000},
		{"file over default", "port: 1", nil, nil, 1},
		{"DYN over file", "port: 1", []string{"DYN_PORT=2"}, nil, 2},
		{"SPILLWAY over DYN", "port: 1", []string{"SPILLWAY_PORT=3", "DYN_PORT=2"}, nil, 3},
		{"flag over all", "port: 1", []string{"SPILLWAY_PORT=3", "DYN_PORT=2"}, []string{"--port", "4"}, 4},
		{"flag of the default's value", "port: 1", nil, []string{"--port=8000"}, 8000},
		{"flag given twice", "", nil, []string{"--port=5", "--port=6"}, 6},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg, _, err := load(t, tt.file, tt.env, tt.args...)
			if err != nil || cfg.Port != tt.want {
				t.Errorf("Load(%q, %q, %q).Port = %d, %v; want %d", tt.file, tt.env, tt.args, cfg.Port, err, tt.want)
			}
		})
	}
}

func TestValues(t *testing.T) {
	for _, tt := range []struct {
		name string
		file string
		env  []string
		args []string
		want func(*command)
	}{
		{"duration", "hold: 1m30s", nil, nil, func(c *command) { c.Limits.Hold = 90 * time.Second }},
		{"duration 0 without a unit", "hold: 0", nil, nil, func(c *command) { c.Limits.Hold = 0 }},
		{"_SECS takes a bare number", "", []string{"DYN_HOLD_SECS=7"}, nil, func(c *command) { c.Limits.Hold = 7 * time.Second }},
		{"_SECS with a fraction", "", []string{"DYN_HOLD_SECS=0.25"}, nil, func(c *command) { c.Limits.Hold = 250 * time.Millisecond }},
		{"_MS takes a bare number", "", []string{"DYN_PEEK_MS=250"}, nil, func(c *command) { c.Limits.Peek = 250 * time.Millisecond }},
		{"pointer", "frac: 0.85\ntokens: 10000", nil, nil, func(c *command) { c.Limits.Frac, c.Limits.Tokens = new(0.85), new(uint64(10000)) }},
		{"pointer to zero", "frac: 0\ntokens: 0", nil, nil, func(c *command) { c.Limits.Frac, c.Limits.Tokens = new(0.0), new(uint64(0)) }},
		{"None in a flag", "frac: 0.5", nil, []string{"--frac=None"}, func(*command) {}},
		{"nOnE in a variable", "frac: 0.5", []string{"SPILLWAY_FRAC=nOnE"}, nil, func(*command) {}},
		{"bare seconds without _SECS", "", []string{"DYN_CHECK=yes", "DYN_WAIT=1.5"}, nil, func(c *command) { c.Limits.Wait = 1500 * time.Millisecond }},
		{"a DYN that depends on another", "wait: 3s", []string{"DYN_CHECK=false", "DYN_WAIT=7"}, nil, func(c *command) { c.Limits.Wait = 3 * time.Second }},
		{"which is not there", "", []string{"DYN_WAIT=7"}, nil, func(*command) {}},
		{"the other alone", "", []string{"DYN_CHECK=1"}, nil, func(c *command) { c.Limits.Wait = 10 * time.Second }},
		{"SPILLWAY over both", "", []string{"DYN_CHECK=1", "SPILLWAY_WAIT=4s"}, nil, func(c *command) { c.Limits.Wait = 4 * time.Second }},
		{"None in DYN", "frac: 0.5", []string{"DYN_FRAC=None"}, nil, func(*command) {}},
		{"empty variable unsets", "frac: 0.5", []string{"SPILLWAY_FRAC="}, nil, func(*command) {}},
		{"empty flag unsets", "tokens: 5", nil, []string{"--tokens", ""}, func(*command) {}},
		{"None and null in the file", "frac: None\ntokens:", nil, nil, func(*command) {}},
		{"a later source sets again", "frac: None", []string{"DYN_FRAC=0.1"}, nil, func(c *command) { c.Limits.Frac = new(0.1) }},
		{"bool flag alone", "", nil, []string{"--on"}, func(c *command) { c.On = true }},
		{"bool YES", "", []string{"DYN_ON=YES"}, nil, func(c *command) { c.On = true }},
		{"bool 1 in the file", "on: 1", nil, nil, func(c *command) { c.On = true }},
		{"bool off over on", "on: true", []string{"SPILLWAY_ON=off"}, nil, func(*command) {}},
		{"bool empty is off", "on: on", []string{"SPILLWAY_ON="}, nil, func(*command) {}},
		{"bool flag off", "on: on", nil, []string{"--on=no"}, func(*command) {}},
		{"text in the file for a number", `port: "9"`, nil, nil, func(c *command) { c.Port = 9 }},
		{"largest uint64", "seed: 18446744073709551615", nil, nil, func(c *command) { c.Seed = 1<<64 - 1 }},
		{"number for text in the file", "name: 0529", nil, nil, func(c *command) { c.Name = "0529" }},
		{"numbers in a list in the file", "urls: [1, 2.0]", nil, nil, func(c *command) { c.URLs = []string{"1", "2.0"} }},
		{"anchors in the file", "name: &n 7\nport: *n", nil, nil, func(c *command) { c.Name, c.Port = "7", 7 }},
		{"list by commas", "", []string{"SPILLWAY_URLS=a, b,"}, nil, func(c *command) { c.URLs = []string{"a", "b"} }},
		{"list of exact entries", "", nil, []string{"--peers= a,b,", "--peers=c"}, func(c *command) { c.Peers = []string{" a", "b", "", "c"} }},
		{"no exact entries", "peers: [a]", []string{"SPILLWAY_PEERS="}, nil, func(c *command) { c.Peers = []string{} }},
		{"list in the file", "urls: [a, 'b,c']", nil, nil, func(c *command) { c.URLs = []string{"a", "b,c"} }},
		{"list flag repeated", "urls: [z]", nil, []string{"--urls=a", "--urls", "b,c"}, func(c *command) { c.URLs = []string{"a", "b", "c"} }},
		{"boolean DYN for a word", "", []string{"DYN_JSON=true"}, nil, func(c *command) { c.Form = "json" }},
		{"boolean DYN false", "form: x", []string{"DYN_JSON=0"}, nil, func(c *command) { c.Form = "x" }},
		{"file only", "models: [m]\naliases: {a.b: m}", nil, nil, func(c *command) { c.Models, c.Aliases = []string{"m"}, configs.Aliases{"a.b": "m"} }},
		{"empty file", "# nothing\n", nil, nil, func(*command) {}},
		{"not ours", "", []string{"DYN_NEVER_HEARD_OF=1", "SPILLWAYS=1", "SPILLWAY_HISTOGRAM_TTFT_MIN=x", "odd"}, nil, func(*command) {}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			want := defaults()
			tt.want(&want)
			got, warnings, err := load(t, tt.file, tt.env, tt.args...)
			if err != nil || len(warnings) > 0 {
				t.Fatalf("Load(%q, %q, %q): %v, warnings %q", tt.file, tt.env, tt.args, err, warnings)
			}
			if len(got.URLs)+len(want.URLs) == 0 {
				got.URLs = nil
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("Load(%q, %q, %q) = %+v, want %+v", tt.file, tt.env, tt.args, got, want)
			}
		})
	}
}

func TestErrors(t *testing.T) {
	for _, tt := range []struct {
		name string
		file string
		env  []string
		args []string
		want string
	}{
		{"unknown key in the file", "activ-decode: 0.5", nil, nil, "activ-decode: unknown key (from file s.yaml)"},
		{"unknown variable", "", []string{"SPILLWAY_FRACK=0.5"}, nil, "SPILLWAY_FRACK: unknown variable (from the environment)"},
		{"variable for a file-only key", "", []string{"SPILLWAY_MODELS=m"}, nil, "SPILLWAY_MODELS: unknown variable (from the environment)"},
		{"flag", "", nil, []string{"--port=x"}, `port: "x" is not a whole number (from flag --port)`},
		{"SPILLWAY", "", []string{"SPILLWAY_PORT=x"}, nil, `port: "x" is not a whole number (from variable SPILLWAY_PORT)`},
		{"DYN", "", []string{"DYN_PORT="}, nil, `port: "" is not a whole number (from variable DYN_PORT)`},
		{"file", "port: [1]", nil, nil, "port: is a list or a map, not a whole number (from file s.yaml)"},
		{"no value in the file", "port:", nil, nil, "port: has no value (from file s.yaml)"},
		{"fraction for a count", "tokens: 10000.0", nil, nil, `tokens: "10000.0" is not a whole number of at least 0 (from file s.yaml)`},
		{"negative count", "", []string{"SPILLWAY_TOKENS=-1"}, nil, `tokens: "-1" is not a whole number of at least 0 (from variable SPILLWAY_TOKENS)`},
		{"beyond uint64", "", nil, []string{"--tokens=18446744073709551616"}, "tokens: 18446744073709551616 is too large or too small (from flag --tokens)"},
		{"not a number", "frac: high", nil, nil, `frac: "high" is not a number (from file s.yaml)`},
		{"duration without a unit", "hold: 5", nil, nil, `hold: "5" is not a duration such as 500ms, 5s or 1m30s (from file s.yaml)`},
		{"_SECS with a unit", "", []string{"DYN_HOLD_SECS=5s"}, nil, `hold: "5s" is not a number of units of 1s (from variable DYN_HOLD_SECS)`},
		{"a switch that is neither on nor off", "", []string{"DYN_CHECK=perhaps", "DYN_WAIT=7"}, nil, `wait: "perhaps" is not true or false (from variable DYN_CHECK)`},
		{"_SECS too large", "", []string{"DYN_HOLD_SECS=1e300"}, nil, "hold: 1e300 is too large (from variable DYN_HOLD_SECS)"},
		{"bool", "", nil, []string{"--on=maybe"}, `on: "maybe" is not true or false (from flag --on)`},
		{"bool for a number", "port: true", nil, nil, "port: true is not a whole number (from file s.yaml)"},
		{"bool for text", "name: yes\nlevel: true", nil, nil, "level: true is not text (from file s.yaml)"},
		{"Validate on a flag", "", nil, []string{"--port=70000"}, "port: 70000 is not within 1..65535 (from flag --port)"},
		{"Validate on the file", "frac: 1.5", nil, nil, "frac: 1.5 is above 1 (from file s.yaml)"},
		{"Validate on the last source", "port: 0", []string{"DYN_PORT=-1"}, nil, "port: -1 is not within 1..65535 (from variable DYN_PORT)"},
		{"two at once", "port: 0\nfrac: 2", nil, nil, "port: 0 is not within 1..65535 (from file s.yaml)\nfrac: 2 is above 1 (from file s.yaml)"},
		{"lenient for DYN_ only", "", []string{"SPILLWAY_STATUS=busy"}, nil, `status: "busy" is not a whole number (from variable SPILLWAY_STATUS)`},
		{"level from a flag", "", nil, []string{"--level=loud"}, `level: "loud" is unknown (from flag --level)`},
		{"two documents", "port: 1\n---\nport: 2", nil, nil, "file s.yaml: holds more than one YAML document"},
		{"not a map", "- port", nil, nil, "file s.yaml: yaml: unmarshal errors:\n  line 1: cannot unmarshal !!seq into map[string]interface {}"},
		{"key twice", "port: 1\nport: 2", nil, nil, "file s.yaml: yaml: unmarshal errors:\n  line 2: mapping key \"port\" already defined at line 1"},
		{"alias without a model", "aliases: {a: []}", nil, nil, "aliases: a: needs the name of a model (from file s.yaml)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, _, err := load(t, tt.file, tt.env, tt.args...)
			if err == nil || err.Error() != tt.want {
				t.Errorf("Load(%q, %q, %q): %v\nwant %s", tt.file, tt.env, tt.args, err, tt.want)
			}
		})
	}
}

func TestDefaultIsNamedAsSource(t *testing.T) {
	bad := defaults()
	bad.Port = 0
	_, _, err := configs.Load(bad, "", func() []string { return nil }, nil)
	var setting *configs.Error
	if !errors.As(err, &setting) || setting.Key != "port" || setting.Source != "default" {
		t.Errorf("Load: %v, want an Error of key port and source default", err)
	}
}

func TestWarnings(t *testing.T) {
	for _, tt := range []struct {
		name string
		file string
		env  []string
		args []string
		want string
	}{
		{"deprecated flag", "", nil, []string{"--admission-control=none"}, "admission-control: ignored: set the thresholds instead (from flag --admission-control)"},
		{"deprecated variable", "", []string{"SPILLWAY_ADMISSION_CONTROL=none"}, nil, "admission-control: ignored: set the thresholds instead (from variable SPILLWAY_ADMISSION_CONTROL)"},
		{"deprecated key", "admission-control: none", nil, nil, "admission-control: ignored: set the thresholds instead (from file s.yaml)"},
		{"bad DYN_ of a lenient key", "", []string{"DYN_STATUS=busy"}, nil, `status: "busy" is not a whole number (from variable DYN_STATUS): using the default`},
		{"bad DYN_ of a key of which those do not count", "", []string{"DYN_CREDIT=much", "DYN_EVENTS= "}, nil, `credit: "much" is not a number (from variable DYN_CREDIT): ignored`},
		{"so does one that Validate refuses", "", []string{"DYN_LEVEL=info,x=debug"}, nil, `level: "info,x=debug" is unknown (from variable DYN_LEVEL): using the default`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg, warnings, err := load(t, tt.file, tt.env, tt.args...)
			if got := strings.Join(warnings, "\n"); err != nil || got != tt.want {
				t.Errorf("Load(%q, %q, %q): warnings %q, %v; want %q", tt.file, tt.env, tt.args, got, err, tt.want)
			}
			if want := defaults(); !reflect.DeepEqual(cfg, want) {
				t.Errorf("Load(%q, %q, %q) = %+v, want %+v", tt.file, tt.env, tt.args, cfg, want)
			}
		})
	}
}

// TestNegations: what is on by default can be turned off by name.
func TestNegations(t *testing.T) {
	for _, tt := range []struct {
		env  []string
		args []string
		want bool
		err  string
	}{
		{nil, nil, true, ""},
		{nil, []string{"--no-events"}, false, ""},
		{nil, []string{"--no-events=false"}, true, ""},
		{nil, []string{"--events=false"}, false, ""},
		{[]string{"DYN_EVENTS=0"}, nil, false, ""},
		{[]string{"DYN_OLD_EVENTS=off"}, nil, false, ""},
		{[]string{"DYN_OLD_EVENTS=0", "DYN_EVENTS=1"}, nil, true, ""},
		{[]string{"DYN_OLD_EVENTS=0", "DYN_EVENTS=perhaps"}, nil, false, ""},
		{[]string{"DYN_OLD_EVENTS=", "DYN_EVENTS="}, nil, true, ""},
		{[]string{"SPILLWAY_EVENTS=true"}, []string{"--no-events"}, false, ""},
		{nil, []string{"--no-events", "--events"}, true, "events: is turned on and off (from flag --no-events)"},
		{nil, []string{"--no-events=perhaps"}, true, `no-events: "perhaps" is not true or false (from flag --no-events)`},
	} {
		cfg, _, err := load(t, "", tt.env, tt.args...)
		got := ""
		if err != nil {
			got = err.Error()
		}
		if cfg.Events != tt.want || got != tt.err {
			t.Errorf("Load(%q, %q): events %v, error %q; want %v, %q", tt.env, tt.args, cfg.Events, got, tt.want, tt.err)
		}
	}
	if _, _, err := load(t, "", []string{"DYN_CREDIT=-1"}); err == nil || err.Error() != "credit: -1 is below 0 (from variable DYN_CREDIT)" {
		t.Errorf("Load of a credit below 0 = %v, want an error", err)
	}
}

func TestConfigVariableNamesTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "here.yaml")
	if err := os.WriteFile(path, []byte("port: 77"), 0o600); err != nil {
		t.Fatal(err)
	}
	env := func() []string { return []string{"SPILLWAY_CONFIG=" + path} }
	if cfg, _, err := configs.Load(defaults(), "", env, nil); err != nil || cfg.Port != 77 {
		t.Errorf("Load with SPILLWAY_CONFIG: port %d, %v; want 77", cfg.Port, err)
	}
	if _, _, err := configs.Load(defaults(), path+".gone", env, nil); err == nil || !strings.Contains(err.Error(), "file "+path+".gone: ") {
		t.Errorf("Load of a missing file: %v, want an error that names it", err)
	}
}

func TestHelpShowsDefaults(t *testing.T) {
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	configs.Flags(fs, defaults())
	help := fs.FlagUsages()
	for _, want := range []string{
		"--port int", "port [DYN_PORT] (default 8000)", "(default 5s)", "--frac float", "--config file",
		`(default "spillway")`, "--urls list", "--workers list",
	} {
		if !strings.Contains(help, want) {
			t.Errorf("help lacks %q:\n%s", want, help)
		}
	}
	for _, bad := range []string{"models", "admission-control", "<nil>"} {
		if strings.Contains(help, bad) {
			t.Errorf("help has %q:\n%s", bad, help)
		}
	}
}

// FuzzLoad feeds arbitrary text to the file, the environment and a flag: Load must return.
func FuzzLoad(f *testing.F) {
	f.Add("port: 1\nfrac: None\nworkers: [http://a:1, {url: 'http://b:2', dp_size: 2}]", "PORT", "3", "0.5")
	f.Add("aliases: {a: b}\nmodels: [x]\n<<: {port: 1}", "WORKERS", "http://a:1,http://a:1", "none")
	f.Add("? [a]\n: b", "HOLD", "-1h", "1e999")
	f.Add("a: &a [*a]", "ON", "", "")
	f.Add("port: 2001-01-01\nname: !!binary aGk=", "", "=", "NaN")
	f.Fuzz(func(t *testing.T, file, name, value, frac string) {
		if file == "" {
			file = "#"
		}
		_, _, err := load(t, file, []string{"SPILLWAY_" + name + "=" + value, "DYN_" + name + "=" + value}, "--frac="+frac)
		if err != nil && err.Error() == "" {
			t.Error("an error without a text")
		}
	})
}
