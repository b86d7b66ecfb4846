package monitor

import (
	"math"
	"math/bits"
	"time"

	"spillway/busy"
	"spillway/wire"
	"spillway/worker"
)

const (
	// shareLife is how long a publisher may be silent about a rank before what it promised there
	// is taken to have ended with it.
	shareLife = 60 * time.Second
	// maxParts bounds the publishers about one rank.
	maxParts = 256
	// maxShares bounds the publishers of all ranks of one worker together.
	maxShares = 4 * worker.MaxReportedRanks
)

// shares are what other routers have promised the ranks of one worker, by rank, as the event
// plane tells. Each router counts only its own requests, so the parts are added up.
type shares struct {
	ranks map[uint32]*rankShares
	held  int // publishers of all ranks
}

type rankShares struct {
	parts map[uint64]share // by publisher
	last  time.Time        // when the latest event of the rank came
}

// share is what one publisher has promised one rank. Nil was never said.
type share struct {
	decodeBlocks, prefillTokens *uint64
	heard                       time.Time
}

// add takes in an event and returns what is now promised to its rank in all: nil for what
// nobody has said anything about. It reports false, and changes nothing, if there is no room
// for one more publisher.
func (s *shares) add(e wire.LoadEvent, dp uint32, now time.Time) (decodeBlocks, prefillTokens *uint64, ok bool) {
	r := s.ranks[dp]
	if e.DecodeBlocks != nil || e.PrefillTokens != nil {
		had := share{}
		if r != nil {
			had = r.parts[e.Publisher]
		}
		if had.heard.IsZero() {
			if s.held == maxShares || r != nil && len(r.parts) == maxParts {
				return nil, nil, false
			}
			s.held++
		}
		if r == nil {
			if s.ranks == nil {
				s.ranks = map[uint32]*rankShares{}
			}
			r = &rankShares{parts: map[uint64]share{}}
			s.ranks[dp] = r
		}
		if e.DecodeBlocks != nil {
			had.decodeBlocks = e.DecodeBlocks
		}
		if e.PrefillTokens != nil {
			had.prefillTokens = e.PrefillTokens
		}
		had.heard = now
		r.parts[e.Publisher] = had
	}
	if r == nil {
		return nil, nil, true
	}
	r.last = now
	decodeBlocks, prefillTokens = r.sum()
	return decodeBlocks, prefillTokens, true
}

// sum adds the parts up. It stops at the greatest number there is.
func (r *rankShares) sum() (decodeBlocks, prefillTokens *uint64) {
	for _, p := range r.parts {
		decodeBlocks, prefillTokens = plus(decodeBlocks, p.decodeBlocks), plus(prefillTokens, p.prefillTokens)
	}
	return decodeBlocks, prefillTokens
}

func plus(sum, more *uint64) *uint64 {
	switch {
	case more == nil:
		return sum
	case sum == nil:
		return new(*more)
	}
	n, carry := bits.Add64(*sum, *more, 0)
	if carry > 0 {
		n = math.MaxUint64
	}
	*sum = n
	return sum
}

// expire forgets publishers that have been silent for too long and returns the ranks that this
// changed, with what is left there: 0 rather than nil, because something was promised before. The
// samples are as old as the last event of their rank, since nothing new was heard.
func (s *shares) expire(id worker.ID, now time.Time) []busy.Sample {
	var out []busy.Sample
	for dp, r := range s.ranks {
		had, gone := share{}, false
		for publisher, p := range r.parts {
			if now.Sub(p.heard) < shareLife {
				continue
			}
			gone = true
			had.decodeBlocks, had.prefillTokens = plus(had.decodeBlocks, p.decodeBlocks), plus(had.prefillTokens, p.prefillTokens)
			delete(r.parts, publisher)
			s.held--
		}
		if !gone {
			continue
		}
		sample := busy.Sample{Rank: worker.Rank{Worker: id, DP: dp}, Source: busy.Event, TakenAt: r.last}
		sample.DecodeBlocks, sample.PrefillTokens = r.sum()
		if sample.DecodeBlocks == nil && had.decodeBlocks != nil {
			sample.DecodeBlocks = new(uint64)
		}
		if sample.PrefillTokens == nil && had.prefillTokens != nil {
			sample.PrefillTokens = new(uint64)
		}
		out = append(out, sample)
		if len(r.parts) == 0 {
			delete(s.ranks, dp)
		}
	}
	return out
}
