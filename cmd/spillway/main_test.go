package main

import (
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestUsage(t *testing.T) {
	file := filepath.Join(t.TempDir(), "s.yaml")
	if err := os.WriteFile(file, []byte("prot: 1"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name   string
		env    []string
		args   []string
		code   int
		stdout string // a part of it
		stderr string // all of it
	}{
		{"version", nil, []string{"--version"}, 0, "spillway ", ""},
		{"version of a command", nil, []string{"sim", "--version"}, 0, "spillway ", ""},
		{"no command", nil, nil, 0, "Available Commands:", ""},
		{"help", nil, []string{"--help"}, 0, "spillway replay --rate 20", ""},
		{"help of sim", nil, []string{"sim", "--help"}, 0, "spillway sim --count 4", ""},
		{"help of replay", nil, []string{"replay", "--help"}, 0, "--slo-ttft", ""},
		{"unknown command", nil, []string{"simm"}, 2, "", "spillway: unknown command \"simm\" for \"spillway\"\n"},
		{"stray word", nil, []string{"sim", "now"}, 2, "", "spillway: unknown command \"now\" for \"spillway sim\"\n"},
		{"unknown flag", nil, []string{"sim", "--prot=1"}, 2, "", "spillway: unknown flag: --prot (see spillway sim --help)\n"},
		{"bad flag", nil, []string{"sim", "--port=x"}, 2, "", "spillway: port: \"x\" is not a whole number (from flag --port)\n"},
		{"bad value", nil, []string{"sim", "--itl=-1s"}, 2, "", "spillway: itl: -1s is not above 0 (from flag --itl)\n"},
		{"unknown variable", []string{"SPILLWAY_PROT=1"}, []string{"sim"}, 2, "", "spillway: SPILLWAY_PROT: unknown variable (from the environment)\n"},
		{"unknown key", nil, []string{"sim", "--config", file}, 2, "", "spillway: prot: unknown key (from file " + file + ")\n"},
		{"nothing to replay", nil, []string{"replay"}, 2, "", "spillway: trace: give a trace file, or a fixed load with --rate (from default)\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := start(t, tt.env, tt.args...)
			code := p.exit()
			if code != tt.code || !strings.Contains(p.stdout.String(), tt.stdout) || p.stderr.String() != tt.stderr {
				t.Errorf("spillway %q: exit code %d, want %d; stdout wanted %q, stderr %q", tt.args, code, tt.code, tt.stdout, tt.stderr)
			}
		})
	}
}

func TestFailureIsNotUsage(t *testing.T) {
	p := start(t, nil, "replay", "--trace", filepath.Join(t.TempDir(), "gone.jsonl"))
	if code := p.exit(); code != exitFailed || !strings.Contains(p.stderr.String(), "gone.jsonl") {
		t.Errorf("replay of a missing trace: exit code %d, want %d and the file named", code, exitFailed)
	}
}

func TestSimAndReplay(t *testing.T) {
	sim := start(t, nil, "sim", "--port", "0", "--count", "2", "--speed", "10")
	urls := strings.Split(sim.await(`--workers: (\S+)\n`), ",")
	if len(urls) != 2 {
		t.Fatalf("sim --count 2 listens on %q", urls)
	}
	for _, u := range urls {
		if status, body := fetch(t, u+"/v1/models"); status != http.StatusOK || !strings.Contains(body, "sim-model") {
			t.Errorf("GET %s/v1/models: %d %s", u, status, body)
		}
	}

	load := start(t, nil, "replay", "--url", urls[0], "--rate", "20", "--requests", "10", "--isl", "64", "--osl", "5", "--json", "-")
	if code := load.exit(); code != 0 {
		t.Fatalf("replay: exit code %d", code)
	}
	var report map[string]any
	if err := json.Unmarshal([]byte(load.stdout.String()), &report); err != nil || report["offered"] != 10.0 || report["completed"] != 10.0 {
		t.Errorf("replay --json -: offered %v, completed %v, %v; want 10 of each", report["offered"], report["completed"], err)
	}

	sim.signal(syscall.SIGTERM)
	if code := sim.exit(); code != 0 {
		t.Errorf("sim after SIGTERM: exit code %d, want 0", code)
	}
}

// TestInterruptedReplay checks that a first signal ends a run with its report.
func TestInterruptedReplay(t *testing.T) {
	sim := start(t, nil, "sim", "--port", "0")
	url := sim.await(`--workers: (\S+)\n`)
	load := start(t, nil, "replay", "--url", url, "--rate", "20", "--duration", "1h")
	eventually(t, "a token is generated", func() bool {
		_, stats := fetch(t, url+"/sim/stats")
		return !strings.Contains(stats, `"tokens_generated":0,`)
	})
	load.signal(syscall.SIGINT)
	if code := load.exit(); code != 0 || !strings.Contains(load.stdout.String(), "goodput") {
		t.Errorf("replay after SIGINT: exit code %d, want 0 and a report", code)
	}
}

// eventually waits until ok, which is asked again and again.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

func fetch(t *testing.T, url string) (status int, body string) {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// valueOn is the value of a series on a metrics page, given as it is written there.
func valueOn(t *testing.T, page, series string) float64 {
	t.Helper()
	for line := range strings.Lines(page) {
		if value, ok := strings.CutPrefix(line, series+" "); ok {
			v, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
	}
	t.Fatalf("no series %s", series)
	return 0
}
