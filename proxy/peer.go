package proxy

import (
	"fmt"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"spillway/busy"
	"spillway/upstream"
	"spillway/worker"
)

// peer is what the server keeps for one worker: its connections, its circuit, how it answered
// and how fast it prefills.
type peer struct {
	endpoint string
	client   *upstream.Client
	host     string
	name     []string // value of X-Spillway-Worker, ready for a header map
	rate     rate
	freed    rates
	circuit  *circuit
	proved   atomic.Int64                    // Unix time in ns of the last success or canary; at first when the peer was made
	canary   atomic.Bool                     // one is out
	answers  [len(codeClasses)]atomic.Uint64 // by the first digit of the status
	last     sync.Map                        // rank (uint32) -> *lastSeen
	sent     atomic.Pointer[chan struct{}]   // of the waiter that was let go last
}

// lastSeen is how a rank did last, -1 where that is not known.
type lastSeen struct {
	ttft, itl atomic.Int64 // ns
	input     atomic.Int64 // prompt tokens
}

// lastOf is kept for a rank; worker.AnyDP if the worker picks it.
func (p *peer) lastOf(dp uint32) *lastSeen {
	if v, ok := p.last.Load(dp); ok {
		return v.(*lastSeen)
	}
	l := &lastSeen{}
	l.ttft.Store(-1)
	l.itl.Store(-1)
	l.input.Store(-1)
	v, _ := p.last.LoadOrStore(dp, l)
	return v.(*lastSeen)
}

// codeClasses are the labels of peer.answers. There is no final 1xx, and what is above 5xx counts
// as that.
var codeClasses = [...]string{2: "2xx", 3: "3xx", 4: "4xx", 5: "5xx"}

// answered counts an answer of the worker by its status.
func (p *peer) answered(status int) { p.answers[min(max(status/100, 2), 5)].Add(1) }

// peer returns the peer of w, which is in list; a changed endpoint, name or list makes a new one.
func (s *Server) peer(w *worker.Worker, list *busy.List) (*peer, error) {
	old, known := s.peers.Load(w.ID)
	if known {
		if p := old.(*peer); p.endpoint == w.Endpoint && p.name[0] == w.Name && p.circuit.list == list {
			return p, nil
		}
	}
	u, err := url.Parse(w.Endpoint)
	if err != nil {
		return nil, fmt.Errorf("proxy: worker %s: %w", w.Name, err)
	}
	client, err := upstream.New(u, upstream.Config{DialTimeout: s.cfg.DialTimeout})
	if err != nil {
		return nil, fmt.Errorf("proxy: worker %s: %w", w.Name, err)
	}
	p := &peer{
		endpoint: w.Endpoint, client: client, host: u.Host, name: []string{w.Name}, circuit: newCircuit(s.cfg, w, list, s.log),
	}
	p.proved.Store(time.Now().UnixNano())
	switch {
	case !known:
		if first, lost := s.peers.LoadOrStore(w.ID, p); lost { // two requests came at once
			return first.(*peer), nil
		}
	case s.peers.CompareAndSwap(w.ID, old, p):
		old.(*peer).retire()
	default:
		return s.peer(w, list)
	}
	return p, nil
}

// retire closes the connections of a peer that has no further use.
func (p *peer) retire() {
	p.client.Close()
	p.circuit.retire(time.Now())
}

// forgetGone drops the peers of workers that are not registered any more: a request that had
// chosen one of them may have made its peer anew after Forget.
func (s *Server) forgetGone() {
	catalog := s.router.Catalog()
	s.peers.Range(func(id, _ any) bool {
		if id := id.(worker.ID); catalog.Find(id) == nil {
			s.Forget(id)
		}
		return true
	})
}

// rate is how fast a worker prefills, in tokens per second.
type rate struct{ mean mean }

const unknownRate = 8000 // tokens per second, before any measurement

// observe takes in that so many tokens that were not cached took so long to the first token.
func (r *rate) observe(tokens uint64, ttft time.Duration) {
	if tokens > 0 && ttft > 0 {
		r.mean.observe(float64(tokens) / ttft.Seconds())
	}
}

// predict is how long a prefill of so many tokens should take, within 0.2 to 60 seconds.
func (r *rate) predict(tokens uint64) time.Duration {
	seconds := float64(tokens) / r.mean.or(unknownRate)
	return time.Duration(min(max(seconds, 0.2), 60) * float64(time.Second))
}
