package tokenize

import (
	"errors"
	"fmt"
	"net/url"
	"strings"

	"spillway/buckets"
)

// The sources of tokens.
const (
	auto     = "auto"     // render, else tokenize
	render   = "render"   // vLLM's /v1/chat/completions/render and /v1/completions/render
	tokenize = "tokenize" // /tokenize
	estimate = "estimate" // nobody is asked
	off      = "off"      // likewise
)

// Config is what an operator sets.
type Config struct {
	Source   string `koanf:"tokenizer" usage:"how the tokens of a prompt are found in mode kv: render or tokenize (routes of the worker), auto (either), estimate or off (from its length)"`
	URL      string `koanf:"tokenizer-url" usage:"server to ask for tokens, by the model's first name, instead of the workers"`
	MaxBytes int    `koanf:"tokenize-max-bytes" usage:"largest request body whose tokens are asked for"`
	CacheMB  int    `koanf:"token-cache-mb" usage:"memory for tokens of prompts that have been asked for, in binary megabytes; 0 remembers none"`

	Prefix     string          `koanf:"-"` // of the front end's family of metrics; "" is dynamo_frontend
	Histograms *buckets.Shapes `koanf:"-"` // buckets as the environment reshapes them; nil: as documented
}

// DefaultConfig asks the workers, by whichever route they have.
func DefaultConfig() Config { return Config{Source: auto, MaxBytes: 1 << 20, CacheMB: 64} }

const (
	maxBodyBytes = 64 << 20
	maxCacheMB   = 1 << 20
)

// Validate returns all findings, each beginning with its key.
func (c Config) Validate() error {
	var errs []error
	switch c.Source {
	case auto, render, tokenize, estimate, off:
	default:
		errs = append(errs, fmt.Errorf("tokenizer: %q is none of auto, render, tokenize, estimate, off", c.Source))
	}
	if u, err := url.Parse(c.URL); c.URL != "" && (err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "") {
		errs = append(errs, errors.New("tokenizer-url: is no http:// or https:// URL of a server, without credentials or query"))
	}
	if c.MaxBytes < 0 || c.MaxBytes > maxBodyBytes {
		errs = append(errs, fmt.Errorf("tokenize-max-bytes: %d is not within 0..%d", c.MaxBytes, maxBodyBytes))
	}
	if c.CacheMB < 0 || c.CacheMB > maxCacheMB {
		errs = append(errs, fmt.Errorf("token-cache-mb: %d is not within 0..%d", c.CacheMB, maxCacheMB))
	}
	return errors.Join(errs...)
}

// Asks tells whether anybody is asked at all.
func (c Config) Asks() bool { return len(c.routes()) > 0 }

// routes are the routes to try, the best first.
func (c Config) routes() []route {
	switch c.Source {
	case auto:
		return []route{toRender, toTokenize, toTokenizeV1}
	case render:
		return []route{toRender}
	case tokenize:
		return []route{toTokenize, toTokenizeV1}
	}
	return nil
}

func trimmed(base string) string { return strings.TrimRight(base, "/") }
