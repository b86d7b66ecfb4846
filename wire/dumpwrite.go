package wire

import (
	"encoding/json"
	"io"
	"strconv"

	"spillway/worker"
)

const (
	dumpFlush  = 32 << 10
	dumpBlocks = 4096 // of one event; readers hold a whole one
)

// DumpWriter writes what indexes hold as the JSON object that GET /dump answers with, without ever
// having much of it in memory. An error of the writer below stops it; Close tells of it.
type DumpWriter struct {
	w       io.Writer
	buf     []byte
	err     error
	entries int
	open    bool // an entry's list of events is
	events  uint64
}

// NewDumpWriter returns a DumpWriter on w, which only gets large pieces.
func NewDumpWriter(w io.Writer) *DumpWriter {
	return &DumpWriter{w: w, buf: []byte{'{'}}
}

// Partition begins the entry of a partition.
func (d *DumpWriter) Partition(name worker.Partition, blockSize uint32) {
	d.entry(name)
	d.buf = append(d.buf, `"model_name":`...)
	d.text(name.Model)
	d.buf = append(d.buf, `,"tenant_id":`...)
	d.text(name.Tenant)
	d.buf = append(d.buf, `,"block_size":`...)
	d.buf = strconv.AppendUint(d.buf, uint64(blockSize), 10)
	d.buf = append(d.buf, `,"events":[`...)
	d.open = true
}

// Failed writes, in place of a partition's entry, why there is none.
func (d *DumpWriter) Failed(name worker.Partition, why string) {
	d.entry(name)
	d.buf = append(d.buf, `"error":`...)
	d.text(why)
	d.buf = append(d.buf, '}')
}

// Store adds a store to the partition begun last. It has to come after the stores of its parents,
// those of the device before all others. It returns false if there is no use in going on.
func (d *DumpWriter) Store(e *KVEvent) bool {
	parent, hasParent := e.Parent, e.HasParent
	for from := 0; from < len(e.Engine); from += dumpBlocks {
		to := min(from+dumpBlocks, len(e.Engine))
		d.store(e, parent, hasParent, from, to)
		parent, hasParent = e.Engine[to-1], true
	}
	return d.err == nil
}

func (d *DumpWriter) store(e *KVEvent, parent uint64, hasParent bool, from, to int) {
	if d.events > 0 {
		d.buf = append(d.buf, ',')
	}
	d.buf = strconv.AppendUint(append(d.buf, `{"worker_id":`...), uint64(e.Rank.Worker), 10)
	d.buf = append(append(d.buf, `,"storage_tier":"`...), e.Tier.String()...)
	d.buf = strconv.AppendUint(append(d.buf, `","event":{"event_id":`...), d.events, 10)
	d.buf = append(d.buf, `,"data":{"stored":{"parent_hash":`...)
	if hasParent {
		d.buf = strconv.AppendUint(d.buf, parent, 10)
	} else {
		d.buf = append(d.buf, "null"...)
	}
	d.buf = append(d.buf, `,"start_position":null,"blocks":[`...)
	for i := from; i < to; i++ {
		if i > from {
			d.buf = append(d.buf, ',')
		}
		d.buf = strconv.AppendUint(append(d.buf, `{"block_hash":`...), e.Engine[i], 10)
		d.buf = strconv.AppendUint(append(d.buf, `,"tokens_hash":`...), e.Local[i], 10)
		d.buf = append(d.buf, `,"mm_extra_info":null}`...) // the hash already reflects it
		d.flush(dumpFlush)
	}
	d.buf = append(d.buf, `]}},"dp_rank":`...)
	d.buf = append(strconv.AppendUint(d.buf, uint64(e.Rank.DP), 10), "}}"...)
	d.events++
}

// Close ends the object and writes what is left. It does not close the writer below, whose first
// error it returns.
func (d *DumpWriter) Close() error {
	d.end()
	d.buf = append(d.buf, '}')
	d.flush(0)
	return d.err
}

// entry begins a value under the name of a partition.
func (d *DumpWriter) entry(name worker.Partition) {
	d.end()
	if d.entries > 0 {
		d.buf = append(d.buf, ',')
	}
	d.entries++
	d.text(name.Model + ":" + name.Tenant)
	d.buf = append(d.buf, ":{"...)
}

// end ends the list of events and the entry that it is in.
func (d *DumpWriter) end() {
	if d.open {
		d.buf = append(d.buf, "]}"...)
	}
	d.open, d.events = false, 0
}

func (d *DumpWriter) text(s string) {
	quoted, err := json.Marshal(s)
	if err == nil { // as for all strings
		d.buf = append(d.buf, quoted...)
	}
}

// flush writes the buffer if it has more than so many bytes.
func (d *DumpWriter) flush(above int) {
	if len(d.buf) <= above {
		return
	}
	if d.err == nil {
		_, d.err = d.w.Write(d.buf)
	}
	d.buf = d.buf[:0]
}
