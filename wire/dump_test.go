package wire_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"spillway/wire"
	"spillway/worker"
)

// heard lists what a reader of a dump is told.
type heard struct {
	lines  []string
	refuse string // the model whose entry is not wanted
}

func (h *heard) begin(e wire.DumpEntry) bool {
	h.lines = append(h.lines, fmt.Sprintf("%s|%s size %d%s", e.Partition.Model, e.Partition.Tenant, e.BlockSize, e.Error))
	return e.Partition.Model != h.refuse
}

func (h *heard) apply(e *wire.KVEvent) {
	parent := "root"
	if e.HasParent {
		parent = fmt.Sprint(e.Parent)
	}
	h.lines = append(h.lines, fmt.Sprintf("%s w%d r%d %s %s %d %d", e.Kind, e.Rank.Worker, e.Rank.DP, e.Tier, parent, e.Engine, e.Local))
}

// TestDumpExample is the example of 5.1.
func TestDumpExample(t *testing.T) {
	want := `{"llama-3-8b:default":{"model_name":"llama-3-8b","tenant_id":"default","block_size":4,"events":[` +
		`{"worker_id":7,"storage_tier":"device","event":{"event_id":0,"data":{"stored":{"parent_hash":null,"start_position":null,` +
		`"blocks":[{"block_hash":101,"tokens_hash":8906183847324352865,"mm_extra_info":null}]}},"dp_rank":0}},` +
		`{"worker_id":7,"storage_tier":"host_pinned","event":{"event_id":1,"data":{"stored":{"parent_hash":101,"start_position":null,` +
		`"blocks":[{"block_hash":102,"tokens_hash":13603407971999731239,"mm_extra_info":null}]}},"dp_rank":0}}]}}`
	var out bytes.Buffer
	d := wire.NewDumpWriter(&out)
	d.Partition(worker.Partition{Model: "llama-3-8b", Tenant: "default"}, 4)
	rank := worker.Rank{Worker: 7}
	d.Store(&wire.KVEvent{Kind: wire.KVStore, Rank: rank, Engine: []uint64{101}, Local: []uint64{8906183847324352865}})
	d.Store(&wire.KVEvent{Kind: wire.KVStore, Rank: rank, Tier: worker.HostPinned, HasParent: true, Parent: 101,
		Engine: []uint64{102}, Local: []uint64{13603407971999731239}})
	if err := d.Close(); err != nil || out.String() != want {
		t.Errorf("%v\n%s, want\n%s", err, &out, want)
	}
	out.Reset()
	if err := wire.NewDumpWriter(&out).Close(); err != nil || out.String() != "{}" {
		t.Errorf("nothing: %v, %s", err, &out)
	}
}

func TestDumpThereAndBack(t *testing.T) {
	long := &wire.KVEvent{Kind: wire.KVStore, Rank: worker.Rank{Worker: math.MaxUint64, DP: 3}, Tier: worker.External, HasParent: true, Parent: math.MaxUint64}
	for i := range 10_000 {
		long.Engine = append(long.Engine, math.MaxUint64-uint64(i)-1)
		long.Local = append(long.Local, 1<<53+1+uint64(i))
	}
	var out bytes.Buffer
	d := wire.NewDumpWriter(&out)
	d.Partition(worker.Partition{Model: "a:b\"c", Tenant: "d:e"}, 16)
	for range 2 {
		if !d.Store(long) {
			t.Fatal("Store stops")
		}
	}
	d.Failed(worker.Partition{Model: "m", Tenant: "t"}, "no \"luck\"")
	d.Partition(worker.Partition{Model: "empty", Tenant: "t"}, 2)
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if !json.Valid(out.Bytes()) {
		t.Fatal("no JSON")
	}
	var h heard
	var got wire.KVEvent
	counts, err := wire.ReadDump(iotest.HalfReader(&out), h.begin, func(e *wire.KVEvent) {
		switch {
		case len(e.Engine) > 4096:
			t.Errorf("%d blocks in an event", len(e.Engine))
		case len(got.Engine)%10_000 > 0 && e.Parent != got.Engine[len(got.Engine)-1]:
			t.Errorf("parent %d, want %d", e.Parent, got.Engine[len(got.Engine)-1])
		case len(got.Engine) == 0:
			got.Rank, got.Tier, got.HasParent, got.Parent, got.Kind = e.Rank, e.Tier, e.HasParent, e.Parent, e.Kind
		}
		got.Engine, got.Local = append(got.Engine, e.Engine...), append(got.Local, e.Local...)
	})
	if err != nil || counts != (wire.DumpCounts{Applied: 6}) {
		t.Fatalf("%+v, %v", counts, err)
	}
	want := *long
	want.Engine, want.Local = slices.Concat(long.Engine, long.Engine), slices.Concat(long.Local, long.Local)
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Error("what was read is not what was written")
	}
	entries := []string{`a:b"c|d:e size 16`, `m|t size 0no "luck"`, "empty|t size 2"}
	if !slices.Equal(h.lines, entries) {
		t.Errorf("%q, want %q", h.lines, entries)
	}
}

// TestDumpForeign is what other indexers write, and 5.4.
func TestDumpForeign(t *testing.T) {
	one := func(event string) string { return `{"m:t":{"block_size":4,"events":[` + event + `]}}` }
	stored := func(more, stored string) string {
		return one(`{"worker_id":7` + more + `,"event":{"event_id":0,"data":{"stored":{` + stored + `"blocks":[{"block_hash":1,"tokens_hash":2}]}},"dp_rank":1}}`)
	}
	const good = "stored w7 r1 device root [1] [2]"
	for _, tt := range []struct {
		name, body string
		want       []string
		counts     wire.DumpCounts
	}{
		{"nothing", `{}`, nil, wire.DumpCounts{}},
		{"no tier", stored("", ""), []string{"m|t size 4", good}, wire.DumpCounts{Applied: 1}},
		{"position 0", stored("", `"start_position":0,`), []string{"m|t size 4", good}, wire.DumpCounts{Applied: 1}},
		{"position and parent", stored("", `"start_position":3,"parent_hash":9,`), []string{"m|t size 4", "stored w7 r1 device 9 [1] [2]"}, wire.DumpCounts{Applied: 1}},
		{"position alone", stored("", `"start_position":3,"parent_hash":null,`), []string{"m|t size 4"}, wire.DumpCounts{Positional: 1}},
		{"residency", stored(`,"residency_domain":"worker","state_source":{"a":1}`, ""), []string{"m|t size 4", good}, wire.DumpCounts{Applied: 1}},
		{"no residency", stored(`,"residency_domain":null`, ""), []string{"m|t size 4"}, wire.DumpCounts{Residency: 1}},
		{"other residency", stored(`,"residency_domain":"cache_owner"`, ""), []string{"m|t size 4"}, wire.DumpCounts{Residency: 1}},
		{"residency of another type", stored(`,"residency_domain":["worker"]`, ""), []string{"m|t size 4"}, wire.DumpCounts{Residency: 1}},
		{"other tier", stored(`,"storage_tier":"tape"`, ""), []string{"m|t size 4"}, wire.DumpCounts{Malformed: 1}},
		{"disk", stored(`,"storage_tier":"disk"`, ""), []string{"m|t size 4", "stored w7 r1 disk root [1] [2]"}, wire.DumpCounts{Applied: 1}},
		{"removed", one(`{"worker_id":7,"storage_tier":"disk","event":{"data":{"removed":{"block_hashes":[1,18446744073709551615]}}}}`),
			[]string{"m|t size 4", "removed w7 r0 disk root [1 18446744073709551615] []"}, wire.DumpCounts{Applied: 1}},
		{"cleared", one(`{"worker_id":7,"event":{"data":"cleared","dp_rank":2}}`), []string{"m|t size 4", "cleared w7 r2 device root [] []"}, wire.DumpCounts{Applied: 1}},
		{"bad ones between good ones", one(strings.Join([]string{
			`{"worker_id":7,"event":{"data":"cleared"}}`, `7`, `null`, `{}`, `{"worker_id":-1,"event":{"data":"cleared"}}`,
			`{"worker_id":1.5,"event":{"data":"cleared"}}`, `{"worker_id":18446744073709551616,"event":{"data":"cleared"}}`,
			`{"worker_id":7,"event":{"data":"lost"}}`, `{"worker_id":7,"event":{"data":{}}}`, `{"worker_id":7,"event":{"data":{"stored":{},"removed":{}}}}`,
			`{"worker_id":7,"event":{"data":{"stored":{"blocks":[{"block_hash":1}]}}}}`, `{"worker_id":7,"event":{"data":"cleared","dp_rank":4294967295}}`,
			`{"event":{"data":"cleared"}}`, `{"worker_id":8,"event":{"data":"cleared"}}`}, ",")),
			[]string{"m|t size 4", "cleared w7 r0 device root [] []", "cleared w8 r0 device root [] []"}, wire.DumpCounts{Applied: 2, Malformed: 12}},
		{"unknown fields", `{"m:t":{"version":[1,{"a":null}],"block_size":4,"x":"y","events":[],"z":7}}`, []string{"m|t size 4"}, wire.DumpCounts{}},
		{"no events", `{"m:t":{"block_size":4}}`, []string{"m|t size 4"}, wire.DumpCounts{}},
		{"error", `{"m:t":{"error":"it broke"},"n:t":{"block_size":2,"events":[]}}`, []string{"m|t size 0it broke", "n|t size 2"}, wire.DumpCounts{}},
		{"key of many colons", `{"a:b:c":{"block_size":4}}`, []string{"a:b|c size 4"}, wire.DumpCounts{}},
		{"key without colon", `{"a":{"block_size":4}}`, []string{"a|default size 4"}, wire.DumpCounts{}},
		{"names before the key", `{"a:b:c":{"model_name":"a","tenant_id":"b:c","block_size":4}}`, []string{"a|b:c size 4"}, wire.DumpCounts{}},
		{"not wanted", `{"no:t":{"block_size":4,"events":[{"a":1},7]},"m:t":{"block_size":2,"events":[]}}`, []string{"no|t size 4", "m|t size 2"}, wire.DumpCounts{Skipped: 2}},
	} {
		h := heard{refuse: "no"}
		counts, err := wire.ReadDump(strings.NewReader(tt.body), h.begin, h.apply)
		if err != nil || counts != tt.counts || !slices.Equal(h.lines, tt.want) {
			t.Errorf("%s: %q, %+v, %v, want %q, %+v", tt.name, h.lines, counts, err, tt.want, tt.counts)
		}
	}
}

func TestDumpRefuses(t *testing.T) {
	broken := errors.New("broken")
	for _, tt := range []struct {
		name string
		body io.Reader
		also error
	}{
		{"nothing", strings.NewReader(""), io.ErrUnexpectedEOF},
		{"a list", strings.NewReader("[]"), nil},
		{"cut", strings.NewReader(`{"m:t":{"block_size":4,"events":[`), io.ErrUnexpectedEOF},
		{"no JSON", strings.NewReader(`{"m:t":{"block_size":4,"events":[}`), nil},
		{"an entry that is none", strings.NewReader(`{"m:t":7}`), nil},
		{"events that are no list", strings.NewReader(`{"m:t":{"block_size":4,"events":{}}}`), nil},
		{"events first", strings.NewReader(`{"m:t":{"events":[],"block_size":4}}`), nil},
		{"events twice", strings.NewReader(`{"m:t":{"block_size":4,"events":[],"events":[]}}`), nil},
		{"another partition at the end", strings.NewReader(`{"a:b:c":{"block_size":4,"events":[],"model_name":"a","tenant_id":"b:c"}}`), nil},
		{"negative size", strings.NewReader(`{"m:t":{"block_size":-4,"events":[]}}`), nil},
		{"an error below", io.MultiReader(strings.NewReader(`{"m:t":`), iotest.ErrReader(broken)), broken},
		{"an endless value", io.MultiReader(strings.NewReader(`{"m:t":{"block_size":4,"events":["`), endless{}), nil},
	} {
		var h heard
		_, err := wire.ReadDump(tt.body, h.begin, h.apply)
		if !errors.Is(err, wire.ErrDump) || tt.also != nil && !errors.Is(err, tt.also) {
			t.Errorf("%s: %v, want %v and %v", tt.name, err, wire.ErrDump, tt.also)
		}
	}
}

// endless is text without an end.
type endless struct{}

func (endless) Read(p []byte) (int, error) {
	return copy(p, strings.Repeat("x", 4096)), nil
}

func TestDumpWriterStops(t *testing.T) {
	full := errors.New("full")
	d := wire.NewDumpWriter(failing{full})
	d.Partition(worker.Partition{Model: "m", Tenant: "t"}, 4)
	blocks := make([]uint64, 1000)
	if d.Store(&wire.KVEvent{Kind: wire.KVStore, Engine: blocks, Local: blocks}) {
		t.Error("Store goes on")
	}
	if err := d.Close(); !errors.Is(err, full) {
		t.Errorf("Close: %v, want %v", err, full)
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }
