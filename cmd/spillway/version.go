package main

import (
	"runtime/debug"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// build is what the binary was built from: the module's version, the revision of the checkout, ""
// where the build did not record one, and the Go release.
type build struct{ version, revision, goversion string }

func readBuild() build {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return build{version: "unknown"}
	}
	b := build{version: info.Main.Version, goversion: info.GoVersion}
	if b.version == "" {
		b.version = "(devel)"
	}
	settings := map[string]string{}
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
	}
	b.revision = settings["vcs.revision"]
	if b.revision != "" && settings["vcs.modified"] == "true" {
		b.revision += " with changes"
	}
	return b
}

// version is what --version prints.
func version() string {
	b := readBuild()
	parts := []string{b.version}
	if b.revision != "" {
		parts = append(parts, "revision "+b.revision)
	}
	if b.goversion != "" {
		parts = append(parts, b.goversion)
	}
	return strings.Join(parts, ", ")
}

// buildInfo is the metric that tells the same.
func buildInfo() prometheus.Collector {
	b := readBuild()
	info := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "spillway_build_info", Help: "What the binary was built from; always 1.",
		ConstLabels: prometheus.Labels{"version": b.version, "revision": b.revision, "goversion": b.goversion},
	})
	info.Set(1)
	return info
}
