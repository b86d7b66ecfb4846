package main

import (
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"
)

// garbage is how much the collector lets lie about before it runs, in bytes, where the default, as
// much as is alive, would be less. Little of a front end's heap lives long: a busy one with a few
// connections would collect 40 times a second for 4 MiB each time, at a tenth of its CPU time.
const garbage = 24 << 20

// mostPercent bounds what the collector is told, and with it what the heap can grow to between the
// end of a collection and our look at it.
const mostPercent = 1000

// collector tells the garbage collector after each collection when to run next.
type collector struct {
	mu      sync.Mutex // guards the fields below
	over    bool
	percent int // as it was told last
	samples []metrics.Sample
}

// easeCollector lets garbage bytes of garbage lie about until undo, unless an operator has told the
// collector something of his own.
func easeCollector() (undo func()) {
	if os.Getenv("GOGC") != "" || os.Getenv("GOMEMLIMIT") != "" {
		return func() {}
	}
	c := &collector{percent: 100, samples: []metrics.Sample{
		{Name: "/gc/heap/live:bytes"}, {Name: "/gc/scan/stack:bytes"}, {Name: "/gc/scan/globals:bytes"},
	}}
	c.watch(&collected{c})
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.over = true
		debug.SetGCPercent(100)
	}
}

// collected is garbage: the next collection finds it.
type collected struct{ c *collector }

// watch adjusts now, and after each collection from now on.
func (c *collector) watch(next *collected) {
	if c.adjust() {
		runtime.SetFinalizer(next, func(found *collected) { found.c.watch(found) })
	}
}

// adjust reports false when it is over.
func (c *collector) adjust() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return false
	}
	metrics.Read(c.samples)
	var alive uint64 // what the collector takes its percentage of
	for _, s := range c.samples {
		if s.Value.Kind() == metrics.KindUint64 {
			alive += s.Value.Uint64()
		}
	}
	percent := int(min(max(garbage*100/max(alive, 1), 100), mostPercent))
	if d := percent - c.percent; percent == 100 && d != 0 || d > c.percent/8 || -d > c.percent/8 {
		c.percent = percent
		debug.SetGCPercent(percent)
	}
	return true
}
