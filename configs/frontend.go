package configs

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"

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

	// What holds for workers that do not say it themselves.
	DPSize       uint32 `koanf:"dp-size" usage:"data-parallel ranks of each worker; 0: those that its engine reports"`
	KVEventsPort int    `koanf:"kv-events-port" usage:"port of the workers' hosts on which rank 0 publishes KV events, rank r on the r-th after it; a host's workers follow each other in the order of --workers; 0 is off"`
	KVReplayPort int    `koanf:"kv-replay-port" usage:"likewise, to ask for KV events that were missed; 0 is off"`
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
	if f.DPSize > worker.MaxDPSize {
		return fmt.Errorf("dp-size: %d is more than %d", f.DPSize, worker.MaxDPSize)
	}
	if f.KVReplayPort != 0 && f.KVEventsPort == 0 {
		return errors.New("kv-replay-port: there is nothing to replay without kv-events-port")
	}
	_, err = f.Known()
	return err
}

// Known are the workers, with what the flags say of those that do not say it themselves. It fails
// if there are not as many ports as that needs; the error begins with the key.
func (f Fleet) Known() ([]worker.Worker, error) {
	all := slices.Clone(f.Workers)
	taken := map[string]uint32{} // ports by host, beyond the first
	for i := range all {
		w := &all[i]
		if w.DPSize == 0 {
			w.DPSize = f.DPSize
		}
		if len(w.KVEvents) > 0 || f.KVEventsPort == 0 {
			continue
		}
		u, err := url.Parse(w.Endpoint)
		if err != nil {
			return nil, fmt.Errorf("workers: entry %d: url: %w", i+1, err)
		}
		ranks := max(w.DPSize, 1)
		before := taken[u.Hostname()]
		taken[u.Hostname()] += ranks
		if w.KVEvents, err = publishers(u.Hostname(), f.KVEventsPort, before, w.DPStart, ranks); err != nil {
			return nil, fmt.Errorf("kv-events-port: %w", err)
		}
		if f.KVReplayPort == 0 || len(w.KVReplay) > 0 {
			continue
		}
		if w.KVReplay, err = publishers(u.Hostname(), f.KVReplayPort, before, w.DPStart, ranks); err != nil {
			return nil, fmt.Errorf("kv-replay-port: %w", err)
		}
	}
	return all, nil
}

// publishers are the sockets of the ranks from start on, where rank 0 would have the port that is so
// many after the first: engines add the number of the rank to the port that they are given.
func publishers(host string, first int, before, start, ranks uint32) (map[uint32]string, error) {
	at := map[uint32]string{}
	for r := range ranks {
		port := int64(first) + int64(before) + int64(start) + int64(r)
		if first < 1 || port > 65535 {
			return nil, fmt.Errorf("%d: port %d, of a rank of a worker at %s, is not within 1..65535", first, port, host)
		}
		at[start+r] = "tcp://" + net.JoinHostPort(host, strconv.FormatInt(port, 10))
	}
	return at, nil
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

	DispatchFile string `koanf:"dispatch" usage:"YAML file of the settings of a dispatcher of batch requests, by the same keys as the flags of spillway dispatch, to run in this process"`
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
