package tokenize

import (
	"sync"
	"sync/atomic"
	"time"
)

const (
	maxCalls     = 32              // to one worker at a time
	probeAgain   = 5 * time.Minute // after which a route that was not there is tried again
	patience     = 3               // failures in a row after which a worker rests, refusals after which a route counts as not there
	rest         = 5 * time.Second // during which such a worker is not asked
	forgetServer = 2 * probeAgain  // without a call
)

// servers are those that have been asked lately, by ID.
type servers struct {
	mu    sync.Mutex // guards known
	known map[uint64]*server
}

// of is what is remembered of a server. Who has not been asked for long is forgotten when a new one
// comes, so that there are not many more than there are workers.
func (all *servers) of(id uint64, now time.Time) *server {
	all.mu.Lock()
	defer all.mu.Unlock()
	s := all.known[id]
	if s == nil {
		for old, o := range all.known {
			if now.Sub(time.Unix(0, o.used.Load())) > forgetServer && o.calls.Load() == 0 {
				o.disconnect()
				delete(all.known, old)
			}
		}
		s = &server{}
		all.known[id] = s
	}
	s.used.Store(now.UnixNano())
	return s
}

// disconnect closes the connections that nobody uses.
func (all *servers) disconnect() {
	all.mu.Lock()
	defer all.mu.Unlock()
	for _, s := range all.known {
		s.disconnect()
	}
}

// server is what is remembered of one worker. It is safe for concurrent use.
type server struct {
	calls  atomic.Int32              // under way
	used   atomic.Int64              // when it was last looked at, in Unix nanoseconds
	health [2]health                 // with text alone, with images and the like
	routes [numRoutes][2]routeMemory // of completions, of chats
	link   atomic.Pointer[link]      // nil until the first call
}

// health is how a server has fared lately with one kind of prompt. What a worker has to fetch for an
// image is named by clients: one that never comes must not have it rest for all prompts.
type health struct {
	failures atomic.Int32 // in a row
	restsTo  atomic.Int64 // Unix nanoseconds
}

func (s *server) with(media bool) *health {
	if media {
		return &s.health[1]
	}
	return &s.health[0]
}

func (s *server) route(to route, chat bool) *routeMemory {
	if chat {
		return &s.routes[to][1]
	}
	return &s.routes[to][0]
}

// has tells whether one of the routes may be tried for a prompt.
func (s *server) has(routes []route, w *Worker, p *Prompt, r *reading, now time.Time) bool {
	for _, to := range routes {
		if to.fits(w, p, r) && s.route(to, p.Chat).offTo.Load() <= now.UnixNano() {
			return true
		}
	}
	return false
}

// enter takes a place for one call, if there is one.
func (s *server) enter() bool {
	if s.calls.Add(1) <= maxCalls {
		return true
	}
	s.calls.Add(-1)
	return false
}

// awake is false while the server rests; of those who come when that is over the first one is to try.
func (h *health) awake(now time.Time) bool {
	if h.failures.Load() < patience {
		return true
	}
	to := h.restsTo.Load()
	return to <= now.UnixNano() && h.restsTo.CompareAndSwap(to, now.Add(rest).UnixNano())
}

// ill notes a failure, and tells whether the server rests from now on and did not before.
func (h *health) ill(now time.Time) bool {
	n := h.failures.Add(1)
	if n >= patience {
		h.restsTo.Store(now.Add(rest).UnixNano())
	}
	return n == patience
}

// well notes a success, and tells whether the server was resting.
func (h *health) well() bool {
	return h.failures.Load() > 0 && h.failures.Swap(0) >= patience
}

// untried takes back that awake, at now, has let one caller try.
func (h *health) untried(now time.Time) {
	h.restsTo.CompareAndSwap(now.Add(rest).UnixNano(), now.UnixNano())
}

// routeMemory is what is remembered of a route for one kind of prompt. Its parts need not agree to
// the moment: what goes wrong then is one call too many or too few.
type routeMemory struct {
	offTo   atomic.Int64 // Unix nanoseconds until when it counts as not there; 0 is always there
	proven  atomic.Bool  // it has told tokens
	refused atomic.Int32 // refusals in a row, while it is not proven
}

// begin tells whether the route is to be tried; where it was not there one caller tries for all.
func (m *routeMemory) begin(now time.Time) bool {
	to := m.offTo.Load()
	return to == 0 || to <= now.UnixNano() && m.offTo.CompareAndSwap(to, now.Add(probeAgain).UnixNano())
}

// told takes in what became of a call that begin has allowed at now, and tells whether the route was known to work.
func (m *routeMemory) told(res result, now time.Time) (proven bool) {
	proven = m.proven.Load()
	switch res {
	case told:
		if !proven || m.offTo.Load() != 0 {
			m.proven.Store(true)
			m.refused.Store(0)
			m.offTo.Store(0)
		}
	case unsupported:
		m.proven.Store(false)
		m.offTo.Store(now.Add(probeAgain).UnixNano())
	case abandoned: // that says nothing: if it was the one try that begin allows, the next caller has it
		m.offTo.CompareAndSwap(now.Add(probeAgain).UnixNano(), now.UnixNano())
	case refused:
		// A server that cannot do it at all may say so by another status; a client's bad request
		// does not count against one that can.
		if !proven && m.refused.Add(1) >= patience {
			m.refused.Store(0)
			m.offTo.Store(now.Add(probeAgain).UnixNano())
		}
	}
	return proven
}
