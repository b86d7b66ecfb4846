package monitor

import (
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"
)

// KVConfig are the settings of what listens to KV events. It is read-only once given to
// NewKVListeners.
type KVConfig struct {
	Peers       []string      `koanf:"peers" usage:"base URLs of indexers or select-services whose /dump is read at start-up; the first that answers is enough"`
	DumpTimeout time.Duration `koanf:"dump-timeout" usage:"how long a peer's /dump may take"`

	// What follows has no key: operators need not choose it, but commands and tests must.
	ComponentMetrics bool          // also under the names of Dynamo's component
	RecoveryDelay    time.Duration // before the first peer is asked, so that it has heard what we have not
	ReplayIdle       time.Duration // how long an engine may be silent during a replay
	ReplayTotal      time.Duration // how long a replay may take
	SilentAfter      time.Duration // age of a listener that was never sent a batch at which that is worth a warning
	LinkSilence      time.Duration // on a new connection, after which what may have been missed is asked for
	StrangerAge      time.Duration // how long recovered blocks are kept for a rank that no publisher speaks for
}

// DefaultKVConfig has no peers.
func DefaultKVConfig() KVConfig {
	return KVConfig{
		DumpTimeout: time.Minute, RecoveryDelay: time.Second, ReplayIdle: 2 * time.Second, ReplayTotal: 30 * time.Second,
		SilentAfter: time.Minute, LinkSilence: 30 * time.Second, StrangerAge: 10 * time.Minute,
	}
}

// Validate returns all findings, each beginning with its key.
func (c KVConfig) Validate() error {
	var errs []error
	if c.DumpTimeout <= 0 {
		errs = append(errs, fmt.Errorf("dump-timeout: %v is not above 0", c.DumpTimeout))
	}
	for _, p := range c.PeerURLs() {
		if err := CheckPeer(p); err != nil {
			errs = append(errs, fmt.Errorf("peers: %w", err))
		}
	}
	return errors.Join(errs...)
}

// PeerURLs are the base URLs of peers, without blanks and slashes at the end.
func (c KVConfig) PeerURLs() []string {
	var all []string
	for _, p := range c.Peers {
		if p = strings.TrimRight(strings.TrimSpace(p), "/"); p != "" {
			all = append(all, p)
		}
	}
	return all
}

// CheckPeer tells what is wrong with the base URL of a peer.
func CheckPeer(base string) error {
	u, err := url.Parse(base)
	switch {
	case err != nil:
		return fmt.Errorf("%.256q is no URL", base)
	case u.Scheme != "http" && u.Scheme != "https", u.Host == "":
		return fmt.Errorf("%.256q is not of the form http://host:port", base)
	case u.RawQuery != "" || u.Fragment != "":
		return fmt.Errorf("%.256q has a query or a fragment", base)
	}
	return nil
}
