package configs

import (
	"errors"
	"fmt"

	"spillway/busy"
	"spillway/kvindex"
	"spillway/monitor"
	"spillway/proxy"
	"spillway/replica"
	"spillway/router"
	"spillway/tokenize"
	"spillway/worker"
)

// Serving is what serves clients, wherever its workers come from.
type Serving struct {
	Proxy    proxy.Config    `koanf:",squash"`
	Busy     busy.Config     `koanf:",squash"`
	Router   router.Config   `koanf:",squash"`
	Index    kvindex.Config  `koanf:",squash"`
	Tokenize tokenize.Config `koanf:",squash"`
	Monitor  monitor.Config  `koanf:",squash"`
	Log      Log             `koanf:",squash"`
}

// DefaultServing returns the settings of a run without flags.
func DefaultServing() Serving {
	return Serving{
		Proxy: proxy.DefaultConfig(), Busy: busy.DefaultConfig(), Router: router.DefaultConfig(), Index: kvindex.DefaultConfig(),
		Tokenize: tokenize.DefaultConfig(), Monitor: monitor.DefaultConfig(), Log: DefaultLog(),
	}
}

// Validate returns all findings, each beginning with its key.
func (c Serving) Validate() error {
	return errors.Join(c.Proxy.Validate(), c.Busy.Validate(), c.Router.Validate(), c.Index.Validate(), c.Tokenize.Validate(), c.Monitor.Validate(), c.Log.Validate())
}

// Fleet is what a front end is told about workers and models.
type Fleet struct {
	Workers Workers  `koanf:"workers" usage:"workers by URL; the YAML file can tell more of each"`
	Models  []string `koanf:"models" only:"file"`  // known even while no worker serves them
	Aliases Aliases  `koanf:"aliases" only:"file"` // further names
}

// Validate finds names that would mean two things.
func (f Fleet) Validate() error {
	catalog, err := f.Catalog()
	if err != nil {
		return fmt.Errorf("aliases: %w", err)
	}
	for i := range f.Workers {
		if len(f.Workers[i].Models) == 0 {
			continue // its names are asked of the worker
		}
		if catalog, err = catalog.With(&f.Workers[i]); err != nil {
			return fmt.Errorf("workers: entry %d: %w", i+1, err)
		}
	}
	return nil
}

// Catalog knows the models and aliases, and no worker yet.
func (f Fleet) Catalog() (*worker.Catalog, error) {
	return worker.NewCatalog(f.Models, f.Aliases)
}

// Frontend is the Config of `spillway frontend`.
type Frontend struct {
	Fleet   Fleet          `koanf:",squash"`
	Serving Serving        `koanf:",squash"`
	Replica replica.Config `koanf:",squash"`
	Sharing Sharing        `koanf:",squash"`
}

// Ineffective tells of settings that are set to no effect.
func (c Frontend) Ineffective() error {
	return c.Sharing.unheard(c.Replica.Enabled(), "replica-sync-bind")
}

// DefaultFrontend returns the settings of a run without flags.
func DefaultFrontend() Frontend {
	return Frontend{Serving: DefaultServing(), Replica: replica.DefaultConfig()}
}

// Validate returns all findings, each beginning with its key.
func (c Frontend) Validate() error {
	return errors.Join(c.Serving.Validate(), c.Fleet.Validate(), c.Replica.Validate())
}

// Deprecated names the spellings of older releases of the documented front end.
func (Frontend) Deprecated() map[string]string {
	const advice = "set --active-decode-blocks-threshold and --active-prefill-tokens-threshold instead"
	return map[string]string{"admission-control": advice, "busy-threshold": advice}
}
