package wire_test

import (
	"bytes"
	"errors"
	"math"
	"reflect"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"spillway/wire"
	"spillway/worker"
)

// replicaVector is the event of the published messages, which differ in kind and promise.
func replicaVector(kind wire.ReplicaKind, p wire.Promise) wire.ReplicaEvent {
	return wire.ReplicaEvent{
		Model: "m", Tenant: "default", BlockSize: 16, Reservation: "r1", Rank: worker.Rank{Worker: 7},
		Kind: kind, Origin: 0x0102030405060708, Promise: p,
	}
}

func message(payload []byte) [][]byte { return [][]byte{[]byte("dynamo.slot-tracker.v1"), payload} }

var replicaVectors = []struct {
	name, hex string
	size      int
	format    wire.ReplicaFormat
	event     wire.ReplicaEvent
}{
	{"Free", freeHex, 133, wire.FormatTenant, replicaVector(wire.ReplicaFree, wire.Promise{})},
	{"MarkPrefillCompleted", prefillDoneHex, 149, wire.FormatTenant, replicaVector(wire.ReplicaPrefillDone, wire.Promise{})},
	{"AddRequest with hashes", addHashesHex, 297, wire.FormatTenant, replicaVector(wire.ReplicaAdd,
		wire.Promise{Hashes: []uint64{101, math.MaxUint64 - 21, 303}, TrackPrefill: true, PrefillTokens: 48})},
	{"AddRequest with nothing", addEmptyHex, 222, wire.FormatTenant, replicaVector(wire.ReplicaAdd, wire.Promise{Hashes: []uint64{}})},
	{"AddRequest with a duration", addDurationHex, 301, wire.FormatTenant, replicaVector(wire.ReplicaAdd,
		wire.Promise{TrackPrefill: true, PrefillTokens: 48, PrefillDuration: new(1500 * time.Millisecond), ExpectedOutputTokens: new(uint32(5))})},
	{"Free for both revisions", freeBothHex, 155, wire.FormatBoth, replicaVector(wire.ReplicaFree, wire.Promise{})},
}

func TestReplicaVectors(t *testing.T) {
	for _, tt := range replicaVectors {
		want := unhex(t, tt.hex)
		if len(want) != tt.size {
			t.Fatalf("%s: the vector has %d bytes, want %d", tt.name, len(want), tt.size)
		}
		if got := wire.AppendReplica([]byte("x"), &tt.event, tt.format); !bytes.Equal(got, append([]byte("x"), want...)) {
			t.Errorf("%s: AppendReplica = %x, want %x", tt.name, got, want)
		}
		if got, err := wire.ParseReplica(message(want)); err != nil || !reflect.DeepEqual(got, tt.event) {
			t.Errorf("%s: ParseReplica = %+v, %v, want %+v", tt.name, got, err, tt.event)
		}
	}
}

// TestReplicaLaterRevision: the envelope of the later revision has 137 bytes for the first
// vector, and says the same.
func TestReplicaLaterRevision(t *testing.T) {
	e := replicaVector(wire.ReplicaFree, wire.Promise{})
	want := bytes.Replace(unhex(t, freeHex), []byte("\xa9tenant_id"), []byte("\xadrouting_group"), 1)
	got := wire.AppendReplica(nil, &e, wire.FormatGroup)
	if len(got) != 137 || !bytes.Equal(got, want) {
		t.Errorf("AppendReplica(FormatGroup) = %x, want %x", got, want)
	}
	if back, err := wire.ParseReplica(message(got)); err != nil || !reflect.DeepEqual(back, e) {
		t.Errorf("ParseReplica = %+v, %v, want %+v", back, err, e)
	}
}

// envelopeOf is an envelope around an event of the given parts; each is msgp.Raw or a value.
func envelopeOf(event []byte) []byte {
	return payload("model_name", "m", "tenant_id", "t", "block_size", 16, "event", msgp.Raw(event))
}

func eventOf(data any) []byte {
	return payload("request_id", "r", "worker", map[string]any{"worker_id": 7, "dp_rank": 1}, "data", data, "router_id", 9)
}

func addOf(body []byte) msgp.Raw {
	return append(msgp.AppendString(msgp.AppendMapHeader(nil, 1), "AddRequest"), body...)
}

// array is a struct without its keys.
func array(values ...any) msgp.Raw {
	b := msgp.AppendArrayHeader(nil, uint32(len(values)))
	for _, v := range values {
		if raw, ok := v.(msgp.Raw); ok {
			b = append(b, raw...)
			continue
		}
		b, _ = msgp.AppendIntf(b, v)
	}
	return b
}

func TestReplicaAccepts(t *testing.T) {
	base := wire.ReplicaEvent{Model: "m", Tenant: "t", BlockSize: 16, Reservation: "r", Rank: worker.Rank{Worker: 7, DP: 1}, Kind: wire.ReplicaFree, Origin: 9}
	with := func(change func(e *wire.ReplicaEvent)) wire.ReplicaEvent {
		e := base
		change(&e)
		return e
	}
	promise := func(p wire.Promise) wire.ReplicaEvent {
		return with(func(e *wire.ReplicaEvent) { e.Kind, e.Promise = wire.ReplicaAdd, p })
	}
	free := msgp.Raw(eventOf("Free"))
	wide := func(n byte) msgp.Raw { return msgp.Raw{0xcf, 0, 0, 0, 0, 0, 0, 0, n} }
	for _, tt := range []struct {
		name    string
		payload []byte
		want    wire.ReplicaEvent
	}{
		{"no lora_name", envelopeOf(free), base},
		{"lora_name", envelopeOf(payload("request_id", "r", "worker", array(7, 1), "data", "Free", "router_id", 9, "lora_name", "l")),
			with(func(e *wire.ReplicaEvent) { e.LoRA = "l" })},
		{"the later key", payload("model_name", "m", "routing_group", "t", "block_size", 16, "event", free), base},
		{"both keys alike", payload("model_name", "m", "routing_group", "t", "tenant_id", "t", "block_size", 16, "event", free), base},
		{"an empty tenant", payload("model_name", "", "tenant_id", "", "block_size", 16, "event", free),
			with(func(e *wire.ReplicaEvent) { e.Model, e.Tenant = "", "" })},
		{"another order and unknown keys", payload("x", []any{1, nil}, "event", msgp.Raw(payload("y", map[string]any{"a": 1}, "router_id", 9,
			"data", "Free", "worker", map[string]any{"dp_rank": 1, "z": 2.5, "worker_id": 7}, "request_id", "r")),
			"block_size", 16, "tenant_id", "t", "model_name", "m"), base},
		{"wide numbers", payload("model_name", "m", "tenant_id", "t", "block_size", wide(16), "event", msgp.Raw(payload("request_id", "r",
			"worker", msgp.Raw(payload("worker_id", msgp.Raw("\xd3\x00\x00\x00\x00\x00\x00\x00\x07"), "dp_rank", wide(1))), "data", "Free", "router_id", wide(9)))), base},
		{"arrays", array("m", "t", 16, array("r", array(7, 1), "Free", 9, nil)), base},
		{"arrays, add", array("m", "t", 16, array("r", array(7, 1), addOf(array(array(1, 2), false, 5, array(6, array(1, 5)))), 9)),
			promise(wire.Promise{Hashes: []uint64{1, 2}, PrefillTokens: 6, PrefillDuration: new(time.Second + 5), ExpectedOutputTokens: new(uint32(5))})},
		{"a unit variant as a map", envelopeOf(eventOf(map[string]any{"Free": nil})), base},
		{"bytes after the value", append(envelopeOf(free), 1, 2, 3), base},
		{"an empty body", envelopeOf(eventOf(addOf(payload()))), promise(wire.Promise{TrackPrefill: true})},
		{"a hint without a duration", envelopeOf(eventOf(addOf(payload("prefill_load_hint", map[string]any{"initial_effective_prefill_tokens": 3})))),
			promise(wire.Promise{TrackPrefill: true, PrefillTokens: 3})},
		{"a duration too long", envelopeOf(eventOf(addOf(payload("prefill_load_hint", array(3, array(uint64(math.MaxUint64), 0)))))),
			promise(wire.Promise{TrackPrefill: true, PrefillTokens: 3, PrefillDuration: new(time.Duration(math.MaxInt64))})},
		{"the greatest numbers", payload("model_name", "m", "tenant_id", "t", "block_size", uint32(math.MaxUint32), "event", msgp.Raw(payload("request_id", "",
			"worker", array(uint64(math.MaxUint64), uint32(math.MaxUint32)), "data", "MarkPrefillCompleted", "router_id", uint64(math.MaxUint64)))),
			wire.ReplicaEvent{Model: "m", Tenant: "t", BlockSize: math.MaxUint32, Rank: worker.Rank{Worker: math.MaxUint64, DP: math.MaxUint32},
				Kind: wire.ReplicaPrefillDone, Origin: math.MaxUint64}},
	} {
		if got, err := wire.ParseReplica(message(tt.payload)); err != nil || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s: ParseReplica = %+v, %v, want %+v", tt.name, got, err, tt.want)
		}
	}
}

func TestReplicaRefuses(t *testing.T) {
	vector := unhex(t, addHashesHex)
	topic := []byte(wire.ReplicaTopic)
	free := msgp.Raw(eventOf("Free"))
	without := func(keys ...any) [][]byte { return message(payload(keys...)) }
	add := func(pairs ...any) [][]byte { return message(envelopeOf(eventOf(addOf(payload(pairs...))))) }
	data := func(d any) [][]byte { return message(envelopeOf(eventOf(d))) }
	for _, tt := range []struct {
		name   string
		frames [][]byte
		want   error
	}{
		{"nothing", nil, wire.ErrFrames},
		{"one frame", [][]byte{topic}, wire.ErrFrames},
		{"three frames", [][]byte{topic, vector, nil}, wire.ErrFrames},
		{"too long", message(make([]byte, wire.MaxReplicaBytes)), wire.ErrFrames},
		{"a longer topic", [][]byte{[]byte(wire.ReplicaTopic + ".x"), vector}, wire.ErrTopic},
		{"the other topic", [][]byte{[]byte("dynamo.session-affinity.v1"), vector}, wire.ErrTopic},
		{"empty", message(nil), wire.ErrPayload},
		{"text", message([]byte("garbage")), wire.ErrPayload},
		{"no model", without("tenant_id", "t", "block_size", 16, "event", free), wire.ErrPayload},
		{"no tenant", without("model_name", "m", "block_size", 16, "event", free), wire.ErrPayload},
		{"no block size", without("model_name", "m", "tenant_id", "t", "event", free), wire.ErrPayload},
		{"no event", without("model_name", "m", "tenant_id", "t", "block_size", 16), wire.ErrPayload},
		{"two tenants", without("model_name", "m", "tenant_id", "t", "routing_group", "u", "block_size", 16, "event", free), wire.ErrTenant},
		{"a tenant twice", without("model_name", "m", "tenant_id", "t", "tenant_id", "t", "block_size", 16, "event", free), wire.ErrPayload},
		{"a tenant of nil", without("model_name", "m", "tenant_id", nil, "block_size", 16, "event", free), wire.ErrPayload},
		{"a tenant that is not UTF-8", without("model_name", "m", "tenant_id", "\xff", "block_size", 16, "event", free), wire.ErrPayload},
		{"a block size beyond 32 bits", without("model_name", "m", "tenant_id", "t", "block_size", 1<<32, "event", free), wire.ErrPayload},
		{"no request", message(envelopeOf(payload("worker", array(7, 1), "data", "Free", "router_id", 9))), wire.ErrPayload},
		{"no worker", message(envelopeOf(payload("request_id", "r", "data", "Free", "router_id", 9))), wire.ErrPayload},
		{"no data", message(envelopeOf(payload("request_id", "r", "worker", array(7, 1), "router_id", 9))), wire.ErrPayload},
		{"no origin", message(envelopeOf(payload("request_id", "r", "worker", array(7, 1), "data", "Free"))), wire.ErrPayload},
		{"no rank", message(envelopeOf(payload("request_id", "r", "worker", array(7), "data", "Free", "router_id", 9))), wire.ErrPayload},
		{"a rank too much", message(envelopeOf(payload("request_id", "r", "worker", array(7, 1, 2), "data", "Free", "router_id", 9))), wire.ErrPayload},
		{"a rank beyond 32 bits", message(envelopeOf(payload("request_id", "r", "worker", array(7, 1<<32), "data", "Free", "router_id", 9))), wire.ErrPayload},
		{"an unknown variant", data("Frees"), wire.ErrPayload},
		{"another case", data("free"), wire.ErrPayload},
		{"an add without a body", data("AddRequest"), wire.ErrPayload},
		{"no variant", data(map[string]any{}), wire.ErrPayload},
		{"two variants", data(map[string]any{"Free": nil, "MarkPrefillCompleted": nil}), wire.ErrPayload},
		{"a unit variant with a body", data(map[string]any{"Free": 1}), wire.ErrPayload},
		{"a number for data", data(1), wire.ErrPayload},
		{"a negative hash", add("token_sequence", array(1, -22)), wire.ErrPayload},
		{"a hash of text", add("token_sequence", array("1")), wire.ErrPayload},
		{"a hash of 1.0", add("token_sequence", array(1.0)), wire.ErrPayload},
		{"more hashes than bytes", add("token_sequence", msgp.Raw("\xdd\xff\xff\xff\xff")), wire.ErrPayload},
		{"track of nil", add("track_prefill_tokens", nil), wire.ErrPayload},
		{"output below 0", add("expected_output_tokens", -1), wire.ErrPayload},
		{"a hint without tokens", add("prefill_load_hint", map[string]any{}), wire.ErrPayload},
		{"a duration without nanos", add("prefill_load_hint", array(1, map[string]any{"secs": 1})), wire.ErrPayload},
	} {
		got, err := wire.ParseReplica(tt.frames)
		if !errors.Is(err, tt.want) || !reflect.DeepEqual(got, wire.ReplicaEvent{}) {
			t.Errorf("%s: ParseReplica = %+v, %v, want nothing and %v", tt.name, got, err, tt.want)
		}
		if err != nil && len(err.Error()) > 300 {
			t.Errorf("%s: the error has %d bytes: %.80s", tt.name, len(err.Error()), err)
		}
	}
	for n := range vector {
		if got, err := wire.ParseReplica(message(vector[:n])); !errors.Is(err, wire.ErrPayload) {
			t.Errorf("the first %d bytes: ParseReplica = %+v, %v, want %v", n, got, err, wire.ErrPayload)
		}
	}
}

// FuzzReplicaEvent: no bytes make the parser panic or take memory out of proportion, and what
// it accepts comes out the same after it has been encoded in each format and parsed again.
func FuzzReplicaEvent(f *testing.F) {
	for _, v := range replicaVectors {
		f.Add(unhex(f, v.hex))
	}
	f.Add([]byte(array("m", "t", 16, array("r", array(7, 1), addOf(array(array(1, 2), false, 5, array(6, array(1, 5)))), 9))))
	f.Add(payload("model_name", "m", "routing_group", "t", "block_size", 16, "x", []any{1, nil}, "event", msgp.Raw(eventOf(map[string]any{"Free": nil}))))
	f.Fuzz(func(t *testing.T, body []byte) {
		frames := message(body)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		e, err := wire.ParseReplica(frames)
		runtime.ReadMemStats(&after)
		if took := after.TotalAlloc - before.TotalAlloc; took > uint64(10*len(body)+8<<10) {
			t.Errorf("%d bytes made ParseReplica allocate %d", len(body), took)
		}
		if err != nil {
			return
		}
		if !slices.Contains(wire.ReplicaKinds, e.Kind) || e.Kind != wire.ReplicaAdd && !reflect.DeepEqual(e.Promise, wire.Promise{}) {
			t.Fatalf("%x accepted as %+v", body, e)
		}
		for _, format := range []wire.ReplicaFormat{wire.FormatBoth, wire.FormatTenant, wire.FormatGroup} {
			again, err := wire.ParseReplica(message(wire.AppendReplica(nil, &e, format)))
			if err != nil || !reflect.DeepEqual(again, e) {
				t.Fatalf("%+v came out of format %d as %+v, %v", e, format, again, err)
			}
		}
	})
}

func BenchmarkReplica(b *testing.B) {
	e := replicaVector(wire.ReplicaAdd, wire.Promise{TrackPrefill: true, PrefillTokens: 1024})
	for i := range uint64(64) {
		e.Promise.Hashes = append(e.Promise.Hashes, i*0x9e3779b97f4a7c15)
	}
	frames := message(wire.AppendReplica(nil, &e, wire.FormatBoth))
	b.Run("encode", func(b *testing.B) {
		b.ReportAllocs()
		var buf []byte
		for b.Loop() {
			buf = wire.AppendReplica(buf[:0], &e, wire.FormatBoth)
		}
	})
	b.Run("parse", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := wire.ParseReplica(frames); err != nil {
				b.Fatal(err)
			}
		}
	})
}
