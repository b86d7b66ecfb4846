package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestCompatQueries has a real Prometheus asked what an unmodified async processor of llm-d asks: every
// query has exactly one answer, and the first one is what is free. Then it is our dispatcher that asks so.
func TestCompatQueries(t *testing.T) {
	sim := start(t, nil, "sim", "--port", "0", "--count", "2", "--itl", "1s") // requests last, and cost little
	workers := sim.await(`--workers: (\S+)\n`)
	front := start(t, nil, "frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--workers", workers, "--compat-metrics",
		"--health-timeout", "1m", "--scrape-interval", "5s", "--scrape-timeout", "5s") // that the machine is slow makes no worker unhealthy
	url := front.await(`Front end: (\S+)\n`)
	var engines []string
	for _, w := range strings.Split(workers, ",") {
		engines = append(engines, "'"+strings.TrimPrefix(w, "http://")+"'")
	}
	dir := t.TempDir()
	settings := fmt.Sprintf(`global: {scrape_interval: 2s, scrape_timeout: 2s}
scrape_configs:
  - {job_name: front, static_configs: [{targets: ['%s']}]}
  - {job_name: engines, static_configs: [{targets: [%s], labels: {inference_pool: sim-model}}]}
`, strings.TrimPrefix(url, "http://"), strings.Join(engines, ", "))
	if err := os.WriteFile(filepath.Join(dir, "prometheus.yml"), []byte(settings), 0o600); err != nil {
		t.Fatal(err)
	}
	p := observe(t, dir)
	eventually(t, "there are workers to send to", func() bool { status, _ := fetch(t, url+"/ready"); return status == 200 })
	start(t, nil, "replay", "--url", url, "--rate", "10", "--isl", "160", "--osl", "600", "--duration", "2s") // in flight until the test ends

	queries := []string{
		`1 - (sum by(inference_pool)(inference_extension_flow_control_queue_size{inference_pool="sim-model"}) / on() (inference_pool_ready_pods{name="sim-model"} * 100))`,
		`1 - (avg by(name)(inference_pool_per_pod_queue_size{name="sim-model"}) / 100)`,
		`1 - (sum(vllm:num_requests_running{inference_pool="sim-model"}) / on() (inference_pool_ready_pods{name="sim-model"} * 100))`,
		`1 - inference_extension_flow_control_pool_saturation{inference_pool="sim-model"}`,
	}
	for _, q := range queries {
		eventually(t, "one answer to "+q, func() bool { return p.numbers(q) == 1 && p.numbers("count("+q+") == 1") == 1 })
	}
	const free = `1 - max(spillway_pool_fullness{pool="sim-model"})`
	for _, q := range []string{queries[0], queries[3]} { // with room taken, and both of one scrape
		eventually(t, "what is free by "+q, func() bool {
			return p.numbers(fmt.Sprintf(`(abs((%s) - on() (%s)) < 1e-9) and on() ((%s) < 0.99)`, q, free, free)) == 1
		})
	}
	if _, page := fetch(t, url+"/metrics"); strings.Contains(page, "vllm:") {
		t.Error("the front end tells what engines tell themselves")
	}

	doc := fmt.Sprintf(`{"url":%q,"queues":[
		{"queue_name":"a","igw_base_url":%[2]q,"gate_type":"prometheus-budget","gate_params":{"pool":"sim-model","compat":"original"}},
		{"queue_name":"b","igw_base_url":%[2]q,"gate_type":"prometheus-saturation","gate_params":{"pool":"sim-model"},"budget_group":"b"}]}`, startRedisServer(t), url)
	queues := start(t, nil, "dispatch", "--transport-config", doc, "--host", "127.0.0.1", "--port", "0", "--health-port", "0", "--metrics-port", "0", "--prometheus-url", p.url)
	d := dispatching{running: queues, url: queues.await(`Dispatcher: (\S+)\n`), metrics: queues.await(`Metrics: (\S+)\n`)}
	eventually(t, "both gates are open", func() bool {
		_, page := fetch(t, d.metrics+"/metrics")
		return strings.Contains(page, `spillway_dispatch_gate_state{inference_pool="sim-model",state="open"} 1`) && strings.Contains(page, `spillway_dispatch_gate_state{inference_pool="b",state="open"} 1`)
	})
}
