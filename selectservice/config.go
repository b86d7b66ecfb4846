package selectservice

import (
	"errors"
	"fmt"
	"strconv"
	"time"
)

// Config is what an operator sets. It is read-only after New.
type Config struct {
	Host         string        `koanf:"host" usage:"address to listen on"`
	Port         int           `koanf:"port" usage:"port to listen on; 0 takes a free one"`
	APIKey       string        `koanf:"api-key" usage:"bearer token that all routes but /health, /ready and /metrics ask for"`
	DrainTimeout time.Duration `koanf:"drain-timeout" usage:"how long running requests may take after SIGTERM"`

	IndexerPeers []string      `koanf:"indexer-peers" usage:"base URLs of select-services or indexers whose /dump is read at start-up; the first that answers is enough"`
	DumpTimeout  time.Duration `koanf:"dump-timeout" usage:"how long a peer's /dump may take"`

	ReplicaSyncPort   int      `koanf:"replica-sync-port" usage:"port on which reservations are published to other replicas, on all interfaces; 0 is off"`
	ReplicaSyncPeers  []string `koanf:"replica-sync-peers" list:"exact" usage:"where other replicas publish, such as tcp://10.0.0.2:8192, separated by commas"`
	ReplicaSyncFormat string   `koanf:"replica-sync-format" usage:"name of the tenant in what is published: tenant, group (later revisions of the original) or both"`

	APIRevision string `koanf:"api-revision" usage:"contract to serve: brief (tenant_id, reservation_id) or routing-group (routing_group, selection_id is the booking)"`

	Renew             bool   `koanf:"renew-reservations" usage:"let a lifecycle call restart the age of its reservation, which else expires however busy it is"`
	MaxWorkers        int    `koanf:"max-workers" usage:"worker records that are kept; those of deleted workers make room, oldest first"`
	MaxRanksPerWorker uint32 `koanf:"max-ranks-per-worker" usage:"most data-parallel ranks that a worker may have and be schedulable"`

	CacheTTLSecs    uint64 `koanf:"selection-cache-ttl-secs" usage:"routing-group: seconds for which a selection can be reserved by its ID"`
	CacheMaxEntries int    `koanf:"selection-cache-max-entries" usage:"routing-group: selections that can be, at most"`
	CacheMaxBytes   int    `koanf:"selection-cache-max-bytes" usage:"routing-group: memory that they may take, in bytes"`
}

// The contracts.
const (
	RevisionBrief        = "brief"
	RevisionRoutingGroup = "routing-group"
)

// DefaultConfig listens on port 8092 and exchanges nothing.
func DefaultConfig() Config {
	return Config{
		Host: "0.0.0.0", Port: 8092, DrainTimeout: 5 * time.Second, DumpTimeout: time.Minute,
		ReplicaSyncFormat: "both", APIRevision: RevisionBrief, MaxWorkers: 16384, MaxRanksPerWorker: 65536,
		CacheTTLSecs: 120, CacheMaxEntries: 4096, CacheMaxBytes: 256 << 20,
	}
}

const maxSeconds = 1 << 32 // so that they fit a time.Duration

// Validate reports every bad setting, each beginning with its key.
func (c Config) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Port < 0 || c.Port > 65535 {
		bad("port: %d is not within 0..65535", c.Port)
	}
	if c.DrainTimeout < 0 {
		bad("drain-timeout: %v is less than 0", c.DrainTimeout)
	}
	if c.DumpTimeout <= 0 {
		bad("dump-timeout: %v is not above 0", c.DumpTimeout)
	}
	if c.ReplicaSyncPort < 0 || c.ReplicaSyncPort > 65535 {
		bad("replica-sync-port: %d is not within 1..65535", c.ReplicaSyncPort)
	}
	if c.ReplicaSyncPort == 0 && len(c.ReplicaSyncPeers) > 0 {
		bad("replica-sync-peers: needs replica-sync-port")
	}
	if c.APIRevision != RevisionBrief && c.APIRevision != RevisionRoutingGroup {
		bad("api-revision: %q is neither brief nor routing-group", c.APIRevision)
	}
	if c.MaxWorkers < 1 {
		bad("max-workers: %d is less than 1", c.MaxWorkers)
	}
	if c.MaxRanksPerWorker < 1 {
		bad("max-ranks-per-worker: 0 leaves no rank")
	}
	if c.CacheTTLSecs > maxSeconds {
		bad("selection-cache-ttl-secs: %d is not within 0..%d", c.CacheTTLSecs, uint64(maxSeconds))
	}
	if c.CacheMaxEntries < 0 {
		bad("selection-cache-max-entries: %d is less than 0", c.CacheMaxEntries)
	}
	if c.CacheMaxBytes < 0 {
		bad("selection-cache-max-bytes: %d is less than 0", c.CacheMaxBytes)
	}
	return errors.Join(errs...)
}

// PublishAt is the endpoint of ReplicaSyncPort, "" for none.
func (c Config) PublishAt() string {
	if c.ReplicaSyncPort == 0 {
		return ""
	}
	return "tcp://*:" + strconv.Itoa(c.ReplicaSyncPort)
}
