package upstream

import (
	"sync"
	"time"
)

// lookEvery is the time between two rounds of look.
const lookEvery = 250 * time.Millisecond

// watched are the connections on which each is reading.
type watched struct {
	mu    sync.Mutex // guards the fields below; no I/O is done while it is held
	conns map[*conn]struct{}
	timer *time.Timer
	armed bool // timer will fire
}

// watch has cn looked at until unwatch: one timer for all streams, and none while there are none.
func (c *Client) watch(cn *conn) {
	w := &c.streams
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.conns == nil {
		w.conns = map[*conn]struct{}{}
		w.timer = time.AfterFunc(lookEvery, c.look)
		w.armed = true
	}
	w.conns[cn] = struct{}{}
	if !w.armed {
		w.armed = true
		w.timer.Reset(lookEvery)
	}
}

func (c *Client) unwatch(cn *conn) {
	c.streams.mu.Lock()
	delete(c.streams.conns, cn)
	c.streams.mu.Unlock()
}

// look looks at all connections that are watched. One that no longer is takes no harm: only what the
// worker has ended is shut.
func (c *Client) look() {
	w := &c.streams
	w.mu.Lock()
	unsure := make([]*conn, 0, len(w.conns))
	for cn := range w.conns {
		if cn.unsure.Load() > 0 {
			unsure = append(unsure, cn)
		}
	}
	if w.armed = len(w.conns) > 0; w.armed {
		w.timer.Reset(lookEvery)
	}
	w.mu.Unlock()
	for _, cn := range unsure {
		cn.look()
	}
}
