package kvindex_test

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"spillway/kvhash"
	"spillway/kvindex"
	"spillway/worker"
)

var (
	benchTrace   = flag.String("kvindex.trace", "", "a Mooncake JSONL trace for the benchmarks, in place of a synthetic one")
	benchEntries = flag.Int("kvindex.entries", 300_000, "how many entries the benchmarks' indexes are filled with")
)

// load is requests in the order of their arrival, as the 512-token blocks of their prompts.
// Prompts share beginnings; a block's number names all before it too.
func load(b *testing.B) [][]uint64 {
	b.Helper()
	if *benchTrace == "" {
		return conversations(4000)
	}
	f, err := os.Open(*benchTrace)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	var all [][]uint64
	in := bufio.NewScanner(f)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		var line struct {
			IDs []uint64 `json:"hash_ids"`
		}
		if err := json.Unmarshal(in.Bytes(), &line); err != nil {
			b.Fatal(err)
		}
		all = append(all, line.IDs)
	}
	return all
}

// conversations is like what the conversation trace of Mooncake holds: all begin with the same
// block, most are a few turns of which each has the one before as its beginning, and prompts are
// 15 blocks long in the middle, and up to a few hundred.
func conversations(n int) [][]uint64 {
	r := rand.New(rand.NewPCG(1, 1))
	var all [][]uint64
	next := uint64(1)
	for range n {
		var prompt []uint64
		if len(all) > 100 && r.IntN(10) < 4 {
			prompt = slices.Clone(all[len(all)-1-r.IntN(100)])
		} else {
			prompt = []uint64{0}
		}
		for range 1 + int(r.ExpFloat64()*15) {
			prompt = append(prompt, next)
			next++
		}
		all = append(all, prompt)
	}
	return all
}

const perID = 32 // blocks of 16 tokens

// appendLocals appends the block hashes of a prompt, at most n of them.
func appendLocals(dst []uint64, prompt []uint64, n int) []uint64 {
	for _, id := range prompt {
		for j := range uint64(perID) {
			if len(dst) == n {
				return dst
			}
			dst = append(dst, scramble(id*perID+j))
		}
	}
	return dst
}

// scramble makes hashes of numbers.
func scramble(n uint64) uint64 {
	n = (n ^ n>>30) * 0xbf58476d1ce4e5b9
	n = (n ^ n>>27) * 0x94d049bb133111eb
	return n ^ n>>31
}

// event is what an engine publishes, decoded.
type event struct {
	rank          worker.Rank
	remove        bool
	parent        kvindex.Parent
	engine, local []uint64
}

// engines stands for workers with a cache of a number of blocks each, which drop the leaf that
// was not used for longest. A prompt comes again under another name once the load has gone
// around, so that there is no end of events.
type engines struct {
	load    [][]uint64
	workers int
	size    int // blocks of a worker's cache
	batch   int // blocks of an event
	caches  []map[uint64]*cached
	oldest  [][]*cached // by worker, a queue of what may have to go
	now     int
	r       *rand.Rand
}

type cached struct {
	hash     uint64
	parent   *cached
	children int
	used     int
}

func newEngines(load [][]uint64, workers, size, batch int) *engines {
	e := &engines{load: load, workers: workers, size: size, batch: batch, r: rand.New(rand.NewPCG(3, 3))}
	e.caches = make([]map[uint64]*cached, workers)
	for i := range e.caches {
		e.caches[i] = map[uint64]*cached{}
	}
	e.oldest = make([][]*cached, workers)
	return e
}

func (e *engines) prompt(i int) []uint64 {
	round := uint64(i/len(e.load)) << 40
	prompt := slices.Clone(e.load[i%len(e.load)])
	for k := range prompt {
		prompt[k] += round
	}
	return prompt
}

// next routes one more request to a worker at random and returns what that worker publishes.
// Engine hashes are like sequence hashes, but of the worker's own.
func (e *engines) next() []event {
	w := e.r.IntN(e.workers)
	rank := worker.Rank{Worker: worker.ID(w)}
	locals := appendLocals(nil, e.prompt(e.now), 1<<30)
	e.now++
	cache := e.caches[w]
	var events []event
	var at *cached
	store := event{rank: rank}
	flush := func() {
		if len(store.engine) > 0 {
			events = append(events, store)
		}
		store = event{rank: rank}
	}
	engine := uint64(w) << 32
	for _, l := range locals {
		engine = scramble(engine ^ l)
		c := cache[engine]
		if c == nil {
			if len(store.engine) == e.batch {
				flush()
			}
			if len(store.engine) == 0 && at != nil {
				store.parent = kvindex.After(at.hash)
			}
			store.engine, store.local = append(store.engine, engine), append(store.local, l)
			c = &cached{hash: engine, parent: at}
			if at != nil {
				at.children++
			}
			cache[engine] = c
		}
		c.used = e.now
		at = c
	}
	flush()
	for c := at; c != nil; c = c.parent { // leaves first
		e.oldest[w] = append(e.oldest[w], c)
	}
	gone := event{rank: rank, remove: true}
	for len(cache) > e.size && len(e.oldest[w]) > 0 {
		c := e.oldest[w][0]
		e.oldest[w] = e.oldest[w][1:]
		if c.children > 0 || cache[c.hash] != c {
			continue // it will come up again with its last child's prompt, or is gone
		}
		delete(cache, c.hash)
		if c.parent != nil {
			c.parent.children--
		}
		if gone.engine = append(gone.engine, c.hash); len(gone.engine) == e.batch {
			events = append(events, gone)
			gone = event{rank: rank, remove: true}
		}
	}
	if len(gone.engine) > 0 {
		events = append(events, gone)
	}
	return events
}

func apply(ix *kvindex.Index, e event) {
	if e.remove {
		ix.Remove(e.rank, worker.Device, e.engine)
	} else if s := ix.Store(e.rank, worker.Device, e.parent, e.engine, e.local); s != kvindex.Stored {
		panic(s.String())
	}
}

// fill adds requests until the index holds the entries asked for.
func fill(ix *kvindex.Index, e *engines) {
	for ix.Entries() < *benchEntries*9/10 {
		for _, ev := range e.next() {
			apply(ix, ev)
		}
	}
}

// cpu is the processor time that this process has used.
func cpu() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkEvents applies events to an index that is full: blocks come and go.
func BenchmarkEvents(b *testing.B) {
	requests := load(b)
	for _, workers := range []int{64, 1000} {
		for _, batch := range []int{64, 4} {
			b.Run(fmt.Sprintf("workers=%d/batch=%d", workers, batch), func(b *testing.B) {
				ix := kvindex.New(kvindex.Config{MaxEntries: 1 << 30, MaxRanks: 1 << 16})
				e := newEngines(requests, workers, *benchEntries/workers, batch)
				fill(ix, e)
				var used time.Duration
				var spans []float64 // nanoseconds a block of some thousand: short, so that few are interrupted
				blocks := 0
				b.ResetTimer()
				for range b.N {
					b.StopTimer()
					var events []event
					for range 100 {
						events = append(events, e.next()...)
					}
					runtime.GC() // what making the events has left is not ours
					b.StartTimer()
					usedBefore, began, n := cpu(), time.Now(), 0
					for _, ev := range events {
						apply(ix, ev)
						blocks += len(ev.engine)
						if n += len(ev.engine); n >= 2000 {
							now := time.Now()
							spans = append(spans, float64(now.Sub(began).Nanoseconds())/float64(n))
							began, n = now, 0
						}
					}
					used += cpu() - usedBefore
				}
				slices.Sort(spans)
				b.ReportMetric(spans[len(spans)/2], "p50-ns/block")
				b.ReportMetric(spans[len(spans)/10], "p10-ns/block")
				b.ReportMetric(float64(used.Nanoseconds())/float64(blocks), "cpu-ns/block")
				b.ReportMetric(float64(blocks)/used.Seconds()/1e6, "Mblocks/s/core")
				b.ReportMetric(float64(ix.Entries())/1e6, "Mentries")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// BenchmarkRecord notes where prompts of 512 blocks were sent, among four ranks: the same ones again, and
// new ones, for which as many go as come; where ranks have room for few of them, and for many.
func BenchmarkRecord(b *testing.B) {
	const length = 512
	for _, room := range []int{10_000, 250_000} {
		for _, known := range []bool{true, false} {
			b.Run(fmt.Sprintf("room=%d/known=%v", room, known), func(b *testing.B) {
				ix := kvindex.New(kvindex.DefaultConfig())
				r := ix.Routed(kvindex.DefaultRoutedConfig())
				limits := map[worker.Rank]int{}
				for id := range worker.ID(4) {
					limits[worker.Rank{Worker: id}] = room
				}
				r.Limit(limits)
				now, n := time.Unix(1000, 0), uint64(0)
				local, seqs := make([]uint64, length), make([]uint64, 0, length)
				record := func() {
					for i := range local {
						local[i] = scramble(n*length + uint64(i))
					}
					seqs = kvhash.AppendSequences(seqs[:0], local)
					now = now.Add(time.Millisecond)
					if _, err := r.Record(worker.Rank{Worker: worker.ID(n % 4)}, local, seqs, now); err != nil {
						b.Fatal(err)
					}
				}
				for range 4*room/length + 4 {
					n++
					record()
				}
				b.ReportAllocs()
				for b.Loop() {
					if !known {
						n++
					}
					record()
				}
			})
		}
	}
}

// BenchmarkMemory tells what an entry takes.
func BenchmarkMemory(b *testing.B) {
	requests := load(b)
	for _, workers := range []int{64, 1000} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			for range b.N {
				before := heap()
				ix := kvindex.New(kvindex.Config{MaxEntries: 1 << 30, MaxRanks: 1 << 16})
				r := rand.New(rand.NewPCG(4, 4))
				for i := 0; ix.Entries() < *benchEntries; i++ { // each prompt comes to one rank, whole
					rank, round := worker.Rank{Worker: worker.ID(r.IntN(workers))}, uint64(i/len(requests))<<40
					prompt := slices.Clone(requests[i%len(requests)])
					for k := range prompt {
						prompt[k] += round
					}
					local := appendLocals(nil, prompt, 1<<30)
					ix.Store(rank, worker.Device, kvindex.Parent{}, kvhash.AppendSequences(nil, local), local)
				}
				bytes := heap() - before
				b.ReportMetric(float64(bytes)/float64(ix.Entries()), "bytes/entry")
				b.ReportMetric(float64(ix.Entries())/1e6, "Mentries")
				b.ReportMetric(0, "ns/op")
				runtime.KeepAlive(ix)
			}
		})
	}
}

// BenchmarkQuery asks for prompts whose blocks are held, alone and while events stream in.
func BenchmarkQuery(b *testing.B) {
	requests := load(b)
	for _, workers := range []int{64, 1000} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) { benchFleet(b, requests, workers) })
	}
}

func benchFleet(b *testing.B, requests [][]uint64, workers int) {
	ix := kvindex.New(kvindex.Config{MaxEntries: 1 << 30, MaxRanks: 1 << 16})
	e := newEngines(requests, workers, *benchEntries/workers, 64)
	fill(ix, e)
	recent := e.now
	var prompts [][]uint64
	for i := max(0, recent-2000); i < recent; i++ {
		prompts = append(prompts, e.prompt(i))
	}
	var stream []event
	for range 300 {
		stream = append(stream, e.next()...)
	}
	for _, n := range []int{64, 512, 4096} {
		var asked [][]uint64
		for _, p := range prompts {
			if len(p)*perID >= n {
				asked = append(asked, appendLocals(nil, p, n))
			}
		}
		for len(asked) > 0 && len(asked) < 20 {
			asked = append(asked, asked...)
		}
		for _, streaming := range []bool{false, true} {
			b.Run(fmt.Sprintf("blocks=%d/streaming=%v", n, streaming), func(b *testing.B) {
				if len(asked) == 0 {
					b.Skip("no prompt is that long")
				}
				benchQueries(b, ix, asked, stream, streaming)
			})
		}
	}
	b.Run("unknown", func(b *testing.B) {
		var m kvindex.Matches
		var spans []float64
		unknown := chain(1<<60, 512)
		b.ReportAllocs()
		for i := range b.N {
			began := time.Now()
			for j := range 100 {
				unknown[0] = scramble(uint64(100*i+j) + 1<<50)
				ix.Query(unknown, &m)
			}
			spans = append(spans, float64(time.Since(began).Nanoseconds())/100)
		}
		slices.Sort(spans)
		b.ReportMetric(spans[len(spans)/2], "p50-ns")
	})
}

func benchQueries(b *testing.B, ix *kvindex.Index, asked [][]uint64, stream []event, streaming bool) {
	var stop atomic.Bool
	var wg sync.WaitGroup
	if streaming {
		wg.Go(func() {
			for !stop.Load() { // the same again and again: stores that are known, removes that are not
				for _, ev := range stream {
					if stop.Load() {
						break
					}
					if ev.remove {
						ix.Remove(ev.rank, worker.Device, ev.engine)
					} else {
						ix.Store(ev.rank, worker.Device, ev.parent, ev.engine, ev.local)
					}
				}
				for _, ev := range slices.Backward(stream) { // and back
					if stop.Load() {
						break
					}
					if !ev.remove {
						ix.Remove(ev.rank, worker.Device, ev.engine)
					}
				}
			}
		})
	}
	var m kvindex.Matches
	took := make([]time.Duration, 0, b.N)
	matched := 0
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		began := time.Now()
		ix.Query(asked[i%len(asked)], &m)
		took = append(took, time.Since(began))
		matched += len(m.Ranks)
	}
	b.StopTimer()
	stop.Store(true)
	wg.Wait()
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "p50-ns")
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns")
	b.ReportMetric(float64(matched)/float64(b.N), "ranks/query")
}
