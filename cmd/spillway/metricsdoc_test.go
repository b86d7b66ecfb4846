package main

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// metricsPage is the list of all metrics.
const metricsPage = "../../docs/metrics.md"

// TestMetricsAreDocumented compares every metric of a front end, an indexer and a selection service with docs/metrics.md, both ways:
// names, types, labels, buckets. Requests of each kind are sent first, since some series exist only
// from then on.
func TestMetricsAreDocumented(t *testing.T) {
	sim := start(t, nil, "sim", "--port", "0", "--speed", "10")
	settings := filepath.Join(t.TempDir(), "frontend.yaml")
	worker := "workers: [{url: '" + sim.await(`--workers: (\S+)\n`) + "', max_num_batched_tokens: 2048, max_concurrency: 64}]\n"
	if err := os.WriteFile(settings, []byte(worker), 0o600); err != nil {
		t.Fatal(err)
	}
	front := start(t, nil, "frontend", "--config", settings, "--http-port", "0", "--http-host", "127.0.0.1", "--active-prefill-tokens-threshold", "9000", "--queue-size", "10", "--compat-metrics", "--router-mode", "kv", "--router-session-affinity-ttl-secs", "60",
		"--replica-sync-bind", "ipc://"+filepath.Join(t.TempDir(), "replica"))
	url := front.await(`Front end: (\S+)\n`)
	eventually(t, "the worker can be sent to", func() bool { status, _ := fetch(t, url+"/ready"); return status == 200 })
	for _, stream := range []string{"true", "false"} {
		body := `{"model":"sim-model","messages":[{"role":"user","content":"Hello"}],"max_tokens":3,"stream":` + stream + `}`
		resp, err := http.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		if text, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 200 {
			t.Fatalf("a chat is answered %d %s, %v", resp.StatusCode, text, err)
		}
		_ = resp.Body.Close()
	}
	x := startIndexer(t, "--workers", "7=tcp://127.0.0.1:1", "--block-size", "16")
	chooser := startSelector(t, "--router-kv-events=false", "--api-revision", "routing-group")
	chooser.post("/workers", `{"worker_id":1,"endpoint":"http://w:1","block_size":16}`, 201)
	queues := startDispatcher(t, url, "--metrics-backlog-poll-interval", "1s", "--compat-metrics")
	page, err := os.ReadFile(metricsPage)
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]string
	want := documented(t, string(page))
	for deadline := time.Now().Add(time.Minute); !covers(got, want) && time.Now().Before(deadline); { // workers are looked at once a second
		got = exposed(t, url)
		maps.Copy(got, exposed(t, x.url))
		maps.Copy(got, exposed(t, queues.metrics))
		maps.Copy(got, exposed(t, chooser.url))
		time.Sleep(20 * time.Millisecond)
	}
	for _, name := range slices.Sorted(maps.Keys(got)) {
		if want[name] != got[name] {
			t.Errorf("%s is a %s\ndocs/metrics.md has %q", name, got[name], want[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if got[name] == "" {
			t.Errorf("docs/metrics.md has %s, which is not exposed", name)
		}
	}
}

// covers tells whether all that is wanted is there.
func covers(got, want map[string]string) bool {
	for name := range want {
		if got[name] == "" {
			return false
		}
	}
	return true
}

// exposed tells of each metric but Go's and the library's: type; labels; buckets.
func exposed(t *testing.T, url string) map[string]string {
	_, text := fetch(t, url+"/metrics")
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for name, mf := range families {
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") || strings.HasPrefix(name, "promhttp_") {
			continue
		}
		var labels, bounds []string
		for _, l := range mf.Metric[0].Label {
			labels = append(labels, "`"+l.GetName()+"`")
		}
		if mf.GetType() == dto.MetricType_HISTOGRAM {
			for _, b := range mf.Metric[0].Histogram.Bucket {
				if text := fmt.Sprint(b.GetUpperBound()); text != "+Inf" {
					bounds = append(bounds, text)
				}
			}
		}
		slices.Sort(labels)
		all[name] = strings.ToLower(mf.GetType().String()) + "; " + strings.Join(labels, ", ") + "; " + strings.Join(bounds, " ")
	}
	return all
}

// documented reads the tables: | `name` | type | labels | meaning | or, of histograms, with a last
// column of buckets.
func documented(t *testing.T, page string) map[string]string {
	all := map[string]string{}
	for line := range strings.Lines(page) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), " | ")
		if len(cells) < 4 || !strings.HasPrefix(strings.TrimSpace(cells[0]), "`") {
			continue
		}
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		name := strings.Trim(cells[0], "`")
		labels := strings.Split(cells[2], ", ")
		slices.Sort(labels)
		buckets := ""
		if len(cells) > 4 {
			buckets = cells[4]
		}
		if all[name] != "" {
			t.Errorf("docs/metrics.md has %s twice", name)
		}
		all[name] = cells[1] + "; " + strings.Join(labels, ", ") + "; " + buckets
	}
	return all
}
