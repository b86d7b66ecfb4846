package monitor

import (
	"bytes"
	"net/http"
	"time"

	"spillway/busy"
	"spillway/wire"
	"spillway/worker"
)

// Line is one wanted series, for comparison with another parser.
type Line struct {
	Name   string
	Value  float64
	Labels map[string]string // those asked for
}

// Scan reads the lines of the given names, with the given labels, and tells whether a wanted
// line was malformed.
func Scan(body []byte, names, labels []string) (lines []Line, malformed int) {
	sc := scanner{rest: body, name: func(name []byte) metric {
		for i, n := range names {
			if string(name) == n {
				return metric(i + 1)
			}
		}
		return none
	}}
	for s, ok := sc.next(); ok; s, ok = sc.next() {
		l := Line{Name: names[s.metric-1], Value: s.value, Labels: map[string]string{}}
		for _, name := range labels {
			if v, ok := s.label(name); ok {
				l.Labels[name] = string(v)
			}
		}
		lines = append(lines, l)
	}
	return lines, sc.malformed
}

// Skim runs the scanner over a vLLM page and counts the wanted lines.
func Skim(body []byte) (n int) {
	sc := scanner{rest: body, name: vllmName}
	for _, ok := sc.next(); ok; _, ok = sc.next() {
		n++
	}
	return n
}

// Reader turns a worker's pages into samples, one after another.
type Reader struct {
	Worker   worker.Worker
	Estimate bool
	At       int // place
	Server   string
	history  history
	where    whereabouts
}

// Read is what the scrape loop does with a page that has come in.
func (r *Reader) Read(body string, sent time.Time) (s []busy.Sample, restarted, invalid, asleep bool) {
	if r.Worker.Engine == "" {
		r.Worker.Engine, r.Worker.Endpoint, r.Worker.MetricsURL = "auto", "http://w", "http://w/metrics"
	}
	r.where.prepare(&r.Worker, "auto")
	r.where.at = r.At
	if r.Server != "" {
		r.history.server, _ = readServerInfo([]byte(r.Server))
	}
	p, _ := r.where.read(bytes.Clone([]byte(body)))
	restarted = r.history.restarted(p)
	return r.history.samples(p, &r.Worker, sent, r.Estimate), restarted, p.invalid, p.asleep
}

// Via has the monitor use t instead of the network.
func (m *KvWorkerMonitor) Via(t http.RoundTripper) { m.get.client.Transport = t }

// Spread is the start offset of a worker.
var Spread = spread

// MaxShares bounds the publishers of one worker, MaxParts those of one rank.
const (
	MaxShares = maxShares
	MaxParts  = maxParts
)

// Heard takes in a load event as if it came from a socket, and returns why it was dropped, or "".
func (m *KvWorkerMonitor) Heard(e wire.LoadEvent, now time.Time) string { return m.heard(e, now) }

// Expire ends what silent publishers have promised.
func (m *KvWorkerMonitor) Expire(now time.Time) { m.expire(now) }

// OccupyReplays takes all places for replays, for ever.
func (k *KVListeners) OccupyReplays() {
	for range cap(k.replays) {
		k.replays <- struct{}{}
	}
}
