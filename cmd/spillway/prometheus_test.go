package main

import (
	"encoding/json"
	"fmt"
	"math"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// hurry divides the times in the alert rules, because a test cannot wait for five minutes.
const hurry = 30

// observer is a real Prometheus, which scrapes one front end and has our rules.
type observer struct {
	t   *testing.T
	url string
}

// startPrometheus runs Prometheus with the example configuration and the alert rules, but with the
// front end's address, shorter intervals, and the times of the rules divided by hurry.
func startPrometheus(t *testing.T, frontend string) *observer {
	t.Helper()
	dir := t.TempDir()
	copyChanged(t, "alerts.yml", dir, `\b(\d+)m\b`, func(minutes string) string {
		n, err := strconv.Atoi(strings.TrimSuffix(minutes, "m"))
		if err != nil {
			t.Fatal(err)
		}
		return (time.Duration(n) * time.Minute / hurry).String()
	})
	copyChanged(t, "prometheus.yml", dir, `localhost:8000|(_interval: )\d+s`, func(found string) string {
		if name, _, ok := strings.Cut(found, " "); ok {
			return name + " 500ms"
		}
		return strings.TrimPrefix(frontend, "http://")
	})
	return observe(t, dir)
}

// observe runs Prometheus until the test ends, with the prometheus.yml of a directory.
func observe(t *testing.T, dir string) *observer {
	t.Helper()
	program := tool(t, "prometheus")
	var logs output
	cmd := exec.Command(program, "--config.file="+filepath.Join(dir, "prometheus.yml"),
		"--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address=127.0.0.1:0")
	cmd.Stdout, cmd.Stderr = &logs, &logs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // an error means that it has ended
		late := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
		defer late.Stop()
		if err := cmd.Wait(); err != nil {
			t.Errorf("prometheus: %v", err)
		}
		if t.Failed() {
			t.Logf("prometheus:\n%s", &logs)
		}
	})
	p := &observer{t: t}
	eventually(t, "Prometheus listens", func() bool {
		m := regexp.MustCompile(`msg="Listening on" address=(\S+)`).FindStringSubmatch(logs.String())
		if m != nil {
			p.url = "http://" + m[1]
		}
		return m != nil
	})
	eventually(t, "Prometheus is ready", func() bool {
		status, _ := fetch(t, p.url+"/-/ready")
		return status == 200
	})
	return p
}

// copyChanged copies a file of deploy/prometheus to dir, with all that matches changed.
func copyChanged(t *testing.T, name, dir, pattern string, change func(string) string) {
	t.Helper()
	text, err := os.ReadFile("../../deploy/prometheus/" + name)
	if err != nil {
		t.Fatal(err)
	}
	changed := regexp.MustCompile(pattern).ReplaceAllStringFunc(string(text), change)
	if changed == string(text) {
		t.Fatalf("%s: nothing matches %s", name, pattern)
	}
	if err := os.WriteFile(filepath.Join(dir, name), []byte(changed), 0o600); err != nil {
		t.Fatal(err)
	}
}

// get asks Prometheus's API and reads the data of the answer.
func (p *observer) get(path string, params url.Values, data any) {
	p.t.Helper()
	_, body := fetch(p.t, p.url+path+"?"+params.Encode())
	answer := struct {
		Status string
		Error  string
		Data   any
	}{Data: data}
	if err := json.Unmarshal([]byte(body), &answer); err != nil || answer.Status != "success" {
		p.t.Fatalf("GET %s %v: %v, %s", path, params, err, body)
	}
}

// numbers counts the series that an expression has now, those that are no number left out.
func (p *observer) numbers(expr string) int {
	p.t.Helper()
	var data struct {
		Result []struct{ Value [2]any }
	}
	p.get("/api/v1/query", url.Values{"query": {expr}}, &data)
	n := 0
	for _, r := range data.Result {
		if v, err := strconv.ParseFloat(fmt.Sprint(r.Value[1]), 64); err != nil {
			p.t.Errorf("%s: %v", expr, err)
		} else if !math.IsNaN(v) {
			n++
		}
	}
	return n
}

// state is what an alert has come to: "pending", "firing" or "" if it is not active.
func (p *observer) state(alert string) string {
	p.t.Helper()
	var data struct {
		Alerts []struct {
			Labels struct{ Alertname string }
			State  string
		}
	}
	p.get("/api/v1/alerts", nil, &data)
	for _, a := range data.Alerts {
		if a.Labels.Alertname == alert {
			return a.State
		}
	}
	return ""
}

// alertQueries are the expressions of the alert rules without what they are compared with, which
// leaves nothing while all is well.
func (p *observer) alertQueries() []query {
	p.t.Helper()
	var data struct {
		Groups []struct {
			Rules []struct{ Name, Query, Health string }
		}
	}
	p.get("/api/v1/rules", nil, &data)
	var all []query
	for _, g := range data.Groups {
		for _, r := range g.Rules {
			expr := regexp.MustCompile(` (>|==) [0-9.]+`).ReplaceAllString(r.Query, "")
			expr = regexp.MustCompile(`^absent\((.*)\)$`).ReplaceAllString(expr, "$1")
			all = append(all, query{"alert " + r.Name, expr})
		}
	}
	return all
}

// TestPrometheusSeesAnOverload replays more than two small workers can hold while a Prometheus
// looks on. Every expression that we ship must find something, and the alert must fire.
func TestPrometheusSeesAnOverload(t *testing.T) {
	sim := start(t, nil, "sim", "--port", "0", "--count", "2", "--kv-blocks", "128", "--max-num-seqs", "8")
	front := start(t, nil, "frontend", "--http-port", "0", "--admin-addr", "127.0.0.1:0", "--scrape-interval", "100ms",
		"--active-decode-blocks-threshold", "0.7", "--active-prefill-tokens-threshold", "2000",
		"--queue-size", "4", "--queue-timeout", "100ms", "--router-mode", "kv", "--router-session-affinity-ttl-secs", "60", "--workers", sim.await(`--workers: (\S+)\n`))
	service, admin := front.await(`Front end: (\S+)\n`), front.await(`Admin: (\S+)\n`)
	// Nobody listens there, so the worker is unhealthy and its scrapes fail.
	if status, body := ask(t, "POST", admin+"/workers",
		`{"worker_id":7,"model_name":"sim-model","endpoint":"http://127.0.0.1:1","name":"nobody"}`); status != 201 {
		t.Fatalf("POST /workers = %d %s, want 201", status, body)
	}
	p := startPrometheus(t, admin)
	eventually(t, "there are workers to send to", func() bool {
		status, _ := fetch(t, service+"/ready")
		return status == 200
	})
	start(t, nil, "replay", "--url", service, "--rate", "40", "--isl", "160", "--osl", "40", "--leave", "0.2",
		"--leave-after", "500ms", "--duration", "10m") // until the test ends

	const alert = "HighRequestRejectionRate"
	eventually(t, alert+" is pending", func() bool { return p.state(alert) == "pending" })
	queries := append(readDashboard(t).queries("10s", "1m"), p.alertQueries()...)
	for _, q := range queries {
		eventually(t, q.from+" has data: "+q.expr, func() bool { return p.numbers(q.expr) > 0 })
	}
	eventually(t, alert+" fires", func() bool { return p.state(alert) == "firing" })

	const series = `{worker="nobody"} or {worker_id="7"}`
	eventually(t, "the worker that will be removed has series", func() bool { return p.numbers(series) > 0 })
	if status, body := ask(t, "DELETE", admin+"/workers/7", ""); status != 200 {
		t.Fatalf("DELETE /workers/7 = %d %s, want 200", status, body)
	}
	// One question, so that a scrape that takes too long, after which nothing is there, answers neither.
	eventually(t, "the series of the removed worker are gone, and those of the others are there", func() bool {
		return p.numbers(`{worker!=""} unless on() (`+series+`)`) > 0
	})
}
