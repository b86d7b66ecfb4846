package main

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// resolve finds out what became of the calls that were cut. Nothing is on its way any more.
func (c *lifecycleClient) resolve(conn *trackerConn) {
	if c.doubtful {
		_, answer := conn.do("GET", "/workers?model_name="+c.own.Model, "")
		c.become(strings.Contains(string(answer), fmt.Sprintf(`"worker_id":%d,`, c.ownWorker())))
	}
	for _, p := range c.doubts {
		c.asked++
		path, body := p.doubt, p.named()
		if p.doubt == "/output_block" { // it can not be told whether it has one more
			path = "/free"
		}
		if p.doubt == "/add" {
			body = p.add()
		}
		sent := time.Now()
		status, answer := conn.do("POST", path, body)
		p.doubt = ""
		switch {
		case path != "/add":
			if path == "/prefill_complete" && status == 200 {
				c.held = append(c.held, p)
			}
			c.note(path, p, status, answer)
		case status == 201: // it had not been booked, or had expired
			if c.old(p) {
				c.maybe++
			}
			p.sent = sent
			fallthrough
		case status == 409:
			c.adds++
			c.held = append(c.held, p)
		default:
			c.wrong(path, body, status, answer)
		}
	}
	c.doubts = nil
}

// askOld asks whether those that may have expired have, which ends the prefill of the others, and
// returns how many have.
func (c *lifecycleClient) askOld(conn *trackerConn) (gone int) {
	stays := func(p *promise) bool {
		if !c.old(p) {
			return true
		}
		c.asked++
		status, answer := conn.do("POST", "/prefill_complete", p.named())
		switch status {
		case 200:
			p.open = false
			return true
		case 404:
			gone++
			return false
		}
		c.wrong("/prefill_complete", p.named(), status, answer)
		return true
	}
	c.held = slices.DeleteFunc(c.held, func(p *promise) bool { return !stays(p) })
	c.orphans = slices.DeleteFunc(c.orphans, func(p *promise) bool { return !stays(p) })
	c.tallies.expired += gone
	return gone
}

// leave frees what is held, and forgets the orphans, which expire, but for those on its own worker,
// which goes.
func (c *lifecycleClient) leave(conn *trackerConn) {
	for _, p := range slices.Clone(c.held) {
		status, answer := conn.do("POST", "/free", p.named())
		c.note("/free", p, status, answer)
	}
	if c.registered {
		body := registration(c.own, c.ownWorker(), ownRanks)
		if status, answer := conn.do("POST", "/unregister", body); status != 200 {
			c.wrong("/unregister", body, status, answer)
		}
		c.become(false)
	}
	c.tallies.expired += len(c.orphans)
	c.orphans = nil
}

// prospects are some prompts to ask for at a checkpoint.
func (l *lifecycle) prospects() (all []prospect) {
	for i := range 4 {
		all = append(all, l.clients[i].prospect(l.sites[i%len(l.sites)]))
	}
	return all
}
