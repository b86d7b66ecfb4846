package configs

import (
	"errors"
	"fmt"

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

// InnerDispatch is the Config of a dispatcher in the process of a front end.
type InnerDispatch struct {
	Dispatch `koanf:",squash"`
}

// Ineffective tells of settings that are the front end's.
func (c InnerDispatch) Ineffective() error {
	def, got := DefaultDispatch(), c.Dispatch
	var errs []error
	for _, s := range []struct {
		key string
		set bool
	}{
		{"host", got.Dispatch.Host != def.Dispatch.Host}, {"port", got.Dispatch.Port != def.Dispatch.Port},
		{"health-port", got.Dispatch.HealthPort != def.Dispatch.HealthPort}, {"metrics-port", got.Dispatch.MetricsPort != def.Dispatch.MetricsPort},
		{"metrics-endpoint-token-file", got.Dispatch.MetricsKey != ""},
		{"log-level", got.Log.LogLevel != def.Log.LogLevel}, {"log-format", got.Log.LogFormat != def.Log.LogFormat},
	} {
		if s.set {
			errs = append(errs, fmt.Errorf("%s: the front end decides", s.key))
		}
	}
	return errors.Join(errs...)
}

// Deprecated names keys of llm-d's processor that have no use here.
func (Dispatch) Deprecated() map[string]string {
	return map[string]string{
		"metrics-endpoint-auth": "the metrics ask for the token in --metrics-endpoint-token-file, if it is set",
	}
}

// Validate returns all findings, each beginning with its key.
func (c Dispatch) Validate() error { return errors.Join(c.Dispatch.Validate(), c.Log.Validate()) }
