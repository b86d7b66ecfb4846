package router

import (
	"math"
	"time"
)

// delay is how long t will wait, if those that wait for the group too go at their present pace: 0
// where that is not known yet. Other classes get their share of tokens meanwhile.
func (q *queue) delay(g *group, t *Ticket, now time.Time) time.Duration {
	if g.pace == nil {
		return 0
	}
	rate, known := g.pace.rate(now)
	if !known {
		return 0
	}
	_, own := q.classOf(t)
	ahead, quantum := float64(t.cost), min(q.profile.Classes[t.policy].Quantum, maxQuantum)
	for _, l := range g.lanes {
		if l.class != own {
			continue
		}
		for _, w := range l.heap {
			if before(w, t) {
				ahead += float64(w.cost)
			}
		}
	}
	all := ahead - float64(t.cost)
	for _, l := range g.lanes {
		if l.class != own {
			all += min(float64(l.tokens), ahead*float64(l.class.quantum)/float64(quantum))
		}
	}
	return time.Duration(min(all/rate, math.MaxInt32) * float64(time.Second))
}

// pace is how fast those go that wait for one group. It begins anew when nobody has waited for a
// while: times without waiting say nothing of how long one would have had to.
type pace struct {
	from time.Time // since when the tokens are counted
	last [32]struct {
		at     time.Time
		tokens uint64
	} // the last admissions, a ring
	n      int    // admissions in all
	tokens uint64 // of those in last
}

// admit counts one that goes. The last one who waits tells nothing: the group ends with it.
func (g *group) admit(tokens uint64, now time.Time) {
	if g.n == 1 {
		return
	}
	if g.pace == nil {
		g.pace = &pace{from: g.since}
	}
	g.pace.admit(tokens, now)
}

// minPace is the number of admissions from which on a rate can be told. Fewer come in a burst that
// a queue is there to take up.
const minPace = 8

func (p *pace) admit(tokens uint64, now time.Time) {
	e := &p.last[p.n%len(p.last)]
	if p.n >= len(p.last) {
		p.from = e.at
		p.tokens -= e.tokens
	}
	e.at, e.tokens = now, tokens
	p.tokens += tokens
	p.n++
}

// rate is in tokens per second.
func (p *pace) rate(now time.Time) (float64, bool) {
	took := now.Sub(p.from)
	if p.n < minPace || took <= 0 {
		return 0, false
	}
	return float64(p.tokens) / took.Seconds(), true
}
