package configs

import (
	"errors"
	"fmt"

	"spillway/kvindex"
	kvservice "spillway/kvindex/service"
	"spillway/monitor"
	"spillway/replay"
	"spillway/replica"
	"spillway/router"
	"spillway/selectservice"
	"spillway/sim"
	"spillway/tracker/service"
)

// Sim is the Config of `spillway sim`.
type Sim struct {
	Sim sim.Config `koanf:",squash"`
	Log Log        `koanf:",squash"`
}

// DefaultSim returns the settings of a run without flags.
func DefaultSim() Sim { return Sim{Sim: sim.DefaultConfig(), Log: DefaultLog()} }

// Validate returns all findings, each beginning with its key.
func (c Sim) Validate() error { return errors.Join(c.Sim.Validate(), c.Log.Validate()) }

// Replay is the Config of `spillway replay`.
type Replay struct {
	Replay replay.Config `koanf:",squash"`
}

// DefaultReplay returns the settings of a run without flags.
func DefaultReplay() Replay { return Replay{Replay: replay.DefaultConfig()} }

// Validate returns all findings, each beginning with its key.
func (c Replay) Validate() error { return c.Replay.Validate() }

// SlotTracker is the Config of `spillway slot-tracker`.
type SlotTracker struct {
	Service service.Config `koanf:",squash"`
	Replica replica.Config `koanf:",squash"`
	Log     Log            `koanf:",squash"`
}

// DefaultSlotTracker returns the settings of a run without flags.
func DefaultSlotTracker() SlotTracker {
	return SlotTracker{Service: service.DefaultConfig(), Replica: replica.DefaultConfig(), Log: DefaultLog()}
}

// Validate returns all findings, each beginning with its key.
func (c SlotTracker) Validate() error {
	return errors.Join(c.Service.Validate(), c.Replica.Validate(), c.Log.Validate())
}

// SelectService is the Config of `spillway select-service`.
type SelectService struct {
	Service selectservice.Config `koanf:",squash"`
	Cost    router.CostConfig    `koanf:",squash"`
	Queue   router.QueueConfig   `koanf:",squash"`
	Index   kvindex.Config       `koanf:",squash"`
	Sharing Sharing              `koanf:",squash"`
	Log     Log                  `koanf:",squash"`
}

// Sharing is a wish that other settings fulfil.
type Sharing struct {
	ReplicaSync bool `koanf:"router-replica-sync" dyn:"DYN_ROUTER_REPLICA_SYNC" bad:"unreadable" usage:"has a warning logged if no replica-sync setting turns on the exchange of reservations with other replicas"`
}

// unheard tells that the wish is one, if nothing is exchanged without the setting of that key.
func (s Sharing) unheard(exchanging bool, key string) error {
	if !s.ReplicaSync || exchanging {
		return nil
	}
	return fmt.Errorf("router-replica-sync: exchanges nothing without %s", key)
}

// Ineffective tells of settings that are set to no effect.
func (c SelectService) Ineffective() error {
	return c.Sharing.unheard(c.Replica().Enabled(), "replica-sync-port")
}

// DefaultSelectService returns the settings of a run without flags.
func DefaultSelectService() SelectService {
	return SelectService{
		Service: selectservice.DefaultConfig(), Cost: router.DefaultCostConfig(), Queue: router.DefaultQueueConfig(),
		Index: kvindex.DefaultConfig(), Log: DefaultLog(),
	}
}

// Deprecated names keys of the original that have no use here.
func (SelectService) Deprecated() map[string]string {
	return map[string]string{"threads": "every worker's events are applied beside the others', on as many cores as there are (GOMAXPROCS)"}
}

// Router are the settings of the router: this service has one mode.
func (c SelectService) Router() router.Config {
	cfg := router.DefaultConfig()
	cfg.Mode, cfg.Cost, cfg.Queue = router.KV, c.Cost, c.Queue
	return cfg.Resolved()
}

// KV are the settings of what listens to KV events.
func (c SelectService) KV() monitor.KVConfig {
	cfg := monitor.DefaultKVConfig()
	cfg.Peers, cfg.DumpTimeout = c.Service.IndexerPeers, c.Service.DumpTimeout
	return cfg
}

// Replica are the settings of the exchange with other replicas.
func (c SelectService) Replica() replica.Config {
	cfg := replica.DefaultConfig()
	cfg.Bind, cfg.Peers, cfg.Format = c.Service.PublishAt(), c.Service.ReplicaSyncPeers, c.Service.ReplicaSyncFormat
	return cfg
}

// Validate returns all findings, each beginning with its key.
func (c SelectService) Validate() error {
	if err := c.Service.Validate(); err != nil {
		return err // others are made of it
	}
	var peers []error
	for _, p := range c.KV().PeerURLs() {
		if err := monitor.CheckPeer(p); err != nil {
			peers = append(peers, fmt.Errorf("indexer-peers: %w", err))
		}
	}
	return errors.Join(errors.Join(peers...), c.Router().Validate(), c.Replica().Validate(), c.Index.Validate(), c.Log.Validate())
}

// Indexer is the Config of `spillway indexer`.
type Indexer struct {
	Service kvservice.Config `koanf:",squash"`
	KV      monitor.KVConfig `koanf:",squash"`
	Index   kvindex.Config   `koanf:",squash"`
	Log     Log              `koanf:",squash"`
}

// DefaultIndexer returns the settings of a run without flags.
func DefaultIndexer() Indexer {
	return Indexer{Service: kvservice.DefaultConfig(), KV: monitor.DefaultKVConfig(), Index: kvindex.DefaultConfig(), Log: DefaultLog()}
}

// Deprecated names keys of the original that have no use here.
func (Indexer) Deprecated() map[string]string {
	return map[string]string{"threads": "every worker's events are applied beside the others', on as many cores as there are (GOMAXPROCS)"}
}

// Validate returns all findings, each beginning with its key.
func (c Indexer) Validate() error {
	return errors.Join(c.Service.Validate(), c.KV.Validate(), c.Index.Validate(), c.Log.Validate())
}
