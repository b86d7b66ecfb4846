package wire_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"spillway/wire"
	"spillway/worker"
)

// stream is payloads of one rank: stores of so many blocks of 16 tokens each, every one after the
// one before, of a vocabulary of 128k.
func stream(batches, blocks int, layout wire.KVLayout) [][]byte {
	r := rand.New(rand.NewPCG(1, 2))
	var payloads [][]byte
	parent := uint64(0)
	for i := range batches {
		e := wire.KVPublished{Kind: wire.KVStore, BlockSize: 16, Parent: parent, HasParent: i > 0}
		for range blocks {
			e.Hashes = append(e.Hashes, r.Uint64())
			for range 16 {
				e.Tokens = append(e.Tokens, r.Uint32N(128_000))
			}
		}
		parent = e.Hashes[blocks-1]
		payloads = append(payloads, wire.AppendKVBatch(nil, layout, 1.5, 0, []wire.KVPublished{e}))
	}
	return payloads
}

// cpu is the CPU time of the process, which says more than the clock on a machine with other work.
func cpu(b *testing.B) time.Duration {
	var use syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &use); err != nil {
		b.Fatal(err)
	}
	return time.Duration(use.Utime.Nano() + use.Stime.Nano())
}

// each runs a benchmark for both sizes of batches and both layouts, and tells blocks per second of
// CPU time.
func each(b *testing.B, run func(b *testing.B, payloads [][]byte)) {
	for name, layout := range map[string]wire.KVLayout{"array": wire.KVArrays, "map": wire.KVMaps} {
		for _, blocks := range []int{64, 4} {
			b.Run(fmt.Sprintf("%s/blocks=%d", name, blocks), func(b *testing.B) {
				payloads := stream(256, blocks, layout)
				b.SetBytes(int64(len(payloads[0])))
				b.ReportAllocs()
				b.ResetTimer()
				began := cpu(b)
				run(b, payloads)
				spent := cpu(b) - began
				b.ReportMetric(float64(b.N)*float64(blocks)/spent.Seconds(), "blocks/cpu-s")
				b.ReportMetric(float64(spent.Nanoseconds())/float64(b.N), "cpu-ns/op")
			})
		}
	}
}

// BenchmarkKVDecode is a batch to what it says.
func BenchmarkKVDecode(b *testing.B) {
	each(b, func(b *testing.B, payloads [][]byte) {
		var batch wire.KVBatch
		for i := range b.N {
			if err := batch.Decode(payloads[i%len(payloads)]); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkKVNormalize is a batch to what an index takes, tokens hashed.
func BenchmarkKVNormalize(b *testing.B) {
	each(b, func(b *testing.B, payloads [][]byte) {
		var batch wire.KVBatch
		n := wire.NewKVNormalizer(worker.Rank{}, 16)
		sum := 0
		for i := range b.N {
			if err := batch.Decode(payloads[i%len(payloads)]); err != nil {
				b.Fatal(err)
			}
			n.Each(&batch, func(e *wire.KVEvent) { sum += len(e.Local) })
		}
		if sum%b.N != 0 || sum == 0 {
			b.Fatal("blocks are missing")
		}
	})
}

// BenchmarkDump writes and reads a million blocks in runs of 64.
func BenchmarkDump(b *testing.B) {
	const blocks, run = 1 << 20, 64
	e := wire.KVEvent{Kind: wire.KVStore, Rank: worker.Rank{Worker: 7}, Engine: make([]uint64, run), Local: make([]uint64, run)}
	var out bytes.Buffer
	write := func() {
		out.Reset()
		d := wire.NewDumpWriter(&out)
		d.Partition(worker.Partition{Model: "m", Tenant: "t"}, 16)
		for range blocks / run {
			for i := range run {
				e.Engine[i] = e.Engine[i]*0x9e3779b97f4a7c15 + 1
				e.Local[i] = ^e.Engine[i]
			}
			d.Store(&e)
		}
		if err := d.Close(); err != nil {
			b.Fatal(err)
		}
	}
	write()
	b.Run("write", func(b *testing.B) {
		for b.Loop() {
			write()
		}
		b.ReportMetric(float64(b.N)*blocks/b.Elapsed().Seconds(), "blocks/s")
	})
	b.Run("read", func(b *testing.B) {
		for b.Loop() {
			counts, err := wire.ReadDump(bytes.NewReader(out.Bytes()), func(wire.DumpEntry) bool { return true }, func(*wire.KVEvent) {})
			if err != nil || counts.Applied != blocks/run {
				b.Fatal(counts, err)
			}
		}
		b.ReportMetric(float64(b.N)*blocks/b.Elapsed().Seconds(), "blocks/s")
	})
}
