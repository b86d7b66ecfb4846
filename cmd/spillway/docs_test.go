package main

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// found lists the distinct matches of a pattern's first group in a page of the checkout.
func found(t *testing.T, page, pattern string) []string {
	t.Helper()
	text, err := os.ReadFile("../../" + page)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(string(text), -1) {
		all = append(all, m[1])
	}
	slices.Sort(all)
	if all = slices.Compact(all); len(all) == 0 {
		t.Fatalf("%s: nothing matches %s", page, pattern)
	}
	return all
}

func TestDocsNameFlagsThatExist(t *testing.T) {
	known := map[string]bool{}
	for _, cmd := range newRoot(process{}).Commands() {
		cmd.Flags().VisitAll(func(f *pflag.Flag) { known[f.Name] = true })
	}
	for _, page := range []string{"README.md", "ARCHITECTURE.md", "docs/operations.md"} {
		for _, flag := range found(t, page, "[ `]--([a-z][a-z0-9-]*)") {
			if !known[flag] && flag != "help" {
				t.Errorf("%s: --%s is a flag of no command", page, flag)
			}
		}
	}
}

// TestDocsNameMetricsThatExist also checks dashboard and alert rules: a series that is misspelt
// there is a panel without data, or an alert that never fires.
func TestDocsNameMetricsThatExist(t *testing.T) {
	demo := start(t, nil, "demo", "--http-port", "0", "--port", "0", "--queue-size", "10", "--router-mode", "kv", "--router-session-affinity-ttl-secs", "60")
	url := demo.await(`Front end: (\S+)\n`)
	text(t, post(t, url+"/v1/chat/completions", shortChat)) // some series begin with a model's first prompt
	books := startSlotTracker(t)
	books.must("/register", trackedWorker, 201)
	index := startIndexer(t, "--workers", "7=tcp://127.0.0.1:1", "--block-size", "16")
	queues := startDispatcher(t, url)
	for _, page := range []string{"README.md", "docs/operations.md", "docs/dispatch.md", "deploy/grafana/spillway.json", "deploy/prometheus/alerts.yml", "deploy/grafana/spillway-dispatch.json", "deploy/prometheus/dispatch-alerts.yml"} {
		for _, name := range found(t, page, `\b((?:dynamo|spillway)_[a-z0-9_]+)`) {
			exposed := regexp.MustCompile(`(?m)^# TYPE ` + name + ` |^# TYPE ` + histogramOf(name) + ` histogram$`)
			eventually(t, page+": "+name+" is exposed", func() bool {
				_, ofFront := fetch(t, url+"/metrics")
				_, ofBooks := fetch(t, books.url+"/metrics")
				_, ofIndex := fetch(t, index.url+"/metrics")
				_, ofQueues := fetch(t, queues.metrics+"/metrics")
				return exposed.MatchString(ofQueues + ofFront + ofBooks + ofIndex)
			})
		}
	}
}

// histogramOf is the name of the histogram that a series would belong to.
func histogramOf(series string) string {
	for _, part := range []string{"_bucket", "_sum", "_count"} {
		if name, ok := strings.CutSuffix(series, part); ok {
			return name
		}
	}
	return series
}
