package replica

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"spillway/wire"
)

// Config are the settings of the exchange with other replicas. It is read-only once given to New.
type Config struct {
	Bind      string   `koanf:"replica-sync-bind" usage:"where to publish reservations to other replicas, such as tcp://0.0.0.0:8191; nothing: off"`
	Advertise string   `koanf:"replica-sync-advertise" usage:"how other replicas reach replica-sync-bind; only used to refuse it as a peer of its own"`
	Peers     []string `koanf:"replica-sync-peers" list:"exact" usage:"where other replicas publish, such as tcp://10.0.0.2:8191, separated by commas"`
	Format    string   `koanf:"replica-sync-format" usage:"name of the tenant in what is published: tenant, group (later revisions of the original) or both"`
	Queue     int      `koanf:"replica-sync-queue" usage:"most reservation events that may wait to be sent, and as many to be applied; what finds no room is lost"`
}

// DefaultConfig exchanges nothing.
func DefaultConfig() Config { return Config{Format: "both", Queue: 100_000} }

// Enabled tells whether anything is exchanged.
func (c Config) Enabled() bool { return c.Bind != "" }

// MaxPeers bounds the peers of one process.
const MaxPeers = 200

const maxQueue = 10_000_000 // events; by their size they are bounded too

// Validate reports the first setting that makes no sense; the error begins with its key.
func (c Config) Validate() error {
	if _, ok := formats[c.Format]; !ok {
		return fmt.Errorf("replica-sync-format: %q is none of tenant, group and both", c.Format)
	}
	if c.Queue < 1 || c.Queue > maxQueue {
		return fmt.Errorf("replica-sync-queue: %d is not within 1..%d", c.Queue, maxQueue)
	}
	if !c.Enabled() {
		switch {
		case c.Advertise != "":
			return errors.New("replica-sync-advertise: needs replica-sync-bind")
		case len(c.Peers) > 0:
			return errors.New("replica-sync-peers: needs replica-sync-bind")
		}
		return nil
	}
	if err := checkEndpoint(c.Bind); err != nil {
		return fmt.Errorf("replica-sync-bind: %w", err)
	}
	if c.Advertise != "" {
		if err := checkEndpoint(c.Advertise); err != nil {
			return fmt.Errorf("replica-sync-advertise: %w", err)
		}
	}
	for _, e := range c.Peers {
		if err := checkEndpoint(e); err != nil {
			return fmt.Errorf("replica-sync-peers: %w", err)
		}
		if e == c.Advertise {
			return fmt.Errorf("replica-sync-peers: %s is replica-sync-advertise, and no replica is its own peer", e)
		}
	}
	if n := len(c.peers()); n > MaxPeers {
		return fmt.Errorf("replica-sync-peers: %d are more than %d", n, MaxPeers)
	}
	return nil
}

// peers are the configured peers, each once, sorted.
func (c Config) peers() []string {
	return slices.Compact(slices.Sorted(slices.Values(c.Peers)))
}

var formats = map[string]wire.ReplicaFormat{"tenant": wire.FormatTenant, "group": wire.FormatGroup, "both": wire.FormatBoth}

// checkEndpoint tells what is wrong with the form of an endpoint. Nothing is trimmed, resolved or
// normalised: localhost and 127.0.0.1 are two endpoints.
func checkEndpoint(e string) error {
	scheme, rest, ok := strings.Cut(e, "://")
	switch {
	case !ok || rest == "":
		return fmt.Errorf("%q is not of the form tcp://host:port", e)
	case scheme == "ipc" || scheme == "inproc":
		return nil
	case scheme != "tcp":
		return fmt.Errorf("%q is neither tcp, ipc nor inproc", e)
	}
	at := strings.LastIndexByte(rest, ':')
	if at < 0 {
		return fmt.Errorf("%q has no port", e)
	}
	host, port := rest[:at], rest[at+1:]
	bracketed := strings.HasPrefix(host, "[")
	switch {
	case host == "":
		return fmt.Errorf("%q has no host", e)
	case bracketed && !strings.HasSuffix(host, "]"):
		return fmt.Errorf("%q has a bracket that does not end", e)
	case !bracketed && strings.Contains(host, ":"):
		return fmt.Errorf("%q needs brackets around its IPv6 address", e)
	}
	// A sign passes here as it does in the original, and is refused when it is connected to.
	if _, err := strconv.ParseUint(strings.TrimPrefix(port, "+"), 10, 16); err != nil {
		return fmt.Errorf("%q has no port from 0 to 65535", e)
	}
	return nil
}
