package kvindex_test

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"spillway/kvindex"
	"spillway/wire"
	"spillway/worker"
)

const wireBlock = 16 // tokens

// message is an event as its worker publishes it.
type message struct {
	rank    worker.Rank
	blocks  int
	payload []byte
}

// encode makes the message of ev, with tokens of a vocabulary of 128k that depend on its blocks.
func encode(ev event, layout wire.KVLayout) message {
	e := wire.KVPublished{Kind: wire.KVRemove, Hashes: ev.engine}
	if !ev.remove {
		e = wire.KVPublished{Kind: wire.KVStore, Hashes: ev.engine, Parent: ev.parent.Hash, HasParent: ev.parent.Set, BlockSize: wireBlock}
		for _, l := range ev.local {
			for i := range uint64(wireBlock) {
				e.Tokens = append(e.Tokens, uint32(scramble(l+i)%128_000))
			}
		}
	}
	return message{ev.rank, len(ev.engine), wire.AppendKVBatch(nil, layout, 0, ev.rank.DP, []wire.KVPublished{e})}
}

// listeners are what messages go through, one for each worker.
type listeners struct {
	ix    *kvindex.Index
	batch wire.KVBatch
	each  []*wire.KVNormalizer
}

func newListeners(ix *kvindex.Index, workers int) *listeners {
	l := &listeners{ix: ix}
	for w := range workers {
		l.each = append(l.each, wire.NewKVNormalizer(worker.Rank{Worker: worker.ID(w)}, wireBlock))
	}
	return l
}

// take applies a message.
func (l *listeners) take(m message) {
	if err := l.batch.Decode(m.payload); err != nil {
		panic(err)
	}
	l.each[m.rank.Worker].Each(&l.batch, func(e *wire.KVEvent) {
		if e.Kind == wire.KVRemove {
			l.ix.Remove(e.Rank, e.Tier, e.Engine)
		} else if s := l.ix.Store(e.Rank, e.Tier, kvindex.Parent{Hash: e.Parent, Set: e.HasParent}, e.Engine, e.Local); s != kvindex.Stored {
			panic(s.String())
		}
	})
}

// BenchmarkEventsFromWire is BenchmarkEvents from the bytes on: decoding, hashing, applying.
func BenchmarkEventsFromWire(b *testing.B) {
	requests := load(b)
	const workers = 64
	for name, layout := range map[string]wire.KVLayout{"array": wire.KVArrays, "map": wire.KVMaps} {
		for _, batch := range []int{64, 4} {
			b.Run(fmt.Sprintf("%s/batch=%d", name, batch), func(b *testing.B) {
				ix := kvindex.New(kvindex.Config{MaxEntries: 1 << 30, MaxRanks: 1 << 16})
				e := newEngines(requests, workers, *benchEntries/workers, batch)
				l := newListeners(ix, workers)
				for ix.Entries() < *benchEntries*9/10 {
					for _, ev := range e.next() {
						l.take(encode(ev, layout))
					}
				}
				var used time.Duration
				blocks := 0
				b.ResetTimer()
				for range b.N {
					b.StopTimer()
					var messages []message
					for range 200 {
						for _, ev := range e.next() {
							messages = append(messages, encode(ev, layout))
						}
					}
					runtime.GC() // what making the messages has left is not ours
					b.StartTimer()
					before := cpu()
					for _, m := range messages {
						l.take(m)
						blocks += m.blocks
					}
					used += cpu() - before
				}
				b.ReportMetric(float64(used.Nanoseconds())/float64(blocks), "cpu-ns/block")
				b.ReportMetric(float64(blocks)/used.Seconds()/1e6, "Mblocks/s/core")
				b.ReportMetric(float64(ix.Entries())/1e6, "Mentries")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
