package configs

import (
	"errors"

	"spillway/dispatch"
)

// Dispatch is the Config of `spillway dispatch`.
type Dispatch struct {
	Dispatch dispatch.Config `koanf:",squash"`
	Log      Log             `koanf:",squash"`
}

// DefaultDispatch returns the settings of a run without flags.
func DefaultDispatch() Dispatch {
	return Dispatch{Dispatch: dispatch.DefaultConfig(), Log: DefaultLog()}
}

// Deprecated names keys of llm-d's processor that have no use here.
func (Dispatch) Deprecated() map[string]string {
	return map[string]string{
		"prometheus-cache-ttl":  "Prometheus is asked in the background, every --metrics-poll-interval",
		"metrics-endpoint-auth": "the metrics have a port of their own, --metrics-port",
	}
}

// Validate returns all findings, each beginning with its key.
func (c Dispatch) Validate() error { return errors.Join(c.Dispatch.Validate(), c.Log.Validate()) }
