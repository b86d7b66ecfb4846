package replay_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"spillway/replay"
)

func TestValidity(t *testing.T) {
	child := exec.Command("sleep", "60")
	if err := child.Start(); err != nil {
		t.Skipf("no child process to measure: %v", err)
	}
	defer func() { _ = child.Process.Kill(); _ = child.Wait() }()
	pid := strconv.Itoa(child.Process.Pid)
	url := serve(t, func(w http.ResponseWriter, _ *http.Request, a asked) { answer(w, a, 0) })
	for _, tt := range []struct {
		name, stats   string // the body of /sim/stats
		pids          []string
		steps, cpu    string
		inLine, inRow string
	}{
		{"all known", `{"step_lateness_ms":{"p50":0.5,"p99":1.5,"max":7}}`, []string{pid}, "ok", "ok", "", "p99 1.50 ms"},
		{"late steps", `{"step_lateness_ms":{"p50":0.5,"p99":2.5,"max":7}}`, []string{pid}, "failed", "ok", "step lateness p99 failed (2.5 ms of at most 2 ms)", "max 7.00 ms"},
		{"no figure", `{}`, nil, "unknown", "unknown", "step lateness p99 unknown", "unknown: no step_lateness_ms"},
		{"garbage", `<html>`, []string{}, "unknown", "unknown", "CPU unknown (no --pids given)", "unknown: invalid character"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			sim := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path != "/sim/stats" {
					t.Errorf("asked for %s", r.URL.Path)
				}
				fmt.Fprint(w, tt.stats)
			}))
			defer sim.Close()
			cfg := load(url, 20)
			cfg.Rate, cfg.PIDs, cfg.StatsURLs = 100, tt.pids, []string{sim.URL}
			rep, table := mustRun(t, cfg)
			got := map[string]string{}
			for _, c := range rep.Validity.Checks {
				got[c.Name] = c.Verdict
			}
			// Lag and CPU depend on the machine: only whether they are known is certain.
			if got["step lateness p99"] != tt.steps || (got["CPU"] == "unknown") != (tt.cpu == "unknown") || got["send lag p99"] == "unknown" {
				t.Errorf("checks %+v, want steps %s, CPU %s", rep.Validity.Checks, tt.steps, tt.cpu)
			}
			if !strings.Contains(table, tt.inLine) || !strings.Contains(table, tt.inRow) {
				t.Errorf("table lacks %q or %q:\n%s", tt.inLine, tt.inRow, table)
			}
		})
	}
}

func TestRunRefusesAProcessThatIsNot(t *testing.T) {
	cfg := load("http://127.0.0.1:1", 1)
	cfg.PIDs = []string{"2147483646"}
	if _, err := replay.Run(t.Context(), cfg, os.Stderr); err == nil || !strings.Contains(err.Error(), "pids: CPU time of process 2147483646") {
		t.Errorf("Run = %v, want an error about the process", err)
	}
}
