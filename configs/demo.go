package configs

import (
	"errors"
	"time"

	"spillway/sim"
)

// Demo is the Config of `spillway demo`: a front end and its simulated workers.
type Demo struct {
	Serving Serving    `koanf:",squash"`
	Sim     sim.Config `koanf:",squash"`
}

// DefaultDemo returns the settings of a run without flags: four workers so small that one
// laptop's load can fill them, and thresholds to refuse what they cannot hold.
func DefaultDemo() Demo {
	c := Demo{Serving: DefaultServing(), Sim: sim.DefaultConfig()}
	c.Serving.Proxy.Host = "127.0.0.1" // nobody else's business
	c.Sim.Count = 4
	c.Sim.KVBlocks = 1024
	c.Sim.MaxNumSeqs = 16
	c.Sim.ITL = 20 * time.Millisecond
	c.Sim.PrefillTokensPerSecond = 8000
	c.Serving.Busy.ActiveDecodeBlocksThreshold = new(0.85)
	c.Serving.Busy.ActivePrefillTokensThreshold = new(uint64(8000))
	return c
}

// Validate returns all findings, each beginning with its key.
func (c Demo) Validate() error { return errors.Join(c.Serving.Validate(), c.Sim.Validate()) }
