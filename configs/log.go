package configs

import (
	"errors"
	"fmt"
	"log/slog"
)

// Log is how a process writes its log.
type Log struct {
	LogFormat string `koanf:"log-format" dyn:"DYN_LOGGING_JSONL" dynbool:"json" usage:"form of the log: text or json"`
	LogLevel  string `koanf:"log-level" dyn:"DYN_LOG" bad:"dyn" usage:"least severe level logged: debug, info, warn or error"`
}

// DefaultLog is text from level info on.
func DefaultLog() Log { return Log{LogFormat: "text", LogLevel: "info"} }

// Validate checks both words.
func (l Log) Validate() error {
	var errs []error
	if l.LogFormat != "text" && l.LogFormat != "json" {
		errs = append(errs, fmt.Errorf("log-format: %q is neither text nor json", l.LogFormat))
	}
	if _, err := l.Level(); err != nil {
		errs = append(errs, fmt.Errorf("log-level: %q is none of debug, info, warn and error", l.LogLevel))
	}
	return errors.Join(errs...)
}

// Level is the level that LogLevel names, in any case. It fails if Validate would.
func (l Log) Level() (slog.Level, error) {
	var level slog.Level
	err := level.UnmarshalText([]byte(l.LogLevel))
	return level, err
}
