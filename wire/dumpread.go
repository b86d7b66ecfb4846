package wire

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"spillway/worker"
)

// MaxDumpValue bounds one event of a dump, and anything else in it that has to be in memory whole.
const MaxDumpValue = 32 << 20

// ErrDump means that a body is no dump, or not all of one. What came before it has been applied.
var ErrDump = errors.New("wire: not a dump")

// DumpEntry is what a dump says of a partition.
type DumpEntry struct {
	Partition worker.Partition
	BlockSize uint32 // 0 with Error
	Error     string // why the peer could not dump it, or ""
}

// DumpCounts are numbers of a dump's events.
type DumpCounts struct {
	Applied    uint64
	Skipped    uint64 // of entries that were not wanted
	Malformed  uint64
	Residency  uint64 // of blocks that are not kept by their worker
	Positional uint64 // that tell a position instead of the parent before it
}

// ReadDump reads a dump. It calls begin with each entry; if that returns true, it calls apply with
// the entry's events, in their order. What apply is given is valid until it returns. Fields that are
// not known are ignored, and events that can not be used are left out and counted. The error wraps
// ErrDump, and the reader's if it has one.
func ReadDump(r io.Reader, begin func(DumpEntry) bool, apply func(*KVEvent)) (DumpCounts, error) {
	d := dumpReader{limit: limit{r: r}, begin: begin, apply: apply}
	d.dec = json.NewDecoder(&d.limit)
	if err := d.object(d.entry); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return d.counts, fmt.Errorf("%w: %w", ErrDump, err)
	}
	return d.counts, nil
}

// limit stops a reader that is asked for more than left.
type limit struct {
	r    io.Reader
	left int
}

func (l *limit) Read(p []byte) (int, error) {
	if l.left <= 0 {
		return 0, fmt.Errorf("a value of more than %d bytes", MaxDumpValue)
	}
	n, err := l.r.Read(p[:min(len(p), l.left)])
	l.left -= n
	return n, err
}

type dumpReader struct {
	limit  limit
	dec    *json.Decoder
	begin  func(DumpEntry) bool
	apply  func(*KVEvent)
	counts DumpCounts
	event  KVEvent
}

// object reads an object, whose values read reads.
func (d *dumpReader) object(read func(key string) error) error {
	if err := d.delim('{'); err != nil {
		return err
	}
	for d.dec.More() {
		t, err := d.token()
		if err != nil {
			return err
		}
		if err := read(t.(string)); err != nil { // of an object the decoder gives no other keys
			return err
		}
	}
	return d.delim('}')
}

func (d *dumpReader) token() (json.Token, error) {
	d.limit.left = MaxDumpValue
	return d.dec.Token()
}

func (d *dumpReader) delim(want json.Delim) error {
	t, err := d.token()
	if err == nil && t != want {
		err = fmt.Errorf("%v where %v should be", t, want)
	}
	return err
}

func (d *dumpReader) value(v any) error {
	d.limit.left = MaxDumpValue
	return d.dec.Decode(v)
}

// entry reads the value under a name. The names in it are better than those that the key is made of.
func (d *dumpReader) entry(key string) error {
	var model, tenant *string
	var e DumpEntry
	begun := false
	name := func() worker.Partition {
		p := splitKey(key)
		if model != nil && tenant != nil {
			p = worker.Partition{Model: *model, Tenant: *tenant}
		}
		return p
	}
	err := d.object(func(field string) error {
		switch field {
		case "model_name":
			return d.value(&model)
		case "tenant_id":
			return d.value(&tenant)
		case "block_size":
			return d.value(&e.BlockSize)
		case "error":
			return d.value(&e.Error)
		case "events":
			if e.BlockSize == 0 || begun {
				return fmt.Errorf("%q: events before their block_size, or twice", key)
			}
			begun, e.Partition = true, name()
			return d.events(d.begin(e))
		}
		return d.value(&ignored{})
	})
	switch {
	case err != nil:
		return err
	case begun && e.Partition != name(): // its blocks are in the wrong place now
		return fmt.Errorf("%q: its names come after its events", key)
	case begun:
	case e.Error != "":
		e.Partition, e.BlockSize = name(), 0
		d.begin(e)
	case e.BlockSize > 0:
		e.Partition = name()
		d.begin(e)
	}
	return nil
}

// splitKey takes a key apart that an entry without names has.
func splitKey(key string) worker.Partition {
	at := strings.LastIndexByte(key, ':')
	if at < 0 {
		return worker.Partition{Model: key, Tenant: worker.DefaultTenant}
	}
	return worker.Partition{Model: key[:at], Tenant: key[at+1:]}
}

// events reads a list of events, and applies them if they are wanted.
func (d *dumpReader) events(wanted bool) error {
	if err := d.delim('['); err != nil {
		return err
	}
	for d.dec.More() {
		if !wanted {
			if err := d.value(&ignored{}); err != nil {
				return err
			}
			d.counts.Skipped++
			continue
		}
		var e dumpEvent
		if err := d.value(&e); isMismatch(err) {
			d.counts.Malformed++
			continue
		} else if err != nil {
			return err
		}
		*d.counter(e.fill(&d.event))++
	}
	return d.delim(']')
}

// ignored is a value that is not looked at.
type ignored struct{}

// UnmarshalJSON takes anything.
func (*ignored) UnmarshalJSON([]byte) error { return nil }

// counter applies an event that is usable, and is where it counts.
func (d *dumpReader) counter(use dumpUse) *uint64 {
	switch use {
	case dumpApply:
		d.apply(&d.event)
		return &d.counts.Applied
	case dumpResidency:
		return &d.counts.Residency
	case dumpPositional:
		return &d.counts.Positional
	}
	return &d.counts.Malformed
}

// isMismatch tells whether err is that a value, read whole, has another shape than it should.
func isMismatch(err error) bool {
	var other *json.UnmarshalTypeError
	return errors.As(err, &other) || errors.Is(err, errDumpData)
}

// dumpUse is what can be done with an event.
type dumpUse uint8

const (
	dumpMalformed dumpUse = iota
	dumpApply
	dumpResidency
	dumpPositional
)

type dumpEvent struct {
	Worker    *uint64         `json:"worker_id"`
	Tier      *string         `json:"storage_tier"`
	Residency json.RawMessage `json:"residency_domain"` // nil if it is not there
	Event     struct {
		DP   uint32    `json:"dp_rank"`
		Data *dumpData `json:"data"`
	} `json:"event"`
}

// fill makes a KVEvent of a dump's.
func (e *dumpEvent) fill(out *KVEvent) dumpUse {
	if e.Residency != nil && string(e.Residency) != `"worker"` {
		return dumpResidency
	}
	data := e.Event.Data
	if e.Worker == nil || data == nil || e.Event.DP == worker.AnyDP {
		return dumpMalformed
	}
	*out = KVEvent{Rank: worker.Rank{Worker: worker.ID(*e.Worker), DP: e.Event.DP}, Engine: out.Engine[:0], Local: out.Local[:0]}
	if e.Tier != nil {
		var err error
		if out.Tier, err = worker.ParseTier(*e.Tier); err != nil {
			return dumpMalformed
		}
	}
	switch {
	case data.cleared:
		out.Kind = KVClear
	case data.Removed != nil:
		out.Kind = KVRemove
		out.Engine = append(out.Engine, data.Removed.Blocks...)
	default:
		return data.Stored.fill(out)
	}
	return dumpApply
}

type dumpStored struct {
	Parent   *uint64 `json:"parent_hash"`
	Position *uint64 `json:"start_position"`
	Blocks   []struct {
		Engine *uint64 `json:"block_hash"`
		Local  *uint64 `json:"tokens_hash"`
	} `json:"blocks"`
}

func (s *dumpStored) fill(out *KVEvent) dumpUse {
	out.Kind = KVStore
	if s.Parent != nil {
		out.Parent, out.HasParent = *s.Parent, true
	} else if s.Position != nil && *s.Position > 0 {
		return dumpPositional
	}
	for _, b := range s.Blocks {
		if b.Engine == nil || b.Local == nil {
			return dumpMalformed
		}
		out.Engine, out.Local = append(out.Engine, *b.Engine), append(out.Local, *b.Local)
	}
	return dumpApply
}

var errDumpData = errors.New("wire: data of an event that is none of stored, removed and cleared")

// dumpData is one of its fields.
type dumpData struct {
	Stored  *dumpStored `json:"stored"`
	Removed *struct {
		Blocks []uint64 `json:"block_hashes"`
	} `json:"removed"`
	cleared bool
}

// UnmarshalJSON reads an object of one key, or the word for what has none.
func (d *dumpData) UnmarshalJSON(b []byte) error {
	if string(b) == `"cleared"` {
		d.cleared = true
		return nil
	}
	type plain dumpData // without this method
	if err := json.Unmarshal(b, (*plain)(d)); err != nil {
		return err
	}
	if (d.Stored == nil) == (d.Removed == nil) {
		return errDumpData
	}
	return nil
}
