package main

import (
	"runtime/debug"
	"strings"
)

// version tells what the binary was built from: the module's version, and the revision of the
// checkout where the build recorded one.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	parts := []string{info.Main.Version}
	if info.Main.Version == "" {
		parts[0] = "(devel)"
	}
	settings := map[string]string{}
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
	}
	if revision := settings["vcs.revision"]; revision != "" {
		if settings["vcs.modified"] == "true" {
			revision += " with changes"
		}
		parts = append(parts, "revision "+revision)
	}
	return strings.Join(append(parts, info.GoVersion), ", ")
}
