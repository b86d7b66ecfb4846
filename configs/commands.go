package configs

import (
	"spillway/replay"
)

// Replay is the Config of `spillway replay`.
type Replay struct {
	Replay replay.Config `koanf:",squash"`
}

// DefaultReplay returns the settings of a run without flags.
func DefaultReplay() Replay { return Replay{Replay: replay.DefaultConfig()} }

// Validate returns all findings, each beginning with its key.
func (c Replay) Validate() error { return c.Replay.Validate() }
