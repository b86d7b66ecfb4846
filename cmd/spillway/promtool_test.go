package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// tool finds redis-server or a program of Prometheus, in the PATH or where .ci/setup puts it. Without it
// the test is skipped, or fails if REQUIRE_REDIS or REQUIRE_PROMETHEUS is set, as `make test` does.
func tool(t *testing.T, name string) string {
	t.Helper()
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	path, err := filepath.Abs("../../bin/tools/" + name)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err == nil {
		return path
	}
	const how = "%s is neither in the PATH nor in bin/tools; `make setup-test` puts it there"
	required := "REQUIRE_PROMETHEUS"
	if name == "redis-server" {
		required = "REQUIRE_REDIS"
	}
	if os.Getenv(required) != "" {
		t.Fatalf(how, name)
	}
	t.Skipf(how, name)
	return ""
}

// TestAlertRules has promtool check what we ship for Prometheus, and run the tests of the alerts.
func TestAlertRules(t *testing.T) {
	promtool := tool(t, "promtool")
	for _, args := range [][]string{
		{"check", "config", "prometheus.yml"}, // which names the rules
		{"test", "rules", "alerts_test.yml"},
		{"test", "rules", "dispatch-alerts_test.yml"},
	} {
		cmd := exec.CommandContext(t.Context(), promtool, args...)
		cmd.Dir = "../../deploy/prometheus"
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %q: %v\n%s", args, err, out)
		}
	}
}
