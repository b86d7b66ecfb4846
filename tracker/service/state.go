package service

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"spillway/tracker"
	"spillway/worker"
)

// stateVersion is that of the state file's form; another one is refused.
const stateVersion = 1

// state is what the state file holds.
type state struct {
	Version    int              `json:"version"`
	WrittenAt  time.Time        `json:"written_at"`
	Partitions []partitionState `json:"partitions"`
}

type partitionState struct {
	Model     string         `json:"model_name"`
	Tenant    string         `json:"tenant_id"`
	BlockSize uint32         `json:"block_size"`
	Workers   []workerState  `json:"workers"`
	Requests  []requestState `json:"requests"`
}

type workerState struct {
	ID      uint64 `json:"worker_id"`
	DPStart uint32 `json:"dp_start"`
	DPSize  uint32 `json:"dp_size"`
}

type requestState struct {
	ID            string         `json:"request_id"`
	Worker        uint64         `json:"worker_id"`
	DP            uint32         `json:"dp_rank"`
	Hashes        []uint64       `json:"sequence_hashes"`
	OutputBlocks  uint64         `json:"output_blocks"`
	PrefillTokens uint64         `json:"prefill_tokens"`
	PrefillTime   *time.Duration `json:"prefill_nanoseconds,omitempty"`
	Age           time.Duration  `json:"age_nanoseconds"` // when the file was written
	Decay         *float64       `json:"decay_fraction,omitempty"`
}

// save writes the state file, if one is set. Readers see the old one or the new one, never a part.
func (s *Server) save() error {
	if s.cfg.StateFile == "" {
		return nil
	}
	text, err := json.Marshal(s.registry.state(s.now()))
	if err != nil {
		return fmt.Errorf("slot tracker: state: %w", err)
	}
	file, err := os.CreateTemp(filepath.Dir(s.cfg.StateFile), filepath.Base(s.cfg.StateFile)+".*")
	if err != nil {
		return fmt.Errorf("slot tracker: state: %w", err)
	}
	_, err = file.Write(text)
	err = errors.Join(err, file.Sync(), file.Close())
	if err == nil {
		err = os.Rename(file.Name(), s.cfg.StateFile)
	}
	if err != nil {
		return fmt.Errorf("slot tracker: state: %w", errors.Join(err, os.Remove(file.Name())))
	}
	return nil
}

func (g *registry) state(now time.Time) state {
	all := state{Version: stateVersion, WrittenAt: now}
	for _, p := range g.matching(filter{}) {
		part := partitionState{Model: p.key.Model, Tenant: p.key.Tenant, BlockSize: p.blockSize}
		ids, of := g.workersOf(p)
		if len(ids) == 0 {
			continue // the last has just gone
		}
		for _, id := range ids {
			part.Workers = append(part.Workers, workerState{id, of[id].start, of[id].size})
		}
		for _, r := range p.tracker.Standing(now) {
			part.Requests = append(part.Requests, requestState{
				ID: r.ID, Worker: uint64(r.Rank.Worker), DP: r.Rank.DP, Hashes: r.Hashes, OutputBlocks: r.DecodeBlocks,
				PrefillTokens: r.PrefillTokens, PrefillTime: r.PrefillTime, Age: r.Age, Decay: r.Decay,
			})
		}
		all.Partitions = append(all.Partitions, part)
	}
	return all
}

// load reads the state file, if one is set and there is one. Requests have aged meanwhile by the
// clock on the wall; those that are too old are left out.
func (s *Server) load() error {
	if s.cfg.StateFile == "" {
		return nil
	}
	text, err := os.ReadFile(s.cfg.StateFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	var all state
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	if err == nil && all.Version != stateVersion {
		err = fmt.Errorf("version %d, this program knows %d", all.Version, stateVersion)
	}
	if err == nil {
		err = s.registry.restore(all, s.now())
	}
	if err != nil {
		return fmt.Errorf("slot tracker: state-file: %s: %w", s.cfg.StateFile, err)
	}
	return nil
}

func (g *registry) restore(all state, now time.Time) error {
	off := max(now.Sub(all.WrittenAt), 0)
	for _, part := range all.Partitions {
		for _, w := range part.Workers {
			r := request{
				model: part.Model, tenant: part.Tenant, blockSize: part.BlockSize,
				workerID: w.ID, dpStart: w.DPStart, dpSize: w.DPSize,
			}
			if failed := g.register(&r, now); failed != nil {
				return failed
			}
		}
		p, failed := g.find(worker.Partition{Model: part.Model, Tenant: part.Tenant})
		if failed != nil {
			return failed
		}
		for _, r := range part.Requests {
			// What it was booked on may have gone while the file was written, or it is too old.
			_ = p.tracker.Restore(tracker.Standing{Age: r.Age + off, Reservation: tracker.Reservation{
				ID: r.ID, Rank: worker.Rank{Worker: worker.ID(r.Worker), DP: r.DP}, Hashes: r.Hashes, DecodeBlocks: r.OutputBlocks,
				PrefillTokens: r.PrefillTokens, PrefillTime: r.PrefillTime, Expires: true,
			}}, now)
		}
		for _, r := range part.Requests {
			if r.Decay != nil {
				p.tracker.Grow(r.ID, 0, r.Decay, now)
			}
		}
	}
	return nil
}
