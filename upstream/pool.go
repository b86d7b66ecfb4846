package upstream

import "time"

// Idle returns the number of idle connections.
func (c *Client) Idle() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.idle)
}

// take returns the connection that became idle last, or nil if none is left. The newest is the
// least likely to be dropped by the worker, and the oldest can expire. Without TLS only asking
// tells whether it is alive.
func (c *Client) take() *conn {
	for {
		c.mu.Lock()
		n := len(c.idle)
		if n == 0 {
			c.mu.Unlock()
			return nil
		}
		cn := c.idle[n-1]
		c.idle[n-1] = nil
		c.idle = c.idle[:n-1]
		c.mu.Unlock()
		// The sweep may be late; the age is what counts.
		if time.Since(cn.idleSince) < c.cfg.IdleTimeout && (cn.turn != nil || cn.quiet()) {
			return cn
		}
		cn.close()
	}
}

// put makes cn idle, or closes it if there are enough or the client is closed.
func (c *Client) put(cn *conn) {
	cn.idleSince = time.Now()
	c.mu.Lock()
	full := c.closed || len(c.idle) >= c.cfg.MaxIdle
	if !full {
		c.idle = append(c.idle, cn)
		c.armLocked(c.cfg.IdleTimeout)
	}
	c.mu.Unlock()
	if full {
		cn.close()
	}
}

// armLocked sees to it that the sweep runs after wait, unless it is coming anyway: one timer
// for all connections, not stopped when the pool is empty for a moment.
func (c *Client) armLocked(wait time.Duration) {
	if c.armed {
		return
	}
	c.armed = true
	if c.sweep == nil {
		c.sweep = time.AfterFunc(wait, c.expire)
	} else {
		c.sweep.Reset(wait)
	}
}

// expire closes the connections that have been idle for too long.
func (c *Client) expire() {
	now := time.Now()
	c.mu.Lock()
	n := 0
	for n < len(c.idle) && now.Sub(c.idle[n].idleSince) >= c.cfg.IdleTimeout {
		n++
	}
	expired := append([]*conn(nil), c.idle[:n]...)
	rest := copy(c.idle, c.idle[n:])
	clear(c.idle[rest:])
	c.idle = c.idle[:rest]
	c.armed = false
	if rest > 0 {
		c.armLocked(c.cfg.IdleTimeout - now.Sub(c.idle[0].idleSince))
	}
	c.mu.Unlock()
	closeAll(expired)
}

func closeAll(conns []*conn) {
	for _, cn := range conns {
		cn.close()
	}
}
