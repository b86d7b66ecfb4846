package sim

import (
	"slices"
	"sync"
	"time"
)

// class is what a route is to faults.
type class uint8

const (
	inference  class = iota // chat, completions and embeddings
	probe                   // /health and /ping
	tokenizing              // what tells tokens
	other                   // what else a worker answers, but /sim/
)

// faults are those set on a worker, at most one of each name, in the order in which they were
// set. It is safe for concurrent use.
type faults struct {
	mu   sync.Mutex // guards list and the counts in its faults
	list []*fault
}

// add sets f in the place of one with its name.
func (fs *faults) add(f *fault) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.removeLocked(f.kind.name)
	fs.list = append(fs.list, f)
}

// remove ends the fault of a name, or all with "".
func (fs *faults) remove(name string) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.removeLocked(name)
}

func (fs *faults) removeLocked(name string) {
	fs.list = slices.DeleteFunc(fs.list, func(f *fault) bool {
		gone := name == "" || f.kind.name == name
		if gone {
			close(f.ended)
		}
		return gone
	})
}

// find is the fault of a name, or nil.
func (fs *faults) find(name string, now time.Time) *fault {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return fs.findLocked(name, now)
}

func (fs *faults) findLocked(name string, now time.Time) *fault {
	for _, f := range fs.list {
		if f.kind.name == name && (f.until.IsZero() || now.Before(f.until)) {
			return f
		}
	}
	return nil
}

// strike is the fault of a name if it hits the next request that it could, or nil.
func (fs *faults) strike(name string, now time.Time) *fault {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if f := fs.findLocked(name, now); f != nil && f.hitLocked(now) {
		return f
	}
	return nil
}

// take returns the fault that a request at a route of class c meets, or nil.
func (fs *faults) take(c class, now time.Time) *fault {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if len(fs.list) == 0 {
		return nil
	}
	if c == inference {
		for _, f := range fs.list {
			if (f.kind.stage == ofHead || f.kind.stage == ofBody) && f.hitLocked(now) {
				return f
			}
		}
		return nil
	}
	if c == probe {
		if f := fs.findLocked(healthFail, now); f != nil && f.hitLocked(now) {
			return f
		}
		if fs.findLocked(healthOK, now) != nil {
			return nil
		}
	}
	if c == tokenizing {
		for _, name := range [...]string{tokenizerOff, tokenizerFail, tokenizerSlow} {
			if f := fs.findLocked(name, now); f != nil && f.hitLocked(now) {
				return f
			}
		}
	}
	// A worker that is frozen for all requests is so for everything; no probe uses up a count.
	if f := fs.findLocked(freeze, now); f != nil && f.spec.Count == 0 && or(f.spec.Share, 1) == 1 {
		return f
	}
	return nil
}

// hitLocked decides whether f hits the next request that it could. Hits are spread evenly: a
// share of 0.25 is every fourth.
func (f *fault) hitLocked(now time.Time) bool {
	if !f.until.IsZero() && !now.Before(f.until) || f.spec.Count > 0 && f.hits >= f.spec.Count {
		return false
	}
	share := or(f.spec.Share, 1)
	f.seen++
	if int(float64(f.seen)*share) == int(float64(f.seen-1)*share) {
		return false
	}
	f.hits++
	return true
}

// faultState is a fault in the answer of GET /sim/fault.
type faultState struct {
	faultSpec
	Hits        int     `json:"hits"` // requests
	SecondsLeft float64 `json:"seconds_left,omitempty"`
}

// state lists the faults that are not over.
func (fs *faults) state(now time.Time) []faultState {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	all := []faultState{}
	for _, f := range fs.list {
		s := faultState{faultSpec: f.spec, Hits: f.hits}
		if !f.until.IsZero() {
			if s.SecondsLeft = f.until.Sub(now).Seconds(); s.SecondsLeft <= 0 {
				continue
			}
		}
		all = append(all, s)
	}
	return all
}
